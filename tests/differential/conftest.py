"""One pool and one tally for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.pool import Pool, pool
from tests.differential.tally import Tally

_TALLY = Tally()


@pytest.fixture(scope="session")
def running() -> Iterator[Pool]:
    with pool() as started:
        yield started


@pytest.fixture(scope="session")
def tally() -> Tally:
    """Of the programs drawn at random; printed at the end."""
    return _TALLY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TALLY.outcomes:
        terminalreporter.section("programs drawn at random")
        for line in _TALLY.lines():
            terminalreporter.write_line(line)
