"""Choose precision, length and batch size from measured times, so that a run takes three minutes on
any machine.

Nothing is measured here and no rank asks another: the same times give the same choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from byte_gpt.settings import Precision, Settings

# from the first line of scripts/quickstart.sh after the installation to its last
TARGET_SECONDS = 180.0
END_SECONDS = 10.0  # of these for what nobody measures: drawing the plot, the end of the processes
# of the speed of the probe, over two minutes on a shared machine: 134 planned seconds took 170
SUSTAINED = 0.8
# a fast machine stops here: what more would teach takes more than a few minutes
MOST_ITERATIONS = 480
ENOUGH_ITERATIONS = 240  # where fewer fit, half the batch teaches more in the same time
# 150 iterations of one window end 0.9 bits a byte below the order-0 entropy, 100 only 0.5: slow
# machines take longer.
LEAST_ITERATIONS = 150
MICRO_BATCH_SIZES = (8, 4, 2, 1)
# of forward and backward together: backward computes two products for each of forward
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Insisted:
    """What the user gave and gets as it is; None where there is something to choose."""

    precision: Precision | None = None
    iterations: int | None = None


@dataclass(frozen=True)
class Trial:
    """Seconds of an iteration of a model of one layer in one precision, on the slowest rank."""

    precision: Precision
    seconds: float


@dataclass(frozen=True)
class Probe:
    """An iteration of the whole model in the chosen precision, on the slowest rank.

    Args:
        micro_batch_size: windows that a rank read in it.
        forward_backward_seconds: the part that grows with the batch.
        other_seconds: communication and update, which do not grow with it.
        seconds_before: from the start until training could begin.
    """

    micro_batch_size: int
    forward_backward_seconds: float
    other_seconds: float
    seconds_before: float

    def seconds(self, micro_batch_size: int) -> float:
        """Of an iteration with another batch."""
        return self.window_seconds * micro_batch_size + self.other_seconds

    @property
    def window_seconds(self) -> float:
        """Forward and backward of one window."""
        return self.forward_backward_seconds / self.micro_batch_size


@dataclass(frozen=True)
class Choice:
    """What is trained with, what was measured for it, and why it is that.

    Args:
        precision: of the model params.
        iterations: how many.
        micro_batch_size: windows that a rank reads in each.
        trials: the precisions that were tried; none where there was nothing to choose.
        probe: None where the number of iterations was given.
        reason: one sentence.
    """

    precision: Precision
    iterations: int
    micro_batch_size: int
    trials: tuple[Trial, ...]
    probe: Probe | None
    reason: str


def choose_precision(
    insisted: Insisted, *, candidates: Sequence[Precision], trials: Sequence[Trial]
) -> Precision:
    """The given one, or the fastest; the first of `candidates` where they are equally fast or none
    was tried."""
    if insisted.precision:
        return insisted.precision
    seconds = {trial.precision: trial.seconds for trial in trials}
    return min(candidates, key=lambda precision: seconds.get(precision, 0.0))


def choose(
    insisted: Insisted,
    *,
    precision: Precision,
    trials: Sequence[Trial],
    probe: Probe | None,
    ranks: int,
) -> Choice:
    """Length and batch size to go with the precision that `choose_precision` gave.

    Args:
        insisted: what the user gave.
        precision: what `probe` was measured in.
        trials: what it was chosen by.
        probe: None where the number of iterations is given.
        ranks: which share validation.
    """
    why_precision = _why_precision(insisted, precision, trials)
    if probe is None:
        iterations, size = insisted.iterations or Settings.iterations, Settings.micro_batch_size
        why_length = f"{iterations} iterations, as --iterations says"
    else:
        size, iterations = _length(probe, ranks)
        why_length = _why_length(probe, ranks, size, iterations)
    return Choice(
        precision, iterations, size, tuple(trials), probe, f"{why_precision}; {why_length}."
    )


def _length(probe: Probe, ranks: int) -> tuple[int, int]:
    """The largest batch of which enough iterations fit, and how many of them."""
    fitting = {
        size: int(seconds_to_train(probe, ranks) / probe.seconds(size))
        for size in MICRO_BATCH_SIZES
    }
    size = next(
        (size for size, count in fitting.items() if count >= ENOUGH_ITERATIONS),
        MICRO_BATCH_SIZES[-1],
    )
    return size, min(MOST_ITERATIONS, max(LEAST_ITERATIONS, fitting[size]))


def seconds_to_train(probe: Probe, ranks: int) -> float:
    """What is left of `TARGET_SECONDS` after the start and before validation and the sample."""
    # The sample is written by one rank, a forward of half a window a byte.
    windows = Settings.validation_windows / ranks + Settings.sample_nbytes / 2
    left = TARGET_SECONDS - END_SECONDS - probe.seconds_before
    return left * SUSTAINED - windows * probe.window_seconds * FORWARD_SHARE


def _why_precision(insisted: Insisted, precision: Precision, trials: Sequence[Trial]) -> str:
    name = precision.name.lower()
    if insisted.precision:
        return f"{name}, as --precision says"
    if not trials:
        return (
            "bf16, which the GPUs have"
            if precision is Precision.BF16
            else f"{name}, because a GPU has no bf16"
        )
    times = " and ".join(
        f"{trial.seconds * 1e3:.0f} ms in {trial.precision.name.lower()}" for trial in trials
    )
    return f"{name}, because an iteration of one layer takes {times}"


def _why_length(probe: Probe, ranks: int, size: int, iterations: int) -> str:
    seconds, left = probe.seconds(size), seconds_to_train(probe, ranks)
    windows = "one window" if size == 1 else f"{size} windows"
    length = f"{iterations} iterations of {windows} a rank, because one takes {seconds:.2f} s"
    training = iterations * seconds
    if training > left:
        return (
            f"{length} and fewer learn too little: training takes {training:.0f} s instead of "
            f"{max(0.0, left):.0f} s"
        )
    if iterations == MOST_ITERATIONS:
        return f"{length} and more than {MOST_ITERATIONS} are not needed"
    return f"{length} and {left:.0f} s of three minutes are left to train"
