"""What a rank computes, sends and holds in a step for the matrices that it owns, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_distopt.layout.matrices import MatrixSpec
from megatron_distopt.layout.owners import MatrixOwner, OwnerPlan, Travel

#: Of an element of a direction and of an update, with torch's formula.
DIRECTION_NBYTES = 2


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Of one rank for one buffer.

    Args:
        num_matrices: that it orthogonalizes.
        flops: floating-point operations of that.
        sent_nbytes: to other data-parallel ranks: its pieces to owners, and updates of what it owns back.
        gathered_nbytes: to tensor-parallel ranks, which gather matrices that they share.
        blocks_nbytes: the most that is allocated at a time for blocks on their way and for the iteration; directions,
            of which every rank has those of its shards, not included.
    """

    num_matrices: int
    flops: int
    sent_nbytes: int
    gathered_nbytes: int
    blocks_nbytes: int


def matrix_work_of(
    plan: OwnerPlan, specs: Mapping[str, MatrixSpec], rank: int, width: int = DIRECTION_NBYTES
) -> MatrixWork:
    """Works out one rank.

    Args:
        plan: of the buffer.
        specs: by name, those of the plan.
        rank: in the data-parallel group.
        width: bytes of an element of a direction.

    >>> from megatron_distopt.layout import ParamSpec, lay_out, plan_owners
    >>> layout = lay_out([ParamSpec("a", 4), ParamSpec("b", 8)], num_shards=2, alignment_numel=1)
    >>> specs = {"a": MatrixSpec(2, 2), "b": MatrixSpec(2, 4)}
    >>> matrix_work_of(plan_owners(layout, specs), specs, 1).sent_nbytes  # half of a 2 x 4 matrix is rank 0's
    4
    """
    owned = plan.owned_by(rank)
    return MatrixWork(
        num_matrices=sum(len(owner.block.shapes) for owner in owned),
        flops=sum(owner.cost for owner in owned),
        sent_nbytes=width * (_numel(plan.leaving(rank)) + _numel(plan.arriving(rank))),
        gathered_nbytes=width * sum(_gathered_numel(owner, specs[owner.name]) for owner in owned),
        blocks_nbytes=width * _blocks_numel(owned, specs),
    )


def _numel(travels: Iterable[Travel]) -> int:
    return sum(travel.in_block.numel for travel in travels)


def _gathered_numel(owner: MatrixOwner, spec: MatrixSpec) -> int:
    """A rank sends its part to all others that share the matrix."""
    return 0 if spec.cut is None or not spec.cut.is_gathered else (spec.cut.size - 1) * owner.block.in_param.numel


def _blocks_numel(owned: Iterable[MatrixOwner], specs: Mapping[str, MatrixSpec]) -> int:
    """While a block is orthogonalized, the next one comes and the one before it goes back, see [Note: rounds of travel]
    in optimizer/owners/exchange.py."""
    held, iterations = dict[int, int](), dict[int, int]()
    for owner in owned:
        number = -1 if owner.round is None else owner.round
        needed = max(_iteration_numel(shape, owner, specs[owner.name]) for shape in owner.block.shapes)
        iterations[number] = max(iterations.get(number, 0), needed)
        if owner.round is not None:
            held[number] = owner.block.in_param.numel
    return max((sum(held.get(k + near, 0) for near in (-1, 0, 1)) + iterations[k] for k in iterations), default=0)


def _iteration_numel(shape: tuple[int, int], owner: MatrixOwner, spec: MatrixSpec) -> int:
    """Matrix before and after a step of the iteration, its product with its transpose, and a polynomial of that."""
    short, long = sorted(spec.whole(shape) if spec.cut is not None and spec.cut.is_gathered else shape)
    is_copied = len(owner.block.shapes) > 1 or spec.cut is not None
    return (2 + is_copied) * short * long + 2 * short * short
