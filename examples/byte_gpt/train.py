"""Train and validate."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from byte_gpt.data import Text, validation_batches
from byte_gpt.model import forward_step, token_losses
from byte_gpt.trainer import Trainer

GRADS_SYNC, PARAMS_ALL_GATHER = "all-grads-sync", "params-all-gather"  # megatron-core's own names of its timers
LOSS_ALL_REDUCE = "loss-all-reduce"


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of one iteration went, on one rank; they add up to the whole of it.

    Args:
        forward_backward_seconds: what is left: reading a batch, zeroing grads, forward and backward.
        communication_seconds: reduce-scatter (or all-reduce) of the grads, all-gather of the params, all-reduce of the
            loss, each with waiting for the other ranks. By timers that megatron-core keeps around the first two and
            this program around the third.
        update_seconds: `optimizer.step()` without its all-gather: gradient norm, clipping, Adam. The all-reduce of a
            few numbers for the norm is in it.
    """

    forward_backward_seconds: float
    communication_seconds: float
    update_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_backward_seconds + self.communication_seconds + self.update_seconds


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
    step: StepTime


def train(trainer: Trainer, report: Callable[[Iteration], None]) -> list[Iteration]:
    """Collective: all iterations; `report` sees each as it ends."""
    history: list[Iteration] = []
    began = time.perf_counter()
    for iteration in range(1, trainer.settings.iterations + 1):
        history.append(iterate(trainer, iteration, began))
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


def median_step(history: Sequence[Iteration]) -> StepTime:
    """Of each part its median. The first iteration is left out where there are others: it makes kernels, too."""
    steps = [iteration.step for iteration in history[1:] or history]
    return StepTime(
        forward_backward_seconds=statistics.median(step.forward_backward_seconds for step in steps),
        communication_seconds=statistics.median(step.communication_seconds for step in steps),
        update_seconds=statistics.median(step.update_seconds for step in steps),
    )


def iterate(trainer: Trainer, iteration: int, began: float) -> Iteration:
    """Collective: one iteration."""
    start = time.perf_counter()
    loss = _forward_backward(trainer)
    learning_rate = get_canonical_lr_for_logging(trainer.optimizer.param_groups)
    step_start = time.perf_counter()
    success, grad_norm, _ = trainer.optimizer.step()
    now, ranks = time.perf_counter(), parallel_state.get_data_parallel_world_size()
    if success:
        trainer.scheduler.step(increment=1)
    return Iteration(
        iteration=iteration,
        loss=loss,
        learning_rate=learning_rate or 0.0,
        grad_norm=None if grad_norm is None else float(grad_norm),
        skipped=not success,
        tokens_per_second=ranks * trainer.settings.tokens_per_rank / (now - start),
        seconds=now - began,
        step=_step_time(trainer, whole=now - start, optimizer_step=now - step_start),
    )


def _step_time(trainer: Trainer, *, whole: float, optimizer_step: float) -> StepTime:
    """Reads and resets the timers. On a GPU each of them waits for the kernels, at its start and at its end."""
    gather = _elapsed(trainer, PARAMS_ALL_GATHER)
    communication = _elapsed(trainer, GRADS_SYNC) + gather + _elapsed(trainer, LOSS_ALL_REDUCE)
    update = optimizer_step - gather
    return StepTime(whole - communication - update, communication, update)


def _elapsed(trainer: Trainer, name: str) -> float:
    """0 where the timer never ran: an optimizer that is not distributed gathers no params."""
    return float(trainer.timers(name, log_level=1).elapsed())


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
    trainer.timers(LOSS_ALL_REDUCE, log_level=1).start()
    torch.distributed.all_reduce(loss)
    trainer.timers(LOSS_ALL_REDUCE).stop()
    return loss.item() / int(parallel_state.get_data_parallel_world_size())


def _device(trainer: Trainer) -> torch.device:
    device: torch.device = next(trainer.model.parameters()).device
    return device
