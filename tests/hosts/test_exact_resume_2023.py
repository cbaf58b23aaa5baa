"""A run of a fork of 2023 that is resumed is the same to the bit. One spawn of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.facts import Facts, facts_of
from tests.support.mini_fork import InstalledFork, point_to
from tests.support.step_records import Steps, assert_resumed, read_steps, recorded_steps

SAVED_AT, ITERATIONS = 2, 4
BOTH = "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather --distopt-bucket-size 700"
FP16 = "--fp16 --initial-loss-scale 262144 --loss-scale-window 2 --hysteresis 1 --clip-grad 0.5"
OURS = "--use-distributed-optimizer"
#: Flags of trainings, by name.
TRAININGS = {
    "overlapped": f"--bf16 --fp32-norms --clip-grad 0.5 {BOTH}",
    "fp16, in the fork's format": f"{FP16} --distopt-checkpoint-format gathered",
}


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, tuple[Steps, Steps]]:
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
            with recorded_steps(where / f"{kind}.jsonl"):
                fork.train(*f"{given} {of_kind}".split())
            if kind == "straight":
                point_to(where, SAVED_AT)
        dist.barrier()
        found[name] = read_steps(where / "straight.jsonl"), read_steps(where / "resumed.jsonl")
    return found


facts = facts_of(collect_facts, 2)


@pytest.mark.parametrize("name", TRAININGS)
def test_run_in_a_fork_when_resumed_then_equal_to_the_bit(name: str, facts: Facts) -> None:
    straight, resumed = facts.first[name]
    assert_resumed(straight, resumed, SAVED_AT, ITERATIONS)
