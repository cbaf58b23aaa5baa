"""The host's calls that make a step, for one optimizer or a chain of them, and what a step of the
host adds to `run_step` of optimizer/step.py: all are measured and gathered together."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn, cast

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch._compile import _disable_dynamo

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
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.step import (
    Gradients,
    HostStep,
    StepAction,
    StepDecision,
    check_gradients,
    clip_divisor,
    finish_deferred_check,
    measure,
    measure_now,
    run_step,
    update_params,
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

    @_disable_dynamo
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
        config = ours[0].config
        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        start_together(ours)
        step = CoreStep.of(
            ours,
            self.hooks,
            clip_grad=config.clip_grad,
            largest_norm=threshold,
            needs_norm=threshold < math.inf,
        )
        decision = run_step(step)[0]
        if decision.action is StepAction.TOO_LARGE and step.everyone.rank == 0:
            _log.info(
                "step skipped: its gradient norm %s is above grad_norm_skip_threshold %s",
                decision.norm,
                threshold,
            )
        is_made = decision.action is StepAction.UPDATE
        if decision.found_inf is not None:
            is_made = decision.updated
        if not is_made and decision.action is not StepAction.TOO_LARGE:
            return False, None, None
        zeros = (decision.stats.num_zeros or 0) if config.log_num_zeros_in_grad else None
        return is_made, decision.norm, zeros

    def _is_overridden(self) -> bool:
        """Whether other code has put functions of its own in the place of what the host's own step
        calls."""
        return any(
            not _PARTS_OF_STEP.isdisjoint(vars(optimizer)) for optimizer in (self, *self.ours())
        )

    @_disable_dynamo
    def prepare_grads(self) -> bool:
        """Collective: measures all gradients and decides; True where the step must be skipped.

        Otherwise the main params have their unscaled gradients in `grad`, where they can be changed
        until the update.
        """
        start_together(self.ours())
        step = CoreStep.of(self.ours(), self.hooks, clip_grad=0.0, needs_norm=True)
        gradients, decisions = check_gradients(step)
        for optimizer, grads, decision in zip(self.ours(), gradients.main, decisions, strict=True):
            optimizer.prepared = PreparedStep(grads, decision)
            if decision.action is not StepAction.SKIP:
                optimizer.prepared = PreparedStep(grads, replace(decision, divisor=1.0))
                _show_grads(optimizer, grads, decision.divisor)
        return decisions[0].action is StepAction.SKIP

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

    @_disable_dynamo
    def step_with_ready_grads(self) -> bool:
        """Collective: updates all, then gathers the params once; after `prepare_grads`."""
        if self not in self.ours() and self._is_overridden():
            return bool(super().step_with_ready_grads())
        prepared = [prepared_of(optimizer) for optimizer in self.ours()]
        grads = list[MainGrads]()
        for optimizer, before in zip(self.ours(), prepared, strict=True):
            optimizer.prepared = None
            grads.append(_changed_grads(optimizer, before.grads))
        step = CoreStep.of(self.ours(), self.hooks)
        decisions = [before.decision for before in prepared]
        with torch.no_grad():
            update_params(step, grads, decisions)
            step.end(decisions)
        return True


def _show_grads(optimizer: OneOptimizer, grads: MainGrads, divisor: float | Tensor) -> None:
    """Puts the unscaled gradients where other code looks for them."""
    present = [grad for grad in grads if grad is not None]
    if present:
        torch._foreach_div_(present, cast(Tensor, divisor))
    for flat, grad in zip(optimizer.sharded.flat_params, grads, strict=True):
        if grad is not None:
            flat.main.grad = grad.to(flat.main.device)  # a main param may be on the host


def _changed_grads(optimizer: OneOptimizer, grads: MainGrads) -> MainGrads:
    """What other code has made of the gradients that `prepare_grads` showed; takes them away."""
    changed = list[Tensor | None]()
    for flat, grad in zip(optimizer.sharded.flat_params, grads, strict=True):
        shown, flat.main.grad = flat.main.grad, None
        if shown is not None and grad is not None:
            changed.append(shown.to(grad.device))
        else:
            changed.append(None)
    return changed


@dataclass(kw_only=True, eq=False)
class CoreStep(HostStep):
    """A step of the optimizers of a chain; the host's DistributedDataParallel has reduced the
    gradients."""

    ours: Sequence[OneOptimizer]
    needs_norm: bool = False  # whether the CPU has to know the norm in this step

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
            timer=partial(timed, config.timers, barrier=config.barrier_with_L1_time),
            **options,
        )

    def follow_user(self) -> LayoutError | None:
        """What the user did to params and groups since the last step that cannot be followed."""
        try:
            for optimizer in self.ours:
                optimizer.check_between_steps()
        except LayoutError as error:
            return error
        return None

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
        """Each chunk once, unless the host overlaps that with forward."""
        if self.ours[0].ddp_config.overlap_param_gather:
            return
        chunks = dict.fromkeys(chunk for each in self.ours for chunk in each.model_chunks)
        with self.timer("params-all-gather"):
            for chunk in chunks:
                chunk.start_param_sync()

    def end(self, decisions: Sequence[StepDecision]) -> None:
        """Where the check is deferred, the device goes on with the update while the CPU waits for
        the statistics."""
        if self.optimizers[0].deferred_check is not None:
            finish_deferred_check(self.optimizers, self.everyone, when="")
        for optimizer in self.ours:
            if optimizer.counts is not None and decisions[0].updated:
                optimizer.counts.show(is_after_update=True)


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


def prepared_of(optimizer: OneOptimizer) -> PreparedStep:
    """What `prepare_grads` has found, which must have been called."""
    if optimizer.prepared is None:
        raise HostError("Gradients were not measured before this call. Call prepare_grads() first.")
    return optimizer.prepared
