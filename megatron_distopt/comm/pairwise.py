"""Reduce-scatter and all-gather from pair to pair of ranks, for backends whose own are slow.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link carries
(`benchmarks/collectives.py`). Here every rank hands every other rank its part at once, and adds up what it gets:
through memory that they share on one machine, as messages where they are on several.

[Note: order of the sum] Rank r's shard is added up from rank r-1 downwards, around the ring, its own part last, each
sum rounded to the dtype: the same in every run, by either way, whatever arrives first, and bit for bit what gloo's own
ring gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.messages import others, receive, send, wait
from megatron_distopt.comm.shared_memory import GATHER, SUM, Lane, lane_of
from megatron_distopt.layout import Span

__all__ = [
    "SCRATCH_NBYTES",
    "all_gather",
    "chunks_of",
    "gather_by_messages",
    "reduce_scatter",
    "shares_memory",
    "sum_by_messages",
]

#: Memory for messages that arrive, of which one half is added up while the other one is filled; given back afterwards.
SCRATCH_NBYTES = 16 << 20
_NUM_HALVES = 2
#: Of a sum of more than two parts, so that it stays in the cache until the last one is added.
_BLOCK_NBYTES = 128 << 10
#: Apart from each other, and from messages of others in the same group, which have small tags.
_SUM_TAG, _GATHER_TAG = 1 << 28, 1 << 29


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside `shard` stays as it was."""
    lane = lane_of(group, SUM)
    if lane is None:
        sum_by_messages(bucket, shard, group)
    else:
        with lane.lock:
            _sum_shared(bucket, shard, group, lane)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.all_gather`."""
    own = bucket.view(group.size, -1)[group.rank]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    lane = lane_of(group, GATHER)
    if lane is None:
        gather_by_messages(bucket, shard, group)
    else:
        with lane.lock:
            _gather_shared(bucket, shard, group, lane)


def shares_memory(group: Group) -> bool:
    """Whether the group's ranks do; collective where none of the two was called before."""
    return lane_of(group, SUM) is not None


def _sum_shared(bucket: Tensor, shard: Tensor, group: Group, lane: Lane) -> None:
    """A half has a row for every other rank: first the one of the rank after its own."""
    shares, ranks = bucket.view(group.size, -1), others(group)
    for chunk in chunks_of(shard.numel(), shard.element_size() * len(ranks), lane.half_nbytes):
        own = shard[chunk]
        rows = _rows(lane.begin(), own, len(ranks))
        for rank in ranks:
            rows[(rank - group.rank - 1) % group.size].copy_(shares[rank][chunk])
        lane.publish()
        parts = [_rows(lane.read(rank), own, len(ranks))[(group.rank - rank - 1) % group.size] for rank in ranks]
        _add_up(parts, own)


def _gather_shared(bucket: Tensor, shard: Tensor, group: Group, lane: Lane) -> None:
    shares = bucket.view(group.size, -1)
    for chunk in chunks_of(shard.numel(), shard.element_size(), lane.half_nbytes):
        own = shard[chunk]
        _rows(lane.begin(), own, 1)[0].copy_(own)
        lane.publish()
        for rank in others(group):
            shares[rank][chunk].copy_(_rows(lane.read(rank), own, 1)[0])


def _rows(half: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """The beginning of a half, as rows of the dtype and length of `like`."""
    nbytes = num_rows * like.numel() * like.element_size()
    return half[:nbytes].view(like.dtype).view(num_rows, -1)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A part of this rank's shard, under way from all other ranks.

    Args:
        own: 1-D, the part in place.
        parts: [ranks - 1, elements], from the other ranks, in the order of the sum.
        received: one a row of `parts`.
    """

    own: Tensor
    parts: Tensor
    received: Sequence[dist.Work]

    def add_up(self) -> None:
        wait(self.received)
        _add_up(list(self.parts), self.own)


def sum_by_messages(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: `reduce_scatter` wherever the ranks are."""
    shares, ranks = bucket.view(group.size, -1), others(group)
    chunks = list(chunks_of(shard.numel(), shard.element_size() * len(ranks), SCRATCH_NBYTES // _NUM_HALVES))
    halves = min(_NUM_HALVES, len(chunks))
    scratch = shard.new_empty(halves, len(ranks), chunks[0].stop)
    under_way: deque[_Chunk] = deque()
    sent: list[dist.Work] = []
    for number, chunk in enumerate(chunks):
        parts = scratch[number % halves][:, : chunk.stop - chunk.start]
        received = [receive(parts[row], rank, _SUM_TAG + number, group) for row, rank in enumerate(ranks)]
        sent += [send(shares[rank][chunk], rank, _SUM_TAG + number, group) for rank in ranks]
        under_way.append(_Chunk(shard[chunk], parts, received))
        if len(under_way) == halves:
            under_way.popleft().add_up()
    for left in under_way:
        left.add_up()
    wait(sent)


def gather_by_messages(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: `all_gather` wherever the ranks are; this rank's part is in `bucket` already."""
    shares, ranks = bucket.view(group.size, -1), others(group)
    received = [receive(shares[rank], rank, _GATHER_TAG, group) for rank in ranks]
    sent = [send(shard, rank, _GATHER_TAG, group) for rank in ranks]
    wait(received)
    wait(sent)


def chunks_of(numel: int, nbytes_each: int, nbytes: int) -> Iterator[slice]:
    """Of a shard, so that `nbytes` hold one of them."""
    step = max(nbytes // nbytes_each, 1)
    for start in range(0, numel, step):
        yield Span(start, min(start + step, numel)).as_slice()


def _add_up(parts: Sequence[Tensor], own: Tensor) -> None:
    """See [Note: order of the sum]. `parts` are not changed."""
    numel = own.numel() if len(parts) == 1 else max(_BLOCK_NBYTES // own.element_size(), 1)
    for first, *middle, last in zip(*(torch.split(each, numel) for each in (*parts, own)), strict=True):
        total = first
        for place, part in enumerate(middle):
            total = torch.add(total, part) if place == 0 else total.add_(part)
        torch.add(total, last, out=last)
