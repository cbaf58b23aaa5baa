"""The Triton kernels compiled for GPUs that are not here, and what their machine code shows.

Triton's compiler and the ptxas that it brings need no GPU. docs/kernels.md is written from this by
scripts/kernels_table.py, and tests/optimizer/test_compiled_kernels.py asserts it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from megatron_distopt.optimizer.codes import CODES
from megatron_distopt.optimizer.triton_low_precision import BLOCKS, FORMS, MOST_REGISTERS
from megatron_distopt.optimizer.triton_table import REST_BLOCK, STATS_BLOCK, SWEEP_BLOCK

__all__ = ["CODED", "SOME_CODED", "TARGETS", "VARIANTS", "Compiled", "Variant", "compile_for"]

#: By name: backend, architecture and lanes of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

_SOURCES = {f"grads{number}": "i64" for number in range(4)}


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel.

    Args:
        kernel: its name.
        types: of its arguments, in Triton's spelling.
        constants: values of the others.
        lane_numel: elements of one lane, in a body; None for a kernel that moves no flat params, with 4 warps.
        reads, writes: how many tensors of a flat param, by bytes of an element.
        scales: tensors with one byte a block, which are read and written.
        module: where the kernel is.
    """

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    lane_numel: int | None = None
    reads: Mapping[int, int] = field(default_factory=dict)
    writes: Mapping[int, int] = field(default_factory=dict)
    scales: int = 0
    module: str = "triton_kernels"

    def num_warps(self, lanes: int) -> int:
        """Of one program, on a device with that many lanes a warp."""
        return 4 if self.lane_numel is None else self._program_numel // self.lane_numel // lanes

    def wide_loads(self, lanes: int) -> int:
        """128-bit loads that bring all that one lane reads of a body."""
        return self._vectors(self.reads, lanes)

    def wide_stores(self, lanes: int) -> int:
        """128-bit stores that write all that one lane writes of a body."""
        return self._vectors(self.writes, lanes)

    @property
    def stores_of_coded(self) -> dict[int, int]:
        """All stores of one lane of `update_coded` by bits, in whole vectors and of single values.

        8 values are 128 bits of 16-bit tensors, twice 128 of fp32 and 64 of codes of 8 bits. Scales are written in both
        ways.
        """
        single = {8 * nbytes: 8 * count for nbytes, count in self.writes.items()}
        single[8] = single.get(8, 0) + 2 * self.scales
        found = {**single, 64: self.writes.get(1, 0), 128: self._vectors(self.writes, 32)}
        return {bits: count for bits, count in sorted(found.items()) if count}

    def _vectors(self, streams: Mapping[int, int], lanes: int) -> int:
        return sum(nbytes * count for nbytes, count in streams.items() if nbytes > 1) * self._numel(lanes) // 16

    def _numel(self, lanes: int) -> int:
        return self._program_numel // lanes // self.num_warps(lanes)

    @property
    def _program_numel(self) -> int:
        return int(self.constants["BLOCK"] if "BLOCK" in self.constants else 128 * self.constants["BLOCKS"])


def _sweep(*, decoupled: bool) -> Variant:
    types = {"table": "*i64", "owners": "*i32", "scalars": "*fp32", "divisor": "*fp32", "found_inf": "*fp32"}
    types |= {"num": "i32", "num_bodies": "i32", **_SOURCES}
    constants = {"DECOUPLED": decoupled, "BLOCK": SWEEP_BLOCK, "REST_BLOCK": REST_BLOCK}
    return Variant("sweep", types, constants, 8, {4: 4}, {4: 3, 2: 1})


def _statistics(dtype: str) -> Variant:
    types = {"table": "*i64", "owners": "*i32", "sums": f"*{dtype}", "zeros": "*i32", "counter": "*i32"}
    types |= {"out": f"*{dtype}", **dict.fromkeys(("num", "num_programs", "blocks", "padding", "counts_zeros"), "i32")}
    return Variant("statistics", {**types, **_SOURCES}, {"WIDE": dtype == "fp64", "BLOCK": STATS_BLOCK}, None, {4: 1})


def _coded(main: str, model: int, first: str, second: str, *, decoupled: bool = True) -> Variant:
    types = {"table": "*i64", "owners": "*i32", "scalars": "*fp32", "divisor": "*fp32", "found_inf": "*fp32"}
    names = (main, first, second)
    held = [4 if name == "float32" else 1 if FORMS[name] >= 32 else 2 for name in names]
    read, written = [2] * (main == "remainder"), [2] * (main == "remainder" or model > 0)  # of the model param
    constants = {"MAIN": FORMS[main], "MODEL": model, "FIRST": FORMS[first], "SECOND": FORMS[second]}
    return Variant(
        "update_coded",
        {**types, "first_program": "i32", **_SOURCES},
        {**constants, "DECOUPLED": decoupled, "BLOCKS": BLOCKS},
        8,
        Counter([4, *held, *read]),  # the gradient is fp32
        Counter([*held, *written]),
        sum(name in CODES for name in names),
        "triton_coded_kernels",
    )


