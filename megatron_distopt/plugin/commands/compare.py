"""Two tensors: how many elements differ, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Difference", "compare"]

#: Elements that are compared at once: what that needs beside the tensors is small.
_AT_ONCE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """What two tensors of one shape differ in.

    Args:
        count: elements whose bits differ, or whose values do where the dtypes differ.
        numel: elements compared.
        largest: absolute difference; nan where a nan is among them.
        magnitude: largest absolute value of the first; 0 where nothing differs, because nobody looked.
    """

    count: int
    numel: int
    largest: float
    magnitude: float

    @property
    def relative(self) -> float:
        """The largest difference against the largest value."""
        if not self.largest:
            return 0.0
        return self.largest / self.magnitude if self.magnitude else math.inf


def compare(first: Tensor, second: Tensor) -> Difference:
    """
    Args:
        first, second: of one shape, on the CPU.

    >>> compare(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    Difference(count=1, numel=2, largest=1.0, magnitude=4.0)
    """
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return Difference(0, first.numel(), 0.0, 0.0)
    count, largest, magnitude = 0, 0.0, 0.0
    flat = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.numel(), _AT_ONCE):
        ours, theirs = (each[start : start + _AT_ONCE] for each in flat)
        wide = ours.double()
        magnitude = max(magnitude, wide.nan_to_num(0.0).abs().max().item())
        differs = _bits(ours) != _bits(theirs) if ours.dtype == theirs.dtype else wide != theirs.double()
        if differs.any():
            count += int(differs.sum())
            apart = (wide[differs] - theirs[differs].double()).abs().max().item()
            largest = apart if math.isnan(apart) else largest if math.isnan(largest) else max(largest, apart)
    return Difference(count, first.numel(), largest, magnitude)


def _bits(tensor: Tensor) -> Tensor:
    """As integers: equal ones are equal to the bit, nan and minus zero too."""
    return tensor.view(_BITS[tensor.element_size()])
