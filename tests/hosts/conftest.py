"""Prints how far curves were from each other, at the end of a run that compared any.

A test records `record_property("deviation", {"what": ..., and numbers by name})`; the table has the largest of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

# To be imported in the ranks only: it imports the host, which would map torch.cuda in the test process.
collect_ignore = ["core_contract.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    largest: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for recorded in _deviations(terminalreporter):
        of_this = largest[recorded["what"]]
        of_this["cases"] += 1
        for name in recorded.keys() - {"what"}:
            of_this[name] = max(of_this[name], recorded[name])
    if largest:
        terminalreporter.write_sep("=", "largest deviations")
        for what, numbers in sorted(largest.items()):
            columns = "  ".join(f"{name} {numbers[name]:.1e}" for name in sorted(numbers.keys() - {"cases"}))
            terminalreporter.write_line(f"{what:<42} {numbers['cases']:2.0f} cases  {columns}")


def _deviations(terminalreporter: pytest.TerminalReporter) -> Iterator[dict[str, Any]]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            yield from (value for name, value in report.user_properties if name == "deviation")
