"""Streams, events and pinned memory of a device.

They come from `torch.accelerator`, which serves any accelerator. If a release of torch does not
have them there, they come from the device's module in torch, which has the same methods. On the CPU
every call is done when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

CPU = "cpu"


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


@cache  # called for every gradient, and torch would ask the driver
def _accelerator_of(device_type: str) -> Any:
    """torch.accelerator, which exists from torch 2.6 on, if it is for this type of device; None
    otherwise."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return None
    current = accelerator.current_accelerator()
    return accelerator if current.type == device_type else None


def current_stream(device: torch.device) -> Any:
    """The stream of this thread on a device; None on the CPU, which has no streams."""
    if device.type == CPU:
        return None
    module = _accelerator_of(device.type) or _module(device)
    return module.current_stream(device)


def new_stream(device: torch.device) -> Any:
    """A stream that nothing else uses; None on a device without streams, such as the CPU."""
    if device.type == CPU:
        return None
    kind = getattr(_module(device), "Stream", None)
    return None if kind is None else kind(device=device)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Makes a stream that `new_stream` returned the current one of its device."""
    if stream is None:
        return nullcontext()
    return cast(AbstractContextManager[Any], _module(device).stream(stream))


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes the CPU wait for everything that is queued on the current
    stream now."""
    if device.type == CPU:
        return lambda: None
    return cast(Callable[[], None], current_stream(device).record_event().synchronize)


def fence(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes the stream on which it is called wait for everything that is
    queued on the current stream now."""
    if device.type == CPU:
        return lambda: None
    event = current_stream(device).record_event()
    return lambda: current_stream(device).wait_event(event)


def wait_for_streams(streams: Iterable[Any], device: torch.device) -> None:
    """Makes the current stream wait for everything that is queued on other streams of the device
    now."""
    here = current_stream(device)  # None on the CPU, as are all the others
    for stream in streams:
        if stream != here:
            here.wait_stream(stream)


def keep_for_current_stream(tensor: Tensor) -> None:
    """Tells the allocator that the current stream uses a tensor that was allocated on another one.

    Otherwise the memory would be reused as soon as the stream that allocated it is done with it.
    """
    if tensor.device.type != CPU:
        tensor.record_stream(current_stream(tensor.device))


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized CPU tensor in pinned memory, with which the device exchanges data without
    making the CPU wait."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != CPU)


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch has cached back to the device."""
    if hasattr(_module(device), "empty_cache"):
        _module(device).empty_cache()
