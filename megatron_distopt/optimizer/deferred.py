"""Gradient statistics that stay on the device for the update and reach the CPU later.

[Note: deferred check] Without a dynamic loss scale the CPU has no decision to take between the statistics
and the update: the norm, the divisor and "something is not finite" are tensors, and a kernel that is given the last of
them changes nothing where it is 1. So the CPU waits for nothing; the numbers follow in pinned memory, and are looked at

- at the start of the next step, by all ranks, because all of them must do the same about a bad one: "raise" raises
  there (the params are as before the bad step), "skip" counts, "log" logs; that waits for the statistics of one step
  ago, while the device has backward of this one to do;
- when somebody reads the result of the step, or `num_skipped`; that never raises, because it may happen on one rank.

Where no step follows, nobody looks: then an error is logged when the optimizer goes, or at the end of the process
(`report_unless_settled`).

By then the gradients are gone, so a message names flat params ("among ...") and not params. A host gets the norm as a
tensor of no dimension, which formats and computes as the float does. All this is done where the device is not the CPU,
sums are float64 there, the loss scale is constant, and the inner optimizer skips by itself
(`ShardedOptimizer.defers_check`). Every bit is as without; tests/optimizer/test_deferred.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from megatron_distopt.layout import FlatParamPlan
from megatron_distopt.optimizer.accelerator import CPU, mark
from megatron_distopt.optimizer.grad_norm import GradStats
from megatron_distopt.optimizer.main_params import FlatParam, FlatParamKey
from megatron_distopt.optimizer.sync_check import arrived

__all__ = ["DeferredCheck", "HostCopy", "deferred_divisor", "deferred_norm", "found_inf_of"]

_log = logging.getLogger("megatron_distopt")


class HostCopy:
    """Numbers of a device that are on their way to the CPU.

    Args:
        numbers: 1-D; may be overwritten as soon as this returns, in the order of the device's queue.
    """

    def __init__(self, numbers: Tensor) -> None:
        is_pinned = numbers.device.type != CPU
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=is_pinned)
        self._numbers.copy_(numbers, non_blocking=True)
        self._wait = mark(numbers.device)

    @cached_property
    def values(self) -> list[float]:
        """The numbers; waits until they are there."""
        self._wait()
        with arrived():
            values: list[float] = self._numbers.tolist()
        return values


class DeferredCheck:
    """What a step's statistics said.

    Args:
        numbers: float64 [3 + len(flat_params)]: sum of squares, zeros and ranks with something that is not
            finite, over all ranks; then 1 for each flat param of this rank whose gradient is not finite.
        flat_params: of this rank.
        counts_zeros: whether zeros were counted.
    """

    def __init__(self, numbers: Tensor, flat_params: Sequence[FlatParam], *, counts_zeros: bool) -> None:
        #: On the device.
        self.numbers = numbers
        self._copy = HostCopy(numbers)
        self._runs, self.counts_zeros = tuple(flat_params), counts_zeros
        self._report: finalize[Any, Any] | None = None

    def report_unless_settled(self) -> None:
        """From now on: if nobody says `settled` before this goes or the process ends, and it was not finite, an error
        is logged."""
        plans = tuple(flat.plan for flat in self._runs)  # which hold no tensors
        self._report = finalize(self, _report_nonfinite, self._copy, plans)

    def settled(self) -> None:
        """Somebody did what is to be done about it."""
        if self._report is not None:
            self._report.detach()

    @property
    def stats(self) -> GradStats:
        """As `reduce_stats` returns them; waits for the device."""
        sum_of_squares, zeros, nonfinite, *_ = self._copy.values
        return GradStats(sum_of_squares, int(zeros) if self.counts_zeros else None, int(nonfinite))

    def nonfinite_flat_params(self) -> list[str]:
        """Those of this rank whose gradient was not finite, by names of their params; waits for the device."""
        return _nonfinite_of(self._copy, [flat.plan for flat in self._runs])


def _nonfinite_of(numbers: HostCopy, plans: Sequence[FlatParamPlan[FlatParamKey]]) -> list[str]:
    return [_described(plan) for plan, flag in zip(plans, numbers.values[3:], strict=True) if flag]


def _report_nonfinite(numbers: HostCopy, plans: Sequence[FlatParamPlan[FlatParamKey]]) -> None:
    if numbers.values[2] > 0:
        where = ", ".join(_nonfinite_of(numbers, plans)) or "other ranks alone"
        _log.error("the gradient of the last step was inf or nan on %s; that step changed nothing", where)


def _described(plan: FlatParamPlan[FlatParamKey]) -> str:
    names = [shard.name for shard in plan.shards]
    return names[0] if len(names) == 1 else f"among {len(names)} params from {names[0]} to {names[-1]}"


def found_inf_of(numbers: Tensor) -> Tensor:
    """fp32 0-D: 1 where something is not finite on any rank.

    Args:
        numbers: see `DeferredCheck`.
    """
    return (numbers[2] > 0).to(torch.float32)


def deferred_norm(numbers: Tensor, divisor: float) -> Tensor:
    """float64 0-D: `GradStats.norm` on the device.

    Args:
        numbers: see `DeferredCheck`.
        divisor: of the gradient.
    """
    return torch.sqrt(numbers[0]) / _constant(divisor, numbers)


def deferred_divisor(numbers: Tensor, divisor: float, clip_grad: float) -> float | Tensor:
    """`divisor * clip_divisor(norm, clip_grad)` without knowing the norm.

    Args:
        numbers: see `DeferredCheck`.
        divisor: of the gradient without clipping.
        clip_grad: 0 for no clipping.

    Returns:
        fp32 0-D, rounded once as it is elsewhere; `divisor` itself without clipping.
    """
    if clip_grad <= 0:
        return divisor
    norm, one = deferred_norm(numbers, divisor), _constant(1.0, numbers)
    clip = torch.maximum((norm + 1e-6) / _constant(clip_grad, numbers), one)
    clip = torch.where(torch.isfinite(norm), clip, one)
    return (_constant(divisor, numbers) * clip).to(torch.float32)


def _constant(value: float, like: Tensor) -> Tensor:
    """A tensor, because a division by a number is a multiplication with its inverse on some devices."""
    return torch.full((), value, dtype=like.dtype, device=like.device)
