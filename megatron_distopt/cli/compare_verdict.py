"""How far two recorded runs are apart in each iteration, and whether rounding explains it.

[Note: equal but for rounding] Runs that add up in another order are not equal for long, and a
learning rate that is wrong by 1 % moves the loss as little. So there are two kinds of bounds.

What begins with equal weights has a bound of its own, with a reason beside it below. The first
update that ends with other weights says most: rounding changes the last bit of what it writes, and
in few elements of a matrix more. In 16 bits few elements differ at all, and the sum of their bits
shows those that are off in one direction.

What comes later drifts. How far depends on the training, so the host itself is the yardstick: two
runs of its own that differ by rounding alone. Ours may be a few times as far apart as they were up
to the same iteration. Two runs of the host that exceed the bounds measure no rounding: then there
is no verdict. tests/cli/test_compare_verdict.py breaks each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np

from megatron_distopt.cli.show import listed
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.recording import RecordedParam, RecordedRun

# --- bounds at equal weights; relative where nothing else is said

#: From 1 to the next number of fp32.
_FP32_EPSILON = 2.0**-23
#: A norm: the last bits of a sum of squares that fp32 adds up over many elements and ranks.
_NORM_ROUNDING = 2.0**-16
#: A loss: few roundings of a mean in fp32, as the forward pass is the same.
_LOSS_ROUNDING = 8 * _FP32_EPSILON
#: An element of an update: two roundings of the weight, and of the step twice that of the norm that
#: clips it.
_OF_WEIGHT, _OF_STEP = 2 * _FP32_EPSILON, 2 * _NORM_ROUNDING
#: Elements that may differ by more, in any param: there is chance in few.
_ANY_DIFFER = 3
#: By how many numbers of 16 bits few elements may be off together: near 0, where numbers are close
#: to each other, rounding moves one by as many as there are in a power of 2 of bf16.
_ANY_NUMBERS = 128
#: The share that may: in fp32 where a gradient is nearly 0 or below Adam's epsilon,
_SHARE_FP32 = 0.01
#: in 16 bits where a main param lies as near to the border between two numbers as rounding moves it
_SHARE_16_BITS = 2.0**-12
#: and of params with one dimension many: gradients of some biases are noise around 0.
_SHARE_VECTOR = 0.5

# --- bounds of what drifts

#: Iterations after which they are twice as large.
_ITERATIONS_OF_GROWTH = 20
#: What one rounding of a weight does to loss and norm, of that rounding: it is one of many.
_OF_EPSILON = 1 / 8
#: How many times as far apart ours may be as the host's own runs, and those as the bounds say: one
#: draw of noise is no bound.
TIMES = 4.0

_START = "seed and checkpoint of the start"
_EQUAL = "both had the same weights"
_STATE = "moments, precision of main params and other state that steps hand on"
_REPEATABLE = (
    "Seed weights and data and set dropout to 0, so that the host's own run can be repeated"
)


class Outcome(Enum):
    """What a comparison says; the value is the exit status of the command."""

    SAME = 0
    DIFFERENT = 1
    #: The runs do not tell: the host's own differ as much, or did not run.
    NONE = 3


@dataclass(frozen=True)
class Deviation:
    """How far two runs are apart in one iteration."""

    iteration: int
    what: str
    apart: float  # relative; of an update as a multiple of what rounding explains
    limit: float  # what rounding explains at most
    at_least: float  # what rounding explains whatever the host's own runs say
    look: str  # where to look if it is more

    def __str__(self) -> str:
        return f"{self.what} apart by {self.apart:.1e} at iteration {self.iteration}"

    def exceeds(self, allowed: float) -> bool:
        return not self.apart <= allowed  # also where it is nan


def judge(own: RecordedRun, ours: RecordedRun, *hosts_others: RecordedRun) -> tuple[Outcome, str]:
    """Says whether runs are the same, and why.

    Args:
        own: the host's run.
        ours: the same training with our optimizer.
        hosts_others: further runs of the host that differ from `own` by rounding alone.

    Raises:
        ConfigError: the runs are no comparison: another training, or one without an update.
    """
    _check_updates(own)
    found = differences(own, ours)
    if not any(each.apart for each in found):
        what = "Equal to the bit: weights, losses and gradient norms of"
        return Outcome.SAME, f"{what} {len(own.steps)} iterations."
    yardsticks = [differences(own, other) for other in hosts_others]
    for each in chain(*yardsticks):
        if each.exceeds(TIMES * each.limit):
            unlike = f"the host's own two runs are apart by more than rounding: {each}"
            return Outcome.NONE, f"No verdict: {unlike}. {_REPEATABLE}."
    for each in found:
        allowed = _allowed(each, found, yardsticks)
        if each.exceeds(allowed):
            if each.look == _START and not yardsticks:
                unlike = f"the runs do not begin with equal weights: {each}"
                return Outcome.NONE, f"No verdict: {unlike}. {_REPEATABLE}."
            amount = f"{each}, of which rounding explains {allowed:.1e}"
            return Outcome.DIFFERENT, f"Not the same, first {amount}. Look at {each.look}."
    return Outcome.SAME, f"Equal but for rounding: {apart_text(found)}."


def exceeds_bounds(own: RecordedRun, other: RecordedRun, times: float = 1.0) -> bool:
    """Whether two runs are apart by more than rounding can explain in any training."""
    return any(each.exceeds(times * each.limit) for each in differences(own, other))


def _check_updates(own: RecordedRun) -> None:
    if own.bits(0) != own.bits(-1):
        return
    found, remedy = "No weight of the host's run has changed", "--lr-warmup-iters 0"
    if all(own.values("skipped")[:-1]):
        scale = own.values("loss_scale")[-1]
        found = f"The host skipped all steps, and its loss scale is still {scale:g}"
        remedy = "--initial-loss-scale 65536"
    raise ConfigError(f"{found} after {len(own.steps)}. Write more --iterations, or {remedy}.")


def _allowed(
    each: Deviation, found: Sequence[Deviation], yardsticks: Sequence[Sequence[Deviation]]
) -> float:
    """What rounding explains, in this training up to this iteration, and never more than in any.

    A drift begins when the first rounded weight is used, by chance some iterations earlier or later
    than in the host's own runs, which does not count.
    """
    if not yardsticks:
        return each.limit
    furthest = 0.0
    for known in yardsticks:
        last = each.iteration + max(0, _beginning(known) - _beginning(found))
        alike = (other for other in known if other.what == each.what)
        furthest = max(furthest, *(other.apart for other in alike if other.iteration <= last), 0.0)
    return min(each.limit, max(each.at_least, TIMES * furthest))


def _beginning(found: Sequence[Deviation]) -> int:
    """The first iteration with another loss; the one after the last if there is none."""
    numbers = (each.iteration for each in found if each.what == "loss" and each.apart)
    return min(numbers, default=found[-1].iteration + 1)


def apart_text(found: Sequence[Deviation]) -> str:
    """Writes how far two runs are apart at most."""
    loss, weights = (
        max(each.apart for each in found if each.what == what) for what in ("loss", "weights")
    )
    return (
        f"losses are apart by at most {loss:.1e} of their value, weights by {weights:.1e} of the "
        "way that they went"
    )


def differences(one: RecordedRun, other: RecordedRun) -> list[Deviation]:
    """Lists all that is compared, by iteration and there in the order in which a step computes it.

    Raises:
        ConfigError: the runs have other ranks, params or iterations.
    """
    if (one.params, len(one.steps)) != (other.params, len(other.steps)):
        raise ConfigError(
            f"A run of {len(other.steps)} iterations has other ranks, params or iterations than "
            f"the host's own, of {len(one.steps)}. Start both lines alone and compare their logs."
        )
    found, was_equal = list[Deviation](), False
    for number in range(len(one.steps)):
        weights = one.weights(number), other.weights(number)
        # nan equals nan
        is_equal = one.bits(number) == other.bits(number) and np.array_equal(*weights, True)
        if was_equal and not is_equal:
            found.append(_of_update(one, other, number))
        found += _of_step(one, other, number, is_equal=is_equal)
        was_equal = is_equal
    return found


def _of_step(
    one: RecordedRun, other: RecordedRun, number: int, *, is_equal: bool
) -> list[Deviation]:
    """What a step computed, which has bounds of its own where it began with equal weights."""
    epsilon = max(param.epsilon for param in one.params)
    growth = 1 + number / _ITERATIONS_OF_GROWTH
    of_epsilon, drift = epsilon * _OF_EPSILON, math.sqrt(epsilon) * growth
    # by what is compared: what rounding explains at most, at least, and where to look
    bounds = {
        "weights": (drift, max(_OF_STEP, of_epsilon), _STATE),
        "loss": (max(_LOSS_ROUNDING, of_epsilon) * growth, math.inf, _STATE),
        "gradient norm": (drift, max(_NORM_ROUNDING, of_epsilon), _STATE),
        "loss scale": (0.0, 0.0, "what counts as overflow"),
    }
    if not number:
        bounds["weights"] = 0.0, 0.0, _START
    if is_equal:
        bounds["loss"] = _LOSS_ROUNDING, math.inf, f"data, dropout and the forward pass: {_EQUAL}"
        bounds["gradient norm"] = (
            _NORM_ROUNDING,
            math.inf,
            f"the sum of gradients over ranks and their norm: {_EQUAL}",
        )
    apart = {"weights": 0.0 if is_equal else _distance(one, other, number)}
    for what, value in (("loss", "loss"), ("gradient norm", "norm"), ("loss scale", "loss_scale")):
        apart[what] = _relative(one.values(value)[number], other.values(value)[number])
    return [Deviation(number + 1, what, apart[what], *bounds[what]) for what in bounds]


def _distance(one: RecordedRun, other: RecordedRun, number: int) -> float:
    """How far weights that differ are apart, of the way that they went or of what they began as."""
    weights, start = one.weights(number), one.weights(0)
    way = float(np.abs(weights - start if number else start).sum())
    distance = float(np.abs(weights - other.weights(number)).sum())
    # where no sampled element differs, one of the others does
    return max(distance / way, sys.float_info.epsilon) if way else math.inf


def _of_update(one: RecordedRun, other: RecordedRun, number: int) -> Deviation:
    """What the update before did, which began with equal weights: 1 is as much as rounding does."""
    before, after, params = one.weights(number - 1), one.weights(number), one.params
    step, size = np.abs(after - before), np.maximum(np.abs(before), np.abs(after))
    differ = np.abs(after - other.weights(number)) > _OF_WEIGHT * size + _OF_STEP * step
    sampled = np.array([param.sampled for param in params])
    counts = np.add.reduceat(differ, np.cumsum(sampled) - sampled, dtype=np.float64)
    shares = np.array([_share(param) for param in params])
    by_param = counts / (_ANY_DIFFER + shares * sampled)
    bits = zip(one.bits(number), other.bits(number), strict=True)
    for place, (bits_of_one, bits_of_other) in enumerate(bits):
        if shares[place] == _SHARE_16_BITS:
            allowed = _ANY_NUMBERS + _SHARE_16_BITS * params[place].numel
            by_param[place] = max(by_param[place], abs(bits_of_one - bits_of_other) / allowed)
    matrices = np.array([param.is_matrix for param in params])
    of_all = counts[matrices].sum() / (_ANY_DIFFER + (shares * sampled)[matrices].sum())
    worst_first = np.argsort(-by_param)
    wrong = dict.fromkeys(params[place].name for place in worst_first if by_param[place] > 1)
    look = f"weight decay and param group of {listed([*wrong])}"
    if not 0 < len(wrong) <= matrices.sum() / 2:
        look = "learning rate, clipping and the rule of the update: many params differ"
    return Deviation(number + 1, "update", float(max(of_all, *by_param)), 1.0, 1.0, look)


def _share(param: RecordedParam) -> float:
    """The share of a param's elements that may differ."""
    if not param.is_matrix:
        return _SHARE_VECTOR
    return _SHARE_16_BITS if param.epsilon > _FP32_EPSILON else _SHARE_FP32


def _relative(one: float, other: float) -> float:
    """The difference, divided by the first; 0 where both are nan, as what a rank does not know."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / abs(one) if one else math.inf
