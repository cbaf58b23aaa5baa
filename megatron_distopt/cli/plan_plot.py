"""The picture of `megatron-distopt plan --plot`: what a rank computes and sends in a step, for every choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_distopt.cli.plan_times import Interval, Timeline, TimelineLane, Times
from megatron_distopt.errors import ConfigError, refusal

#: By the beginning of an interval's label. The colors differ in brightness, for prints without color.
_COLORS = {
    "backward": "#1f5f99",
    "update": "#6b4a8c",
    "forward": "#7fb2dd",
    "grads down": "#4f8f4f",
    "params up": "#a9cf9c",
    "reduce-scatter": "#d9822b",
    "statistics": "#3a3a3a",
    "all-gather": "#f2c46d",
    "orthogonalize": "#a06cc0",
    "matrices": "#b5651d",
}
_WAITING = "#f3cfcb"
_HEIGHT = 0.8
#: Parts of the time axis: the width of a line, and the width below which an interval has no white edge.
_LINE, _NARROW = 1000, 300
#: From the top; those after the second are drawn where state is on the host.
_LANES = (TimelineLane.COMPUTE, TimelineLane.SEND, TimelineLane.DOWN, TimelineLane.HOST, TimelineLane.UP)
_ALWAYS = 2


def check_drawable(times: Sequence[Times]) -> None:
    """Checks that there is something to draw.

    Raises:
        ConfigError: no timeline, or none that takes any time.
    """
    timelines = [each.timeline for each in times if each.timeline is not None]
    if not timelines:
        rule, remedy = "have the length of backward", "Write --backward-ms MS or --tokens-per-second N as well"
        raise ConfigError(refusal("--plot", "no time of backward", rule, remedy))
    if not any(timeline.intervals for timeline in timelines):
        rule, remedy = "have something to draw", "Write a --backward-ms above 0"
        raise ConfigError(refusal("--plot", "a step that takes no time", rule, remedy))


def draw(titled: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draws one panel for each timeline, all with the same scale of time.

    Args:
        titled: title and timeline of each panel.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        rule, remedy = "have matplotlib to draw with", "Run pip install matplotlib"
        raise ConfigError(refusal("--plot", "matplotlib is not installed", rule, remedy))
    timelines = [timeline for _, timeline in titled]
    lanes = _lanes(timelines)
    height = 1.2 + (0.5 + 0.5 * len(lanes)) * len(titled)
    figure = import_module("matplotlib.figure").Figure(figsize=(11, height), layout="constrained")
    panels = figure.subplots(len(titled), 1, squeeze=False, sharex=True)
    for (title, timeline), (axes,) in zip(titled, panels, strict=True):
        _panel(axes, title, timeline, lanes)
    longest = max(interval.stop for timeline in timelines for interval in timeline.intervals)
    panels[-1][0].set_xlim(0, 1.01e3 * longest)
    panels[-1][0].set_xlabel("ms from the beginning of the last microbatch's backward")
    _legend(figure, timelines)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        rule, remedy = "be a file that can be written, of a known format", "Write --plot plan.png"
        raise ConfigError(refusal("--plot", f"{path} ({error})", rule, remedy)) from None


def _lanes(timelines: Sequence[Timeline]) -> dict[TimelineLane, int]:
    """Returns the place of each lane that is drawn, in every panel."""
    used = {each.lane for timeline in timelines for each in timeline.intervals}
    shown = _LANES if used.intersection(_LANES[_ALWAYS:]) else _LANES[:_ALWAYS]
    return {lane: len(shown) - 1 - number for number, lane in enumerate(shown)}


def _panel(axes: Any, title: str, timeline: Timeline, lanes: Mapping[TimelineLane, int]) -> None:
    for kind, color in _COLORS.items():
        for lane, place in lanes.items():
            shown = [each for each in timeline.intervals if each.lane is lane and each.label.startswith(kind)]
            for edge, some in _by_edge(shown, timeline, color).items():
                spans = [(each.start * 1e3, (each.stop - each.start) * 1e3) for each in some]
                where = (place - _HEIGHT / 2, _HEIGHT)
                axes.broken_barh(spans, where, facecolors=color, edgecolors=edge, linewidth=0.4)
    waits = [(start * 1e3, (stop - start) * 1e3) for start, stop in _gaps(timeline.intervals)]
    axes.broken_barh(waits, (lanes[TimelineLane.COMPUTE] - _HEIGHT / 2, _HEIGHT), facecolors=_WAITING)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(list(lanes.values()), [lane.value for lane in lanes])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _by_edge(intervals: Sequence[Interval], timeline: Timeline, color: str) -> dict[str, list[Interval]]:
    """Sorts intervals by the color of their edge: of a narrow one a white edge would leave nothing."""
    longest = max(each.stop for each in timeline.intervals)
    edges: dict[str, list[Interval]] = {"white": [], color: []}
    for each in intervals:
        edges["white" if each.stop - each.start > longest / _NARROW else color].append(each)
    return edges


def _gaps(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Returns the gaps in which nothing is computed, from the first interval to the last."""
    busy = sorted((each.start, each.stop) for each in intervals if each.lane is TimelineLane.COMPUTE)
    ends = max((stop for _, stop in busy), default=0.0)
    gaps, free = [], 0.0
    for start, stop in [*busy, (ends, ends)]:
        gaps += [(free, start)] * (start > free + 1e-12)
        free = max(free, stop)
    return gaps


def _legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    patch = import_module("matplotlib.patches").Patch
    kinds = [kind for kind in _COLORS if any(_is_visible(kind, timeline) for timeline in timelines)]
    handles = [patch(facecolor=_COLORS[kind], label=kind) for kind in kinds]
    handles.append(patch(facecolor=_WAITING, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _is_visible(kind: str, timeline: Timeline) -> bool:
    """Whether all intervals of a kind together are as wide as the line around one."""
    total = sum(each.stop - each.start for each in timeline.intervals if each.label.startswith(kind))
    return total > max((each.stop for each in timeline.intervals), default=0.0) / _LINE
