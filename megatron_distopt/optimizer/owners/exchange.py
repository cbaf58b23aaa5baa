"""Whole params on their owners: what other ranks have of them comes there, is updated, and goes back.

See [Note: matrix owners] in layout/owners.py.

[Note: rounds of travel] In round k every rank receives what it lacks of the k-th travelling block that it owns, updates
it, and sends the result back. The pieces of the next round are under way meanwhile, and those of the first while blocks
are updated that lie whole in a shard. The one before it is still being sent back, so that three blocks at a time are in
memory. Pieces are sent from and received into the memory where they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.comm import Group
from megatron_distopt.comm.pairwise import Parcel, UnderWay, begin_travel
from megatron_distopt.errors import InvariantError, refusal
from megatron_distopt.layout import MatrixOwner, OwnerPlan, Span, Travel

#: Updates a block; called with its owner and one tensor for each lane, 1-D, in the dtype of the lane. What it leaves in
#: the first one goes back.
Update = Callable[[MatrixOwner, Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class Place:
    """Whose blocks these are, and where.

    Args:
        plan: their owners.
        group: that shards the buffer.
        device: of the buffer.
    """

    plan: OwnerPlan
    group: Group
    device: torch.device


class Lane:
    """One number for each element that this rank has of some params, by their place in the buffer.

    Args:
        pieces: span in the buffer and 1-D tensor of each flat param.
        dtype_of: from the name of a param, also of one of which this rank has no element.
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
            rule = "lie in a flat param that is updated"
            raise InvariantError(refusal("piece of a whole param", in_buffer, rule, "Report this"))
        return tensor[in_buffer.relative_to(span.start).as_slice()]


@torch.no_grad()
def exchange(place: Place, lanes: Sequence[Lane], update: Update, left_out: Collection[str] = ()) -> None:
    """Collective: updates all blocks of a buffer, each on its owner.

    Args:
        place: see `Place`.
        lanes: of this rank; all of them travel to the owner, and the first one travels back.
        update: see `Update`.
        left_out: names of params that are not updated in this step; the same on all ranks.
    """
    _Exchange(place, lanes, update, left_out).run()


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A block that this rank owns and lacks pieces of; None for the block where it owns none in a round.

    Args:
        owner: of the block.
        blocks: one for each lane.
        under_way: what is coming.
    """

    owner: MatrixOwner | None
    blocks: Sequence[Tensor]
    under_way: Sequence[UnderWay]


class _Exchange:
    """One run through the rounds."""

    def __init__(self, place: Place, lanes: Sequence[Lane], update: Update, left_out: Collection[str]) -> None:
        self._place, self._lanes, self._update = place, lanes, update
        rank, plan = place.group.rank, place.plan
        owned = [each for each in plan.owned_by(rank) if each.name not in left_out]
        self._staying = [each for each in owned if each.round is None]
        self._owned = {each.round: each for each in owned}
        self._leaving = _by_round(each for each in plan.leaving(rank) if each.name not in left_out)
        self._arriving = _by_round(each for each in plan.arriving(rank) if each.name not in left_out)

    def run(self) -> None:
        coming = self._begin(0)
        for owner in self._staying:
            self._update(owner, [lane.of(owner.in_buffer) for lane in self._lanes])
        returning: list[tuple[UnderWay, Tensor]] = []  # with the memory that is being sent
        for number in range(self._place.plan.num_rounds):
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
        blocks, under_way = [self._block_of(owner, lane) for lane in self._lanes], []
        for index, (block, lane) in enumerate(zip(blocks, self._lanes, strict=True)):
            for in_block, in_lane in self._own_pieces(owner, block, lane):
                in_block.copy_(in_lane)
            pieces, places = self._pieces(number, lane), self._places(number, block)
            under_way.append(begin_travel(pieces, places, self._tag(number, index), self._place.group))
        return _Arriving(owner, blocks, under_way)

    def _block_of(self, owner: MatrixOwner | None, lane: Lane) -> Tensor:
        if owner is None:
            return torch.empty(0, device=self._place.device)
        return torch.empty(owner.block.in_param.numel, dtype=lane.dtype_of(owner.name), device=self._place.device)

    def _send_back(self, number: int, arrived: _Arriving) -> UnderWay:
        """The way of `_begin`, backwards, on the first lane."""
        block, lane = arrived.blocks[0], self._lanes[0]
        for in_block, in_lane in self._own_pieces(arrived.owner, block, lane):
            in_lane.copy_(in_block)
        places, pieces = self._places(number, block), self._pieces(number, lane)
        return begin_travel(places, pieces, self._tag(number, len(self._lanes)), self._place.group)

    def _tag(self, number: int, index: int) -> int:
        return (len(self._lanes) + 1) * number + index

    def _pieces(self, number: int, lane: Lane) -> list[Parcel]:
        """This rank's pieces of blocks of other ranks, with their owners."""
        return [Parcel(each.owner, lane.of(each.in_buffer)) for each in self._leaving.get(number, [])]

    def _places(self, number: int, block: Tensor) -> list[Parcel]:
        """The places of other ranks' pieces in the block of this rank, with their holders."""
        return [Parcel(each.holder, block[each.in_block.as_slice()]) for each in self._arriving.get(number, [])]

    def _own_pieces(self, owner: MatrixOwner | None, block: Tensor, lane: Lane) -> list[tuple[Tensor, Tensor]]:
        """What this rank has itself of a block that it owns, in the block and in the lane: one stretch, or none."""
        if owner is None:
            return []
        layout, rank = self._place.plan.layout, self._place.group.rank
        own = owner.in_buffer.intersect(layout.buckets[owner.bucket].shard(rank, layout.num_shards))
        if own is None:
            return []
        return [(block[own.relative_to(owner.in_buffer.start).as_slice()], lane.of(own))]


def _by_round(travels: Iterable[Travel]) -> dict[int, list[Travel]]:
    found: dict[int, list[Travel]] = {}
    for each in travels:
        found.setdefault(each.round, []).append(each)
    return found
