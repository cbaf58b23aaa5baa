"""Digests of real runs, and that a run which is repeated or resumed is the same to the bit.

One spawn of two ranks makes all runs. Each case is trained without interruption, and once more with a restart from a
checkpoint: the second run goes one step further than its checkpoint, as a run does that is killed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.checkpoint.digest_files import LoggedRun, differing, read_run
from megatron_distopt.checkpoint.digests import GRADS
from megatron_distopt.errors import CheckpointError, ConfigError, RanksDisagreeError
from megatron_distopt.optimizer.accelerator import repeatable_settings
from megatron_distopt.optimizer.deterministic import check_deterministic
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

STEPS, SAVED = 6, 3
STATE = ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        options: of `distribute`.
        dtype: of the params.
        adam: builds the optimizer.
        overflows: steps whose loss is inf on one rank.
        by_state_dict: whether it resumes from `local_state_dict()` instead of a folder.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    overflows: tuple[int, ...] = ()
    by_state_dict: bool = False


OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100}
CASES = {
    "bf16": Case({"clip_grad": 0.5, "deterministic": True}),
    "fp32": Case(dtype=torch.float32, by_state_dict=True),
    "overlapped": Case({"clip_grad": 0.5, **OVERLAPS}),
    "grads in 16 bits": Case({"reduce_dtype": "bfloat16", **OVERLAPS}),
    "saved in the background": Case({"async_save": True, **OVERLAPS}),
    "fp16": Case({"loss_scale": "dynamic", "hysteresis": 1, "growth_interval": 2}, torch.float16, overflows=(2, 5)),
    "low precision": Case({"main_params_dtype": "remainder", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}),
    "rounded at random": Case({"main_params_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"}),
    "nan is skipped": Case({"nonfinite": "skip"}, overflows=(2, 5)),
}


class Model(nn.Module):
    """Some params of a size that no shard divides, one of which never has a gradient, and one that is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3, bias=False)
        self.unused, self.frozen = nn.Parameter(torch.ones(11)), nn.Linear(3, 3, bias=False)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator).to(dtype)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.last(torch.relu(self.norm(self.first(x)))))


class Training:
    """One process of a run.

    Args:
        case: what is trained.
        rank: whose data it sees.
        folder: of the digests.
    """

    def __init__(self, case: Case, rank: int, folder: Path, **more: Any) -> None:
        self.case, self.rank = case, rank
        self.model = Model(case.dtype)
        adam = case.adam(self.model.parameters(), lr=0.01)
        options = {"log_digests": 1, "digest_folder": str(folder), **case.options, **more}
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


def _straight(case: Case, rank: int, folder: Path) -> list[Tensor]:
    training = Training(case, rank, folder)
    training.steps(0, STEPS)
    return training.end()


def _resumed(case: Case, rank: int, folder: Path) -> list[Tensor]:
    """Is ended a step after its checkpoint, and begins again from it."""
    killed = Training(case, rank, folder)
    killed.steps(0, SAVED)
    state = copy.deepcopy(killed.optimizer.local_state_dict()) if case.by_state_dict else None
    weights = {name: value.clone() for name, value in killed.model.state_dict().items()}
    if state is None:
        killed.optimizer.save(folder / "checkpoint")
    killed.step(SAVED + 1)
    killed.end()
    training = Training(case, rank, folder)
    training.model.load_state_dict(weights)
    if state is None:
        training.optimizer.load(folder / "checkpoint")
    else:
        training.optimizer.load_local_state_dict(state)
    training.steps(SAVED, STEPS)
    return training.end()


@dataclass(frozen=True)
class Outcome:
    """What a rank found of a case: digests of both runs, and whether their params are equal to the bit."""

    straight: LoggedRun
    resumed: LoggedRun
    is_equal: bool


def _outcome(case: Case, rank: int, folder: Path) -> Outcome:
    straight = _straight(case, rank, folder / "straight")
    resumed = _resumed(case, rank, folder / "resumed")
    dist.barrier()
    is_equal = all(torch.equal(one.view(-1), other.view(-1)) for one, other in zip(straight, resumed, strict=True))
    return Outcome(read_run(folder / "straight"), read_run(folder / "resumed"), is_equal)


