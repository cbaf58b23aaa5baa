"""Draws what state_quality.py found: loss curves, and how validation differs from that with fp32 state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw_quality", "smoothed"]

_FP32 = "fp32"
#: Iterations of a moving average.
_SMOOTH = 10


def draw_quality(result: Mapping[str, Any], path: Path) -> None:
    """
    Args:
        result: of state_quality.py, as its file has it.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    runs = result["runs"]
    names = list(dict.fromkeys(run["precision"] for run in runs))
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(1.1, 1))
    for number, name in enumerate(names):
        own = [run for run in runs if run["precision"] == name]
        color = f"C{number}"
        curves.plot(smoothed(own[0]["losses"]), color=color, linewidth=1, label=name)
        plain = {run["seed"]: run["validation"] for run in runs if run["precision"] == _FP32}
        values = [run["validation"] - plain[run["seed"]] for run in own]
        points.plot(values, [number] * len(values), "o", color=color, alpha=0.7)
    curves.set(xlabel="iteration", ylabel=f"loss of the first seed, nats a byte, mean of {_SMOOTH}")
    curves.legend(frameon=False, fontsize=7)
    points.set_yticks(range(len(names)), names, fontsize=8)
    points.invert_yaxis()
    points.axvline(0, color="#999999", linewidth=0.8)
    points.set_xlabel("validation, bits a byte more than with fp32 state; a point a seed")
    for axes in (curves, points):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def smoothed(losses: list[float]) -> list[float]:
    """A moving average."""
    return [sum(losses[max(0, at - _SMOOTH + 1) : at + 1]) / min(at + 1, _SMOOTH) for at in range(len(losses))]
