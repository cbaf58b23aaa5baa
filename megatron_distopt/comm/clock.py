"""How long a step communicates, and for how much of that it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.collectives import Pending
from megatron_distopt.comm.ranges import profiled

__all__ = ["CommTime", "waited", "waited_since"]


@dataclass(frozen=True)
class CommTime:
    """Seconds of some collectives of this rank.

    Args:
        total: from the beginning of each to its end, added up; None where the backend does not say it.
        exposed: that the step waited for them.
    """

    total: float | None
    exposed: float

    @property
    def hidden(self) -> float | None:
        """What ran beside computation."""
        return None if self.total is None else max(self.total - self.exposed, 0.0)

    def __add__(self, other: CommTime) -> CommTime:
        known = self.total is not None and other.total is not None
        total = (self.total or 0.0) + (other.total or 0.0) if known else None
        return CommTime(total, self.exposed + other.exposed)


def waited_since(start: float, buffers: Sequence[ShardedBuffer]) -> CommTime:
    """Of collectives that were waited for at once.

    Args:
        start: as `perf_counter` said before the first of them.
        buffers: of what travelled; on a device the CPU only launches them, and nobody knows how long they take.
    """
    seconds = perf_counter() - start
    is_known = all(buffer.grad.device.type == "cpu" for buffer in buffers)
    return CommTime(seconds if is_known else None, seconds)


def waited(pending: Mapping[str, Pending]) -> CommTime:
    """Waits for collectives in the order given.

    Args:
        pending: by the name of the wait on a profiler's timeline.
    """
    start, total = perf_counter(), 0.0
    is_known = True
    for name, each in pending.items():
        with profiled(name):
            seconds = each.wait()
        is_known = is_known and isinstance(seconds, float)
        total += seconds if isinstance(seconds, float) else 0.0
    return CommTime(total if is_known else None, perf_counter() - start)
