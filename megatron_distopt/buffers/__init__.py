"""The contiguous tensors of a layout, for grads and params. Nothing here communicates."""

from megatron_distopt.buffers.compact import CompactBuffer, pack_params
from megatron_distopt.buffers.grad_buffer import (
    DESCRIBING,
    GradSlot,
    LocalGrad,
    allocate_grads,
    check_grad_dtype,
    refuse_local_grads,
    show_assigned,
)
from megatron_distopt.buffers.sharded_buffer import (
    SUPPORTED_DTYPES,
    ShardedBuffer,
    dtype_name,
    memory_order,
    move_into_buffer,
    view_like,
    view_of,
)

__all__ = [
    "DESCRIBING",
    "SUPPORTED_DTYPES",
    "CompactBuffer",
    "GradSlot",
    "LocalGrad",
    "ShardedBuffer",
    "allocate_grads",
    "check_grad_dtype",
    "dtype_name",
    "memory_order",
    "move_into_buffer",
    "pack_params",
    "refuse_local_grads",
    "show_assigned",
    "view_like",
    "view_of",
]
