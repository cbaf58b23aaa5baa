"""How far a command is: a bar on a terminal that disappears at the end, or a line every few seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from megatron_distopt.plugin.commands.show import size_text

__all__ = ["Progress"]

#: Seconds before anything is shown, and between two drawings of a bar and two lines.
_PATIENCE, _BAR_EVERY, _LINE_EVERY = 1.0, 0.1, 5.0
_CLEAR = "\r\x1b[K"


class Progress:
    """Counts bytes; a context manager.

    Args:
        what: is being done, e.g. "verifying".
        total: bytes to come.
        stream: standard error where None.
        clock: seconds.
    """

    def __init__(
        self, what: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._stream, self._clock = what, total, stream or sys.stderr, clock
        self._done, self._is_drawn = 0, False
        self._is_terminal = self._stream.isatty()
        self._begin = clock()
        self._next = self._begin + (_PATIENCE if self._is_terminal else _LINE_EVERY)

    def __call__(self, nbytes: int) -> None:
        """So many more are done."""
        self._done += nbytes
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (_BAR_EVERY if self._is_terminal else _LINE_EVERY)
        line = self._bar(now) if self._is_terminal else f"{self._what} {self._numbers(now)}\n"
        self._stream.write(line)
        self._stream.flush()
        self._is_drawn = self._is_terminal

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _numbers(self, now: float) -> str:
        share = min(1.0, self._done / max(1, self._total))
        rate = self._done / max(1e-9, now - self._begin)
        left = max(0, self._total - self._done) / max(1.0, rate)
        of = f"{size_text(self._done)} of {size_text(self._total)}"
        return f"{share:4.0%}  {of}  {size_text(rate)}/s  {_duration(left)} left"

    def _bar(self, now: float) -> str:
        numbers = self._numbers(now)
        columns = self._columns()
        wide = min(40, columns - len(self._what) - len(numbers) - 5)
        full, empty = "━─" if (self._stream.encoding or "").lower().startswith("utf") else "=."
        filled = round(wide * min(1.0, self._done / max(1, self._total)))
        bar = f"{full * filled}{empty * (wide - filled)}  " if wide >= 8 else ""
        return f"{_CLEAR}{self._what}  {bar}{numbers}"[: columns + len(_CLEAR) - 1]

    def _columns(self) -> int:
        with suppress(OSError):  # a terminal that does not tell
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
