"""What the kit asks of a device, whatever its name: through `torch.accelerator`, and by the host's clock on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "CPU",
    "empty_cache",
    "import_backend",
    "memory_now",
    "most_memory",
    "reset_most_memory",
    "seconds_of",
    "synchronize",
    "use",
]

CPU = "cpu"
#: MODULE or MODULE:FUNCTION that registers a device with torch; those of vendors torch imports by itself.
_BACKEND_VARIABLE = "GPU_CHECK_IMPORT"


def import_backend() -> None:
    """Registers the device with torch, where the environment names who does that."""
    module, _, function = os.environ.get(_BACKEND_VARIABLE, "").partition(":")
    if module:
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()


def use(device: torch.device) -> None:
    """Makes it the current device of this process."""
    if device.type != CPU:
        torch.accelerator.set_device_index(device.index or 0)


def synchronize(device: torch.device) -> None:
    """Waits until all that was queued on it is done."""
    if device.type != CPU:
        torch.accelerator.synchronize(device)


def seconds_of(device: torch.device, act: Callable[[], object], times: int = 1) -> float:
    """How long one call takes: by two events of the device where it has them, else by the host's clock.

    Args:
        device: that carries it out.
        act: queues work on the current stream.
        times: calls between two readings of the clock.
    """
    events = _events(device)
    synchronize(device)
    begin = time.perf_counter()
    if events:
        events[0].record()
    for _ in range(times):
        act()
    if events:
        events[1].record()
    synchronize(device)
    if events:
        return float(events[0].elapsed_time(events[1])) / 1e3 / times
    return (time.perf_counter() - begin) / times


def _events(device: torch.device) -> tuple[Any, Any] | None:
    """Two events that keep time; None where the device has none."""
    if device.type == CPU:
        return None
    try:
        pair = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        for event in pair:
            event.record()
        synchronize(device)
        pair[0].elapsed_time(pair[1])
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return pair


def _asked(name: str, device: torch.device, *args: Any) -> Any:
    """What a function about memory answers: of `torch.accelerator`, which has them from torch 2.9 on, or of the module
    of the device. None where neither has it or can answer."""
    for module in (torch.accelerator, getattr(torch, device.type, None)):
        function = getattr(module, name, None)
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
            if function is not None:
                return function(*args)
    return None


def memory_now(device: torch.device) -> int | None:
    """Bytes of tensors on the device; None where it does not say."""
    nbytes: int | None = _asked("memory_allocated", device, device)
    return nbytes


def most_memory(device: torch.device) -> int | None:
    """The most bytes of tensors at any time since `reset_most_memory`; None where the device does not say."""
    nbytes: int | None = _asked("max_memory_allocated", device, device)
    return nbytes


def reset_most_memory(device: torch.device) -> None:
    _asked("reset_peak_memory_stats", device, device)


def empty_cache(device: torch.device) -> None:
    """Gives unused memory back to the device."""
    if device.type != CPU:
        _asked("empty_cache", device)
