"""Every wait of the package is one that removals.py takes away, or one of which it says why not."""

from __future__ import annotations

from collections import Counter

from tests.sim.removals import KEPT, PACKAGE, REMOVALS, line_of, waits_of


def test_wait_when_it_is_in_the_package_then_it_is_removed_once_or_there_is_a_reason() -> None:
    removed = Counter(line_of(removal, PACKAGE) for removal in REMOVALS)
    left = Counter(waits_of(PACKAGE)) - removed
    assert {line for line in left if line not in KEPT} == set()


def test_reason_when_its_line_is_gone_then_it_has_to_go() -> None:
    assert set(KEPT) - set(waits_of(PACKAGE)) == set()
