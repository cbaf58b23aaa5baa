"""Train, validate, and count what the optimizer keeps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from byte_gpt.data import Text, validation_batches
from byte_gpt.model import forward_step, token_losses
from byte_gpt.trainer import Trainer


@dataclass(frozen=True)
class Iteration:
    """A line of the metrics file. Losses are in nats a byte; `seconds` is the time since training began."""

    iteration: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    skipped: bool
    tokens_per_second: float
    seconds: float


def train(trainer: Trainer, report: Callable[[Iteration], None]) -> list[Iteration]:
    """Collective: all iterations; `report` sees each as it ends."""
    history: list[Iteration] = []
    began = time.perf_counter()
    for iteration in range(1, trainer.settings.iterations + 1):
        history.append(_iterate(trainer, iteration, began))
        report(history[-1])
    return history


@torch.no_grad()
def validation_bits_per_byte(trainer: Trainer, text: Text) -> float:
    """Collective: the mean over windows that are read once, by one rank each."""
    windows, shape = trainer.settings.validation_windows, trainer.settings.batch_shape
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    total = torch.zeros(2, dtype=torch.float64, device=_device(trainer))  # nats, bytes
    for batch in validation_batches(text, windows=windows, rank=rank, ranks=ranks, shape=shape):
        losses = token_losses(trainer.model, batch)
        total += torch.stack((losses.double().sum(), total.new_tensor(losses.numel())))
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1]) / math.log(2)


def state_nbytes(trainer: Trainer) -> tuple[int, int]:
    """Collective: bytes of main params and moments, on the rank that keeps most, and on one rank undistributed."""
    parts, ranks = trainer.optimizer.chained_optimizers, parallel_state.get_data_parallel_world_size()
    own = sum(part.state_nbytes if hasattr(part, "state_nbytes") else _counted(trainer, part) for part in parts)
    most = torch.tensor(own, device=_device(trainer))
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    if all(hasattr(part, "undistributed_state_nbytes") for part in parts):
        return int(most), sum(part.undistributed_state_nbytes for part in parts)
    return int(most), int(most) * (ranks if trainer.settings.use_distributed_optimizer else 1)  # shards are of a size


def _iterate(trainer: Trainer, iteration: int, began: float) -> Iteration:
    start = time.perf_counter()
    loss = _forward_backward(trainer)
    learning_rate = get_canonical_lr_for_logging(trainer.optimizer.param_groups)
    success, grad_norm, _ = trainer.optimizer.step()
    if success:
        trainer.scheduler.step(increment=1)
    now, ranks = time.perf_counter(), parallel_state.get_data_parallel_world_size()
    return Iteration(
        iteration=iteration,
        loss=loss,
        learning_rate=learning_rate or 0.0,
        grad_norm=None if grad_norm is None else float(grad_norm),
        skipped=not success,
        tokens_per_second=ranks * trainer.settings.tokens_per_rank / (now - start),
        seconds=now - began,
    )


def _forward_backward(trainer: Trainer) -> float:
    """Collective: one iteration's gradients into the grad buffer; the mean loss over all ranks and microbatches."""
    settings = trainer.settings
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=trainer.batches,
        model=[trainer.model],
        num_microbatches=settings.num_microbatches,
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
    )
    loss: Tensor = torch.stack([entry["loss"] for entry in losses]).mean()
    torch.distributed.all_reduce(loss)
    return loss.item() / int(parallel_state.get_data_parallel_world_size())


def _counted(trainer: Trainer, part: MegatronOptimizer) -> int:
    """What a host's optimizer keeps beside the model: moments and main params, which fp32 params are themselves."""
    inner: torch.optim.Optimizer = part.optimizer
    kept = [param for group in inner.param_groups for param in group["params"]]
    kept += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    of_the_model = {param.untyped_storage().data_ptr() for param in trainer.model.parameters()}
    return sum(tensor.nbytes for tensor in kept if tensor.untyped_storage().data_ptr() not in of_the_model)


def _device(trainer: Trainer) -> torch.device:
    device: torch.device = next(trainer.model.parameters()).device
    return device
