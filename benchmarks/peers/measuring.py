"""One reading of one contestant: seconds, memory and bytes of a save and a load, on all ranks at once.

How each figure is read is said in benchmarks/README.md; whoever changes it here changes it there.
"""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from peers.contestant import Contestant, Entry
from peers.machine import available_nbytes
from peers.memory_reading import reset_peak, status
from peers.ranks import exchange, now
from peers.report import failure
from peers.state import Setting, checksum

#: Left to the page cache, to Python and to the libraries when it is decided what fits.
_RESERVE_NBYTES = 2 << 30
#: Of an element in the largest file, with room to spare: what a save takes from free memory.
_FILE_NBYTES = 20


@dataclass(frozen=True)
class CheckpointReading:
    """What one contestant took. None where it was not run; `why_not` says why."""

    contestant: str  # its name
    numel: int  # elements of the model
    ranks: int  # data-parallel ranks
    round: int  # repeats are rounds over all contestants
    # Until the call has returned on all ranks; in the background the stall, in the steady state.
    save_seconds: float | None = None
    first_save_seconds: float | None = None  # the same of the first save, where there are two
    disk_seconds: float | None = None  # until all files are on the disk, counted from the same moment
    load_seconds: float | None = None  # until the call has returned on all ranks
    # Of processor time until all files are on the disk, of all ranks and what they started; of the last save.
    save_cpu_seconds: float | None = None
    load_cpu_seconds: float | None = None  # the same of the load
    save_nbytes: int | None = None  # host memory beyond that of the state, at its peak, on the rank that needed most
    load_nbytes: int | None = None  # the same for the load
    total_save_nbytes: int | None = None  # the same, the peaks of all ranks added up
    disk_nbytes: int | None = None  # of all files
    why_not: str = ""  # the reason, where a part was not run


@dataclass(frozen=True)
class _Saved:
    seconds: list[float]
    disk_seconds: float
    cpu_seconds: float
    nbytes: list[int]
    folder: Path


def read(entry: Entry, setting: Setting, folder: Path, number: int) -> CheckpointReading:
    """Collective: builds a contestant, saves, loads, checks and drops it.

    Args:
        entry: of the contestant.
        setting: what to build.
        folder: where to write; it is empty again afterwards.
        number: of the round.
    """
    about: dict[str, Any] = {"contestant": entry.name, "numel": setting.numel}
    about |= {"ranks": setting.size, "round": number}
    needed = entry.memory(setting.numel, setting.size)
    free = exchange(available_nbytes())[0] - _RESERVE_NBYTES
    if needed.save > free:
        return CheckpointReading(**about, why_not=f"not run: {_needs(needed.save, free)}")
    contestant = entry.build(setting)
    try:
        before = exchange(checksum(contestant.tensors()))
        saved = _save(contestant, folder, setting.numel)
        about |= {
            "save_seconds": saved.seconds[-1],
            "first_save_seconds": saved.seconds[0] if len(saved.seconds) > 1 else None,
            "disk_seconds": saved.disk_seconds,
            "save_cpu_seconds": saved.cpu_seconds,
            "save_nbytes": max(saved.nbytes),
            "total_save_nbytes": sum(saved.nbytes),
            "disk_nbytes": sum(path.stat().st_size for path in _files(saved.folder)),
        }
        if needed.load > free:
            return CheckpointReading(**about, why_not=f"load not run: {_needs(needed.load, free)}")
        return _load(contestant, saved.folder, before, about)
    finally:
        contestant.close()
        reset_peak()  # gives back what the C library keeps for later
        _remove(folder)


def _save(contestant: Contestant, folder: Path, numel: int) -> _Saved:
    seconds, end, cpu = [], 0.0, 0.0
    if dist.get_rank() == 0:
        touch_free_memory(_FILE_NBYTES * numel)
    before_nbytes = reset_peak()
    for number in range(contestant.saves):
        target = folder / f"save{number}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
            os.sync()
        start, cpu_before = now(), _cpu_seconds()
        contestant.save(target)
        seconds.append(now() - start)
        contestant.finish()
        _sync_files(target)
        end, cpu = now() - start, _cpu_seconds() - cpu_before
    return _Saved(seconds, end, sum(exchange(cpu)), exchange(status("VmHWM") - before_nbytes), target)


def touch_free_memory(most_nbytes: int) -> None:
    """Uses free memory once, of which the host of a virtual machine may not have given any yet.

    The first use of a page costs more there than the copy into it, for whoever happens to get it: 0.6 s and not 0.3 s
    for the same save of 600 MB.

    Args:
        most_nbytes: less where less is free.
    """
    nbytes = min(most_nbytes, max(available_nbytes() - _RESERVE_NBYTES, 0))
    if nbytes:
        with mmap.mmap(-1, nbytes) as memory:
            for start in range(0, nbytes, mmap.PAGESIZE):
                memory[start] = 1


def _load(contestant: Contestant, folder: Path, before: list[list[float]], about: dict[str, Any]) -> CheckpointReading:
    contestant.forget()
    for path in _files(folder):
        _drop_from_cache(path)
    before_nbytes = reset_peak()
    start, cpu_before = now(), _cpu_seconds()
    error = failure(lambda: contestant.load(folder))
    seconds, cpu = now() - start, sum(exchange(_cpu_seconds() - cpu_before))
    nbytes = max(exchange(status("VmHWM") - before_nbytes))
    errors = [text for text in exchange(error) if text]
    if errors:
        return CheckpointReading(**about, why_not=f"load failed: {errors[0]}")
    after = checksum(contestant.tensors())
    if not all(exchange(after == (before[dist.get_rank()] or before[0]))):
        return CheckpointReading(**about, why_not="load failed: the state is not what was saved")
    return CheckpointReading(**about, load_seconds=seconds, load_cpu_seconds=cpu, load_nbytes=nbytes)


def _needs(needed: int, free: int) -> str:
    return f"it needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free"


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def _sync_files(folder: Path) -> None:
    """Collective: what was written is on the disk afterwards; the ranks share the files."""
    for path in _files(folder)[dist.get_rank() :: dist.get_world_size()]:
        _sync(path)
    for path in {path.parent for path in _files(folder)}:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_from_cache(path: Path) -> None:
    """So that a load reads from the disk, as after a restart."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)
    dist.barrier()