def _of_other_runs(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Every rank by itself: the same weights at another size.
    groups = [dist.new_group([each]) for each in range(2)]
    alone = Training(Case(), rank, folder / f"alone {rank}", process_group=groups[rank])
    alone.steps(0, 1)
    alone.end()
    found["alone"] = read_run(folder / f"alone {rank}")
    # A run with other data from step 3 on, which logs every second step; and params that begin to train in step 4.
    other = Training(Case(), rank, folder / "other", log_digests=2)
    other.steps(0, 2)
    other.step(3, grow=1.5)
    other.model.frozen.requires_grad_(True)
    other.steps(3, STEPS)
    other.end()
    dist.barrier()
    found["other"] = read_run(folder / "other")
    # Nothing is due in a run that is shorter than N, but what it begins with; and no folder without the option.
    for name, options in {"short": {"log_digests": 100}, "off": {"log_digests": None}}.items():
        training = Training(Case(), rank, folder / name, **options)
        training.steps(0, 2)
        training.end()
    dist.barrier()
    found["short"], found["off"] = read_run(folder / "short"), (folder / "off").exists()
    # A folder that one rank cannot write to.
    (folder / f"file {rank}").write_text("")
    where = folder / "file 1" if rank == 1 else folder / "file 0 not"
    training = Training(Case(), rank, folder / "elsewhere")
    training.optimizer._digests._config = DistOptConfig(log_digests=1, digest_folder=str(where))
    try:
        training.step(1)
    except (CheckpointError, RanksDisagreeError) as error:
        found["refused"] = (type(error), str(error))
    training.end()
    torch.use_deterministic_algorithms(False)
    try:
        Training(Case(), rank, folder / "refused", deterministic=True)
    except ConfigError as error:
        found["switch is off"] = str(error)
    return found


def _ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {name: _outcome(case, rank, folder / name) for name, case in CASES.items()}
    return found | _of_other_runs(rank, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_ranks, 2, tmp_path_factory.mktemp("digests"))


def _parted(one: LoggedRun, other: LoggedRun) -> dict[int, list[Any]]:
    steps = {number: differing(one.steps[number], other.steps[number]) for number in one.steps.keys() & other.steps}
    return {number: keys for number, keys in steps.items() if keys}


@pytest.mark.parametrize("name", CASES)
def test_run_when_resumed_from_a_checkpoint_then_equal_to_the_bit(name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        outcome: Outcome = rank[name]
        assert outcome.is_equal
        assert [*outcome.straight.steps] == [*outcome.resumed.steps] == [*range(STEPS + 1)]
        assert _parted(outcome.straight, outcome.resumed) == {}
        assert (outcome.straight.changed, outcome.resumed.changed) == ({}, {})
        assert [start.step for start in outcome.resumed.starts] == [0, SAVED]


@pytest.mark.parametrize("name", CASES)
def test_digests_when_a_step_is_made_then_params_and_state_change_and_a_skipped_one_changes_nothing(
    name: str, found: list[dict[str, Any]]
) -> None:
    steps = found[0][name].straight.steps
    trained = {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight"}
    assert {key.name for key in steps[1].digests} == {*trained, "unused"}
    for number in range(1, STEPS + 1):
        is_skipped = not steps[number].facts["updated"]  # a loss scale that is still too large skips others as well
        assert is_skipped or number not in CASES[name].overflows
        changed = differing(steps[number - 1], steps[number])
        assert {key.name for key in changed if key.kind in STATE} == (set() if is_skipped else trained)


def test_digests_when_the_number_of_ranks_is_another_then_the_same_weights_have_the_same(
    found: list[dict[str, Any]],
) -> None:
    together, alone = found[0]["bf16"].straight, [rank["alone"] for rank in found]
    assert [differing(together.steps[0], each.steps[0]) for each in alone] == [[], []]
    assert {key.kind for key in differing(*(each.steps[1] for each in alone))} >= {GRADS, "main"}  # other data


def test_digests_when_another_run_sees_other_data_then_they_part_there(found: list[dict[str, Any]]) -> None:
    other = found[0]["other"]
    assert [*other.steps] == [0, 2, 4, 6]
    parted = _parted(found[0]["bf16"].straight, other)
    # Without clipping the update is another one from step 1 on, but not the first gradients.
    assert 0 not in parted
    added = {key.name for key in other.steps[6].digests} - {key.name for key in other.steps[2].digests}
    assert added == {"frozen.weight"}


def test_digests_when_a_run_is_shorter_than_n_then_its_beginning_is_there(found: list[dict[str, Any]]) -> None:
    assert [*found[0]["short"].steps] == [0]
    assert not found[0]["off"]


def test_digests_when_one_rank_cannot_write_then_all_stop(found: list[dict[str, Any]]) -> None:
    assert [rank["refused"][0] for rank in found] == [RanksDisagreeError, CheckpointError]
    assert all("--distopt-digest-folder" in rank["refused"][1] for rank in found)


class _Group:
    """A group of ranks over a backend."""

    size = 2

    def __init__(self, carrier: str) -> None:
        self.carrier = carrier


CUDA_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
REFUSED = {
    "a device": ("xpu", "gloo", {}, "Invalid device: xpu. --distopt-log-digests"),
    "a backend": ("cpu", "mpi", {}, "Invalid backend: mpi. --distopt-log-digests"),
    "workspace": ("cuda", "nccl", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "Invalid CUBLAS_WORKSPACE_CONFIG: :4096:8"),
    "no workspace": ("cuda", "nccl", {"CUBLAS_WORKSPACE_CONFIG": ""}, "Invalid CUBLAS_WORKSPACE_CONFIG: :4096:8"),
    "no algorithm": ("cuda", "nccl", {"NCCL_ALGO": ""}, "Invalid NCCL_ALGO: NCCL_ALGO=Ring"),
    "in switches": ("cuda", "nccl", {"NCCL_ALGO": "Tree,NVLS"}, "Invalid NCCL_ALGO: NCCL_ALGO=Ring"),
    "another one excluded": ("cuda", "nccl", {"NCCL_ALGO": "^Tree"}, "Invalid NCCL_ALGO: NCCL_ALGO=Ring"),
}


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As with torch.use_deterministic_algorithms(True); a group's carrier is what it says."""
    monkeypatch.setattr("megatron_distopt.optimizer.deterministic.carrier_of", lambda device, group: group.carrier)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: False)
    return lambda device, carrier, environ: check_deterministic(
        DistOptConfig(deterministic=True),
        torch.device(device),
        _Group(carrier),
        {**CUDA_ENVIRONMENT, **environ},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", REFUSED)
def test_deterministic_when_something_may_not_repeat_then_refused_with_what_to_type(name: str, repeatable: Any) -> None:
    device, carrier, environ, says = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        repeatable(device, carrier, environ)
    assert_says(str(caught.value), says)


@pytest.mark.parametrize("algorithm", ["Ring", "Tree", "^NVLS", "allreduce:tree;reducescatter:ring"])
def test_deterministic_when_all_of_it_repeats_then_taken(algorithm: str, repeatable: Any) -> None:
    repeatable("cuda", "nccl", {"NCCL_ALGO": algorithm})
    repeatable("cpu", "gloo", {"CUBLAS_WORKSPACE_CONFIG": "", "NCCL_ALGO": ""})


def test_deterministic_when_torchs_switch_is_off_then_refused(found: list[dict[str, Any]]) -> None:
    switch = "torch.use_deterministic_algorithms"
    for rank in found:
        assert_says(rank["switch is off"], f"Invalid {switch}: Call {switch}(True)")


def test_deterministic_when_cudnn_benchmarks_then_its_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert [each.name for each in repeatable_settings(CUDA_ENVIRONMENT) if each.found not in each.allowed] == [
        "torch.backends.cudnn.benchmark"
    ]
