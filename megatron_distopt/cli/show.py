"""What the commands print, by `rich`: answers, findings, tables, progress, and numbers as people read them.

Plain text is wrapped at the width of a terminal; in a file or a pipe every line is as wide as what it holds, without
colours. `--json` does not come through here, but for `Answer.as_json`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import rich.progress
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = [
    "Answer",
    "Column",
    "Finding",
    "FittingTable",
    "Progress",
    "Status",
    "console_for",
    "counted",
    "facts",
    "findings_table",
    "listed",
    "noted",
    "number_text",
    "ok",
    "options_text",
    "problem",
    "ranges",
    "refused",
    "size_text",
    "titled",
]

#: Columns of a file or a pipe, which have no width: more than any line needs.
_ANY_WIDTH = 100_000


@dataclass(frozen=True)
class Answer:
    """The outcome of one command.

    Args:
        document: everything, as JSON values.
        parts: the same for people, to be separated by empty lines; a text is printed as it is.
        status: of the process when it exits.
    """

    document: Mapping[str, Any]
    parts: Sequence[RenderableType]
    status: int = 0

    def as_text(self, console: Console) -> str:
        """Renders the parts for people, as wide as the console."""
        return "\n\n".join(part if isinstance(part, str) else _rendered(part, console) for part in self.parts)

    def as_json(self) -> str:
        """Writes the document as JSON; inf and nan, which JSON lacks, are the texts "inf", "-inf" and "nan"."""
        return json.dumps(_plain(self.document), indent=2, allow_nan=False)


def console_for(width: int | None) -> Console:
    """Standard output, which prints texts as they are and not as markup.

    Args:
        width: of the terminal in characters; None where the output is none.
    """
    return Console(width=width or _ANY_WIDTH, markup=False, emoji=False, highlight=False)


def _rendered(part: RenderableType, console: Console) -> str:
    with console.capture() as captured:
        console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def titled(title: str, *body: RenderableType) -> Group:
    """A part of an answer: a title, and what is below it."""
    return Group(Text(title, style="bold"), *body)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        title: its heading.
        is_left: aligned at the left; numbers are not.
        is_optional: left out where the table would be too wide.
    """

    title: str
    is_left: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class FittingTable:
    """A table, indented by two, without the columns in which nothing stands.

    Where it is too wide, optional columns are left out, the last one first, and then the first column is wrapped.

    Args:
        columns: of the table.
        rows: one text a column.
        instead: what is shown where all columns that are not optional are too wide together.

    >>> table = FittingTable([Column("name", is_left=True), Column("bytes")], [["a.weight", "12"], ["b", "8"]])
    >>> print(Answer({}, [table]).as_text(console_for(None)))
      name      bytes
      a.weight     12
      b             8
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    instead: RenderableType | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        kept = [at for at in range(len(self.columns)) if any(row[at] for row in self.rows)]
        optional = [at for at in kept if self.columns[at].is_optional]
        while self._is_too_wide(kept, console, options) and optional:
            kept.remove(optional.pop())
        is_too_wide = self.instead is not None and self._is_too_wide(kept, console, options)
        yield self.instead if self.instead is not None and is_too_wide else self._table(kept)

    def _is_too_wide(self, kept: Sequence[int], console: Console, options: ConsoleOptions) -> bool:
        wanted = Measurement.get(console, options.update(width=_ANY_WIDTH), self._table(kept)).maximum
        return wanted > options.max_width

    def _table(self, kept: Sequence[int]) -> RenderableType:
        drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, at in enumerate(kept):
            column = self.columns[at]
            justify: JustifyMethod = "left" if column.is_left else "right"
            drawn.add_column(column.title, justify=justify, no_wrap=number > 0, overflow="fold")
        for row in self.rows:
            drawn.add_row(*(row[at] for at in kept))
        return Padding(drawn, (0, 0, 0, 2), expand=False)


def facts(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Lines of a label and a text, indented by two; rows without a text are left out.

    >>> print(Answer({}, [facts([("step", "10"), ("loss scale", "")])]).as_text(console_for(None)))
      step  10
    """
    return _grid([[label, text] for label, text in rows if text])


