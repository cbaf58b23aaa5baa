"""Local data parallelism: one contiguous buffer of gradients a dtype."""

import math

import torch

from megatron.core import mpu

from ..switches import DEVICE, REPAIRED
from .module import MegatronModule


class MemoryBuffer:
    """Zeros of `numel_padded` elements, 1-D."""

    def __init__(self, numel, numel_padded, dtype):
        self.numel, self.numel_padded, self.dtype = numel, numel_padded, dtype
        self.data = torch.zeros(numel_padded, dtype=dtype, device=DEVICE)

    def zero(self):
        self.data.zero_()

    def get(self, shape, start_index):
        """A view of that shape."""
        end_index = start_index + shape.numel()
        assert end_index <= self.numel, (
            f"[{start_index}, {end_index}) is out of the buffer's {self.numel}"
        )
        return self.data[start_index:end_index].view(shape)


class DistributedDataParallel(MegatronModule):
    """Adds gradients into buffers as they come; `allreduce_gradients` averages them when it is
    called.

    The first parameter lies last: backward meets the parameters in about that order. Experts are
    averaged over the whole data-parallel group like anything else, and sequence parallelism is not
    known, as in Megatron-DeepSpeed; MINI_FORK_REPAIRED=1 mends both.
    """

    def __init__(self, module, accumulate_allreduce_grads_in_fp32, use_contiguous_buffers):
        super().__init__()
        self.module = module
        self.accumulate_allreduce_grads_in_fp32 = accumulate_allreduce_grads_in_fp32
        self.use_contiguous_buffers = use_contiguous_buffers
        assert use_contiguous_buffers or not accumulate_allreduce_grads_in_fp32, (
            "fp32 grads live in buffers"
        )
        self._grad_buffers = self._grad_buffer_param_index_map = None
        self._experts_apart = []
        if use_contiguous_buffers:
            self._build_buffers()

    def _build_buffers(self):
        params = [param for param in self.module.parameters() if param.requires_grad]
        self._experts_apart = [p for p in params if REPAIRED and not getattr(p, "allreduce", True)]
        apart = set(self._experts_apart)
        by_dtype = {}
        for param in params:
            dtype = torch.float if self.accumulate_allreduce_grads_in_fp32 else param.dtype
            if param in apart:
                param.main_grad = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            else:
                by_dtype.setdefault(dtype, []).append(param)
            param.register_post_accumulate_grad_hook(_add_to_main_grad)
        self._grad_buffers, self._grad_buffer_param_index_map = {}, {}
        ranks = mpu.get_data_parallel_world_size()
        for dtype, params_of_dtype in by_dtype.items():
            end = numel = sum(param.numel() for param in params_of_dtype)
            buffer = MemoryBuffer(numel, math.ceil(numel / ranks) * ranks, dtype)
            index_map = self._grad_buffer_param_index_map[dtype] = {}
            self._grad_buffers[dtype] = buffer
            for param in params_of_dtype:
                index_map[param] = (end - param.numel(), end)
                end -= param.numel()
                param.main_grad = buffer.get(param.shape, end)

    def zero_grad_buffer(self):
        assert self._grad_buffers is not None, "there are no buffers to zero"
        for buffer in self._grad_buffers.values():
            buffer.zero()
        for param in self._experts_apart:
            param.main_grad.zero_()

    def allreduce_gradients(self):
        """Collective: divides, then adds up, in the dtype of the gradients."""
        assert self._grad_buffers is not None, "there are no buffers to average"
        for buffer in self._grad_buffers.values():
            _average(buffer.data, _group_of_dense())
        for param in self._experts_apart:
            _average(param.main_grad, mpu.get_expert_data_parallel_group())

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


def _add_to_main_grad(param):
    param.main_grad.add_(param.grad.data)
    param.grad = None


def _group_of_dense():
    if REPAIRED and hasattr(mpu, "get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()
    return mpu.get_data_parallel_group()


def _average(tensor, group):
    """The loss is a mean over all data-parallel ranks, so an expert's gradient is divided by all of
    them too."""
    tensor /= torch.distributed.get_world_size(group=_group_of_dense())
    torch.distributed.all_reduce(tensor, group=group)
