"""How far two recorded runs are apart in each iteration, and whether rounding explains it.

[Note: equal but for rounding] Runs that add up in another order are not equal for long, and a
learning rate that is wrong by 1 % moves the loss as little. So there are two kinds of bounds.

What begins with equal weights has a bound of its own, with a reason beside it below. The first
update that ends with other weights says most: rounding changes the last bit of what it writes, and
in few elements of a matrix more. In 16 bits few elements differ at all, and the sum of their bits
shows those that are off in one direction. Main params, which are fp32, show what 16 bits round off.

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
from itertools import chain
from typing import Any

import numpy as np

from megatron_distopt.cli.recorded_run import RecordedRun, Values
from megatron_distopt.cli.show import listed
from megatron_distopt.cli.verdict import (
    FORWARD,
    OVERFLOW,
    START,
    STATE,
    SUM_OF_GRADIENTS,
    UPDATE,
    Outcome,
    not_the_same,
)
from megatron_distopt.errors import ConfigError
from megatron_distopt.plugin.recording import RecordedParam

# --- bounds at equal weights; relative where nothing else is said

#: The distance from 1 to the next number of fp32.
_FP32_EPSILON = 2.0**-23
#: A norm: the last bits of a sum of squares that fp32 adds up over many elements and ranks. Large
#: params explain more, see `_norm_rounding`.
_NORM_ROUNDING = 2.0**-16
#: A loss: few roundings of a mean in fp32, as the forward pass is the same.
_LOSS_ROUNDING = 8 * _FP32_EPSILON
#: An element of an update: two roundings of the weight, and of the step twice that of the norm that
#: clips it.
_OF_WEIGHT, _TIMES_OF_NORM = 2 * _FP32_EPSILON, 2
#: Number of elements that may differ by more, in any param, because a few can by chance.
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
#: How many times as far apart our run may be as the host's own runs, and these as the bounds: a
#: single sample of noise is no bound.
TIMES = 4.0
#: The same of main params, where no sum evens out noise: one weight that rounds otherwise
#: moves them ten times as far, and more, in each of the first updates, and when one does is chance.
_TIMES_OF_MAINS = 30.0

_Flags = np.ndarray[Any, np.dtype[np.bool_]]
#: Numbers of a step that are compared, and their names in a recorded run.
_MEASURED = {"loss": "loss", "gradient norm": "norm", "loss scale": "loss_scale"}
_REPEATABLE = (
    "Seed weights and data and set dropout to 0, so that the host's own run can be repeated"
)


@dataclass(frozen=True)
class Bound:
    """What rounding explains, and where to look if it is more."""

    limit: float  # at most, in any training
    at_least: float  # whatever the host's own runs say
    look: str


@dataclass(frozen=True)
class Deviation:
    """How far two runs are apart in one iteration."""

    iteration: int
    what: str
    apart: float  # relative; of an update as a multiple of what rounding explains
    bound: Bound

    def __str__(self) -> str:
        return f"{self.what} apart by {self.apart:.1e} at iteration {self.iteration}"

    def exceeds(self, allowed: float) -> bool:
        return not self.apart <= allowed  # also where it is nan


_BOUND_AT_START = Bound(limit=0.0, at_least=0.0, look=START)
_BOUNDS_AT_START = {"weights": _BOUND_AT_START, "main params": _BOUND_AT_START}


def judge(own: RecordedRun, ours: RecordedRun, *hosts_others: RecordedRun) -> tuple[Outcome, str]:
    """Says whether runs are the same, and why.

    Args:
        own: the host's run.
        ours: the same training with our optimizer.
        hosts_others: further runs of the host that differ from `own` by rounding alone.

    Raises:
        ConfigError: the runs cannot be compared: they are different trainings, or no update was
            made.
    """
    _check_updates(own)
    found = differences(own, ours)
    if not any(each.apart for each in found):
        what = "Equal to the bit: weights, losses and gradient norms of"
        return Outcome.SAME, f"{what} {len(own.steps)} iterations."
    yardsticks = [differences(own, other) for other in hosts_others]
    for each in chain(*yardsticks):
        if each.exceeds(TIMES * each.bound.limit):
            unlike = f"the host's own two runs differ by more than rounding: {each}"
            return Outcome.NONE, f"No verdict: {unlike}. {_REPEATABLE}."
    for each in found:
        allowed = _allowed(each, found, yardsticks)
        if each.exceeds(allowed):
            if each.bound.look == START and not yardsticks:
                unlike = f"the runs do not start with equal weights: {each}"
                return Outcome.NONE, f"No verdict: {unlike}. {_REPEATABLE}."
            amount = f"{each}, of which rounding explains {allowed:.1e}"
            sentence = not_the_same(amount, each.bound.look)
            return Outcome.DIFFERENT, sentence
    return Outcome.SAME, f"Equal but for rounding: {apart_text(found)}."


def exceeds_bounds(own: RecordedRun, other: RecordedRun, times: float = 1.0) -> bool:
    """Whether two runs are apart by more than rounding can explain in any training."""
    found = differences(own, other)
    return any(each.exceeds(times * each.bound.limit) for each in found)


def _check_updates(own: RecordedRun) -> None:
    if own.bits(0) != own.bits(-1):
        return
    found, remedy = "No weight of the host's run has changed", "--lr-warmup-iters 0"
    skipped = own.values("skipped")
    if all(skipped[:-1]):
        scale = own.values("loss_scale")[-1]
        found = f"The host skipped all steps, and its loss scale is still {scale:g}"
        remedy = "--initial-loss-scale 65536"
    num_steps = len(own.steps)
    raise ConfigError(
        f"{found} after {num_steps} iterations. Write more --iterations, or {remedy}."
    )


def _allowed(
    each: Deviation, found: Sequence[Deviation], yardsticks: Sequence[Sequence[Deviation]]
) -> float:
    """What rounding explains, in this training up to this iteration, and never more than in any.

    A drift begins when the first rounded weight is used, by chance some iterations earlier or later
    than in the host's own runs, which does not count.
    """
    if not yardsticks:
        return each.bound.limit
    furthest = 0.0
    for known in yardsticks:
        delay = _beginning(known) - _beginning(found)
        last = each.iteration + max(0, delay)
        for other in known:
            if other.what == each.what and other.iteration <= last:
                furthest = max(furthest, other.apart)
    times = _TIMES_OF_MAINS if each.what == "main params" else TIMES
    return min(each.bound.limit, max(each.bound.at_least, times * furthest))


def _beginning(found: Sequence[Deviation]) -> int:
    """The first iteration with another loss; the one after the last if there is none."""
    for each in found:
        if each.what == "loss" and each.apart:
            return each.iteration
    return found[-1].iteration + 1


def apart_text(found: Sequence[Deviation]) -> str:
    """Writes how far two runs are apart at most."""
    loss = max(each.apart for each in found if each.what == "loss")
    weights = max(each.apart for each in found if each.what == "weights")
    return (
        f"losses differ by at most {loss:.1e} of their value, weights by {weights:.1e} of the "
        "distance that they moved"
    )


def differences(one: RecordedRun, other: RecordedRun) -> list[Deviation]:
    """Lists all that is compared, by iteration and there in the order in which a step computes it.

    Raises:
        ConfigError: the runs have other ranks, params or iterations.
    """
    if (one.params, len(one.steps)) != (other.params, len(other.steps)):
        raise ConfigError(
            f"A run of {len(other.steps)} iterations has other ranks, params or iterations than "
            f"the host's own run of {len(one.steps)}. Start both lines by themselves and compare "
            "their logs."
        )
    found = list[Deviation]()
    was_equal = mains_were_equal = False
    has_fp32_grads = _grad_epsilon(one, other) <= _FP32_EPSILON
    for number in range(len(one.steps)):
        is_equal = _are_equal(one, other, number)
        mains_are_equal = np.array_equal(*_mains(one, other, number), equal_nan=True)
        if was_equal and not is_equal:
            found.append(_of_update("update", one, other, number, of_mains=False))
        if was_equal and mains_were_equal and not mains_are_equal and has_fp32_grads:
            what = "update of main params"
            found.append(_of_update(what, one, other, number, of_mains=True))
        found += _of_step(one, other, number, is_equal=is_equal, mains_are_equal=mains_are_equal)
        was_equal, mains_were_equal = is_equal, mains_are_equal
    return found


def _are_equal(one: RecordedRun, other: RecordedRun, number: int) -> bool:
    """Whether weights are equal to the bit; nan equals nan."""
    if one.bits(number) != other.bits(number):
        return False
    return np.array_equal(one.weights(number), other.weights(number), equal_nan=True)


def _of_step(
    one: RecordedRun, other: RecordedRun, number: int, *, is_equal: bool, mains_are_equal: bool
) -> list[Deviation]:
    """What a step began with and computed."""
    apart = {
        "weights": 0.0 if is_equal else _weights_apart(one, other, number),
        "main params": 0.0 if mains_are_equal else _mains_apart(one, other, number),
    }
    for what, name in _MEASURED.items():
        ours = one.values(name)[number]
        others = other.values(name)[number]
        apart[what] = _relative(ours, others)
    bounds = _bounds(one, other, number)
    if number == 0:
        bounds |= _BOUNDS_AT_START
    if is_equal:
        norm = _norm_rounding(one)
        bounds["loss"] = Bound(limit=_LOSS_ROUNDING, at_least=math.inf, look=FORWARD)
        bounds["gradient norm"] = Bound(limit=norm, at_least=math.inf, look=SUM_OF_GRADIENTS)
    return [
        Deviation(iteration=number + 1, what=what, apart=apart[what], bound=bounds[what])
        for what in apart
    ]


def _bounds(one: RecordedRun, other: RecordedRun, number: int) -> dict[str, Bound]:
    """Bounds of what drifts, by what is compared, in the step of that number."""
    epsilon = max(param.epsilon for param in one.params)
    grad_epsilon = _grad_epsilon(one, other)
    growth = 1 + number / _ITERATIONS_OF_GROWTH
    drift = math.sqrt(epsilon) * growth
    one_rounding = epsilon * _OF_EPSILON
    of_gradient = grad_epsilon * _OF_EPSILON
    norm = _norm_rounding(one)
    of_step = _TIMES_OF_NORM * norm
    return {
        "weights": Bound(limit=drift, at_least=max(of_step, one_rounding), look=STATE),
        "main params": Bound(limit=drift, at_least=max(of_step, of_gradient), look=STATE),
        "loss": Bound(
            limit=max(_LOSS_ROUNDING, one_rounding) * growth, at_least=math.inf, look=STATE
        ),
        "gradient norm": Bound(limit=drift, at_least=max(norm, one_rounding), look=STATE),
        "loss scale": Bound(limit=0.0, at_least=0.0, look=OVERFLOW),
    }


def _norm_rounding(run: RecordedRun) -> float:
    """What rounding explains of a gradient norm.

    A host may add up the squares of a whole param in fp32, one after another, as torch does on one
    thread of a CPU. Each addition rounds by up to half of the last bit, and n of them drift by
    about the root of n.
    """
    largest_numel = max(param.numel for param in run.params)
    drift = math.sqrt(largest_numel) * _FP32_EPSILON / 2
    return max(_NORM_ROUNDING, drift)


def _grad_epsilon(one: RecordedRun, other: RecordedRun) -> float:
    params = (*one.params, *other.params)
    return max(param.grad_epsilon for param in params)


def _weights_apart(one: RecordedRun, other: RecordedRun, number: int) -> float:
    """How far weights that differ are apart, of the way that they went or of what they began as."""
    weights = one.weights(number)
    start = one.weights(0)
    moved = weights - start if number else start
    way = float(np.abs(moved).sum())
    if not way:
        return math.inf
    difference = weights - other.weights(number)
    distance = float(np.abs(difference).sum())
    # where no sampled element differs, one of the others does
    return max(distance / way, sys.float_info.epsilon)


def _mains_apart(one: RecordedRun, other: RecordedRun, number: int) -> float:
    """How far half of the main params are apart at most, each of its own way.

    What rounds otherwise in 16 bits turns few elements around, of which the gradient is noise, and
    hardly moves the others. A sum over all would be that of the few.
    """
    mains, others = _mains(one, other, number)
    distance = np.abs(mains - others)
    if number == 0:
        whole = np.abs(mains).sum()
        return float(distance.sum() / whole)
    start, _ = _mains(one, other, 0)
    way = np.abs(mains - start)
    by_element = distance / np.maximum(way, sys.float_info.min)
    return float(np.median(by_element))


def _mains(one: RecordedRun, other: RecordedRun, number: int) -> tuple[Values, Values]:
    """Main params of the elements that a rank has in both runs."""
    is_missing_in_one = np.isnan(one.mains(0))
    is_missing = is_missing_in_one | np.isnan(other.mains(0))
    mains = one.mains(number)
    others = other.mains(number)
    return mains[~is_missing], others[~is_missing]


def _of_update(
    what: str, one: RecordedRun, other: RecordedRun, number: int, *, of_mains: bool
) -> Deviation:
    """What the update before did, which began with equal values: 1 is as much as rounding does."""
    values_of = RecordedRun.mains if of_mains else RecordedRun.weights
    before = values_of(one, number - 1)
    after = values_of(one, number)
    others = values_of(other, number)
    step = np.abs(after - before)
    size = np.maximum(np.abs(before), np.abs(after))
    of_step = _TIMES_OF_NORM * _norm_rounding(one)
    rounding = _OF_WEIGHT * size + of_step * step
    differ = np.abs(after - others) > rounding
    params = one.params
    shares = np.array([_share(param, of_mains=of_mains) for param in params])
    counts = _by_param(params, differ)
    compared = _by_param(params, ~np.isnan(after - others))
    allowed = shares * compared
    by_param = counts / (_ANY_DIFFER + allowed)
    if not of_mains:
        by_param = np.maximum(by_param, _bits_apart(one, other, number))
    matrices = np.array([param.is_matrix for param in params])
    counts_in_all = counts[matrices].sum()
    allowed_in_all = _ANY_DIFFER + allowed[matrices].sum()
    of_all = counts_in_all / allowed_in_all
    worst_first = np.argsort(-by_param)
    is_wrong = [place for place in worst_first if by_param[place] > 1]
    wrong = dict.fromkeys(params[place].name for place in is_wrong)
    look = f"weight decay and param group of {listed([*wrong])}"
    if not 0 < len(wrong) <= matrices.sum() / 2:
        look = f"{UPDATE}: many params differ"
        look = f"precision of main params, {look}" if of_mains else look
    return Deviation(
        iteration=number + 1,
        what=what,
        apart=float(max(of_all, *by_param)),
        bound=Bound(limit=1.0, at_least=1.0, look=look),
    )


def _by_param(params: Sequence[RecordedParam], flags: _Flags) -> Values:
    """How many sampled elements of each param have the flag."""
    sampled = np.array([param.sampled for param in params])
    starts = np.cumsum(sampled) - sampled
    return np.add.reduceat(flags, starts, dtype=np.float64)


def _bits_apart(one: RecordedRun, other: RecordedRun, number: int) -> list[float]:
    """How far the bits of matrices of 16 bits are apart; 1 is as much as rounding does."""
    apart = []
    bits = zip(one.bits(number), other.bits(number), strict=True)
    for param, (ours, others) in zip(one.params, bits, strict=True):
        allowed = _ANY_NUMBERS + _SHARE_16_BITS * param.numel
        is_short = _share(param, of_mains=False) == _SHARE_16_BITS
        by_rounding = abs(ours - others) / allowed
        apart.append(by_rounding if is_short else 0.0)
    return apart


def _share(param: RecordedParam, *, of_mains: bool) -> float:
    """The share of a param's elements that may differ."""
    if not param.is_matrix:
        return _SHARE_VECTOR
    has_16_bits = param.epsilon > _FP32_EPSILON and not of_mains
    return _SHARE_16_BITS if has_16_bits else _SHARE_FP32


def _relative(one: float, other: float) -> float:
    """The difference, divided by the first; 0 where both are nan, as what a rank does not know."""
    both_are_nan = math.isnan(one) and math.isnan(other)
    if one == other or both_are_nan:
        return 0.0
    if not one:
        return math.inf
    return abs(one - other) / abs(one)
