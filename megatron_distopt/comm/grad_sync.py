"""Grads: from every rank's own sum to the owner's sum over all."""

from __future__ import annotations

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.collectives import reduce_scatter
from megatron_distopt.comm.groups import Group

__all__ = ["reduce_grads"]


def reduce_grads(buffer: ShardedBuffer, group: Group, *, divide_by: int = 1) -> None:
    """Collective: reduce-scatters every bucket of the grad buffer, in order.

    The *sum* arrives. The average is taken where the gradient is read anyway (optimizer/sharded.py), so no pass over
    the buffer is spent on a division, and a 16-bit gradient is not made smaller before it is added up.

    Args:
        buffer: its grads are reduced.
        group: over which.
        divide_by: before the sum, for a pass over the buffer. An fp16 sum of n gradients overflows at an n times
            smaller loss scale than their average.
    """
    if divide_by != 1:
        buffer.grad.div_(divide_by)
    for bucket in buffer.layout.buckets:
        reduce_scatter(buffer.bucket_of(buffer.grad, bucket), buffer.shard_of(buffer.grad, bucket), group)
