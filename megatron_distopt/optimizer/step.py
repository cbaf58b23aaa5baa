"""One step of ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 5.1).

`run_step` is the algorithm, and every host calls it: follow the user -> reduce -> hooks -> deferred
check -> measure -> decide -> update -> hooks -> gather. What a host adds are the methods of its
`HostStep`. `measure` has a variation, in which the CPU does not wait for what was measured: [Note:
deferred check] in deferred.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.comm import Group, profiled, raise_together
from megatron_distopt.config import NonFinitePolicy
from megatron_distopt.errors import LayoutError
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
from megatron_distopt.optimizer.inner_step import update_mains
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.main_params import FlatParam, MainGrads, main_grads
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class StepAction(Enum):
    """What is done with a step after the gradients were checked, the same on all ranks."""

    #: The params are updated.
    UPDATE = "update"
    #: Nothing is changed but the loss scale.
    SKIP = "skip"
    #: Nothing is changed, because the norm is above a threshold of the host.
    TOO_LARGE = "too large"
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


class StepHook(Protocol):
    """What is called around each update, on all ranks, such as snapshots."""

    def before(self) -> None:
        """Collective: before the state changes."""

    def after(self, decision: StepDecision) -> None:
        """Collective: after the update, or when the step was skipped."""


class Gradients(NamedTuple):
    """The gradients of a step and what was measured of them."""

    main: Sequence[MainGrads]  # by optimizer
    measured: GradStats | DeferredCheck
    divisors: Sequence[float]  # by optimizer, what they have to be divided by; without clipping
    # how many ranks have a gradient of each param; None where none is missing on this rank
    num_present: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class HostStep:
    """What a host adds to a step. `run_step` calls the methods in the order in which they are
    written here; those of this class are for a host that reduces and gathers by itself."""

    # of one model on this rank, e.g. one for dense and one for expert params; equal configs and
    # device
    optimizers: Sequence[ShardedOptimizer]
    everyone: Group  # all ranks that hold a part of the model
    hooks: Sequence[StepHook] = ()  # called around the update
    # whether users of the host hold the inner optimizers, so that torch's step hooks see those
    shows_inner: bool = False
    # from the name of a phase, as Megatron has it, to what times it
    timer: Callable[[str], AbstractContextManager[object]] = nullcontext
    clip_grad: float | None = None  # as the config says where None; 0 for no clipping
    largest_norm: float = math.inf  # a step with a larger norm is not made

    def follow_user(self) -> None:
        """Collective: takes over what the user did to params and groups since the last step.

        Raises:
            LayoutError: what cannot be followed on this rank; `measure` raises it on all ranks.
        """

    def reduce(self) -> None:
        """Collective: leaves the sums of the gradients in the shards of the grad buffers."""

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        """Collective: measures the gradients, and raises what any rank has found."""
        divisors = [optimizer.divisor for optimizer in self.optimizers]
        return Gradients(grads, measure(self.optimizers, grads, self.everyone), divisors)

    def complete(self, gradients: Gradients) -> Sequence[MainGrads]:
        """The gradients with which params are updated, where some are missing on this rank."""
        return gradients.main

    def follow_update(self, number: int) -> None:
        """Collective: follows the update of the optimizer of that number."""

    def gather(self) -> None:
        """Collective: brings the new params to all ranks, or begins to."""

    def end(self, decisions: Sequence[StepDecision]) -> None:
        """Collective: ends the step, also one that was skipped."""


@torch.no_grad()
def run_step(host: HostStep) -> Sequence[StepDecision]:
    """Collective: one step, from the gradients of backward to the new params.

    Raises:
        NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise";
            one step later where the check is deferred.
        DistOptError: on all ranks, what `HostStep.follow_user` has found on one of them.
    """
    gradients, decisions = check_gradients(host)
    if decisions[0].action is StepAction.UPDATE:
        grads = gradients.main
        if gradients.num_present is not None:
            grads = host.complete(gradients)
        update_params(host, grads, decisions)
    host.end(decisions)
    return decisions


def check_gradients(host: HostStep) -> tuple[Gradients, Sequence[StepDecision]]:
    """Collective: the first half of a step, after which no param has changed."""
    for optimizer in host.optimizers:
        if optimizer.averages is not None:
            optimizer.check_has_params("step")
    found = None
    try:
        host.follow_user()
    except LayoutError as error:
        found = error
    host.reduce()
    for hook in host.hooks:
        hook.before()
    with host.timer("optimizer-copy-to-main-grad"):
        grads = [main_grads(optimizer.flat_params) for optimizer in host.optimizers]
    with host.timer("optimizer-unscale-and-check-inf"):
        if host.optimizers[0].deferred_check is not None:
            finish_deferred_check(host.optimizers, host.everyone)
        gradients = host.measure(grads, found)
        decisions = decide(host, gradients)
    if decisions[0].action is not StepAction.UPDATE:
        for hook in host.hooks:
            hook.after(decisions[0])
    return gradients, decisions


def update_params(
    host: HostStep, grads: Sequence[MainGrads], decisions: Sequence[StepDecision]
) -> None:
    """Collective: the second half of a step; the values of the gradients are of no use
    afterwards."""
    for number, optimizer in enumerate(host.optimizers):
        of_one, decision = grads[number], decisions[number]
        with host.timer("optimizer-inner-step"):
            # A rank that trains nothing has no buffers, and its host no inner optimizer.
            if host.shows_inner and optimizer.buffers:
                step = partial(advance, optimizer=optimizer, grads=of_one, decision=decision)
                Optimizer.profile_hook_step(step)(optimizer.inner)
            else:
                advance(optimizer.inner, optimizer, of_one, decision)
        with host.timer("optimizer-copy-main-to-model-params"):
            write_model(optimizer)
        host.follow_update(number)
    for hook in host.hooks:
        hook.after(decisions[0])
    host.gather()


# --- measure: the norm of the whole gradient, and whether all of it is finite


def measure(
    optimizers: Sequence[ShardedOptimizer],
    grads: Sequence[MainGrads],
    group: Group,
    notice: Notice | None = None,
) -> GradStats | DeferredCheck:
    """Collective: measures the gradients of all the optimizers with one all-reduce; for the
    arguments see `HostStep`.

    `notice` is what ranks tell each other in the same all-reduce. They act on it now, which may
    raise on all ranks, or in the next step where the check is deferred.
    """
    if not all(optimizer.defers_check for optimizer in optimizers):
        return measure_now(optimizers, grads, group, notice)
    first, flat_params = optimizers[0], _flat_params_of(optimizers)
    extra, count_zeros = None if notice is None else notice.numbers, first.config.count_zeros
    with profiled("measure gradients"):
        stats, flags = local_numbers(
            flat_params, _present(grads), first.device, count_zeros=count_zeros
        )
        numbers = torch.cat([sum_with(stats, extra, group), flags])
    return DeferredCheck(numbers, flat_params, counts_zeros=count_zeros, notice=notice)


def measure_now(
    optimizers: Sequence[ShardedOptimizer],
    grads: Sequence[MainGrads],
    group: Group,
    notice: Notice | None = None,
) -> GradStats:
    """Collective: `measure` where the CPU has to know the statistics at once, and waits for
    them."""
    first, flat_params = optimizers[0], _flat_params_of(optimizers)
    extra, count_zeros = None if notice is None else notice.numbers, first.config.count_zeros
    with profiled("measure gradients"):
        local = local_stats(flat_params, _present(grads), first.device, count_zeros=count_zeros)
        sum_of_squares, zeros, nonfinite = sum_with(local, extra, group).tolist()  # waits
    if notice is not None:
        notice.act(notice.head.tolist())
    return GradStats(sum_of_squares, int(zeros) if count_zeros else None, int(nonfinite))


def _flat_params_of(optimizers: Sequence[ShardedOptimizer]) -> list[FlatParam]:
    return [flat for optimizer in optimizers for flat in optimizer.flat_params]


def _present(grads: Sequence[MainGrads]) -> list[Tensor]:
    return [grad for of_one in grads for grad in of_one if grad is not None]


# --- decide: update, skip or raise, and what the gradient is divided by


def decide(host: HostStep, gradients: Gradients) -> list[StepDecision]:
    """Collective where a gradient is not finite: decides about the step, by optimizer, and moves
    the loss scales.

    Raises:
        NonFiniteGradError: as of `run_step`.
    """
    optimizers, measured = host.optimizers, gradients.measured
    clip_grad = optimizers[0].config.clip_grad if host.clip_grad is None else host.clip_grad
    if isinstance(measured, DeferredCheck):
        return _decide_later(optimizers, measured, gradients.divisors, clip_grad)
    norms = [measured.norm(divisor) for divisor in gradients.divisors]
    is_finite = measured.is_finite
    action = StepAction.UPDATE if is_finite else _action_on_nonfinite(optimizers)
    if action is StepAction.UPDATE and norms[0] > host.largest_norm:
        action = StepAction.TOO_LARGE
    for optimizer in optimizers:
        optimizer.loss_scale.update(found_nonfinite=not is_finite)
        if action in (StepAction.SKIP, StepAction.TOO_LARGE):
            optimizer.num_skipped += 1
    if action is not StepAction.SKIP and not is_finite:
        report_nonfinite(
            nonfinite_params(_flat_params_of(optimizers)),
            host.everyone,
            raises=action is StepAction.RAISE,
            reduce_dtype=optimizers[0].config.reduce_dtype,
        )
    decisions = list[StepDecision]()
    for divisor, norm in zip(gradients.divisors, norms, strict=True):
        clipped = divisor * clip_divisor(norm, clip_grad)
        decisions.append(StepDecision(action, measured, divisor, clipped))
    return decisions


def _action_on_nonfinite(optimizers: Sequence[ShardedOptimizer]) -> StepAction:
    policy = optimizers[0].config.policy
    if policy is NonFinitePolicy.SKIP:
        return StepAction.SKIP
    if all(optimizer.loss_scale.can_back_off() for optimizer in optimizers):
        return StepAction.SKIP
    return StepAction.RAISE if policy is NonFinitePolicy.RAISE else StepAction.UPDATE


def _decide_later(
    optimizers: Sequence[ShardedOptimizer],
    measured: DeferredCheck,
    divisors: Sequence[float],
    clip_grad: float,
) -> list[StepDecision]:
    """Decides without waiting for what was measured, see [Note: deferred check] in deferred.py."""
    policy = optimizers[0].config.policy
    if policy is NonFinitePolicy.RAISE:
        measured.report_unless_settled()
    for optimizer in optimizers:
        optimizer.deferred_check = measured
    found_inf = None if policy is NonFinitePolicy.LOG else found_inf_of(measured.numbers)
    decisions = list[StepDecision]()
    for divisor in divisors:
        clipped = deferred_divisor(measured.numbers, divisor, clip_grad)
        decisions.append(StepDecision(StepAction.UPDATE, measured, divisor, clipped, found_inf))
    return decisions


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


def advance(
    inner: Optimizer, optimizer: ShardedOptimizer, grads: MainGrads, decision: StepDecision
) -> None:
    """Divides the gradients and updates the main params; the values of the gradients are of no use
    afterwards."""
    divisor, found_inf, on_host = decision.divisor, decision.found_inf, optimizer.host_updates
    flat_params, averages = optimizer.flat_params, optimizer.averages
    with profiled("update"):
        if on_host is not None:
            on_the_way = on_host.copy_grads(flat_params, grads, divisor, found_inf)
            pairs = zip(flat_params, grads, strict=True)
            grads = [None if flat.on_host else grad for flat, grad in pairs]
        update_mains(inner, [flat.main for flat in flat_params], grads, divisor, found_inf)
    if on_host is not None:
        with profiled("update on the host"):
            on_host.update(on_the_way)
    if averages is not None:
        averages.update(flat_params, lambda: decision.updated, found_inf)


def write_model(optimizer: ShardedOptimizer) -> None:
    """Rounds the main params into this rank's shards of the param buffers, where that was not done
    by the update."""
    if isinstance(optimizer.inner, LowPrecisionAdam):
        return
    models, mains = list[Tensor](), list[Tensor]()
    for flat in optimizer.flat_params:
        if flat.on_host is None and flat.owns_memory:
            models.append(flat.model)
            mains.append(flat.main)
    if models:
        with profiled("write model params"):
            torch._foreach_copy_(models, mains)


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


# --- errors of one rank


def notice_for(check: Callable[[], None], flag: Tensor, group: Group) -> Notice:
    """Makes all ranks of the model raise, in the step, what `check` raises on one of them.

    `flag` is 1-D [1], of the dtype and device of statistics, and above 0 if `check` will raise on
    this rank.
    """

    def act(sums: Sequence[float]) -> None:
        if sums[0] > 0:
            raise_together(check, group, "step")

    return Notice(flag, flag, act)


def raising(error: Exception | None) -> Callable[[], None]:
    """Returns a check that raises `error`, or passes if that is None."""

    def check() -> None:
        if error is not None:
            raise error

    return check
