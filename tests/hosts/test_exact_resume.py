"""A run of plain torch that is resumed is the same to the bit, step by step.

One spawn of two ranks makes all runs. Each case is trained without interruption, and once more with
a restart from a checkpoint: the second run goes one step further than its checkpoint, as a run does
that is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_distopt import distribute
from tests.support.facts import Facts, facts_of
from tests.support.step_records import Steps, differing, parted, read_steps, recorded_steps

STEPS, SAVED = 6, 3
STATE = ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """A training."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of `distribute`
    dtype: torch.dtype = torch.bfloat16  # of the params
    overflows: tuple[int, ...] = ()  # steps whose loss is inf on one rank


OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100}
CASES = {
    "bf16": Case({"clip_grad": 0.5}),
    "overlapped, saved in the background": Case(
        {"async_save": True, "clip_grad": 0.5, "reduce_dtype": "bfloat16", **OVERLAPS}
    ),
    "fp16": Case(
        {"loss_scale": "dynamic", "hysteresis": 1, "growth_interval": 2}, torch.float16, (2, 5)
    ),
    "low precision": Case(
        {"main_params_dtype": "remainder", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    ),
    "rounded at random": Case({"main_params_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"}),
    "nan is skipped": Case({"nonfinite": "skip"}, overflows=(2, 5)),
    "averaged": Case({"nonfinite": "skip", "ema_decay": 0.75}, overflows=(1, 5)),
}


class Model(nn.Module):
    """Some params of a size that no shard divides, one of which never has a gradient, and one that
    is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.norm, self.last = (
            nn.Linear(7, 13),
            nn.LayerNorm(13),
            nn.Linear(13, 3, bias=False),
        )
        self.unused, self.frozen = nn.Parameter(torch.ones(11)), nn.Linear(3, 3, bias=False)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator).to(dtype)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.last(torch.relu(self.norm(self.first(x)))))


class Training:
    """One process of a run."""

    def __init__(self, case: Case, rank: int, path: Path) -> None:
        self.case, self.rank = case, rank
        self.model = Model(case.dtype)
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        with recorded_steps(path):
            self.optimizer = distribute(self.model, adam, accelerator="torch", **case.options)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * number + self.rank)
        data = torch.randn(4, 7, generator=generator).to(self.case.dtype)
        loss = self.model(data).float().square().mean()
        if number in self.case.overflows and self.rank == 1:
            loss = loss * torch.inf
        self.optimizer.scale_loss(loss).backward()
        self.optimizer.step()

    def steps(self, start: int, stop: int) -> None:
        for number in range(start + 1, stop + 1):
            self.step(number)

    def end(self) -> list[Tensor]:
        self.optimizer.finish_saving()
        self.optimizer.release()
        return [param.detach().clone() for param in self.model.parameters()]


def _resumed(case: Case, rank: int, path: Path) -> list[Tensor]:
    """Is ended a step after its checkpoint, and begins again from it."""
    killed, checkpoint = Training(case, rank, path), path.with_name("checkpoint")
    killed.steps(0, SAVED)
    weights = {name: value.clone() for name, value in killed.model.state_dict().items()}
    killed.optimizer.save(checkpoint)
    killed.step(SAVED + 1)
    killed.end()
    training = Training(case, rank, path)
    training.model.load_state_dict(weights)
    training.optimizer.load(checkpoint)
    training.steps(SAVED, STEPS)
    return training.end()


@dataclass(frozen=True)
class Outcome:
    """What a rank found of a case: both runs, and whether their params are equal to the
    bit."""

    straight: Steps
    resumed: Steps
    is_equal: bool


def _outcome(case: Case, rank: int, folder: Path) -> Outcome:
    training = Training(case, rank, folder / "straight")
    training.steps(0, STEPS)
    straight = training.end()
    resumed = _resumed(case, rank, folder / "resumed")
    dist.barrier()
    is_equal = all(
        torch.equal(one.view(-1), other.view(-1))
        for one, other in zip(straight, resumed, strict=True)
    )
    return Outcome(read_steps(folder / "straight"), read_steps(folder / "resumed"), is_equal)


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Outcome]:
    torch.use_deterministic_algorithms(True)
    return {name: _outcome(case, rank, folder / name) for name, case in CASES.items()}


facts = facts_of(collect_facts, 2)


@pytest.mark.parametrize("name", CASES)
def test_run_when_resumed_from_a_checkpoint_then_equal_to_the_bit(name: str, facts: Facts) -> None:
    for outcome in facts[name]:
        assert outcome.is_equal
        assert [*outcome.straight] == [*outcome.resumed] == [*range(STEPS + 1)]
        assert parted(outcome.straight, outcome.resumed) == {}


@pytest.mark.parametrize("name", CASES)
def test_step_when_made_then_params_and_state_change_and_a_skipped_one_changes_nothing(
    name: str, facts: Facts
) -> None:
    steps = facts.first[name].straight
    trained = {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight"}
    assert {name for _, name in steps[1].checksums} == {*trained, "unused"}
    for number in range(1, STEPS + 1):
        # a loss scale that is still too large skips others as well
        is_skipped = not steps[number].updated
        assert is_skipped or number not in CASES[name].overflows
        changed = differing(steps[number - 1], steps[number])
        assert {name for kind, name in changed if kind in STATE} == (
            set() if is_skipped else trained
        )
        assert {name for kind, name in changed if kind == "main_average"} <= (
            set() if is_skipped else trained
        )
