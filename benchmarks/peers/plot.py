"""Draws the result of the benchmark of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["draw"]

_OURS, _PEER = "#1f6fb4", "#9aa5b1"


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel a size and number of ranks: seconds of a save until it is on the disk, and of a load."""
    settings = [(ratios["ranks"], ratios["numel"]) for ratios in result["ratios"]]
    ranks, numels = sorted({setting[0] for setting in settings}), sorted({setting[1] for setting in settings})
    figure, axes = plt.subplots(
        len(ranks), len(numels), figsize=(1.8 + 4.2 * len(numels), 0.8 + 3.2 * len(ranks)), squeeze=False, sharey=True
    )
    for row, size in enumerate(ranks):
        for column, numel in enumerate(numels):
            medians = [m for m in result["medians"] if (m["ranks"], m["numel"]) == (size, numel)]
            _panel(axes[row][column], medians, f"{numel / 1e6:.0f} M elements on {size} ranks")
    figure.suptitle(
        "Seconds to save (until on the disk) and to load the optimizer state\nmedian and spread", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Axes, medians: list[dict[str, Any]], title: str) -> None:
    for place, median in enumerate(medians):
        color = _OURS if median["contestant"].startswith("ours") else _PEER
        _bar(axes, place - 0.2, median["disk_seconds"], color, 1.0, median["why_not"])
        if median["disk_seconds"] is not None:
            _bar(axes, place + 0.2, median["load_seconds"], color, 0.45, median["why_not"])
    for place, median in enumerate(medians):
        if median["contestant"] == "ours async" and median["save_seconds"] is not None:
            axes.plot([median["save_seconds"][0]] * 2, [place - 0.38, place - 0.02], color="black", linewidth=2)
    axes.set_yticks(range(len(medians)), [median["contestant"] for median in medians])
    axes.set_ylim(len(medians) - 0.4, -0.6)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("s   (dark: save, light: load, black line: stall)", fontsize=8)
    axes.margins(x=0.18)


def _bar(axes: Axes, place: float, values: list[float] | None, color: str, alpha: float, why_not: str) -> None:
    if values is None:
        text = why_not.split(":")[0] if why_not else "not run"
        axes.text(0, place, f" {text}", va="center", fontsize=7, color="#a33")
        return
    median, least, most = values
    axes.barh(
        place, median, height=0.36, color=color, alpha=alpha, xerr=[[median - least], [most - median]], ecolor="#555"
    )
    axes.text(most, place, f" {median:.2g}", va="center", fontsize=7)
