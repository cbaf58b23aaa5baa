"""What becomes of a step once its gradient is known: values that say it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import cast

from torch import Tensor

from megatron_distopt.optimizer.deferred import DeferredCheck, deferred_norm
from megatron_distopt.optimizer.grad_norm import GradStats

__all__ = ["StepAction", "StepDecision", "StepResult", "clip_divisor"]


class StepAction(Enum):
    """What becomes of a step once the gradient is known on all ranks."""

    #: The params are updated.
    UPDATE = "update"
    #: Nothing is touched but the loss scale.
    SKIP = "skip"


def clip_divisor(norm: float, clip_grad: float) -> float:
    """What the gradient is divided by so that its norm is at most `clip_grad`; 1.0 where it already is.

    Args:
        norm: of the gradient; one that is not finite clips nothing.
        clip_grad: 0 for no clipping.

    Source: `clip_grad_by_total_norm_fp32` of megatron-core, which multiplies by clip_grad / (norm + 1e-6) if below 1.

    >>> clip_divisor(8.0, 0.0), clip_divisor(0.5, 1.0), round(clip_divisor(8.0, 1.0), 3)
    (1.0, 1.0, 8.0)
    """
    if clip_grad <= 0 or not math.isfinite(norm):
        return 1.0
    return max((norm + 1e-6) / clip_grad, 1.0)


@dataclass(frozen=True, eq=False)
class StepDecision:
    """What all ranks decided about a step of one optimizer.

    Args:
        action: UPDATE also where the kernel has to skip by itself, see `found_inf`.
        statistics: of the gradient, or how they are learnt later.
        unclipped: what the gradient had to be divided by when it was measured.
        divisor: the same with clipping; a tensor is 0-D, fp32 and on the device.
        found_inf: fp32 0-D, given to the kernel: where it is 1 it changes nothing. None where that is known already.
    """

    action: StepAction
    statistics: GradStats | DeferredCheck
    unclipped: float
    divisor: float | Tensor
    found_inf: Tensor | None = None

    @property
    def stats(self) -> GradStats:
        """The statistics; waits for them where they come late."""
        return self.statistics.stats if isinstance(self.statistics, DeferredCheck) else self.statistics

    @property
    def updated(self) -> bool:
        """Whether the params were updated; waits for what comes late."""
        return self.action is StepAction.UPDATE and (self.found_inf is None or self.stats.is_finite)

    def norm(self) -> float:
        """Of the averaged, unscaled gradient before clipping; waits for what comes late."""
        return self.stats.norm(self.unclipped)

    @property
    def grad_norm(self) -> float:
        """The same without waiting, for hosts: where it comes late a 0-D tensor, which is used as the float is."""
        if not isinstance(self.statistics, DeferredCheck):
            return self.norm()
        return cast(float, deferred_norm(self.statistics.numbers, self.unclipped))

    @property
    def num_zeros(self) -> int | None:
        """Zeros of the gradient, in the same way; None where they were not counted."""
        if not isinstance(self.statistics, DeferredCheck):
            return self.statistics.num_zeros
        return cast(int, self.statistics.numbers[1].long()) if self.statistics.counts_zeros else None


class StepResult:
    """What a step did; where its verdict comes late, asking for it waits for the device.

    Args:
        decision: on the step.
    """

    def __init__(self, decision: StepDecision) -> None:
        self._decision = decision

    @property
    def may_have_updated(self) -> bool:
        """Whether the params have to be gathered, without waiting; False where all ranks know that it was skipped."""
        return self._decision.verdict is StepAction.UPDATE

    @property
    def updated(self) -> bool:
        """False where it was skipped; params, moments and step counts are then bit for bit as before."""
        return self._decision.updated

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the averaged, unscaled gradient before clipping; None where the step was skipped."""
        return self._decision.norm() if self.updated else None

    @property
    def num_zeros(self) -> int | None:
        """Elements of the gradient that are exactly zero; None where they were not counted, or the step was skipped."""
        return self._decision.stats.num_zeros if self.updated else None

    def __repr__(self) -> str:
        return f"StepResult(updated={self.updated}, grad_norm={self.grad_norm}, num_zeros={self.num_zeros})"
