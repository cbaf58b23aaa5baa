"""The host's timers, which every generation keeps in another place; a profiler gets their names, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_distopt.comm import profiled

__all__ = ["timed"]


@contextmanager
def timed(timers: Any, name: str, *, barrier: bool) -> Iterator[None]:
    """Times what runs meanwhile, under the host's name for it.

    Args:
        timers: of the host; None where it keeps none.
        name: that its log expects.
        barrier: whether ranks wait for each other before.
    """
    with profiled(name):
        if timers is None:
            yield
            return
        timers(name, log_level=1).start(barrier=barrier)
        try:
            yield
        finally:
            timers(name).stop()
