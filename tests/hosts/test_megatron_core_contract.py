"""What megatron-core reads off an optimizer while it trains and saves, it finds on ours: see
core_contract.py.

Exercises hosts/megatron/grad_scaler.py, hosts/megatron/saving.py, hosts/megatron_core/buffers.py,
hosts/megatron_core/checkpoint.py, hosts/megatron_core/core_calls.py,
hosts/megatron_core/group_counts.py, hosts/megatron_core/model.py, hosts/megatron_core/optimizer.py,
hosts/megatron_core/step.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.facts import Facts, facts_of, outcomes

#: Read off the source: the test process never imports the host.
_SOURCE = ast.parse((Path(__file__).parent / "core_contract.py").read_text())
CHECKS = [
    node.name
    for node in _SOURCE.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args
]
LACKING = "this megatron-core has no "


def collect_facts(rank: int, size: int) -> dict[str, str]:
    from tests.hosts import core_contract

    return outcomes(core_contract.CHECKS)


facts = facts_of(collect_facts, 2, seconds=240, core=True)


@pytest.mark.parametrize("name", CHECKS)
def test_contract_when_the_host_relies_on_it_then_ours_keeps_it(name: str, facts: Facts) -> None:
    for found in facts[name]:
        if LACKING in found:
            pytest.skip(found.splitlines()[-1])
        assert not found, found
