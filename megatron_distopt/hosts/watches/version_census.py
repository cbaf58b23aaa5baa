"""Finds the tensors that were changed since their versions were noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor


class _Counted(NamedTuple):
    tensor: ReferenceType[Tensor]
    version: int


class VersionCensus:
    """Notes the versions of named tensors, which torch counts up at each in-place operation.

    torch's norms change their running statistics without counting a version.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._counted = {
            name: _Counted(ref(tensor), tensor._version) for name, tensor in tensors.items()
        }

    def changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of tensors that are gone, are another tensor now, or were written to."""
        gone = [name for name in self._counted if name not in tensors]
        return gone + [name for name, tensor in tensors.items() if self._has_changed(name, tensor)]

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        counted = self._counted.get(name)
        if counted is None or counted.tensor() is not tensor:
            return True
        return tensor._version != counted.version
