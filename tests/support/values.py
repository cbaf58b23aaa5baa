"""Values of ranks and of runs: brought to all ranks, and compared to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def from_ranks(value: object) -> list[Any]:
    """Collective: the value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Collective: the value of rank 0."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def same(left: Any, right: Any) -> bool:
    """Bit for bit and type for type, through containers."""
    if torch.is_tensor(left):
        return torch.is_tensor(right) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(
            same(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)
