"""The times of one step of a rank: its collectives, its update, and what backward and the next forward hide.

A rank computes, sends, and where state is on the host copies gradients down, updates there, and copies params up; each
of these is a lane, which does one thing at a time. The reduce-scatter of a bucket starts when its last gradient of the
last microbatch is there and the one before it has ended; the all-gather of a bucket must end before forward needs it.
Time of computing is shared among params in proportion to their multiplications. The update follows the statistics: the
device's in one piece, the host's bucket by bucket, see [Note: state on the host] in optimizer/offload.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from megatron_distopt.cli.plan_choice import PlannedBuffer, StagePlan
from megatron_distopt.cli.plan_model import StageParam
from megatron_distopt.layout.estimate import Collective, Kind


@dataclass(frozen=True)
class Machine:
    """A node and its devices. The bandwidths are those of no machine in particular; flags of `plan` replace them.

    Args:
        memory_nbytes: of a device; None where it is not to be compared with anything.
        reserve_nbytes: of these, what is kept for activations and everything else that is not planned.
        host_nbytes: memory of the host of a node, for all of its ranks; None where it is not limited.
        ranks_per_node: that share the host of a node.
        device_bytes_per_second: that a kernel reads and writes in the memory of its device, added up.
        link_bytes_per_second: between a device and its host, in each direction at a time.
        host_bytes_per_second: that the ranks of a node together read and write in the memory of their host.
        flops_per_second: floating-point operations of bf16 products of matrices on a device.
    """

    memory_nbytes: int | None = None
    reserve_nbytes: int = 0
    host_nbytes: int | None = None
    ranks_per_node: int = 8
    device_bytes_per_second: float = 2000e9
    link_bytes_per_second: float = 25e9
    host_bytes_per_second: float = 200e9
    flops_per_second: float = 300e12


@dataclass(frozen=True)
class Assumed:
    """Times and bandwidth, which the layout does not know.

    Args:
        bytes_per_second: bandwidth of a rank in each direction.
        hop_seconds: time of a message in addition to its bytes.
        backward_seconds: time of backward for one microbatch on one rank; None where it is not given.
        update_seconds: time of statistics and update on the device, but for what Muon does with whole matrices; None
            to compute it from bytes and bandwidth.
        machine: bandwidths and memory of a node.
    """

    bytes_per_second: float
    hop_seconds: float = 0.0
    backward_seconds: float | None = None
    update_seconds: float | None = None
    machine: Machine = field(default_factory=Machine)

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
    DOWN = "copy down"
    HOST = "host"
    UP = "copy up"


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
class UpdateTimes:
    """Times of the update of one step; what is done in different lanes is done at the same time.

    Args:
        intervals: from the end of the statistics.
        seconds: until the last new param is on the device.
    """

    intervals: tuple[Interval, ...]
    seconds: float

    def busy_seconds(self, lane: TimelineLane, label: str = "") -> float:
        """How long one of the lanes is busy, with everything or with what has a label that begins so."""
        busy = (each for each in self.intervals if each.lane is lane and each.label.startswith(label))
        return sum(each.stop - each.start for each in busy)


@dataclass(frozen=True)
class Times:
    """Times of one step.

    Args:
        scatter_seconds, gather_seconds, stats_seconds: of the collectives by kind, without overlap.
        update: of the update.
        timeline: the step with overlap; None where the length of backward is unknown.
    """

    scatter_seconds: float
    gather_seconds: float
    stats_seconds: float
    update: UpdateTimes
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
    """Times one step of a rank, with overlap where the length of backward is known."""
    seconds = dict.fromkeys(Kind, 0.0)
    for _, each in plan.collectives:
        seconds[each.kind] += assumed.seconds_of(each)
    stats, update = seconds[Kind.ALL_REDUCE], update_times_of(plan, assumed)
    timeline = None if assumed.backward_seconds is None else _timeline(plan, assumed, stats, update)
    return Times(seconds[Kind.REDUCE_SCATTER], seconds[Kind.ALL_GATHER], stats, update, timeline)


def update_times_of(plan: StagePlan, assumed: Assumed) -> UpdateTimes:
    """Times the update of a rank: the device's part, and beside it the host's with its copies.

    The host's memory is shared by the ranks of a node, which update at the same time, and carries the copies as well.
    """
    machine, clock = assumed.machine, _Clock()
    moved = sum(share.update_nbytes for share in plan.updated_at(is_on_host=False))
    given = assumed.update_seconds
    device = moved / machine.device_bytes_per_second if given is None else given
    end = clock.fill(TimelineLane.COMPUTE, "update", 0.0, device)
    for part in plan.with_matrices:
        end = _fill_matrices(clock, part, assumed, end)
    host_rate = machine.host_bytes_per_second / min(machine.ranks_per_node, plan.choice.cut.num_ranks)
    down = host = up = 0.0
    for share in plan.updated_at(is_on_host=True):
        on_host = (share.update_nbytes + share.down_nbytes + share.up_nbytes) / host_rate
        copies = [nbytes / machine.link_bytes_per_second for nbytes in (share.down_nbytes, share.up_nbytes)]
        down = clock.fill(TimelineLane.DOWN, f"grads down {share.bucket}", down, copies[0])
        host = clock.fill(TimelineLane.HOST, f"update on the host {share.bucket}", max(host, down), on_host)
        up = clock.fill(TimelineLane.UP, f"params up {share.bucket}", max(up, host), copies[1])
    return UpdateTimes(tuple(clock.intervals), max(end, up))


def _fill_matrices(clock: _Clock, part: PlannedBuffer, assumed: Assumed, start: float) -> float:
    """Times what Muon does with the matrices of a buffer: those of the next round travel meanwhile.

    It ends when the rank with the costliest updates has ended, and the one that sends most.
    """
    balance, rounds = part.balance, part.owners.num_rounds
    sent = balance.most_travel_nbytes + part.work.gathered_nbytes
    travel = sent / assumed.bytes_per_second + 2 * rounds * assumed.hop_seconds
    cost = balance.most_cost / assumed.machine.flops_per_second
    ends = [
        clock.fill(TimelineLane.COMPUTE, "orthogonalize", start, cost),
        clock.fill(TimelineLane.SEND, "matrices", start, travel),
    ]
    return max(ends)


def _timeline(plan: StagePlan, assumed: Assumed, stats_seconds: float, update: UpdateTimes) -> Timeline:
    backward, forward = assumed.backward_seconds or 0.0, assumed.forward_seconds or 0.0
    clock = _Clock()
    clock.fill(TimelineLane.COMPUTE, "backward", 0.0, backward)
    free = 0.0
    for each in sorted(_transfers(plan, assumed, Kind.REDUCE_SCATTER), key=lambda each: each.ready):
        free = clock.fill(TimelineLane.SEND, each.label, max(free, each.ready * backward), each.seconds)
    scattered = max(free, backward)
    measured = clock.fill(TimelineLane.SEND, "statistics", scattered, stats_seconds)
    clock.intervals += [
        replace(each, start=each.start + measured, stop=each.stop + measured) for each in update.intervals
    ]
    gathers = sorted(_transfers(plan, assumed, Kind.ALL_GATHER), key=lambda each: each.needed)
    waited = _forward(clock, gathers, measured + update.seconds, forward)
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
