"""How far two recorded runs are apart in each iteration, and whether rounding explains it.

[Note: equal but for rounding] Runs that add up in another order are not equal for long, and a
learning rate that is wrong by 1 % moves the loss as little. The first update that begins with equal
weights and ends with others tells them apart: rounding changes the last bit of what it writes, in
few elements of a matrix by more. In 16 bits few differ at all, and the sum of their bits shows
those that are off in one direction. Params with one dimension may differ in half of their elements:
gradients of some biases are noise. Then runs drift, up to the square root of the precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_distopt.cli.show import listed
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.recording import RecordedRun

# from 1 to the next number; what sums of squares in fp32 are apart
_FP32, _NORM = 2.0**-23, 2.0**-16
_AS_FAR = 4.0  # times as far apart as the host's own optimizers are: one draw of noise is no bound
_STATE = (
    "moments and other state that steps hand on, or at the host: two runs of its own may differ as "
    "well"
)
_START = 0.0, "seed and checkpoint of the start"
_FORWARD = "data, dropout and the forward pass: both had the same weights"
_GRADS = "the sum of gradients over ranks and their norm: both had the same weights"


@dataclass(frozen=True)
class Deviation:
    """How far two runs are apart in one iteration."""

    iteration: int
    what: str
    apart: float  # relative; of an update as a multiple of what rounding explains
    limit: float  # what rounding explains
    look: str  # where to look if it is more

    def exceeds(self, allowed: float = 0.0) -> bool:
        return not self.apart <= max(self.limit, allowed)  # also where it is nan


def judge(
    own: RecordedRun, ours: RecordedRun, hosts_other: RecordedRun | None = None
) -> tuple[bool, str]:
    """Says whether runs are the same, and why; a run with the host's other optimizer is a
    yardstick. May refuse."""
    found, known = differences(own, ours), differences(own, hosts_other) if hosts_other else []
    if own.bits(0) == own.bits(-1):
        raise ConfigError(
            refusal("runs", "no update of weights", "update some", "Write more --iterations")
        )
    if not any(each.apart for each in found):
        return (
            True,
            f"Equal to the bit: weights, losses and gradient norms of {len(own.steps)} iterations.",
        )
    explained = {
        each.what: _AS_FAR * max(k.apart for k in known if k.what == each.what) for each in known
    }
    for each in found:
        if each.exceeds(explained.get(each.what, 0.0)):
            amount = (
                f"{each.what} apart by {each.apart:.1e}, of which rounding explains "
                f"{each.limit:.1e}"
            )
            return (
                False,
                f"Not the same, first at iteration {each.iteration}: {amount}. Look at "
                f"{each.look}.",
            )
    by = (
        "the host's own two optimizers are"
        if any(map(Deviation.exceeds, found))
        else "rounding explains"
    )
    return True, f"Equal but for rounding: {apart_text(found)}, as far as {by}."


def apart_text(found: list[Deviation]) -> str:
    """Writes how far two runs are apart at most."""
    loss, way = (
        max(d.apart for d in found if d.what == what and d.apart < math.inf)
        for what in ("loss", "weights")
    )
    return (
        f"losses are apart by at most {loss:.1e} of their value, weights by {way:.1e} of the way "
        "that they went"
    )


def differences(one: RecordedRun, other: RecordedRun) -> list[Deviation]:
    """All that is compared, by iteration and there in the order in which a step computes it.
    Refuses unlike runs."""
    if (one.params, len(one.steps)) != (other.params, len(other.steps)):
        got = "other ranks, params or iterations than the host's own"
        raise ConfigError(
            refusal(
                "run", got, "be the same training", "Start both lines alone and compare their logs"
            )
        )
    equal = [one.bits(number) == other.bits(number) for number in range(len(one.steps))]
    found = list[Deviation]()
    for number, is_equal in enumerate(equal):
        if number and equal[number - 1] and not is_equal:
            found.append(_of_update(one, other, number))
        found += _of_step(one, other, number, is_equal=is_equal)
    return found


def _of_step(
    one: RecordedRun, other: RecordedRun, number: int, *, is_equal: bool
) -> list[Deviation]:
    """What a step computed, which began with equal weights or not."""
    epsilon, growth = max(param.epsilon for param in one.params), 1 + number / 20
    weights, others, start = one.weights(number), other.weights(number), one.weights(0)
    distance, way = float(np.abs(weights - others).sum()), float(np.abs(weights - start).sum())
    pairs = (
        [run.values(what)[number] for run in (one, other)]
        for what in ("loss", "norm", "loss_scale")
    )
    loss, norm, scale = (_relative(*pair) for pair in pairs)
    drift, of_loss = math.sqrt(epsilon) * growth, max(8 * _FP32, epsilon / 8) * growth
    table = (
        (
            "weights",
            distance / way if way else math.inf if distance else 0.0,
            *((drift, _STATE) if number else _START),
        ),
        ("loss", loss, 8 * _FP32 if is_equal else of_loss, _FORWARD if is_equal else _STATE),
        ("gradient norm", norm, _NORM if is_equal else drift, _GRADS if is_equal else _STATE),
        ("loss scale", scale, 0.0, "what counts as overflow"),
    )
    return [Deviation(number + 1, *row) for row in table]


def _of_update(one: RecordedRun, other: RecordedRun, number: int) -> Deviation:
    """What the update before did, which began with equal weights."""
    before, after, others = one.weights(number - 1), one.weights(number), other.weights(number)
    rounded = 2 * _FP32 * np.maximum(np.abs(before), np.abs(after))
    differ = np.abs(after - others) > rounded + 2 * _NORM * np.abs(after - before)
    columns = zip(
        *((each.sampled, each.numel, each.is_matrix, each.epsilon > _FP32) for each in one.params),
        strict=True,
    )
    sampled, numel, is_matrix, is_short = map(np.array, columns)
    counts = np.add.reduceat(differ, np.cumsum(sampled) - sampled, dtype=np.float64)
    rate = np.where(is_matrix, np.where(is_short, 2.0**-12, 0.01), 0.5)
    bits = np.abs([float(a - b) for a, b in zip(one.bits(number), other.bits(number), strict=True)])
    by_param = np.maximum(
        counts / (3 + rate * sampled), is_matrix * is_short * bits / (3 + rate * numel)
    )
    of_all = (is_matrix * counts).sum() / (3 + (is_matrix * rate * sampled).sum())
    wrong = dict.fromkeys(
        one.params[place].name for place in np.argsort(-by_param) if by_param[place] > 1
    )
    look = f"weight decay and param group of {listed([*wrong])}"
    if not 0 < len(wrong) <= is_matrix.sum() / 2:
        look = "learning rate, clipping and the rule of the update: many params differ"
    return Deviation(number + 1, "update", float(max(of_all, *by_param)), 1.0, look)


def _relative(one: float, other: float) -> float:
    """The difference, divided by the first; 0 where both are nan, as what a rank does not know."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / abs(one) if one else math.inf
