"""The reduce-scatter of a bucket while backward still computes the gradients of others.

[Note: order of launches] Ranks that launched buckets in different orders would wait for each other in different
collectives. So there is one order, and a bucket whose turn has not come waits for its turn. In the first step nothing
is launched early: that step shows in which order buckets are completed, and how often a gradient arrives (once, or once
for every use of a recomputed module). The first rank's order is taken by all.

[Note: what is not launched] A bucket of which a gradient does not come (a branch that was not taken) is launched by
`finish`, and so are those behind it: later than they could be, but the same collectives in one order on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.collectives import Pending, begin_reduce_scatter
from megatron_distopt.comm.groups import Group
from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout import Bucket

__all__ = ["GradOverlap"]


@dataclass(frozen=True, eq=False)
class _Unit:
    """One bucket: what is launched at once."""

    buffer: ShardedBuffer
    bucket: Bucket
    names: frozenset[str]

    def begin(self, group: Group) -> Pending:
        """Collective."""
        grad = self.buffer.grad
        return begin_reduce_scatter(
            self.buffer.bucket_of(grad, self.bucket), self.buffer.shard_of(grad, self.bucket), group
        )


class GradOverlap:
    """Counts gradients as they come in, and launches buckets in one order, see [Note: order of launches].

    Args:
        buffers: all grad buffers of this rank, in the order in which every rank has them.
        group: over which they are reduced.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], group: Group) -> None:
        self._group = group
        self._units = [unit for buffer in buffers for unit in _units_of(buffer)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit.names}
        self._order = list(range(len(self._units)))
        self._is_agreed = False
        #: Arrivals of each gradient in a step; nothing before the first step has ended.
        self._wanted: Counter[str] = Counter()
        self._begin_step()

    def _begin_step(self) -> None:
        self._arrived: Counter[str] = Counter()
        self._num_arrived = 0
        #: By bucket, when the last gradient so far came in, counted in arrivals.
        self._last: dict[int, int] = {}
        self._missing = [set(unit.names) for unit in self._units]
        self._begun: dict[int, Pending] = {}

    @property
    def num_begun(self) -> int:
        """Buckets that are under way."""
        return len(self._begun)

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient came in since the last `finish`."""
        return bool(self._arrived)

    def arrived(self, name: str) -> None:
        """A gradient was added to its buffer.

        Raises:
            LayoutError: its bucket is under way already.
        """
        number = self._unit_of[name]
        if number in self._begun:
            raise _late(name)
        self._arrived[name] += 1
        self._num_arrived += 1
        self._last[number] = self._num_arrived
        if self._arrived[name] == self._wanted[name]:
            self._missing[number].discard(name)
            self._begin_complete()

    def _begin_complete(self) -> None:
        """Whatever is complete and has its turn."""
        for number in self._order[len(self._begun) :]:
            if self._missing[number]:
                return
            self._begun[number] = self._units[number].begin(self._group)

    def finish(self) -> None:
        """Collective: launches the rest, waits for all, and learns for the next step."""
        for number in self._order[len(self._begun) :]:
            self._begun[number] = self._units[number].begin(self._group)
        for pending in self._begun.values():
            pending.wait()
        self._learn()
        self._begin_step()

    def _learn(self) -> None:
        """Collective after the first step, in which the order is agreed upon."""
        self._wanted |= self._arrived
        if not self._is_agreed:  # on every rank, whatever has come in there
            self._order = exchange(sorted(self._order, key=self._turn), self._group)[0]
            self._is_agreed = True

    def _turn(self, number: int) -> tuple[bool, int, int]:
        """Buckets that cannot be launched early come last, so that none waits for them."""
        is_early = self._units[number].names <= self._wanted.keys()
        return not is_early, self._last.get(number, 0), number


def _units_of(buffer: ShardedBuffer) -> list[_Unit]:
    names: list[set[str]] = [set() for _ in buffer.layout.buckets]
    for slot in buffer.layout.slots:
        names[slot.bucket].add(slot.name)
    return [_Unit(buffer, bucket, frozenset(names[bucket.index])) for bucket in buffer.layout.buckets]


def _late(name: str) -> LayoutError:
    got, rule = "arrived after its bucket was reduced", "arrive as often in every step as in the first"
    remedy = "Call all but the last backward of a step inside no_sync(), or write overlap_grad_reduce=False"
    return LayoutError(refusal(f"gradient of {name!r}", got, rule, remedy))
