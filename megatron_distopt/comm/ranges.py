"""Names on a profiler's timeline, for the phases of a step and the collectives of each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import record_function

__all__ = ["Marker", "mark_with", "profiled"]

#: In front of every name, so that a timeline can be searched for them.
_PREFIX = "megatron_distopt::"


@dataclass(frozen=True)
class Marker:
    """Ranges of a device's own profiler, e.g. NVTX.

    Args:
        push: begins a range of that name.
        pop: ends the last one.
    """

    push: Callable[[str], object]
    pop: Callable[[], object]


_markers: list[Marker] = []


def mark_with(marker: Marker) -> None:
    """From now on ranges are also begun and ended there; whoever knows the device says so, once."""
    if marker not in _markers:
        _markers.append(marker)


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """What runs meanwhile has this name, behind "megatron_distopt::", in `torch.profiler` and in the markers.

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
