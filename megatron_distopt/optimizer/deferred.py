"""The deferred check: gradient statistics stay on the device for the update, and the CPU reads them
one step later.

[Note: deferred check] Without a dynamic loss scale the CPU has nothing to decide between the
statistics and the update. The norm, the divisor and "something is not finite" are tensors, and if
the last of them is 1, the kernel changes nothing. So the CPU does not wait. The numbers are copied
to pinned memory and read at two times:

- at the start of the next step, by all ranks (`step.finish_deferred_check`), because all of them
  must treat a gradient that is not finite alike: "raise" raises then (the params are those before
  the bad step), "skip" counts the step, "log" logs it. This waits for the statistics of the last
  step while the device computes the backward of this one. megatron-core's `step()` returns numbers,
  so it waits at its end, while the device updates and gathers;
- when the decision of the step or `num_skipped` is read. This never raises, because it may happen
  on only one rank.

If no step follows, an error is logged when the optimizer is freed or the process ends
(`report_unless_settled`).

The gradients are gone by then, so a message names flat params ("among ...") and not params. A host
gets the norm as a 0-D tensor, which can be formatted and computed with like a float. The check is
deferred if the device is not the CPU, sums are float64 there, the loss scale is constant, and the
inner optimizer skips by itself (`ShardedOptimizer.defers_check`). Results are bit-identical to
those of an immediate check; tests/optimizer/test_deferred.py.
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
    """Numbers that ranks sum together with the statistics, and how they act on the sums."""

    # 1-D, with the dtype and device of the statistics; replaced by the sums over all ranks
    numbers: Tensor
    head: Tensor  # the first of them, which the CPU reads, in the same memory
    # Collective: takes the sums of `head`, which are the same on all ranks, and raises the error
    # that one rank has found.
    act: Callable[[Sequence[float]], None]


class DeferredCheck:
    """The statistics of a step whose check is deferred; see [Note: deferred check].

    `numbers` are float64 [3 + len(flat_params)]: over all ranks the sum of squares, the zeros, and
    the number of ranks with a gradient that is not finite; then 1 for each flat param of this rank
    whose gradient is not finite. They may be overwritten as soon as the constructor returns, in the
    order of the device's queue.
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
        self._plans = tuple(flat.plan for flat in flat_params)  # plans hold no tensors
        self._notice = None if notice is None else (HostCopy(notice.head), notice.act)
        self._report: finalize[Any, Any] | None = None

    @property
    def numbers(self) -> Tensor:
        """The numbers on the device, safe to use on the current stream: a host may log them on a
        stream other than that of the step."""
        if current_stream(self._numbers.device) != self._stream:
            keep_for_current_stream(self._numbers)
        return self._numbers

    @property
    def stats(self) -> GradStats:
        """The statistics of the whole gradient, in floats; waits for the device."""
        sum_of_squares, zeros, nonfinite, *_ = self._copy.values
        return GradStats(sum_of_squares, int(zeros) if self.counts_zeros else None, int(nonfinite))

    def nonfinite_flat_params(self) -> list[str]:
        """The flat params of this rank whose gradient was not finite, by names of their params;
        waits for the device."""
        return _nonfinite_of(self._copy, self._plans)

    def act_on_notice(self) -> None:
        """Collective: calls `Notice.act` the first time, which may raise; waits for the device."""
        notice, self._notice = self._notice, None
        if notice is not None:
            told, act = notice
            act(told.values)

    def report_unless_settled(self) -> None:
        """Logs an error if something was not finite, unless `close` is called before this object
        is freed or the process ends."""
        self._report = finalize(self, _report_nonfinite, self._copy, self._plans)

    def close(self) -> None:
        """Notes that the check was finished, or that its state was replaced."""
        if self._report is not None:
            self._report.detach()


class HostCopy:
    """Numbers that are being copied from a device to the CPU."""

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
        where = ", ".join(_nonfinite_of(numbers, plans)) or "other ranks"
        _log.error(
            "The gradient of the last step was inf or nan on %s, so that step changed nothing.",
            where,
        )


def found_inf_of(numbers: Tensor) -> Tensor:
    """fp32 0-D: 1 if something is not finite on any rank."""
    return (numbers[2] > 0).to(torch.float32)


def deferred_norm(numbers: Tensor, divisor: float) -> Tensor:
    """float64 0-D: `GradStats.norm` on the device."""
    return torch.sqrt(numbers[0]) / _constant(divisor, numbers)


def deferred_divisor(numbers: Tensor, divisor: float, clip_grad: float) -> float | Tensor:
    """`divisor * clip_divisor(norm, clip_grad)` on the device: fp32 0-D, rounded once like the
    value on the CPU."""
    if clip_grad <= 0:
        return divisor
    norm, one = deferred_norm(numbers, divisor), _constant(1.0, numbers)
    clip = torch.maximum((norm + 1e-6) / _constant(clip_grad, numbers), one)
    clip = torch.where(torch.isfinite(norm), clip, one)
    return (_constant(divisor, numbers) * clip).to(torch.float32)


def _constant(value: float, like: Tensor) -> Tensor:
    """A 0-D tensor of a number, because some devices divide by a number by multiplying with its
    inverse."""
    return torch.full((), value, dtype=like.dtype, device=like.device)
