"""The tables of docs/precision.md about precisions and places of the state: read, and written with other cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
#: The columns behind the first two.
HOSTS = ("torch", "megatron_2023", "megatron_core")
Row = tuple[str, str]


@dataclass(frozen=True)
class StateTable:
    """One of the tables.

    Args:
        name: in the comments around it.
        heads: of the first two columns.
    """

    name: str
    heads: Row

    @property
    def _marked(self) -> re.Pattern[str]:
        return re.compile(rf"(<!-- {self.name}: begin.*?-->\n)(.*?)(?=<!-- {self.name}: end -->)", re.DOTALL)

    def read(self) -> dict[Row, dict[str, tuple[str, ...]]]:
        """By row and host: the parts of a cell, which are on the device, half of it and all of it on the host."""
        found = self._marked.search(PAGE.read_text(encoding="utf-8"))
        lines = found[2].splitlines()[2:] if found else []
        rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
        cells = {(row[0], row[1]): [tuple(cell.split(", ")) for cell in row[2:]] for row in rows}
        return {row: dict(zip(HOSTS, parts, strict=True)) for row, parts in cells.items()}

    def write(self, rows: Sequence[Row], found: Mapping[str, Mapping[Row, Iterable[str]]]) -> None:
        """Writes the columns of some hosts and keeps the others."""
        known = self.read()
        lines = [f"| {' | '.join((*self.heads, *HOSTS))} |\n", f"|{'---|' * (2 + len(HOSTS))}\n"]
        for row in rows:
            cells = [found[host][row] if host in found else known.get(row, {}).get(host, ("?",)) for host in HOSTS]
            lines.append(f"| `{row[0]}` | `{row[1]}` | {' | '.join(map(', '.join, cells))} |\n")
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(self._marked.sub(lambda match: match[1] + "".join(lines), text), encoding="utf-8")


#: Of bf16 params, and of params of other dtypes with moments in fp32.
PRECISIONS = StateTable("precisions", ("main params", "both moments"))
PARAMS = StateTable("params", ("params", "main params"))
