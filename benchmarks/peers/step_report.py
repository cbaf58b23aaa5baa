"""What step.py found: ratios, shares of the bandwidth, a table a size, and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peers.machine import MemoryRates
from peers.report import OURS, Rounds, Spread, failures_of, median_seconds, percent, report, spread
from peers.step_reading import TOLERANCE, StepReading

#: What a step has to read and write: grad 4, main param 8, two moments 16, model param 2.
FLOOR_NBYTES = 30
_OF_COPY, _OF_IN_PLACE = "share of the copy bandwidth", "share of the in-place bandwidth"
_HEADER = ("", "peer / ours", "ms", "GB/s", "of copy", "of in place", "apart", "")


def summary(numel: int, readings: Sequence[StepReading], rates: Sequence[MemoryRates]) -> dict[str, Any]:
    """Of one size; ratios first.

    Args:
        numel: the size.
        readings: of any size.
        rates: of memory, by round.
    """
    rounds = Rounds([reading for reading in readings if reading.numel == numel])
    copies, products = [rate.copy for rate in rates], [rate.in_place for rate in rates]

    def share_of(moved: Sequence[float]) -> dict[str, Spread | None]:
        """What the floor of a step moves a second, as a part of what memory moves in the same round."""
        return rounds.spreads(
            lambda each: (
                FLOOR_NBYTES * numel / statistics.median(each.seconds) / moved[each.round] if each.seconds else None
            )
        )

    return {
        "numel": numel,
        "peer / ours": rounds.over(median_seconds),
        _OF_COPY: share_of(copies),
        _OF_IN_PLACE: share_of(products),
        "copy_bytes_per_second": spread(copies),
        "in_place_bytes_per_second": spread(products),
        "seconds": rounds.pooled(lambda each: each.seconds),
        "deviation": rounds.first(lambda each: each.deviation),
        **rounds.failures(),
    }


def lines(sizes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return report(sizes, _heading, _HEADER, _row, _last_words)


def _heading(size: Mapping[str, Any]) -> str:
    copy, in_place = (size[name].times(1e-9) for name in ("copy_bytes_per_second", "in_place_bytes_per_second"))
    return f"{size['numel'] / 1e6:.1f} M elements; a copy moves {copy} GB/s, a product in place {in_place}"


def _row(name: str, size: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = size["seconds"][name]
    if seconds is None:
        return (name, *"-" * (len(_HEADER) - 2), size["why_not"].get(name, ""))
    off = size["deviation"][name]
    return (
        name,
        "" if name == OURS else str(size["peer / ours"][name] or "-"),
        str(seconds.times(1e3)),
        f"{FLOOR_NBYTES * size['numel'] / seconds.median / 1e9:.1f}",
        percent(size[_OF_COPY][name]),
        percent(size[_OF_IN_PLACE][name]),
        "-" if off is None else f"{off:.1e}",
        "; ".join(_notes(name, size)),
    )


def _notes(name: str, size: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the figures has to know beside them."""
    off = size["deviation"][name]
    if off is None:
        yield "NOT COMPARED: it or ours failed in the first round"
    elif not off <= TOLERANCE:
        yield f"NOT THE SAME WORK: params differ by more than {TOLERANCE:.1%} of their change"
    yield from failures_of(name, size)


def _last_words(size: Mapping[str, Any]) -> str:
    ratios = {name: ratio.median for name, ratio in size["peer / ours"].items() if ratio}
    apart = ("fork of 2023", "the flat tensor")
    others = {name: ratio for name, ratio in ratios.items() if not name.startswith(apart)}
    parts = [f"{name}/ours {ratio:.2f}" for name, ratio in ratios.items() if name.startswith(apart)]
    if others:
        best = min(others, key=lambda name: others[name])
        parts.append(f"best peer ({best})/ours {others[best]:.2f}")
    of_copy, of_in_place = size[_OF_COPY].get(OURS), size[_OF_IN_PLACE].get(OURS)
    own = f"ours at {percent(of_copy)} of a copy's bandwidth, {percent(of_in_place)} of a product's in place"
    return f"{size['numel'] / 1e6:.2g} M: " + ", ".join([*parts, own if of_copy else "ours did not run"])
