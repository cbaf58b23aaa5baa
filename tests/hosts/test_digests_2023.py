"""Digests of runs in a fork of 2023: a run that is resumed is the same to the bit. One spawn of two
ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.checkpoint.digests import LoggedRun, differing, read_run
from tests.support.mini_fork import InstalledFork, point_to
from tests.support.spawn import run_ranks

SAVED_AT, ITERATIONS = 2, 4
BOTH = "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather --distopt-bucket-size 700"
FP16 = "--fp16 --initial-loss-scale 262144 --loss-scale-window 2 --hysteresis 1 --clip-grad 0.5"
OURS = "--use-distributed-optimizer --distopt-log-digests 1"
#: Flags of trainings, by name.
TRAININGS = {
    "overlapped": f"--bf16 --fp32-norms --clip-grad 0.5 {BOTH}",
    "fp16, in the fork's format": f"{FP16} --distopt-checkpoint-format gathered",
}


def _train(rank: int, size: int, folder: Path) -> dict[str, tuple[LoggedRun, LoggedRun]]:
    fork, found = InstalledFork.imported(file_layout="gathered"), {}
    torch.use_deterministic_algorithms(True)
    for name, words in TRAININGS.items():
        where = folder / name.replace(" ", "_")
        given = f"{OURS} {words} --train-iters {ITERATIONS}"
        files = {
            "straight": f"--save {where} --save-interval {SAVED_AT}",
            "resumed": f"--load {where}",
        }
        for kind, of_kind in files.items():
            fork.train(*f"{given} --distopt-digest-file {where}/{kind}.jsonl {of_kind}".split())
            if kind == "straight":
                point_to(where, SAVED_AT)
        dist.barrier()
        found[name] = read_run(where / "straight.jsonl"), read_run(where / "resumed.jsonl")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoggedRun, LoggedRun]]:
    return run_ranks(_train, 2, tmp_path_factory.mktemp("fork"))[0]


@pytest.mark.parametrize("name", TRAININGS)
def test_run_in_a_fork_when_resumed_then_equal_to_the_bit(
    name: str, found: dict[str, tuple[LoggedRun, LoggedRun]]
) -> None:
    straight, resumed = found[name]
    assert [*straight.steps] == [*range(ITERATIONS + 1)]
    assert [*resumed.steps] == [*range(SAVED_AT, ITERATIONS + 1)]
    assert all(differing(straight.steps[step], each) == [] for step, each in resumed.steps.items())
    last = straight.steps[ITERATIONS]
    assert {kind for kind, _ in last.digests} == {"grad", "main", "exp_avg", "exp_avg_sq"}
    assert {name for _, name in differing(straight.steps[0], last)} == {
        name for _, name in last.digests
    }
