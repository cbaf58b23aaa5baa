"""How long a step communicates, how much of that it waits for, and the names of its phases in a profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.profiler import record_function

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.pending import Pending

_log = logging.getLogger("megatron_distopt")
#: Begins the name of every range, so that a timeline can be searched for them.
_PREFIX = "megatron_distopt::"


@dataclass(frozen=True)
class Marker:
    """Ranges of a device's own profiler, for example NVTX.

    Args:
        push: begins a range of a name.
        pop: ends the range that began last.
    """

    push: Callable[[str], object]
    pop: Callable[[], object]


_markers: list[Marker] = []


def mark_with(marker: Marker) -> None:
    """Begins and ends all later ranges in a marker as well; repeated calls with one marker have no effect."""
    if marker not in _markers:
        _markers.append(marker)


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """Names what runs meanwhile, behind "megatron_distopt::", in `torch.profiler` and in the markers.

    >>> with torch.profiler.profile() as profile, profiled("clip"):
    ...     pass
    >>> [event.key for event in profile.key_averages()]
    ['megatron_distopt::clip']
    """
    for marker in _markers:
        marker.push(_PREFIX + name)
    try:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
            with record_function(_PREFIX + name):
                yield
        else:
            yield
    finally:
        for marker in reversed(_markers):
            marker.pop()


@dataclass(frozen=True)
class CommTime:
    """Seconds that some collectives of this rank took.

    Args:
        total: from the beginning of each to its end, added up; None where the backend does not report it.
        exposed: during which the step waited for them.
    """

    total: float | None
    exposed: float

    @property
    def hidden(self) -> float | None:
        """Seconds that were overlapped with computation."""
        return None if self.total is None else max(self.total - self.exposed, 0.0)

    def __add__(self, other: CommTime) -> CommTime:
        known = self.total is not None and other.total is not None
        total = (self.total or 0.0) + (other.total or 0.0) if known else None
        return CommTime(total, self.exposed + other.exposed)


NO_TIME = CommTime(0.0, 0.0)


def waited_since(start: float, buffers: Sequence[ShardedBuffer]) -> CommTime:
    """The time of collectives that were not overlapped.

    Args:
        start: what `perf_counter` returned before the first of them.
        buffers: that were communicated; on a device the CPU only launches collectives, so their total is unknown.
    """
    seconds = perf_counter() - start
    is_known = all(buffer.grad.device.type == "cpu" for buffer in buffers)
    return CommTime(seconds if is_known else None, seconds)


def waited(pending: Mapping[str, Pending]) -> CommTime:
    """Waits for collectives in the order given.

    Args:
        pending: by the name of the wait in a profiler.
    """
    start, total = perf_counter(), 0.0
    is_known = True
    for name, each in pending.items():
        with profiled(name):
            seconds = each.wait()
        is_known = is_known and isinstance(seconds, float)
        total += seconds if isinstance(seconds, float) else 0.0
    return CommTime(total if is_known else None, perf_counter() - start)


class CommLog:
    """Logs the communication of a step at INFO, every so many steps; the first rank has one.

    Args:
        every: steps.
    """

    def __init__(self, every: int) -> None:
        self._every, self._num_steps = every, 0

    def step(self, grads: CommTime, params: CommTime) -> None:
        """Counts a step, and logs where it is its turn.

        Args:
            grads: time of its reduce-scatters.
            params: time of the all-gathers that its forward pass needed.
        """
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            both = f"reduce-scatter {_described(grads)}; all-gather {_described(params)}"
            _log.info("communication of step %d: %s", self._num_steps, both)


def _described(time: CommTime) -> str:
    """
    >>> _described(CommTime(0.25, 0.05)), _described(CommTime(None, 0.05))
    ('250.0 ms, of which 50.0 exposed and 200.0 hidden', '50.0 ms exposed')
    """
    exposed = f"{time.exposed * 1e3:.1f}"
    if time.total is None or time.hidden is None:
        return f"{exposed} ms exposed"
    return f"{time.total * 1e3:.1f} ms, of which {exposed} exposed and {time.hidden * 1e3:.1f} hidden"
