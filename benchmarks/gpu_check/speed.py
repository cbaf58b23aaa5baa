"""How fast is a step here, compared with what a user would use instead, and with what the device's memory allows?"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from peers.ranks import exchange
from peers.report import failure
from peers.step_contestants import StepEntry
from peers.step_reading import FIRST_NORMS, TOLERANCE, deviation
from peers.step_report import FLOOR_NBYTES
from peers.steppers import Stepper, StepSetting, set_grads
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import Pace, TrainReading, losses_apart, read
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting
from torch import Tensor

from gpu_check.checks import Check, Found, Place, Where, WrongError
from gpu_check.machine import CPU, empty_cache, seconds_of
from gpu_check.peers import OURS, is_ours, step_peers, train_peers

_GIB = 1 << 30
_MOST_ROUNDS = 7
#: Of losses, relative, between contestants that all compute in bf16.
_LOSSES_APART = 0.05


@dataclass(frozen=True)
class Timed:
    """One contestant."""

    name: str
    seconds: tuple[float, ...] = ()  # of a step, the median of each round
    deviation: float | None = None  # of its result from that of ours; None where it was not compared
    why_not: str = ""  # the reason, where it was not run

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


# The memory of the device, and an optimizer step alone


def bandwidth(place: Place) -> Found:
    """What a copy between two large tensors reads and writes a second; the fastest of several counts."""
    nbytes = (1 << 28) if _is_small(place) else min(2 * _GIB, place.memory_nbytes // 8)
    source = torch.ones(nbytes // 4, device=place.device)
    target = torch.empty_like(source)
    times = 2 if place.device.type == CPU else 20
    rates = [2 * nbytes / seconds_of(place.device, lambda: target.copy_(source), times) for _ in range(5)]
    return Found(
        f"{max(rates) / 1e9:.3g} GB/s read and written by a copy of {nbytes / 1e6:.0f} MB", {"copy": max(rates)}
    )


def _is_small(place: Place) -> bool:
    """A CPU, or a device that does not say how much memory it has."""
    return place.device.type == CPU or place.memory_nbytes < 4 * _GIB


def step_setting(place: Place) -> StepSetting:
    """As many elements as fit beside the copies that some contestants make, up to 300 million."""
    device = str(place.device)
    if _is_small(place):
        return StepSetting(10, 256, 0, 1, None, device)
    hidden = 2048
    layers = int(min(300e6, place.memory_nbytes / 60) / (12 * hidden**2 + 13 * hidden))
    return StepSetting(max(layers, 1), hidden, 0, 1, None, device)


def step(place: Place) -> Found:
    """An optimizer step without communication: clip by the norm, update fp32 main params, round to bf16."""
    setting = step_setting(place)
    rates: list[float] = []
    reference: list[Tensor] = []
    rounds = _Rounds(place, [entry.name for entry in step_peers(place)])
    for number in rounds:
        rates.append(bandwidth(place).figures["copy"])
        for entry in step_peers(place):
            rounds.note(entry.name, lambda entry=entry, number=number: _one(place, entry, setting, reference, number))
    timed = rounds.timed()
    ours = _of(timed, OURS).median
    if ours is None:
        raise WrongError(f"ours did not run: {_of(timed, OURS).why_not}")
    found = zip(_of(timed, OURS).seconds, rates, strict=True)
    share = statistics.median(FLOOR_NBYTES * setting.numel / seconds / rate for seconds, rate in found)
    figures = {
        "numel": setting.numel,
        "copy": statistics.median(rates),
        "share": share,
        "contestants": [asdict(each) for each in timed],
    }
    wrong = [each.name for each in timed if is_ours(each.name) and (each.deviation or 0.0) > TOLERANCE]
    if wrong:
        raise WrongError(f"{wrong} deviate from ours: {figures}")
    said = f"{1e3 * ours:.3g} ms for {setting.numel / 1e6:.1f} M elements: {100 * share:.0f} % of the speed of a copy"
    return Found(f"{said} ({FLOOR_NBYTES} bytes an element); {_ratios(timed)}", figures)


def _one(
    place: Place, entry: StepEntry, setting: StepSetting, reference: list[Tensor], number: int
) -> tuple[float, float | None]:
    """Seconds of a step, the median of several, and the deviation of the first steps in the first round."""
    stepper = entry.build(setting)
    try:
        for norm in FIRST_NORMS:
            set_grads(stepper, norm)
            stepper.step()
        off = deviation(stepper, entry.name, reference) if number == 0 else None
        return statistics.median(_timed_step(place, stepper) for _ in range(5)), off
    finally:
        stepper.close()
        del stepper
        gc.collect()
        empty_cache(place.device)


def _timed_step(place: Place, stepper: Stepper) -> float:
    set_grads(stepper, FIRST_NORMS[-1])
    return seconds_of(place.device, stepper.step)


class _Rounds:
    """Rounds over all contestants, as many as the time allows; one that fails is left out of those that follow.

    Args:
        place: whose time it is; all ranks go by the clock of rank 0.
        names: of the contestants.
    """

    def __init__(self, place: Place, names: Sequence[str]) -> None:
        self._place = place
        self._timed = {name: Timed(name) for name in names}
        self._crashed = [Timed(name, why_not="it ended the process, see the logs") for name in place.without]

    def __iter__(self) -> Any:
        begin = time.monotonic()
        for number in range(_MOST_ROUNDS):
            round_begin = time.monotonic()
            yield number
            now = time.monotonic()
            goes_on = now - begin + (now - round_begin) < self._place.seconds
            if not exchange(goes_on)[0]:
                return

    def note(self, name: str, measure: Any) -> None:
        """Calls it, unless the contestant has failed before; it returns seconds and a deviation."""
        before = self._timed[name]
        if before.why_not:
            return
        self._place.say(name)
        found: list[tuple[float, float | None]] = []
        why_not = failure(lambda: found.append(measure()))
        if why_not:
            self._timed[name] = replace(before, why_not=why_not)
            return
        seconds, off = found[0]
        off = before.deviation if off is None else off
        self._timed[name] = replace(before, seconds=(*before.seconds, seconds), deviation=off)

    def timed(self) -> list[Timed]:
        """All of them, those that ended an earlier process last."""
        return [*self._timed.values(), *self._crashed]


def _of(timed: Iterable[Timed], name: str) -> Timed:
    return next(each for each in timed if each.name == name)


def _ratios(timed: Sequence[Timed]) -> str:
    """Which of the others is the fastest."""
    ours = _of(timed, OURS).median
    found = {each.name: each.median for each in timed if not is_ours(each.name) and each.median is not None}
    if not found or ours is None:
        return "no peer ran"
    fastest = min(found, key=lambda name: found[name])
    return f"the fastest peer, {fastest}, takes {found[fastest] / ours:.2f} of it"


# Whole training steps


def train_setting(place: Place) -> TrainSetting:
    """A model of a size that suits the device."""
    device, rank, size = str(place.device), place.rank, place.size
    if _is_small(place):
        return TrainSetting(4, 256, 512, 64, 1, 500_000, rank, size, device)
    hidden = 2048 if place.memory_nbytes > 36 * _GIB else 1024
    return TrainSetting(12, hidden, 8192, 1024, 4, 40_000_000, rank, size, device)


def _pace(place: Place) -> Pace:
    return Pace(2, 2, 2) if _is_small(place) else Pace(3, 3, 5)


def train(place: Place) -> Found:
    """Whole training steps: forward, backward, reduce, clip, step, gather."""
    timed, readings = _trainings(place, [FORWARD_BACKWARD, *train_peers(place)])
    ours = _of(timed, OURS)
    if ours.median is None:
        raise WrongError(f"ours did not run: {ours.why_not}")
    numel = train_setting(place).numel
    figures = {"numel": numel, "contestants": [asdict(each) for each in timed]}
    wrong = [each.name for each in timed if is_ours(each.name) and (each.deviation or 0.0) > _LOSSES_APART]
    if wrong:
        raise WrongError(f"the losses of {wrong} are not those of ours: {[each.losses for each in readings]}")
    others = [each for each in timed if each.name != FORWARD_BACKWARD.name]
    return Found(f"{1e3 * ours.median:.3g} ms a step, {numel / 1e6:.1f} M elements; {_ratios(others)}", figures)


def _trainings(place: Place, entries: Sequence[TrainEntry]) -> tuple[list[Timed], list[TrainReading]]:
    """Collective: a small model once, so that imports and first connections are over, then rounds of the real one."""
    setting = train_setting(place)
    readings: dict[str, list[TrainReading]] = {}
    for entry in entries:
        place.say(entry.name)
        reading = read(entry, replace(setting, layers=1, hidden=128), Pace(1, 1, 1), -1)
        readings[entry.name] = [reading] if reading.why_not else []
    rounds = _Rounds(place, [entry.name for entry in entries])
    for number in rounds:
        for entry in entries:
            rounds.note(entry.name, partial(_one_training, place, entry, setting, number, readings))
    ours = readings[OURS]
    timed = [replace(each, deviation=losses_apart(readings.get(each.name, ()), ours)) for each in rounds.timed()]
    return timed, [reading for found in readings.values() for reading in found]


def _one_training(
    place: Place, entry: TrainEntry, setting: TrainSetting, number: int, readings: dict[str, list[TrainReading]]
) -> tuple[float, None]:
    """Collective: the median of its blocks.

    Raises:
        RuntimeError: it did not run, on all ranks.
    """
    found = readings[entry.name]
    if not (found and found[0].why_not):
        found.append(read(entry, setting, _pace(place), number))
        empty_cache(place.device)
    if found[-1].why_not:
        raise RuntimeError(found[-1].why_not)
    return statistics.median(found[-1].seconds), None


CHECKS = (
    Check("bandwidth", "how fast a copy is", bandwidth, "speed", Where.ONE),
    Check("step", "an optimizer step, compared with peers", step, "speed", Where.ONE, limit=240),
    Check("train", "training steps, compared with peers", train, "speed", Where.ENDS, limit=180),
)
