"""The devices of this machine and the software that matters, and what is asked of a device,
whatever its name.

python -m gpu_check.machine DEVICE FILE     in a process of its own, because asking a device starts
it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.machine import processor, version_of

CPU = "cpu"
#: MODULE or MODULE:FUNCTION that registers a device with torch; those of vendors torch imports by
#: itself.
_BACKEND_VARIABLE = "GPU_CHECK_IMPORT"
_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "apex": "apex",
    "transformer_engine": "transformer_engine",
    "deepspeed": "deepspeed",
    "megatron.core": "megatron-core",
}
#: Of what torch says about its build.
_NOT_OF_INTEREST = ("git_version", "debug")
#: Ranks on a CPU; one on each device of an accelerator.
CPU_RANKS = 2


class DeviceError(ValueError):
    """The device that was asked for is not there; the message says what to type."""


@dataclass(frozen=True)
class Machine:
    """One machine."""

    device: str  # its type, as in `torch.device(...).type`
    names: tuple[str, ...]  # of the devices of that type; of the processor for a CPU
    count: int  # ranks that can run at once
    # free on the device that has least; all that it has where torch says no more, 0 for unknown
    memory_nbytes: int
    backend: str  # of torch.distributed, as torch chooses it for the device
    host: str  # operating system, processor, cores
    python: str  # its version
    versions: Mapping[str, str]  # of packages, "not installed" where one is not there
    # what torch was built for, such as the vendor's libraries, and the version of the collectives
    built_for: str = ""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Machine:
        """From what `dataclasses.asdict` made of one."""
        return cls(**{**found, "names": tuple(found["names"])})

    @property
    def name(self) -> str:
        """Devices in a few words, such as "8 x NVIDIA H100"."""
        kinds = dict.fromkeys(self.names)
        counts = {kind: self.names.count(kind) for kind in kinds}
        return ", ".join(
            f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items()
        )


def device_type_of(choice: str) -> str:
    """The type of the device that `--device` means.

    Raises:
        DeviceError: it is not there.
    """
    if not hasattr(torch, "accelerator"):
        raise DeviceError(
            f"Invalid torch: {torch.__version__}. Must be 2.6 or newer. Update it, or use another "
            "torch."
        )
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = [current.type] if current else []
    if choice == "auto":
        if not there:
            raise DeviceError(
                f"Invalid --device: auto, but torch {torch.__version__} finds no accelerator. Must "
                "find one. Install the torch of your device's vendor, name its Python (PYTHON=... "
                "scripts/gpu_check.sh), or write --device cpu."
            )
        return there[0]
    if choice not in (CPU, *there):
        known = " or ".join(["auto", CPU, *there] if there else [CPU])
        found = there[0] if there else "no accelerator"
        raise DeviceError(
            f"Invalid --device: {choice!r}, and torch {torch.__version__} finds {found}. "
            f"Must be a device that is there. Write --device {known}."
        )
    return choice


def look(choice: str) -> Machine:
    """Asks torch and the operating system.

    Raises:
        DeviceError: the device is not there.
    """
    device = device_type_of(choice)
    count = CPU_RANKS if device == CPU else torch.accelerator.device_count()
    backend = dist.get_default_backend_for_device(device) if dist.is_available() else "none"
    if device == CPU:
        names: tuple[str, ...] = (processor(),)
    else:
        ids = [torch.device(device, index) for index in range(count)]
        names = tuple(_asked("get_device_name", each, each.index) or str(each) for each in ids)
    memory, python = _memory(device, count), platform.python_version()
    versions = {name: version_of(name, module) for module, name in _PACKAGES.items()}
    host = f"{platform.system()} {platform.release()}, {processor()}, {os.cpu_count()} cores"
    return Machine(
        device, names, count, memory, backend, host, python, versions, _built_for(device)
    )


def rank_counts(count: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all.

    >>> rank_counts(6)
    (1, 2, 4, 6)
    """
    powers = [2**power for power in range(count.bit_length()) if 2**power < count]
    return (*powers, count)


def _memory(device: str, count: int) -> int:
    if device == CPU:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min((_free(torch.device(device, index)) for index in range(count)), default=0)


def _free(device: torch.device) -> int:
    """All that it has before torch 2.9, which counts memory for all devices; 0 where nobody
    says."""
    info = _asked("get_memory_info", device, device.index)
    return (
        int(info[0])
        if info
        else getattr(_asked("get_device_properties", device, device.index), "total_memory", 0)
    )


def _built_for(device: str) -> str:
    said = {name: value for name, value in vars(torch.version).items() if isinstance(value, str)}
    found = [
        f"{name} {value}"
        for name, value in said.items()
        if name not in _NOT_OF_INTEREST and name[0] != "_"
    ]
    library = getattr(getattr(torch, device, None), "nccl", None)
    if library is not None:
        found.append(f"nccl {'.'.join(map(str, library.version()))}")
    return ", ".join(found)


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
    """How long one call takes: by two events of the device where it has them, else by the host's
    clock.

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
    """What a function of `torch.accelerator` answers, which has those about memory from torch 2.9
    on, or of the module of the device. None where neither has it or can answer."""
    for module in (torch.accelerator, getattr(torch, device.type, None)):
        function = getattr(module, name, None)
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError, TypeError):
            if function is not None:
                return function(*args)
    return None


def memory_now(device: torch.device) -> int | None:
    """Bytes of tensors on the device; None where it does not say."""
    nbytes: int | None = _asked("memory_allocated", device, device)
    return nbytes


def most_memory(device: torch.device) -> int | None:
    """The most bytes of tensors at any time since `reset_most_memory`; None where the device does
    not say."""
    nbytes: int | None = _asked("max_memory_allocated", device, device)
    return nbytes


def reset_most_memory(device: torch.device) -> None:
    _asked("reset_peak_memory_stats", device, device)


def empty_cache(device: torch.device) -> None:
    """Gives unused memory back to the device."""
    if device.type != CPU:
        _asked("empty_cache", device)


def main() -> None:
    choice, path = sys.argv[1:]
    import_backend()
    try:
        answer: dict[str, Any] = {"machine": asdict(look(choice))}
    except DeviceError as error:
        answer = {"error": str(error)}
    Path(path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
