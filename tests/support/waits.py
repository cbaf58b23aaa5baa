"""What the CPU does in a block: which operations make it wait for the device (found on the CPU too,
where reading a tensor is no wait), and how many functions it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt.optimizer.deferred import HostCopy

#: Operations whose value, or the shape of whose result, the CPU has to know.
_WAIT = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
}
_WAIT |= {"masked_select", "nonzero", "unique_consecutive", "unique_dim"}
#: Operations that wait where they are given a mask: torch looks for what is set in it.
_PUT = ("index_put", "index_put_", "_index_put_impl_")
#: Methods that read a tensor of the CPU without an operation.
_UNSEEN = ("tolist", "numpy", "__array__")


@contextmanager
def find_waits() -> Iterator[list[str]]:
    """Names of operations as torch's dispatcher has them, in their order; filled while the context
    is open.

    What was copied to the CPU and waited for before (`HostCopy`) may be read.
    """
    waits: list[str] = []
    values = HostCopy.__dict__["values"].func

    def read(copy: HostCopy) -> list[float]:
        before = list(waits)
        numbers: list[float] = values(copy)
        waits[:] = before
        return numbers

    with mock.patch.object(HostCopy, "values", property(read)), _Operations(waits), _Methods(waits):
        yield waits


class _Operations(TorchDispatchMode):
    """Notes operations that wait for the device."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and _waits(name, args, kwargs or {}):
            self._waits.append(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Notes methods that read a tensor and are no operations."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # elsewhere an operation copies it first, which is seen
        if name in _UNSEEN and args[0].device.type == "cpu":
            self._waits.append(name)
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "index" or name in _PUT:
        indices = [index for index in args[1] if index is not None]
        adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
        # Filling one mask with a value of the CPU is a `masked_fill`, which does not wait.
        is_filled = (
            name in _PUT
            and len(indices) == 1
            and args[2].numel() == 1
            and args[2].device.type == "cpu"
        )
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices) and (
            adds or not is_filled
        )
    if name in ("copy_", "_to_copy"):
        source = args[1] if name == "copy_" else args[0]
        target = (
            args[0].device
            if name == "copy_"
            else torch.device(kwargs.get("device") or source.device)
        )
        non_blocking = kwargs.get("non_blocking", False) or (
            name == "copy_" and len(args) > 2 and args[2]
        )
        return (
            not non_blocking
            and isinstance(source, Tensor)
            and source.device.type != "cpu"
            and target.type == "cpu"
        )
    return name in _WAIT


def num_calls_of(act: Callable[[], object]) -> int:
    """How many functions of Python and of C it calls, a generator each time it goes on: a measure
    of work that no other process disturbs."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls
