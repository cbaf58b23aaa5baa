"""The param buffer: `param.data` of every parameter is a view of it, so that nothing is copied after the all-gather."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers.flat import view_of, with_own_storage
from megatron_distopt.layout import BufferLayout

__all__ = ["move_into_buffer"]


@torch.no_grad()
def move_into_buffer(params: Mapping[str, Parameter], layout: BufferLayout) -> Tensor:
    """Allocates the buffer and makes each param a view of it, value kept.

    Args:
        params: by name, of one dtype and device.
        layout: holds a slot for each.

    Returns:
        1-D [layout.numel], dtype of the params; padding is zero.
    """
    first = next(iter(params.values()))
    buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for name, param in params.items():
        view = view_of(buffer, layout.slot_of[name].in_buffer, param.shape)
        view.copy_(param)
        param.data = with_own_storage(view)
    return buffer
