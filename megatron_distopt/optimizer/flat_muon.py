"""Muon for flat params: the two element-wise parts on the shards of a rank, and between them the matrices that it owns.

See [Note: three parts of Muon] in muon.py and [Note: matrix owners] in layout/owners.py.

[Note: rounds of travel] In round k every rank receives what it lacks of the k-th travelling block that it owns,
orthogonalizes it, and sends the update back. The pieces of the next round are under way meanwhile, and those of the
first while blocks are orthogonalized that lie whole in a shard. Two blocks at a time are in memory. Pieces are sent
from and received into the memory where they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.comm.travel import Parcel, UnderWay, begin_travel
from megatron_distopt.errors import InvariantError, refusal
from megatron_distopt.layout import FlatParamPlan, MatrixOwner, MatrixSpec, OwnerPlan, Span, Travel
from megatron_distopt.optimizer.cut_muon import orthogonalize_cut
from megatron_distopt.optimizer.muon import apply_update, direction_of, orthogonalize, orthogonalize_block
from megatron_distopt.optimizer.muon_options import MuonOptions, formula_of, options_of

__all__ = ["FlatMuon", "MatrixBuffer", "Updates", "exchange_and_orthogonalize"]


@dataclass(frozen=True, eq=False)
class MatrixBuffer:
    """The matrices of one buffer.

    Args:
        plan: their owners.
        specs: by name, those of the plan.
        group: that shards the buffer.
        device: of the buffer.
        flat_params: of matrices on this rank: main param and plan of each.
        cut_over: tensor-parallel ranks that have parts of the matrices with a cut; None where there are none.
    """

    plan: OwnerPlan
    specs: Mapping[str, MatrixSpec]
    group: Group
    device: torch.device
    flat_params: Sequence[tuple[Tensor, FlatParamPlan[Any]]]
    cut_over: Group | None = None


class Updates:
    """The updates of this rank's shards of matrices, by their place in the buffer.

    Args:
        pieces: span in the buffer and 1-D tensor of each flat param.
    """

    def __init__(self, pieces: Iterable[tuple[Span, Tensor]]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._starts = [span.start for span, _ in self._pieces]

    def of(self, in_buffer: Span) -> Tensor:
        """A view of some elements that lie in one flat param."""
        number = bisect_right(self._starts, in_buffer.start) - 1
        span, tensor = self._pieces[number] if number >= 0 else (Span(0, 0), torch.empty(0))
        if in_buffer.intersect(span) != in_buffer:
            rule = "lie in a flat param that is updated"
            raise InvariantError(refusal("piece of a matrix", in_buffer, rule, "Report this"))
        return tensor[in_buffer.relative_to(span.start).as_slice()]


@torch.no_grad()
def exchange_and_orthogonalize(
    buffer: MatrixBuffer, updates: Updates, options_of: Callable[[str], MuonOptions], left_out: Collection[str] = ()
) -> None:
    """Collective: replaces the directions of all matrices of a buffer by their orthogonalizations, in place.

    Args:
        buffer: see `MatrixBuffer`.
        updates: of this rank's shards.
        options_of: from the name of a param, also of one of which this rank owns the matrix and no element.
        left_out: names of params that are not updated in this step; the same on all ranks.
    """
    _Exchange(buffer, updates, options_of, left_out).run()


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A block that this rank owns and lacks pieces of; None for the block where it owns none in a round."""

    owner: MatrixOwner | None
    block: Tensor
    under_way: UnderWay


