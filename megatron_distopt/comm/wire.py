"""Sums of fp32 grads that travel in 16 bits: half the bytes, and each of them is rounded once, not at every addition.

[Note: sum of what was rounded] Rank r's shard is added up in fp32, in the order of `pairwise`; its own part, which does
not travel, is not rounded. So the result differs from an fp32 reduce-scatter by one rounding of each other summand.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.messages import others, receive, send, wait
from megatron_distopt.comm.pairwise import SCRATCH_NBYTES, chunks_of

__all__ = ["Summing", "begin_sum", "sum_over_pairs"]

_TAG = 1 << 27


def sum_over_pairs(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype) -> None:
    """Collective: `collectives.reduce_scatter` by messages between pairs of ranks.

    Args:
        bucket, shard: fp32, as there.
        dtype: of what travels.
    """
    shares, nbytes_each = bucket.view(group.size, -1), 2 * group.size * dtype.itemsize  # of what is sent and received
    for number, chunk in enumerate(chunks_of(shard.numel(), nbytes_each, SCRATCH_NBYTES)):
        sent, received = shares[:, chunk].to(dtype), shares.new_empty(shares[:, chunk].shape, dtype=dtype)
        works = [receive(received[rank], rank, _TAG + number, group) for rank in others(group)]
        works += [send(sent[rank], rank, _TAG + number, group) for rank in others(group)]
        wait(works)
        _add_up(received, shard[chunk], group)


class Summing:
    """A sum whose parts are under way.

    Args:
        work: that brings them.
        received: [ranks, elements], where they arrive.
        shard: this rank's own part, to which they are added.
    """

    def __init__(self, work: dist.Work, received: Tensor, shard: Tensor, group: Group) -> None:
        self._work, self._received, self._shard, self._group = work, received, shard, group

    def wait(self) -> None:
        """Until the sum is in the shard."""
        self._work.wait()
        _keep_for_current_stream(self._received)
        _add_up(self._received, self._shard, self._group)


def begin_sum(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype) -> Summing:
    """Collective: the same by the backend's own exchange, beside what the caller does next.

    Scratch memory is twice the bucket in 16 bits, until it is waited for.
    """
    sent = bucket.view(group.size, -1).to(dtype)
    received = torch.empty_like(sent)
    work: dist.Work = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
    return Summing(work, received, shard, group)


def _keep_for_current_stream(tensor: Tensor) -> None:
    """The stream that waits reads what was allocated on the one that began; where those are two, the allocator would
    give the memory away as soon as the first is done with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(getattr(torch, tensor.device.type).current_stream(tensor.device))


@torch.no_grad()
def _add_up(received: Tensor, own: Tensor, group: Group) -> None:
    """See [Note: sum of what was rounded]."""
    first, *rest = others(group)
    total = received[first].to(own.dtype)
    for rank in rest:
        total += received[rank]
    torch.add(total, own, out=own)
