"""What an optimizer holds, in bytes, read off the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

__all__ = ["Memory", "measure_memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank.

    Args:
        param_nbytes: param buffers, padding included.
        grad_nbytes: grad buffers, padding included.
        main_nbytes: main params that are not the model params themselves.
        moment_nbytes: what the inner optimizer keeps; 0 before the first step.
        undistributed_state_nbytes: `state_nbytes` of a rank that holds the state of all params.
    """

    param_nbytes: int
    grad_nbytes: int
    main_nbytes: int
    moment_nbytes: int
    undistributed_state_nbytes: int

    @property
    def state_nbytes(self) -> int:
        """Optimizer state: main params and moments."""
        return self.main_nbytes + self.moment_nbytes


def measure_memory(optimizer: ShardedOptimizer) -> Memory:
    """Adds up what `optimizer` holds."""
    owning = [flat for flat in optimizer.flat_params if flat.owns_memory]
    return Memory(
        param_nbytes=sum(_nbytes(buffer.param) for buffer in optimizer.buffers),
        grad_nbytes=sum(map(_nbytes, {buffer.grad.data_ptr(): buffer.grad for buffer in optimizer.buffers}.values())),
        main_nbytes=sum(_nbytes(flat.main) for flat in owning),
        moment_nbytes=sum(_nbytes(tensor) for flat in optimizer.flat_params for tensor in _moments(optimizer, flat)),
        undistributed_state_nbytes=_undistributed(optimizer),
    )


def _undistributed(optimizer: ShardedOptimizer) -> int:
    moment_nbytes = max((_moment_nbytes_an_element(optimizer, flat) for flat in optimizer.flat_params), default=0)
    total = 0
    for buffer in optimizer.buffers:
        main_nbytes = 0 if buffer.param.dtype == torch.float32 else torch.float32.itemsize
        total += (main_nbytes + moment_nbytes) * sum(
            slot.in_buffer.numel for slot in buffer.layout.slots if buffer.holds(slot.name)
        )
    return total


def _moment_nbytes_an_element(optimizer: ShardedOptimizer, flat: FlatParam) -> int:
    return sum(tensor.element_size() for tensor in _moments(optimizer, flat) if tensor.shape == flat.main.shape)


def _moments(optimizer: ShardedOptimizer, flat: FlatParam) -> list[Tensor]:
    return [value for value in optimizer.inner.state.get(flat.main, {}).values() if torch.is_tensor(value)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
