"""The deferred check: gradient statistics stay on the device for the update, and the CPU reads them
one step later.

[Note: deferred check] Without a dynamic loss scale the CPU has nothing to decide between the
statistics and the update: the norm, the divisor and "something is not finite" are tensors, and a
kernel that is given the last of them changes nothing where it is 1. So the CPU does not wait. The
numbers are copied to pinned memory, and are read

- at the start of the next step, by all ranks (`step.finish_deferred_check`), because all of them
  must do the same about a gradient that is not finite: "raise" raises there (the params are as
  before the bad step), "skip" counts the step, "log" logs it. This waits for the statistics of the
  last step while the device computes the backward of this one (megatron-core's `step()` returns
  numbers, and so waits at its end, while the device updates and gathers);
- when the decision of the step or `num_skipped` is read. This never raises, because it may happen
  on one rank alone.

Where no step follows, an error is logged when the optimizer is freed or the process ends
(`report_unless_settled`).

The gradients are gone by then, so a message names flat params ("among ...") and not params. A host
gets the norm as a 0-D tensor, which formats and computes as the float does. The check is deferred
where the device is not the CPU, sums are float64 there, the loss scale is constant, and the inner
optimizer skips by itself (`ShardedOptimizer.defers_check`). Every bit is as without;
tests/optimizer/test_deferred.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from megatron_distopt.device import current_stream, keep_for_current_stream, mark, pinned
from megatron_distopt.layout import FlatParamPlan
from megatron_distopt.optimizer.grad_norm import GradStats
from megatron_distopt.optimizer.main_params import FlatParam, FlatParamKey

_log = logging.getLogger("megatron_distopt")


class Notice(NamedTuple):
    """What the ranks of a host tell each other in the all-reduce of the statistics, and what they
    do about it."""

    # 1-D, of the dtype and device of the statistics; replaced by their sums over all ranks
    numbers: Tensor
    head: Tensor  # those that the CPU reads, in the same memory
    # Collective: is given the sums of `head`, the same on all ranks. It raises what one rank has
    # found.
    act: Callable[[Sequence[float]], None]


class DeferredCheck:
    """The statistics of a step whose check is deferred; see [Note: deferred check].

    `numbers` are float64 [3 + len(flat_params)]: sum of squares, zeros and ranks with something
    that is not finite, over all ranks; then 1 for each flat param of this rank whose gradient is
    not finite. They may be overwritten as soon as the constructor returns, in the order of the
    device's queue.
    """

    def __init__(
        self,
        numbers: Tensor,
        flat_params: Sequence[FlatParam],
        *,
        counts_zeros: bool,
        notice: Notice | None = None,
    ) -> None:
        self._numbers, self._stream = numbers, current_stream(numbers.device)
        self.counts_zeros = counts_zeros
        self._copy = HostCopy(numbers)
        self._plans = tuple(flat.plan for flat in flat_params)  # which hold no tensors
        self._notice = None if notice is None else (HostCopy(notice.head), notice.act)
        self._report: finalize[Any, Any] | None = None

    @property
    def numbers(self) -> Tensor:
        """On the device, for the current stream: a host may log them on another one than that of
        the step."""
        if current_stream(self._numbers.device) != self._stream:
            keep_for_current_stream(self._numbers)
        return self._numbers

    @property
    def stats(self) -> GradStats:
        """The statistics of the whole gradient, in floats; waits for the device."""
        sum_of_squares, zeros, nonfinite, *_ = self._copy.values
        return GradStats(sum_of_squares, int(zeros) if self.counts_zeros else None, int(nonfinite))

    def nonfinite_flat_params(self) -> list[str]:
        """Those of this rank whose gradient was not finite, by names of their params; waits for the
        device."""
        return _nonfinite_of(self._copy, self._plans)

    def act_on_notice(self) -> None:
        """Collective: acts, once, on what ranks told each other, and raises as `Notice.act`; waits
        for the device."""
        notice, self._notice = self._notice, None
        if notice is not None:
            told, act = notice
            act(told.values)

    def report_unless_settled(self) -> None:
        """From now on an error is logged if something was not finite and this object goes, or the
        process ends, before `settled` was called."""
        self._report = finalize(self, _report_nonfinite, self._copy, self._plans)

    def settled(self) -> None:
        """The check was finished, or is of a state that is gone."""
        if self._report is not None:
            self._report.detach()


class HostCopy:
    """Numbers of a device that are on their way to the CPU."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = pinned(numbers.shape, numbers.dtype, numbers.device)
        self._numbers.copy_(numbers, non_blocking=True)
        self._wait = mark(numbers.device)

    @cached_property
    def values(self) -> list[float]:
        """The numbers; waits until they are there."""
        self._wait()
        values: list[float] = self._numbers.tolist()
        return values


def _nonfinite_of(numbers: HostCopy, plans: Sequence[FlatParamPlan[FlatParamKey]]) -> list[str]:
    found = [plan.shards for plan, flag in zip(plans, numbers.values[3:], strict=True) if flag]
    return [
        first.name
        if not others
        else f"among {len(others) + 1} params from {first.name} to {others[-1].name}"
        for first, *others in found
    ]


def _report_nonfinite(numbers: HostCopy, plans: Sequence[FlatParamPlan[FlatParamKey]]) -> None:
    if numbers.values[2] > 0:
        where = ", ".join(_nonfinite_of(numbers, plans)) or "other ranks alone"
        _log.error(
            "the gradient of the last step was inf or nan on %s; that step changed nothing", where
        )


def found_inf_of(numbers: Tensor) -> Tensor:
    """fp32 0-D: 1 where something is not finite on any rank."""
    return (numbers[2] > 0).to(torch.float32)


def deferred_norm(numbers: Tensor, divisor: float) -> Tensor:
    """float64 0-D: `GradStats.norm` on the device."""
    return torch.sqrt(numbers[0]) / _constant(divisor, numbers)


def deferred_divisor(numbers: Tensor, divisor: float, clip_grad: float) -> float | Tensor:
    """`divisor * clip_divisor(norm, clip_grad)` on the device: fp32 0-D, rounded once as it is
    elsewhere."""
    if clip_grad <= 0:
        return divisor
    norm, one = deferred_norm(numbers, divisor), _constant(1.0, numbers)
    clip = torch.maximum((norm + 1e-6) / _constant(clip_grad, numbers), one)
    clip = torch.where(torch.isfinite(norm), clip, one)
    return (_constant(divisor, numbers) * clip).to(torch.float32)


def _constant(value: float, like: Tensor) -> Tensor:
    """A tensor, because a division by a number is a multiplication with its inverse on some
    devices."""
    return torch.full((), value, dtype=like.dtype, device=like.device)
