"""Timing with a Megatron's own timers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_distopt.comm import profiled


@contextmanager
def timed(timers: Any, options: object, name: str) -> Iterator[None]:
    """Times the block with the host's timer `name`, if there are `timers`, and names it in a
    profiler. `options` of the host decide whether ranks wait for each other first."""
    with profiled(name):
        if timers is None:
            yield
            return
        barrier = getattr(options, "barrier_with_L1_time", False)
        timers(name, log_level=1).start(barrier=barrier)
        try:
            yield
        finally:
            timers(name).stop()
