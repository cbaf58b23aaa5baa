"""Train and validate."""

import math
import time
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from byte_gpt.data import Text, validation_batches
from byte_gpt.model import forward_step, token_losses
from byte_gpt.records import Iteration, StepTime
from byte_gpt.trainer import Trainer

# megatron-core's own names of its timers
GRADS_SYNC, PARAMS_ALL_GATHER = "all-grads-sync", "params-all-gather"
LOSS_ALL_REDUCE = "loss-all-reduce"


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
    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    total = torch.zeros(2, dtype=torch.float64, device=_device(trainer))  # nats, bytes
    for batch in validation_batches(text, windows=windows, rank=rank, ranks=ranks, shape=shape):
        losses = token_losses(trainer.model, batch)
        total += torch.stack((losses.double().sum(), total.new_tensor(losses.numel())))
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1]) / math.log(2)


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
    """Reads and resets the timers. On a GPU each of them waits for the kernels, at its start and at
    its end."""
    gather = _elapsed(trainer, PARAMS_ALL_GATHER)
    communication = _elapsed(trainer, GRADS_SYNC) + gather + _elapsed(trainer, LOSS_ALL_REDUCE)
    update = optimizer_step - gather
    return StepTime(whole - communication - update, communication, update)


def _elapsed(trainer: Trainer, name: str) -> float:
    """0 where the timer never ran: an optimizer that is not distributed gathers no params."""
    return float(trainer.timers(name, log_level=1).elapsed())


def _forward_backward(trainer: Trainer) -> float:
    """Collective: one iteration's gradients into the grad buffer; the mean loss over all ranks and
    microbatches."""
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
