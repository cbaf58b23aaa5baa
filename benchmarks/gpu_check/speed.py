"""How fast is a step here, compared with what a user would use instead, and with what the device's
memory allows?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from peers.forms import LOW_PRECISION
from peers.ranks import exchange
from peers.report import OURS, Rounds, is_ours, median_seconds
from peers.step_readings import FLOOR_NBYTES, TOLERANCE, StepReading
from peers.step_readings import read as read_step
from peers.steppers import Ours, StepEntry, StepSetting
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_readings import WARM_UP, Pace, TrainReading, losses_apart
from peers.train_readings import read as read_training
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting
from torch import Tensor

from gpu_check.checks import Check, Found, Place, Where, WrongError
from gpu_check.machine import CPU, empty_cache, seconds_of
from gpu_check.peers import step_peers, train_peers

_GIB = 1 << 30
_MOST_ROUNDS = 7
#: Of losses, relative, between contestants that all compute in bf16.
_LOSSES_APART = 0.05


Entry = TypeVar("Entry", StepEntry, TrainEntry)


def _rounds(place: Place) -> Iterator[int]:
    """As many as the time allows; all ranks go by the clock of rank 0."""
    begin = time.monotonic()
    for number in range(_MOST_ROUNDS):
        round_begin = time.monotonic()
        yield number
        now = time.monotonic()
        if not exchange(now - begin + (now - round_begin) < place.seconds)[0]:
            return


def _turns(place: Place, entries: Sequence[Entry], readings: Sequence[Any]) -> Iterator[Entry]:
    """Those that have not failed, as the one that is run now."""
    failed = {reading.contestant for reading in readings if reading.why_not}
    for entry in entries:
        if entry.name not in failed:
            place.say(entry.name)
            yield entry
            empty_cache(place.device)


def _contestants(
    place: Place, rounds: Rounds[Any], deviation: Mapping[str, float | None], most: float
) -> list[dict[str, Any]]:
    """For the report, those that ended an earlier process last.

    Raises:
        WrongError: ours did not run, or a form of it deviates by more than `most`.
    """
    why_not = rounds.failures()["why_not"]
    seconds = {name: list(rounds.values(name, median_seconds).values()) for name in rounds.of}
    if not seconds.get(OURS):
        raise WrongError(
            f"ours did not run: {why_not.get(OURS, 'it ended the process, see the logs')}"
        )
    found = [
        {
            "name": name,
            "seconds": seconds[name],
            "deviation": deviation[name],
            "why_not": why_not.get(name, ""),
        }
        for name in rounds.of
    ]
    if wrong := [name for name in rounds.of if is_ours(name) and (deviation[name] or 0.0) > most]:
        raise WrongError(f"{wrong} deviate from ours: {found}")
    crashed = {"seconds": [], "deviation": None, "why_not": "it ended the process, see the logs"}
    return [*found, *({"name": name, **crashed} for name in place.without)]


def _said(contestants: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Median seconds of ours, and which of the others is the fastest."""
    medians = {
        each["name"]: statistics.median(each["seconds"]) for each in contestants if each["seconds"]
    }
    ours = medians[OURS]
    peers = {
        name: each
        for name, each in medians.items()
        if not is_ours(name) and name != FORWARD_BACKWARD.name
    }
    if not peers:
        return ours, "no peer ran"
    fastest = min(peers, key=lambda name: peers[name])
    return ours, f"the fastest peer, {fastest}, takes {peers[fastest] / ours:.2f} of it"


# The memory of the device, and an optimizer step alone


