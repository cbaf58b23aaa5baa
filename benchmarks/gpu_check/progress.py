"""What a person sees meanwhile: a bar where rich is there and somebody looks, else a line a check."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

from gpu_check.checks import Check, Outcome, Status
from gpu_check.runner import Events

__all__ = ["Progress", "make_progress"]

_MARKS = {Status.PASSES: "passes", Status.FAILS: "FAILS", Status.SKIPPED: "skipped"}
_STYLES = {Status.PASSES: "green", Status.FAILS: "bold red", Status.SKIPPED: "yellow"}
_WIDTH = 110


class Progress(AbstractContextManager["Progress"]):
    """Lines, one for each check when it ends.

    Args:
        total: checks that will be run.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.since = time.monotonic()

    @property
    def events(self) -> Events:
        """What a runner tells."""
        return Events(self.begins, self.doing, self.ends)

    def begins(self, check: Check, ranks: int) -> None:
        """Nothing, where lines are all that there is."""

    def doing(self, text: str) -> None:
        """Nothing, where lines are all that there is."""

    def ends(self, outcome: Outcome) -> None:
        self.done += 1
        seconds = time.monotonic() - self.since
        print(f"[{seconds:4.0f} s, {self.done}/{self.total}] {line_of(outcome)}", flush=True)

    def __exit__(self, *error: object) -> None:
        """Nothing to put back."""


class _Bar(Progress):
    """The same lines above a bar."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        super().__init__(total)
        columns = (
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Bar(*columns)
        self._task = self._bar.add_task("starting", total=total)
        self._title = ""

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def begins(self, check: Check, ranks: int) -> None:
        self._title = f"{check.subject}: {check.title} ({_ranks(ranks)})"
        self._bar.update(self._task, description=self._title)

    def doing(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: {text}")

    def ends(self, outcome: Outcome) -> None:
        from rich.text import Text

        self.done += 1
        self._bar.console.print(
            Text(line_of(outcome), style=_STYLES[outcome.status]), overflow="ellipsis", no_wrap=True
        )
        self._bar.update(self._task, completed=self.done)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def make_progress(total: int) -> Progress:
    """A bar where it can be had."""
    try:
        return _Bar(total) if sys.stdout.isatty() else Progress(total)
    except ImportError:
        return Progress(total)


def line_of(outcome: Outcome) -> str:
    """One check in one line."""
    said = f"{_MARKS[outcome.status]:7} {outcome.subject} {outcome.check}, {_ranks(outcome.ranks)}: {outcome.detail}"
    is_long = len(said) > _WIDTH and outcome.status is Status.PASSES
    return said[: _WIDTH - 3] + "..." if is_long else said


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
