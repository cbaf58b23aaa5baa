"""The options of Muon in a param group, for two formulas: torch's and megatron-core's.

The formulas differ in when they round. torch rounds a direction to bfloat16 and then divides it by
its norm; megatron-core first divides in fp32. So a direction is sent between ranks in the dtype in
which its formula divides it. Each step of megatron-core's iteration has its own coefficients.

Source: `torch.optim.Muon` of torch 2.13; `TensorParallelMuon` of megatron-core 0.19 with
`OrthogonalizedOptimizer` and `newton_schulz` of the package emerging_optimizers (August 2026).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import chain, cycle, islice, repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_distopt.errors import ConfigError

#: a, b and c of the polynomial a X + b X X'X + c X X'X X'X.
Coefficients = tuple[float, float, float]

_COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
_MOST_STEPS = 99
_LR_RATIOS: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}
#: Every param group of Muon has the first key, and only those with megatron-core's formula have the
#: second.
_MARK, _MEGATRONS_MARK = "ns_steps", "coefficient_type"


@dataclass(frozen=True)
class _SharedOptions:
    """The options of both formulas."""

    lr: float | Tensor = 1e-3  # a tensor with one element stays a tensor
    weight_decay: float = 0.1  # decoupled
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5  # steps of the iteration

    def __post_init__(self) -> None:
        if isinstance(self.lr, Tensor) and self.lr.numel() != 1:
            raise _refused("lr", f"a tensor of {self.lr.numel()} elements", "have one element")
        for name in ("lr", "weight_decay", "momentum"):
            if not getattr(self, name) >= 0:  # true for nan, too
                raise _refused(name, getattr(self, name), "be at least 0")
        if not 0 <= self.ns_steps <= _MOST_STEPS:
            raise _refused("ns_steps", self.ns_steps, f"be from 0 to {_MOST_STEPS}")

    @property
    def _lr(self) -> Any:
        return self.lr.squeeze() if isinstance(self.lr, Tensor) else self.lr


def is_muons_group(group: Mapping[str, Any]) -> bool:
    """Whether a param group has the options of Muon."""
    return _MARK in group


def _refused(name: str, got: object, rule: str) -> ConfigError:
    return ConfigError(f"Option {name} of Muon is {got}. It must {rule}.")


@dataclass(frozen=True)
class TorchMuonOptions(_SharedOptions):
    """torch's formula, with the names and defaults of `torch.optim.Muon`.

    Raises:
        ConfigError: if an option has a value that cannot work.

    >>> TorchMuonOptions().factor((8, 2))
    2.0
    >>> TorchMuonOptions(adjust_lr_fn="match_rms_adamw").factor((25, 4))
    1.0
    """

    ns_coefficients: Coefficients = _COEFFICIENTS  # a, b and c of the iteration
    eps: float = 1e-7  # the smallest norm by which a matrix is divided
    #: The factor of the learning rate. "original" or None: sqrt(max(1, rows / columns)).
    #: "match_rms_adamw": 0.2 sqrt(max(rows, columns)), which makes an update as large as one of
    #: AdamW (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
    adjust_lr_fn: str | None = None

    source: ClassVar[str] = "torch_muon"  # its name in messages
    #: The dtype in which a direction is divided by its norm and sent between ranks.
    travel_dtype: ClassVar[torch.dtype] = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.ns_coefficients) != 3:
            raise _refused("ns_coefficients", self.ns_coefficients, "be three numbers")
        if self.adjust_lr_fn is not None and self.adjust_lr_fn not in _LR_RATIOS:
            raise _refused(
                "adjust_lr_fn",
                repr(self.adjust_lr_fn),
                f"be one of {', '.join(_LR_RATIOS)}, or None",
            )

    @property
    def coefficients(self) -> Sequence[Coefficients]:
        """The coefficients of every step of the iteration."""
        return (self.ns_coefficients,) * self.ns_steps

    def norm_of(self, matrix: Tensor) -> Tensor:
        """The Frobenius norm in bfloat16, as a tensor with one element."""
        norm: Tensor = matrix.norm()
        return norm

    def normalized(self, matrix: Tensor, norm: Tensor) -> Tensor:
        """Divides a matrix in place, for the iteration. `norm` is the norm of the whole matrix, of
        which this may be a part."""
        return matrix.div_(norm.to(matrix.dtype).clamp(min=self.eps))

    def matmuls(self) -> AbstractContextManager[None]:
        """The context in which the products of the iteration are computed."""
        return nullcontext()

    def factor(self, shape: tuple[int, int]) -> float:
        """The factor of an update besides the learning rate, for a matrix with these rows and
        columns."""
        return _LR_RATIOS[self.adjust_lr_fn or "original"](*shape)

    def decay(self, main: Tensor) -> None:
        main.mul_(1 - self._lr * self.weight_decay)

    def add(self, update: Tensor, target: Tensor, shape: tuple[int, int]) -> None:
        """Adds the update of a matrix of `shape` to main params, in place."""
        target.add_(update, alpha=-(self._lr * self.factor(shape)))


#: The coefficients of megatron-core, by step. From Jordan et al. ("simple"); modded-nanogpt
#: ("quintic");
#: Amsel et al., arXiv:2505.16932 ("polar_express"); flash-newton-schulz ("aol"); DeepSeek-V4
#: ("deepseekv4").
_SETS: Mapping[str, Sequence[Coefficients]] = {
    "simple": (_COEFFICIENTS,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": (*(_COEFFICIENTS,) * 8, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)),
}
#: These repeat the last coefficients in further steps; the others begin again with the first.
_REPEAT_LAST = ("polar_express", "deepseekv4")
_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "shape_scaling": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
}
#: With the first one the products are computed in bfloat16. With the others they are fp32, as for
#: torch.set_float32_matmul_precision.
_PRECISIONS = ("medium", "high", "highest")
#: The smallest norm by which a matrix is divided.
_LEAST_NORM = 1e-15


@dataclass(frozen=True)
class MegatronMuonOptions(_SharedOptions):
    """megatron-core's formula.

    Raises:
        ConfigError: if an option has a value that cannot work.

    >>> MegatronMuonOptions(scale_mode="unit_rms_norm", extra_scale_factor=0.5).factor((9, 1))
    1.5
    """

    coefficient_type: str = "quintic"  # the coefficients of the iteration, see `_SETS`
    scale_mode: str = "spectral"  # how an update depends on the shape, see `_SCALES`
    extra_scale_factor: float = 1.0  # a further factor of an update
    matmul_precision: str = _PRECISIONS[0]  # the precision of the products

    source: ClassVar[str] = "megatron_muon"
    travel_dtype: ClassVar[torch.dtype] = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            (_MEGATRONS_MARK, _SETS),
            ("scale_mode", _SCALES),
            ("matmul_precision", _PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise _refused(name, repr(getattr(self, name)), f"be one of {', '.join(known)}")
        if self.ns_steps < 1:
            raise _refused("ns_steps", self.ns_steps, "be at least 1")

    @property
    def coefficients(self) -> Sequence[Coefficients]:
        """The coefficients of every step, which differ from step to step.

        >>> MegatronMuonOptions(coefficient_type="aol", ns_steps=5).coefficients[4]
        (4.0098, -7.0585, 2.4635)
        """
        sets = _SETS[self.coefficient_type]
        is_last_repeated = self.coefficient_type in _REPEAT_LAST
        every = chain(sets, repeat(sets[-1])) if is_last_repeated else cycle(sets)
        return tuple(islice(every, self.ns_steps))

    def norm_of(self, matrix: Tensor) -> Tensor:
        """The Frobenius norm in fp32."""
        norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
        return norm

    def normalized(self, matrix: Tensor, norm: Tensor) -> Tensor:
        """The matrix divided in fp32, and rounded to bfloat16 if the products are bfloat16."""
        divided = matrix / norm.clamp(min=_LEAST_NORM)
        return divided.to(torch.bfloat16) if self.matmul_precision == _PRECISIONS[0] else divided

    @contextmanager
    def matmuls(self) -> Iterator[None]:
        """Computes products of fp32 matrices with `matmul_precision`, whatever the user has set."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul_precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def factor(self, shape: tuple[int, int]) -> float:
        return _SCALES[self.scale_mode](*shape) * self.extra_scale_factor

    def decay(self, main: Tensor) -> None:
        if self.weight_decay:
            main.add_(main, alpha=-self.weight_decay * self._lr)

    def add(self, update: Tensor, target: Tensor, shape: tuple[int, int]) -> None:
        """Adds the update of a matrix, rounding after each factor. Overwrites the update."""
        update.mul_(_SCALES[self.scale_mode](*shape)).mul_(self.extra_scale_factor)
        target.add_(update, alpha=-self._lr)


MuonOptions = TorchMuonOptions | MegatronMuonOptions


def formula_of(group: Mapping[str, Any]) -> type[TorchMuonOptions] | type[MegatronMuonOptions]:
    """The class of the options in a param group of Muon."""
    return MegatronMuonOptions if _MEGATRONS_MARK in group else TorchMuonOptions


def options_of(group: Mapping[str, Any]) -> MuonOptions:
    """The options of Muon in a param group, which may have other keys as well.

    Raises:
        ConfigError: if an option has a value that cannot work.
    """
    formula = formula_of(group)
    return formula(**{each.name: group[each.name] for each in fields(formula)})
