"""What megatron-core reads off an optimizer while it trains and saves, it finds on ours: see core_contract.py."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path

import pytest

from tests.support.spawn import run_ranks

#: Read off the source: the test process never imports the host.
_SOURCE = ast.parse((Path(__file__).parent / "core_contract.py").read_text())
CHECKS = [
    node.name
    for node in _SOURCE.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args
]
LACKING = "this megatron-core has no "


def _check_all(rank: int, size: int) -> dict[str, str]:
    """By check: empty, what this version of the host lacks, or how it failed; a failure of one rank ends all."""
    from tests.hosts import core_contract

    found = {}
    for name, check in core_contract.CHECKS.items():
        try:
            check()
            found[name] = ""
        except core_contract.HostCannot as reason:
            found[name] = str(reason)
        except AssertionError:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, str]]:
    return run_ranks(_check_all, 2, seconds=240, core=True)


@pytest.mark.parametrize("name", CHECKS)
def test_contract_when_the_host_relies_on_it_then_ours_keeps_it(name: str, by_rank: list[dict[str, str]]) -> None:
    for found in by_rank:
        if found[name].startswith(LACKING):
            pytest.skip(found[name])
        assert not found[name], found[name]
