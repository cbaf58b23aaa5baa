"""How even a plan of matrix owners is: padding, bytes on the wire, cost of the update, memory of the state.

Everything is worked out for all ranks at a cost that depends on the number of params plus that of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megatron_distopt.layout.owners import EqualPieces, OwnerPlan, pieces_of


@dataclass(frozen=True, slots=True)
class MatrixWidths:
    """Bytes an element.

    Args:
        bucket: that a reduce-scatter and an all-gather move: both dtypes together.
        travel: that a piece has on its way to the matrix owner; its update has as many on the way back. Muon
            orthogonalizes in bfloat16, so that 2 bytes lose nothing.
        matrix_state, other_state: main param and moments of a matrix, and of any other param.
    """

    bucket: int = 2 + 4
    travel: int = 2
    matrix_state: int = 4 + 4
    other_state: int = 4 + 8


@dataclass(frozen=True, slots=True)
class Balance:
    """A plan in numbers. An imbalance is the largest of all ranks divided by the average.

    Args:
        padding: elements of the buffer that belong to no param, as a fraction of those that do.
        num_blocks, num_travelling: blocks of matrices, which is to say matrices unless their elements alternate, and
            those that travel.
        bucket_nbytes: that every rank sends for the reduce-scatters and the all-gathers of a step.
        travel_nbytes: that a rank sends for matrices, there and back, on average.
        most_travel_nbytes: that the rank sends that sends most.
        cost_imbalance: of the updates of matrices.
        most_cost: of the rank with the costliest updates.
        least_cost_imbalance: the bound of [Note: balance] in owners.py.
        state_imbalance: of the bytes of main params and moments.
    """

    padding: float
    num_blocks: int
    num_travelling: int
    bucket_nbytes: float
    travel_nbytes: float
    most_travel_nbytes: int
    cost_imbalance: float
    most_cost: int
    least_cost_imbalance: float
    state_imbalance: float

    @property
    def extra_wire(self) -> float:
        """What travels, as a fraction of what a rank sends for its buckets."""
        return self.travel_nbytes / self.bucket_nbytes if self.bucket_nbytes else 0.0


class _OfRanks:
    """A number for each rank, to which the same is added for many neighbours at once."""

    def __init__(self, num_ranks: int) -> None:
        self._steps = [0] * (num_ranks + 1)

    def add(self, ranks: range, number: int) -> None:
        self._steps[ranks.start] += number
        self._steps[ranks.stop] -= number

    @property
    def numbers(self) -> list[int]:
        return list(accumulate(self._steps[:-1]))

    @property
    def imbalance(self) -> float:
        numbers = self.numbers
        return max(numbers) * len(numbers) / sum(numbers) if any(numbers) else 1.0


def balance_of(plan: OwnerPlan, widths: MatrixWidths | None = None) -> Balance:
    """Measures a plan.

    Args:
        plan: of one buffer.
        widths: see `MatrixWidths`; those of Muon and AdamW with bf16 params and fp32 grads where None.
    """
    widths = widths or MatrixWidths()
    layout, num_ranks = plan.layout, plan.layout.num_shards
    costs, sent, state = _OfRanks(num_ranks), _OfRanks(num_ranks), _OfRanks(num_ranks)
    for slot in layout.slots:
        width = widths.matrix_state if slot.name in plan.owners_of else widths.other_state
        for piece in pieces_of(layout, slot.bucket, slot.in_buffer):
            state.add(piece.ranks, piece.numel * width)
    for owner in plan.owners:
        costs.add(range(owner.rank, owner.rank + 1), owner.cost)
        _add_travel(sent, pieces_of(layout, owner.bucket, owner.in_buffer), owner.rank, widths.travel)
    numel, all_costs = sum(slot.in_buffer.numel for slot in layout.slots), sum(costs.numbers)
    return Balance(
        padding=layout.numel / numel - 1,
        num_blocks=len(plan.owners),
        num_travelling=sum(owner.round is not None for owner in plan.owners),
        bucket_nbytes=layout.numel * widths.bucket * (num_ranks - 1) / num_ranks,
        travel_nbytes=sum(sent.numbers) / num_ranks,
        most_travel_nbytes=max(sent.numbers),
        cost_imbalance=costs.imbalance,
        most_cost=max(costs.numbers),
        least_cost_imbalance=max([1.0, *(owner.cost * num_ranks / all_costs for owner in plan.owners)]),
        state_imbalance=state.imbalance,
    )


def _add_travel(sent: _OfRanks, pieces: tuple[EqualPieces, ...], owner: int, width: int) -> None:
    """Adds the bytes that holders send to the owner, and the owner to holders."""
    own = range(owner, owner + 1)
    for piece in pieces:
        sent.add(piece.ranks, piece.numel * width)
        others = len(piece.ranks) - (owner in piece.ranks)
        sent.add(own, others * piece.numel * width)
        if owner in piece.ranks:
            sent.add(own, -piece.numel * width)
