"""Sends pieces of whole params to their owners, which update them and send the pieces back.

See [Note: matrix owners] in layout/owners.py.

[Note: rounds of travel] In round k every rank receives the missing pieces of the k-th block that it
owns, updates the block, and sends the pieces back. Meanwhile the pieces of the next round are being
received and those of the previous one are still being sent back, so that three blocks are in memory
at a time. While the pieces of the first round are being received, blocks that lie whole in a shard
are updated. Pieces are sent from and received into the memory where they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.comm.messages import Message, begin_travel
from megatron_distopt.comm.pending import Pending
from megatron_distopt.errors import InvariantError
from megatron_distopt.layout import MatrixOwner, MatrixSpec, OwnerPlan, Span, Travel, plan_owners
from megatron_distopt.optimizer.main_params import FlatParam

#: Updates a block. It is called with the owner and one 1-D tensor for each of the values that are
#: sent; the first tensor is sent back.
Update = Callable[[MatrixOwner, Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class OwnedBuffer:
    """The params of one buffer that are updated as a whole."""

    plan: OwnerPlan
    group: Group  # the ranks over which the buffer is sharded
    device: torch.device
    flat_params: Sequence[FlatParam]  # this rank's flat params of those params


def choose_owners(
    owners: list[OwnerPlan],
    buffers: Sequence[ShardedBuffer],
    specs: Mapping[str, MatrixSpec],
    group_of: Callable[[str], Group],
    flat_params: Sequence[FlatParam],
) -> list[OwnedBuffer]:
    """The buffers with params in `specs`. New buffers are at the end of `buffers`, and their plans
    are added to `owners`. `group_of` takes a param's name and returns the group that shards it."""
    for buffer in buffers[len(owners) :]:
        held = [slot.name for slot in buffer.layout.slots if buffer.holds(slot.name)]
        matrices = {name: specs[name] for name in held if name in specs}
        owners.append(plan_owners(buffer.layout, matrices))
    owned = []
    for buffer, plan in zip(buffers, owners, strict=True):
        names = plan.owners_of
        if names:
            group = group_of(next(iter(names)))
            members = [flat for flat in flat_params if flat.plan.shards[0].name in names]
            owned.append(OwnedBuffer(plan, group, buffer.param.device, members))
    return owned


class ShardValues:
    """One number for each element of this rank's flat params, as a 1-D tensor for each flat param.
    `dtype_of` also knows params of which this rank has no element."""

    def __init__(
        self,
        flat_params: Sequence[FlatParam],
        tensors: Sequence[Tensor],
        dtype_of: Callable[[str], torch.dtype] = lambda name: torch.float32,
    ) -> None:
        spans = [flat.plan.in_buffer for flat in flat_params]
        self._pieces = sorted(zip(spans, tensors, strict=True), key=lambda piece: piece[0])
        self._starts = [span.start for span, _ in self._pieces]
        self.dtype_of = dtype_of

    def of(self, in_buffer: Span) -> Tensor:
        """A view of some elements of one flat param."""
        number = bisect_right(self._starts, in_buffer.start) - 1
        span, tensor = self._pieces[number] if number >= 0 else (Span(0, 0), torch.empty(0))
        if in_buffer.intersect(span) != in_buffer:
            raise InvariantError(
                f"The elements {in_buffer} of a whole param are in no flat param that is updated. "
                "Report this as a bug."
            )
        return tensor[in_buffer.relative_to(span.start).as_slice()]


@dataclass(frozen=True, eq=False)
class _Moving:
    """A block whose pieces are being received or sent back."""

    block: Tensor  # 1-D; empty if this rank owns no block of the round
    under_way: Pending


class Exchange:
    """An update of all blocks of a buffer, each on its owner.

    All `values` are sent to the owners, and the first of them is sent back. `left_out` names params
    that are not updated in this step, the same on all ranks.
    """

    def __init__(
        self,
        buffer: OwnedBuffer,
        values: Sequence[ShardValues],
        update: Update,
        left_out: Collection[str] = (),
    ) -> None:
        self._buffer, self._values, self._update = buffer, values, update
        rank, plan = buffer.group.rank, buffer.plan
        owned = [owner for owner in plan.owned_by(rank) if owner.name not in left_out]
        self._staying = [owner for owner in owned if owner.round is None]
        self._owned = {owner.round: owner for owner in owned}
        self._leaving = _by_round(plan.leaving(rank), left_out)
        self._arriving = _by_round(plan.arriving(rank), left_out)

    def run(self) -> None:
        """Collective: sends, updates and sends back. Call it without autograd."""
        coming = self._begin(0)
        for owner in self._staying:
            self._update(owner, [values.of(owner.in_buffer) for values in self._values])
        returning = list[_Moving]()
        for number in range(self._buffer.plan.num_rounds):
            arrived, coming = coming, self._begin(number + 1)
            for moving in arrived:
                moving.under_way.wait()
            if number in self._owned:
                self._update(self._owned[number], [moving.block for moving in arrived])
            returning.append(self._move(number, len(arrived), arrived[0].block, is_back=True))
            if len(returning) > 1:
                returning.pop(0).under_way.wait()
        for moving in returning:
            moving.under_way.wait()

    def _begin(self, number: int) -> list[_Moving]:
        """Begins to send this rank's pieces of a round, and to receive those of the block that it
        owns."""
        owner = self._owned.get(number)
        coming = []
        for index, values in enumerate(self._values):
            block = torch.empty(0, device=self._buffer.device)
            if owner is not None:
                numel, dtype = owner.in_buffer.numel, values.dtype_of(owner.name)
                block = torch.empty(numel, dtype=dtype, device=self._buffer.device)
            coming.append(self._move(number, index, block))
        return coming

    def _move(self, number: int, index: int, block: Tensor, *, is_back: bool = False) -> _Moving:
        """Begins to move the pieces of a round to their owners, or the first of the values back."""
        values = self._values[0 if is_back else index]
        self._copy_own(number, block, values, is_back=is_back)
        outgoing = [
            Message(travel.owner, values.of(travel.in_buffer))
            for travel in self._leaving.get(number, ())
        ]
        incoming = [
            Message(travel.holder, block[travel.in_block.as_slice()])
            for travel in self._arriving.get(number, ())
        ]
        if is_back:
            outgoing, incoming = incoming, outgoing
        tag = (len(self._values) + 1) * number + index
        return _Moving(block, begin_travel(outgoing, incoming, tag, self._buffer.group))

    def _copy_own(self, number: int, block: Tensor, values: ShardValues, *, is_back: bool) -> None:
        """Copies this rank's own piece of the block that it owns, which is one stretch or none."""
        owner, layout = self._owned.get(number), self._buffer.plan.layout
        if owner is None:
            return
        shard = layout.buckets[owner.bucket].shard(self._buffer.group.rank, layout.num_shards)
        own = owner.in_buffer.intersect(shard)
        if own is not None:
            place = block[own.relative_to(owner.in_buffer.start).as_slice()]
            piece = values.of(own)
            source, target = (place, piece) if is_back else (piece, place)
            target.copy_(source)


def _by_round(travels: Iterable[Travel], left_out: Collection[str]) -> dict[int, list[Travel]]:
    by_round = defaultdict[int, list[Travel]](list)
    for travel in travels:
        if travel.name not in left_out:
            by_round[travel.round].append(travel)
    return by_round
