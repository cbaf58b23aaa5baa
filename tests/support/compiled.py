"""The Triton kernels compiled for GPUs that are not here, and what their machine code shows.

Triton's compiler and the ptxas that it brings need no GPU.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module

from megatron_distopt.optimizer.low_precision.block_codes import CODES
from megatron_distopt.optimizer.low_precision.one_pass import BLOCKS, FORMS, MOST_REGISTERS

#: By name: backend, architecture and lanes of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

_TENSORS = {"table": "*i64", "scalars": "*fp32", "found_inf": "*fp32"}


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel: the types of its arguments, in Triton's spelling, and values of the others."""

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, int]


@dataclass(frozen=True)
class Update:
    """The kernel `update` for main params and moments in some forms, with a kind of model param (`one_pass.MODELS`)."""

    main: str
    model: int
    first: str
    second: str

    @property
    def variant(self) -> Variant:
        forms = {"MAIN": self.main, "FIRST": self.first, "SECOND": self.second}
        constants = {name: FORMS[form] for name, form in forms.items()}
        types = {**_TENSORS, "owners": "*i32", "divisor": "*fp32", "first_program": "i32"}
        types |= {f"grads{number}": "i64" for number in range(4)}
        return Variant("update", types, {**constants, "MODEL": self.model, "DECOUPLED": True, "BLOCKS": BLOCKS})

    @property
    def reads(self) -> Counter[int]:
        """How many tensors of a flat param are read, by bytes of an element; the gradient is fp32."""
        return Counter([4, *self._stored, *[2] * (self.main == "remainder")])

    @property
    def wide_loads(self) -> int:
        """128-bit loads that bring all that the 8 elements of one lane need."""
        return _vectors(self.reads)

    @property
    def stores(self) -> dict[int, int]:
        """All stores of one lane by bits, in whole vectors and of single values.

        8 values are 128 bits of 16-bit tensors, twice 128 of fp32 and 64 of codes of 8 bits. Scales are written in both
        ways.
        """
        writes = Counter([*self._stored, *[2] * (self.main == "remainder" or self.model > 0)])
        single = Counter({8 * nbytes: 8 * count for nbytes, count in writes.items()})
        single[8] += 2 * sum(name in CODES for name in (self.main, self.first, self.second))
        return {bits: count for bits, count in {**single, 64: writes[1], 128: _vectors(writes)}.items() if count}

    @property
    def _stored(self) -> list[int]:
        """Bytes of an element of main param and moments."""
        names = (self.main, self.first, self.second)
        return [4 if name == "float32" else 1 if FORMS[name] >= 32 else 2 for name in names]


def _vectors(streams: Mapping[int, int]) -> int:
    return sum(nbytes * count for nbytes, count in streams.items() if nbytes > 1) * 8 // 16


PREPARE = Variant("prepare", {**_TENSORS, "rates": "*fp64", "hyperparameters": "*fp64", "num": "i32"}, {"BLOCK": 128})
_MOMENTS = ("float32", "bfloat16", *CODES)
#: Forms of main params with the kinds of model params that they are rounded into.
_MAINS = {"float32": (0, 1, 2), "remainder": (0,), "bfloat16": (0,), "float16": (1, 2)}
UPDATES = [
    Update(main, model, first, second)
    for main, models in _MAINS.items()
    for model in models
    for first in _MOMENTS
    for second in _MOMENTS
]
#: Each form of main params and of moments at least once.
SOME_UPDATES = (
    Update("remainder", 0, "int8", "int8"),
    Update("bfloat16", 0, "float8_e4m3fn", "float8_e5m2"),
    Update("float16", 2, "float16", "bfloat16"),
    Update("float32", 1, "float32", "float8_e4m3fn"),
)


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a kernel shows of one lane."""

    registers: int
    spilled_nbytes: int  # that registers did not hold
    local_nbytes: int  # memory of its own (a stack frame, or scratch)
    loads: Mapping[int, int]  # of global memory, by bits, how many instructions
    stores: Mapping[int, int]


def compile_for(target: str, variant: Variant) -> Compiled:
    """Compiles a kernel for one of `TARGETS`."""
    triton = import_module("triton")
    compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
    kernel = getattr(import_module("megatron_distopt.optimizer.low_precision.triton_kernels"), variant.kernel)
    names = list(kernel.arg_names)
    pointers = [(number,) for number, name in enumerate(names) if variant.types.get(name, "").startswith("*")]
    source = compiler.ASTSource(
        kernel,
        {name: variant.types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in variant.constants.items()},
        {pointer: [["tt.divisibility", 16]] for pointer in pointers},  # what torch allocates
    )
    backend, arch, lanes = TARGETS[target]
    options = {"num_warps": 128 // lanes, "enable_fp_fusion": False}  # a lane of `update` has 8 elements then
    if variant.kernel == "update" and backend == "cuda":
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
