"""Params: from the owner's new values to every rank's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
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


def share_initial(tensors: Iterable[Tensor], group: Group, device: torch.device) -> None:
    """Collective: every rank starts from the values that the group's rank 0 has in these tensors.

    Args:
        tensors: of any strides, dtypes and devices; as many, as large and of the same dtypes on every rank.
        group: whose rank 0 counts.
        device: one that the group's backend carries.
    """
    for tensor in (each for each in tensors if group.size > 1 and each.numel()):
        # As bytes, because not every backend carries every dtype.
        packed = tensor.detach().to(device).contiguous()
        broadcast(packed.view(-1).view(torch.uint8), group)
        if packed.data_ptr() != tensor.data_ptr():
            _copy_distinct(tensor, packed)


def _copy_distinct(tensor: Tensor, values: Tensor) -> None:
    """An expanded tensor has fewer elements in memory than it shows, and torch does not write to it."""
    shown = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor.detach()[shown].copy_(values[shown])
