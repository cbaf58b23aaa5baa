"""Runs a function on several ranks: real processes, gloo over loopback, results back in the parent.

A spawn costs seconds, so a module makes one for all its tests: see facts.py.

[Note: two servers] Importing torch takes longer than most cases, so ranks are forked from processes
that have imported it, with this package and what most cases need of either. The first rank comes
from another such process than the others: its strings have other hashes, so that whatever goes by
the order of a set goes wrong here and not at a user's. Ranks of megatron-core are forked from this
process, which imports the host for them: a server of their own would cost what they save."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

Result = TypeVar("Result")

# A rank that waits for one that has died is told so by gloo within a moment; after this it is
# ended.
_SECONDS_TO_FOLLOW_A_FAILURE = 3.0


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. The message has its traceback, `__cause__` the
    exception itself."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one rank wrote before it ended."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    ended_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Task:
    """What all ranks do."""

    folder: str  # for what they leave
    size: int  # the number of ranks
    seconds: float  # the time limit
    environment: dict[str, str]  # a process that was forked has that of another time
    # the pickled function and its arguments, which are not imported before the environment is set
    call: bytes


def run_ranks(
    function: Callable[..., Result],
    size: int,
    *args: object,
    seconds: float = 120.0,
    core: bool = False,
) -> list[Result]:
    """Calls `function(rank, size, *args)` on `size` processes that form one gloo process group.

    Args:
        function: importable from its module (no lambda, no closure); it and `args` are pickled.
        size: the number of ranks.
        args: the same for every rank.
        seconds: the time limit for all of it, process start included.
        core: the ranks find megatron-core imported, and this process does from then on.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        RankError: a rank raised, died, or the time limit passed. The first failure in time comes
            first: what the other ranks report is mostly that their peer is gone.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder, _environment_of_ranks():
        task = _Task(folder, size, seconds, dict(os.environ), pickle.dumps((function, args)))
        processes = [_start(task, rank, core) for rank in range(size)]
        try:
            late = _wait(processes, deadline=time.monotonic() + seconds)
        finally:
            _end(processes)
        outcomes = [_read(Path(folder), rank) for rank in range(size)]
        _raise_failures(
            outcomes, processes, late, f"{function.__module__}.{function.__qualname__}", seconds
        )
        return [outcome.value for outcome in outcomes if outcome is not None]


def forget_groups() -> None:
    """Ends all process groups but the world's: gloo's threads of one wake a hundred times a second
    while it lives."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _environment_of_ranks() -> contextlib.AbstractContextManager[object]:
    """What a process has to find in its environment before it imports torch; restored
    afterwards."""
    wanted = {"OMP_NUM_THREADS": "1"}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback[0]
    return mock.patch.dict(os.environ, wanted)


_SERVERS = (ForkServer(), ForkServer())


def start_from_server(
    number: int, target: Callable[..., object], *args: object, daemon: bool = True
) -> BaseProcess:
    """Starts `target(*args)` in a process that has imported what ranks need; see [Note: two
    servers].

    Its environment is that of the server, so what it has to find there is among `args`.
    """
    server = _SERVERS[number]
    server.set_forkserver_preload(["tests.support.preloaded"])
    # The standard library knows one server: the call that asks it for a process is led to ours.
    with mock.patch(
        "multiprocessing.forkserver.connect_to_new_process", server.connect_to_new_process
    ):
        return _begun(
            multiprocessing.get_context("forkserver").Process(
                target=target, args=args, daemon=daemon
            )
        )


def _start(task: _Task, rank: int, core: bool) -> BaseProcess:
    if core:
        importlib.import_module("tests.support.preloaded_core")
        return _begun(
            multiprocessing.get_context("fork").Process(
                target=_run_rank, args=(task, rank), daemon=True
            )
        )
    return start_from_server(min(rank, 1), _run_rank, task, rank)


def _begun(process: BaseProcess) -> BaseProcess:
    process.start()
    return process


def _run_rank(task: _Task, rank: int) -> None:
    """The body of one process. It leaves an outcome file whatever happens, short of a signal."""
    os.environ.clear()
    os.environ.update(task.environment)
    size = task.size
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    try:
        # A file, not a port: test runs beside each other on one machine cannot clash.
        store, limit = (
            dist.FileStore(os.path.join(task.folder, "store"), size),
            timedelta(seconds=task.seconds),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        dist.barrier()  # a rank that ended at once would close connections that others still make
        function, args = pickle.loads(task.call)
        outcome = _Outcome(value=function(rank, size, *args), ended_at=time.time())
    except BaseException as error:  # noqa: BLE001 - it is carried to the parent and raised there
        outcome = _Outcome(error=error, trace=traceback.format_exc(), ended_at=time.time())
    _write(Path(task.folder), rank, outcome)
    if outcome.error is not None:
        os._exit(1)  # peers may be waiting: no clean-up that could wait for them
    dist.destroy_process_group()


def _write(folder: Path, rank: int, outcome: _Outcome) -> None:
    try:
        payload = pickle.dumps(outcome)
        pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 - what cannot be pickled still has to be reported
        trace = outcome.trace or f"What the rank returned cannot be pickled: {error!r}"
        payload = pickle.dumps(
            _Outcome(error=RuntimeError(trace), trace=trace, ended_at=outcome.ended_at)
        )
    unfinished = folder / f"rank{rank}.unfinished"
    unfinished.write_bytes(payload)
    unfinished.rename(folder / f"rank{rank}")


def _read(folder: Path, rank: int) -> _Outcome | None:
    file = folder / f"rank{rank}"
    return pickle.loads(file.read_bytes()) if file.exists() else None


def _wait(processes: list[BaseProcess], deadline: float) -> list[int]:
    """Waits until all have ended, or one failed and the others had a moment. Returns the ranks that
    are late."""
    failed = False
    while running := [process for process in processes if process.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            return (
                []
                if failed
                else [rank for rank, process in enumerate(processes) if process.is_alive()]
            )
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=left)
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW_A_FAILURE)
    return []


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _raise_failures(
    outcomes: list[_Outcome | None],
    processes: list[BaseProcess],
    late: list[int],
    name: str,
    seconds: float,
) -> None:
    failures = [
        (outcome.ended_at, rank, outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome and outcome.error
    ]
    if failures:
        failures.sort(key=lambda failure: failure[:2])
        traces = "\n".join(
            f"--- rank {rank} of {len(outcomes)}:\n{outcome.trace}" for _, rank, outcome in failures
        )
        raise RankError(f"{name} failed on rank {failures[0][1]}.\n{traces}") from failures[0][
            2
        ].error
    if late:
        raise RankError(
            f"{name} was still running on ranks {late} after {seconds:g} s. A collective may be "
            "missing."
        )
    dead = {
        rank: processes[rank].exitcode for rank, outcome in enumerate(outcomes) if outcome is None
    }
    if dead:
        raise RankError(f"{name} left no result on ranks {sorted(dead)}; exit codes {dead}.")
