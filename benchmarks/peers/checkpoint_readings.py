"""What checkpoint.py finds: seconds, memory and bytes of a save and a load on all ranks at once,
ratios, and tables.

How each figure is read is said in benchmarks/README.md; whoever changes it here changes it there.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from peers.checkpoint_contestants import Contestant, Entry
from peers.machine import available_nbytes
from peers.memory_reading import reset_peak, status
from peers.ranks import exchange, failure_of_any, now
from peers.report import OURS, Rounds, Spread, reports
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
    # until all files are on the disk, counted from the same moment
    disk_seconds: float | None = None
    load_seconds: float | None = None  # until the call has returned on all ranks
    # Of processor time until all files are on the disk, of all ranks and what they started; of the
    # last save.
    save_cpu_seconds: float | None = None
    load_cpu_seconds: float | None = None  # the same of the load
    # host memory beyond that of the state, at its peak, on the rank that needed most
    save_nbytes: int | None = None
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
    """Collective: builds a contestant, saves, loads, checks and drops it; the folder is empty again
    afterwards."""
    about: dict[str, Any] = {"contestant": entry.name, "numel": setting.numel}
    about |= {"ranks": setting.size, "round": number}
    to_save, to_load = (
        memory.nbytes(setting.numel, setting.size) for memory in (entry.save, entry.load)
    )
    free = exchange(available_nbytes())[0] - _RESERVE_NBYTES
    if to_save > free:
        return CheckpointReading(**about, why_not=f"not run: {_needs(to_save, free)}")
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
        if to_load > free:
            return CheckpointReading(**about, why_not=f"load not run: {_needs(to_load, free)}")
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
    return _Saved(
        seconds, end, sum(exchange(cpu)), exchange(status("VmHWM") - before_nbytes), target
    )


def touch_free_memory(most_nbytes: int) -> None:
    """Uses free memory once, of which the host of a virtual machine may not have given any yet.

    The first use of a page costs more there than the copy into it, for whoever happens to get it:
    0.6 s and not 0.3 s for the same save of 600 MB.

    Args:
        most_nbytes: less where less is free.
    """
    nbytes = min(most_nbytes, max(available_nbytes() - _RESERVE_NBYTES, 0))
    if nbytes:
        with mmap.mmap(-1, nbytes) as memory:
            for start in range(0, nbytes, mmap.PAGESIZE):
                memory[start] = 1


def _load(
    contestant: Contestant, folder: Path, before: list[list[float]], about: dict[str, Any]
) -> CheckpointReading:
    contestant.forget()
    for path in _files(folder):
        _with_descriptor(path, _drop_from_cache)
    before_nbytes = reset_peak()
    start, cpu_before = now(), _cpu_seconds()
    why_not = failure_of_any(lambda: contestant.load(folder))
    seconds, cpu = now() - start, sum(exchange(_cpu_seconds() - cpu_before))
    nbytes = max(exchange(status("VmHWM") - before_nbytes))
    if why_not:
        return CheckpointReading(**about, why_not=f"load failed: {why_not}")
    after = checksum(contestant.tensors())
    if not all(exchange(after == (before[dist.get_rank()] or before[0]))):
        return CheckpointReading(**about, why_not="load failed: the state is not what was saved")
    return CheckpointReading(
        **about, load_seconds=seconds, load_cpu_seconds=cpu, load_nbytes=nbytes
    )


def _needs(needed: int, free: int) -> str:
    return f"it needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free"


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def _sync_files(folder: Path) -> None:
    """Collective: what was written is on the disk afterwards; the ranks share the files."""
    for path in _files(folder)[dist.get_rank() :: dist.get_world_size()]:
        _with_descriptor(path, os.fsync)
    for path in {path.parent for path in _files(folder)}:
        _with_descriptor(path, os.fsync)


def _drop_from_cache(descriptor: int) -> None:
    """So that a load reads from the disk, as after a restart."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _with_descriptor(path: Path, act: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        act(descriptor)
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


_ASYNC = "ours async"
_FIGURES = tuple(
    field.name
    for field in dataclasses.fields(CheckpointReading)
    if field.name.endswith("_seconds") or field.name.endswith("_nbytes")
)
_ON_DISK, _STALL = "save until on the disk, peer / ours", "async stall / sync"


def summary(readings: Sequence[CheckpointReading]) -> list[dict[str, Any]]:
    """By ranks and size; ratios first."""
    found = []
    for ranks, numel in dict.fromkeys((reading.ranks, reading.numel) for reading in readings):
        here = [reading for reading in readings if (reading.ranks, reading.numel) == (ranks, numel)]
        rounds, figure = Rounds(here), partial(partial, _figure)
        peers = Rounds([reading for reading in here if reading.contestant != _ASYNC])
        found.append(
            {
                "ranks": ranks,
                "numel": numel,
                _ON_DISK: peers.over(figure("disk_seconds")),
                "save until it returns, peer / ours": peers.over(figure("save_seconds")),
                "load, peer / ours": peers.over(figure("load_seconds")),
                "processor time of a save, peer / ours": peers.over(figure("save_cpu_seconds")),
                _STALL: rounds.over(figure("save_seconds")).get(_ASYNC),
                "async until on the disk / sync": rounds.over(figure("disk_seconds")).get(_ASYNC),
                "figures": {name: rounds.spreads(figure(name)) for name in _FIGURES},
                "why_not": rounds.failures()["why_not"],
            }
        )
    return found


def _figure(name: str, reading: CheckpointReading) -> float | None:
    value: float | None = getattr(reading, name)
    return value


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a setting; the last line has the ratios of all."""
    times, sizes = (
        ("returns s", "on disk s", "load s", "cpu s"),
        ("save +MiB", "load +MiB", "disk MB"),
    )
    header = ("", *times, *sizes, "on disk / ours", "")
    return reports(found, _heading, header, _rows, _last_words)


def _heading(setting: Mapping[str, Any]) -> str:
    return (
        f"{setting['ranks']} ranks, {setting['numel'] / 1e6:.0f} M elements (median, [smallest to "
        "largest])"
    )


def _rows(setting: Mapping[str, Any]) -> list[list[str]]:
    return [_row(name, setting) for name in setting["figures"]["save_seconds"]]


def _row(name: str, setting: Mapping[str, Any]) -> list[str]:
    figures = {figure: spreads[name] for figure, spreads in setting["figures"].items()}
    spreads = [figures[figure] for figure in ("save_seconds", "disk_seconds", "load_seconds")]
    return [
        name,
        *(str(each or "-") for each in spreads),
        _median(figures["save_cpu_seconds"], 1.0, 2),
        *(_median(figures[figure], 2**20) for figure in ("save_nbytes", "load_nbytes")),
        _median(figures["disk_nbytes"], 1e6),
        str(setting[_ON_DISK].get(name) or "-"),
        setting["why_not"].get(name, ""),
    ]


def _median(values: Spread | None, unit: float, digits: int = 0) -> str:
    return "-" if values is None else f"{values.median / unit:.{digits}f}"


def _last_words(setting: Mapping[str, Any]) -> str:
    parts = [
        f"{name}/{OURS} {ratio.median:.2f}" for name, ratio in setting[_ON_DISK].items() if ratio
    ]
    stall = [f"async stall/sync {setting[_STALL].median:.3f}"] if setting[_STALL] else []
    return f"{setting['ranks']} ranks, {setting['numel'] / 1e6:.0f} M: save " + ", ".join(
        [*parts, *stall]
    )
