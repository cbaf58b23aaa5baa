"""A run of megatron-core that is resumed is the same to the bit. One spawn of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_megatron_core_checkpoints import OVERLAPPED, Run, _Bench, pytestmark
from tests.support.facts import Facts, facts_of
from tests.support.step_records import Steps, assert_resumed, read_steps, recorded_steps

__all__ = ["pytestmark"]

SAVED_AT, STEPS = 3, 6
FP32 = Run("distopt", clip_grad=0.5)
TRAININGS = {
    "dp 2": FP32.at(dp=2),
    "overlapped": FP32.at(dp=2, **OVERLAPPED),
    "fp16": Run("distopt", precision="fp16", loss_scale_window=3).at(dp=2),
    "tp 2": FP32.at(tp=2),
    "pp 2": FP32.at(pp=2),
}
#: Layouts at which the checkpoint of "dp 2" is loaded.
OTHERS = {"tp 2": FP32.at(tp=2), "pp 2": FP32.at(pp=2)}


@contextmanager
def _training(bench: _Bench, run: Run, path: Path) -> Iterator[Any]:
    with recorded_steps(path), bench.training(run) as training:
        yield training
    dist.barrier()


def _resumed(bench: _Bench, run: Run, checkpoint: Path, path: Path) -> Steps:
    with _training(bench, run, path) as training:
        training.optimizer.load(checkpoint)
        bench.begin_at(training, SAVED_AT)
        for _ in range(SAVED_AT, STEPS):
            training.step()
    return read_steps(path)


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """By training, what it recorded without and with a restart; and by layout, what a run recorded
    that was resumed at that layout."""
    bench, found = _Bench(rank, str(folder)), dict[str, Any]()
    torch.use_deterministic_algorithms(True)
    for name, run in TRAININGS.items():
        where = folder / name
        with _training(bench, run, where / "straight") as training:
            for number in range(STEPS):
                if number == SAVED_AT:
                    training.params()  # gathers them, which the host does before it saves
                    training.optimizer.save(where / "checkpoint")
                training.step()
        found[name] = (
            read_steps(where / "straight"),
            _resumed(bench, run, where / "checkpoint", where / "resumed"),
        )
    checkpoint = folder / "dp 2" / "checkpoint"
    for name, run in OTHERS.items():
        found[f"at {name}"] = _resumed(bench, run, checkpoint, folder / "at" / name)
    return found


facts = facts_of(collect_facts, 2, core=True)


@pytest.mark.parametrize("name", TRAININGS)
def test_run_when_resumed_then_equal_to_the_bit(name: str, facts: Facts) -> None:
    straight, resumed = facts.first[name]
    assert_resumed(straight, resumed, SAVED_AT, STEPS)


@pytest.mark.parametrize("name", OTHERS)
def test_run_when_resumed_at_another_layout_then_it_begins_with_the_same_state(
    name: str, facts: Facts
) -> None:
    straight, _ = facts.first["dp 2"]
    before = straight[SAVED_AT].checksums
    loaded = facts.first[f"at {name}"][SAVED_AT].checksums
    assert loaded == {key: value for key, value in before.items() if key[0] != "grad"}
