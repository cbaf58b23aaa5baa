"""What the commands print for people: parts of an answer, drawn by `rich`, and numbers as people
read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any

from rich import filesize, progress
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: Columns of a file or a pipe, which have no width: more than any line needs.
_ANY_WIDTH = 100_000


@dataclass(frozen=True)
class Answer:
    """The outcome of one command."""

    document: Mapping[str, Any]  # everything, as JSON values
    # the same for people, separated by empty lines; a text is printed as it is
    parts: Sequence[RenderableType]
    status: int = 0  # of the process when it exits

    def as_text(self, width: int | None) -> str:
        """Renders the parts for a terminal of so many characters, or for a file or a pipe."""
        console = Console(width=width or _ANY_WIDTH, markup=False, emoji=False, highlight=False)
        texts = []
        for part in self.parts:
            with console.capture() as captured:
                console.print(part)
            drawn = "\n".join(line.rstrip() for line in captured.get().splitlines())
            text = part if isinstance(part, str) else drawn
            texts.append(text)
        return "\n\n".join(texts)

    def as_json(self) -> str:
        """Writes the document as JSON; inf and nan, which JSON lacks, are the texts "inf", "-inf"
        and "nan"."""
        return json.dumps(_plain(self.document), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    is_special = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_special else value


class Status(Enum):
    """The meaning of a finding for training."""

    OK = "ok"
    NOTE = "note"  # worth knowing; the optimizer could start
    PROBLEM = "problem"  # training with this optimizer could not start


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    status: Status  # what it means for training
    section: str  # "fork", "machine", "environment" or "launch"
    subject: str  # what was looked at
    text: str  # what was found; of a problem also what is required and what to type


ok, noted, problem = (partial(Finding, status) for status in Status)
_STYLES = {Status.OK.value: "green", Status.NOTE.value: "yellow", Status.PROBLEM.value: "bold red"}


def titled(title: str, *body: RenderableType) -> Group:
    return Group(Text(title, style="bold"), *body)


def _cell(text: str) -> Text:
    return Text(text, style=_STYLES.get(text, ""), overflow="fold")


def rows(cells: Iterable[Sequence[str]]) -> RenderableType:
    """Returns lines of labels and a text, indented by two and wrapped; rows without a text are left
    out."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for row in cells:
        if row[-1]:
            grid.add_row(*map(_cell, row))
    return Padding(grid, (0, 0, 0, 2), expand=False)


@contextmanager
def progress_of(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on standard error, where that is a terminal, how many bytes of a long task are done.

    The function that it returns is called with the bytes that were done since the last call.
    """
    console = Console(stderr=True)
    with progress.Progress(
        *progress.Progress.get_default_columns(),
        progress.DownloadColumn(binary_units=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        yield partial(shown.advance, shown.add_task(what, total=total))


def size_text(nbytes: float) -> str:
    """Writes bytes with their unit, such as "33.8 KiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    unit, suffix = filesize.pick_unit_and_suffix(int(nbytes), units, 1024)
    num_digits = 1 if unit > 1 else 0
    return f"{nbytes / unit:.{num_digits}f} {suffix}"


def options_text(options: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Writes the first few names, and how many more there are."""
    text = ", ".join(names[:most])
    num_more = len(names) - most
    if num_more > 0:
        text += f" and {num_more:,} more"
    return text


def more(count: int, most: int) -> list[str]:
    """Returns the line that stands for what a list of `count` leaves out after `most`, if
    anything."""
    return [f"and {count - most:,} more: --json has all"] if count > most else []


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as ranges, such as "0-2,5,7-8"."""
    ordered = sorted(numbers)
    texts = []
    for _, places in groupby(range(len(ordered)), key=lambda place: ordered[place] - place):
        members = [ordered[place] for place in places]
        ends = dict.fromkeys((members[0], members[-1]))
        texts.append("-".join(map(str, ends)))
    return ",".join(texts)
