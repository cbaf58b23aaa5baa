"""Digests of a run with state on the host are those of the same run without, on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from megatron_distopt.checkpoint.digests import LoggedRun, read_run
from tests.sim import host_programs, programs
from tests.sim.trial import begin, differs
from tests.support.sim import machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks


def _try(rank: int, size: int, folder: Path, names: Sequence[str], seeds: Sequence[int]) -> dict[str, list[str]]:
    """What was wrong, by program: a run that logs digests is the one without them."""
    begin()
    take_over_world()
    found = {}
    for name in names:

        def logged(device: str, name: str = name) -> programs.Left:
            programs.options.update(log_digests=1, digest_file=str(folder / f"{name} {device}"))
            return programs.train(name, device, rank)

        programs.options.update(log_digests=None)
        without = programs.train(name, "cpu", rank)
        found[name] = [f"seed {seed}: {wrong}" for seed in seeds if (wrong := differs(logged, seed, without))]
        logged("cpu")
        programs.dist.barrier()
        on_cpu, on_device = (_digests(read_run(folder / f"{name} {device}")) for device in ("cpu", "sim"))
        found[name] += [f"digests of step {step}" for step in on_cpu if on_device.get(step) != on_cpu[step]]
    return found


@pytest.mark.long
def test_digests_when_on_an_asynchronous_device_then_no_seed_finds_anything(tmp_path: Path) -> None:
    names = [name for name in programs.PROGRAMS if "muon" not in name]  # which logs none
    found = run_ranks(_try, 2, tmp_path, names, range(5), seconds=3000)
    assert [{name: wrong for name, wrong in of_rank.items() if wrong} for of_rank in found] == [{}, {}]


def _digests(run: LoggedRun) -> dict[int, object]:
    return {number: (step.digests, step.facts.get("updated")) for number, step in run.steps.items()}


KINDS = {"grad", "main", "exp_avg", "exp_avg_sq"}


def _log_in_places(rank: int, size: int, folder: Path, host: str, places: Sequence[tuple[float, int]]) -> list[str]:
    """What was wrong: the fraction on the host, and the seed of the delays."""
    begin()
    take_over_world()
    expected = _logged(folder / "device", host, 0.0)
    kinds = {kind for kind, _ in expected.steps[max(expected.steps)].digests}
    wrong = [] if kinds == KINDS and len(expected.steps) > 3 else [f"{kinds} of steps {[*expected.steps]}"]
    for fraction, seed in places:
        machine.seed(seed)
        if _digests(_logged(folder / f"{fraction} {seed}", host, fraction)) != _digests(expected):
            wrong.append(f"{fraction}, seed {seed}")
    return wrong


def _logged(path: Path, host: str, fraction: float) -> LoggedRun:
    """Collective: the digests of a training on the device."""
    asked = {"LOG_DIGESTS": "1", "DIGEST_FILE": str(path), "OFFLOAD_FRACTION": str(fraction)}
    with host_programs.variables(asked):
        host_programs.train(host, "bf16", "sim")
    programs.dist.barrier()
    return read_run(path)


@pytest.mark.parametrize("host", ["fork", "core"])
@pytest.mark.parametrize(
    "places",
    [[(0.5, 1)], pytest.param(list(product((0.5, 1.0), range(5))), marks=pytest.mark.long)],
    ids=["one", "all"],
)
def test_digests_in_a_megatron_when_state_is_on_the_host_then_they_are_those_without(
    tmp_path: Path, host: str, places: list[tuple[float, int]]
) -> None:
    assert run_ranks(_log_in_places, 2, tmp_path, host, places, seconds=400) == [[], []]
