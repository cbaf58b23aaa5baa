"""What the machine code of the kernels shows, for GPUs that are not here."""

from __future__ import annotations

import os
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt.optimizer import triton_adam, triton_low_precision, triton_stats
from megatron_distopt.optimizer.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.precision import Precision
from megatron_distopt.optimizer.triton_adam import TritonAdamW
from megatron_distopt.optimizer.triton_low_precision import MOST_REGISTERS, Wanted
from tests.support.compiled import CODED, SOME_CODED, TARGETS, VARIANTS, compile_for

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


def _check_coded(target: str, name: str) -> None:
    """No local memory; and a lane writes whole vectors where values lie in phase, and single values elsewhere."""
    variant, lanes = CODED[name], TARGETS[target][2]
    found = compile_for(target, variant)
    assert (found.spilled_nbytes, found.local_nbytes) == (0, 0)
    assert found.registers <= MOST_REGISTERS
    assert found.stores == variant.stores_of_coded
    wide = found.loads.get(128, 0), variant.wide_loads(lanes)
    assert wide[0] >= wide[1] if target == "gfx942" else wide[0] == wide[1]
    assert found.loads.get(64, 0) >= variant.reads.get(1, 0)


@pytest.mark.parametrize(("target", "name"), list(zip(TARGETS, SOME_CODED, strict=False)))
def test_kernel_when_compiled_for_some_forms_of_state_then_it_has_no_local_memory_and_moves_full_vectors(
    target: str, name: str
) -> None:
    _check_coded(target, name)


@pytest.mark.long
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_when_compiled_for_any_forms_of_state_then_it_has_no_local_memory_and_moves_full_vectors(
    target: str, name: str
) -> None:
    _check_coded(target, name)


class _NoGpu:
    """Stands for the driver of a GPU that is not here: kernels are bound and compiled for it, and not launched."""

    def get_current_device(self) -> int:
        """Returns a number that no real one has, because Triton keeps what it compiled by device."""
        return 97

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget(*TARGETS["sm_90"])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """By kernel, what a launch of it compiles; nothing is launched."""
    driver = import_module("triton.runtime").driver
    found: dict[str, list[Any]] = defaultdict(list)

    def launch(
        kernel: str, num_programs: int, *arguments: Any, module: str = "triton_kernels", **constants: Any
    ) -> None:
        kernels = import_module(f"megatron_distopt.optimizer.{module}")
        bound = getattr(kernels, kernel).warmup(*arguments, grid=(num_programs,), enable_fp_fusion=False, **constants)
        found[kernel].append(bound)

    for module in (triton_adam, triton_low_precision, triton_stats):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(driver, "_active", _NoGpu())
    return found


def test_launch_when_there_are_few_or_many_flat_params_then_the_kernels_above_are_compiled_and_each_once(
    compiled: dict[str, list[Any]],
) -> None:
    for num in (1, 16, 17):
        mains = [torch.ones(2000) for _ in range(num)]
        inner = TritonAdamW([{"params": mains[::2]}, {"params": mains[1::2]}])
        inner.round_into({main: main.bfloat16() for main in mains})
        for main in mains:
            main.grad = torch.ones(2000)
        inner.step()
        grads = [main.grad for main in mains if main.grad is not None]
        triton_stats._launch(grads, [(0, False)] * num, torch.device("cpu"), count_zeros=num > 1)
    assert set(compiled) == {"prepare", "sweep", "statistics"}
    for name, variant in (("prepare", "prepare"), ("sweep", "sweep"), ("statistics", "statistics in float64")):
        assert len({each.hash for each in compiled[name]}) == 1
        bound, expected = compiled[name][0], VARIANTS[variant]
        types = {argument: kind for argument, kind in bound.src.signature.items() if kind != "constexpr"}
        assert types == expected.types
        assert bound.metadata.num_warps == expected.num_warps(32)


def test_launch_when_state_is_in_low_precision_then_the_kernel_above_is_compiled_and_once(
    compiled: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_low_precision, "CUDA", "cpu")
    monkeypatch.setattr(triton_low_precision, "_tried", lambda *arguments: None)
    monkeypatch.setattr(triton_low_precision, "_TRIED", {})
    precision = Precision("remainder", "int8", "int8")
    for num in (1, 16, 17):
        mains = precision.mains([torch.ones(2000, dtype=torch.bfloat16) for _ in range(num)])
        inner = LowPrecisionAdam([{"params": mains}], precision=precision, wanted=Wanted.BEST)
        for main in mains:
            main.grad = torch.ones(2000)
        inner.step()
    assert {name: len({each.hash for each in found}) for name, found in compiled.items()} == {
        "prepare": 1,
        "update_coded": 1,
    }
    bound, expected = compiled["update_coded"][0], CODED["remainder, int8, int8"]
    types = {argument: kind for argument, kind in bound.src.signature.items() if kind != "constexpr"}
    assert (types, bound.metadata.num_warps) == (expected.types, expected.num_warps(32))
