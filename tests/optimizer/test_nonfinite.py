"""Gradients that are inf or nan on one rank: what all ranks do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.errors import NonFiniteGradError
from tests.support.models import Params, exact_grads, stepped
from tests.support.spawn import run_ranks


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a bad step between two good ones."""

    error: str
    updated: bool | None
    before: list[Tensor]
    after: list[Tensor]
    scale: float
    step_count: list[float]


CASES = {
    "raise fp32": (DistOptConfig(accelerator="torch"), torch.float32),
    "raise bf16": (DistOptConfig(accelerator="torch"), torch.bfloat16),
    "skip fp32": (DistOptConfig(accelerator="torch", nonfinite="skip"), torch.float32),
    "skip bf16": (DistOptConfig(accelerator="torch", nonfinite="skip"), torch.bfloat16),
    "skip constant scale": (DistOptConfig(accelerator="torch", nonfinite="skip", loss_scale=8.0), torch.float16),
    "log bf16": (DistOptConfig(accelerator="torch", nonfinite="log"), torch.bfloat16),
    "dynamic fp16": (
        DistOptConfig(accelerator="torch", loss_scale="dynamic", initial_loss_scale=64.0, hysteresis=1),
        torch.float16,
    ),
    "dynamic fp16 at its minimum": (
        DistOptConfig(accelerator="torch", loss_scale="dynamic", initial_loss_scale=1.0, hysteresis=1),
        torch.float16,
    ),
}


def meet_nonfinite(rank: int, size: int) -> dict[str, Outcome]:
    return {name: _meet(rank, config, dtype) for name, (config, dtype) in CASES.items()}


def _meet(rank: int, config: DistOptConfig, dtype: torch.dtype) -> Outcome:
    model = Params(default=dtype)
    optimizer = distribute(model, config)
    _train(model, optimizer, rank, step=0)
    before = _everything(optimizer)
    error, updated = "", None
    try:
        updated = _train(model, optimizer, rank, step=1, poison=rank == 1)
    except NonFiniteGradError as caught:
        error = str(caught)
    after = _everything(optimizer)
    steps = [float(state["step"]) for state in optimizer.sharded.inner.state.values()]
    return Outcome(error, updated, before, after, float(optimizer.sharded.loss_scale.scale), steps)


def _train(model: Params, optimizer: TorchDistributedOptimizer, rank: int, step: int, poison: bool = False) -> bool:
    optimizer.zero_grad()
    grads = exact_grads(step, 0, rank)
    if poison:
        grads["deep.weight"][1, 2, 3] = float("nan")
        grads["scale"][0] = float("inf")
    optimizer.scale_loss(model(grads)).backward()
    return stepped(optimizer).updated


def _everything(optimizer: TorchDistributedOptimizer) -> list[Tensor]:
    """All that a skipped step must leave alone: model params, main params, moments, step counts."""
    sharded = optimizer.sharded
    tensors: list[Any] = [buffer.param for buffer in sharded.buffers] + [run.main for run in sharded.flat_params]
    tensors += [value for state in sharded.inner.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return run_ranks(meet_nonfinite, 2)


def _is_unchanged(outcome: Outcome) -> bool:
    return all(torch.equal(left, right) for left, right in zip(outcome.before, outcome.after, strict=True))


@pytest.mark.parametrize("name", ["raise fp32", "raise bf16", "dynamic fp16 at its minimum"])
def test_step_when_policy_is_raise_then_all_ranks_name_rank_and_params(
    outcomes: list[dict[str, Outcome]], name: str
) -> None:
    # The poison was put in on rank 1; after the reduce-scatter the owners of those elements see it.
    texts = {outcome[name].error for outcome in outcomes}
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("Invalid gradient: inf or nan on rank ")
    assert "held.deep_weight" in text and "held.scale" in text
    assert text.endswith(
        "Must be finite. Look at those params first; MEGATRON_DISTOPT_NONFINITE=skip leaves such steps out, "
        "=log goes on with them."
    )
    assert all(_is_unchanged(outcome[name]) for outcome in outcomes)


@pytest.mark.parametrize("name", ["skip fp32", "skip bf16", "skip constant scale", "dynamic fp16"])
def test_step_when_skipped_then_nothing_changes_bit_for_bit(outcomes: list[dict[str, Outcome]], name: str) -> None:
    for outcome in outcomes:
        assert outcome[name].updated is False
        assert _is_unchanged(outcome[name])
        assert set(outcome[name].step_count) == {1.0}


def test_step_when_policy_is_log_then_updates_all_the_same(outcomes: list[dict[str, Outcome]]) -> None:
    for outcome in outcomes:
        assert outcome["log bf16"].updated is True
        assert not _is_unchanged(outcome["log bf16"])
        assert set(outcome["log bf16"].step_count) == {2.0}


def test_dynamic_scale_when_overflow_then_backs_off_on_all_ranks(outcomes: list[dict[str, Outcome]]) -> None:
    assert [outcome["dynamic fp16"].scale for outcome in outcomes] == [32.0, 32.0]
    assert [outcome["skip constant scale"].scale for outcome in outcomes] == [8.0, 8.0]
