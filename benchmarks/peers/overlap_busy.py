"""How much of the machine's processor time something takes, the kernel's share for the network included.

What the kernel does for a packet when an interrupt arrives belongs to no process; only the whole machine shows it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Busy", "busy_seconds"]

_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_NUM_FIELDS = 8


def busy_seconds(stat: str, ticks_a_second: int) -> float:
    """Of all cores since the machine was started.

    Args:
        stat: /proc/stat.
        ticks_a_second: its unit.
    """
    ticks = [int(word) for word in stat.splitlines()[0].split()[1 : _NUM_FIELDS + 1]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]) / ticks_a_second


class Busy:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._start, self._busy = time.monotonic(), _now()

    def cores(self) -> float:
        """Busy on average until now, other programs included."""
        return (_now() - self._busy) / (time.monotonic() - self._start)


def _now() -> float:
    return busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
