"""Whole params on their owners: what other ranks have of them comes there, is updated, and goes
back.

See [Note: matrix owners] in layout/owners.py.

[Note: rounds of travel] In round k every rank receives what it lacks of the k-th travelling block
that it owns, updates it, and sends the result back. The pieces of the next round are under way
meanwhile, and those of the first while blocks are updated that lie whole in a shard. The one before
it is still being sent back, so that three blocks at a time are in memory. Pieces are sent from and
received into the memory where they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.comm.messages import Parcel, begin_travel
from megatron_distopt.comm.pending import Pending
from megatron_distopt.errors import InvariantError
from megatron_distopt.layout import MatrixOwner, MatrixSpec, OwnerPlan, Span, Travel, plan_owners
from megatron_distopt.optimizer.main_params import FlatParam

#: Updates a block; called with its owner and one 1-D tensor for each of the values that travel.
#: What it leaves in the first one goes back.
Update = Callable[[MatrixOwner, Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class OwnedBuffer:
    """The params of one buffer that are updated whole."""

    plan: OwnerPlan
    group: Group  # that shards the buffer
    device: torch.device
    flat_params: Sequence[FlatParam]  # of those params, on this rank

    @classmethod
    def of(
        cls,
        buffer: ShardedBuffer,
        plan: OwnerPlan,
        group_of: Callable[[str], Group],
        flat_params: Sequence[FlatParam],
    ) -> OwnedBuffer:
        """Of a buffer whose plan is not empty; `group_of` finds the group by the name of a
        param."""
        names = plan.owners_of
        members = [flat for flat in flat_params if flat.plan.shards[0].name in names]
        return cls(plan, group_of(next(iter(names))), buffer.param.device, members)


def choose_owners(
    owners: list[OwnerPlan],
    buffers: Sequence[ShardedBuffer],
    specs: Mapping[str, MatrixSpec],
    group_of: Callable[[str], Group],
    flat_params: Sequence[FlatParam],
) -> list[OwnedBuffer]:
    """The buffers with params in `specs`; adds to `owners` the plans of new ones, at the end of
    `buffers`."""
    for buffer in buffers[len(owners) :]:
        names = [
            slot.name
            for slot in buffer.layout.slots
            if slot.name in specs and buffer.holds(slot.name)
        ]
        owners.append(plan_owners(buffer.layout, {name: specs[name] for name in names}))
    both = zip(buffers, owners, strict=True)
    return [
        OwnedBuffer.of(buffer, plan, group_of, flat_params) for buffer, plan in both if plan.owners
    ]


class ShardValues:
    """One number for each element that this rank has of some params: span in the buffer and 1-D
    tensor of each flat param. `dtype_of` knows params of which this rank has no element, too.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Span, Tensor]],
        dtype_of: Callable[[str], torch.dtype] = lambda name: torch.float32,
    ) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._starts = [span.start for span, _ in self._pieces]
        self.dtype_of = dtype_of

    def of(self, in_buffer: Span) -> Tensor:
        """A view of some elements that lie in one flat param."""
        number = bisect_right(self._starts, in_buffer.start) - 1
        span, tensor = self._pieces[number] if number >= 0 else (Span(0, 0), torch.empty(0))
        if in_buffer.intersect(span) != in_buffer:
            raise InvariantError(
                f"{in_buffer} of a whole param lies in no flat param that is updated. Report this."
            )
        return tensor[in_buffer.relative_to(span.start).as_slice()]


