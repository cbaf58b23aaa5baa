"""Params: from the owner's new values to every rank's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.collectives import all_gather, broadcast, coalesced
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.ranges import profiled

__all__ = ["gather_params", "share_initial"]


def gather_params(buffer: ShardedBuffer, group: Group) -> None:
    """Collective: all-gathers every bucket of the param buffer, in order.

    `param.data` is a view of that buffer, so afterwards the module has the new values; nothing is copied but a minority
    dtype, see buffers/compact.py.
    """
    with coalesced(buffer.param, group):
        for number, (whole, part) in enumerate(buffer.gathers()):
            with profiled(f"all-gather {number}"):
                all_gather(whole, part, group)
    buffer.publish()


def share_initial(tensors: Iterable[Tensor], group: Group) -> None:
    """Collective: every rank starts from the values that the group's rank 0 has in these tensors."""
    for tensor in tensors:
        broadcast(tensor, group)
