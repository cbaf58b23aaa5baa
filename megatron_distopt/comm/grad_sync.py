"""Grads: from every rank's own sum to the owner's sum over all."""

from __future__ import annotations

from contextlib import nullcontext

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.collectives import AS_THEY_ARE, Reduction, coalesced, reduce_scatter
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.ranges import profiled

__all__ = ["reduce_grads"]


def reduce_grads(buffer: ShardedBuffer, group: Group, how: Reduction = AS_THEY_ARE) -> None:
    """Collective: reduce-scatters every bucket of the grad buffer, in order.

    Unless `how` says otherwise the *sum* arrives. The average is taken where the gradient is read anyway
    (optimizer/sharded.py), so no pass over the buffer is spent on a division, and a 16-bit gradient is not made smaller
    before it is added up.

    Args:
        buffer: its grads are reduced.
        group: over which.
        how: see `Reduction`.
    """
    with coalesced(buffer.grad, group) if how.wire is None else nullcontext():
        for number, (whole, part) in enumerate(buffer.reduces()):
            with profiled(f"reduce-scatter {number}"):
                reduce_scatter(whole, part, group, how)
