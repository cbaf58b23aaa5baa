"""Finds where a step makes the CPU wait for the device.

[Note: no host synchronisation] A CPU that waits for a number from the device leaves the device without work until it
has read the number and launched more. Without a dynamic loss scale a steady step (any but the first) has no need to
wait, see [Note: deferred check] in deferred.py. On a CPU alone reading a tensor is no synchronisation; the
check treats it as one all the same, so that it shows on any machine what would be one on an accelerator.

>>> import torch
>>> with find_synchronisations() as found:
...     _ = torch.ones(3).sum().item()
>>> found
['_local_scalar_dense']
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt.device import CPU
from megatron_distopt.errors import InvariantError, refusal
from megatron_distopt.optimizer.accelerator import refusing_synchronisation

#: Operations whose value, or the shape of whose result, the CPU has to know.
_WAIT = (
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
)
#: Operations that wait where they are given a mask: torch looks for what is set in it.
_TAKE, _PUT = ("index",), ("index_put", "index_put_", "_index_put_impl_")
_MASKS = (torch.bool, torch.uint8)
#: Waits unless it is told how long its result is.
_REPEAT = "repeat_interleave"
#: Methods that read a tensor of the CPU without an operation.
_UNSEEN = ("tolist", "numpy", "__array__")

_here = threading.local()


@contextmanager
def arrived() -> Iterator[None]:
    """Within it, numbers may be read: they were copied to the CPU and waited for before."""
    before = getattr(_here, "reads_a_copy", False)
    _here.reads_a_copy = True
    try:
        yield
    finally:
        _here.reads_a_copy = before


@contextmanager
def find_synchronisations() -> Iterator[list[str]]:
    """Lists the operations that make the CPU wait for the device; of this thread alone.

    Returns:
        Names of operations as torch's dispatcher has them, in their order; filled while the context is open.
    """
    found: list[str] = []
    with _Operations(found.append), _Methods(found.append):
        yield found


@contextmanager
def forbid_synchronisations(device: torch.device) -> Iterator[None]:
    """Raises at the first operation that makes the CPU wait for the device.

    Args:
        device: of the params; on one of NVIDIA's its own library watches, too.

    Raises:
        InvariantError: it names the operation; the traceback says where it is.
    """
    with refusing_synchronisation(device), _Operations(_refuse), _Methods(_refuse):
        yield


def _refuse(operation: str) -> None:
    remedy = "Read it after the step, or train with a constant loss scale and adam='torch_fused'"
    raise InvariantError(refusal("host synchronisation", operation, "not happen in a steady step", remedy))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Reports operations that wait for the device."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        is_torchs = func.namespace == "aten"  # what others call by these names may be anything
        if is_torchs and not getattr(_here, "reads_a_copy", False) and _waits(name, args, given):
            self._report(name)
        return func(*args, **given)


class _Methods(TorchFunctionMode):
    """Reports methods that read a tensor and are no operations."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # A tensor of a device is copied for it by an operation that is seen.
        if name in _UNSEEN and args[0].device.type == CPU and not getattr(_here, "reads_a_copy", False):
            self._report(name)
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == _REPEAT:
        return kwargs.get("output_size") is None
    return name in _WAIT or _looks_through_mask(name, args, kwargs) or _copies_to_cpu(name, args, kwargs)


def _looks_through_mask(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it indexes with a mask. Filling one mask with a value of the CPU is a `masked_fill`: no wait."""
    if name not in _TAKE + _PUT:
        return False
    indices = [each for each in args[1] if each is not None]
    is_filled = name in _PUT and len(indices) == 1 and args[2].numel() == 1 and args[2].device.type == CPU
    adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return any(each.dtype in _MASKS for each in indices) and (adds or not is_filled)


def _copies_to_cpu(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a copy from a device that is waited for."""
    non_blocking = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
    if non_blocking or name not in ("copy_", "_to_copy"):
        return False
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    return isinstance(source, Tensor) and source.device.type != CPU and target.type == CPU
