"""What the machine code of the kernels shows, for GPUs that are not here."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_distopt.optimizer.triton_table import SWEEP_WARPS
from tests.support.compiled import TARGETS, VARIANTS, compile_for

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]


@pytest.fixture(autouse=True)
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is compiled anew: ptxas says what it did only when it does it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_when_compiled_then_it_has_no_local_memory_and_moves_bodies_in_full_vectors(
    target: str, name: str
) -> None:
    variant, lanes = VARIANTS[name], TARGETS[target][2]
    found = compile_for(target, variant)
    assert (found.spilled_nbytes, found.local_nbytes) == (0, 0)
    # A lane has so many elements of each body; as many vectors bring and write them all, so nothing of them is narrow.
    assert found.stores.get(128, 0) >= variant.wide_stores(lanes)
    if target == "gfx942":  # its compiler joins loads of neighbouring scalars, too
        assert found.loads.get(128, 0) >= variant.wide_loads(lanes)
    else:
        assert (found.loads.get(128, 0), found.stores.get(128, 0)) == (
            variant.wide_loads(lanes),
            variant.wide_stores(lanes),
        )
    # More would keep a multiprocessor from holding as many warps as it needs to have enough loads under way.
    assert found.registers <= 128


def test_sweep_when_launched_then_with_the_warps_that_were_compiled() -> None:
    assert SWEEP_WARPS in {VARIANTS["sweep"].num_warps(lanes) for _, _, lanes in TARGETS.values()}
