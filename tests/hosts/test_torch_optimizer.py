"""The optimizer that `distribute` returns as an object of torch; tests/differential has its other idioms."""

from __future__ import annotations

import gc
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import TorchDistributedOptimizer, distribute
from tests.support.spawn import run_ranks

SIZE = 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def _built(model: nn.Module, **options: Any) -> TorchDistributedOptimizer:
    return distribute(model, torch.optim.AdamW(model.parameters(), lr=0.1), accelerator="torch", **options)


def _backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((2, 6), 1.0 + dist.get_rank())).square().sum()
    loss.backward()
    return loss.detach()


def given_optimizer_is_used(rank: int) -> dict[str, Any]:
    """A scheduler, and whoever else holds the optimizer that was given."""
    model = _model()
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(given, step_size=1, gamma=0.5)
    optimizer = distribute(model, given, accelerator="torch")
    before = model[0].weight.detach().clone()
    _backward(model)
    given.step()
    scheduler.step()
    return {
        "moved": not torch.equal(model[0].weight, before),
        "last_step": optimizer.last_step is not None,
        "lr": optimizer.param_groups[0]["lr"],
        "same params": optimizer.param_groups[0]["params"] == list(model.parameters()),
    }


def statistics_follow(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mask", torch.ones(5))
    optimizer = _built(model)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 6)).square().sum().backward()
        model.calls += rank + 1
        optimizer.step()
        seen.append({name: value.clone() for name, value in model.named_buffers()})
    return {"seen": seen}


def statistics_left_alone(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    adamw = torch.optim.AdamW(model.parameters())
    optimizer = distribute(model, adamw, accelerator="torch", broadcast_buffers=False)
    torch.manual_seed(rank)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return {"mean": model[1].running_mean.clone()}


def saved_params(rank: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = _built(model)
    buffer = io.BytesIO()
    torch.save(model[1].bias, buffer)
    pointers = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept = model[0].weight.detach()
    values = kept.clone()
    optimizer.release()
    del model, optimizer
    gc.collect()
    torch.full((1000, 1000), 7.0)
    return {"nbytes": buffer.tell(), "storages": len(pointers), "alive": torch.equal(kept, values)}


def empty_param(rank: int) -> dict[str, Any]:
    model = _model()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    optimizer = _built(model)
    _backward(model)
    optimizer.step()
    return {"updated": optimizer.last_step is not None and optimizer.last_step.updated}


CASES = [
    given_optimizer_is_used,
    statistics_follow,
    statistics_left_alone,
    saved_params,
    empty_param,
]


def run_all(rank: int, size: int) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE)


def test_given_optimizer_when_it_is_still_used_then_ours_steps(results: list[dict[str, Any]]) -> None:
    expected = {"moved": True, "last_step": True, "lr": 0.05, "same params": True}
    assert [result["given_optimizer_is_used"] for result in results] == [expected] * SIZE


def test_module_buffers_when_training_changes_them_then_they_are_those_of_the_first_rank(
    results: list[dict[str, Any]],
) -> None:
    first, *others = [result["statistics_follow"]["seen"] for result in results]
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert [step["calls"].item() for step in first] == [1, 2, 3]
    assert not torch.equal(first[0]["1.running_mean"], first[2]["1.running_mean"])


def test_module_buffers_when_told_so_then_they_are_left_alone(results: list[dict[str, Any]]) -> None:
    means = [result["statistics_left_alone"]["mean"] for result in results]
    assert not torch.equal(means[0], means[1])


def test_params_when_saved_alone_then_nothing_but_them_is_written(results: list[dict[str, Any]]) -> None:
    # A file of torch.save has about 1.6 kB around these 12 bytes of values; the whole buffer has 17 kB.
    assert results[0]["saved_params"]["nbytes"] < 4000
    assert results[0]["saved_params"]["storages"] == 4
    assert results[0]["saved_params"]["alive"]


def test_distribute_when_a_param_is_empty_then_it_is_left_aside(results: list[dict[str, Any]]) -> None:
    assert results[0]["empty_param"]["updated"]
