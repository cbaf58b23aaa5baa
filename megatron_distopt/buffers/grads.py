"""The grad buffer: backward accumulates into `param.main_grad`, a view of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers.flat import view_of
from megatron_distopt.layout import BufferLayout

__all__ = ["accumulate_into_buffer"]


def accumulate_into_buffer(params: Mapping[str, Parameter], layout: BufferLayout, dtype: torch.dtype) -> Tensor:
    """Allocates the buffer and sends every param's gradient there.

    `param.grad` is dropped as soon as it is added, so at most one full-size gradient of one param exists beside the
    buffer.

    Args:
        params: by name, of one device.
        layout: holds a slot for each.
        dtype: of the buffer.

    Returns:
        1-D [layout.numel] of zeros; hooks on the params feed it for as long as they live.
    """
    first = next(iter(params.values()))
    buffer = torch.zeros(layout.numel, dtype=dtype, device=first.device)
    for name, param in params.items():
        param.main_grad = view_of(buffer, layout.slot_of[name].in_buffer, param.shape)  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(_accumulate)  # type: ignore[no-untyped-call]
    return buffer


@torch.no_grad()
def _accumulate(param: Tensor) -> None:
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
