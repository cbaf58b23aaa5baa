"""Signs of life with real processes: which ranks end, with which message and how soon, and which
must not.

All ranks of a fixture run at the same time, because most of a case is waiting.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.comm import Group, LifeSigns
from tests.support.spawn import run_ranks, start_from_server

#: A busy machine lets a process wait for a core for a second and a half.
TIMEOUT = 2.4
INTERVAL = TIMEOUT / 12
#: TIMEOUT and four intervals by design; a busy machine takes longer, and a rank that notices
#: nothing hangs.
SECONDS_TO_NOTICE = 3 * TIMEOUT


def hang(sender: int) -> None:
    """Waits in a collective, for a rank that never sends."""
    dist.recv(torch.zeros(1), sender)


def train() -> None:
    time.sleep(1.7 * TIMEOUT)


def end() -> None:
    pass


def crash() -> None:
    raise ValueError("the data\nof batch 7")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def compute_in_python() -> None:
    until, number = time.monotonic() + 1.7 * TIMEOUT, 0
    while time.monotonic() < until:
        number += 1


def compute_in_torch() -> None:
    torch.ones(5500, 5500) @ torch.ones(5500, 5500)


def wait_in_store() -> None:
    with pytest.raises(RuntimeError):
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=1.7 * TIMEOUT))


def kill_later() -> None:
    time.sleep(4 * INTERVAL)
    kill()


def stop_for(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_shortly() -> None:
    stop_for(0.6 * TIMEOUT)
    train()


def stop_for_long() -> None:
    stop_for(2 * TIMEOUT)
    train()


def sleep_with_the_log_held() -> None:
    handler = logging.StreamHandler()
    logging.getLogger("megatron_distopt").addHandler(handler)
    handler.acquire()
    time.sleep(4 * TIMEOUT)


@dataclass(frozen=True)
class Job:
    """What the main thread of each rank does once all show life."""

    acts: tuple[Callable[[], None], ...]
    is_store_of_rank_0: bool = False  # and not of the launcher
    timeout: float = TIMEOUT


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    code: int | None  # that a process has; minus the number of a signal
    text: str  # on its stderr
    seconds: float  # since all began to act


HANG = [partial(hang, sender) for sender in range(4)]
QUICK = {
    "killed": Job((HANG[2], kill, HANG[0])),
    # Nobody waits for the limit; a machine that stands still for as long as the others have would
    # come before.
    "crashed": Job((HANG[2], crash, HANG[0]), timeout=4 * TIMEOUT),
    "ended": Job((train, end, train)),
    "busy": Job((compute_in_python, wait_in_store)),
    "store killed": Job((kill, HANG[2], HANG[1]), is_store_of_rank_0=True),
}
LONG = {
    "two killed": Job((HANG[3], kill, kill, HANG[0])),
    "one behind an ended one": Job((partial(time.sleep, 4 * TIMEOUT), end, kill_later)),
    "stopped shortly": Job((train, stop_shortly, train)),
    "stopped for long": Job((train, stop_for_long, train)),
    "all stopped": Job((stop_for_long, stop_for_long)),
    "computes": Job((compute_in_torch, train)),
    "all but one ended": Job((end, end, train)),
    "first ended": Job((end, train, train), is_store_of_rank_0=True),
    "store stopped": Job((stop_for_long, train), is_store_of_rank_0=True),
    "log held": Job((HANG[2], kill, sleep_with_the_log_held)),
    "server crashed": Job((crash, HANG[2], HANG[1]), is_store_of_rank_0=True),
    "reader serves": Job((HANG[1], HANG[0], kill), is_store_of_rank_0=True),
}


#: A store looks up the name of a new client and serves nobody meanwhile: where no server answers, a
#: second and not 5.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def run_rank(folder: Path, job: Job, rank: int, port: int) -> None:
    error = os.open(folder / f"text{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - until the end of the process
    os.environ.update(QUICK_NAMES, GLOO_SOCKET_IFNAME="lo", GROUP_WORLD_SIZE="2")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not job.is_store_of_rank_0)
    torch.set_num_threads(1)
    size, store = len(job.acts), dist.TCPStore("127.0.0.1", port, is_master=False)
    # at a port of its own, which the other ranks learn from the test's store
    if job.is_store_of_rank_0:
        own = (
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            if rank == 0
            else None
        )
        if own is not None:
            store.set("port", str(own.port))
        store = own or dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(folder), store), rank=rank, world_size=size
    )
    del store
    signs = LifeSigns(Group.of(), job.timeout)
    warnings = {signs.start(), signs.start()}
    assert warnings == {None}
    time.sleep(2 * INTERVAL)
    dist.barrier()
    (folder / f"began{rank}").write_text(str(time.monotonic()))
    job.acts[rank]()
    dist.destroy_process_group()


def run_jobs(root: Path, jobs: Mapping[str, Job]) -> dict[str, list[End]]:
    with mock.patch.dict(os.environ, QUICK_NAMES):
        servers = [
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in jobs
        ]
    processes: dict[BaseProcess, tuple[str, int]] = {}
    for server, (name, job) in zip(servers, jobs.items(), strict=True):
        (root / name).mkdir()
        for rank in range(len(job.acts)):
            processes[start_from_server(1, run_rank, root / name, job, rank, server.port)] = (
                name,
                rank,
            )
    ended_at = _ends(list(processes), seconds=100.0)
    ends: dict[str, dict[int, End]] = {name: {} for name in jobs}
    for process, (name, rank) in processes.items():
        began = float((root / name / f"began{rank}").read_text())
        text = (root / name / f"text{rank}").read_text()
        ends[name][rank] = End(process.exitcode, text, ended_at[process] - began)
    return {name: [by_rank[rank] for rank in sorted(by_rank)] for name, by_rank in ends.items()}


def _ends(processes: list[BaseProcess], seconds: float) -> dict[BaseProcess, float]:
    """When each ended; those that still run after the limit are killed."""
    limit, ended_at = time.monotonic() + seconds, dict[BaseProcess, float]()
    while running := [process for process in processes if process not in ended_at]:
        sentinels = [process.sentinel for process in running]
        ready = multiprocessing.connection.wait(sentinels, max(0.0, limit - time.monotonic()))
        for process in running:
            if not ready:
                process.kill()
            if not ready or process.sentinel in ready:
                process.join()
                ended_at[process] = time.monotonic()
    return ended_at


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[End]]:
    return run_jobs(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[End]]:
    return run_jobs(tmp_path_factory.mktemp("long"), LONG)


def assert_noticed(end: End, pattern: str) -> None:
    assert end.code == 1
    assert re.search(pattern, end.text), end.text
    assert end.seconds < SECONDS_TO_NOTICE


def test_dead_rank_when_others_hang_in_a_collective_then_all_of_them_name_it_and_end(
    quick: dict[str, list[End]],
) -> None:
    first, killed, last = quick["killed"]
    assert killed.code == -signal.SIGKILL
    for end in (first, last):
        assert_noticed(
            end,
            rf"rank 1 on {re.escape(os.uname().nodename)} showed no life for [23]\.\d s"
            ".*protect_timeout",
        )
        assert end.seconds > TIMEOUT - INTERVAL


def test_rank_when_it_ends_by_an_exception_then_others_name_it_at_once(
    quick: dict[str, list[End]],
) -> None:
    first, crashed, last = quick["crashed"]
    assert crashed.code == 1
    for end in (first, last):
        assert_noticed(end, "rank 1 on .* ended by ValueError: the data\\.$")
        assert end.seconds < QUICK["crashed"].timeout


@pytest.mark.parametrize("case", ["ended", "busy"])
def test_ranks_when_one_ended_in_an_orderly_way_or_is_busy_then_nobody_ends_them(
    quick: dict[str, list[End]], case: str
) -> None:
    assert [(end.code, "ends itself" in end.text) for end in quick[case]] == [(0, False)] * len(
        quick[case]
    )


def test_store_when_its_process_dies_then_all_ranks_say_so_and_end(
    quick: dict[str, list[End]],
) -> None:
    for end in quick["store killed"][1:]:
        assert_noticed(end, r"torch's store did not answer for 2\.4 s")


def _say_why_not(rank: int, size: int) -> str | None:
    return LifeSigns(Group.of(), TIMEOUT).start()


@pytest.mark.parametrize(("size", "word"), [(1, "one rank"), (2, "FileStore")])
def test_start_when_nothing_can_be_watched_then_says_why(size: int, word: str) -> None:
    assert all(word in (text or "") for text in run_ranks(_say_why_not, size))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "others", "pattern"),
    [
        ("two killed", (0, 3), "rank 1 on .* showed no life"),
        ("one behind an ended one", (0,), "rank 2 on .* showed no life"),
        ("stopped for long", (0, 1, 2), "rank 1 on .* showed no life"),
        ("store stopped", (1,), "did not answer"),
        ("server crashed", (1, 2), "rank 0 on .* ended by ValueError"),
        ("reader serves", (0, 1), "rank 2 on .* showed no life"),
    ],
)
def test_others_when_a_rank_is_lost_then_all_of_them_say_which_and_end(
    long: dict[str, list[End]], case: str, others: tuple[int, ...], pattern: str
) -> None:
    for rank in others:
        end = long[case][rank]
        assert end.code == 1
        assert re.search(pattern, end.text), end.text


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["stopped shortly", "all stopped", "computes", "all but one ended", "first ended"]
)
def test_ranks_when_none_is_lost_then_all_end_by_themselves(
    long: dict[str, list[End]], case: str
) -> None:
    assert [end.code for end in long[case]] == [0] * len(long[case])


@pytest.mark.long
def test_rank_when_its_log_is_held_by_the_main_thread_then_it_ends_all_the_same(
    long: dict[str, list[End]],
) -> None:
    assert [end.code for end in long["log held"]] == [1, -signal.SIGKILL, 1]
