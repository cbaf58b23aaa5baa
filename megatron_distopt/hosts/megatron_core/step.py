"""The host's calls that make a step, for one optimizer or a chain of them: all are measured and
gathered together."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_distopt.checkpoint import WholeModel
from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.comm import Group
from megatron_distopt.errors import AccessError, HostError, LayoutError
from megatron_distopt.hosts.averaging import average_evaluation
from megatron_distopt.hosts.base import timed
from megatron_distopt.hosts.between_steps import notice_for, raising
from megatron_distopt.hosts.megatron_core.facts import CLASS_POINT, EVALUATE_POINT, PATCH_POINT
from megatron_distopt.hosts.megatron_core.model_parallel import (
    OneOptimizer,
    PreparedStep,
    whole_model_of,
)
from megatron_distopt.hosts.protecting import ScriptCalls
from megatron_distopt.hosts.report import announce, describe
from megatron_distopt.hosts.saving import StepHook, hooks_of, protection_of
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.main_params import MainGrads, main_grads
from megatron_distopt.optimizer.step import (
    StepAction,
    StepDecision,
    clip_divisor,
    decide,
    finish_deferred_check,
    measure,
    measure_now,
    update,
)

_log = logging.getLogger("megatron_distopt")

#: Methods that the host's own `step` calls of each optimizer.
_PARTS_OF_STEP = frozenset(
    (
        "prepare_grads",
        "get_parameters",
        "get_grad_norm",
        "clip_grad_norm",
        "count_zeros",
        "step_with_ready_grads",
    )
)


class StepCalls(MegatronOptimizer, ScriptCalls):
    """What a class of ours answers to the host's training loop; mixed in before the host's class.

    It has the host's base first, or an object of the host's class could not become one of ours, see
    adapter.py.
    """

    #: The host writes norms of some params there, which are refused at the start.
    grad_norms_by_group: Mapping[str, float] = MappingProxyType({})

    def ours(self) -> Sequence[OneOptimizer]:
        """The optimizers that it stands for."""
        raise NotImplementedError

    @cached_property
    def hooks(self) -> Sequence[StepHook]:
        """Called around each step and after a load; none without options that ask for them."""
        return hooks_of(self.protection, self.ours()[0].sharded.config, self._whole, Group.of())

    @cached_property
    def protection(self) -> Protection | None:  # type: ignore[override]
        """Collective at the first use."""
        sharded = self.ours()[0].sharded
        found = protection_of(sharded.config, self._whole, Group.of(), sharded.device, self._settle)
        for optimizer in self.ours():  # each of a chain waits for copies before its state changes
            vars(optimizer)["protection"] = found
        return found

    def _whole(self) -> WholeModel:
        return whole_model_of(self.ours())

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Collective: the whole step.

        Returns:
            (updated, gradient norm, zeros or None), numbers as the host's. A step whose norm is
            above `grad_norm_skip_threshold` is not made.

        Raises:
            LayoutError, RanksDisagreeError: on all ranks, where params or groups are not as they
                have to be on one.
        """
        if self._is_overridden():
            by_parts: tuple[bool, float | None, int | None] = super().step()
            return by_parts
        ours = self.ours()
        config, group = ours[0].config, ours[0].stats_group
        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        grads, decisions = self._measure_and_decide(
            config.clip_grad, needs_norm=threshold < math.inf
        )
        decision = decisions[0]
        if decision.action is StepAction.SKIP:
            return False, None, None
        if threshold < math.inf and decision.norm > threshold:
            for optimizer in ours:
                optimizer.sharded.num_skipped += 1
            if group.rank == 0:
                _log.info(
                    "step skipped: its gradient norm %s is above grad_norm_skip_threshold %s",
                    decision.norm,
                    threshold,
                )
            for hook in self.hooks:
                hook.after(replace(decision, action=StepAction.SKIP))
            return (
                False,
                decision.norm,
                (decision.stats.num_zeros or 0) if config.log_num_zeros_in_grad else None,
            )
        self._update(grads, decisions)
        if decision.found_inf is not None and not decision.updated:
            return False, None, None
        return (
            True,
            decision.norm,
            (decision.stats.num_zeros or 0) if config.log_num_zeros_in_grad else None,
        )

    def _is_overridden(self) -> bool:
        """Whether other code has put functions of its own in the place of what the host's own step
        calls."""
        return any(
            not _PARTS_OF_STEP.isdisjoint(vars(optimizer)) for optimizer in (self, *self.ours())
        )

    def prepare_grads(self) -> bool:
        """Collective: measures all gradients and decides; True where the step must be skipped.

        Otherwise the main params have their unscaled gradients in `grad`, where they can be changed
        until the update.
        """
        grads, decisions = self._measure_and_decide(clip_grad=0.0, needs_norm=True)
        for optimizer, of_one, decision in zip(self.ours(), grads, decisions, strict=True):
            optimizer.prepared = PreparedStep(of_one, decision)
            if decision.action is not StepAction.SKIP:
                optimizer.prepared = PreparedStep(of_one, replace(decision, divisor=1.0))
                if decision.divisor != 1.0 and of_one:
                    torch._foreach_div_(list(of_one), decision.divisor)
                for flat, grad in zip(optimizer.sharded.flat_params, of_one, strict=True):
                    flat.main.grad = grad.to(flat.main.device)  # a main param may be on the host
        return decisions[0].action is StepAction.SKIP

    def _measure_and_decide(
        self, clip_grad: float, *, needs_norm: bool
    ) -> tuple[Sequence[Sequence[Tensor]], Sequence[StepDecision]]:
        """Collective: the main grads of each optimizer and what is done with them.

        `needs_norm`: the CPU has to know the norm in this step.
        """
        ours = self.ours()
        start_together(ours)
        sharded, group = [optimizer.sharded for optimizer in ours], ours[0].stats_group
        for hook in self.hooks:
            hook.before()
        with _timer(ours[0].config, "optimizer-unscale-and-check-inf"):
            finish_deferred_check(sharded, group)
            grads = [main_grads(optimizer.flat_params) for optimizer in sharded]
            stats = (measure_now if needs_norm else measure)(
                sharded, grads, group, _notice_of(ours, group)
            )
            decisions = decide(sharded, stats, group, clip_grad=clip_grad)
        if decisions[0].action is StepAction.SKIP:
            for hook in self.hooks:
                hook.after(decisions[0])
        return grads, decisions

    def _collect_main_grad_data_for_unscaling(self) -> NoReturn:
        """Refused, as is the other part of the host's own step of which there is nothing here."""
        raise AccessError(
            "_collect_main_grad_data_for_unscaling or _unscale_main_grads_and_check_for_nan was "
            "called, and gradients are unscaled in the update. Call prepare_grads(), which returns "
            "whether the step must be skipped."
        )

    _unscale_main_grads_and_check_for_nan = _collect_main_grad_data_for_unscaling

    def get_grad_norm(self) -> float:
        """Of the averaged, unscaled gradient; after `prepare_grads`."""
        if self._is_overridden():
            return float(super().get_grad_norm())
        return prepared_of(self.ours()[0]).decision.norm

    def count_zeros(self) -> int:
        """Zeros of the whole gradient; after `prepare_grads`, and only where the host's config
        counts them."""
        return prepared_of(self.ours()[0]).decision.stats.num_zeros or 0

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Makes the coming update clip; after `prepare_grads`. Returns the norm before clipping."""
        norm = self.get_grad_norm()
        for optimizer in self.ours():
            before = prepared_of(optimizer)
            divisor = before.decision.divisor * clip_divisor(norm, clip_grad)
            optimizer.prepared = PreparedStep(
                before.grads, replace(before.decision, divisor=divisor)
            )
        return norm

    def step_with_ready_grads(self) -> bool:
        """Collective: updates all, then gathers the params once; after `prepare_grads`."""
        if self not in self.ours() and self._is_overridden():
            return bool(super().step_with_ready_grads())
        prepared, grads = [prepared_of(optimizer) for optimizer in self.ours()], list[MainGrads]()
        for optimizer, step in zip(self.ours(), prepared, strict=True):
            optimizer.prepared = None
            pairs = [
                (flat.main, grad)
                for flat, grad in zip(optimizer.sharded.flat_params, step.grads, strict=True)
            ]
            grads.append(
                [None if main.grad is None else main.grad.to(grad.device) for main, grad in pairs]
            )
            for main, _ in pairs:
                main.grad = None
        self._update(grads, [step.decision for step in prepared])
        return True

    def _update(self, grads: Sequence[MainGrads], decisions: Sequence[StepDecision]) -> None:
        """Collective: updates all, then gathers each chunk once, unless the host overlaps that with
        forward."""
        ours = self.ours()
        config = ours[0].config
        for optimizer, of_one, decision in zip(ours, grads, decisions, strict=True):
            with _timer(config, "optimizer-inner-step"):
                update(optimizer.sharded, of_one, decision)
                optimizer.written.forget()
            if optimizer is ours[0] and config.overlap_param_gather_with_optimizer_step:
                optimizer.model_chunks[0].start_param_sync(force_dispatch=True)
        for hook in self.hooks:
            hook.after(decisions[0])
        if not ours[0].ddp_config.overlap_param_gather:
            with _timer(config, "params-all-gather"):
                for chunk in dict.fromkeys(
                    chunk for optimizer in ours for chunk in optimizer.model_chunks
                ):
                    chunk.start_param_sync()
        # Where the check is deferred, the device goes on with the update while the CPU waits for
        # the statistics.
        finish_deferred_check(
            [optimizer.sharded for optimizer in ours], ours[0].stats_group, when=""
        )
        for counts in (optimizer.counts for optimizer in ours):
            if counts is not None and decisions[0].updated:
                counts.show(is_after_update=True)


def start_together(optimizers: Sequence[OneOptimizer]) -> None:
    """Collective: compares ranks and says what is active, once for each optimizer, before its first
    step."""
    waiting = [optimizer for optimizer in optimizers if not optimizer.is_started]
    for optimizer in waiting:
        optimizer.check_start_up()
        optimizer.is_started = True
    if waiting:
        average_evaluation(waiting, EVALUATE_POINT)
    if waiting and Group.of().rank == 0:
        sharded = [optimizer.sharded for optimizer in waiting]
        announce(
            describe(
                "megatron-core",
                (PATCH_POINT, CLASS_POINT),
                sharded,
                sharded[0].loss_scale.scale.device,
            )
        )


def _notice_of(ours: Sequence[OneOptimizer], group: Group) -> Notice:
    """What the user did to params and groups since the last step that cannot be followed."""
    device, found = ours[0].sharded.device, None
    try:
        for optimizer in ours:
            optimizer.check_between_steps()
    except LayoutError as error:
        found = error
    flag = torch.full((1,), 0.0 if found is None else 1.0, dtype=stats_dtype(device), device=device)
    return notice_for(raising(found), flag, group)


def prepared_of(optimizer: OneOptimizer) -> PreparedStep:
    """What `prepare_grads` has found, which must have been called."""
    if optimizer.prepared is None:
        raise HostError("Gradients were not measured before this call. Call prepare_grads() first.")
    return optimizer.prepared


def _timer(config: Any, name: str) -> AbstractContextManager[None]:
    return timed(config.timers, name, barrier=config.barrier_with_L1_time)
