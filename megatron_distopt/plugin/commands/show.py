"""Numbers, names and tables as people read them: ASCII, and no wider than the terminal where that can be."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "Column",
    "counted",
    "facts",
    "listed",
    "number_text",
    "options_text",
    "ranges",
    "size_text",
    "table",
    "wrapped",
]

_GAP = "  "


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


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines, indented by two; columns in which nothing stands are left out.

    Args:
        columns: the first one's texts are shortened in the middle where nothing else helps.
        rows: one text a column.
        width: of the terminal in characters; None for any.

    >>> print(*table([Column("name", is_left=True), Column("bytes")], [["a.weight", "12"], ["b", "8"]]), sep="|")
      name      bytes|  a.weight     12|  b             8
    """
    kept = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    widths = [max(len(each[number]) for each in ([column.title for column in columns], *rows)) for number in kept]
    while width is not None and _total(widths) > width:
        last = next((at for at in reversed(range(len(kept))) if columns[kept[at]].is_optional), None)
        if last is None:
            widths[0] = min(widths[0], max(16, widths[0] - (_total(widths) - width)))
            break
        del kept[last], widths[last]
    lines = []
    for row in ([column.title for column in columns], *rows):
        cells = [
            _shortened(row[number], wide).ljust(wide) if columns[number].is_left else row[number].rjust(wide)
            for number, wide in zip(kept, widths, strict=True)
        ]
        lines.append((_GAP + _GAP.join(cells)).rstrip())
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(len(_GAP) + wide for wide in widths)


def _shortened(text: str, wide: int) -> str:
    """The beginning, with the number of the layer, and the end."""
    if len(text) <= wide:
        return text
    head = (wide - 3) // 2
    return f"{text[:head]}...{text[len(text) - (wide - 3 - head) :]}"


def facts(rows: Iterable[tuple[str, str]], width: int | None = None) -> list[str]:
    """Lines of a label and a text that is wrapped at the width; rows without a text are left out.

    >>> facts([("step", "10"), ("loss scale", "")])
    ['  step  10']
    """
    kept = [(label, text) for label, text in rows if text]
    labels = max((len(label) for label, _ in kept), default=0)
    return [line for label, text in kept for line in wrapped(f"  {label:<{labels}}  ", text, width)]


def wrapped(head: str, text: str, width: int | None) -> list[str]:
    """Lines of a text behind a head, below which the others begin."""
    if width is None or width < len(head) + 30:
        return [head + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


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
    """
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
    """
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
