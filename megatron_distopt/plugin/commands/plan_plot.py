"""Draws the timelines of a plan: what computes, what sends, and where one waits for the other."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.plugin.commands.plan_text import name_of, time_text
from megatron_distopt.plugin.commands.plan_timeline import Interval, Lane, Timeline

if TYPE_CHECKING:
    from megatron_distopt.plugin.commands.plan import Planned, Row

__all__ = ["draw"]

#: By the beginning of an interval's label; told apart in grey, too.
_COLORS = {
    "backward": "#1f5f99",
    "update": "#6b4a8c",
    "forward": "#7fb2dd",
    "reduce-scatter": "#d9822b",
    "statistics": "#3a3a3a",
    "all-gather": "#f2c46d",
}
_WAITING = "#f3cfcb"
_HEIGHT = 0.8
_PLACE = {Lane.COMPUTE: 1.0, Lane.SEND: 0.0}


def draw(planned: Planned, path: Path) -> None:
    """One panel a choice, all with the same scale of time.

    Args:
        planned: with timelines.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        rule, remedy = "have matplotlib to draw with", "Run pip install matplotlib"
        raise ConfigError(refusal("--plot", "matplotlib is not installed", rule, remedy))
    rows = [(row, row.times.timeline) for row in planned.rows if row.times.timeline is not None]
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 1.2 + 1.5 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True)
    for (row, timeline), (axes,) in zip(rows, panels, strict=True):
        _panel(axes, row, timeline)
    longest = max(interval.stop for _, timeline in rows for interval in timeline.intervals)
    panels[-1][0].set_xlim(0, 1.01e3 * longest)
    panels[-1][0].set_xlabel("ms from the beginning of the last microbatch's backward")
    _legend(figure, planned)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        rule, remedy = "be a file that can be written, of a known format", "Write --plot plan.png"
        raise ConfigError(refusal("--plot", f"{path} ({error})", rule, remedy)) from None


def _panel(axes: Any, row: Row, timeline: Timeline) -> None:
    for kind, color in _COLORS.items():
        for lane, place in _PLACE.items():
            shown = [each for each in timeline.intervals if each.lane is lane and each.label.startswith(kind)]
            spans = [(each.start * 1e3, (each.stop - each.start) * 1e3) for each in shown]
            axes.broken_barh(spans, (place - _HEIGHT / 2, _HEIGHT), facecolors=color, edgecolors="white", linewidth=0.4)
    waits = [(start * 1e3, (stop - start) * 1e3) for start, stop in _gaps(timeline.intervals)]
    axes.broken_barh(waits, (_PLACE[Lane.COMPUTE] - _HEIGHT / 2, _HEIGHT), facecolors=_WAITING)
    exposed = row.times.exposed_seconds or 0.0
    text = f"{time_text(exposed)} of {time_text(row.times.seconds)} of communication exposed"
    axes.set_title(f"{name_of(row.plan)}: {text}", fontsize=9, loc="left")
    axes.set_yticks(list(_PLACE.values()), [lane.value for lane in _PLACE])
    axes.set_ylim(-0.6, 1.6)
    axes.spines[["top", "right"]].set_visible(False)


def _gaps(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Where nothing is computed, from the first interval to the last."""
    busy = sorted((each.start, each.stop) for each in intervals if each.lane is Lane.COMPUTE)
    ends = max((stop for _, stop in busy), default=0.0)
    gaps, free = [], 0.0
    for start, stop in [*busy, (ends, ends)]:
        gaps += [(free, start)] * (start > free + 1e-12)
        free = max(free, stop)
    return gaps


def _legend(figure: Any, planned: Planned) -> None:
    patch = import_module("matplotlib.patches").Patch
    timelines = [row.times.timeline for row in planned.rows if row.times.timeline is not None]
    labels = {each.label for timeline in timelines for each in timeline.intervals if _is_visible(each, timeline)}
    kinds = [kind for kind in _COLORS if any(label.startswith(kind) for label in labels)]
    handles = [patch(facecolor=_COLORS[kind], label=kind) for kind in kinds]
    handles.append(patch(facecolor=_WAITING, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _is_visible(interval: Interval, timeline: Timeline) -> bool:
    """Whether it is as wide as the line around it."""
    return interval.stop - interval.start > max(each.stop for each in timeline.intervals) / 1000
