"""What megatron-core reads off an optimizer while it trains and saves, it finds on ours: see
core_contract.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.spawn import outcomes, run_ranks

#: Read off the source: the test process never imports the host.
_SOURCE = ast.parse((Path(__file__).parent / "core_contract.py").read_text())
CHECKS = [
    node.name
    for node in _SOURCE.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args
]
LACKING = "this megatron-core has no "


def _check_all(rank: int, size: int) -> dict[str, str]:
    from tests.hosts import core_contract

    return outcomes(core_contract.CHECKS)


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, str]]:
    return run_ranks(_check_all, 2, seconds=240, core=True)


@pytest.mark.parametrize("name", CHECKS)
def test_contract_when_the_host_relies_on_it_then_ours_keeps_it(
    name: str, by_rank: list[dict[str, str]]
) -> None:
    for found in by_rank:
        if LACKING in found[name]:
            pytest.skip(found[name].splitlines()[-1])
        assert not found[name], found[name]
