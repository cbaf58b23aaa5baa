"""Contiguous 1-D tensors and views into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout import Bucket, BufferLayout, Span

__all__ = ["SUPPORTED_DTYPES", "ShardedBuffer", "dtype_name", "view_of"]

#: What a model param may be; anything else is refused by name.
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def view_of(buffer: Tensor, in_buffer: Span, shape: torch.Size | None = None) -> Tensor:
    """A view of some elements of a 1-D buffer, in a shape where one is given."""
    flat = buffer[in_buffer.as_slice()]
    return flat if shape is None else flat.view(shape)


@dataclass(frozen=True)
class ShardedBuffer:
    """The grads and the params of the same parameters, in the same layout, as one rank sees them.

    Args:
        layout: of both tensors.
        rank: in the data-parallel group.
        grad: 1-D [layout.numel]; in a rank's shard of each bucket the reduced gradient after the reduce-scatter.
        param: 1-D [layout.numel]; `param.data` of every parameter is a view of it.
    """

    layout: BufferLayout
    rank: int
    grad: Tensor
    param: Tensor

    def __post_init__(self) -> None:
        for kind, tensor in (("grad", self.grad), ("param", self.param)):
            if tensor.shape != (self.layout.numel,):
                rule = f"be 1-D with the layout's {self.layout.numel} elements"
                raise LayoutError(
                    refusal(f"{kind} buffer", f"shape {tuple(tensor.shape)}", rule, "Give both buffers whole")
                )

    def bucket_of(self, tensor: Tensor, bucket: Bucket) -> Tensor:
        """A bucket of `grad` or `param`, 1-D."""
        return tensor[bucket.in_buffer.as_slice()]

    def shard_of(self, tensor: Tensor, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket of `grad` or `param`, 1-D."""
        return tensor[bucket.shard(self.rank, self.layout.num_shards).as_slice()]