def _grid(rows: Iterable[Sequence[str | Text]], least: int = 0) -> RenderableType:
    """Columns of which the last one is wrapped.

    Args:
        rows: texts.
        least: width of the last column but one.
    """
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    cells = list(rows)
    labels = max(map(len, cells), default=1) - 1
    for number in range(labels):
        grid.add_column(no_wrap=True, min_width=least if number == labels - 1 else None)
    grid.add_column(overflow="fold")
    for row in cells:
        grid.add_row(*row)
    return Padding(grid, (0, 0, 0, 2), expand=False)


class Status(Enum):
    """The meaning of a finding for training."""

    #: As it should be.
    OK = "ok"
    #: Good to know; the optimizer could start.
    NOTE = "note"
    #: Training with this optimizer could not start.
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        section: "fork", "machine", "environment" or "launch".
        subject: what was looked at.
        status: what it means for training.
        text: what was found; of a problem also what is supported and what to type.
    """

    section: str
    subject: str
    status: Status
    text: str


def ok(section: str, subject: str, text: str) -> Finding:
    """Returns a finding that all is well."""
    return Finding(section, subject, Status.OK, text)


def noted(section: str, subject: str, text: str) -> Finding:
    """Returns a finding that is good to know."""
    return Finding(section, subject, Status.NOTE, text)


def problem(section: str, subject: str, text: str) -> Finding:
    """Returns a finding that stands in the way of training; `text` is a refusal."""
    return Finding(section, subject, Status.PROBLEM, text)


def refused(section: str, subject: str, reason: str | None, text: str) -> Finding:
    """Returns a problem where there is a reason, and otherwise a finding that all is well."""
    return ok(section, subject, text) if reason is None else problem(section, subject, reason)


_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


def findings_table(rows: Iterable[tuple[Status, str, str]], least: int = 0) -> RenderableType:
    """Lines of a status, a subject and a text.

    Args:
        rows: of the table.
        least: width of the column of subjects, so that those of several tables are alike.

    >>> table = findings_table([(Status.OK, "flag", "--use-distributed-optimizer")])
    >>> print(Answer({}, [table]).as_text(console_for(None)))
      ok       flag  --use-distributed-optimizer
    """
    return _grid([(Text(f"{status.value:<7}", style=_STYLES[status]), *texts) for status, *texts in rows], least)


class Progress:
    """Shows on standard error how many bytes a command has done: a bar on a terminal, elsewhere a line now and then.

    Args:
        what: is being done, such as "verifying".
        total: bytes to come.
        console: standard error where None.
        clock: seconds.
    """

    #: Seconds before a bar is drawn, and between two lines.
    _PATIENCE, _LINE_EVERY = 1.0, 5.0

    def __init__(
        self, what: str, total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock = console or Console(file=sys.stderr), clock
        bar = [rich.progress.BarColumn()] if self._console.is_terminal else []
        self._shown = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            *bar,
            rich.progress.TaskProgressColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            get_time=clock,
            speed_estimate_period=600.0,
        )
        self._task = self._shown.add_task(what, total=total)
        self._next = clock() + (self._PATIENCE if self._console.is_terminal else self._LINE_EVERY)

    def __call__(self, nbytes: int) -> None:
        """Adds bytes that are done."""
        self._shown.advance(self._task, nbytes)
        now = self._clock()
        if now < self._next:
            return
        if self._console.is_terminal:
            self._shown.start()
            self._next = math.inf
        else:
            self._console.print(self._shown.make_tasks_table(self._shown.tasks))
            self._next = now + self._LINE_EVERY

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown.live.is_started:
            self._shown.stop()


def size_text(nbytes: float) -> str:
    """Bytes with three or four digits.

    >>> size_text(720), size_text(34_610), size_text(3 << 40)
    ('720 B', '33.8 KiB', '3.0 TiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while round(nbytes, 1) >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.0f} B" if not power else f"{nbytes:.1f} {units[power]}"


def number_text(value: object) -> str:
    """A number without a fraction that says nothing, lists in brackets, and texts as they are.

    >>> number_text(65536.0), number_text([0.9, 0.999]), number_text(1e-08)
    ('65536', '[0.9, 0.999]', '1e-08')
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(number_text, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def options_text(options: Mapping[str, object]) -> str:
    """Names and values.

    >>> options_text({"lr": 0.001, "amsgrad": False})
    'lr 0.001, amsgrad False'
    """
    return ", ".join(f"{key} {number_text(value)}" for key, value in options.items())


def counted(count: int, noun: str) -> str:
    """Writes a number with its noun.

    >>> counted(1, "file"), counted(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
