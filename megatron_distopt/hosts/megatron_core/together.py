"""One step of several of our optimizers (dense and expert params, or chunks apart): measured and gathered once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megatron_distopt.comm import Group
from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.base import timed
from megatron_distopt.optimizer import (
    Complaint,
    ShardedOptimizer,
    StepAction,
    check_complaint,
    decide_together,
    finish_deferred_check,
    judge_together,
    measure_together,
)
from megatron_distopt.optimizer.accelerator import stats_dtype

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_core.optimizer import DistributedOptimizer

__all__ = ["StepOfHost", "gather", "prepare_together", "step_together", "timer", "update_together"]

StepOfHost = tuple[bool, float | None, int | None]


def step_together(optimizers: Sequence[DistributedOptimizer]) -> StepOfHost:
    """Collective: the whole step, as the host's: (updated, gradient norm, zeros or None).

    Where the check is deferred "updated" is True, and norm and zeros are 0-D tensors.

    Raises:
        LayoutError, RanksDisagreeError: on all ranks, where params or groups are not as they have to be on one of them.
    """
    config = optimizers[0].config
    with timer(config, "optimizer-unscale-and-check-inf"):
        complaint = _complaint_of(optimizers)
        decisions = decide_together(*_measured_by(optimizers), clip_grad=config.clip_grad, complaint=complaint)
    if decisions[0].action is StepAction.SKIP:
        return False, None, None
    for optimizer, decision in zip(optimizers, decisions, strict=True):
        optimizer.accept_decision(decision)
    update_together(optimizers)
    return True, decisions[0].grad_norm, decisions[0].num_zeros if config.log_num_zeros_in_grad else None


def prepare_together(optimizers: Sequence[DistributedOptimizer]) -> StepAction:
    """Collective: measures all gradients and decides, the same for all the optimizers and all ranks."""
    with timer(optimizers[0].config, "optimizer-unscale-and-check-inf"):
        sharded, group = _measured_by(optimizers)
        finish_deferred_check(sharded, group)
        # Read before the decision: that is what the loss of this step was multiplied with.
        divisors = [each.divisor for each in sharded]
        complaint = _complaint_of(optimizers)
        stats = measure_together(sharded, group, extra=complaint.flag)
        check_complaint(sharded, complaint, group)
        for optimizer, divisor in zip(optimizers, divisors, strict=True):
            optimizer.accept(stats, divisor)
        return judge_together(sharded, stats, group)


def _complaint_of(optimizers: Sequence[DistributedOptimizer]) -> Complaint:
    """What the user did to params and groups since the last step that cannot be followed."""
    device = optimizers[0].sharded.device
    flag = torch.zeros(1, dtype=stats_dtype(device), device=device)
    try:
        for optimizer in optimizers:
            optimizer.check_between_steps()
    except LayoutError as error:
        return Complaint(flag.fill_(1.0), partial(_raise, error))
    return Complaint(flag, _raise_nothing)


def _raise(error: LayoutError) -> NoReturn:
    raise error


def _raise_nothing() -> None:
    """Some other rank has something to raise, or none has."""


def _measured_by(optimizers: Sequence[DistributedOptimizer]) -> tuple[list[ShardedOptimizer], Group]:
    """What is measured, and the ranks that do it together."""
    group = Group.of(optimizers[0].get_grad_stats_parallel_group())
    return [optimizer.sharded for optimizer in optimizers], group


def update_together(optimizers: Sequence[DistributedOptimizer]) -> None:
    """Collective: updates all, then gathers each chunk once."""
    for optimizer in optimizers:
        optimizer.update()
        if optimizer is optimizers[0] and optimizer.config.overlap_param_gather_with_optimizer_step:
            optimizer.model_chunks[0].start_param_sync(force_dispatch=True)
    chunks = list(dict.fromkeys(chunk for optimizer in optimizers for chunk in optimizer.model_chunks))
    gather(optimizers[0].config, optimizers[0].ddp_config, chunks)


def gather(config: Any, ddp_config: Any, chunks: Sequence[Any]) -> None:
    """Collective: the host's own all-gather of the params, unless it overlaps that with forward."""
    if ddp_config.overlap_param_gather:
        return
    with timer(config, "params-all-gather"):
        for chunk in chunks:
            chunk.start_param_sync()


def timer(config: Any, name: str) -> AbstractContextManager[None]:
    """The host's timer of that name, where it keeps timers."""
    return timed(config.timers, name, barrier=config.barrier_with_L1_time)
