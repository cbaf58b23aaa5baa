"""The pictures of the report, from its outcomes; matplotlib is imported when something is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.plot import Bar, Panel, Row, draw_panels
from peers.step_report import FLOOR_NBYTES

from gpu_check.checks import Outcome
from gpu_check.speed import exposed_parts

__all__ = ["draw_all"]

_TIMES = "ms a step, median and spread   (×: median over ours)"
_ALONE = "forward and backward alone"


def draw_all(outcomes: Sequence[Outcome], folder: Path) -> list[str]:
    """Draws what there is something for.

    Returns:
        Names of the files in the folder, in the order of the report; none where matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - whether it is there
    except ImportError:
        return []
    drawn = []
    for name, title, panels in _pictures(outcomes):
        if panels:
            draw_panels(title, [panels], folder / name)
            drawn.append(name)
    return drawn


def _pictures(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, list[Panel]]]:
    yield "step.png", "An optimizer step without communication", _panels(outcomes, "step", _step_panel)
    yield "train.png", "Whole training steps", _panels(outcomes, "train", _train_panel)
    yield "exposed.png", "Communication that is not hidden", list(_exposed_panels(outcomes))
    yield "memory.png", "Memory of a rank", _panels(outcomes, "held", _memory_panel)


def _panels(outcomes: Sequence[Outcome], check: str, panel_of: Any) -> list[Panel]:
    return [panel_of(each) for each in outcomes if each.check == check and each.figures.get("contestants")]


def _step_panel(outcome: Outcome) -> Panel:
    figures = outcome.figures
    rows = list(_timed_rows(figures["contestants"]))
    floor = 1e3 * FLOOR_NBYTES * figures["numel"] / figures["copy"]
    lines = [(floor, f"{FLOOR_NBYTES} bytes an element at the speed of a copy")]
    return Panel(_title(outcome), _TIMES, rows, lines)


def _train_panel(outcome: Outcome) -> Panel:
    contestants = outcome.figures["contestants"]
    alone = [each for each in contestants if each["name"] == _ALONE and each["seconds"]]
    lines = [(1e3 * statistics.median(each["seconds"]), _ALONE) for each in alone]
    rows = list(_timed_rows([each for each in contestants if each["name"] != _ALONE]))
    return Panel(_title(outcome), _TIMES, rows, lines)


def _title(outcome: Outcome) -> str:
    ranks = f"{outcome.ranks} rank{'s' * (outcome.ranks != 1)}"
    return f"{ranks}, {outcome.figures['numel'] / 1e6:.1f} M elements"


def _timed_rows(contestants: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    ours = next((each["seconds"] for each in contestants if each["name"] == "ours"), ())
    for each in contestants:
        yield Row(each["name"], (_timed_bar(each["seconds"], ours),), each["why_not"])


def _timed_bar(seconds: Sequence[float], ours: Sequence[float]) -> Bar | None:
    if not seconds:
        return None
    values = [1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds))]
    ratio = f"  ({values[0] / 1e3 / statistics.median(ours):.2f} ×)" if ours else ""
    return Bar(values, f"{values[0]:.3g}{ratio}")


def _exposed_panels(outcomes: Sequence[Outcome]) -> Iterator[Panel]:
    for train in (each for each in outcomes if each.check == "train"):
        for alone in (each for each in outcomes if each.check == "alone" and each.ranks == train.ranks):
            if not (train.figures and alone.figures):
                continue
            parts = exposed_parts(train.figures, alone.figures)
            rows = [Row(name, (_percent_bar(part),)) for name, part in parts.items()]
            yield Panel(_title(train), "% of a step that it takes longer than without communication", rows)


def _percent_bar(part: float) -> Bar:
    shown = max(100 * part, 0.0)
    return Bar([shown] * 3, f"{100 * part:.0f} %")


def _memory_panel(outcome: Outcome) -> Panel:
    figures = outcome.figures
    lines = [(figures["target"], f"6 + 12/n = {figures['target']:.2f}")]
    rows = [Row(each["contestant"], _memory_bars(each), each["why_not"]) for each in figures["contestants"]]
    return Panel(_title(outcome), "bytes an element   (dark: held between steps, light: peak of a step)", rows, lines)


def _memory_bars(each: Mapping[str, Any]) -> tuple[Bar | None, ...]:
    if each["why_not"]:
        return (None, None)
    values = [each[name] / each["numel"] for name in ("held", "step_peak")]
    return tuple(Bar([value] * 3, f"{value:.2f}") for value in values)
