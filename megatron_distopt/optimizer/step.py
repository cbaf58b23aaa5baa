"""One step of ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 5.1).

`run_step` is the algorithm, and every host calls it: follow the user -> reduce -> hooks -> deferred
check -> measure -> decide -> update -> hooks -> gather. A host implements the methods of
`HostStep`. In a variation of `measure` the CPU does not wait for the statistics: see [Note:
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
    """What is done after the gradients were checked, the same on all ranks."""

    #: The params are updated.
    UPDATE = "update"
    #: Only the loss scale is changed.
    SKIP = "skip"
    #: Nothing is changed, because the norm is above a threshold of the host.
    TOO_LARGE = "too large"
    #: All ranks raise `NonFiniteGradError`.
    RAISE = "raise"


@dataclass(frozen=True, eq=False, repr=False)
class StepDecision:
    """What all ranks decided about a step of one optimizer, and so what the step did.

    With a deferred check, reading `updated`, the norm or the zeros waits for the device.
    """

    action: StepAction  # UPDATE also if the kernel may skip by itself, see `found_inf`
    # statistics of the gradient, or the deferred check that has them
    measured: GradStats | DeferredCheck
    unclipped: float  # the divisor of the measured gradient
    divisor: float | Tensor  # the same with clipping; a tensor is 0-D, fp32 and on the device
    # fp32 0-D, given to the kernel, which changes nothing if it is 1. None with an immediate check.
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
        """False if the step was skipped: then params, moments and step counts are unchanged, bit
        for bit."""
        return self.action is StepAction.UPDATE and (self.found_inf is None or self.stats.is_finite)

    @property
    def grad_norm(self) -> float | None:
        """`norm`; None if the step was skipped."""
        return self.norm if self.updated else None

    @property
    def num_zeros(self) -> int | None:
        """The number of elements of the gradient that are exactly zero; None if they were not
        counted or the step was skipped."""
        return self.stats.num_zeros if self.updated else None

    @property
    def norm_to_log(self) -> float:
        """`norm` without waiting: with a deferred check a 0-D tensor, which can be used like the
        float."""
        if not isinstance(self.measured, DeferredCheck):
            return self.norm
        return cast(float, deferred_norm(self.measured.numbers, self.unclipped))

    @property
    def zeros_to_log(self) -> int | None:
        """The number of zeros without waiting, like `norm_to_log`; None if they were not
        counted."""
        if not isinstance(self.measured, DeferredCheck):
            return self.measured.num_zeros
        return cast(int, self.measured.numbers[1].long()) if self.measured.counts_zeros else None

    def __repr__(self) -> str:
        return (
            f"StepDecision(updated={self.updated}, grad_norm={self.grad_norm}, "
            f"num_zeros={self.num_zeros})"
        )


class StepHook(Protocol):
    """Called around each update, on all ranks, such as snapshots."""

    def before(self) -> None:
        """Collective: called before the state changes."""

    def after(self, decision: StepDecision) -> None:
        """Collective: called after the update, or after the step was skipped."""


class Gradients(NamedTuple):
    """The gradients of a step and their statistics."""

    main: Sequence[MainGrads]  # by optimizer
    measured: GradStats | DeferredCheck
    divisors: Sequence[float]  # the divisor of each optimizer's gradients, without clipping
    # how many ranks have a gradient of each param; None if none is missing on this rank
    num_present: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class HostStep:
    """A host's part of a step. `run_step` calls the methods in the order in which they are defined
    here. The methods of this class suit a host that reduces and gathers by itself."""

    # those of one model on this rank, such as one for dense and one for expert params; they have
    # equal configs and the same device
    optimizers: Sequence[ShardedOptimizer]
    everyone: Group  # all ranks that hold a part of the model
    hooks: Sequence[StepHook] = ()  # called around the update
    # whether torch's step hooks are called with the inner optimizers, which users of the host hold
    shows_inner: bool = False
    # takes Megatron's name of a phase and returns a context that times it
    timer: Callable[[str], AbstractContextManager[object]] = nullcontext
    clip_grad: float | None = None  # None for that of the config; 0 for no clipping
    largest_norm: float = math.inf  # a step with a larger norm is skipped

    def follow_user(self) -> None:
        """Collective: takes over what the user did to params and groups since the last step.

        Raises:
            LayoutError: for a change that cannot be followed; `measure` raises it on all ranks.
        """

    def reduce(self) -> None:
        """Collective: sums the gradients into the shards of the grad buffers."""

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        """Collective: measures the gradients, and raises the errors that any rank has found."""
        divisors = [optimizer.divisor for optimizer in self.optimizers]
        return Gradients(grads, measure(self.optimizers, grads, self.everyone), divisors)

    def complete(self, gradients: Gradients) -> Sequence[MainGrads]:
        """The gradients for the update. Called if some gradients are missing on this rank."""
        return gradients.main

    def follow_update(self, number: int) -> None:
        """Collective: called after the update of the optimizer of that number."""

    def gather(self) -> None:
        """Collective: gathers the new params on all ranks, or begins to."""

    def end(self, decisions: Sequence[StepDecision]) -> None:
        """Collective: called at the end of a step, even if it was skipped."""


@torch.no_grad()
def run_step(host: HostStep) -> Sequence[StepDecision]:
    """Collective: one step, from the gradients of backward to the new params.

    Raises:
        NonFiniteGradError: on all ranks, if a gradient is not finite and `nonfinite` is "raise";
            one step later with a deferred check.
        DistOptError: on all ranks, if `HostStep.follow_user` raised it on one of them.
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
    """Collective: the second half of a step. It overwrites the values of the gradients."""
    for number, optimizer in enumerate(host.optimizers):
        of_one, decision = grads[number], decisions[number]
        with host.timer("optimizer-inner-step"):
            # On a rank that trains nothing there are no buffers, and the host has no inner
            # optimizer.
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

    The numbers of `notice` are summed in the same all-reduce. Ranks act on them now, or with a
    deferred check in the next step; this may raise on all ranks.
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
    """Collective: like `measure`, but the CPU always waits for the statistics."""
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


