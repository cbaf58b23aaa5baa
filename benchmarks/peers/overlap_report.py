"""Tables and last line of overlap.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from peers.overlap_contestants import OURS, is_ours
from peers.overlap_probe import Probe
from peers.report import Spread, table

#: Of the step, at most, where backward is longer than the communication.
GOAL = 0.10
#: Of the nominal rate, for plain TCP, whose headers are a twentieth.
_LEAST_REACHED = 0.9
#: Of a loss from ours, relative, see train.py.
_TOLERANCE = 1e-3
_HEADER = ("", "peer / ours", "exposed", "by cpu", "ms a step", "alone", "cpu ms", "alone", "B/element", "losses", "")


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table a rate."""
    for rate in found:
        yield ""
        yield _heading(rate)
        yield from table(_HEADER, [_row(name, rate) for name in rate["seconds"]])


def _heading(rate: dict[str, Any]) -> str:
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


def _row(name: str, rate: dict[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = rate["seconds"][name]
    if seconds is None:
        return (name, *"-" * 9, rate["why_not"].get(name, ""))
    by_cpu: Spread | None = rate["processor part of the step"][name]
    off = rate["loss_deviation"].get(name)
    note = "" if off is None or off <= _TOLERANCE else f"NOT THE SAME WORK: losses differ by more than {_TOLERANCE:.1%}"
    return (
        name,
        str(rate["peer / ours with overlap"].get(name) or ""),
        _percent(rate["exposed part of the step"][name]),
        "-" if by_cpu is None else f"{by_cpu.median:.0%}",
        str(seconds.times(1e3)),
        _milliseconds(rate["seconds_without_communication"][name]),
        _milliseconds(rate["cpu_seconds"][name]),
        _milliseconds(rate["cpu_seconds_without_communication"].get(name)),
        f"{rate['sent_nbytes'][name].median / rate['numel']:.2f}",
        "" if off is None else f"{off:.1e}",
        note,
    )


def _percent(part: Spread | None) -> str:
    return "-" if part is None else f"{part.median:.0%} [{part.least:.0%} to {part.most:.0%}]"


def _milliseconds(seconds: Spread | None) -> str:
    return "-" if seconds is None else f"{seconds.median * 1e3:.0f}"


def last_line(found: Sequence[dict[str, Any]]) -> str:
    return "; ".join(_last_words(rate) for rate in found) or "nothing was run"


def _last_words(rate: dict[str, Any]) -> str:
    ratios, best = rate["peer / ours with overlap"], rate["best"]
    without = ratios.get(OURS)
    parts = [f"no overlap/ours {without.median:.2f}"] if without else []
    exposed = rate["exposed part of the step"].get(best)
    if exposed:
        parts.append(f"exposed {exposed.median:.0%}{_judged(exposed, is_longer=rate['backward_is_longer'])}")
    parts += [f"{name}/ours {ratio.median:.2f}" for name, ratio in ratios.items() if ratio and not is_ours(name)]
    return f"{name_of(rate['gigabits'])}: " + ", ".join(parts)


def _judged(exposed: Spread, *, is_longer: bool) -> str:
    if not is_longer:
        return " (backward is shorter than the communication)"
    return f" ({'below' if exposed.median < GOAL else 'NOT below'} {GOAL:.0%})"
