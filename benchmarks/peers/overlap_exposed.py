"""Exposed communication of overlap.py: what a step takes longer than without any, and what the link needs at least."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.overlap_probe import Probe
from peers.ratios import ByRound, Spread, by_round, over, spread
from peers.train_reading import TrainReading, losses_apart

#: That all losses are held against.
_REFERENCE = "ours"
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


def exposed_parts(steps: ByRound, mute: ByRound) -> list[float]:
    """Of each round: what a step takes longer than without communication, as a part of the step; noise may be below 0.

    Args:
        steps: seconds, by round.
        mute: seconds of the same contestant without communication, by round.
    """
    return [(step - mute[number]) / step for number, step in steps.items() if number in mute]


def processor_parts(steps: ByRound, cpu: ByRound, mute_cpu: ByRound, cores: int) -> list[float]:
    """Of each round: what communication costs in processor time, spread over all cores, as a part of the step.

    Where every core computes, no overlap can hide it.

    Args:
        steps: seconds, by round.
        cpu, mute_cpu: seconds of all ranks for a step, with and without communication, by round.
        cores: of the machine.
    """
    common = [number for number in steps if number in cpu and number in mute_cpu]
    return [(cpu[number] - mute_cpu[number]) / cores / steps[number] for number in common]


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
class _Rounds:
    """Readings of one rate, by contestant and round."""

    of: Mapping[str, list[WiredReading]]

    @classmethod
    def at(cls, gigabits: float | None, readings: Sequence[WiredReading]) -> _Rounds:
        found: dict[str, list[WiredReading]] = {}
        for each in readings:
            if each.gigabits == gigabits:
                found.setdefault(each.reading.contestant, []).append(each)
        return cls(found)

    def timed(self, name: str) -> list[TrainReading]:
        """Those that were run."""
        return [each.reading for each in self.of.get(name, []) if each.reading.seconds]

    def seconds(self, name: str) -> ByRound:
        """Of a step: the median of each round."""
        return by_round((each.round, statistics.median(each.seconds)) for each in self.timed(name))

    def cpu(self, name: str) -> ByRound:
        """Seconds of all ranks for a step."""
        return by_round((each.round, each.cpu_seconds) for each in self.timed(name))

    def spread_of(self, figure: str) -> dict[str, Spread | None]:
        return {name: spread([getattr(each, figure) for each in self.timed(name)]) for name in self.of}


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
    rounds, mute = _Rounds.at(gigabits, readings), _Rounds.at(None, readings)
    names = list(rounds.of)
    seconds = {name: rounds.seconds(name) for name in names}
    first = readings[0].reading
    wire = wire_times(first.numel, first.ranks, context.probe.gigabits)
    backward = statistics.median(context.both) - statistics.median(context.forward)
    trained = {name: [each.reading for each in found] for name, found in rounds.of.items()}
    return {
        "gigabits": gigabits,
        "numel": first.numel,
        "best": context.best,
        "reached": context.probe,
        "backward_seconds": backward,
        "reduce_scatter_seconds": wire.reduce_scatter,
        "all_gather_seconds": wire.all_gather,
        "backward_is_longer": backward > wire.total,
        "peer / ours with overlap": {
            name: over(seconds[name], seconds.get(context.best, {})) for name in names if name != context.best
        },
        "exposed part of the step": {name: spread(exposed_parts(seconds[name], mute.seconds(name))) for name in names},
        "processor part of the step": {
            name: spread(processor_parts(seconds[name], rounds.cpu(name), mute.cpu(name), context.cores))
            for name in names
        },
        "seconds": {name: spread([*seconds[name].values()]) for name in names},
        "seconds_without_communication": {name: spread([*mute.seconds(name).values()]) for name in names},
        "cpu_seconds": rounds.spread_of("cpu_seconds"),
        "cpu_seconds_without_communication": mute.spread_of("cpu_seconds"),
        "busy_cores": {name: spread([each.busy_cores for each in found]) for name, found in rounds.of.items()},
        "sent_nbytes": rounds.spread_of("sent_nbytes"),
        "loss_deviation": {name: losses_apart(found, trained.get(_REFERENCE, [])) for name, found in trained.items()},
        "why_not": {name: r.why_not for name, found in trained.items() for r in reversed(found) if r.why_not},
    }
