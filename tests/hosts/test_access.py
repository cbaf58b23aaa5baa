"""The debug mode: whoever touches memory that a collective is using is told where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_distopt import distribute
from megatron_distopt.errors import AccessError
from tests.support.spawn import run_ranks


def _built() -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    options = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 40, "debug": True}
    return model, distribute(model, torch.optim.AdamW(model.parameters(), lr=0.1), accelerator="torch", **options)


def _round(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


def run_all(rank: int, size: int) -> dict[str, str]:
    model, optimizer = _built()
    found = {}
    for _ in range(3):
        _round(model, optimizer)  # of which none raises
    try:
        with torch._C.DisableTorchFunctionSubclass():  # as a kernel that another package binds
            model[0].weight.sum()
    except AccessError as error:
        found["read"] = str(error)
    optimizer.finish_param_gather()
    found["after"] = str(float(model[0].weight.detach().sum()) != 0)
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    try:
        optimizer._model.grads.slots[0].view.mul_(2)
    except AccessError as error:
        found["written"] = str(error)
    optimizer.step()
    optimizer.release()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run_ranks(run_all, 2)[0]


def test_param_when_read_while_it_is_gathered_then_name_and_line_are_said(found: dict[str, str]) -> None:
    assert "'0.weight'" in found["read"]
    assert "test_access.py:" in found["read"]
    assert "finish_param_gather()" in found["read"]
    assert found["after"] == "True"


def test_gradient_when_written_to_while_it_is_reduced_then_name_and_line_are_said(found: dict[str, str]) -> None:
    assert "test_access.py:" in found["written"]
    assert "overlap_grad_reduce=False" in found["written"]
