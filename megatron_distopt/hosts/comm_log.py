"""The line in the log that says how long a step communicated, and how much of that nobody waited for."""

from __future__ import annotations

import logging

from megatron_distopt.comm import CommTime

__all__ = ["CommLog"]

_log = logging.getLogger("megatron_distopt")


class CommLog:
    """Logs at INFO every so many steps; one rank does.

    Args:
        every: steps; None for never.
        is_first: whether this is that rank.
    """

    def __init__(self, every: int | None, *, is_first: bool) -> None:
        self._every = every if is_first else None
        self._num_steps = 0

    def step(self, grads: CommTime, params: CommTime) -> None:
        """At the end of a step.

        Args:
            grads: of its reduce-scatters.
            params: of the all-gathers that its forward pass needed.
        """
        self._num_steps += 1
        if self._every is not None and self._num_steps % self._every == 0:
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
