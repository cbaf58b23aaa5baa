"""The host's calls that make a step, for one optimizer or a chain of them: all are measured and gathered together."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.comm import Group
from megatron_distopt.errors import HostError, LayoutError, refusal
from megatron_distopt.hosts.base import timed
from megatron_distopt.hosts.between_steps import notice_for, raising
from megatron_distopt.hosts.megatron_core.norm_groups import GroupStats, divide_groups, measure_groups
from megatron_distopt.hosts.megatron_core.start import OneOptimizer, PreparedStep, start_together
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.sharded import ShardedOptimizer
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

StepOfHost = tuple[bool, float | None, int | None]


class StepCalls(MegatronOptimizer):
    """What a class of ours answers to the host's training loop; mixed in before the host's class.

    It has the host's base, without which an object of the host's class could not become one of ours, see adapter.py.
    """

    #: Of the last gradient that was measured, by norm group.
    _group_stats: Mapping[str, GroupStats] = MappingProxyType({})
    #: Called around each step and after a load.
    hooks: Sequence[DigestLog]

    def ours(self) -> Sequence[OneOptimizer]:
        """The optimizers whose step it is."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> StepOfHost:
        """Collective: the whole step.

        Returns:
            (updated, gradient norm, zeros or None), as the host's. Where the check is deferred "updated" is True, and
            norm and zeros are 0-D tensors. A step whose norm is above `grad_norm_skip_threshold` is not made.

        Raises:
            LayoutError, RanksDisagreeError: on all ranks, where params or groups are not as they have to be on one.
        """
        ours = self.ours()
        start_together(ours)
        config, sharded, group = ours[0].config, *_measured_by(ours)
        for hook in self.hooks:
            hook.before()
        with _timer(config, "optimizer-unscale-and-check-inf"):
            finish_deferred_check(sharded, group)
            threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
            waits = threshold < math.inf or any(each.norm_groups for each in ours)  # the CPU has to know norms
            grads = [optimizer.main_grads() for optimizer in sharded]
            find = measure_now if waits else measure
            measured = find(sharded, grads, group, _notice_of(ours, group))
            decisions = decide(sharded, measured, group, clip_grad=config.clip_grad)
        if decisions[0].action is StepAction.SKIP:
            for hook in self.hooks:
                hook.after(decisions[0])
            return False, None, None
        self._group_stats = measure_groups(ours, grads, group)
        zeros = decisions[0].zeros_to_log if config.log_num_zeros_in_grad else None
        if zeros is not None and self._group_stats:
            zeros += self._zeros_of_groups()
        if threshold != math.inf and decisions[0].norm > threshold:
            _leave_out(sharded, decisions[0].norm, threshold, group)
            for hook in self.hooks:
                hook.after(replace(decisions[0], action=StepAction.SKIP))
            return False, decisions[0].norm, zeros
        self._clip_groups(ours, grads, decisions[0], config.clip_grad)
        _update(ours, grads, decisions, self.hooks)
        return True, decisions[0].norm_to_log, zeros

    def _clip_groups(
        self,
        ours: Sequence[OneOptimizer],
        grads: Sequence[Sequence[Tensor]],
        decision: StepDecision,
        clip_grad: float,
    ) -> None:
        """By their own norms, which the host's training loop reads off `grad_norms_by_group`."""
        self.grad_norms_by_group: dict[str, float] = {}
        if self._group_stats and clip_grad > 0:
            norms = {name: stats.norm(decision.unclipped) for name, stats in self._group_stats.items()}
            divide_groups(ours, grads, norms, decision.norm, clip_grad)
            self.grad_norms_by_group = norms

    def _zeros_of_groups(self) -> int:
        return sum(stats.num_zeros for stats in self._group_stats.values())

    def prepare_grads(self) -> bool:
        """Collective: measures all gradients and decides; True where the step must be skipped."""
        ours = self.ours()
        start_together(ours)
        sharded, group = _measured_by(ours)
        for hook in self.hooks:
            hook.before()
        with _timer(ours[0].config, "optimizer-unscale-and-check-inf"):
            finish_deferred_check(sharded, group)
            grads = [optimizer.main_grads() for optimizer in sharded]
            stats = measure_now(sharded, grads, group, _notice_of(ours, group))
            decisions = decide(sharded, stats, group, clip_grad=0.0)
        for optimizer, of_one, decision in zip(ours, grads, decisions, strict=True):
            optimizer.prepared = PreparedStep(of_one, decision)
        if decisions[0].action is StepAction.SKIP:
            for hook in self.hooks:
                hook.after(decisions[0])
            return True
        self._group_stats = measure_groups(ours, grads, group)
        return False

    def get_grad_norm(self) -> float:
        """Of the averaged, unscaled gradient; after `prepare_grads`."""
        return prepared_of(self.ours()[0]).decision.norm

    def count_zeros(self) -> int:
        """Zeros of the whole gradient; after `prepare_grads`, and only where the host's config counts them."""
        return (prepared_of(self.ours()[0]).decision.stats.num_zeros or 0) + self._zeros_of_groups()

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Makes the coming update clip; after `prepare_grads`. Returns the norm before clipping."""
        norm = self.get_grad_norm()
        prepared = [prepared_of(optimizer) for optimizer in self.ours()]
        self._clip_groups(self.ours(), [each.grads for each in prepared], prepared[0].decision, clip_grad)
        for optimizer, before in zip(self.ours(), prepared, strict=True):
            divisor = before.decision.divisor * clip_divisor(norm, clip_grad)
            optimizer.prepared = PreparedStep(before.grads, replace(before.decision, divisor=divisor))
        return norm

    def step_with_ready_grads(self) -> bool:
        """Collective: updates all, then gathers the params once; after `prepare_grads`."""
        ours = self.ours()
        prepared = [prepared_of(optimizer) for optimizer in ours]
        for optimizer in ours:
            optimizer.prepared = None
        _update(ours, [each.grads for each in prepared], [each.decision for each in prepared], self.hooks)
        return True


def _leave_out(sharded: Sequence[ShardedOptimizer], norm: float, threshold: float, group: Group) -> None:
    """Counts a step that the host's `grad_norm_skip_threshold` forbids."""
    for optimizer in sharded:
        optimizer.num_skipped += 1
    if group.rank == 0:
        _log.info("step skipped: its gradient norm %s is above grad_norm_skip_threshold %s", norm, threshold)


