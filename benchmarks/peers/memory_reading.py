"""One reading of one contestant of memory.py, on all ranks at once."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.ranks import exchange
from peers.report import failure
from peers.trainers import TrainEntry, Trainer
from peers.transformer import TrainSetting, batch

#: Steps before the one that is measured: moments and what a first step leaves behind are there then.
_WARM_UP = 2


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one rank beyond what it had before the contestant was built; the rank that needed most."""

    contestant: str  # its name
    ranks: int  # data-parallel ranks
    numel: int  # elements of the model
    held: int = 0  # in tensors between two steps, each storage once
    step_peak: int = 0  # resident memory at its highest during a step
    build_peak: int = 0  # the same while it was built and made its first steps
    why_not: str = ""  # the reason, where it was not run


def read(entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    """Collective: builds a contestant, trains with it and drops it."""
    measured: list[MemoryReading] = []
    texts = exchange(failure(lambda: measured.append(_measure(entry, setting))))
    gc.collect()
    why_not = next((text for text in texts if text), "")
    if why_not:
        return MemoryReading(entry.name, setting.size, setting.numel, why_not=why_not)
    return measured[0]


def _measure(entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    known, before = storages(), reset_peak()
    trainer = entry.build(setting)
    try:
        for step in range(_WARM_UP):
            trainer.train(batch(setting, step))
        build_peak = status("VmHWM") - before
        step_peak = _peak_of_step(trainer, setting) - before
        held = covered((address, nbytes) for address, nbytes in storages().items() if address not in known)
    finally:
        trainer.close()
    most = (max(exchange(nbytes)) for nbytes in (held, step_peak, build_peak))
    return MemoryReading(entry.name, setting.size, setting.numel, *most)


def _peak_of_step(trainer: Trainer, setting: TrainSetting) -> int:
    reset_peak()
    trainer.train(batch(setting, _WARM_UP))
    trainer.finish()
    return status("VmHWM")


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
    """Resident memory once all that is free was given back, from which the high-water mark now counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
