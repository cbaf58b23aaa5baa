"""The tables of docs/user_actions.md: every line has cases in user_actions.py, and they say what
its cells say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.differential import test_idioms
from tests.hosts import test_plain, test_promise_2023, test_promise_core, test_torch_refusals
from tests.hosts.promises import Program, Refused
from tests.hosts.user_actions import CASES

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "user_actions.md").read_text(encoding="utf-8")
#: Of plain torch: cases that are equal to torch's own optimizer, and those that are refused.
TORCH = {
    **dict.fromkeys((*test_idioms.EQUAL, *test_plain.CASES), False),
    **dict.fromkeys(
        (*test_idioms.REFUSED, *test_torch_refusals.START_UP, *test_torch_refusals.TRAINING), True
    ),
}
#: Where other cases of plain torch, and older ones of a fork, are functions.
ELSEWHERE = "".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("test_*.py")))
PROGRAMS = {"2023": test_promise_2023.PROGRAMS, "core": test_promise_core.PROGRAMS}
#: Our own errors that a program notes and goes on.
OURS = ("AccessError", "HostError")


@dataclass(frozen=True)
class Line:
    """Of the tables: what a user does, and the effect in plain torch, 2023 and megatron-core."""

    does: str
    effects: tuple[str, str, str]

    @property
    def cases(self) -> tuple[tuple[str, ...], ...]:
        cases = CASES[self.does]
        return (cases.torch, cases.of_2023, cases.core)


def _lines() -> list[Line]:
    tables = PAGE.partition("<!-- promises: begin -->\n")[2].partition("<!-- promises: end -->")[0]
    rows = [row for row in tables.splitlines() if row.startswith("| ") and "| action |" not in row]
    lines = []
    for row in rows:
        does, torch, of_2023, core = (cell.strip() for cell in row.strip("|").split(" | "))
        lines.append(Line(does, (torch, of_2023, core)))
    return lines


LINES = _lines()


def _is_refused(program: Program) -> bool:
    notes = [value for value in program.notes.values() if isinstance(value, str)]
    return isinstance(program.expect, Refused) or any(note.startswith(OURS) for note in notes)


def test_actions_when_they_have_cases_then_they_are_the_lines_of_the_page() -> None:
    assert sorted(line.does for line in LINES) == sorted(CASES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.does)
def test_line_when_it_names_cases_then_there_are_some_for_every_column_and_they_exist(
    line: Line,
) -> None:
    for cell, names, programs in zip(
        line.effects, line.cases, (TORCH, *PROGRAMS.values()), strict=True
    ):
        assert cell.startswith(("equal", "refused", "followed", "not possible"))
        assert bool(names) is not cell.startswith("not possible")
        missing = [
            name for name in names if name not in programs and f"\ndef {name}(" not in ELSEWHERE
        ]
        assert missing == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.does)
def test_line_when_a_host_refuses_then_its_cases_do_and_no_others(line: Line) -> None:
    of_megatrons = (
        {name: _is_refused(program) for name, program in each.items()} for each in PROGRAMS.values()
    )
    for cell, names, programs in zip(line.effects, line.cases, (TORCH, *of_megatrons), strict=True):
        refused = {name: programs[name] for name in names if name in programs}
        assert refused == dict.fromkeys(refused, cell.startswith("refused"))


@pytest.mark.parametrize(("host", "column"), [("2023", 1), ("core", 2)])
def test_programs_when_they_do_something_then_a_line_names_them(host: str, column: int) -> None:
    named = {name for line in LINES for name in line.cases[column]}
    assert {name for name in PROGRAMS[host] if not name.startswith("nothing")} <= named
