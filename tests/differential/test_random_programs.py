"""Programs drawn at random: each gives what the reference gives, or is refused by an error of ours on all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.differential.compare import Outcome
from tests.differential.pool import Pool
from tests.differential.programs import Program
from tests.differential.scripts import stand_alone
from tests.differential.survey import draw, reduce
from tests.differential.tally import Tally

#: Draws of one seed resemble each other, so a few are taken of each.
OF_EACH_SEED = 6


def check_programs(running: Pool, tally: Tally, start: int) -> None:
    """Runs the programs of one seed. Stops at the first that fails, with a script of a smaller one."""
    for program in draw(OF_EACH_SEED, start, is_calm=False):
        outcome = running.run(program)
        tally.add(program, outcome)
        if outcome.kind == "failed":
            report(*reduce(running, program, outcome))


def report(program: Program, outcome: Outcome) -> None:
    """Fails with the script that shows it by itself."""
    script = Path(tempfile.gettempdir()) / "failing_program.py"
    script.write_text(stand_alone(program, outcome.text), encoding="utf-8")
    pytest.fail(f"{outcome.text}\n{program!r}\nRun: python {script}\n{script.read_text()}", pytrace=False)


@pytest.mark.parametrize("start", range(2))
def test_programs_when_drawn_at_random_then_equal_or_refused(running: Pool, tally: Tally, start: int) -> None:
    check_programs(running, tally, start)
    # Refusals are not a way out: three quarters of the programs hold nothing that may be refused.
    assert tally.num_equal > tally.outcomes.total() / 2


@pytest.mark.long
@pytest.mark.parametrize("start", [2, 3, *range(100, 200)])
def test_programs_when_many_are_drawn_then_equal_or_refused(running: Pool, tally: Tally, start: int) -> None:
    check_programs(running, tally, start)
