"""Programs drawn at random: each gives what the reference gives, or is refused by an error of ours on all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.differential.drawing import programs
from tests.differential.pool import Pool
from tests.differential.programs import Program
from tests.differential.scripts import stand_alone
from tests.differential.tally import Tally


def check(running: Pool, tally: Tally, program: Program) -> None:
    """Fails with a script that shows it by itself."""
    outcome = running.run(program)
    tally.add(program, outcome)
    if outcome.kind == "failed":
        script = Path(tempfile.gettempdir()) / "failing_program.py"
        text = stand_alone(program, outcome.text)
        script.write_text(text, encoding="utf-8")
        pytest.fail(f"{outcome.text}\n{program!r}\nRun: python {script}\n{text}", pytrace=False)


def check_programs(running: Pool, tally: Tally, start: int, number: int) -> None:
    """Many draws of a few: those of one hypothesis test resemble each other."""

    @seed(start)
    @settings(
        max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs())
    def equal_or_refused(program: Program) -> None:
        check(running, tally, program)

    equal_or_refused()


@pytest.mark.parametrize("start", range(4))
def test_programs_when_drawn_at_random_then_equal_or_refused(running: Pool, tally: Tally, start: int) -> None:
    check_programs(running, tally, start, 10)
    # Refusals are not a way out: three quarters of the programs hold nothing that may be refused.
    assert tally.num_equal > tally.outcomes.total() / 2


@pytest.mark.long
@pytest.mark.parametrize("start", range(100, 200))
def test_programs_when_many_are_drawn_then_equal_or_refused(running: Pool, tally: Tally, start: int) -> None:
    check_programs(running, tally, start, 10)
