"""What overlap.py finds: exposed communication, which is what a step takes longer than without any;
and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers.report import OURS, Rounds, Spread, is_ours, median_seconds, reports, spread
from peers.train_contestants import BOTH_OVERLAPS, FORWARD, FORWARD_BACKWARD
from peers.train_readings import TOLERANCE, TrainReading, cpu_seconds, losses_apart

#: Of the step, at most, where backward is longer than the communication.
GOAL = 0.10
#: Bytes an element that are reduced and gathered.
_GRAD_NBYTES, _PARAM_NBYTES = 4, 2
#: Of the nominal rate, for plain TCP, whose headers are a twentieth.
_LEAST_REACHED = 0.9
_HEADER = (
    "",
    "peer / ours",
    "exposed",
    "by cpu",
    "ms a step",
    "alone",
    "cpu ms",
    "alone",
    "B/element",
    "losses",
    "",
)


@dataclass(frozen=True)
class WiredReading:
    """What one contestant took in one round at one rate."""

    gigabits: float | None  # a second, nominal; 0 for no limit, None where nothing was communicated
    busy_cores: float  # of the machine, kernel included, while the contestant was built and trained
    reading: TrainReading  # of both ranks


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


def summary(
    gigabits: float, readings: Sequence[WiredReading], reached: float, cores: int
) -> dict[str, Any]:
    """Of one nominal rate at which plain TCP reached so many Gbit/s, on a machine of so many cores;
    ratios first."""
    rounds = Rounds([each.reading for each in readings if each.gigabits == gigabits])
    mute = Rounds([each.reading for each in readings if each.gigabits is None])
    first = readings[0].reading
    # Seconds of a byte an element: a rank sends (n-1)/n of the model.
    sent = first.numel * (first.ranks - 1) / first.ranks * 8 / (reached * 1e9)
    both, forward = (
        statistics.median(mute.values(entry.name, median_seconds).values())
        for entry in (FORWARD_BACKWARD, FORWARD)
    )
    busy: dict[str, list[float]] = {name: [] for name in rounds.of}
    for each in readings:
        if each.gigabits == gigabits:
            busy[each.reading.contestant].append(each.busy_cores)
    return {
        "gigabits": gigabits,
        "numel": first.numel,
        "reached": reached,
        "backward_seconds": both - forward,
        "reduce_scatter_seconds": _GRAD_NBYTES * sent,
        "all_gather_seconds": _PARAM_NBYTES * sent,
        "backward_is_longer": both - forward > (_GRAD_NBYTES + _PARAM_NBYTES) * sent,
        "peer / ours with overlap": rounds.over(median_seconds, BOTH_OVERLAPS),
        "exposed part of the step": rounds.spreads(partial(exposed_part, mute)),
        "processor part of the step": rounds.spreads(partial(processor_part, mute, cores)),
        "seconds": rounds.spreads(median_seconds),
        "seconds_without_communication": {
            name: mute.spreads(median_seconds).get(name) for name in rounds.of
        },
        "cpu_seconds": rounds.spreads(cpu_seconds),
        "cpu_seconds_without_communication": mute.spreads(cpu_seconds),
        "busy_cores": {name: spread(values) for name, values in busy.items()},
        "sent_nbytes": rounds.spreads(lambda each: each.sent_nbytes if each.seconds else None),
        "loss_deviation": {
            name: losses_apart(found, rounds.of.get(OURS, [])) for name, found in rounds.of.items()
        },
        "why_not": rounds.failures()["why_not"],
    }


def exposed_part(mute: Rounds[TrainReading], reading: TrainReading) -> float | None:
    """What a step takes longer than without communication in the same round, as a part of the step.

    Noise may make it negative.
    """
    step, alone = (
        median_seconds(reading),
        mute.values(reading.contestant, median_seconds).get(reading.round),
    )
    return None if step is None or alone is None else (step - alone) / step


def processor_part(mute: Rounds[TrainReading], cores: int, reading: TrainReading) -> float | None:
    """What communication costs in processor time, spread over all cores, as a part of the step.

    Where every core computes, no overlap can hide it.
    """
    step, alone = (
        median_seconds(reading),
        mute.values(reading.contestant, cpu_seconds).get(reading.round),
    )
    return None if step is None or alone is None else (reading.cpu_seconds - alone) / cores / step


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a rate; the last line has the ratios of all."""
    return reports(
        found,
        _heading,
        _HEADER,
        lambda rate: [_row(name, rate) for name in rate["seconds"]],
        _last_words,
    )


def _heading(rate: Mapping[str, Any]) -> str:
    backward, reduced, gathered = (
        rate[name] * 1e3
        for name in ("backward_seconds", "reduce_scatter_seconds", "all_gather_seconds")
    )
    too_little = rate["reached"] < _LEAST_REACHED * rate["gigabits"]
    verdict = "longer" if rate["backward_is_longer"] else "NOT longer"
    return (
        f"{name_of(rate['gigabits'])}: {rate['reached']:.2f} "
        f"reached{' (NOT the nominal rate)' if too_little else ''}; {rate['numel'] / 1e6:.1f} M "
        f"elements; backward {backward:.0f} ms is {verdict} than the communication, at least "
        f"{reduced:.0f} ms to reduce and {gathered:.0f} ms to gather"
    )


def name_of(gigabits: float) -> str:
    """Of a rate, for a person."""
    return f"{gigabits:g} Gbit/s" if gigabits else "no limit"


def _row(name: str, rate: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = rate["seconds"][name]
    if seconds is None:
        return (name, *"-" * 9, rate["why_not"].get(name, ""))
    exposed, by_cpu = (
        rate["exposed part of the step"][name],
        rate["processor part of the step"][name],
    )
    off = rate["loss_deviation"].get(name)
    note = (
        ""
        if off is None or off <= TOLERANCE
        else f"NOT THE SAME WORK: losses differ by more than {TOLERANCE:.1%}"
    )
    return (
        name,
        str(rate["peer / ours with overlap"].get(name) or ""),
        "-"
        if exposed is None
        else f"{exposed.median:.0%} [{exposed.least:.0%} to {exposed.most:.0%}]",
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
    ratios, exposed = (
        rate["peer / ours with overlap"],
        rate["exposed part of the step"].get(BOTH_OVERLAPS),
    )
    parts = [f"no overlap/ours {ratios[OURS].median:.2f}"] if ratios.get(OURS) else []
    if exposed:
        judged = f"{'below' if exposed.median < GOAL else 'NOT below'} {GOAL:.0%}"
        judged = (
            judged if rate["backward_is_longer"] else "backward is shorter than the communication"
        )
        parts.append(f"exposed {exposed.median:.0%} ({judged})")
    parts += [
        f"{name}/ours {ratio.median:.2f}"
        for name, ratio in ratios.items()
        if ratio and not is_ours(name)
    ]
    return f"{name_of(rate['gigabits'])}: " + ", ".join(parts)
