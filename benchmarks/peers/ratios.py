"""Repeats: median, smallest, largest; and a peer's repeats over ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def by_round(values: Iterable[tuple[int, float]]) -> ByRound:
    """From numbers of rounds and their values."""
    return dict(values)


def in_turn(values: Sequence[float]) -> ByRound:
    """Of repeats none of which can be missing."""
    return dict(enumerate(values))


def over(peer: ByRound, ours: ByRound) -> Spread | None:
    """Each repeat of a peer over the repeat of ours in the same round; a round that one of them lacks is left out."""
    return spread([one / ours[number] for number, one in peer.items() if ours.get(number)])


def failures_of(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader has to know of a contestant that failed.

    Args:
        name: of the contestant.
        found: how often each failed, and why.
    """
    if failed := found["failed_rounds"][name]:
        yield f"failed in {failed} round{'s' * (failed > 1)}: {found['why_not'][name]}"


def failure(act: Callable[[], object]) -> str:
    """What it raised, in a line; empty where it went well. That a peer cannot run is a result, too."""
    try:
        act()
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - reported with the result
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"
    return ""