def _measured_by(ours: Sequence[OneOptimizer]) -> tuple[list[ShardedOptimizer], Group]:
    """What is measured, and the ranks that do it together."""
    return [optimizer.sharded for optimizer in ours], ours[0].stats_group


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
    """What `prepare_grads` has found.

    Raises:
        HostError: it was not called.
    """
    if optimizer.prepared is None:
        rule, remedy = "be measured first", "Call prepare_grads() before it"
        raise HostError(refusal("gradient statistics", "none", rule, remedy))
    return optimizer.prepared


def _update(
    ours: Sequence[OneOptimizer],
    grads: Sequence[Sequence[Tensor]],
    decisions: Sequence[StepDecision],
    hooks: Sequence[DigestLog],
) -> None:
    """Collective: updates all, then gathers each chunk once, unless the host overlaps that with forward."""
    config = ours[0].config
    for optimizer, of_one, decision in zip(ours, grads, decisions, strict=True):
        with _timer(config, "optimizer-inner-step"):
            update(optimizer.sharded, of_one, decision)
        if optimizer is ours[0] and config.overlap_param_gather_with_optimizer_step:
            optimizer.model_chunks[0].start_param_sync(force_dispatch=True)
    for hook in hooks:
        hook.after(decisions[0])
    if not ours[0].ddp_config.overlap_param_gather:
        with _timer(config, "params-all-gather"):
            for chunk in dict.fromkeys(chunk for optimizer in ours for chunk in optimizer.model_chunks):
                chunk.start_param_sync()


def _timer(config: Any, name: str) -> AbstractContextManager[None]:
    """The host's timer of that name, where it keeps timers."""
    return timed(config.timers, name, barrier=config.barrier_with_L1_time)
