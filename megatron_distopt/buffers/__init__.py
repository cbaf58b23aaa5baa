"""Memory: the contiguous tensors that a layout describes. Torch, but no communication."""

from megatron_distopt.buffers.compact import CompactBuffer, pack_params
from megatron_distopt.buffers.flat import SUPPORTED_DTYPES, ShardedBuffer, dtype_name, view_of
from megatron_distopt.buffers.grads import accumulate_into_buffer
from megatron_distopt.buffers.params import move_into_buffer

__all__ = [
    "SUPPORTED_DTYPES",
    "CompactBuffer",
    "ShardedBuffer",
    "accumulate_into_buffer",
    "dtype_name",
    "move_into_buffer",
    "pack_params",
    "view_of",
]
