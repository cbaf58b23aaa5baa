"""What step.py found: ratios, shares of the bandwidth, a table a size, and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from peers.machine import MemoryRates
from peers.ratios import ByRound, Spread, by_round, failures_of, over, spread
from peers.script import table
from peers.step_reading import TOLERANCE, StepReading

#: What a step has to read and write: grad 4, main param 8, two moments 16, model param 2.
FLOOR_NBYTES = 30
_OURS = "ours"
_OF_COPY, _OF_IN_PLACE = "share of the copy bandwidth", "share of the in-place bandwidth"
_Value = TypeVar("_Value")
_HEADER = ("", "peer / ours", "ms", "GB/s", "of copy", "of in place", "apart", "")


def summary(numel: int, readings: Sequence[StepReading], rates: Sequence[MemoryRates]) -> dict[str, Any]:
    """Of one size; ratios first.

    Args:
        numel: the size.
        readings: of any size.
        rates: of memory, by round.
    """
    rounds: dict[str, list[StepReading]] = {}
    for reading in (reading for reading in readings if reading.numel == numel):
        rounds.setdefault(reading.contestant, []).append(reading)
    medians = {name: _medians(found) for name, found in rounds.items()}
    copies, products = [rate.copy for rate in rates], [rate.in_place for rate in rates]
    return {
        "numel": numel,
        "peer / ours": {name: over(found, medians.get(_OURS, {})) for name, found in medians.items() if name != _OURS},
        _OF_COPY: {name: _share(numel, found, copies) for name, found in medians.items()},
        _OF_IN_PLACE: {name: _share(numel, found, products) for name, found in medians.items()},
        "copy_bytes_per_second": spread(copies),
        "in_place_bytes_per_second": spread(products),
        "seconds": {name: spread([s for r in found for s in r.seconds]) for name, found in rounds.items()},
        "deviation": {name: _first(r.deviation for r in found) for name, found in rounds.items()},
        "why_not": {name: why for name, found in rounds.items() if (why := _first(r.why_not or None for r in found))},
        "failed_rounds": {name: sum(bool(r.why_not) for r in found) for name, found in rounds.items()},
    }


def _medians(readings: Sequence[StepReading]) -> ByRound:
    return by_round((each.round, statistics.median(each.seconds)) for each in readings if each.seconds)


def _share(numel: int, seconds: ByRound, rates: Sequence[float]) -> Spread | None:
    """What the floor of a step moves a second, as a part of what memory moves in the same round."""
    return spread([FLOOR_NBYTES * numel / taken / rates[number] for number, taken in seconds.items()])


def _first(values: Iterable[_Value | None]) -> _Value | None:
    return next((value for value in values if value is not None), None)


def lines(sizes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a size; the last line has the ratios."""
    for size in sizes:
        yield ""
        copy, in_place = (size[name].times(1e-9) for name in ("copy_bytes_per_second", "in_place_bytes_per_second"))
        yield f"{size['numel'] / 1e6:.1f} M elements; a copy moves {copy} GB/s, a product in place {in_place}"
        yield from table(_HEADER, [_row(name, size) for name in size["seconds"]])
    yield ""
    yield last_line(sizes)


def _row(name: str, size: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = size["seconds"][name]
    if seconds is None:
        return (name, *"-" * (len(_HEADER) - 2), size["why_not"].get(name, ""))
    off = size["deviation"][name]
    return (
        name,
        "" if name == _OURS else str(size["peer / ours"][name] or "-"),
        str(seconds.times(1e3)),
        f"{FLOOR_NBYTES * size['numel'] / seconds.median / 1e9:.1f}",
        _percent(size[_OF_COPY][name]),
        _percent(size[_OF_IN_PLACE][name]),
        "-" if off is None else f"{off:.1e}",
        "; ".join(_notes(name, size)),
    )


def _percent(share: Spread | None) -> str:
    return "-" if share is None else f"{share.median:.0%}"


def _notes(name: str, size: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the figures has to know beside them."""
    off = size["deviation"][name]
    if off is None:
        yield "NOT COMPARED: it or ours failed in the first round"
    elif not off <= TOLERANCE:
        yield f"NOT THE SAME WORK: params differ by more than {TOLERANCE:.1%} of their change"
    yield from failures_of(name, size)


def last_line(sizes: Sequence[Mapping[str, Any]]) -> str:
    """The ratios that matter."""
    return "; ".join(_last_words(size) for size in sizes) or "nothing was run"


def _last_words(size: Mapping[str, Any]) -> str:
    ratios = {name: ratio.median for name, ratio in size["peer / ours"].items() if ratio}
    apart = ("fork of 2023", "the flat tensor")
    others = {name: ratio for name, ratio in ratios.items() if not name.startswith(apart)}
    parts = [f"{name}/ours {ratio:.2f}" for name, ratio in ratios.items() if name.startswith(apart)]
    if others:
        best = min(others, key=lambda name: others[name])
        parts.append(f"best peer ({best})/ours {others[best]:.2f}")
    return f"{size['numel'] / 1e6:.2g} M: " + ", ".join([*parts, _own_words(size)])


def _own_words(size: Mapping[str, Any]) -> str:
    of_copy, of_in_place = size[_OF_COPY].get(_OURS), size[_OF_IN_PLACE].get(_OURS)
    if of_copy is None:
        return "ours did not run"
    return f"ours at {_percent(of_copy)} of a copy's bandwidth, {_percent(of_in_place)} of a product's in place"
