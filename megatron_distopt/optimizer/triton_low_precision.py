"""Adam over state in any precision, by a Triton kernel in one pass over memory.

A step is one launch of `triton_kernels.prepare`, which counts the updates, and one of
`triton_coded_kernels.update_coded` for each combination of forms: two where fp32 params train beside 16-bit ones.
Before a combination is used for the first time on a device, the kernel is tried on numbers of which every bit is known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.device import current
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import BLOCK_NUMEL
from megatron_distopt.optimizer.accelerator import CUDA
from megatron_distopt.optimizer.codes import CODES
from megatron_distopt.optimizer.forms import Forms
from megatron_distopt.optimizer.kept import Blocks, Kept, Plain, Remainder, phase_of, zeros_in_phase, zeros_kept
from megatron_distopt.optimizer.triton_table import (
    SWEEP_WARPS,
    GradPlace,
    GroupNumbers,
    Tables,
    Uploaded,
    launch,
    owners_of,
    place_grads,
    starts_of,
    upload,
)

_log = logging.getLogger("megatron_distopt")

#: Blocks of one program: with the warps of `triton_kernels.sweep` a lane has 8 values.
BLOCKS = 8
#: Of one lane: a multiprocessor of NVIDIA's holds three programs of four warps then. Without a limit the compiler
#: chooses a lower one by itself, for which it spills some bytes of some forms; nearly all forms need less than 128.
MOST_REGISTERS = 168
_OPTIONS = {"num_warps": SWEEP_WARPS} | ({} if torch.version.hip else {"maxnreg": MOST_REGISTERS})
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
_LANE_NUMEL, _VECTOR_NBYTES = 8, 16


class Wanted(Enum):
    """Which implementation updates state in low precision."""

    #: Torch's operators, by stretches.
    STRETCHES = "torch"
    #: The kernel where it runs and is right, else the stretches.
    BEST = "auto"
    #: The kernel, or an error.
    KERNEL = "triton"


class Kinds(NamedTuple):
    """The forms of a flat param, as the kernel is told of them; see `form_of`.

    `model` is what the main param is rounded into: nothing, bf16 (1) or fp16 (2).
    """

    main: int
    model: int
    first: int
    second: int

    @classmethod
    def of(cls, forms: Forms) -> Kinds:
        """Those of one flat param."""
        model = MODELS[None if forms.model is None else forms.model.dtype]
        return cls(form_of(forms.main), model, form_of(forms.first), form_of(forms.second))


def form_of(kept: Kept) -> int:
    """One of `FORMS`."""
    if isinstance(kept, Blocks):
        return FORMS[kept.code.name]
    if isinstance(kept, Remainder):
        return FORMS["remainder"]
    return FORMS[dtype_name(kept.parts[0].dtype)]


class _Row(NamedTuple):
    """One flat param: addresses, and what else the kernel is told of it."""

    kinds: Kinds
    main: int
    first: int
    second: int
    model: int
    scales: tuple[int, ...]
    grad: GradPlace
    numel: int
    phase: int
    step: int
    group: int
    number: int

    @classmethod
    def of(cls, forms: Forms, grad: GradPlace) -> _Row:
        main, first, second = (kept.parts[0].data_ptr() for kept in forms.kepts)
        return cls(
            Kinds.of(forms),
            main,
            first,
            second,
            0 if forms.rounded is None else forms.rounded.data_ptr(),
            tuple(kept.exponents.data_ptr() if isinstance(kept, Blocks) else 0 for kept in forms.kepts),
            grad,
            forms.main.numel,
            _phase(forms),
            forms.step.data_ptr(),
            forms.group,
            forms.number,
        )

    def cells(self, first_program: int) -> list[int]:
        """In the order of triton_coded_kernels.py."""
        addresses = [self.main, self.first, self.second, self.model, self.grad.offset, self.grad.source, *self.scales]
        shape = [self.numel, first_program, self.phase]
        return [*addresses, *shape, self.step, self.group, self.number, int(self.is_aligned)]

    @property
    def num_programs(self) -> int:
        return -(-(self.phase + self.numel) // (BLOCKS * BLOCK_NUMEL))

    @property
    def is_aligned(self) -> bool:
        """Whether value number `-phase` is at the beginning of a vector of every tensor."""
        streams = [
            (self.main, _itemsize(self.kinds.main)),
            (self.first, _itemsize(self.kinds.first)),
            (self.second, _itemsize(self.kinds.second)),
            (self.model, 2),
            (self.grad.phase, 4),
        ]
        return not any(
            (address - self.phase * itemsize) % min(_VECTOR_NBYTES, _LANE_NUMEL * itemsize)
            for address, itemsize in streams
            if address or itemsize == 4
        )


def _itemsize(form: int) -> int:
    """Bytes of a value of a form; codes with a shift are of 8 bits."""
    return 4 if form == FORMS["float32"] else 1 if form >= 32 else 2


def _phase(forms: Forms) -> int:
    return next(iter(forms.phases), phase_of(forms.main))


@dataclass(frozen=True, eq=False)
class _Table:
    """What the kernels read, on the device.

    Args:
        cells: int64 [flat params, 16].
        owners: int32 [programs].
        scalars: fp32 [flat params, 8], written by `prepare`.
        launches: kinds, first program and number of programs of each.
    """

    cells: Uploaded
    owners: Uploaded
    scalars: Tensor
    launches: tuple[tuple[Kinds, int, int], ...]

    @classmethod
    def of(cls, rows: Sequence[_Row], device: torch.device) -> _Table:
        """Builds and uploads it from rows in the order of their kinds; the host waits for nothing."""
        programs = [row.num_programs for row in rows]
        starts = starts_of(programs)
        cells = torch.tensor([row.cells(start) for row, start in zip(rows, starts, strict=True)])
        scalars = torch.empty(len(rows), 8, dtype=torch.float32, device=device)
        owners = upload(owners_of(programs), device)
        return cls(upload(cells, device), owners, scalars, _launches(rows, starts))


def _launches(rows: Sequence[_Row], starts: Sequence[int]) -> tuple[tuple[Kinds, int, int], ...]:
    found = []
    for kinds in dict.fromkeys(row.kinds for row in rows):
        members = [(start, row.num_programs) for start, row in zip(starts, rows, strict=True) if row.kinds == kinds]
        found.append((kinds, members[0][0], sum(num for _, num in members)))
    return tuple(found)


class OnePass:
    """Updates flat params by the kernel.

    Args:
        wanted: whether it is used.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._tables: Tables[_Table] = Tables()
        self._numbers = GroupNumbers()

    def choose(self, forms: Sequence[Forms], groups: Sequence[Mapping[str, Any]], *, decoupled: bool) -> list[Forms]:
        """Those that the kernel updates: of each device all or none, because it leaves gradients undivided.

        Args:
            forms: all that are updated in this step.
            groups: their param groups.
            decoupled: whether decay is.

        Raises:
            ConfigError: the kernel was asked for by name and cannot update one of them.
        """
        if self._wanted is Wanted.STRETCHES:
            return []
        chosen = []
        for device in dict.fromkeys(each.device for each in forms):
            members = [each for each in forms if each.device == device]
            if self._takes(members, groups, device, decoupled=decoupled):
                chosen += members
        return chosen

    def _takes(
        self, forms: Sequence[Forms], groups: Sequence[Mapping[str, Any]], device: torch.device, *, decoupled: bool
    ) -> bool:
        if device.type != CUDA and (self._wanted is not Wanted.KERNEL or os.environ.get("TRITON_INTERPRET") != "1"):
            return False
        reasons = (_why_not(each, groups[each.group]) for each in forms)
        tried = (_why_not_compiled(device, kinds, decoupled) for kinds in dict.fromkeys(map(Kinds.of, forms)))
        reason = next((each for each in (*reasons, *tried) if each is not None), None)
        if reason is not None and self._wanted is Wanted.KERNEL:
            rule, remedy = "be usable when it is asked for by name", "Write adam='auto'"
            raise ConfigError(refusal("adam 'triton'", reason, rule, remedy))
        return reason is None

    @staticmethod
    def is_all_there_is(forms: Sequence[Forms], chosen: Sequence[Forms]) -> bool:
        """Whether the gradients that are on an accelerator are all left undivided."""
        return bool(chosen) and not {each.device for each in forms if each.device.type == CUDA} - {
            each.device for each in chosen
        }

    def update(
        self,
        forms: Sequence[Forms],
        groups: Sequence[Mapping[str, Any]],
        *,
        decoupled: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Updates flat params that `choose` returned.

        Args:
            forms: of the flat params.
            groups: their param groups.
            decoupled: whether decay is.
            grad_scale, found_inf: fp32 0-D, as torch's fused optimizers have them.
        """
        for device in dict.fromkeys(each.device for each in forms):
            members = sorted((each for each in forms if each.device == device), key=Kinds.of)
            with current(device):
                self._update(members, groups, device, decoupled, _or(grad_scale, 1, device), _or(found_inf, 0, device))

    def _update(
        self,
        forms: Sequence[Forms],
        groups: Sequence[Mapping[str, Any]],
        device: torch.device,
        decoupled: bool,
        divisor: Tensor,
        found_inf: Tensor,
    ) -> None:
        num = len(forms)
        sources, places = place_grads([each.grad for each in forms])
        rows = tuple(_Row.of(each, place) for each, place in zip(forms, places, strict=True))
        table = self._tables.get((rows, device), device, lambda: _Table.of(rows, device))
        cells, owners, scalars = table.cells.tensor, table.owners.tensor, table.scalars
        numbers = self._numbers.of(groups, device)
        programs = -(-num // _PREPARE_BLOCK)
        constants = _PREPARE_BLOCK, cells.shape[1]
        launch("prepare", programs, cells, *numbers, found_inf, scalars, num, *constants)
        for kinds, first_program, num_programs in table.launches:
            launch(
                "update_coded",
                num_programs,
                cells,
                owners,
                scalars,
                divisor,
                found_inf,
                first_program,
                *sources,
                **_constants(kinds, decoupled),
                module="triton_coded_kernels",
                **_OPTIONS,
            )


def _constants(kinds: Kinds, decoupled: bool) -> dict[str, Any]:
    return {**{name.upper(): kind for name, kind in kinds._asdict().items()}, "DECOUPLED": decoupled, "BLOCKS": BLOCKS}


def _or(tensor: Tensor | None, value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device) if tensor is None else tensor


def _why_not(forms: Forms, group: Mapping[str, Any]) -> str | None:
    """What the kernel cannot do about one flat param."""
    option = next((each for each in ("amsgrad", "maximize") if group.get(each)), None)
    if option is not None:
        return f"a param group has {option}=True"
    if len(forms.phases) > 1:
        return f"blocks of one flat param begin at different values ({sorted(forms.phases)})"
    tensors = [forms.grad, *(part for kept in forms.kepts for part in kept.parts)]
    if any(not each.is_contiguous() or each.device != forms.device for each in (*tensors, forms.step)):
        return "a part of the state is on another device than its gradient, or not contiguous"
    return None


def _why_not_compiled(device: torch.device, kinds: Kinds, decoupled: bool) -> str | None:
    """Why the kernel cannot be used for these forms; it is tried once."""
    if (device, kinds, decoupled) not in _TRIED:
        _TRIED[device, kinds, decoupled] = _tried(device, kinds, decoupled)
    return _TRIED[device, kinds, decoupled]


#: Why not, or None, by device, forms and kind of decay.
_TRIED: dict[tuple[torch.device, Kinds, bool], str | None] = {}


def _tried(device: torch.device, kinds: Kinds, decoupled: bool) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    groups = [{"lr": 2.0**-4, "weight_decay": 0.5, "betas": (0.5, 0.75), "eps": 0.0}]
    divisor = torch.full((), 2.0, device=device)
    try:
        swept, expected = (_example(device, kinds, decoupled) for _ in range(2))
        zero = torch.zeros((), device=device)
        OnePass(Wanted.KERNEL).update([swept], groups, decoupled=decoupled, grad_scale=divisor, found_inf=zero)
        _update_example(expected, decoupled)
        made, wanted = ([*each.tensors, each.step] for each in (swept, expected))
        is_right = all(map(torch.equal, made, wanted))
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, torch's operators remain
        _log.warning("low-precision state is updated by torch, Triton cannot compile for %s: %s", device, error)
        return f"Triton cannot compile for {device} ({error})"
    if not is_right:
        _log.warning("low-precision state is updated by torch, because Triton's is wrong on %s (%s)", device, kinds)
        return f"its state is wrong on {device} ({kinds})"
    return None


#: Values of the example, which ends inside a vector, and values of its first block that are not its own.
_EXAMPLE_NUMEL, _EXAMPLE_PHASE = 2403, 3


def _example(device: torch.device, kinds: Kinds, decoupled: bool) -> Forms:
    """A flat param of several programs; see `_update_example`."""
    numel, phase = _EXAMPLE_NUMEL, _EXAMPLE_PHASE
    names = {number: name for name, number in FORMS.items()}

    def zeros(form: int, *, is_second: bool = False, has_ties: bool = False) -> Plain | Blocks:
        return zeros_kept(numel, device, names[form], is_second=is_second, has_ties=has_ties, phase=phase)

    first = zeros(kinds.first)
    second = zeros(kinds.second, is_second=True, has_ties=names[kinds.main] == "remainder")
    main: Kept
    if names[kinds.main] == "remainder":
        rounded, low = (zeros_in_phase(numel, phase, dtype, device) for dtype in (torch.bfloat16, torch.int16))
        main = Remainder(rounded, low, second)
    else:
        main = zeros(kinds.main)
    at = torch.arange(numel, device=device)
    has_moments = at % 2 == 0
    sign = 1.0 - 2.0 * (at % 3 == 0)
    grad = sign * torch.where(has_moments, 1 + at // 2 % 2, (at * 37 % 256 // 2 * 2 + 1) / 32)
    first.write(0, numel, torch.where(has_moments, grad * (1 + at // 4 % 2 * 2), 0.0))
    second.write(0, numel, torch.where(has_moments, grad * grad, 0.0))
    values = (at * 29 % 64 - 32) / 8
    main.update(0, numel, values + at % 5 * 2.0**-12 if decoupled else values.masked_fill_(has_moments, 0.0))
    model = None
    if kinds.model:
        dtype = {number: dtype for dtype, number in MODELS.items()}[kinds.model]
        model = zeros_in_phase(numel, phase, dtype or torch.float32, device)
    divided = zeros_in_phase(numel, phase, torch.float32, device).copy_(2.0 * grad)
    return Forms(5, 0, main, first, second, divided, torch.zeros((), device=device), model)


def _update_example(forms: Forms, decoupled: bool) -> None:
    """One update in which no fp32 operation rounds, so that it does not matter how a compiler arranges them.

    The gradients have 8 bits and the other numbers are powers of two. Roots are those of squares: second moments are 0,
    or the square of the gradient, which is 1 or 2 then; if decay is added to the gradient, main params are 0 there.
    """
    numel = forms.main.numel
    x, m, v = (kept.read(0, numel) for kept in forms.kepts)
    g = forms.grad / 2
    if decoupled:
        x = x * (1 - 2.0**-5)
    else:
        g = g + x * 0.5
    m, v = m / 2 + g / 2, v * 0.75 + g * g * 0.25
    updated = (x - 2.0**-3 * (m / (v.sqrt() / 0.5)), m, v)
    forms.step.add_(1)
    for kept, values in zip(forms.kepts, updated, strict=True):
        if kept.is_read_in_place:
            kept.write(0, numel, values)
    forms.write(0, numel, *updated)
