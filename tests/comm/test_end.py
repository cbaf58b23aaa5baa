"""The end of a process without `destroy_process_group`: regular, by an exception, and with a
collective under way.

One process imports torch and forks for both ranks of all cases at once, because most of a case is
waiting. A fork comes to its end as any interpreter does, with handlers and finalizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

#: Arguments: for each case its folder, how it ends, and the mode in which it communicates.
PROGRAM = """
import atexit, gc, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import megatron_distopt.comm.pending as pending

torch.set_num_threads(1)
children, cases = {}, list(zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]))


def is_child_of(leaves_gloo):
    # Forks both ranks of the cases; in a child, its case and rank are set.
    global folder, how, mode, rank
    for folder, how, mode in [case for case in cases if (case[1] == "gloo") == leaves_gloo]:
        folder = Path(folder)
        for rank in range(2):
            child = os.fork()
            if child == 0:
                for descriptor, name in ((1, "out"), (2, "error")):
                    os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), descriptor)
                store = dist.FileStore(str(folder / "store"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                (folder / f"pid{rank}").write_text(str(os.getpid()))
                return True
            children[child] = folder / f"status{rank}"
    return False


if is_child_of(True):
    # Little is imported by now, so that the interpreter is taken down soon.
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(1000), async_op=True)
    sys.exit()

import torch._dynamo
import megatron_distopt
from megatron_distopt.comm import Group, allow_shared_memory
from megatron_distopt.comm.collectives import all_gather

gc.freeze()  # or every child visits all of that as it ends
if not is_child_of(False):
    for _ in range(len(children)):
        child, status = os.wait()
        children[child].write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


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
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()


def leave_the_other_alone():
    # Rank 0 begins what rank 1 does not come to; rank 1 ends as soon as rank 0 has.
    group, bucket = Group.of(), torch.ones(8)
    allow_shared_memory(group, "memory" in mode)
    shard = bucket.view(2, -1)[rank]
    all_gather(bucket, shard, group, overlapped=True).wait()
    if rank == 0:
        pending._SECONDS_AFTER_AN_EXCEPTION = pending._SECONDS_TO_GIVE_UP = 0.5
        all_gather(bucket, shard, group, overlapped=True)
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


def destroy_but_hold_one():
    # gloo's threads of the held group live on, and the end has to wait for them.
    global held
    held = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(8), group=held, async_op=True)
    dist.destroy_process_group()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop\\n" in names, "no thread"
    pause = pending.sleep
    pending.sleep = lambda seconds: (print("waits for gloo", flush=True), pause(seconds))


atexit.register(lambda: print("handlers ran", flush=True))
if "alone" in how:
    leave_the_other_alone()
else:
    train()
if "destroyed" in how:
    destroy_but_hold_one()
if "raises" in how:
    raise RuntimeError("the program's own")
"""


@dataclass(frozen=True)
class Ended:
    """One rank: its exit status, and what it wrote to its outputs."""

    status: int
    out: str
    error: str


def _ended(folder: Path, cases: Sequence[tuple[str, str]]) -> list[list[Ended]]:
    """Both ranks of each case, which is how it ends and its mode."""
    folders = [folder / str(number) for number in range(len(cases))]
    for each in folders:
        each.mkdir(parents=True)
    words = [word for each, case in zip(folders, cases, strict=True) for word in (str(each), *case)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *words],
        env=environ,
        timeout=300,
        check=True,
    )
    return [[_read(each, rank) for rank in range(2)] for each in folders]


def _read(folder: Path, rank: int) -> Ended:
    status, out, error = (
        (folder / f"{name}{rank}").read_text() for name in ("status", "out", "error")
    )
    return Ended(int(status), out, error)


REGULAR, RAISES = ("regular", "memory overlap"), ("raises", "messages overlap")
DESTROYED, GLOO = ("destroyed", "messages"), ("gloo", "not waited for")
ALONE = {mode: ("raises, alone", mode) for mode in ("memory", "messages")}
CASES = [GLOO, REGULAR, DESTROYED, RAISES, *ALONE.values()]
Found = dict[tuple[str, str], list[Ended]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By case, what became of the ranks."""
    return dict(zip(CASES, _ended(tmp_path_factory.mktemp("ended"), CASES), strict=True))


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="gloo's thread has no name before torch 2.10"
)
def test_end_when_groups_are_left_open_or_outlive_torchs_then_status_0(ended: Found) -> None:
    for rank in ended[REGULAR]:
        assert (rank.status, rank.out) == (0, "handlers ran\n"), rank.error
    for rank in ended[DESTROYED]:
        assert (rank.status, rank.out) == (0, "waits for gloo\nhandlers ran\n"), rank.error


def test_end_when_a_collective_of_gloo_was_not_waited_for_then_no_rank_is_aborted(
    ended: Found,
) -> None:
    """See [Note: gloo lets go of tensors late]."""
    assert [rank.status for rank in ended[GLOO]] == [0] * 2, ended[GLOO]


def test_end_when_the_program_raises_then_status_1_and_its_error(ended: Found) -> None:
    for rank in ended[RAISES]:
        assert (rank.status, rank.out) == (1, "handlers ran\n")
        # Triton's objects, because they are frozen
        error, _, _ = rank.error.partition("nanobind: leaked")
        assert error.rstrip().endswith("RuntimeError: the program's own")


@pytest.mark.parametrize("mode", ALONE)
def test_end_when_one_rank_raises_in_a_collective_then_it_does_not_wait_for_others(
    ended: Found, mode: str
) -> None:
    first, second = ended[ALONE[mode]]
    assert (first.status, first.out) == (1, "handlers ran\n"), first.error
    assert "RuntimeError: the program's own" in first.error
    assert "a collective that other ranks did not join" in first.error
    assert second.status == 0, "rank 0 was there after a minute"
