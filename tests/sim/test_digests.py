"""Digests on the simulated accelerator are those of the CPU, and logging them changes nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_distopt.checkpoint.digest_files import LoggedRun, read_run
from tests.sim import programs
from tests.sim.trial import begin, differs
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks

Found = dict[str, list[str]]


def _try(rank: int, size: int, folder: Path, names: Sequence[str], seeds: Sequence[int]) -> Found:
    begin()
    take_over_world()
    return {name: _try_one(name, rank, folder / name, seeds) for name in names}


def _try_one(name: str, rank: int, folder: Path, seeds: Sequence[int]) -> list[str]:
    """What was wrong, by seed."""

    def logged(device: str) -> programs.Left:
        programs.options.update(log_digests=1, digest_folder=str(folder / device))
        return programs.train(name, device, rank)

    wrong = [f"seed {seed}: {found}" for seed in seeds if (found := differs(logged, seed, _without(name, rank)))]
    logged("cpu")
    programs.dist.barrier()
    expected = [_digests(read_run(start)) for start in sorted((folder / "cpu").iterdir())]
    for number, start in enumerate(sorted((folder / "sim").iterdir())):
        found, on_cpu = _digests(read_run(start)), expected[number % len(expected)]
        wrong += [f"{start.name}: digests of step {step}" for step in on_cpu if found.get(step) != on_cpu[step]]
    return wrong


def _without(name: str, rank: int) -> programs.Left:
    programs.options.update(log_digests=None)
    return programs.train(name, "cpu", rank)


def _digests(run: LoggedRun) -> dict[int, object]:
    return {number: (step.digests, step.facts.get("updated")) for number, step in run.steps.items()}


@pytest.mark.long
def test_digests_when_on_an_asynchronous_device_then_no_seed_finds_anything(tmp_path: Path) -> None:
    found = run_ranks(_try, 2, tmp_path, sorted(programs.PROGRAMS), range(5), seconds=3000)
    assert [{name: wrong for name, wrong in of_rank.items() if wrong} for of_rank in found] == [{}, {}]
