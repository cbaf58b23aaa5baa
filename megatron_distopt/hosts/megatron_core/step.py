"""`CoreStep`: what a step in megatron-core adds to `run_step` of optimizer/step.py. All optimizers
of a chain are measured and gathered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_distopt.errors import HostError, LayoutError
from megatron_distopt.hosts.megatron.timers import timed
from megatron_distopt.hosts.megatron_core.buffers import check_are_in
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, PreparedStep
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.step import (
    Gradients,
    HostStep,
    StepDecision,
    StepHook,
    finish_deferred_check,
    measure,
    measure_now,
    notice_for,
    raising,
)


def show_grads(optimizer: OneOptimizer, grads: MainGrads, divisor: float | Tensor) -> None:
    """Puts the unscaled gradients into `grad` of the main params, where other code looks for
    them."""
    present = [grad for grad in grads if grad is not None]
    if present:
        torch._foreach_div_(present, cast(Tensor, divisor))
    for flat, grad in zip(optimizer.sharded.flat_params, grads, strict=True):
        if grad is not None:
            flat.main.grad = grad.to(flat.main.device)  # a main param may be on the host


def changed_grads(optimizer: OneOptimizer, grads: MainGrads) -> MainGrads:
    """The gradients that `prepare_grads` showed, as other code has changed them. Clears `grad`."""
    changed = list[Tensor | None]()
    for flat, grad in zip(optimizer.sharded.flat_params, grads, strict=True):
        shown, flat.main.grad = flat.main.grad, None
        if shown is not None and grad is not None:
            changed.append(shown.to(grad.device))
        else:
            changed.append(None)
    return changed


def check_between_steps(optimizer: OneOptimizer) -> None:
    """Refuses params that left the host's buffers, groups with other params, and state that is not
    on its device."""
    optimizer.members.check(optimizer.sharded.inner.param_groups)
    if optimizer.counts is not None:
        optimizer.counts.follow()
    optimizer.offloaded.check_is_back()
    for buffer in optimizer.buffers:
        check_are_in(buffer, optimizer.named)
    optimizer.written.check()


@dataclass(kw_only=True, eq=False)
class CoreStep(HostStep):
    """A step of the optimizers of a chain; the host's DistributedDataParallel has reduced the
    gradients."""

    ours: Sequence[OneOptimizer]
    needs_norm: bool = False  # whether the CPU needs the norm in this step

    @classmethod
    def of(
        cls, ours: Sequence[OneOptimizer], hooks: Sequence[StepHook], **options: Any
    ) -> CoreStep:
        config = ours[0].config
        return cls(
            ours=ours,
            optimizers=[each.sharded for each in ours],
            everyone=ours[0].stats_group,
            hooks=hooks,
            shows_inner=True,
            timer=partial(timed, config.timers, config),
            **options,
        )

    def follow_user(self) -> None:
        for optimizer in self.ours:
            check_between_steps(optimizer)

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        device = self.optimizers[0].device
        flag = torch.full((1,), float(found is not None), dtype=stats_dtype(device), device=device)
        notice = notice_for(raising(found), flag, self.everyone)
        measure_with = measure_now if self.needs_norm else measure
        measured = measure_with(self.optimizers, grads, self.everyone, notice)
        divisors = [optimizer.divisor for optimizer in self.optimizers]
        return Gradients(grads, measured, divisors)

    def follow_update(self, number: int) -> None:
        optimizer = self.ours[number]
        optimizer.written.forget()
        if number == 0 and optimizer.config.overlap_param_gather_with_optimizer_step:
            optimizer.model_chunks[0].start_param_sync(force_dispatch=True)

    def gather(self) -> None:
        """Gathers each chunk once, unless the host overlaps that with forward."""
        if self.ours[0].ddp_config.overlap_param_gather:
            return
        with self.timer("params-all-gather"):
            for chunk in dict.fromkeys(chunk for each in self.ours for chunk in each.model_chunks):
                chunk.start_param_sync()

    def end(self, decisions: Sequence[StepDecision]) -> None:
        """Ends a step. With a deferred check the CPU waits for the statistics here, while the
        device makes the update."""
        if self.optimizers[0].deferred_check is not None:
            finish_deferred_check(self.optimizers, self.everyone, when="")
        for optimizer in self.ours:
            if optimizer.counts is not None and decisions[0].updated:
                optimizer.counts.show(is_after_update=True)


def prepared_of(optimizer: OneOptimizer) -> PreparedStep:
    """The result of `prepare_grads`. Raises if that was not called."""
    if optimizer.prepared is None:
        raise HostError("The gradients were not measured yet. Call prepare_grads() first.")
    return optimizer.prepared