_PREPARE = {"table": "*i64", "rates": "*fp64", "hyperparameters": "*fp64", "found_inf": "*fp32", "scalars": "*fp32"}

VARIANTS = {
    "sweep": _sweep(decoupled=True),
    "prepare": Variant("prepare", {**_PREPARE, "num": "i32"}, {"BLOCK": 128, "ROW_CELLS": 0}),
    "statistics in float64": _statistics("fp64"),
    "sweep with L2 decay": _sweep(decoupled=False),
    "statistics in fp32": _statistics("fp32"),
}


_MOMENTS = ("float32", "bfloat16", *CODES)
#: Forms of main params with the kinds of model params that they are rounded into.
_MAINS = {"float32": (0, 1, 2), "remainder": (0,), "bfloat16": (0,), "float16": (1, 2)}

#: Every combination of forms, by its name.
CODED = {
    f"{main}{('', ' to bf16', ' to fp16')[model]}, {first}, {second}": _coded(main, model, first, second)
    for main, models in _MAINS.items()
    for model in models
    for first in _MOMENTS
    for second in _MOMENTS
}
#: Each form of main params and of moments at least once.
SOME_CODED = (
    "remainder, int8, int8",
    "remainder, bfloat16, bfloat16",
    "bfloat16, float8_e4m3fn, float8_e5m2",
    "float16 to fp16, float16, float16",
    "float32 to bf16, int8, float8_e4m3fn",
    "float32, float32, int8",
)


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a kernel shows.

    Args:
        registers: of one lane.
        spilled_nbytes: of one lane, that registers did not hold.
        local_nbytes: of one lane, memory of its own (a stack frame, or scratch).
        loads, stores: of global memory, by bits of one lane; of how many instructions.
    """

    registers: int
    spilled_nbytes: int
    local_nbytes: int
    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)


def compile_for(target: str, variant: Variant) -> Compiled:
    """Compiles a kernel.

    Args:
        target: one of `TARGETS`.
        variant: of which kernel.
    """
    triton = import_module("triton")
    compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
    kernel = getattr(import_module(f"megatron_distopt.optimizer.{variant.module}"), variant.kernel)
    names = list(kernel.arg_names)
    pointers = [(number,) for number, name in enumerate(names) if variant.types.get(name, "").startswith("*")]
    source = compiler.ASTSource(
        kernel,
        {name: variant.types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in variant.constants.items()},
        {pointer: [["tt.divisibility", 16]] for pointer in pointers},  # what torch allocates
    )
    backend, arch, lanes = TARGETS[target]
    options = {"num_warps": variant.num_warps(lanes), "enable_fp_fusion": False}
    if variant.module == "triton_coded_kernels" and backend == "cuda":
        options["maxnreg"] = MOST_REGISTERS
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of default values, which differ between releases
        triton.knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=backends.GPUTarget(backend, arch, lanes), options=options)
    return _read_ptx(made.asm["ptx"], said.getvalue()) if backend == "cuda" else _read_amdgcn(made.asm["amdgcn"])


def _read_ptx(text: str, log: str) -> Compiled:
    """From PTX, and from what ptxas says with -v."""
    stack, *spilled = map(
        int, _found(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    )
    (registers,) = map(int, _found(r"Used (\d+) registers", log))
    local = stack + len(re.findall(r"\b(?:ld|st)\.local\b", text))
    moves = re.findall(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)\b", text)
    bits = Counter((kind, int(count or 1) * int(width)) for kind, count, width in moves)
    return Compiled(registers, sum(spilled), local, _of("ld", bits), _of("st", bits))


#: Bits by ending of an instruction's name.
_AMD_BITS = {
    "ubyte": 8,
    "byte": 8,
    "sbyte": 8,
    "sshort": 16,
    "ushort": 16,
    "short": 16,
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
}


def _read_amdgcn(text: str) -> Compiled:
    (registers,) = map(int, _found(r"\.vgpr_count:\s+(\d+)", text))
    spilled = [int(number) for number in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text)]
    (scratch,) = map(int, _found(r"ScratchSize: (\d+)", text))
    moves = re.findall(r"^\s*(?:global|buffer|flat|scratch)_(load|store)_(\w+)", text, re.MULTILINE)
    bits = Counter((kind, _AMD_BITS[ending.split("_")[0]]) for kind, ending in moves)
    return Compiled(registers, 4 * sum(spilled), scratch, _of("load", bits), _of("store", bits))


def _found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in {text[-2000:]!r}"
    return match.groups()


def _of(kind: str, bits: Mapping[tuple[str, int], int]) -> dict[int, int]:
    return {width: count for (each, width), count in sorted(bits.items()) if each == kind}
