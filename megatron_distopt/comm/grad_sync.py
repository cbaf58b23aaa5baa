"""Grads: from every rank's own sum to the owner's sum over all."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.collectives import coalesced, reduce_scatter
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.ranges import profiled

__all__ = ["AS_THEY_ARE", "Reduction", "reduce_grads"]


@dataclass(frozen=True)
class Reduction:
    """How grads are added up.

    Args:
        divide_by: before the sum, for a pass over the buffer. An fp16 sum of n gradients overflows at an n times
            smaller loss scale than their average.
        wire: what fp32 grads are rounded to on their way, see wire.py; None for as they are.
    """

    divide_by: int = 1
    wire: torch.dtype | None = None


#: Nothing is done to grads before they are added up.
AS_THEY_ARE = Reduction()


def reduce_grads(buffer: ShardedBuffer, group: Group, how: Reduction = AS_THEY_ARE) -> None:
    """Collective: reduce-scatters every bucket of the grad buffer, in order.

    The *sum* arrives. The average is taken where the gradient is read anyway (optimizer/sharded.py), so no pass over
    the buffer is spent on a division, and a 16-bit gradient is not made smaller before it is added up.

    Args:
        buffer: its grads are reduced.
        group: over which.
        how: see `Reduction`.
    """
    if how.divide_by != 1:
        buffer.grad.div_(how.divide_by)
    with coalesced(buffer.grad, group) if how.wire is None else nullcontext():
        for bucket in buffer.layout.buckets:
            whole, shard = (of(buffer.grad, bucket) for of in (buffer.bucket_of, buffer.shard_of))
            with profiled(f"reduce-scatter {bucket.index}"):
                reduce_scatter(whole, shard, group, how.wire)
