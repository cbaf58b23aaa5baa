"""Real processes of one gloo group, one thread each, that leave lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peers.report import failure


def run_on_ranks(
    function: Callable[..., None], size: int, *args: object, daemon: bool = True, minutes: float = 3
) -> tuple[list[dict[str, Any]], str]:
    """Calls `function(rank, size, log, *args)` in `size` new processes.

    Args:
        function: importable; what it gives to `log` comes back.
        size: ranks.
        args: pickled.
        daemon: False for ranks that start processes of their own.
        minutes: of a collective: a peer that fails on one rank alone leaves the others waiting.

    Returns:
        What was logged, and why it ended early, empty where it did not.
    """
    why = ""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        path = Path(folder) / "readings.jsonl"
        path.touch()
        try:
            mp.spawn(
                _start, (size, folder, path, minutes, function, args), nprocs=size, daemon=daemon
            )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            why = f"{size} ranks ended early: {str(error).strip().splitlines()[-1]}"
        return [json.loads(line) for line in path.read_text().splitlines()], why


def _start(
    rank: int,
    size: int,
    folder: str,
    path: Path,
    minutes: float,
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=minutes)
    )
    function(rank, size, path, *args)
    dist.destroy_process_group()


def log(reading: Any, path: Path) -> None:
    """The first rank's, as a line, at once: a rank that is killed takes nothing with it."""
    if dist.get_rank() == 0:
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(reading)) + "\n")


def exchange(value: Any) -> list[Any]:
    """Collective: everybody's, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def failure_of_any(act: Callable[[], object]) -> str:
    """Collective: what it raised on the first rank on which it did, in a line; empty where it went
    well on all."""
    return next((text for text in exchange(failure(act)) if text), "")


def now() -> float:
    """Collective: the time once all ranks are here, with what they queued on a device done."""
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    dist.barrier()
    return time.perf_counter()
