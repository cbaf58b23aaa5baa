"""When a step's collectives run, and how much of them backward and the next forward can hide.

One rank, one lane of computing and one of sending. The reduce-scatter of a bucket starts when its last gradient of the
last microbatch is there and the one before it has ended; the all-gather of a bucket must end before forward needs it.
Time of computing is shared among params in proportion to their multiplications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_distopt.layout.estimate import Collective, Kind
from megatron_distopt.plugin.commands.plan_choice import StagePlan
from megatron_distopt.plugin.commands.plan_stage import StageParam

__all__ = ["Assumed", "Interval", "Lane", "Timeline", "Times", "times_of"]


@dataclass(frozen=True)
class Assumed:
    """What the layout does not say.

    Args:
        bytes_per_second: that a rank sends while it receives as many.
        hop_seconds: that a message takes beside its bytes.
        backward_seconds: of one microbatch on one rank; None where nobody said it.
        update_seconds: of statistics and update.
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
        """What it takes on an idle link."""
        return collective.sent_nbytes / self.bytes_per_second + collective.num_hops * self.hop_seconds


class Lane(Enum):
    """What is busy."""

    COMPUTE = "compute"
    SEND = "send"


@dataclass(frozen=True)
class Interval:
    """Something that takes from `start` to `stop`, in seconds from the beginning of the last microbatch's backward."""

    lane: Lane
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
    """Of the collectives of one step.

    Args:
        scatter_seconds, gather_seconds, stats_seconds: by kind, without overlap.
        timeline: with it; None where the length of backward is unknown.
    """

    scatter_seconds: float
    gather_seconds: float
    stats_seconds: float
    timeline: Timeline | None

    @property
    def seconds(self) -> float:
        """Without overlap."""
        return self.scatter_seconds + self.gather_seconds + self.stats_seconds

    @property
    def exposed_seconds(self) -> float | None:
        """With overlap of both; the statistics are never hidden."""
        shown = self.timeline
        if shown is None:
            return None
        waited = shown.exposed_scatter_seconds + shown.exposed_gather_seconds + self.stats_seconds
        return min(waited, self.seconds)  # sums in another order differ in their last bits

    @property
    def hidden_seconds(self) -> float | None:
        """With overlap of both: what is not exposed."""
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
    """The lanes while they are being filled."""

    intervals: list[Interval] = field(default_factory=list)

    def fill(self, lane: Lane, label: str, start: float, seconds: float) -> float:
        """Notes it and returns when it ends; what takes no time is not noted."""
        if seconds > 0:
            self.intervals.append(Interval(lane, label, start, start + seconds))
        return start + seconds


def times_of(plan: StagePlan, assumed: Assumed) -> Times:
    """The collectives of one step of a rank, beside its backward where its length is known."""
    seconds = dict.fromkeys(Kind, 0.0)
    for _, each in plan.collectives:
        seconds[each.kind] += assumed.seconds_of(each)
    stats = seconds[Kind.ALL_REDUCE]
    timeline = None if assumed.backward_seconds is None else _timeline(plan, assumed, stats)
    return Times(seconds[Kind.REDUCE_SCATTER], seconds[Kind.ALL_GATHER], stats, timeline)


def _timeline(plan: StagePlan, assumed: Assumed, stats_seconds: float) -> Timeline:
    backward, forward = assumed.backward_seconds or 0.0, assumed.forward_seconds or 0.0
    clock = _Clock()
    clock.fill(Lane.COMPUTE, "backward", 0.0, backward)
    free = 0.0
    for each in sorted(_transfers(plan, assumed, Kind.REDUCE_SCATTER), key=lambda each: each.ready):
        free = clock.fill(Lane.SEND, each.label, max(free, each.ready * backward), each.seconds)
    scattered = max(free, backward)
    measured = clock.fill(Lane.SEND, "statistics", scattered, stats_seconds)
    updated = clock.fill(Lane.COMPUTE, "update", measured, assumed.update_seconds)
    gathers = sorted(_transfers(plan, assumed, Kind.ALL_GATHER), key=lambda each: each.needed)
    waited = _forward(clock, gathers, updated, forward)
    return Timeline(tuple(clock.intervals), scattered - backward, waited)


def _forward(clock: _Clock, gathers: Sequence[_Transfer], start: float, seconds: float) -> float:
    """Runs the next forward beside the gathers; returns how long it stood still."""
    free = now = start
    done = 0.0
    for each in gathers:
        now = clock.fill(Lane.COMPUTE, "forward", now, (each.needed - done) * seconds)
        free = clock.fill(Lane.SEND, each.label, free, each.seconds)
        now, done = max(now, free), each.needed
    end = clock.fill(Lane.COMPUTE, "forward", now, (1.0 - done) * seconds)
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
    """The last or first of the params in each bucket, by identity of the part and index."""
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
