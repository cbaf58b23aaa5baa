"""One step of ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 5.1), between the reduce-scatter of the grads and the
all-gather of the params, which the host does.

`make_step` is the algorithm: measure -> decide -> update. Every host makes its steps of these three
functions; what one of them finds is passed to the next. `measure` has a variation, in which the CPU
does not wait for what was measured:
[Note: deferred check] in deferred.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
from torch import Tensor

from megatron_distopt.comm import Group, profiled
from megatron_distopt.config import NonFinitePolicy
from megatron_distopt.optimizer.deferred import (
    DeferredCheck,
    Notice,
    deferred_divisor,
    deferred_norm,
    found_inf_of,
)
from megatron_distopt.optimizer.grad_norm import (
    GradStats,
    local_numbers,
    local_stats,
    nonfinite_params,
    report_nonfinite,
    sum_with,
)
from megatron_distopt.optimizer.inner import FlatOptimizer, rounds_itself, update_mains
from megatron_distopt.optimizer.main_params import MainGrads, main_grads
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class StepAction(Enum):
    """What is done with a step after the gradients were checked, the same on all ranks."""

    #: The params are updated.
    UPDATE = "update"
    #: Nothing is changed but the loss scale.
    SKIP = "skip"
    #: All ranks raise `NonFiniteGradError`.
    RAISE = "raise"


@dataclass(frozen=True, eq=False, repr=False)
class StepDecision:
    """What all ranks decided about a step of one optimizer, and so what the step did.

    Where the check is deferred, reading whether it updated, norm or zeros waits for the device.
    """

    action: StepAction  # UPDATE also where the kernel has to skip by itself, see `found_inf`
    # statistics of the gradient, or the deferred check that has them
    measured: GradStats | DeferredCheck
    unclipped: float  # what the gradient had to be divided by when it was measured
    divisor: float | Tensor  # the same with clipping; a tensor is 0-D, fp32 and on the device
    # fp32 0-D, given to the kernel: where it is 1 it changes nothing. None where that is known
    # already.
    found_inf: Tensor | None = None

    @property
    def stats(self) -> GradStats:
        return self.measured.stats if isinstance(self.measured, DeferredCheck) else self.measured

    @property
    def norm(self) -> float:
        """L2 norm of the averaged, unscaled gradient before clipping."""
        return self.stats.norm(self.unclipped)

    @property
    def updated(self) -> bool:
        """False where it was skipped; params, moments and step counts are then bit for bit as
        before."""
        return self.action is StepAction.UPDATE and (self.found_inf is None or self.stats.is_finite)

    @property
    def grad_norm(self) -> float | None:
        """`norm`; None where the step was skipped."""
        return self.norm if self.updated else None

    @property
    def num_zeros(self) -> int | None:
        """Elements of the gradient that are exactly zero; None where they were not counted, or the
        step was skipped."""
        return self.stats.num_zeros if self.updated else None

    @property
    def norm_to_log(self) -> float:
        """`norm` without waiting: where the check is deferred a 0-D tensor, which is used as the
        float is."""
        if not isinstance(self.measured, DeferredCheck):
            return self.norm
        return cast(float, deferred_norm(self.measured.numbers, self.unclipped))

    @property
    def zeros_to_log(self) -> int | None:
        """Zeros of the gradient in the same way; None where they were not counted."""
        if not isinstance(self.measured, DeferredCheck):
            return self.measured.num_zeros
        return cast(int, self.measured.numbers[1].long()) if self.measured.counts_zeros else None

    def __repr__(self) -> str:
        return (
            f"StepDecision(updated={self.updated}, grad_norm={self.grad_norm}, "
            f"num_zeros={self.num_zeros})"
        )


@torch.no_grad()
def make_step(optimizers: Sequence[ShardedOptimizer], group: Group) -> tuple[StepDecision, ...]:
    """Collective: one step. Needs the reduced grads in this rank's shards, and leaves the new
    params there.

    Args:
        optimizers: of one model on this rank, e.g. one for dense and one for expert params; equal
            configs and device.
        group: all ranks that hold a part of the model.

    Raises:
        NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise";
            one step later where the check is deferred.
    """
    finish_deferred_check(optimizers, group)
    grads = [main_grads(optimizer.flat_params) for optimizer in optimizers]
    measured = measure(optimizers, grads, group)
    decisions = decide(optimizers, measured, group)
    for optimizer, of_one, decision in zip(optimizers, grads, decisions, strict=True):
        if decision.action is StepAction.UPDATE:
            update(optimizer, of_one, decision)
    return decisions


# --- measure: the norm of the whole gradient, and whether all of it is finite


def measure(
    optimizers: Sequence[ShardedOptimizer],
    grads: Sequence[MainGrads],
    group: Group,
    notice: Notice | None = None,
) -> GradStats | DeferredCheck:
    """Collective: measures the gradients of all the optimizers with one all-reduce; for the
    arguments see `make_step`.

    `notice` is what ranks tell each other in the same all-reduce. They act on it now, which may
    raise on all ranks, or in the next step where the check is deferred.
    """
    if not all(optimizer.defers_check for optimizer in optimizers):
        return measure_now(optimizers, grads, group, notice)
    count_zeros, device = optimizers[0].config.count_zeros, optimizers[0].device
    flat_params = [flat for optimizer in optimizers for flat in optimizer.flat_params]
    present = [grad for of_one in grads for grad in of_one if grad is not None]
    with profiled("measure gradients"):
        stats, flags = local_numbers(flat_params, present, device, count_zeros=count_zeros)
        numbers = torch.cat(
            [sum_with(stats, None if notice is None else notice.numbers, group), flags]
        )
    return DeferredCheck(numbers, flat_params, counts_zeros=count_zeros, notice=notice)


def measure_now(
    optimizers: Sequence[ShardedOptimizer],
    grads: Sequence[MainGrads],
    group: Group,
    notice: Notice | None = None,
    *,
    count_zeros: bool | None = None,
) -> GradStats:
    """Collective: `measure` where the CPU has to know the statistics at once, and waits for
    them."""
    count_zeros = optimizers[0].config.count_zeros if count_zeros is None else count_zeros
    flat_params = [flat for optimizer in optimizers for flat in optimizer.flat_params]
    present = [grad for of_one in grads for grad in of_one if grad is not None]
    with profiled("measure gradients"):
        local = local_stats(flat_params, present, optimizers[0].device, count_zeros=count_zeros)
        numbers = sum_with(local, None if notice is None else notice.numbers, group)
        sum_of_squares, zeros, nonfinite = numbers.tolist()  # waits for the device
    if notice is not None:
        notice.act(notice.head.tolist())
    return GradStats(sum_of_squares, int(zeros) if count_zeros else None, int(nonfinite))


# --- decide: update, skip or raise, and what the gradient is divided by


def decide(
    optimizers: Sequence[ShardedOptimizer],
    measured: GradStats | DeferredCheck,
    group: Group,
    *,
    clip_grad: float | None = None,
    divisors: Sequence[float] | None = None,
) -> tuple[StepDecision, ...]:
    """Collective where a gradient is not finite: decides about the step, by optimizer, and moves
    the loss scales.

    Args:
        optimizers: as of `make_step`.
        measured: what `measure` returned.
        group: all ranks that hold a part of the model.
        clip_grad: as the config says where None; 0 for no clipping.
        divisors: what the gradients have to be divided by; `ShardedOptimizer.divisor` of each where
            None.

    Raises:
        NonFiniteGradError: as of `make_step`.
    """
    clip_grad = optimizers[0].config.clip_grad if clip_grad is None else clip_grad
    # before the loss scale moves
    divisors = divisors or [optimizer.divisor for optimizer in optimizers]
    if isinstance(measured, DeferredCheck):
        policy = optimizers[0].config.policy
        if policy is NonFinitePolicy.RAISE:
            measured.report_unless_settled()
        for optimizer in optimizers:
            optimizer.deferred_check = measured
        found_inf = None if policy is NonFinitePolicy.LOG else found_inf_of(measured.numbers)
        clipped = [deferred_divisor(measured.numbers, divisor, clip_grad) for divisor in divisors]
        pairs = zip(divisors, clipped, strict=True)
        return tuple(StepDecision(StepAction.UPDATE, measured, *pair, found_inf) for pair in pairs)
    action, is_finite = StepAction.UPDATE, measured.is_finite
    if not is_finite:
        policy = optimizers[0].config.policy
        if policy is NonFinitePolicy.SKIP or all(
            optimizer.loss_scale.can_back_off() for optimizer in optimizers
        ):
            action = StepAction.SKIP
        elif policy is NonFinitePolicy.RAISE:
            action = StepAction.RAISE
    for optimizer in optimizers:
        optimizer.loss_scale.update(found_nonfinite=not is_finite)
        if action is StepAction.SKIP:
            optimizer.num_skipped += 1
    if action is not StepAction.SKIP and not is_finite:
        names = nonfinite_params(
            [flat for optimizer in optimizers for flat in optimizer.flat_params]
        )
        report_nonfinite(
            names,
            group,
            raises=action is StepAction.RAISE,
            reduce_dtype=optimizers[0].config.reduce_dtype,
        )
    return tuple(
        StepDecision(
            action, measured, divisor, divisor * clip_divisor(measured.norm(divisor), clip_grad)
        )
        for divisor in divisors
    )


def clip_divisor(norm: float, clip_grad: float) -> float:
    """What the gradient is divided by so that its norm is at most `clip_grad`; 1.0 where it already
    is.

    A norm that is not finite clips nothing, and neither does a `clip_grad` of 0.

    Source: `clip_grad_by_total_norm_fp32` of megatron-core, which multiplies by clip_grad / (norm +
    1e-6) if below 1.

    >>> clip_divisor(8.0, 0.0), clip_divisor(0.5, 1.0), round(clip_divisor(8.0, 1.0), 3)
    (1.0, 1.0, 8.0)
    """
    if clip_grad <= 0 or not math.isfinite(norm):
        return 1.0
    return max((norm + 1e-6) / clip_grad, 1.0)


# --- update: divide, step the inner optimizer, round


def update(optimizer: ShardedOptimizer, grads: MainGrads, decision: StepDecision) -> None:
    """Divides the gradients, updates the main params and rounds them into the param buffers.

    The values of the gradients are of no use afterwards.
    """
    advance(optimizer, grads, decision)
    write_model(optimizer)


def advance(optimizer: ShardedOptimizer, grads: MainGrads, decision: StepDecision) -> None:
    """The first half of `update`: the step of the inner optimizer, with the same arguments."""
    divisor, found_inf, on_host = decision.divisor, decision.found_inf, optimizer.host_updates
    mains, averages = [flat.main for flat in optimizer.flat_params], optimizer.averages
    averaged = optimizer.flat_params if averages is not None else ()
    due = {flat.main: flat.average for flat in averaged if flat.average is not None}
    if averages is not None and isinstance(optimizer.inner, FlatOptimizer):
        optimizer.inner.due = (
            due if averages.has_begun and found_inf is None else {},
            averages.weight,
        )
    with profiled("update"):
        if on_host is not None:
            on_the_way = on_host.copy_grads(optimizer.flat_params, grads, divisor, found_inf)
            grads = [
                None if flat.on_host else grad
                for flat, grad in zip(optimizer.flat_params, grads, strict=True)
            ]
        update_mains(optimizer.inner, mains, grads, divisor, found_inf)
    if on_host is not None:
        with profiled("update on the host"):
            on_host.update(on_the_way)
    if averages is not None:
        averages.update(due, lambda: decision.updated, found_inf)


def write_model(optimizer: ShardedOptimizer) -> None:
    """The second half: rounds into this rank's shards of the param buffers, where that was not done
    by the update."""
    if not rounds_itself(optimizer.inner):
        written = [
            flat for flat in optimizer.flat_params if flat.on_host is None and flat.owns_memory
        ]
        with profiled("write model params"):
            if written:
                torch._foreach_copy_(
                    [flat.model for flat in written], [flat.main for flat in written]
                )


# --- the variation: see [Note: deferred check] in deferred.py


def act_on_deferred_notice(optimizers: Sequence[ShardedOptimizer]) -> None:
    """Collective: acts on what ranks told each other in the last step, if its check is open; raises
    as `Notice.act`."""
    if optimizers[0].deferred_check is not None:
        optimizers[0].deferred_check.act_on_notice()


def finish_deferred_check(
    optimizers: Sequence[ShardedOptimizer], group: Group, when: str = ", in the step before"
) -> None:
    """Collective: does what the policy says about a last step whose check is open. Waits for its
    statistics.

    `when` says in an error which step that was.

    Raises:
        NonFiniteGradError: on all ranks, where its gradient was not finite and the policy is
            "raise".
        DistOptError: on all ranks, as `act_on_deferred_notice`.
    """
    if optimizers[0].deferred_check is None:
        return
    act_on_deferred_notice(optimizers)
    check, *_ = [optimizer.take_deferred_check() for optimizer in optimizers]
    config = optimizers[0].config
    policy = config.policy
    if check is None or policy is NonFinitePolicy.SKIP or check.stats.is_finite:
        return
    raises = policy is NonFinitePolicy.RAISE
    report_nonfinite(
        check.nonfinite_flat_params(),
        group,
        raises=raises,
        reduce_dtype=config.reduce_dtype,
        when=when,
    )
