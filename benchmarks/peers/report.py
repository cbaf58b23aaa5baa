"""What the scripts share when they report: readings by contestant and round, spreads, ratios to
ours, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

OURS = "ours"


def is_ours(name: str) -> bool:
    """Whether it is this package, with whatever options."""
    return name == OURS or name.startswith(f"{OURS}, ")


#: One value a round, by the round's number; rounds in which there was none are not in it.
ByRound = Mapping[int, float]


@dataclass(frozen=True)
class Spread:
    """Of several repeats."""

    median: float
    least: float
    most: float

    def times(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.least * factor, self.most * factor)

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.least:.3g} to {self.most:.3g}]"


def spread(values: Sequence[float]) -> Spread | None:
    """None for no repeat."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def over(peer: ByRound, ours: ByRound) -> Spread | None:
    """Each repeat of a peer over the repeat of ours in the same round; a round that one of them
    lacks is left out."""
    return spread([one / ours[number] for number, one in peer.items() if ours.get(number)])


class _OneRound(Protocol):
    @property
    def contestant(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def why_not(self) -> str: ...


Reading = TypeVar("Reading", bound=_OneRound)
Value = TypeVar("Value")


class Rounds(Generic[Reading]):
    """Readings of one setting. A figure is a function of a reading; None where it has none."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.of: dict[str, list[Reading]] = {}
        for reading in readings:
            self.of.setdefault(reading.contestant, []).append(reading)

    def values(self, name: str, figure: Callable[[Reading], float | None]) -> ByRound:
        found = ((each.round, figure(each)) for each in self.of.get(name, ()))
        return {number: value for number, value in found if value is not None}

    def spreads(self, figure: Callable[[Reading], float | None]) -> dict[str, Spread | None]:
        """By contestant, over its rounds."""
        return {name: spread([*self.values(name, figure).values()]) for name in self.of}

    def pooled(self, figure: Callable[[Reading], Sequence[float]]) -> dict[str, Spread | None]:
        """By contestant, over all values of its rounds."""
        return {
            name: spread([value for each in found for value in figure(each)])
            for name, found in self.of.items()
        }

    def over(
        self, figure: Callable[[Reading], float | None], ours: str = OURS
    ) -> dict[str, Spread | None]:
        """Ratios of the same round, of all but ours."""
        own = self.values(ours, figure)
        return {name: over(self.values(name, figure), own) for name in self.of if name != ours}

    def first(self, figure: Callable[[Reading], Value | None]) -> dict[str, Value | None]:
        """By contestant the first one that there is."""
        found = {
            name: [value for each in rounds if (value := figure(each)) is not None]
            for name, rounds in self.of.items()
        }
        return {name: values[0] if values else None for name, values in found.items()}

    def failures(self) -> dict[str, dict[str, Any]]:
        """How often each failed, and why."""
        failed = {
            name: [each.why_not for each in found if each.why_not]
            for name, found in self.of.items()
        }
        return {
            "why_not": {name: reasons[0] for name, reasons in failed.items() if reasons},
            "failed_rounds": {name: len(reasons) for name, reasons in failed.items()},
        }


def failures_of(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader has to know of a contestant that failed, from `Rounds.failures`."""
    if failed := found["failed_rounds"][name]:
        yield f"failed in {failed} round{'s' * (failed > 1)}: {found['why_not'][name]}"


def doubts_of(off: float | None, tolerance: float, apart: str, not_compared: str) -> Iterator[str]:
    """What a reader has to know of a deviation from ours: that it is not known, or is too large;
    nan is too large."""
    if off is None:
        yield f"NOT COMPARED: {not_compared}"
    elif not off <= tolerance:
        yield f"NOT THE SAME WORK: {apart}"


def median_seconds(reading: Any) -> float | None:
    """Of a step."""
    return statistics.median(reading.seconds) if reading.seconds else None


def failure(act: Callable[[], object]) -> str:
    """What it raised, in a line; empty where it went well. That a peer cannot run is a result,
    too."""
    try:
        act()
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - reported with the result
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"
    return ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with columns as wide as they have to be; the first is aligned to the left, and the last
    may be long."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    for row in (header, *rows):
        first, *middle, last = row
        cells = [f"{cell:>{width}}" for cell, width in zip(middle, widths[1:-1], strict=True)]
        yield "  ".join([f"{first:{widths[0]}}", *cells, last]).rstrip()


def reports(
    found: Sequence[Mapping[str, Any]],
    heading: Callable[[Mapping[str, Any]], str],
    header: Sequence[str],
    rows: Callable[[Mapping[str, Any]], Sequence[Sequence[str]]],
    last_words: Callable[[Mapping[str, Any]], str],
) -> Iterator[str]:
    """Lines of what was found in several settings: a table each, and at the end one line with the
    ratios of all."""
    for setting in found:
        yield ""
        yield heading(setting)
        yield from table(header, rows(setting))
    yield ""
    yield "; ".join(map(last_words, found)) or "nothing was run"


def percent(share: Spread | None) -> str:
    return "-" if share is None else f"{share.median:.0%}"
