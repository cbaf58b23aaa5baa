"""The end of a process without `destroy_process_group`: regular, by an exception, and with a collective under way."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Arguments: rank, folder, how, and the mode in which it communicates.
PROGRAM = """
import atexit, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import megatron_distopt
from megatron_distopt.comm import Group, allow_shared_memory
from megatron_distopt.comm.collectives import begin_all_gather

rank, folder, how, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
(folder / f"pid{rank}").write_text(str(os.getpid()))


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = megatron_distopt.DistOptConfig(
        accelerator="torch",
        bucket_size=100,
        shared_memory="memory" in mode,
        overlap_grad_reduce="overlap" in mode,
        overlap_param_gather="overlap" in mode,
    )
    optimizer = megatron_distopt.distribute(model, config)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()


def leave_the_other_alone():
    # Rank 0 begins what rank 1 does not come to; rank 1 ends as soon as rank 0 has.
    group, bucket = Group.of(), torch.ones(8)
    allow_shared_memory(group, "memory" in mode)
    shard = bucket.view(2, -1)[rank]
    begin_all_gather(bucket, shard, group).wait()
    if rank == 0:
        begin_all_gather(bucket, shard, group)
        return
    other = int((folder / "pid0").read_text())
    for _ in range(600):
        try:
            state = Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "Z"
        if state == "Z":
            os._exit(0)
        time.sleep(0.1)
    os._exit(3)


atexit.register(lambda: print("handlers ran", flush=True))
if "alone" in how:
    leave_the_other_alone()
else:
    train()
if "raises" in how:
    raise RuntimeError("the program's own")
"""


@dataclass(frozen=True)
class Ended:
    """One rank: its exit status, and what it wrote to its outputs."""

    status: int
    out: str
    error: str


def _ended(folder: Path, how: str, mode: str) -> list[Ended]:
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder), how, mode],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Ended(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


MODES = ("memory", "messages", "memory overlap", "messages overlap")


def test_end_when_the_group_is_left_open_then_status_0(tmp_path: Path) -> None:
    for rank in _ended(tmp_path / "ranks", "regular", "memory overlap"):
        assert (rank.status, rank.out) == (0, "handlers ran\n"), rank.error


def test_end_when_the_program_raises_then_status_1_and_its_error(tmp_path: Path) -> None:
    for rank in _ended(tmp_path / "ranks", "raises", "messages overlap"):
        assert (rank.status, rank.out) == (1, "handlers ran\n")
        assert rank.error.rstrip().endswith("RuntimeError: the program's own")


@pytest.mark.parametrize("mode", ["memory", "messages"])
def test_end_when_one_rank_raises_inside_a_collective_that_no_other_comes_to_then_it_does_not_wait_for_them(
    tmp_path: Path, mode: str
) -> None:
    start = time.monotonic()
    first, second = _ended(tmp_path / "ranks", "raises, alone", mode)
    assert (first.status, first.out) == (1, "handlers ran\n"), first.error
    assert "RuntimeError: the program's own" in first.error
    assert "a collective under way that other ranks did not come to" in first.error
    assert second.status == 0, f"rank 0 was there after {time.monotonic() - start:.0f} s"


@pytest.mark.long
@pytest.mark.parametrize(("mode", "how"), [*itertools.product(MODES, ("regular", "raises"))])
def test_end_when_repeated_then_never_by_a_signal(tmp_path: Path, mode: str, how: str) -> None:
    wanted = 0 if how == "regular" else 1
    for number in range(15):
        for rank in _ended(tmp_path / str(number), how, mode):
            assert rank.status == wanted, rank.error
