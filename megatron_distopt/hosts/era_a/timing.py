"""The fork's timers, under the fork's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Phases"]


@dataclass(frozen=True)
class Phases:
    """Times the phases of a step.

    Args:
        args: of the fork; says whether ranks wait for each other before a phase.
        timers: of the fork; None where the caller keeps none.
    """

    args: Any
    timers: Any

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times what runs meanwhile."""
        if self.timers is None:
            yield
            return
        self.timers(name, log_level=1).start(barrier=getattr(self.args, "barrier_with_L1_time", False))
        try:
            yield
        finally:
            self.timers(name).stop()
