"""Tensors of a checkpoint without their values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatron_distopt.checkpoint.manifest import MAIN, kind_of, name_of
from megatron_distopt.checkpoint.source import TensorInfo

__all__ = ["kinds_by_name", "nbytes_of"]


def nbytes_of(info: TensorInfo) -> int:
    """Of its values.

    >>> nbytes_of(TensorInfo((3, 2), "bfloat16"))
    12
    """
    return math.prod(info.shape) * torch.empty(0, dtype=getattr(torch, info.dtype)).element_size()


def kinds_by_name(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """For every param its tensors by kind: its values first, the others by the alphabet."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for key in sorted(tensors, key=lambda key: (kind_of(key) != MAIN, key)):
        found.setdefault(name_of(key), {})[kind_of(key)] = tensors[key]
    return found