def bandwidth(place: Place) -> Found:
    """What a copy between two large tensors reads and writes a second; the fastest of several
    counts."""
    nbytes = (1 << 28) if _is_small(place) else min(2 * _GIB, place.memory_nbytes // 8)
    source = torch.ones(nbytes // 4, device=place.device)
    target = torch.empty_like(source)
    times = 2 if place.device.type == CPU else 20
    rates = [
        2 * nbytes / seconds_of(place.device, lambda: target.copy_(source), times) for _ in range(5)
    ]
    return Found(
        f"{max(rates) / 1e9:.3g} GB/s read and written by a copy of {nbytes / 1e6:.0f} MB",
        {"copy": max(rates)},
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
    """An optimizer step without communication: clip by the norm, update fp32 main params, round to
    bf16."""
    setting = step_setting(place)
    rates: list[float] = []
    reference: list[Tensor] = []
    readings: list[StepReading] = []
    for number in _rounds(place):
        rates.append(bandwidth(place).figures["copy"])
        for entry in _turns(place, step_peers(place), readings):
            readings.append(
                read_step(entry, setting, number, 5, reference, partial(seconds_of, place.device))
            )
    rounds = Rounds(readings)
    contestants = _contestants(place, rounds, rounds.first(lambda each: each.deviation), TOLERANCE)
    ours, peers = _said(contestants)
    seconds = rounds.values(OURS, median_seconds)
    share = statistics.median(
        FLOOR_NBYTES * setting.numel / each / rates[number] for number, each in seconds.items()
    )
    figures = {
        "numel": setting.numel,
        "copy": statistics.median(rates),
        "share": share,
        "contestants": contestants,
    }
    said = (
        f"{1e3 * ours:.3g} ms for {setting.numel / 1e6:.1f} M elements: {100 * share:.0f} % of the "
        "speed of a copy"
    )
    return Found(f"{said} ({FLOOR_NBYTES} bytes an element); {peers}", figures)


def forms(place: Place) -> Found:
    """The same step with state in low precision, which a device updates in several passes."""
    setting, readings = step_setting(place), list[StepReading]()
    entries = [StepEntry(OURS, Ours)]
    entries += [
        StepEntry(f"{OURS}, {name}", partial(Ours, **options))
        for name, options in LOW_PRECISION.items()
    ]
    for number in _rounds(place):
        for entry in _turns(place, entries, readings):
            readings.append(
                read_step(entry, setting, number + 1, 3, [], partial(seconds_of, place.device))
            )
    rounds = Rounds(readings)
    contestants = _contestants(place, rounds, dict.fromkeys(rounds.of), math.inf)
    ours = statistics.median(contestants[0]["seconds"])
    over = {
        each["name"]: statistics.median(each["seconds"]) / ours
        for each in contestants[1:]
        if each["seconds"]
    }
    said = ", ".join(f"{name.removeprefix('ours, ')} {ratio:.2f}" for name, ratio in over.items())
    figures = {"numel": setting.numel, "contestants": contestants}
    return Found(
        f"over state in fp32, {1e3 * ours:.3g} ms for {setting.numel / 1e6:.1f} M elements: {said}",
        figures,
    )


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
    """Whole training steps: forward, backward, reduce, clip, step, gather.

    A small model once, so that imports and first connections are over, then rounds of the real one.
    """
    entries, setting = [FORWARD_BACKWARD, *train_peers(place)], train_setting(place)
    small = replace(setting, layers=1, hidden=128)
    warmed = [read_training(entry, small, WARM_UP, -1) for entry in _turns(place, entries, ())]
    readings: list[TrainReading] = [reading for reading in warmed if reading.why_not]
    for number in _rounds(place):
        for entry in _turns(place, entries, readings):
            readings.append(read_training(entry, setting, _pace(place), number))
    rounds = Rounds(readings)
    deviation = {
        name: losses_apart(found, rounds.of.get(OURS, [])) for name, found in rounds.of.items()
    }
    contestants = _contestants(place, rounds, deviation, _LOSSES_APART)
    ours, peers = _said(contestants)
    figures = {"numel": setting.numel, "contestants": contestants}
    return Found(
        f"{1e3 * ours:.3g} ms a step, {setting.numel / 1e6:.1f} M elements; {peers}", figures
    )


CHECKS = (
    Check("bandwidth", "how fast a copy is", bandwidth, "speed", Where.ONE),
    Check("step", "an optimizer step, compared with peers", step, "speed", Where.ONE, limit=240),
    Check(
        "forms", "an optimizer step of state in low precision", forms, "speed", Where.ONE, limit=120
    ),
    Check("train", "training steps, compared with peers", train, "speed", Where.ENDS, limit=180),
)
