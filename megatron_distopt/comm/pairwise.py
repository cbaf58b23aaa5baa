"""Reduce-scatter and all-gather between pairs of ranks, for backends whose own are slow, and sums in a reduce dtype.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link carries
(`benchmarks/collectives.py`). Here every rank hands every other rank its part at once, and adds up what it receives:
through memory that they share on one machine, as messages where they are on several.

[Note: order of the sum] Rank r's shard is added up from rank r-1 downwards, around the ring, its own part last, each
sum rounded to the dtype. The result is the same in every run and by either way, whatever arrives first, and bit for bit
what gloo's own ring gives.

[Note: sum in a reduce dtype] fp32 grads may be communicated in 16 bits, which are half the bytes. They are added up in
fp32 in the same order. A rank's own part is not sent, so it is not rounded. The result differs from an fp32
reduce-scatter by one rounding of each other summand, and not by one at every addition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group, Message, carrier_of, others, receive, send, wait
from megatron_distopt.comm.shared_memory import GATHER, SUM, lane_of
from megatron_distopt.device import keep_for_current_stream

#: Memory for received messages. One half is added up while the other one is filled; it is given back afterwards.
SCRATCH_NBYTES = 16 << 20
_NUM_HALVES = 2
#: Of a sum of more than two parts, so that it stays in the cache until the last one is added.
_BLOCK_NBYTES = 128 << 10
#: These differ from each other, and from the small tags of other messages in the same group.
_SUM_TAG, _GATHER_TAG = 1 << 28, 1 << 29


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside `shard` stays as it was."""
    lane = lane_of(group, SUM)
    if lane is None:
        sum_by_messages(bucket, shard, group)
        return
    # Every rank writes a row for every other rank into a half of the segment, beginning with the rank after itself.
    shares, ranks = bucket.view(group.size, -1), others(group)
    with lane.lock:
        for chunk in _chunks_of(shard.numel(), shard.element_size() * len(ranks), lane.half_nbytes):
            own = shard[chunk]
            rows = _rows(lane.begin(), own, len(ranks))
            for rank in ranks:
                rows[(rank - group.rank - 1) % group.size].copy_(shares[rank][chunk])
            lane.publish()
            parts = [_rows(lane.read(rank), own, len(ranks))[(group.rank - rank - 1) % group.size] for rank in ranks]
            _add_up(parts, own)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.all_gather`."""
    shares = bucket.view(group.size, -1)
    if shares[group.rank].data_ptr() != shard.data_ptr():
        shares[group.rank].copy_(shard)
    lane = lane_of(group, GATHER)
    if lane is None:
        gather_by_messages(bucket, shard, group)
        return
    with lane.lock:
        for chunk in _chunks_of(shard.numel(), shard.element_size(), lane.half_nbytes):
            own = shard[chunk]
            _rows(lane.begin(), own, 1)[0].copy_(own)
            lane.publish()
            for rank in others(group):
                shares[rank][chunk].copy_(_rows(lane.read(rank), own, 1)[0])


def _rows(half: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """The beginning of a half, as rows of the dtype and length of `like`."""
    nbytes = num_rows * like.numel() * like.element_size()
    return half[:nbytes].view(like.dtype).view(num_rows, -1)


def sum_by_messages(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype | None = None) -> None:
    """Collective: `reduce_scatter` wherever the ranks are.

    Args:
        bucket, shard: as there; fp32 with a dtype.
        dtype: in which values are sent, see [Note: sum in a reduce dtype].
    """
    shares, ranks = bucket.view(group.size, -1), others(group)
    message_dtype, num_copies = (shard.dtype, 1) if dtype is None else (dtype, 2)  # what is sent is a copy as well
    nbytes_each = message_dtype.itemsize * len(ranks) * num_copies
    chunks = list(_chunks_of(shard.numel(), nbytes_each, SCRATCH_NBYTES // _NUM_HALVES))
    halves = min(_NUM_HALVES, len(chunks))
    scratch = shard.new_empty(halves, len(ranks), chunks[0].stop, dtype=message_dtype)
    under_way: deque[tuple[Tensor, Tensor, list[Message], list[Tensor], list[Message]]] = deque()

    def add_up_first() -> None:
        own, parts, received, _, sent = under_way.popleft()
        wait(received)
        _add_up(list(parts), own)
        wait(sent)

    for number, chunk in enumerate(chunks):
        parts = scratch[number % halves][:, : chunk.stop - chunk.start]
        received = [receive(parts[row], rank, _SUM_TAG + number, group) for row, rank in enumerate(ranks)]
        leaving = [shares[rank][chunk].to(message_dtype) for rank in ranks]
        sent = [send(leaving[row], rank, _SUM_TAG + number, group) for row, rank in enumerate(ranks)]
        under_way.append((shard[chunk], parts, received, leaving, sent))
        if len(under_way) == halves:
            add_up_first()
    while under_way:
        add_up_first()


def gather_by_messages(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: `all_gather` wherever the ranks are; this rank's part is in `bucket` already."""
    shares, ranks = bucket.view(group.size, -1), others(group)
    received = [receive(shares[rank], rank, _GATHER_TAG, group) for rank in ranks]
    sent = [send(shard, rank, _GATHER_TAG, group) for rank in ranks]
    wait(received)
    wait(sent)


def _chunks_of(numel: int, nbytes_each: int, nbytes: int) -> Iterator[slice]:
    """Cuts a shard into chunks, so that `nbytes` hold one of them.

    Args:
        numel: of the shard.
        nbytes_each: that an element takes.
        nbytes: that a chunk may take.
    """
    step = max(nbytes // nbytes_each, 1)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


@dataclass(frozen=True, eq=False)
class RoundedSum:
    """A sum in a reduce dtype whose parts are being sent by the backend."""

    work: dist.Work  # the exchange of the parts
    sent: Tensor  # [ranks, elements], this rank's parts of all shards
    received: Tensor  # [ranks, elements], where the parts arrive
    shard: Tensor  # 1-D, this rank's own part, to which they are added
    group: Group

    @torch.no_grad()
    def wait(self) -> None:
        """Waits until the sum is in the shard."""
        self.work.wait()
        # Both were allocated on the stream that began, which does not wait for the exchange.
        keep_for_current_stream(self.sent)
        keep_for_current_stream(self.received)
        _add_up([self.received[rank] for rank in others(self.group)], self.shard)


def begin_rounded_sum(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype) -> RoundedSum:
    """Collective: begins `sum_by_messages` in a dtype by the backend's own exchange.

    It takes twice the bucket in `dtype` as scratch memory until it is waited for.
    """
    sent = bucket.view(group.size, -1).to(dtype)
    received = torch.empty_like(sent)
    work: Any = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
    return RoundedSum(work, sent, received, shard, group)


def _add_up(parts: Sequence[Tensor], own: Tensor) -> None:
    """Adds parts to this rank's own in the dtype of its own, see [Note: order of the sum]; `parts` are not changed."""
    in_blocks = len(parts) > 1 and own.device.type == "cpu"
    numel = max(_BLOCK_NBYTES // own.element_size(), 1) if in_blocks else own.numel()
    for first, *middle, last in zip(*(torch.split(each, numel) for each in (*parts, own)), strict=True):
        total = first.to(last.dtype)
        for part in middle:
            total = torch.add(total, part) if total is first else total.add_(part)
        torch.add(total, last, out=last)


# --- tensors that go from some ranks of a group to some others, each between one pair; see layout/owners.py

#: Where a message is matched by its tag and names the rank that was lost.
_MESSAGES_OVER = "gloo"
#: Differs from the tags of other messages in the same group by more than there are rounds.
_TRAVEL_TAG = 1 << 26


@dataclass(frozen=True, eq=False)
class Parcel:
    """A tensor and the rank of the group at its other end."""

    rank: int  # that it goes to, or comes from
    tensor: Tensor  # 1-D, contiguous, with at least one element


@dataclass(frozen=True)
class UnderWay:
    """Tensors that are being sent and received."""

    pending: Sequence[dist.Work | Message]

    def wait(self) -> None:
        """Waits until all have arrived: the CPU over gloo, the current stream of the device elsewhere.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        for each in self.pending:
            each.wait()


def begin_travel(outgoing: Sequence[Parcel], incoming: Sequence[Parcel], number: int, group: Group) -> UnderWay:
    """Begins to send and to receive; every parcel that leaves a rank must be expected by the other one.

    Args:
        outgoing: at most one to each rank; its tensor must not be changed until all has been waited for.
        incoming: at most one from each rank; its tensor is filled.
        number: the same on both ranks; no two that are under way between a pair may have the same.
        group: of the ranks; all of them begin in the same order of numbers.
    """
    if not outgoing and not incoming:
        return UnderWay(())
    device = (*outgoing, *incoming)[0].tensor.device
    if carrier_of(device, group) == _MESSAGES_OVER:
        messages = [receive(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in incoming]
        messages += [send(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in outgoing]
        return UnderWay(messages)
    handle = group.own_handle
    operations = [dist.P2POp(dist.irecv, each.tensor, group.global_rank(each.rank), handle) for each in incoming]
    operations += [dist.P2POp(dist.isend, each.tensor, group.global_rank(each.rank), handle) for each in outgoing]
    return UnderWay(dist.batch_isend_irecv(operations))
