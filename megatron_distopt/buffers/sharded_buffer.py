"""Contiguous 1-D tensors and views into them, for grads and for params.

`param.data` of every parameter is a view of the param buffer, so that nothing is copied after the
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
    """A view of some elements of a 1-D buffer, in a shape where one is given."""
    flat = buffer[in_buffer.as_slice()]
    return flat if shape is None else flat.view(shape)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions by which the elements of a tensor lie one after the other, the slowest first;
    () where these are 0, 1, 2 and so on, or where elements do not lie so.

    >>> memory_order(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    """
    order: tuple[int, ...] = tensor.dim_order()
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else ()


def view_like(buffer: Tensor, in_buffer: Span, tensor: Tensor) -> Tensor:
    """A view of some elements of a 1-D buffer, in the shape of a tensor and in the order in which
    its elements lie."""
    flat = view_of(buffer, in_buffer)
    return (
        flat.as_strided(tensor.shape, tensor.stride())
        if memory_order(tensor)
        else flat.view(tensor.shape)
    )


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory under a storage that is as long as the view; it keeps the whole buffer alive.

    torch.save writes whole storages, and safetensors refuses params that share one. Where a device
    has no DLPack the view itself, which is contiguous, is returned.
    """
    try:
        own: Tensor = from_dlpack(view)
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return view
    return own


@dataclass(frozen=True)
class ShardedBuffer:
    """The grads and the params of the same parameters, in the same layout, as one rank sees
    them."""

    layout: BufferLayout  # of both tensors
    rank: int  # in the data-parallel group
    # 1-D [layout.numel]; in the rank's shard of each bucket the reduced gradient after the
    # reduce-scatter
    grad: Tensor
    param: Tensor  # 1-D [layout.numel]; `param.data` of every parameter is a view of it
    # of the params in `param`, or None for all; the others lie in `grad` alone
    names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._check_numel("grad", self.grad, self.layout.numel)
        self._check_numel("param", self.param, self.layout.numel)

    @staticmethod
    def _check_numel(kind: str, tensor: Tensor, numel: int) -> None:
        if tensor.shape != (numel,):
            raise LayoutError(
                f"Invalid {kind} buffer: shape {tuple(tensor.shape)}. Must be 1-D with the "
                f"layout's {numel} elements. Give both buffers whole."
            )

    def holds(self, name: str) -> bool:
        """Whether the param lies in `param`."""
        return self.names is None or name in self.names

    def param_of(self, in_buffer: Span) -> Tensor:
        """The elements of `param` that belong to a stretch of this rank's shard, 1-D."""
        # autograd's views would keep memory that `param` has left
        return view_of(self.param.detach(), in_buffer).data

    @cached_property
    def reduces(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """What a reduce-scatter of the grads has to add up: (bucket, this rank's shard of it), 1-D,
        one a bucket."""
        return self._cut(self.grad)

    @cached_property
    def gathers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """What an all-gather of the params has to move: (bucket, this rank's shard of it), 1-D, one
        a bucket."""
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
        """After the all-gather: nothing to do, the params are views."""

    def collect(self) -> None:
        """After the params were changed: nothing to do, they are views."""


@torch.no_grad()
def move_into_buffer(
    params: Mapping[str, Parameter], layout: BufferLayout, *, keeps_strides: bool = False
) -> Tensor:
    """Allocates the buffer of params of one dtype and device, and makes each param a view of it,
    value kept.

    `keeps_strides`: a param whose elements lie in another order than that of its shape lies so in
    the buffer as well; see [Note: memory order] in layout/spans.py.

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
