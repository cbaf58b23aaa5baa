"""When a step's collectives run, and how much of them backward and the next forward can hide.

One rank, one lane of computing and one of sending. The reduce-scatter of a bucket starts when its last gradient of the
last microbatch is there and the one before it has ended; the all-gather of a bucket must end before forward needs it.
Time of computing is shared among params in proportion to their multiplications. `draw` makes a picture of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_distopt.cli.plan_choice import StageParam, StagePlan
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import Collective, Kind

__all__ = ["Assumed", "Interval", "Timeline", "TimelineLane", "Times", "draw", "times_of"]


@dataclass(frozen=True)
class Assumed:
    """Times and bandwidth, which the layout does not know.

    Args:
        bytes_per_second: bandwidth of a rank in each direction.
        hop_seconds: time of a message in addition to its bytes.
        backward_seconds: time of backward for one microbatch on one rank; None where it is not given.
        update_seconds: time of statistics and update.
    """

    bytes_per_second: float
    hop_seconds: float = 0.0
    backward_seconds: float | None = None
    update_seconds: float = 0.0

    @property
    def forward_seconds(self) -> float | None:
        """Half of backward, which multiplies with every weight twice."""
        return None if self.backward_seconds is None else self.backward_seconds / 2

    def seconds_of(self, collective: Collective) -> float:
        """Time of a collective on an idle link."""
        return collective.sent_nbytes / self.bytes_per_second + collective.num_hops * self.hop_seconds


class TimelineLane(str, Enum):
    """The resource that is busy."""

    COMPUTE = "compute"
    SEND = "send"


@dataclass(frozen=True)
class Interval:
    """One activity, in seconds from the beginning of the last microbatch's backward."""

    lane: TimelineLane
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A step with all the overlap that is possible.

    Args:
        intervals: of both lanes.
        exposed_scatter_seconds: by which the last reduce-scatter ends after backward.
        exposed_gather_seconds: by which forward has to wait for all-gathers.
    """

    intervals: tuple[Interval, ...]
    exposed_scatter_seconds: float
    exposed_gather_seconds: float


@dataclass(frozen=True)
class Times:
    """Times of the collectives of one step.

    Args:
        scatter_seconds, gather_seconds, stats_seconds: times by kind, without overlap.
        timeline: the step with overlap; None where the length of backward is unknown.
    """

    scatter_seconds: float
    gather_seconds: float
    stats_seconds: float
    timeline: Timeline | None

    @property
    def seconds(self) -> float:
        """All collectives without overlap."""
        return self.scatter_seconds + self.gather_seconds + self.stats_seconds

    @property
    def exposed_seconds(self) -> float | None:
        """Communication that is not hidden where both directions are overlapped; statistics are never hidden."""
        shown = self.timeline
        if shown is None:
            return None
        waited = shown.exposed_scatter_seconds + shown.exposed_gather_seconds + self.stats_seconds
        return min(waited, self.seconds)  # sums in another order differ in their last bits

    @property
    def hidden_seconds(self) -> float | None:
        """Communication that is hidden where both directions are overlapped."""
        return None if self.exposed_seconds is None else self.seconds - self.exposed_seconds


@dataclass(frozen=True)
class _Transfer:
    """A collective of a bucket, with the fraction of backward after which it can start and that of forward before which
    it has to end."""

    label: str
    seconds: float
    ready: float
    needed: float


@dataclass
class _Clock:
    """The intervals that were added so far."""

    intervals: list[Interval] = field(default_factory=list)

    def fill(self, lane: TimelineLane, label: str, start: float, seconds: float) -> float:
        """Adds an interval unless it takes no time, and returns its end."""
        if seconds > 0:
            self.intervals.append(Interval(lane, label, start, start + seconds))
        return start + seconds


def times_of(plan: StagePlan, assumed: Assumed) -> Times:
    """Times the collectives of one step of a rank, with overlap where the length of backward is known."""
    seconds = dict.fromkeys(Kind, 0.0)
    for _, each in plan.collectives:
        seconds[each.kind] += assumed.seconds_of(each)
    stats = seconds[Kind.ALL_REDUCE]
    timeline = None if assumed.backward_seconds is None else _timeline(plan, assumed, stats)
    return Times(seconds[Kind.REDUCE_SCATTER], seconds[Kind.ALL_GATHER], stats, timeline)


def _timeline(plan: StagePlan, assumed: Assumed, stats_seconds: float) -> Timeline:
    backward, forward = assumed.backward_seconds or 0.0, assumed.forward_seconds or 0.0
    clock = _Clock()
    clock.fill(TimelineLane.COMPUTE, "backward", 0.0, backward)
    free = 0.0
    for each in sorted(_transfers(plan, assumed, Kind.REDUCE_SCATTER), key=lambda each: each.ready):
        free = clock.fill(TimelineLane.SEND, each.label, max(free, each.ready * backward), each.seconds)
    scattered = max(free, backward)
    measured = clock.fill(TimelineLane.SEND, "statistics", scattered, stats_seconds)
    updated = clock.fill(TimelineLane.COMPUTE, "update", measured, assumed.update_seconds)
    gathers = sorted(_transfers(plan, assumed, Kind.ALL_GATHER), key=lambda each: each.needed)
    waited = _forward(clock, gathers, updated, forward)
    return Timeline(tuple(clock.intervals), scattered - backward, waited)


def _forward(clock: _Clock, gathers: Sequence[_Transfer], start: float, seconds: float) -> float:
    """Overlaps the gathers with the next forward; returns how long forward waited."""
    free = now = start
    done = 0.0
    for each in gathers:
        now = clock.fill(TimelineLane.COMPUTE, "forward", now, (each.needed - done) * seconds)
        free = clock.fill(TimelineLane.SEND, each.label, free, each.seconds)
        now, done = max(now, free), each.needed
    end = clock.fill(TimelineLane.COMPUTE, "forward", now, (1.0 - done) * seconds)
    return max(end - start - seconds, 0.0)


def _transfers(plan: StagePlan, assumed: Assumed, kind: Kind) -> list[_Transfer]:
    ready, needed = _by_bucket(plan, _ready(plan.params), max), _by_bucket(plan, _needed(plan.params), min)
    return [
        _Transfer(
            f"{kind.value} {each.bucket}",
            assumed.seconds_of(each),
            ready[id(part), each.bucket],
            needed[id(part), each.bucket],
        )
        for part, each in plan.collectives
        if each.kind is kind
    ]


def _by_bucket(
    plan: StagePlan, fractions: Mapping[str, float], pick: Callable[[float, float], float]
) -> dict[tuple[int, int | None], float]:
    """Picks the last or first fraction of the params in each bucket, by identity of the buffer and bucket index."""
    found: dict[tuple[int, int | None], float] = {}
    for part in plan.parts:
        for slot in part.layout.slots:
            fraction, key = fractions[slot.name], (id(part), slot.bucket)
            found[key] = pick(found.get(key, fraction), fraction)
    return found


def _ready(params: Sequence[StageParam]) -> dict[str, float]:
    """The fraction of backward after which each gradient is complete."""
    total = sum(param.work for param in params) or 1.0
    done = sum(param.work for param in params if param.is_early)
    ready = {}
    for param in reversed(params):
        done += 0.0 if param.is_early else param.work
        ready[param.spec.name] = 1.0 if param.is_early else min(done / total, 1.0)
    return ready


def _needed(params: Sequence[StageParam]) -> dict[str, float]:
    """The fraction of forward before which each param must be there."""
    total = sum(param.work for param in params) or 1.0
    done = 0.0
    needed = {}
    for param in params:
        needed[param.spec.name] = min(done / total, 1.0)
        done += 0.0 if param.is_early else param.work
    return needed


#: By the beginning of an interval's label. The colors differ in brightness, for prints without color.
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
_PLACE = {TimelineLane.COMPUTE: 1.0, TimelineLane.SEND: 0.0}


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
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 1.2 + 1.5 * len(titled)), layout="constrained")
    panels = figure.subplots(len(titled), 1, squeeze=False, sharex=True)
    for (title, timeline), (axes,) in zip(titled, panels, strict=True):
        _panel(axes, title, timeline)
    timelines = [timeline for _, timeline in titled]
    longest = max(interval.stop for timeline in timelines for interval in timeline.intervals)
    panels[-1][0].set_xlim(0, 1.01e3 * longest)
    panels[-1][0].set_xlabel("ms from the beginning of the last microbatch's backward")
    _legend(figure, timelines)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        rule, remedy = "be a file that can be written, of a known format", "Write --plot plan.png"
        raise ConfigError(refusal("--plot", f"{path} ({error})", rule, remedy)) from None


def _panel(axes: Any, title: str, timeline: Timeline) -> None:
    for kind, color in _COLORS.items():
        for lane, place in _PLACE.items():
            shown = [each for each in timeline.intervals if each.lane is lane and each.label.startswith(kind)]
            spans = [(each.start * 1e3, (each.stop - each.start) * 1e3) for each in shown]
            axes.broken_barh(spans, (place - _HEIGHT / 2, _HEIGHT), facecolors=color, edgecolors="white", linewidth=0.4)
    waits = [(start * 1e3, (stop - start) * 1e3) for start, stop in _gaps(timeline.intervals)]
    axes.broken_barh(waits, (_PLACE[TimelineLane.COMPUTE] - _HEIGHT / 2, _HEIGHT), facecolors=_WAITING)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(list(_PLACE.values()), [lane.value for lane in _PLACE])
    axes.set_ylim(-0.6, 1.6)
    axes.spines[["top", "right"]].set_visible(False)


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
    labels = {each.label for timeline in timelines for each in timeline.intervals if _is_visible(each, timeline)}
    kinds = [kind for kind in _COLORS if any(label.startswith(kind) for label in labels)]
    handles = [patch(facecolor=_COLORS[kind], label=kind) for kind in kinds]
    handles.append(patch(facecolor=_WAITING, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _is_visible(interval: Interval, timeline: Timeline) -> bool:
    """Whether it is as wide as the line around it."""
    return interval.stop - interval.start > max(each.stop for each in timeline.intervals) / 1000
