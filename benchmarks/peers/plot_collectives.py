"""Draws what collectives.py found: speed against size, a panel a collective and number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.plot import OURS, PEER

__all__ = ["draw_collectives"]

_COLORS = {"ours": OURS, "messages": "#d9822b", "torch": PEER}
_LINES = {"fp32": "-", "bf16": "--"}
_MARKERS = {"fp32": "o", "bf16": "s"}


def draw_collectives(result: Mapping[str, Any], path: Path) -> None:
    """GB of bucket a second: medians, and the spread of the repeats.

    Args:
        result: of collectives.py, as its file has it.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    results = result["results"]
    kinds, sizes = ([*dict.fromkeys(each[name] for each in results)] for name in ("what", "ranks"))
    figure = Figure(figsize=(1.5 + 4.2 * len(sizes), 1.2 + 2.6 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), len(sizes), squeeze=False, sharex=True, sharey="row")
    for row, what in zip(grid, kinds, strict=True):
        for axes, ranks in zip(row, sizes, strict=True):
            _draw_panel(axes, [each for each in results if (each["what"], each["ranks"]) == (what, ranks)])
            axes.set_title(f"{what}, {ranks} ranks", fontsize=10)
        row[0].set_ylabel("GB of bucket a second", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("MB of bucket", fontsize=9)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Collectives over gloo on one machine; median and spread", fontsize=11)
    figure.savefig(path, dpi=110)


def _draw_panel(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    for way, color in _COLORS.items():
        if not all(way in each["seconds"] for each in results):
            continue
        for dtype in dict.fromkeys(each["dtype"] for each in results):
            mine = sorted((each for each in results if each["dtype"] == dtype), key=lambda each: each["megabytes"])
            _draw_line(axes, mine, way, {"color": color, "linestyle": _LINES[dtype], "marker": _MARKERS[dtype]})
    sizes = sorted({each["megabytes"] for each in results})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Any, results: Sequence[Mapping[str, Any]], way: str, style: Mapping[str, Any]) -> None:
    rates = [[each["megabytes"] / 1e3 / seconds for seconds in each["seconds"][way]] for each in results]
    middle = [statistics.median(each) for each in rates]
    spans = [[at - min(each) for at, each in zip(middle, rates, strict=True)]]
    spans += [[max(each) - at for at, each in zip(middle, rates, strict=True)]]
    label = f"{way}, {results[0]['dtype']}"
    axes.errorbar([each["megabytes"] for each in results], middle, yerr=spans, capsize=2, ms=4, label=label, **style)