@torch.no_grad()
def exchange(
    buffer: OwnedBuffer,
    values: Sequence[ShardValues],
    update: Update,
    left_out: Collection[str] = (),
) -> None:
    """Collective: updates all blocks of a buffer, each on its owner.

    All values of this rank travel to the owner, and the first one travels back. `left_out` names
    params that are not updated in this step, the same on all ranks.
    """
    _Exchange(buffer, values, update, left_out).run()


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A block that this rank owns and lacks pieces of."""

    owner: MatrixOwner | None  # None where this rank owns no block of the round
    blocks: Sequence[Tensor]  # one for each of the values
    under_way: Sequence[Pending]


class _Exchange:
    """One run through the rounds."""

    def __init__(
        self,
        buffer: OwnedBuffer,
        values: Sequence[ShardValues],
        update: Update,
        left_out: Collection[str],
    ) -> None:
        self._buffer, self._values, self._update = buffer, values, update
        rank, plan = buffer.group.rank, buffer.plan
        owned = [owner for owner in plan.owned_by(rank) if owner.name not in left_out]
        self._staying = [owner for owner in owned if owner.round is None]
        self._owned = {owner.round: owner for owner in owned}
        self._leaving = _by_round(plan.leaving(rank), left_out)
        self._arriving = _by_round(plan.arriving(rank), left_out)

    def run(self) -> None:
        coming = self._begin(0)
        for owner in self._staying:
            self._update(owner, [each.of(owner.in_buffer) for each in self._values])
        returning: list[tuple[Pending, Tensor]] = []  # with the memory that is being sent
        for number in range(self._buffer.plan.num_rounds):
            arrived, coming = coming, self._begin(number + 1)
            for under_way in arrived.under_way:
                under_way.wait()
            if arrived.owner is not None:
                self._update(arrived.owner, arrived.blocks)
            returning.append((self._send_back(number, arrived), arrived.blocks[0]))
            if len(returning) > 1:
                returning.pop(0)[0].wait()
        for under_way, _ in returning:
            under_way.wait()

    def _begin(self, number: int) -> _Arriving:
        """Sends this rank's pieces of the round, and receives those of the block that it owns."""
        owner = self._owned.get(number)
        blocks, under_way = list[Tensor](), list[Pending]()
        for index, values in enumerate(self._values):
            numel, dtype = (
                (0, None) if owner is None else (owner.in_buffer.numel, values.dtype_of(owner.name))
            )
            block = torch.empty(numel, dtype=dtype, device=self._buffer.device)
            own = self._own_piece(owner, block, values)
            if own is not None:
                own[0].copy_(own[1])
            pieces, places = self._pieces(number, values), self._places(number, block)
            under_way.append(
                begin_travel(pieces, places, self._tag(number, index), self._buffer.group)
            )
            blocks.append(block)
        return _Arriving(owner, blocks, under_way)

    def _send_back(self, number: int, arrived: _Arriving) -> Pending:
        """The way of `_begin`, backwards, for the first of the values."""
        block, values = arrived.blocks[0], self._values[0]
        own = self._own_piece(arrived.owner, block, values)
        if own is not None:
            own[1].copy_(own[0])
        places, pieces = self._places(number, block), self._pieces(number, values)
        return begin_travel(
            places, pieces, self._tag(number, len(self._values)), self._buffer.group
        )

    def _tag(self, number: int, index: int) -> int:
        return (len(self._values) + 1) * number + index

    def _pieces(self, number: int, values: ShardValues) -> list[Parcel]:
        """This rank's pieces of blocks of other ranks, with their owners."""
        return [
            Parcel(travel.owner, values.of(travel.in_buffer))
            for travel in self._leaving.get(number, [])
        ]

    def _places(self, number: int, block: Tensor) -> list[Parcel]:
        """The places of other ranks' pieces in the block of this rank, with their holders."""
        return [
            Parcel(travel.holder, block[travel.in_block.as_slice()])
            for travel in self._arriving.get(number, [])
        ]

    def _own_piece(
        self, owner: MatrixOwner | None, block: Tensor, values: ShardValues
    ) -> tuple[Tensor, Tensor] | None:
        """What this rank has itself of a block that it owns, in the block and in the values: one
        stretch, or none."""
        layout, own = self._buffer.plan.layout, None
        if owner is not None:
            shard = layout.buckets[owner.bucket].shard(self._buffer.group.rank, layout.num_shards)
            own = owner.in_buffer.intersect(shard)
        if owner is None or own is None:
            return None
        return block[own.relative_to(owner.in_buffer.start).as_slice()], values.of(own)


def _by_round(travels: Iterable[Travel], left_out: Collection[str]) -> dict[int, list[Travel]]:
    by_round: dict[int, list[Travel]] = {}
    for travel in travels:
        if travel.name not in left_out:
            by_round.setdefault(travel.round, []).append(travel)
    return by_round
