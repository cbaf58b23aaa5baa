"""Adam over state in any precision, by a Triton kernel in one pass over memory, on CUDA and ROCm.

A step is one launch of `triton_kernels.prepare`, which counts the updates, and one of `triton_kernels.update` for each
combination of forms: two where fp32 params train beside 16-bit ones.

A launch is told of all its flat params by a table on the device. It is built when addresses, groups or the set of
params with gradients have changed; in a steady step the host compares the rows and uploads nothing. An upload goes
through pinned memory, so the host does not wait for it either. Gradients may lie in memory that is allocated anew in
every step: their places count from the start of that memory, whose address is an argument of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.device import current, pinned
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout.buckets import BLOCK_NUMEL
from megatron_distopt.optimizer.accelerator import CUDA
from megatron_distopt.optimizer.low_precision.block_codes import CODES
from megatron_distopt.optimizer.low_precision.stored_values import (
    BlockValues,
    ParamUpdate,
    RemainderValues,
    StoredValues,
    phase_of,
)

#: Blocks of one program, and its warps: each lane has 8 values, 128 bits of a 16-bit model param.
BLOCKS = 8
WARPS = 2 if torch.version.hip else 4
#: Of one lane: a multiprocessor of NVIDIA's holds three programs of four warps then. Without a limit the compiler
#: chooses a lower one by itself, for which it spills some bytes of some forms; nearly all forms need less than 128.
MOST_REGISTERS = 168
_OPTIONS = {"num_warps": WARPS} | ({} if torch.version.hip else {"maxnreg": MOST_REGISTERS})
#: Flat params of one program of `prepare`.
_PREPARE_BLOCK = 128
#: How the kernel is told of a form: a code by its shift and its top, which it takes out of the number again.
FORMS = {
    "float32": 0,
    "bfloat16": 1,
    "remainder": 2,
    **{name: 32 * code.shift + code.top for name, code in CODES.items()},
}
#: What the main param is rounded into, by dtype of the model param.
MODELS = {None: 0, torch.bfloat16: 1, torch.float16: 2}
#: Addresses that the kernel takes for gradients to count from.
_NUM_SOURCES = 4
_LANE_NUMEL, _VECTOR_NBYTES = 8, 16


class Combination(NamedTuple):
    """The forms of a flat param, as the kernel is told of them; `model` is one of `MODELS`, the others of `FORMS`."""

    main: int
    model: int
    first: int
    second: int

    @classmethod
    def of(cls, update: ParamUpdate) -> Combination:
        model = MODELS[None if update.model is None else update.model.dtype]
        return cls(_form_of(update.main), model, _form_of(update.first), _form_of(update.second))


def _form_of(stored: StoredValues) -> int:
    if isinstance(stored, BlockValues):
        return FORMS[stored.code.name]
    if isinstance(stored, RemainderValues):
        return FORMS["remainder"]
    return FORMS[dtype_name(stored.parts[0].dtype)]


def grad_addresses(grads: Sequence[Tensor]) -> tuple[list[int], list[tuple[int, int]]]:
    """The addresses of the first allocations that hold the gradients, and where these lie.

    A gradient lies a number of bytes behind a source, by the number of that; or at an address, for the last number.
    """
    numbers: dict[int, int] = {}
    places = []
    for grad in grads:
        address, start = grad.data_ptr(), grad.untyped_storage().data_ptr()
        number = min(numbers.setdefault(start, len(numbers)), _NUM_SOURCES)
        places.append((number, address if number == _NUM_SOURCES else address - start))
    starts = list(numbers)[:_NUM_SOURCES]
    # Filled up with an address, so that the type of the argument does not depend on their number.
    return starts + starts[:1] * (_NUM_SOURCES - len(starts)), places


class Row(NamedTuple):
    """What the kernel is told of one flat param."""

    combination: Combination
    num_programs: int
    cells: tuple[int, ...]  # in the order of triton_kernels.py, without the first program, which comes last

    @classmethod
    def of(cls, update: ParamUpdate, source: int, offset: int) -> Row:
        """Reads the addresses of what is updated; for `source` and `offset` see `grad_addresses`."""
        phase = next(iter(_phases(update)), phase_of(update.main))
        state = [stored.parts[0] for stored in update.state]
        scales = [stored.exponents.data_ptr() if isinstance(stored, BlockValues) else 0 for stored in update.state]
        models = [] if update.rounded is None else [update.rounded]
        # Whether value number `-phase` is at the beginning of a vector of every tensor.
        is_aligned = not any(
            (tensor.data_ptr() - phase * tensor.itemsize) % min(_VECTOR_NBYTES, _LANE_NUMEL * tensor.itemsize)
            for tensor in (*state, *models, update.grad)
        )
        addresses = [tensor.data_ptr() for tensor in (*state, *models)] + [0] * (not models)
        numel = update.main.numel
        numbers = numel, phase, update.step.data_ptr(), update.group, update.place, int(is_aligned)
        num_programs = -(-(phase + numel) // (BLOCKS * BLOCK_NUMEL))
        return cls(Combination.of(update), num_programs, (*addresses, offset, source, *scales, *numbers))


def _phases(update: ParamUpdate) -> frozenset[int]:
    """Values of the first block that belong to others, of each form in blocks; the kernel knows one for all."""
    return frozenset(stored.phase for stored in update.state if isinstance(stored, BlockValues))


@dataclass(frozen=True, eq=False)
class Table:
    """What the kernels read, on the device."""

    cells: Tensor  # int64 [flat params, 16]
    owners: Tensor  # int32 [programs], the flat param of each
    scalars: Tensor  # fp32 [flat params, 8], written by `prepare`
    launches: tuple[tuple[Combination, int, int], ...]  # forms, first program and number of programs of each

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, rows: tuple[Row, ...], device: torch.device) -> Table:
        """Builds and uploads it from rows in the order of their combinations; the host waits for nothing."""
        cells, launches, start = list[list[int]](), dict[Combination, tuple[int, int]](), 0
        for row in rows:
            cells.append([*row.cells, start])
            first, num = launches.get(row.combination, (start, 0))
            launches[row.combination] = first, num + row.num_programs
            start += row.num_programs
        programs = torch.tensor([row.num_programs for row in rows])
        owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), programs)
        scalars = torch.empty(len(rows), 8, dtype=torch.float32, device=device)
        numbers = tuple((combination, *programs) for combination, programs in launches.items())
        return cls(_uploaded(torch.tensor(cells), device), _uploaded(owners, device), scalars, numbers)


def _uploaded(values: Tensor, device: torch.device) -> Tensor:
    """Copies numbers to the device; the host does not wait."""
    return pinned(values.shape, values.dtype, device).copy_(values).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float64, 1-D."""
    return _uploaded(torch.tensor(values, dtype=torch.float64), device)


