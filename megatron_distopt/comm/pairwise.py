"""Reduce-scatter and all-gather as messages between pairs of ranks, for backends whose own are slow.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link carries
(`benchmarks/collectives.py`). Here every rank sends every other rank its part at once, and adds up what it gets.

[Note: order of the sum] Rank r's shard is added up from rank r-1 downwards, around the ring, its own part last, each
sum rounded to the dtype: the same in every run, whatever arrives first, and bit for bit what gloo's own ring gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group
from megatron_distopt.errors import InvariantError, refusal
from megatron_distopt.layout import Span

__all__ = ["SCRATCH_NBYTES", "all_gather", "reduce_scatter"]

#: Memory for what arrives, of which one half is added up while the other one is filled.
SCRATCH_NBYTES = 16 << 20
#: Apart from each other, and from messages of others in the same group, which have small tags.
_SUM_TAG, _GATHER_TAG = 1 << 28, 1 << 29
_NUM_HALVES = 2


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


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside `shard` stays as it was."""
    shares, others = bucket.view(group.size, -1), _others(group)
    spans = list(_chunks(shard.numel(), shard.element_size() * len(others)))
    scratch = shard.new_empty(_NUM_HALVES, len(others), spans[0].numel)
    under_way: deque[_Chunk] = deque()
    sent: list[dist.Work] = []
    for number, span in enumerate(spans):
        parts = scratch[number % _NUM_HALVES][:, : span.numel]
        received = [_receive(parts[row], rank, _SUM_TAG + number, group) for row, rank in enumerate(others)]
        sent += [_send(shares[rank][span.as_slice()], rank, _SUM_TAG + number, group) for rank in others]
        under_way.append(_Chunk(shard[span.as_slice()], parts, received))
        if len(under_way) == _NUM_HALVES:
            _add_up(under_way.popleft())
    for chunk in under_way:
        _add_up(chunk)
    _wait(sent)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.all_gather`."""
    shares, others = bucket.view(group.size, -1), _others(group)
    received = [_receive(shares[rank], rank, _GATHER_TAG, group) for rank in others]
    sent = [_send(shard, rank, _GATHER_TAG, group) for rank in others]
    if shares[group.rank].data_ptr() != shard.data_ptr():
        shares[group.rank].copy_(shard)
    _wait(received)
    _wait(sent)


def _others(group: Group) -> list[int]:
    """In the order of the sum."""
    return [(group.rank - distance) % group.size for distance in range(1, group.size)]


def _chunks(numel: int, nbytes_each: int) -> Iterator[Span]:
    """Of a shard, so that two of them fit into the scratch memory."""
    step = max(SCRATCH_NBYTES // _NUM_HALVES // nbytes_each, 1)
    for start in range(0, numel, step):
        yield Span(start, min(start + step, numel))


def _receive(into: Tensor, rank: int, tag: int, group: Group) -> dist.Work:
    return _begun(dist.irecv(into, group.global_rank(rank), group.handle, tag))


def _send(tensor: Tensor, rank: int, tag: int, group: Group) -> dist.Work:
    return _begun(dist.isend(tensor, group.global_rank(rank), group.handle, tag))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch's way to say that this process is not in the group
        rule = "hold every rank that communicates in it"
        raise InvariantError(refusal("process group", "without this rank", rule, "Report this"))
    return work


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add_up(chunk: _Chunk) -> None:
    """See [Note: order of the sum]."""
    _wait(chunk.received)
    total = chunk.parts[0]
    for part in chunk.parts[1:]:
        total.add_(part)
    torch.add(total, chunk.own, out=chunk.own)
