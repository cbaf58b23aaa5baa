"""Writes the tables of megatron-core's versions in docs/versions.md, from the reports of
scripts/test_hosts.sh in .hosts.

A row is replaced where there are reports of that version, and kept as it is where there are none.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE, REPORTS = ROOT / "docs" / "versions.md", ROOT / ".hosts"
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
#: Comparisons of parity.xml, as tests/hosts/test_megatron_core_parity.py calls them.
COMPARISONS = tuple(
    f"{precision} {pair}"
    for precision in ("fp32", "bf16")
    for pair in (
        "distopt vs host-distributed",
        "distopt vs host-plain",
        "host-distributed vs host-plain",
    )
)
NOT_RUN = "not run"
Rows = dict[str, dict[str, str]]


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


@dataclass(frozen=True)
class Table:
    """A table between two marker comments of the page.

    Args:
        name: in the markers.
        columns: after the version.
        read: the cells of a version from the folder of its reports, by column.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Path], dict[str, str]]

    def split(self, page: str) -> tuple[str, str, str]:
        """What is before the table, the table, and what is behind it."""
        before, rest = page.split(f"<!-- {self.name}: begin -->\n")
        table, behind = rest.split(f"<!-- {self.name}: end -->")
        return f"{before}<!-- {self.name}: begin -->\n", table, f"<!-- {self.name}: end -->{behind}"

    def rows_of(self, page: str) -> Rows:
        """The cells by version and column; the first two lines are its head."""
        lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in self.split(page)[1].splitlines()
        ]
        head = lines[0][1:]
        return {cells[0]: dict(zip(head, cells[1:], strict=True)) for cells in lines[2:]}

    def with_reports(self, page: str, folder: Path) -> str:
        """The page with new rows of the versions that have reports; a column without one keeps what
        the page says."""
        before, _, behind = self.split(page)
        rows = self.rows_of(page)
        for version in sorted(each.name for each in folder.glob("*")):
            rows[version] = {**rows.get(version, {}), **self.read(folder / version)}
        return before + self._drawn(rows) + behind

    def _drawn(self, rows: Mapping[str, Mapping[str, str]]) -> str:
        lines = [["version", *self.columns], ["---"] * (1 + len(self.columns))]
        for version in sorted(rows, key=_order):
            lines.append([version, *(rows[version].get(name, NOT_RUN) for name in self.columns)])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def counts_of(folder: Path) -> dict[str, str]:
    """By file of tests."""
    return {report.stem: str(Counts.of(report)) for report in folder.glob("*.xml")}


def deviations_of(folder: Path) -> dict[str, str]:
    """The largest ones of loss and gradient norm, by comparison."""
    report, largest = folder / "parity.xml", defaultdict[str, dict[str, float]](dict)
    for each in ElementTree.parse(report).iter("property") if report.exists() else ():
        found = ast.literal_eval(each.get("value", "{}")) if each.get("name") == "deviation" else {}
        for kind in ("loss", "grad_norm") if "loss" in found else ():
            largest[found["what"]][kind] = max(found[kind], largest[found["what"]].get(kind, 0.0))
    return {
        what: f"{kinds['loss']:.1e}, {kinds['grad_norm']:.1e}" for what, kinds in largest.items()
    }


TABLES = (Table("versions", COLUMNS, counts_of), Table("deviations", COMPARISONS, deviations_of))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--versions", action="store_true", help="print those of the table and change nothing"
    )
    args = parser.parse_args(argv)
    page = PAGE.read_text()
    if args.versions:
        released = [
            version for version in TABLES[0].rows_of(page) if re.fullmatch(r"[0-9.]+", version)
        ]
        sys.stdout.write("\n".join(released) + "\n")
        return
    for table in TABLES:
        page = table.with_reports(page, REPORTS)
    PAGE.write_text(page)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


if __name__ == "__main__":
    main()
