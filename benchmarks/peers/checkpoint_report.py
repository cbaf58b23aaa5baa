"""What checkpoint.py found: ratios, a table a setting, and the last line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from peers.measuring import CheckpointReading
from peers.report import OURS, Rounds, Spread, report

_ASYNC = "ours async"
_FIGURES = tuple(
    field.name
    for field in dataclasses.fields(CheckpointReading)
    if field.name.endswith("_seconds") or field.name.endswith("_nbytes")
)
_ON_DISK, _STALL = "save until on the disk, peer / ours", "async stall / sync"


def summary(readings: Sequence[CheckpointReading]) -> list[dict[str, Any]]:
    """By ranks and size; ratios first."""
    found = []
    for ranks, numel in dict.fromkeys((reading.ranks, reading.numel) for reading in readings):
        here = [reading for reading in readings if (reading.ranks, reading.numel) == (ranks, numel)]
        rounds, figure = Rounds(here), partial(partial, _figure)
        peers = Rounds([reading for reading in here if reading.contestant != _ASYNC])
        found.append(
            {
                "ranks": ranks,
                "numel": numel,
                _ON_DISK: peers.over(figure("disk_seconds")),
                "save until it returns, peer / ours": peers.over(figure("save_seconds")),
                "load, peer / ours": peers.over(figure("load_seconds")),
                "processor time of a save, peer / ours": peers.over(figure("save_cpu_seconds")),
                _STALL: rounds.over(figure("save_seconds")).get(_ASYNC),
                "async until on the disk / sync": rounds.over(figure("disk_seconds")).get(_ASYNC),
                "figures": {name: rounds.spreads(figure(name)) for name in _FIGURES},
                "seconds": rounds.spreads(figure("save_seconds")),
                "why_not": rounds.failures()["why_not"],
            }
        )
    return found


def _figure(name: str, reading: CheckpointReading) -> float | None:
    value: float | None = getattr(reading, name)
    return value


_TIMES, _SIZES = ("returns s", "on disk s", "load s", "cpu s"), ("save +MiB", "load +MiB", "disk MB")
_HEADER = ("", *_TIMES, *_SIZES, "on disk / ours", "")


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return report(found, _heading, _HEADER, _row, _last_words)


def _heading(setting: Mapping[str, Any]) -> str:
    return f"{setting['ranks']} ranks, {setting['numel'] / 1e6:.0f} M elements (median, [smallest to largest])"


def _row(name: str, setting: Mapping[str, Any]) -> list[str]:
    figures = {figure: spreads[name] for figure, spreads in setting["figures"].items()}
    spreads = [figures[figure] for figure in ("save_seconds", "disk_seconds", "load_seconds")]
    return [
        name,
        *(str(each or "-") for each in spreads),
        _median(figures["save_cpu_seconds"], 1.0, 2),
        *(_median(figures[figure], 2**20) for figure in ("save_nbytes", "load_nbytes")),
        _median(figures["disk_nbytes"], 1e6),
        str(setting[_ON_DISK].get(name) or "-"),
        setting["why_not"].get(name, ""),
    ]


def _median(values: Spread | None, unit: float, digits: int = 0) -> str:
    return "-" if values is None else f"{values.median / unit:.{digits}f}"


def _last_words(setting: Mapping[str, Any]) -> str:
    parts = [f"{name}/{OURS} {ratio.median:.2f}" for name, ratio in setting[_ON_DISK].items() if ratio]
    stall = [f"async stall/sync {setting[_STALL].median:.3f}"] if setting[_STALL] else []
    return f"{setting['ranks']} ranks, {setting['numel'] / 1e6:.0f} M: save " + ", ".join([*parts, *stall])
