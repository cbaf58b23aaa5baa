"""Measuring a gradient together and deciding about the step, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_distopt.comm import Group, exchange, profiled, raise_together
from megatron_distopt.config import NonFinitePolicy
from megatron_distopt.errors import NonFiniteGradError, refusal
from megatron_distopt.optimizer.deferred import DeferredCheck, HostCopy, deferred_divisor, found_inf_of
from megatron_distopt.optimizer.grad_norm import (
    GradStats,
    local_numbers,
    local_stats,
    nonfinite_params,
    reduce_stats,
    sum_with,
)
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.verdict import StepAction, StepDecision, clip_divisor

if TYPE_CHECKING:
    from megatron_distopt.optimizer.sharded import ShardedOptimizer

__all__ = [
    "Complaint",
    "check_complaint",
    "decide_together",
    "divide_deferred",
    "finish_deferred_check",
    "judge_together",
    "measure_deferred",
    "measure_together",
    "send_deferred",
]

_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True, eq=False)
class Complaint:
    """What one rank may have to raise about the step, told to all ranks in the all-reduce of the statistics.

    Args:
        flag: 1-D [1], of the dtype and device of statistics, above 0 where there is something; becomes the ranks' sum.
        check: raises it on this rank, or nothing.
    """

    flag: Tensor
    check: Callable[[], None]


def decide_together(
    optimizers: Sequence[ShardedOptimizer],
    group: Group,
    *,
    clip_grad: float | None = None,
    complaint: Complaint | None = None,
) -> tuple[StepDecision, ...]:
    """Collective: settles the step before, attaches and measures the grads, and decides; one decision an optimizer.

    What a step does without asking hosts, in one call. See [Note: deferred check] in deferred.py.

    Args:
        optimizers: of one model on this rank; equal configs and device.
        group: all ranks that hold a part of the model.
        clip_grad: as the config says where None.
        complaint: on all ranks or on none; None where the host has nothing to ask.

    Raises:
        NonFiniteGradError: on all ranks, where a gradient is not finite (late: was, in the step before) and the policy
            is "raise".
        DistOptError: on all ranks, what one of them complains about (late: complained about, in the step before).
    """
    clip_grad = optimizers[0].config.clip_grad if clip_grad is None else clip_grad
    finish_deferred_check(optimizers, group)
    divisors = [optimizer.divisor for optimizer in optimizers]  # before the loss scale moves
    with profiled("measure gradients"):
        if all(optimizer.defers_check for optimizer in optimizers):
            return _decided_deferred(optimizers, _measure_deferred_with(optimizers, group, complaint), clip_grad)
        stats = measure_together(optimizers, group, extra=None if complaint is None else complaint.flag)
        check_complaint(optimizers, complaint, group)
        verdict = judge_together(optimizers, stats, group)
    return tuple(
        StepDecision(verdict, stats, divisor, divisor * clip_divisor(stats.norm(divisor), clip_grad))
        for divisor in divisors
    )


def check_complaint(optimizers: Sequence[ShardedOptimizer], complaint: Complaint | None, group: Group) -> None:
    """Collective where a rank complains: raises that on all ranks. After the statistics were added up with its flag.

    Raises:
        DistOptError
    """
    if complaint is not None and complaint.flag.item() > 0:
        _release(optimizers)
        raise_together(complaint.check, group, "step")


def _measure_deferred_with(optimizers: Sequence[ShardedOptimizer], group: Group, complaint: Complaint | None) -> Tensor:
    """Collective: `measure_deferred`; what ranks complain about is raised by the next `finish_deferred_check`."""
    if complaint is None:
        return measure_deferred(optimizers, group)
    numbers = measure_deferred(optimizers, group, complaint.flag)
    optimizers[0].open_complaint = (HostCopy(complaint.flag), complaint.check)
    return numbers


def _decided_deferred(
    optimizers: Sequence[ShardedOptimizer], numbers: Tensor, clip_grad: float
) -> tuple[StepDecision, ...]:
    late = send_deferred(optimizers, numbers)
    return tuple(
        StepDecision(
            StepAction.UPDATE,
            late,
            optimizer.divisor,
            *divide_deferred(optimizer, numbers, clip_grad, optimizer.divisor),
        )
        for optimizer in optimizers
    )


def measure_deferred(optimizers: Sequence[ShardedOptimizer], group: Group, extra: Tensor | None = None) -> Tensor:
    """Collective: `measure_together` without waiting for the numbers.

    Args: as of `measure_together`.

    Returns:
        On the device, see `DeferredCheck`.
    """
    flat_params = _attached(optimizers)
    device, count_zeros = optimizers[0].device, optimizers[0].config.count_zeros
    stats, flags = local_numbers(flat_params, device, count_zeros=count_zeros)
    return torch.cat([sum_with(stats, extra, group), flags])


def divide_deferred(
    optimizer: ShardedOptimizer, numbers: Tensor, clip_grad: float, divisor: float
) -> tuple[float | Tensor, Tensor | None]:
    """What the gradient is to be divided by, and `found_inf`; on the device.

    Args:
        optimizer: of those that were measured.
        numbers: what `measure_deferred` returned.
        clip_grad: 0 for no clipping.
        divisor: of the gradient without clipping.
    """
    found_inf = None if optimizer.config.policy is NonFinitePolicy.LOG else found_inf_of(numbers)
    return deferred_divisor(numbers, divisor, clip_grad), found_inf


def send_deferred(optimizers: Sequence[ShardedOptimizer], numbers: Tensor) -> DeferredCheck:
    """Sends the numbers of `measure_deferred` to the CPU; every optimizer looks at them at its next step."""
    flat_params = [flat for optimizer in optimizers for flat in optimizer.flat_params]
    late = DeferredCheck(numbers, flat_params, counts_zeros=optimizers[0].config.count_zeros)
    if optimizers[0].config.policy is NonFinitePolicy.RAISE:
        late.report_unless_settled()
    for optimizer in optimizers:
        optimizer.expect(late)
    return late


def finish_deferred_check(optimizers: Sequence[ShardedOptimizer], group: Group) -> None:
    """Collective where the gradient of the last step was not finite: does what the policy says about it, if that step
    left it open. Waits for the statistics of that step.

    Raises:
        NonFiniteGradError: on all ranks, where it was not finite and the policy is "raise".
        DistOptError: on all ranks, what one of them complained about.
    """
    _settle_complaint(optimizers, group)
    open_verdicts = [optimizer.take_deferred_check() for optimizer in optimizers]
    late, policy = open_verdicts[0], optimizers[0].config.policy
    if late is None or late.stats.is_finite or policy is NonFinitePolicy.SKIP:
        return
    if policy is NonFinitePolicy.RAISE:
        _release(optimizers)  # a host may have attached those of this step already, and makes it anew
    _report_nonfinite(late.nonfinite_flat_params(), policy, group, when=", in the step before")


def _settle_complaint(optimizers: Sequence[ShardedOptimizer], group: Group) -> None:
    open_complaint, optimizers[0].open_complaint = optimizers[0].open_complaint, None
    if open_complaint is not None and open_complaint[0].values[0] > 0:
        _release(optimizers)
        raise_together(open_complaint[1], group, "step")


def measure_together(
    optimizers: Sequence[ShardedOptimizer],
    group: Group,
    *,
    count_zeros: bool | None = None,
    extra: Tensor | None = None,
) -> GradStats:
    """Collective: attaches the grads of all the optimizers and measures them with one all-reduce.

    Args:
        optimizers: of one model on this rank, e.g. one for dense and one for expert params; equal configs.
        group: all ranks that hold a part of the model.
        count_zeros: as the config says where None.
        extra: other numbers that are added up in the same all-reduce, see `sum_with`.
    """
    count_zeros = optimizers[0].config.count_zeros if count_zeros is None else count_zeros
    local = local_stats(_attached(optimizers), optimizers[0].device, count_zeros=count_zeros)
    return reduce_stats(local, group, count_zeros=count_zeros, extra=extra)


def _attached(optimizers: Sequence[ShardedOptimizer]) -> list[FlatParam]:
    for optimizer in optimizers:
        optimizer.attach_grads()
    return [flat for optimizer in optimizers for flat in optimizer.flat_params]


def judge_together(optimizers: Sequence[ShardedOptimizer], stats: GradStats, group: Group) -> StepAction:
    """Collective where a gradient is not finite: what becomes of the step, the same on all ranks.

    The loss scales are moved, and the grads of a step that does not happen are let go of.

    Raises:
        NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise".
    """
    curable = not stats.is_finite and all(optimizer.loss_scale.can_back_off() for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.loss_scale.update(found_nonfinite=not stats.is_finite)
    if stats.is_finite:
        return StepAction.UPDATE
    policy = optimizers[0].config.policy
    if not curable and policy is not NonFinitePolicy.SKIP:
        names = nonfinite_params([flat for optimizer in optimizers for flat in optimizer.flat_params])
        if policy is NonFinitePolicy.RAISE:
            _release(optimizers)
        _report_nonfinite(names, policy, group)
        return StepAction.UPDATE
    for optimizer in optimizers:
        optimizer.num_skipped += 1
    _release(optimizers)
    return StepAction.SKIP


def _report_nonfinite(names: Sequence[str], policy: NonFinitePolicy, group: Group, when: str = "") -> None:
    """Collective: says where, as an error or, where the policy is "log", as a warning.

    Args:
        names: of what is not finite on this rank.
        when: if it is not this step.
    """
    found = enumerate(exchange(names, group))
    places = [f"rank {group.global_rank(rank)}: {_some(each)}" for rank, each in found if each]
    where = _some(places, separator="; ") + when
    if policy is NonFinitePolicy.RAISE:
        remedy = (
            "Look at those params first; MEGATRON_DISTOPT_NONFINITE=skip leaves such steps out, =log goes on with them"
        )
        raise NonFiniteGradError(refusal("gradient", f"inf or nan on {where}", "be finite", remedy))
    if group.rank == 0:
        _log.warning("gradient is inf or nan on %s; the update goes on because nonfinite='log'", where)


def _release(optimizers: Sequence[ShardedOptimizer]) -> None:
    for optimizer in optimizers:
        optimizer.release_grads()


def _some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest
