"""Exposed communication of overlap.py: what a step takes longer than without any; tables and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers.overlap_contestants import is_ours
from peers.overlap_probe import Probe
from peers.report import OURS, Rounds, Spread, median_seconds, report, spread
from peers.train_reading import TrainReading, losses_apart

_GRAD_NBYTES, _PARAM_NBYTES = 4, 2


@dataclass(frozen=True)
class WiredReading:
    """What one contestant took in one round at one rate."""

    gigabits: float | None  # a second, nominal; 0 for no limit, None where nothing was communicated
    busy_cores: float  # of the machine, kernel included, while the contestant was built and trained
    reading: TrainReading  # of both ranks


@dataclass(frozen=True)
class WireTimes:
    """How long the link needs for what a distributed optimizer has to send, at least."""

    reduce_scatter: float  # seconds; fp32 grads and bf16 params
    all_gather: float

    @property
    def total(self) -> float:
        return self.reduce_scatter + self.all_gather


def wire_times(numel: int, ranks: int, gigabits: float) -> WireTimes:
    """A rank sends (n-1)/n of the model, 4 bytes an element to reduce and 2 to gather.

    Args:
        numel: elements of the model.
        ranks: n.
        gigabits: a second, as reached.
    """
    sent = numel * (ranks - 1) / ranks * 8 / (gigabits * 1e9)
    return WireTimes(_GRAD_NBYTES * sent, _PARAM_NBYTES * sent)


def slowest(readings: Sequence[TrainReading]) -> TrainReading:
    """One reading of ranks that were timed apart: a step lasts as long as that of the slowest."""
    first = readings[0]
    failed = next((reading for reading in readings if reading.why_not), None)
    if failed is not None:
        return failed
    return TrainReading(
        first.contestant,
        first.ranks,
        first.numel,
        first.round,
        tuple(map(max, zip(*(reading.seconds for reading in readings), strict=True))),
        statistics.mean(reading.cpu_seconds for reading in readings),
        statistics.mean(reading.sent_nbytes for reading in readings),
    )


@dataclass(frozen=True)
class Context:
    """What a rate is judged by.

    Args:
        probe: what plain TCP reached.
        forward, both: seconds of forward, and of forward and backward, by round.
        best: this package as peers are compared with it.
        cores: of the machine.
    """

    probe: Probe
    forward: Sequence[float]
    both: Sequence[float]
    best: str
    cores: int


def summary(gigabits: float, readings: Sequence[WiredReading], context: Context) -> dict[str, Any]:
    """Of one rate; ratios first."""
    rounds = Rounds([each.reading for each in readings if each.gigabits == gigabits])
    mute = Rounds([each.reading for each in readings if each.gigabits is None])
    first = readings[0].reading
    wire = wire_times(first.numel, first.ranks, context.probe.gigabits)
    backward = statistics.median(context.both) - statistics.median(context.forward)
    busy: dict[str, list[float]] = {name: [] for name in rounds.of}
    for each in readings:
        if each.gigabits == gigabits:
            busy[each.reading.contestant].append(each.busy_cores)
    return {
        "gigabits": gigabits,
        "numel": first.numel,
        "best": context.best,
        "reached": context.probe,
        "backward_seconds": backward,
        "reduce_scatter_seconds": wire.reduce_scatter,
        "all_gather_seconds": wire.all_gather,
        "backward_is_longer": backward > wire.total,
        "peer / ours with overlap": rounds.over(median_seconds, context.best),
        "exposed part of the step": rounds.spreads(partial(exposed_part, mute)),
        "processor part of the step": rounds.spreads(partial(processor_part, mute, context.cores)),
        "seconds": rounds.spreads(median_seconds),
        "seconds_without_communication": {name: mute.spreads(median_seconds).get(name) for name in rounds.of},
        "cpu_seconds": rounds.spreads(_cpu_seconds),
        "cpu_seconds_without_communication": mute.spreads(_cpu_seconds),
        "busy_cores": {name: spread(values) for name, values in busy.items()},
        "sent_nbytes": rounds.spreads(lambda each: each.sent_nbytes if each.seconds else None),
        "loss_deviation": {name: losses_apart(found, rounds.of.get(OURS, [])) for name, found in rounds.of.items()},
        "why_not": rounds.failures()["why_not"],
    }


def exposed_part(mute: Rounds[TrainReading], reading: TrainReading) -> float | None:
    """What a step takes longer than without communication in the same round, as a part of the step.

    Noise may make it negative.
    """
    step, alone = median_seconds(reading), mute.values(reading.contestant, median_seconds).get(reading.round)
    return None if step is None or alone is None else (step - alone) / step


def processor_part(mute: Rounds[TrainReading], cores: int, reading: TrainReading) -> float | None:
    """What communication costs in processor time, spread over all cores, as a part of the step.

    Where every core computes, no overlap can hide it.
    """
    step, alone = median_seconds(reading), mute.values(reading.contestant, _cpu_seconds).get(reading.round)
    return None if step is None or alone is None else (reading.cpu_seconds - alone) / cores / step


def _cpu_seconds(reading: TrainReading) -> float | None:
    return reading.cpu_seconds if reading.seconds else None


# --- tables

#: Of the step, at most, where backward is longer than the communication.
GOAL = 0.10
#: Of the nominal rate, for plain TCP, whose headers are a twentieth.
_LEAST_REACHED = 0.9
#: Of a loss from ours, relative, see train.py.
_TOLERANCE = 1e-3
_HEADER = ("", "peer / ours", "exposed", "by cpu", "ms a step", "alone", "cpu ms", "alone", "B/element", "losses", "")


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return report(found, _heading, _HEADER, _row, _last_words)


def _heading(rate: Mapping[str, Any]) -> str:
    probe: Probe = rate["reached"]
    backward, reduced, gathered = (
        rate[name] * 1e3 for name in ("backward_seconds", "reduce_scatter_seconds", "all_gather_seconds")
    )
    too_little = probe.gigabits < _LEAST_REACHED * rate["gigabits"]
    verdict = "longer" if rate["backward_is_longer"] else "NOT longer"
    reached = f"{probe.gigabits:.2f} reached{' (NOT the nominal rate)' if too_little else ''}"
    return (
        f"{name_of(rate['gigabits'])}: {reached}, {probe.round_trip_us:.0f} us there and back; "
        f"{rate['numel'] / 1e6:.1f} M elements; backward {backward:.0f} ms is {verdict} than the communication, "
        f"at least {reduced:.0f} ms to reduce and {gathered:.0f} ms to gather"
    )


def name_of(gigabits: float) -> str:
    """Of a rate, for a person."""
    return f"{gigabits:g} Gbit/s" if gigabits else "no limit"


def _row(name: str, rate: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = rate["seconds"][name]
    if seconds is None:
        return (name, *"-" * 9, rate["why_not"].get(name, ""))
    exposed: Spread | None = rate["exposed part of the step"][name]
    by_cpu: Spread | None = rate["processor part of the step"][name]
    off = rate["loss_deviation"].get(name)
    note = "" if off is None or off <= _TOLERANCE else f"NOT THE SAME WORK: losses differ by more than {_TOLERANCE:.1%}"
    return (
        name,
        str(rate["peer / ours with overlap"].get(name) or ""),
        "-" if exposed is None else f"{exposed.median:.0%} [{exposed.least:.0%} to {exposed.most:.0%}]",
        "-" if by_cpu is None else f"{by_cpu.median:.0%}",
        str(seconds.times(1e3)),
        _milliseconds(rate["seconds_without_communication"][name]),
        _milliseconds(rate["cpu_seconds"][name]),
        _milliseconds(rate["cpu_seconds_without_communication"].get(name)),
        f"{rate['sent_nbytes'][name].median / rate['numel']:.2f}",
        "" if off is None else f"{off:.1e}",
        note,
    )


def _milliseconds(seconds: Spread | None) -> str:
    return "-" if seconds is None else f"{seconds.median * 1e3:.0f}"


def _last_words(rate: Mapping[str, Any]) -> str:
    ratios, best = rate["peer / ours with overlap"], rate["best"]
    without = ratios.get(OURS)
    parts = [f"no overlap/ours {without.median:.2f}"] if without else []
    exposed = rate["exposed part of the step"].get(best)
    if exposed:
        judged = f"{'below' if exposed.median < GOAL else 'NOT below'} {GOAL:.0%}"
        judged = judged if rate["backward_is_longer"] else "backward is shorter than the communication"
        parts.append(f"exposed {exposed.median:.0%} ({judged})")
    parts += [f"{name}/ours {ratio.median:.2f}" for name, ratio in ratios.items() if ratio and not is_ours(name)]
    return f"{name_of(rate['gigabits'])}: " + ", ".join(parts)
