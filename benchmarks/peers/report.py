"""Medians, spreads and ratios of readings, as a result to keep and as lines to read."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from peers.measuring import Reading

_OURS, _ASYNC = "ours", "ours async"
_FIGURES = tuple(
    field.name
    for field in dataclasses.fields(Reading)
    if field.name.endswith("_seconds") or field.name.endswith("_nbytes")
)


def result_of(readings: Sequence[Reading]) -> dict[str, Any]:
    """Everything that was read, and what is to be learnt from it: ratios first."""
    settings = list(dict.fromkeys((reading.ranks, reading.numel) for reading in readings))
    return {
        "ratios": [_ratios(readings, *setting) for setting in settings],
        "medians": [entry for setting in settings for entry in _medians(readings, *setting)],
        "readings": [dataclasses.asdict(reading) for reading in readings],
    }


def _of(readings: Sequence[Reading], ranks: int, numel: int) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        if (reading.ranks, reading.numel) == (ranks, numel):
            found.setdefault(reading.contestant, []).append(reading)
    return found


def _ratios(readings: Sequence[Reading], ranks: int, numel: int) -> dict[str, Any]:
    """Each round of a peer over the same round of ours: median, smallest, largest."""
    found = _of(readings, ranks, numel)
    ours, background = found.get(_OURS, []), found.get(_ASYNC, [])
    peers = {name: rounds for name, rounds in found.items() if name not in (_OURS, _ASYNC)}
    return {
        "ranks": ranks,
        "numel": numel,
        "save until on the disk, peer / ours": _over(peers, ours, "disk_seconds", "disk_seconds"),
        "save until it returns, peer / ours": _over(peers, ours, "save_seconds", "save_seconds"),
        "load, peer / ours": _over(peers, ours, "load_seconds", "load_seconds"),
        "processor time of a save, peer / ours": _over(peers, ours, "save_cpu_seconds", "save_cpu_seconds"),
        "async stall / sync": _over({_ASYNC: background}, ours, "save_seconds", "save_seconds").get(_ASYNC),
        "async until on the disk / sync": _over({_ASYNC: background}, ours, "disk_seconds", "disk_seconds").get(_ASYNC),
    }


def _over(
    peers: dict[str, list[Reading]], ours: Sequence[Reading], figure: str, of_ours: str
) -> dict[str, list[float] | None]:
    ratios: dict[str, list[float] | None] = {}
    for name, rounds in peers.items():
        pairs = [(getattr(peer, figure), getattr(own, of_ours)) for peer, own in zip(rounds, ours, strict=False)]
        values = [peer / own for peer, own in pairs if peer is not None and own]
        ratios[name] = _summary(values)
    return ratios


def _summary(values: Sequence[float]) -> list[float] | None:
    if not values:
        return None
    return [round(number, 4) for number in (statistics.median(values), min(values), max(values))]


def _medians(readings: Sequence[Reading], ranks: int, numel: int) -> Iterator[dict[str, Any]]:
    for name, rounds in _of(readings, ranks, numel).items():
        figures = {
            figure: _summary([value for reading in rounds if (value := getattr(reading, figure)) is not None])
            for figure in _FIGURES
        }
        why_not = next((reading.why_not for reading in rounds if reading.why_not), "")
        yield {"ranks": ranks, "numel": numel, "contestant": name, **figures, "why_not": why_not}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """A table a setting; the last line has the ratios of the last setting."""
    last = "nothing was run"
    for ratios in result["ratios"]:
        ranks, numel = ratios["ranks"], ratios["numel"]
        yield ""
        yield f"{ranks} ranks, {numel / 1e6:.0f} M elements (median, [smallest to largest])"
        yield _row(
            "", "returns s", "on disk s", "load s", "cpu s", "save +MiB", "load +MiB", "disk MB", "on disk / ours"
        )
        for entry in result["medians"]:
            if (entry["ranks"], entry["numel"]) == (ranks, numel):
                yield _entry_line(entry, ratios)
        last = _last_line(ratios)
        yield last
    if len(result["ratios"]) != 1:
        yield ""
        yield last


def _entry_line(entry: dict[str, Any], ratios: dict[str, Any]) -> str:
    over = ratios["save until on the disk, peer / ours"].get(entry["contestant"])
    cells = [_spread(entry[figure]) for figure in ("save_seconds", "disk_seconds", "load_seconds")]
    cells += [
        _scaled(entry["save_cpu_seconds"], 1.0, 2),
        _scaled(entry["save_nbytes"], 2**20),
        _scaled(entry["load_nbytes"], 2**20),
    ]
    cells += [_scaled(entry["disk_nbytes"], 1e6), _spread(over)]
    return _row(entry["contestant"], *cells) + (f"   {entry['why_not']}" if entry["why_not"] else "")


def _row(name: str, *cells: str) -> str:
    return f"{name:32}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, (24, 24, 24, 8, 11, 11, 9, 24), strict=True)
    )


def _spread(values: list[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3g} [{values[1]:.3g} to {values[2]:.3g}]"


def _scaled(values: list[float] | None, unit: float, digits: int = 0) -> str:
    return "-" if values is None else f"{values[0] / unit:.{digits}f}"


def _last_line(ratios: dict[str, Any]) -> str:
    table = ratios["save until on the disk, peer / ours"]
    parts = [f"{name}/ours {values[0]:.2f}" for name, values in table.items() if values is not None]
    stall = ratios["async stall / sync"]
    if stall is not None:
        parts.append(f"async stall/sync {stall[0]:.3f}")
    return f"{ratios['ranks']} ranks, {ratios['numel'] / 1e6:.0f} M: save " + ", ".join(parts)
