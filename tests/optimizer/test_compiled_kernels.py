"""What the machine code of the kernels shows, for GPUs that are not here."""

from __future__ import annotations

import os
from collections import defaultdict
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt.optimizer.low_precision import one_pass
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from tests.support.compiled import PREPARE, SOME_UPDATES, TARGETS, UPDATES, Update, compile_for

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or tuple(map(int, version("triton").split(".")[:2])) < (3, 4),
        reason="needs triton 3.4 or newer, whose compiler is called here",
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]


@pytest.fixture(autouse=True)
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is compiled anew: ptxas says what it did only when it does it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "target", [target if target == "sm_90" else pytest.param(target, marks=pytest.mark.long) for target in TARGETS]
)
def test_prepare_when_compiled_then_it_has_no_local_memory(target: str) -> None:
    compiled = compile_for(target, PREPARE)
    assert (compiled.spilled_nbytes, compiled.local_nbytes) == (0, 0)


def _check_update(target: str, update: Update) -> None:
    """No local memory; and a lane writes whole vectors where values lie in phase, and single values elsewhere."""
    compiled = compile_for(target, update.variant)
    assert (compiled.spilled_nbytes, compiled.local_nbytes) == (0, 0)
    assert compiled.registers <= one_pass.MOST_REGISTERS
    assert compiled.stores == update.stores
    wide = compiled.loads.get(128, 0)
    # The compiler for AMD's joins loads of neighbouring scalars, too.
    assert wide >= update.wide_loads if target == "gfx942" else wide == update.wide_loads
    assert compiled.loads.get(64, 0) >= update.reads[1]


def test_update_when_compiled_for_some_forms_then_it_has_no_local_memory_and_moves_full_vectors() -> None:
    _check_update("sm_90", SOME_UPDATES[list(TARGETS).index("sm_90")])


@pytest.mark.long
@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_update_when_compiled_for_any_forms_then_it_has_no_local_memory_and_moves_full_vectors(
    target: str, update: Update
) -> None:
    _check_update(target, update)


class _NoGpu:
    """Stands for the driver of a GPU that is not here: kernels are bound and compiled for it, and not launched."""

    def get_current_device(self) -> int:
        """Returns a number that no real one has, because Triton keeps what it compiled by device."""
        return 97

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget(*TARGETS["sm_90"])


def test_step_when_there_are_few_or_many_flat_params_then_the_kernels_above_are_compiled_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: dict[str, list[Any]] = defaultdict(list)

    def launch(kernel: str, num_programs: int, *arguments: Any, **constants: Any) -> None:
        kernels = import_module("megatron_distopt.optimizer.low_precision.triton_kernels")
        bound = getattr(kernels, kernel).warmup(*arguments, grid=(num_programs,), enable_fp_fusion=False, **constants)
        compiled[kernel].append(bound)

    monkeypatch.setattr(one_pass, "launch", launch)
    monkeypatch.setattr(one_pass, "has_kernel", lambda device: True)
    monkeypatch.setattr(import_module("triton.runtime").driver, "_active", _NoGpu())
    precision = Precision("remainder", "int8", "int8")
    for num in (1, 16, 17):
        mains = [precision.main(torch.ones(2000, dtype=torch.bfloat16)) for _ in range(num)]
        inner = LowPrecisionAdam([{"params": mains}], precision=precision)
        for main in mains:
            main.grad = torch.ones(2000)
        inner.step()
    expected = {"prepare": PREPARE, "update": SOME_UPDATES[0].variant}
    assert set(compiled) == set(expected)
    for name, variant in expected.items():
        assert len({bound.hash for bound in compiled[name]}) == 1
        bound = compiled[name][0]
        types = {argument: kind for argument, kind in bound.src.signature.items() if kind != "constexpr"}
        assert (types, bound.metadata.num_warps) == (variant.types, 4)