# --- decide: update, skip or raise, and the divisor of the gradient


def decide(host: HostStep, gradients: Gradients) -> list[StepDecision]:
    """Decides about the step, by optimizer, and updates the loss scales. Collective if a gradient
    is not finite.

    Raises:
        NonFiniteGradError: on all ranks, if a gradient is not finite and `nonfinite` is "raise".
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
    """Decides without waiting for the statistics, see [Note: deferred check] in deferred.py."""
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
    """The divisor that makes the norm of the gradient at most `clip_grad`; 1.0 if it already is.

    With a norm that is not finite, or a `clip_grad` of 0, nothing is clipped.

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
    """Divides the gradients and updates the main params. It overwrites the values of the
    gradients."""
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
    """Rounds the main params into this rank's shards of the param buffers, unless the update has
    done it."""
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
    """Collective: calls `Notice.act` of the last step, if its check is open."""
    if optimizers[0].deferred_check is not None:
        optimizers[0].deferred_check.act_on_notice()


def finish_deferred_check(
    optimizers: Sequence[ShardedOptimizer], group: Group, when: str = ", in the step before"
) -> None:
    """Collective: finishes the check of the last step, if it is open, as `nonfinite` says. Waits
    for its statistics.

    `when` names that step in an error.

    Raises:
        NonFiniteGradError: on all ranks, if its gradient was not finite and `nonfinite` is "raise".
        DistOptError: on all ranks, if `act_on_deferred_notice` raises it.
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
    """Makes all ranks of the model raise, in the step, an error that `check` raises on one of them.

    `flag` is 1-D [1], with the dtype and device of statistics, and above 0 if `check` will raise on
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