def is_taken(updates: Sequence[ParamUpdate], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the kernel makes all updates of a step; never some of them, because it leaves gradients undivided."""
    if not updates or not has_kernel(updates[0].grad.device):
        return False
    is_usual = not any(groups[update.group].get(option) for update in updates for option in ("amsgrad", "maximize"))
    return is_usual and all(map(_is_served, updates))


def update_in_one_pass(
    updates: Sequence[ParamUpdate],
    groups: Sequence[Mapping[str, Any]],
    *,
    decoupled: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Makes updates that the kernel takes; `grad_scale` and `found_inf` are as torch's fused optimizers have them."""
    device = updates[0].grad.device
    updates = sorted(updates, key=Combination.of)
    sources, places = grad_addresses([update.grad for update in updates])
    rows = tuple(Row.of(update, *place) for update, place in zip(updates, places, strict=True))
    divisor = torch.ones((), device=device) if grad_scale is None else grad_scale
    found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
    with current(device):
        table = Table.of(rows, device)
        programs, numbers = -(-len(rows) // _PREPARE_BLOCK), _group_numbers(groups, device)
        arguments = table.cells, *numbers, found_inf, table.scalars, len(rows)
        launch("prepare", programs, *arguments, BLOCK=_PREPARE_BLOCK)
        tensors = table.cells, table.owners, table.scalars, divisor, found_inf
        for combination, first_program, num_programs in table.launches:
            constants = {name.upper(): form for name, form in combination._asdict().items()}
            constants |= {"DECOUPLED": decoupled, "BLOCKS": BLOCKS, **_OPTIONS}
            launch("update", num_programs, *tensors, first_program, *sources, **constants)


def _group_numbers(groups: Sequence[Mapping[str, Any]], device: torch.device) -> tuple[Tensor, Tensor]:
    """What `prepare` reads of param groups: float64 [groups, 2] and [groups, 4]; uploaded where it has changed."""
    options = tuple(
        float(number) for group in groups for number in (*group["betas"], group["eps"], group["weight_decay"])
    )
    # The product is made in the dtype of the rate.
    rates = [rate for group in groups for rate in (group["lr"], group["lr"] * group["weight_decay"])]
    if any(isinstance(rate, Tensor) and rate.device == device for rate in rates):
        full = partial(torch.full, (), dtype=torch.float64, device=device)
        tensors = [rate if isinstance(rate, Tensor) else full(rate) for rate in rates]
        on_device = torch.stack([rate.to(device, torch.float64, non_blocking=True) for rate in tensors])
    else:
        on_device = _numbers(tuple(map(float, rates)), device)
    return on_device.view(-1, 2), _numbers(options, device).view(-1, 4)


def has_kernel(device: torch.device) -> bool:
    """Whether Triton is there and has kernels for a device; TRITON_INTERPRET=1 interprets them on a CPU, for tests."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == CUDA or is_interpreted) and find_spec("triton") is not None


def _is_served(update: ParamUpdate) -> bool:
    """Whether blocks of all its state begin at the same value, and all of it lies on the device in one piece."""
    tensors = [update.grad, *(part for stored in update.state for part in stored.parts)]
    is_here = all(tensor.is_contiguous() and tensor.device == update.grad.device for tensor in (*tensors, update.step))
    return is_here and len(_phases(update)) <= 1


def launch(kernel: str, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel of triton_kernels.py, which Triton compiles when it is launched first.

    Multiplications and additions are not contracted: a GPU computes what Triton's interpreter does, to the bit. Memory
    bounds the kernels, so it costs nothing.

    Raises:
        ConfigError: Triton cannot compile the kernel on this machine.
    """
    try:
        kernels = import_module("megatron_distopt.optimizer.low_precision.triton_kernels")
        getattr(kernels, kernel)[(num_programs,)](*arguments, **constants, enable_fp_fusion=False)
    except Exception as error:
        raise ConfigError(
            f"Triton cannot compile the update of state in low precision on this machine ({error}). Write "
            "adam='torch_fused' for torch's operators, or install what Triton needs, such as a C compiler."
        ) from error
