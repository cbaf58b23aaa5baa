"""How many bytes of new tensors are alive at a time, in the memory of the CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators of torch allocate inside a `with` block, and those that
    are freed there.

    Attributes:
        now: bytes that are alive.
        most: of `now` at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(each) for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if torch.is_tensor(each) and _key(each) not in given | self._known:
                self._add(each.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
