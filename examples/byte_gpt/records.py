"""What is measured while it trains, as values."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of one iteration went, on one rank; they add up to the whole of it.

    Args:
        forward_backward_seconds: what is left: reading a batch, zeroing grads, forward and
            backward.
        communication_seconds: reduce-scatter (or all-reduce) of the grads, all-gather of the
            params, all-reduce of the loss, each with waiting for the other ranks. By timers that
            megatron-core keeps around the first two and this program around the third.
        update_seconds: `optimizer.step()` without its all-gather: gradient norm, clipping, Adam.
            The all-reduce of a few numbers for the norm is in it.
    """

    forward_backward_seconds: float
    communication_seconds: float
    update_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_backward_seconds + self.communication_seconds + self.update_seconds


@dataclass(frozen=True)
class Iteration:
    """A line of the metrics file. Losses are in nats a byte; `seconds` is the time since training
    began."""

    iteration: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    skipped: bool
    tokens_per_second: float
    seconds: float
    step: StepTime


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; the state is moments, and main params where those are not the model params
    themselves."""

    param_nbytes: int
    grad_nbytes: int
    state_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.param_nbytes + self.grad_nbytes + self.state_nbytes


def median_step(history: Sequence[Iteration]) -> StepTime:
    """Of each part its median. The first iteration is left out where there are others: it makes
    kernels, too."""
    steps = [iteration.step for iteration in history[1:] or history]
    return StepTime(
        forward_backward_seconds=statistics.median(step.forward_backward_seconds for step in steps),
        communication_seconds=statistics.median(step.communication_seconds for step in steps),
        update_seconds=statistics.median(step.update_seconds for step in steps),
    )
