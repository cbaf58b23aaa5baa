"""Count what a rank keeps between steps, and what it would keep undistributed."""

from collections.abc import Iterable
from dataclasses import astuple

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from byte_gpt.records import Memory
from byte_gpt.trainer import Trainer
from megatron_distopt.optimizer.sharded import measure_memory as measure_sharded


def measure_memory(trainer: Trainer) -> Memory:
    """Collective: of each kind what is allocated on the rank that keeps most, padding included;
    after a step."""
    own = Memory(
        param_nbytes=_storage_nbytes(trainer.model.parameters()),
        grad_nbytes=_storage_nbytes(buffer.grad_data for buffer in trainer.model.buffers),
        state_nbytes=sum(
            _state_nbytes(trainer, part) for part in trainer.optimizer.chained_optimizers
        ),
    )
    most = torch.tensor(astuple(own), device=next(trainer.model.parameters()).device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return Memory(*most.tolist())


def undistributed_memory(trainer: Trainer) -> Memory:
    """Collective: what each rank would keep of the same model if no state were sharded."""
    params = [param for param in trainer.model.parameters() if param.requires_grad]
    return Memory(
        param_nbytes=sum(param.nbytes for param in params),
        # grad_reduce_in_fp32
        grad_nbytes=sum(param.numel() * torch.float32.itemsize for param in params),
        state_nbytes=_undistributed_state_nbytes(trainer),
    )


def _storage_nbytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _state_nbytes(trainer: Trainer, part: MegatronOptimizer) -> int:
    return (
        measure_sharded(part.sharded).state_nbytes
        if hasattr(part, "sharded")
        else _counted(trainer, part)
    )


def _undistributed_state_nbytes(trainer: Trainer) -> int:
    """The state of all ranks that share it, padding included."""
    own = sum(_state_nbytes(trainer, part) for part in trainer.optimizer.chained_optimizers)
    nbytes = torch.tensor(own, device=next(trainer.model.parameters()).device)
    if trainer.settings.use_distributed_optimizer:
        torch.distributed.all_reduce(nbytes, group=parallel_state.get_data_parallel_group())
    return int(nbytes)


def _counted(trainer: Trainer, part: MegatronOptimizer) -> int:
    """What a host's optimizer keeps beside the model: moments and main params, which fp32 params
    are themselves."""
    inner: torch.optim.Optimizer = part.optimizer
    kept = [param for group in inner.param_groups for param in group["params"]]
    kept += [
        value
        for state in inner.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    of_the_model = {param.untyped_storage().data_ptr() for param in trainer.model.parameters()}
    return sum(
        tensor.nbytes for tensor in kept if tensor.untyped_storage().data_ptr() not in of_the_model
    )
