"""Values that are not finite: where the first one is, and how many there are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.layout import Box

__all__ = ["NonFinite", "non_finite"]


@dataclass(frozen=True)
class NonFinite:
    """What a box of a tensor holds that is not finite.

    Args:
        index: of the first one in the whole tensor.
        value: inf, -inf or nan.
        count: how many there are in the box.
    """

    index: tuple[int, ...]
    value: float
    count: int


def non_finite(tensor: Tensor, box: Box) -> NonFinite | None:
    """The elements that are inf or nan; None where all are finite.

    Args:
        tensor: of any dtype and shape.
        box: that it is of the whole tensor.

    >>> non_finite(torch.tensor([[1.0, math.inf]]), Box((4, 2), (1, 2)))
    NonFinite(index=(4, 3), value=inf, count=1)
    """
    if not tensor.is_floating_point():
        return None
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # inf and nan never leave a sum again, and a sum is one pass without a copy; one that overflows is looked at again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return None
    mask = torch.isfinite(wide).logical_not_().flatten()
    count = int(mask.sum())
    if not count:
        return None
    first = int(mask.to(torch.uint8).argmax())
    inside = _unravelled(first, tensor.shape)
    index = tuple(offset + step for offset, step in zip(box.offsets, inside, strict=True))
    return NonFinite(index, wide.flatten()[first].item(), count)


def _unravelled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for numel in reversed(shape):
        flat, at = divmod(flat, numel)
        index.append(at)
    return tuple(reversed(index))
