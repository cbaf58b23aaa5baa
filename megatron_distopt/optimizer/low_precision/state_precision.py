"""In which precision main params and moments are stored: what the options say, and memory of that form.

Nothing else of the package knows the forms: a main param or a moment is a tensor of fp32 values, see [Note:
low-precision tensors] in low_precision_tensor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_distopt.config import DistOptConfig
from megatron_distopt.layout.estimate import BLOCK_NUMEL, MAIN_NBYTES, MOMENT_NBYTES, WITH_SCALES
from megatron_distopt.optimizer.low_precision.low_precision_tensor import LowPrecisionTensor, stored_of
from megatron_distopt.optimizer.low_precision.stored_values import (
    PlainValues,
    RemainderValues,
    StoredValues,
    phase_of,
    stored_zeros,
    zeros_in_phase,
)


@dataclass(frozen=True)
class Precision:
    """The forms of a state, as the options of the same names have them."""

    main_params_dtype: str = "float32"  # of the main params of 16-bit params
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"

    @classmethod
    def of(cls, config: DistOptConfig) -> Precision:
        return cls(*(getattr(config, field.name) for field in fields(cls)))

    @property
    def is_full(self) -> bool:
        """Whether all of it is plain fp32."""
        return self == FULL

    @property
    def nbytes_of_main(self) -> float:
        """Bytes an element of a main param of a 16-bit param."""
        return _with_scales(MAIN_NBYTES, self.main_params_dtype)

    @property
    def nbytes_of_moments(self) -> float:
        """Bytes an element of both moments."""
        return sum(_with_scales(MOMENT_NBYTES, form) for form in (self.exp_avg_dtype, self.exp_avg_sq_dtype))

    def main(self, model: Tensor) -> Tensor:
        """A main param that begins as its 16-bit model param, 1-D, that of the param buffer itself."""
        plain = PlainValues(model)
        if self.main_params_dtype == "remainder":
            low = zeros_in_phase(model.numel(), phase_of(plain), torch.int16, model.device)
            second = stored_zeros(plain, self.exp_avg_sq_dtype, is_second=True, has_ties=True)
            return LowPrecisionTensor(RemainderValues(model, low, second))
        if self.main_params_dtype == "bfloat16":
            return LowPrecisionTensor(plain)
        return LowPrecisionTensor(stored_zeros(plain, self.main_params_dtype)).copy_(model)

    def first(self, main: Tensor) -> Tensor:
        """A first moment of zeros for a main param."""
        return _shown(stored_zeros(stored_of(main), self.exp_avg_dtype))

    def second(self, main: Tensor) -> Tensor:
        """A second moment of zeros for a main param; it may hold bits of the main param, see [Note: remainder]."""
        stored = stored_of(main)
        if isinstance(stored, RemainderValues):
            return LowPrecisionTensor(stored.second).zero_()
        return self.second_to_fill(main)

    def second_to_fill(self, main: Tensor) -> Tensor:
        """A second moment of zeros in memory of its own, also where the one in use holds bits of the main param."""
        return _shown(stored_zeros(stored_of(main), self.exp_avg_sq_dtype, is_second=True))


#: Where no option says anything.
FULL = Precision()


def _shown(stored: StoredValues) -> Tensor:
    """A plain tensor where operators may as well use it as it is."""
    return stored.tensor if isinstance(stored, PlainValues) and not stored.has_ties else LowPrecisionTensor(stored)


def _with_scales(nbytes: Mapping[str, int], form: str) -> float:
    return nbytes[form] + (form in WITH_SCALES) / BLOCK_NUMEL
