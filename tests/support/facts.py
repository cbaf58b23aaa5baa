"""The collector of facts: one spawn of ranks for a test module, whose tests take facts by name.

Ranks do everything that needs a process group in one function, which returns what it found by name.
The module declares the spawn once, and each test compares the facts that it is about:

    def collect_facts(rank: int, size: int) -> dict[str, Any]:  # at module level: ranks import it
        return {"sum": add_up(rank), "refusal": raised(lambda: add_up("x"))}

    facts = facts_of(collect_facts, 2)

    def test_sum_when_two_ranks_add_up_then_both_have_it(facts: Facts) -> None:
        assert facts["sum"] == [3, 3]  # by rank

Where ranks assert instead of returning something, `outcomes` turns each check into a fact, and its
test calls `facts.assert_passed(name)`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.spawn import run_ranks


@dataclass(frozen=True)
class Facts:
    """What ranks found, by name."""

    by_rank: list[Any]  # what the function returned, mostly a mapping from names to facts
    folder: Path  # which the ranks had; empty where the function does not ask for one

    def __getitem__(self, name: object) -> list[Any]:
        """By rank. All ranks must have found it."""
        return [found[name] for found in self.by_rank]

    def of_some(self, name: object) -> list[Any]:
        """By rank, of those that found it. There must be at least one."""
        found: list[Any] = [each[name] for each in self.by_rank if name in each]
        if not found:
            raise KeyError(name)
        return found

    @property
    def first(self) -> Mapping[Any, Any]:
        """All facts of rank 0."""
        facts: Mapping[Any, Any] = self.by_rank[0]
        return facts

    def assert_passed(self, name: object) -> None:
        """Asserts that a check of `outcomes` failed on no rank."""
        failures = [failure for failure in self[name] if failure]
        assert not failures, "\n".join(failures)


def facts_of(
    function: Callable[..., object],
    size: int,
    *args: object,
    seconds: float = 120.0,
    core: bool = False,
    before: Callable[[], object] | None = None,
) -> Callable[..., Iterator[Facts]]:
    """A fixture of a module that calls `function(rank, size, *args)` on ranks, once for all tests.

    Args:
        function: see `run_ranks`. If its last parameter is named `folder`, it gets the path of an
            empty folder, which is removed when the module's tests have run.
        size: the number of ranks.
        args: the same for every rank.
        seconds: the time limit for all of it.
        core: the ranks find megatron-core imported.
        before: is called in the process of the tests first. It may skip them, or install what the
            ranks need.
    """
    has_folder = [*inspect.signature(function).parameters][-1] == "folder"

    @pytest.fixture(scope="module")
    def facts() -> Iterator[Facts]:
        if before:
            before()
        with TemporaryDirectory(prefix="facts_") if has_folder else nullcontext("") as folder:
            path = Path(folder)
            everything = (*args, path) if has_folder else args
            yield Facts(run_ranks(function, size, *everything, seconds=seconds, core=core), path)

    return facts


def outcomes(checks: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """In a rank: by check, how it failed; empty where it did not."""
    found = dict.fromkeys(checks, "")
    for name, check in checks.items():
        try:
            check()
        except (AssertionError, pytest.fail.Exception):  # the second of `pytest.raises`
            found[name] = traceback.format_exc()
    return found
