"""Draws what scale.py found: processor time against ranks, elements and tensors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_scale"]

_Reading = Mapping[str, Any]
#: Of a sweep: what is on the axis, and its label with what stays the same.
_AXES: dict[str, tuple[Callable[[_Reading], float], str]] = {
    "ranks": (lambda reading: reading["setting"]["ranks"], "ranks; {numel:.1e} elements"),
    "params": (lambda reading: reading["numel"], "elements; {setting[ranks]:,} ranks"),
    "tensors": (lambda reading: reading["tensors"], "param tensors; {setting[ranks]:,} ranks"),
}
_MARKERS = {"plan": "o", "build": "s"}


def draw_scale(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of planning and of building, in a panel for each sweep.

    Args:
        result: of scale.py, as its file has it.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for axes, (sweep, (place, label)) in zip(panels, _AXES.items(), strict=True):
        settings = _settings(result["readings"], sweep)
        _draw_sweep(axes, settings, place)
        axes.set(xscale="log", yscale="log", xlabel=label.format(**settings[0][0]))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms of processor, median and spread")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def _settings(readings: Sequence[_Reading], sweep: str) -> list[list[_Reading]]:
    """Repeats of each setting, in order."""
    found: dict[tuple[Any, ...], list[_Reading]] = {}
    for reading in readings:
        if reading["setting"]["sweep"] == sweep:
            found.setdefault(tuple(reading["setting"].values()), []).append(reading)
    return list(found.values())


def _draw_sweep(axes: Any, settings: Sequence[Sequence[_Reading]], place: Callable[[_Reading], float]) -> None:
    where = [place(repeats[0]) for repeats in settings]
    for what, marker in _MARKERS.items():
        found = [[1e3 * _seconds(reading, what) for reading in repeats] for repeats in settings]
        middle = [statistics.median(values) for values in found]
        spans = [(at - min(values), max(values) - at) for at, values in zip(middle, found, strict=True)]
        axes.errorbar(where, middle, yerr=list(zip(*spans, strict=True)), marker=marker, capsize=2, label=what)


def _seconds(reading: _Reading, what: str) -> float:
    parts = ("plan",) if what == "plan" else ("layout", "optimizer")
    return sum(float(reading[f"{part}_seconds"]) for part in parts)
