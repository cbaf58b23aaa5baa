"""Contiguous 1-D tensors and views into them, for grads and for params.

`param.data` of every param is a view of the param buffer, so nothing is copied after the
all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import BufferLayout, Span

#: Dtypes that model params may have; any other is refused.
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def view_of(buffer: Tensor, in_buffer: Span, shape: torch.Size | None = None) -> Tensor:
    """A view of some elements of a 1-D buffer, in `shape` if it is given."""
    flat = buffer[in_buffer.as_slice()]
    return flat if shape is None else flat.view(shape)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor in memory order, the slowest first; () for a contiguous tensor,
    and for one whose elements do not fill its memory.

    >>> memory_order(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    """
    order: tuple[int, ...] = tensor.dim_order()
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else ()


def view_like(buffer: Tensor, in_buffer: Span, tensor: Tensor) -> Tensor:
    """A view of some elements of a 1-D buffer, with the shape and the memory order of a tensor."""
    flat = view_of(buffer, in_buffer)
    return (
        flat.as_strided(tensor.shape, tensor.stride())
        if memory_order(tensor)
        else flat.view(tensor.shape)
    )


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory with a storage that is as long as the view; it keeps the whole buffer alive.

    torch.save writes whole storages, and safetensors refuses params that share one. On a device
    without DLPack the view itself is returned.
    """
    try:
        own: Tensor = from_dlpack(view)
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return view
    return own


@dataclass(frozen=True)
class ShardedBuffer:
    """A grad buffer and a param buffer with the same layout, on one rank."""

    layout: BufferLayout  # of both tensors
    rank: int  # in the data-parallel group
    # 1-D [layout.numel]; after the reduce-scatter the rank's shard of each bucket holds the sum
    grad: Tensor
    param: Tensor  # 1-D [layout.numel]; `param.data` of every param is a view of it
    # names of the params in `param`, or None for all; other params lie only in `grad`
    names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._check_numel("grad", self.grad, self.layout.numel)
        self._check_numel("param", self.param, self.layout.numel)

    @staticmethod
    def _check_numel(kind: str, tensor: Tensor, numel: int) -> None:
        if tensor.shape != (numel,):
            raise LayoutError(
                f"The {kind} buffer has shape {tuple(tensor.shape)}, but it must be 1-D with the "
                f"{numel} elements of the layout. Give the whole buffer."
            )

    def holds(self, name: str) -> bool:
        """Whether the param lies in `param`."""
        return self.names is None or name in self.names

    def param_of(self, in_buffer: Span) -> Tensor:
        """The elements `in_buffer` of `param`, 1-D."""
        # a view of autograd's would keep the old memory alive when `param` gets other memory
        return view_of(self.param.detach(), in_buffer).data

    @cached_property
    def reduces(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The tensors of each reduce-scatter of grads, one for each bucket: (bucket, this rank's
        shard of it), 1-D."""
        return self._cut(self.grad)

    @cached_property
    def gathers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The tensors of each all-gather of params, one for each bucket: (bucket, this rank's shard
        of it), 1-D."""
        return self._cut(self.param)

    def _cut(self, tensor: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple(
            (
                view_of(tensor, bucket.in_buffer),
                view_of(tensor, bucket.shard(self.rank, self.layout.num_shards)),
            )
            for bucket in self.layout.buckets
        )

    def publish(self) -> None:
        """Called after the all-gather. Does nothing, because the params are views."""

    def collect(self) -> None:
        """Called after the params were changed. Does nothing, because they are views."""


@torch.no_grad()
def move_into_buffer(
    params: Mapping[str, Parameter], layout: BufferLayout, *, keeps_strides: bool = False
) -> Tensor:
    """Allocates the buffer for params of one dtype and device, and makes each param a view of it
    with the same values.

    `keeps_strides`: a param keeps its memory order in the buffer, see [Note: memory order] in
    layout/spans.py.

    Returns:
        1-D [layout.numel]; padding is zero.
    """
    first = next(iter(params.values()))
    buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for name, param in params.items():
        in_buffer = layout.slot_of[name].in_buffer
        view = view_like(buffer, in_buffer, param if keeps_strides else param.contiguous())
        view.copy_(param)
        param.data = _with_own_storage(view)
    return buffer
