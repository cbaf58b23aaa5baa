"""The optimizer that `distribute` returns as an object of torch: hooks, groups, gradients, module buffers, saving."""

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


def hooks_and_closure(rank: int) -> dict[str, Any]:
    return {kind.__name__: _hooked(kind) for kind in (torch.optim.AdamW, torch.optim.RMSprop)}


def _hooked(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    model = _model()
    given = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    called: list[str] = []
    given.register_step_pre_hook(lambda *_: called.append("before, registered before"))
    optimizer = distribute(model, given, accelerator="torch")
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    returned = [optimizer.step(lambda: _backward(model)), optimizer.step()]
    return {
        "called": called,
        "returned": [None if each is None else float(each) for each in returned],
        "is_optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "updated": optimizer.last_step is not None and optimizer.last_step.updated,
    }


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


def gradients(rank: int) -> dict[str, Any]:
    model, reference = _model(), _model()
    optimizer = _built(model)
    for each in (model, reference):
        _backward(each)
    averages = []
    for param in reference.parameters():
        dist.all_reduce(param.grad)
        averages.append(param.grad / SIZE)  # type: ignore[operator]
    norm = torch.stack([grad.norm() for grad in averages]).norm()
    ours = optimizer.clip_grad_norm_(0.5)
    full = optimizer.full_grad(model[0].weight)
    optimizer.zero_grad()
    return {
        "norm": torch.allclose(ours, norm, rtol=1e-6),
        "clipped": full is not None and torch.allclose(full, averages[0] * 0.5 / (norm + 1e-6), rtol=1e-5),
        "none": optimizer.full_grad(model[0].weight) is None,
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


def strided_buffers(rank: int) -> dict[str, Any]:
    """Of a buffer that is a view, its neighbours in memory are nobody's business."""
    model = _model()
    table = torch.arange(12.0).view(3, 4) + 100 * rank
    model.register_buffer("column", table[:, 1])
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("shared", torch.tensor([float(rank)]).expand(4))
    _built(model)
    return {"table": table, "flags": model.flags.tolist(), "shared": model.shared.tolist()}


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


def rebuilt_after_it_is_gone(rank: int) -> dict[str, Any]:
    model = _model()
    optimizer = _built(model)
    _backward(model)
    optimizer.step()
    del optimizer
    second = _built(model)
    before = model[0].weight.detach().clone()
    second.zero_grad()
    _backward(model)
    second.step()
    return {"moved": not torch.equal(before, model[0].weight), "hooks": len(model[0].weight._backward_hooks)}


def empty_param(rank: int) -> dict[str, Any]:
    model = _model()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    optimizer = _built(model)
    _backward(model)
    optimizer.step()
    return {"updated": optimizer.last_step is not None and optimizer.last_step.updated}


CASES = [
    hooks_and_closure,
    given_optimizer_is_used,
    gradients,
    statistics_follow,
    statistics_left_alone,
    strided_buffers,
    saved_params,
    rebuilt_after_it_is_gone,
    empty_param,
]


def run_all(rank: int, size: int) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE)


def test_step_when_there_are_hooks_and_a_closure_then_they_are_called_as_torchs(results: list[dict[str, Any]]) -> None:
    for found in results[0]["hooks_and_closure"].values():
        assert found["called"] == ["before, registered before", "before", "after"] * 2
        assert found["returned"][0] > 0
        assert found["returned"][1] is None
        assert found["is_optimizer"]
        assert found["updated"]


def test_given_optimizer_when_it_is_still_used_then_ours_steps(results: list[dict[str, Any]]) -> None:
    expected = {"moved": True, "last_step": True, "lr": 0.05, "same params": True}
    assert [result["given_optimizer_is_used"] for result in results] == [expected] * SIZE


def test_gradients_when_asked_for_then_they_are_averages(results: list[dict[str, Any]]) -> None:
    assert [result["gradients"] for result in results] == [{"norm": True, "clipped": True, "none": True}] * SIZE


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


def test_module_buffers_when_they_are_views_then_only_their_elements_are_written(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        expected = torch.arange(12.0).view(3, 4) + 100 * rank
        expected[:, 1] -= 100 * rank
        assert torch.equal(result["strided_buffers"]["table"], expected)
        assert result["strided_buffers"]["flags"] == [True, False]
        assert result["strided_buffers"]["shared"] == [0.0] * 4


def test_params_when_saved_alone_then_nothing_but_them_is_written(results: list[dict[str, Any]]) -> None:
    # A file of torch.save has about 1.6 kB around these 12 bytes of values; the whole buffer has 17 kB.
    assert results[0]["saved_params"]["nbytes"] < 4000
    assert results[0]["saved_params"]["storages"] == 4
    assert results[0]["saved_params"]["alive"]


def test_distribute_when_the_optimizer_before_is_gone_then_takes_the_params(results: list[dict[str, Any]]) -> None:
    assert [result["rebuilt_after_it_is_gone"] for result in results] == [{"moved": True, "hooks": 1}] * SIZE


def test_distribute_when_a_param_is_empty_then_it_is_left_aside(results: list[dict[str, Any]]) -> None:
    assert results[0]["empty_param"]["updated"]
