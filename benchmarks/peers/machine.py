"""The machine that a benchmark ran on, and how fast its memory is while it runs."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

_PACKAGES = ("torch", "megatron-core", "deepspeed", "megatron-distopt", "numpy")
#: Of a tensor: more than any cache holds, so that a larger one is no slower.
_MOST_NBYTES = 1 << 28


@dataclass(frozen=True)
class MemoryRates:
    """Bytes read and written a second."""

    copy: float  # of one tensor to another
    in_place: float  # of a product written where its factor was, which most of a step resembles

    def or_faster(self, other: MemoryRates) -> MemoryRates:
        """Of each the larger: what slowed one of two readings down is no property of the memory."""
        return MemoryRates(max(self.copy, other.copy), max(self.in_place, other.in_place))


def about(load_before: tuple[float, float, float], seconds: float) -> dict[str, object]:
    """Hardware, versions, command, and how busy the machine was."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "kernel": platform.release(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in _PACKAGES},
        },
        "load_before": [round(value, 2) for value in load_before],
        "load_after": [round(value, 2) for value in os.getloadavg()],
        "seconds": round(seconds, 1),
    }


def version_of(package: str, module: str = "") -> str:
    """Of an installed package; a module that is there without one is just installed."""
    with contextlib.suppress(PackageNotFoundError):
        return torch.__version__ if package == "torch" else version(package)
    with contextlib.suppress(ModuleNotFoundError):  # its parent is not there
        return "installed" if module and find_spec(module) else "not installed"
    return "not installed"


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def available_nbytes() -> int:
    """Host memory that can be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def memory_rates(nbytes: int, repeats: int = 5) -> MemoryRates:
    """By one thread; of each the fastest repeat counts.

    Args:
        nbytes: read and written in one go by a copy, together; a tensor of more than 256 MiB is cut
            off there.
        repeats: of each.
    """
    numel = min(nbytes // 2, _MOST_NBYTES) // 4
    source, target = torch.ones(numel), torch.zeros(numel)
    moved = 2 * 4 * numel
    copy = min(seconds_of(lambda: target.copy_(source)) for _ in range(repeats))
    in_place = min(seconds_of(lambda: target.mul_(1.5)) for _ in range(repeats))
    return MemoryRates(moved / copy, moved / in_place)


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
