"""The plan of one choice: layouts, bytes, collectives and times of every stage.

Times are those of one rank with one lane of computing and one of sending. The reduce-scatter of a bucket starts when
its last gradient of the last microbatch is there and the one before it has ended; the all-gather of a bucket must end
before forward needs it. Time of computing is shared among params in proportion to their multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from megatron_distopt.cli.plan_model import DTYPES, Choice, GptSizes, StageParam, check_cut, stage_params
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import BufferLayout, default_bucket_size, lay_out
from megatron_distopt.layout.estimate import (
    Collective,
    Footprint,
    Kind,
    collectives_of,
    estimate_footprint,
    stats_collective,
)

__all__ = [
    "Assumed",
    "ChoicePlan",
    "Interval",
    "PlannedBuffer",
    "StagePlan",
    "Timeline",
    "TimelineLane",
    "Times",
    "layout_of",
    "plan_choice",
    "plan_stage",
    "times_of",
]


@dataclass(frozen=True)
class PlannedBuffer:
    """Params that share a buffer, and the group that shards it.

    Args:
        params: in the order of registration.
        layout: of the buffer, in the order of backward.
        rank: in the group.
    """

    params: tuple[StageParam, ...]
    layout: BufferLayout
    rank: int

    @cached_property
    def names_by_bucket(self) -> dict[int | None, list[str]]:
        """The names of the params in each bucket, by its index."""
        found: dict[int | None, list[str]] = {}
        for slot in self.layout.slots:
            found.setdefault(slot.bucket, []).append(slot.name)
        return found


@dataclass(frozen=True)
class StagePlan:
    """The plan of a rank of one pipeline stage.

    Args:
        choice: the choice that it belongs to.
        stage: from 0.
        params: all of them, in the order of registration.
        parts: the same, by buffer: those of experts have one of their own where expert-parallel ranks differ in them.
    """

    choice: Choice
    stage: int
    params: tuple[StageParam, ...]
    parts: tuple[PlannedBuffer, ...]

    @property
    def numel(self) -> int:
        """Elements of all params."""
        return sum(param.spec.numel for param in self.params)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes that the rank holds, by kind."""
        decays = {param.spec.name: param.decays for param in self.params}
        total = Footprint()
        for part in self.parts:
            total = total.plus(estimate_footprint(part.layout, part.rank, self.choice.widths, decays.__getitem__))
        return total

    @cached_property
    def collectives(self) -> tuple[tuple[PlannedBuffer | None, Collective], ...]:
        """The collectives of one step, each with the buffer whose bucket it moves."""
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[tuple[PlannedBuffer | None, Collective]]:
        for part in self.parts:
            yield from ((part, each) for each in collectives_of(part.layout, self.choice.widths))
        yield from ((None, each) for each in stats_collective(self.choice.cut.num_ranks))

    @property
    def num_buckets(self) -> int:
        """Buckets of all buffers."""
        return sum(len(part.layout.buckets) for part in self.parts)

    def sent_by(self, kind: Kind) -> list[int]:
        """Returns the bytes that the rank sends in each collective of one kind."""
        return [each.sent_nbytes for _, each in self.collectives if each.kind is kind]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the rank sends in one step."""
        return sum(each.sent_nbytes for _, each in self.collectives)


@dataclass(frozen=True)
class ChoicePlan:
    """The plan of all stages of one choice; the stages between the first and the last are alike and listed once.

    Args:
        choice: the choice.
        stages: the different ones, in order.
    """

    choice: Choice
    stages: tuple[StagePlan, ...]

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.footprint.lasting_nbytes)

    def stage_numbers(self, plan: StagePlan) -> range:
        """The stages that one of `stages` stands for."""
        last = self.choice.cut.pp - 1
        return range(1, last) if 0 < plan.stage < last else range(plan.stage, plan.stage + 1)


def plan_choice(gpt: GptSizes, choice: Choice) -> ChoicePlan:
    """Works out every stage for the first data-parallel rank, on which no padding of a bucket's end lies.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    numbers = sorted({0, min(1, choice.cut.pp - 1), choice.cut.pp - 1})
    return ChoicePlan(choice, tuple(plan_stage(gpt, choice, stage) for stage in numbers))


def plan_stage(gpt: GptSizes, choice: Choice, stage: int, rank: int = 0) -> StagePlan:
    """Works out one rank.

    Args:
        gpt: the model.
        choice: how it is trained.
        stage: of the pipeline.
        rank: in the data-parallel group; its experts' group has every `ep`-th of its ranks.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    cut = choice.cut
    check_cut(gpt, cut)
    params = stage_params(gpt, cut, stage, DTYPES[choice.dtype][0])
    dense = tuple(param for param in params if not param.is_expert)
    experts = tuple(param for param in params if param.is_expert)
    parts = [_part(dense, choice, cut.dp, rank)]
    parts += [_part(experts, choice, cut.dp // cut.ep, rank // cut.ep)] if experts else []
    return StagePlan(choice, stage, params, tuple(parts))


def _part(params: tuple[StageParam, ...], choice: Choice, num_shards: int, rank: int) -> PlannedBuffer:
    numel = choice.bucket_size
    if isinstance(numel, int) and numel < num_shards:
        rule, remedy = f"be at least one element for each of {num_shards} ranks", "Write --bucket-size 40000000"
        raise ConfigError(refusal("bucket size", f"{numel} elements", rule, remedy))
    return PlannedBuffer(params, layout_of(params, choice, num_shards), rank)


def layout_of(params: Sequence[StageParam], choice: Choice, num_shards: int) -> BufferLayout:
    """Lays out a buffer in the reverse order of registration, as `distribute` does.

    Args:
        params: in the order of registration.
        choice: says the size of a bucket.
        num_shards: size of the data-parallel group.
    """
    specs, numel = [param.spec for param in reversed(params)], choice.bucket_size
    if isinstance(numel, str):
        numel = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    return lay_out(specs, num_shards=num_shards, bucket_size=numel)


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


def _transfers(plan: StagePlan, assumed: Assumed, kind: Kind) -> Iterator[_Transfer]:
    ready, needed = _ready(plan.params), _needed(plan.params)
    for part, each in plan.collectives:
        if part is not None and each.kind is kind:
            names = part.names_by_bucket[each.bucket]
            yield _Transfer(
                f"{kind.value} {each.bucket}",
                assumed.seconds_of(each),
                max(ready[name] for name in names),
                min(needed[name] for name in names),
            )


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
