"""How long a step communicates, and for how much of that it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from megatron_distopt.comm.collectives import Pending
from megatron_distopt.comm.ranges import profiled

__all__ = ["CommTime", "waited"]


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