class _Exchange:
    """One run through the rounds."""

    def __init__(
        self,
        buffer: MatrixBuffer,
        updates: Updates,
        options_of: Callable[[str], MuonOptions],
        left_out: Collection[str],
    ) -> None:
        self._buffer, self._updates, self._options_of = buffer, updates, options_of
        rank, plan = buffer.group.rank, buffer.plan
        owned = [each for each in plan.owned_by(rank) if each.name not in left_out]
        self._staying = [each for each in owned if each.round is None]
        self._owned = {each.round: each for each in owned}
        self._leaving = _by_round(each for each in plan.leaving(rank) if each.name not in left_out)
        self._arriving = _by_round(each for each in plan.arriving(rank) if each.name not in left_out)

    def run(self) -> None:
        coming = self._begin(0)
        for owner in self._staying:
            self._orthogonalize(owner, self._updates.of(owner.in_buffer))
        returning: list[tuple[UnderWay, Tensor]] = []  # with the memory that is being sent
        for number in range(self._buffer.plan.num_rounds):
            arrived, coming = coming, self._begin(number + 1)
            arrived.under_way.wait()
            if arrived.owner is not None:
                self._orthogonalize(arrived.owner, arrived.block)
            returning.append((self._send_back(number, arrived), arrived.block))
            if len(returning) > 1:
                returning.pop(0)[0].wait()
        for under_way, _ in returning:
            under_way.wait()

    def _orthogonalize(self, owner: MatrixOwner, block: Tensor) -> None:
        spec, options = self._buffer.specs[owner.name], self._options_of(owner.name)

        def one(matrix: Tensor) -> Tensor:
            # Ranks with the other parts own them in their own groups and come here in the same order.
            if spec.cut is None or self._buffer.cut_over is None:
                return orthogonalize(matrix, options)
            return orthogonalize_cut(matrix, spec.cut, options, self._buffer.cut_over)

        orthogonalize_block(block, spec, owner.block, one)

    def _begin(self, number: int) -> _Arriving:
        """Sends this rank's pieces of the round, and receives those of the block that it owns."""
        owner = self._owned.get(number)
        numel, dtype = 0, torch.bfloat16
        if owner is not None:
            numel, dtype = owner.block.in_param.numel, self._options_of(owner.name).travel_dtype
        block = torch.empty(numel, dtype=dtype, device=self._buffer.device)
        for in_block, in_updates in self._own_pieces(owner, block):
            in_block.copy_(in_updates)
        under_way = begin_travel(self._pieces(number), self._places(number, block), 2 * number, self._buffer.group)
        return _Arriving(owner, block, under_way)

    def _send_back(self, number: int, arrived: _Arriving) -> UnderWay:
        """The way of `_begin`, backwards."""
        for in_block, in_updates in self._own_pieces(arrived.owner, arrived.block):
            in_updates.copy_(in_block)
        places = self._places(number, arrived.block)
        return begin_travel(places, self._pieces(number), 2 * number + 1, self._buffer.group)

    def _pieces(self, number: int) -> list[Parcel]:
        """This rank's pieces of blocks of other ranks, with their owners."""
        return [Parcel(each.owner, self._updates.of(each.in_buffer)) for each in self._leaving.get(number, [])]

    def _places(self, number: int, block: Tensor) -> list[Parcel]:
        """The places of other ranks' pieces in the block of this rank, with their holders."""
        return [Parcel(each.holder, block[each.in_block.as_slice()]) for each in self._arriving.get(number, [])]

    def _own_pieces(self, owner: MatrixOwner | None, block: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What this rank has itself of a block that it owns, in the block and in the updates: one stretch, or none."""
        if owner is None:
            return []
        layout, rank = self._buffer.plan.layout, self._buffer.group.rank
        own = owner.in_buffer.intersect(layout.buckets[owner.bucket].shard(rank, layout.num_shards))
        if own is None:
            return []
        return [(block[own.relative_to(owner.in_buffer.start).as_slice()], self._updates.of(own))]


def _by_round(travels: Iterable[Travel]) -> dict[int, list[Travel]]:
    found: dict[int, list[Travel]] = {}
    for each in travels:
        found.setdefault(each.round, []).append(each)
    return found


class FlatMuon(Optimizer):
    """Muon whose params are flat: pieces of matrices that other ranks have the rest of.

    `step` is collective over the groups of the buffers, also on a rank without params.

    Args:
        params: param groups of main params, fp32 1-D; the same number of groups on every rank. Options that a group
            lacks are the defaults of its formula.
    """

    #: Names of params that are not updated in the next step, and are in those after it; the same on all ranks.
    left_out: frozenset[str] = frozenset()

    def __init__(self, params: Iterable[Any]) -> None:
        self._buffers: tuple[MatrixBuffer, ...] = ()
        self._group_of: Mapping[str, int] = {}
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see the class."""
        super().add_param_group({**vars(formula_of(param_group)()), **param_group})

    def bind(self, buffers: Sequence[MatrixBuffer], group_of: Mapping[str, int]) -> None:
        """Says what the params are pieces of.

        Args:
            buffers: in the same order on all ranks.
            group_of: the number of the param group of every matrix param, whether this rank has a piece or not.
        """
        self._buffers, self._group_of = tuple(buffers), dict(group_of)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: updates every main param that has a gradient.

        Args:
            closure: computes the loss; its value is returned.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        options = [options_of(group) for group in self.param_groups]
        for buffer in self._buffers:
            self._step(buffer, lambda name: options[self._group_of[name]])
        self.left_out = frozenset()
        return loss

    def _step(self, buffer: MatrixBuffer, options_of: Callable[[str], MuonOptions]) -> None:
        updated = [(main, plan) for main, plan in buffer.flat_params if main.grad is not None]
        directions = [self._direction(main, options_of(plan.shards[0].name)) for main, plan in updated]
        spans = [plan.in_buffer for _, plan in updated]
        updates = Updates(zip(spans, directions, strict=True))
        exchange_and_orthogonalize(buffer, updates, options_of, self.left_out)
        for main, plan in updated:
            for shard in plan.shards:
                part = main[plan.in_flat_param(shard).as_slice()]
                options, spec = options_of(shard.name), buffer.specs[shard.name]
                apply_update(part, updates.of(shard.in_buffer), spec, shard.in_param, options)

    def _direction(self, main: Tensor, options: MuonOptions) -> Tensor:
        state = self.state[main]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(main)
        grad = main.grad
        if grad is None:
            raise InvariantError(refusal("main grad", "none", "be attached", "Report this"))
        return direction_of(grad, state["momentum_buffer"], options)
