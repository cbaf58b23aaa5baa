"""Digests of real runs, and that a run which is repeated or resumed is the same to the bit.

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
from megatron_distopt.checkpoint.digests import GRADS, LoggedRun, differing, read_run
from megatron_distopt.errors import CheckpointError, RanksDisagreeError
from tests.support.spawn import run_ranks

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

    def __init__(self, case: Case, rank: int, path: Path, **more: Any) -> None:
        self.case, self.rank = case, rank
        self.model = Model(case.dtype)
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {
            "accelerator": "torch",
            "log_digests": 1,
            "digest_file": str(path),
            **case.options,
            **more,
        }
        self.optimizer = distribute(self.model, adam, **options)

    def step(self, number: int, grow: float = 1.0) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * number + self.rank)
        data = (torch.randn(4, 7, generator=generator) * grow).to(self.case.dtype)
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
    """What a rank found of a case: digests of both runs, and whether their params are equal to the
    bit."""

    straight: LoggedRun
    resumed: LoggedRun
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
    return Outcome(read_run(folder / "straight"), read_run(folder / "resumed"), is_equal)


def _of_other_runs(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Every rank by itself: the same weights at another size.
    groups = [dist.new_group([each]) for each in range(2)]
    alone = Training(Case(), rank, folder / f"alone {rank}", process_group=groups[rank])
    alone.steps(0, 1)
    alone.end()
    found["alone"] = read_run(folder / f"alone {rank}")
    # A run with other data from step 3 on, which logs every second step; and params that begin to
    # train in step 4.
    other = Training(Case(), rank, folder / "other", log_digests=2)
    other.steps(0, 2)
    other.step(3, grow=1.5)
    other.model.frozen.requires_grad_(True)
    other.steps(3, STEPS)
    other.end()
    dist.barrier()
    found["other"] = read_run(folder / "other")
    # Another decay of averages.
    decay = Training(CASES["averaged"], rank, folder / "decay", ema_decay=0.5)
    decay.steps(0, STEPS)
    decay.end()
    dist.barrier()
    found["decay"] = read_run(folder / "decay")
    # Without the option there is no file; and one that cannot be written stops all ranks.
    Training(Case(), rank, folder / "off", log_digests=None).steps(0, 2)
    found["off"] = (folder / "off").exists()
    with pytest.raises((CheckpointError, RanksDisagreeError), match="digest_file") as refused:
        Training(Case(), rank, folder / "other" / "below a file").step(1)
    found["refused"] = refused.type
    return found


def _ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {
        name: _outcome(case, rank, folder / name) for name, case in CASES.items()
    }
    return found | _of_other_runs(rank, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_ranks, 2, tmp_path_factory.mktemp("digests"))


def _parted(one: LoggedRun, other: LoggedRun) -> dict[int, list[Any]]:
    steps = {
        number: differing(one.steps[number], other.steps[number])
        for number in one.steps.keys() & other.steps
    }
    return {number: keys for number, keys in steps.items() if keys}


@pytest.mark.parametrize("name", CASES)
def test_run_when_resumed_from_a_checkpoint_then_equal_to_the_bit(
    name: str, found: list[dict[str, Any]]
) -> None:
    for rank in found:
        outcome: Outcome = rank[name]
        assert outcome.is_equal
        assert [*outcome.straight.steps] == [*outcome.resumed.steps] == [*range(STEPS + 1)]
        assert _parted(outcome.straight, outcome.resumed) == {}


@pytest.mark.parametrize("name", CASES)
def test_digests_when_a_step_is_made_then_params_and_state_change_and_a_skipped_one_changes_nothing(
    name: str, found: list[dict[str, Any]]
) -> None:
    steps = found[0][name].straight.steps
    trained = {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight"}
    assert {name for _, name in steps[1].digests} == {*trained, "unused"}
    for number in range(1, STEPS + 1):
        # a loss scale that is still too large skips others as well
        is_skipped = not steps[number].facts["updated"]
        assert is_skipped or number not in CASES[name].overflows
        changed = differing(steps[number - 1], steps[number])
        assert {name for kind, name in changed if kind in STATE} == (
            set() if is_skipped else trained
        )
        assert {name for kind, name in changed if kind == "main_average"} <= (
            set() if is_skipped else trained
        )


def test_digests_when_the_number_of_ranks_is_another_then_the_same_weights_have_the_same(
    found: list[dict[str, Any]],
) -> None:
    together, alone = found[0]["bf16"].straight, [rank["alone"] for rank in found]
    assert [differing(together.steps[0], each.steps[0]) for each in alone] == [[], []]
    # other data
    assert {kind for kind, _ in differing(*(each.steps[1] for each in alone))} >= {GRADS, "main"}


def test_digests_when_another_run_sees_other_data_then_they_part_there(
    found: list[dict[str, Any]],
) -> None:
    other = found[0]["other"]
    assert [*other.steps] == [0, 2, 4, 6]
    parted = _parted(found[0]["bf16"].straight, other)
    # Without clipping the update is another one from step 1 on, but not the first gradients.
    assert 0 not in parted
    added = {name for _, name in other.steps[6].digests} - {
        name for _, name in other.steps[2].digests
    }
    assert added == {"frozen.weight"}


def test_digests_when_averages_have_another_decay_then_only_these_part(
    found: list[dict[str, Any]],
) -> None:
    averaged = found[0]["averaged"].straight
    kinds = {number: {kind for kind, _ in step.digests} for number, step in averaged.steps.items()}
    assert [number for number in kinds if "main_average" in kinds[number]] == [
        *range(2, STEPS + 1)
    ], "step 1 is skipped"
    parted = _parted(averaged, found[0]["decay"])
    # The first average is a copy.
    assert [*parted] == [*range(3, STEPS + 1)]
    assert {kind for keys in parted.values() for kind, _ in keys} == {"main_average"}


def test_digests_when_not_asked_for_or_not_writable_then_no_file_or_all_stop(
    found: list[dict[str, Any]],
) -> None:
    assert not any(rank["off"] for rank in found)
    assert [rank["refused"] for rank in found] == [CheckpointError, RanksDisagreeError]
