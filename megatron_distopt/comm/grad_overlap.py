"""The reduce-scatter of a bucket while backward still computes the gradients of others.

[Note: order of launches] Ranks that launched buckets in different orders would wait for each other in different
collectives. So there is one order, and a bucket whose turn has not come waits for its turn. In the first step nothing
is launched early: that step shows in which order buckets are completed, and how often a gradient arrives in a
microbatch (once, or once for every use of a recomputed module). The first rank's order is taken by all.

[Note: what is not launched] A bucket of which a gradient does not come (a branch that was not taken) is launched by
`finish`, and so are those behind it: later than they could be, but the same collectives in one order on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.collectives import Pending, begin_reduce_scatter
from megatron_distopt.comm.groups import Group
from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout import Bucket

__all__ = ["GradOverlap", "Reduced"]


@dataclass(frozen=True, eq=False)
class Reduced:
    """A grad buffer and the ranks over which it is reduced.

    Args:
        buffer: its grads are reduced.
        group: over which.
        divide_by: see `reduce_grads`.
    """

    buffer: ShardedBuffer
    group: Group
    divide_by: int = 1


@dataclass(frozen=True, eq=False)
class _Unit:
    """One bucket: what is launched at once."""

    reduced: Reduced
    bucket: Bucket
    names: frozenset[str]

    def begin(self) -> Pending:
        """Collective."""
        buffer, bucket = self.reduced.buffer, self.bucket
        whole, part = buffer.bucket_of(buffer.grad, bucket), buffer.shard_of(buffer.grad, bucket)
        if self.reduced.divide_by != 1:
            whole.div_(self.reduced.divide_by)
        return begin_reduce_scatter(whole, part, self.reduced.group)


class GradOverlap:
    """Counts gradients as they come in, and launches buckets in one order, see [Note: order of launches].

    Args:
        reduced: all grad buffers of this rank, in the order in which every rank has them.
        everyone: the ranks that launch the same buckets.
        microbatches: how many the step under way has, asked while it is.
        deferred: names of params of which something is still added up after backward: their buckets are launched by
            `finish` alone.
    """

    def __init__(
        self,
        reduced: Sequence[Reduced],
        everyone: Group,
        microbatches: Callable[[], int] = lambda: 1,
        deferred: Collection[str] = (),
    ) -> None:
        self._units = [unit for each in reduced for unit in _units_of(each)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit.names}
        self._everyone, self._microbatches, self._deferred = everyone, microbatches, frozenset(deferred)
        self._order = list(range(len(self._units)))
        #: Arrivals of each gradient in a microbatch; nothing before the first step has ended.
        self._in_microbatch: dict[str, int] = {}
        self._is_agreed = False
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
        if self._arrived[name] == self._in_microbatch.get(name, 0) * self._microbatches():
            self._missing[number].discard(name)
            self._begin_complete()

    def _begin_complete(self) -> None:
        """Whatever is complete and has its turn."""
        for number in self._order[len(self._begun) :]:
            if self._missing[number] or self._is_deferred(number):
                return
            self._begun[number] = self._units[number].begin()

    def finish(self) -> None:
        """Collective: launches the rest, waits for all, and learns for the next step."""
        for number in self._order[len(self._begun) :]:
            self._begun[number] = self._units[number].begin()
        for pending in self._begun.values():
            pending.wait()
        self._learn()
        self._begin_step()

    def _learn(self) -> None:
        """Collective after the first step, in which the order is agreed upon."""
        microbatches = self._microbatches()
        for name, count in self._arrived.items():
            if count % microbatches == 0:
                self._in_microbatch[name] = max(count // microbatches, self._in_microbatch.get(name, 0))
        if not self._is_agreed:  # on every rank, whatever has come in there
            self._order = exchange(sorted(self._order, key=self._turn), self._everyone)[0]
            self._is_agreed = True

    def _turn(self, number: int) -> tuple[bool, int, int]:
        """Buckets that cannot be launched early come last, so that none waits for them."""
        is_early = self._units[number].names <= self._in_microbatch.keys() and not self._is_deferred(number)
        return not is_early, self._last.get(number, 0), number

    def _is_deferred(self, number: int) -> bool:
        return not self._deferred.isdisjoint(self._units[number].names)


def _units_of(reduced: Reduced) -> list[_Unit]:
    layout = reduced.buffer.layout
    names: list[set[str]] = [set() for _ in layout.buckets]
    for slot in layout.slots:
        names[slot.bucket].add(slot.name)
    return [_Unit(reduced, bucket, frozenset(names[bucket.index])) for bucket in layout.buckets]


def _late(name: str) -> LayoutError:
    got, rule = "arrived after its bucket was reduced", "arrive as often in every step as in the first"
    remedy = "Call all but the last backward of a step inside no_sync(), or write overlap_grad_reduce=False"
    return LayoutError(refusal(f"gradient of {name!r}", got, rule, remedy))
