"""Writes the table of megatron-core's versions in docs/hosts.md, from the reports of scripts/test_hosts.sh in .hosts.

A row is replaced where there are reports of that version, and kept as it is where there are none.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE, REPORTS = ROOT / "docs" / "hosts.md", ROOT / ".hosts"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"
#: Files of tests: tests/hosts/test_megatron_core_NAME.py, and tests/formats/test_foreign_core.py.
COLUMNS = (
    "contract",
    "parity",
    "refusals",
    "factories",
    "options",
    "models",
    "offload",
    "folders",
    "checkpoints",
    "foreign_core",
)
NOT_RUN = "not run"


@dataclass(frozen=True)
class Counts:
    """The outcome of one file of tests."""

    passed: int
    skipped: int
    failed: int

    @classmethod
    def of(cls, report: Path) -> Counts:
        suite = ElementTree.parse(report).getroot()[0]
        tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        return cls(tests - skipped - failed, skipped, failed)

    def __str__(self) -> str:
        failed = f"**{self.failed} failed**, " if self.failed else ""
        return failed + (f"{self.passed} + {self.skipped}" if self.skipped else str(self.passed))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", action="store_true", help="print those of the table and change nothing")
    args = parser.parse_args(argv)
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    table, tail = rest.split(END)
    rows = rows_of(table)
    if args.versions:
        sys.stdout.write("\n".join(version for version in rows if re.fullmatch(r"[0-9.]+", version)) + "\n")
        return
    rows |= reported(REPORTS, rows)
    PAGE.write_text(head + BEGIN + as_table(rows) + END + tail)


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """The cells of a table by version and column; the first two lines are its head."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    head = lines[0][1:]
    return {cells[0]: dict(zip(head, cells[1:], strict=True)) for cells in lines[2:]}


def reported(folder: Path, rows: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The rows of the versions that have reports; a column without one keeps what the table says."""
    found = {}
    for version in sorted(each.name for each in folder.glob("*")):
        counts = {report.stem: str(Counts.of(report)) for report in (folder / version).glob("*.xml")}
        found[version] = {**rows.get(version, {}), **counts}
    return found


def as_table(rows: Mapping[str, Mapping[str, str]]) -> str:
    lines = [["version", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines += [
        [version, *(rows[version].get(name, NOT_RUN) for name in COLUMNS)] for version in sorted(rows, key=_order)
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


if __name__ == "__main__":
    main()
