"""One reading of one contestant of memory.py, on all ranks at once."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from peers.ranks import exchange, failure_of_any
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting, batch

#: Steps before the one that is measured: moments and what a first step leaves behind are there
#: then.
_WARM_UP = 2


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one rank beyond what it had before the contestant was built; the rank that needed
    most."""

    contestant: str  # its name
    ranks: int  # data-parallel ranks
    numel: int  # elements of the model
    held: int = 0  # in tensors between two steps, each storage once
    step_peak: int = 0  # resident memory at its highest during a step
    build_peak: int = 0  # the same while it was built and made its first steps
    why_not: str = ""  # the reason, where it was not run


def target(ranks: int) -> float:
    """Bytes an element: param 2, grad 4, main param and two moments of the owned part.

    >>> target(4)
    9.0
    """
    return 6 + 12 / ranks


class Gauge(Protocol):
    """Counts bytes beyond those that there were when it was made."""

    def reset(self) -> None:
        """From now on counts for `most`."""

    def most(self) -> int: ...

    def held(self) -> int:
        """In tensors."""


class HostGauge:
    """Resident memory of this process, and storages of tensors that it holds."""

    def __init__(self) -> None:
        self._known, self._before = storages(), reset_peak()

    def reset(self) -> None:
        reset_peak()

    def most(self) -> int:
        return status("VmHWM") - self._before

    def held(self) -> int:
        return covered(
            (address, nbytes)
            for address, nbytes in storages().items()
            if address not in self._known
        )


def read(
    entry: TrainEntry, setting: TrainSetting, gauge: Callable[[], Gauge] = HostGauge
) -> MemoryReading:
    """Collective: builds a contestant, trains with it and drops it."""
    measured: list[MemoryReading] = []
    why_not = failure_of_any(lambda: measured.append(_measure(entry, setting, gauge())))
    gc.collect()
    if why_not:
        return MemoryReading(entry.name, setting.size, setting.numel, why_not=why_not)
    return measured[0]


def _measure(entry: TrainEntry, setting: TrainSetting, gauge: Gauge) -> MemoryReading:
    trainer = entry.build(setting)
    try:
        for step in range(_WARM_UP):
            trainer.train(batch(setting, step))
        build_peak = gauge.most()
        gauge.reset()
        trainer.train(batch(setting, _WARM_UP))
        trainer.finish()
        step_peak, held = gauge.most(), gauge.held()
    finally:
        trainer.close()
    most = (max(exchange(nbytes)) for nbytes in (held, step_peak, build_peak))
    return MemoryReading(entry.name, setting.size, setting.numel, *most)


def covered(storages: Iterable[tuple[int, int]]) -> int:
    """Bytes that lie in at least one storage: one of a param may be a part of that of its buffer.

    Args:
        storages: first address and bytes of each.

    >>> covered([(100, 50), (120, 10), (140, 20), (300, 5)])
    65
    """
    total, end = 0, 0
    for address, nbytes in sorted(storages):
        total += max(address + nbytes - max(address, end), 0)
        end = max(end, address + nbytes)
    return total


def storages() -> dict[int, int]:
    gc.collect()
    found = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in _PLAIN]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


#: A subclass (FSDP2's DTensor) is a wrapper; what it wraps is one of these.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def reset_peak() -> int:
    """Resident memory once all that is free was given back, from which the high-water mark now
    counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
