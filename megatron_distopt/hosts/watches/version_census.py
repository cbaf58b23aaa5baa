"""Which tensors have changed since they were counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor


class _Counted(NamedTuple):
    tensor: ReferenceType[Tensor]
    version: int


class VersionCensus:
    """Counts the operations in place on tensors (`_version`), each of which has a name.

    The kernels of torch's norms change running statistics without being counted.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._counted = {
            name: _Counted(ref(tensor), tensor._version) for name, tensor in tensors.items()
        }

    def changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of those that are gone, that are another tensor now, or that were written to."""
        gone = [name for name in self._counted if name not in tensors]
        return gone + [name for name, tensor in tensors.items() if self._has_changed(name, tensor)]

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        counted = self._counted.get(name)
        if counted is None or counted.tensor() is not tensor:
            return True
        return tensor._version != counted.version
