"""Draws what step.py, train.py and memory.py found: a panel a size or number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.plot import Bar, Panel, Row, draw_panels
from peers.step_report import FLOOR_NBYTES

__all__ = ["draw_memory", "draw_step", "draw_train"]

_TIMES = "ms a step, median and spread   (×: median over ours)"


def draw_step(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of each contestant, a panel a size.

    Args:
        result: of step.py, as its file has it.
        path: of the picture.
    """
    panels = [_step_panel(size) for size in result["sizes"]]
    draw_panels("An optimizer step without communication, one thread", [panels], path)


def _step_panel(size: Mapping[str, Any]) -> Panel:
    rows = [_timed_row(name, size) for name in size["seconds"]]
    lines = [_floor(size, kind, text) for kind, text in (("copy", "a copy"), ("in_place", "a product in place"))]
    return Panel(f"{size['numel'] / 1e6:.1f} M elements", _TIMES, rows, lines)


def _floor(size: Mapping[str, Any], kind: str, text: str) -> tuple[float, str]:
    """Milliseconds that memory needs for a step at the speed of something simple."""
    milliseconds = 1e3 * FLOOR_NBYTES * size["numel"] / size[f"{kind}_bytes_per_second"]["median"]
    return milliseconds, f"{FLOOR_NBYTES} bytes an element at the speed of {text}"


def draw_train(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of each contestant, a panel a number of ranks.

    Args:
        result: of train.py, as its file has it.
        path: of the picture.
    """
    panels = [_train_panel(ranks) for ranks in result["ranks"]]
    draw_panels("Whole training steps over gloo", [panels], path)


def _train_panel(ranks: Mapping[str, Any]) -> Panel:
    alone, *names = ranks["seconds"]
    spread = ranks["seconds"][alone]
    lines = [] if spread is None else [(1e3 * spread["median"], alone)]
    rows = [_timed_row(name, ranks) for name in names]
    return Panel(f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements", _TIMES, rows, lines)


def _timed_row(name: str, setting: Mapping[str, Any]) -> Row:
    seconds, ratio = setting["seconds"][name], setting["peer / ours"].get(name)
    if seconds is None:
        return Row(name, (None,), setting["why_not"].get(name, ""))
    values = [1e3 * seconds[part] for part in ("median", "least", "most")]
    text = f"{values[0]:.0f}" if values[0] >= 100 else f"{values[0]:.3g}"
    return Row(name, (Bar(values, text + (f"  ({ratio['median']:.2f} ×)" if ratio else "")),))


def draw_memory(result: Mapping[str, Any], path: Path) -> None:
    """Bytes an element of each contestant, a panel a number of ranks.

    Args:
        result: of memory.py, as its file has it.
        path: of the picture.
    """
    panels = [_memory_panel(ranks) for ranks in result["ranks"]]
    draw_panels("Memory of a rank beyond what it had before", [panels], path)


def _memory_panel(ranks: Mapping[str, Any]) -> Panel:
    rows = [_memory_row(name, values) for name, values in ranks["bytes an element"].items()]
    rows += [Row(name, (None,), why_not) for name, why_not in ranks["why_not"].items()]
    label = "bytes an element   (dark: peak of a step, light: held between steps)"
    line = (ranks["target"], f"6 + 12/n = {ranks['target']:.3g}")
    return Panel(f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements", label, rows, [line])


def _memory_row(name: str, values: Mapping[str, float]) -> Row:
    shown = (values["peak of a step"], values["held between steps"])
    return Row(name, tuple(Bar([value] * 3, f"{value:.1f}") for value in shown))
