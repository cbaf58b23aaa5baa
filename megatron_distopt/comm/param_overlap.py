"""The all-gather of a bucket while the next forward pass already computes with others.

One order of launches on every rank, as for grads ([Note: order of launches] in grad_overlap.py): that in which the
modules ask for them, learnt in the first step. Whoever reads a param waits for its bucket first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.clock import CommTime, waited
from megatron_distopt.comm.collectives import Pending, begin_all_gather
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.ranges import profiled

__all__ = ["ParamOverlap"]


@dataclass(frozen=True, eq=False)
class _Unit:
    """What is gathered at once: a bucket, or the packed params of a minority dtype."""

    buffer: ShardedBuffer
    whole: Tensor
    part: Tensor
    names: frozenset[str]

    def begin(self, group: Group) -> Pending:
        """Collective."""
        return begin_all_gather(self.whole, self.part, group)


class ParamOverlap:
    """Gathers params beside what the caller does next.

    Args:
        buffers: of this rank, in the order in which every rank has them; grads are not touched.
        group: over which they are sharded.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], group: Group) -> None:
        self._group = group
        self._units = [unit for buffer in buffers for unit in _units_of(buffer)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit.names}
        # A buffer lies in the order of backward, so forward begins at its end.
        self._order = list(reversed(range(len(self._units))))
        self._pending: dict[int, Pending] = {}
        #: Units in the order in which they were waited for; agreed upon after the first step.
        self._met: list[int] = []
        self._is_agreed = False
        self.time = CommTime(0.0, 0.0)

    @property
    def is_pending(self) -> bool:
        """Whether any bucket may not be there yet."""
        return bool(self._pending)

    @property
    def num_pending(self) -> int:
        """Buckets that nobody has waited for yet."""
        return len(self._pending)

    def numbers_of(self, names: Iterable[str]) -> frozenset[int]:
        """What `wait_for` takes for these params; names of params that lie elsewhere count for nothing."""
        return frozenset(self._unit_of[name] for name in names if name in self._unit_of)

    def is_under_way(self, name: str) -> bool:
        """Whether the gather of a param has not ended."""
        return self._unit_of[name] in self._pending

    def begin(self, *, after_forward: bool) -> None:
        """Collective: gathers whatever the owners have updated.

        Args:
            after_forward: whether this rank waited for the last gather as forward passes needed it. May differ.
        """
        self.finish()
        if not self._is_agreed:
            self._learn(self._met if after_forward else None)
        self._met, self.time = [], CommTime(0.0, 0.0)
        for number in self._order:
            with profiled(f"begin all-gather {number}"):
                self._pending[number] = self._units[number].begin(self._group)

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Until these buckets are there; at once where they are.

        On a device the current stream waits, and not the CPU. So a bucket stays pending until its gather has ended:
        whoever reads it on another stream waits as well.
        """
        for number in sorted(set(numbers) & self._pending.keys(), key=self._order.index):
            pending = self._pending[number]
            self.time += waited({f"wait for all-gather {number}": pending})
            if number not in self._met:
                self._met.append(number)
                self._publish(number)
            if _has_ended(pending):
                # Not before it is there: what went wrong in it is raised again. Publishing may have waited for it, too.
                self._pending.pop(number, None)

    def _publish(self, number: int) -> None:
        buffer = self._units[number].buffer
        if all(other in self._met for other in self._pending if self._units[other].buffer is buffer):
            buffer.publish()

    def finish(self) -> None:
        """Until all are there; on a device for the current stream."""
        self.wait_for(tuple(self._pending))
        self._pending.clear()

    def _learn(self, met: list[int] | None) -> None:
        """Collective until the order is agreed upon: that of the first rank that has one."""
        known = [each for each in exchange(met, self._group) if each]
        if known:
            self._order, self._is_agreed = known[0], True


def _has_ended(pending: Pending) -> bool:
    """One that does not say it has ended when it was waited for."""
    is_completed = getattr(pending, "is_completed", None)
    return is_completed is None or bool(is_completed())


def _units_of(buffer: ShardedBuffer) -> list[_Unit]:
    """Params in one gather of several are told apart by their bucket."""
    gathers = list(buffer.gathers())
    names: list[set[str]] = [set() for _ in gathers]
    for slot in buffer.layout.slots:
        if buffer.holds(slot.name):
            names[slot.bucket if len(gathers) == len(buffer.layout.buckets) else 0].add(slot.name)
    return [_Unit(buffer, *each, frozenset(of_bucket)) for each, of_bucket in zip(gathers, names, strict=True)]
