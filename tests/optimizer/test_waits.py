"""The CPU waits for nothing in a steady step without a dynamic loss scale; and the check sees
waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from tests.support.models import Params, exact_grads, stepped
from tests.support.spawn import run_ranks
from tests.support.waits import find_waits

#: By name, options of runs whose steady step has no wait.
STEADY: dict[str, dict[str, Any]] = {
    "raise": {},
    "skip": {"nonfinite": "skip", "clip_grad": 0.3},
    "log": {"nonfinite": "log", "clip_grad": 0.3},
    "zeros counted": {"count_zeros": True},
    "constant scale": {"loss_scale": 8.0, "clip_grad": 1.0},
    "16-bit grads": {"grads_in_fp32": False, "clip_grad": 1.0},
    "l2": {"decay": "l2"},
}

#: What makes the CPU wait for a device, by the name under which it is found.
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense": lambda x: float(x.sum()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: x[x > 0],
    "index_put_": lambda x: x.clone().index_put_((x > 0,), x[1], accumulate=True),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
}


def _trained(
    options: dict[str, Any], rank: int, *, deferred: bool
) -> tuple[Params, TorchDistributedOptimizer]:
    """After two steps, whose results were read."""
    model = Params(default=torch.bfloat16)
    optimizer = distribute(model, DistOptConfig(accelerator="torch", **options))
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    optimizer.sharded.show_flat_params()
    for step in range(2):
        _backward(model, optimizer, rank, step)
        assert stepped(optimizer).updated
    return model, optimizer


def _backward(model: Params, optimizer: TorchDistributedOptimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(model(exact_grads(step, 0, rank))).backward()


def _found(options: dict[str, Any], rank: int, *, deferred: bool) -> list[str]:
    """In two whole iterations, of which the second settles the first."""
    model, optimizer = _trained(options, rank, deferred=deferred)
    with find_waits() as found:
        for step in (2, 3):
            _backward(model, optimizer, rank, step)
            optimizer.step()
    return found


def find_in_all(rank: int, size: int) -> dict[str, list[str]]:
    found = {name: _found(options, rank, deferred=True) for name, options in STEADY.items()}
    return {
        **found,
        "at once": _found({}, rank, deferred=False),
        "dynamic": _found({"loss_scale": "dynamic"}, rank, deferred=True),
    }


def test_step_when_it_is_steady_and_the_loss_scale_is_constant_then_the_cpu_waits_for_nothing() -> (
    None
):
    for found in run_ranks(find_in_all, 2):
        assert not any(found[name] for name in STEADY)
        assert "tolist" in found["dynamic"] and "tolist" in found["at once"]  # the statistics


def test_find_waits_when_the_cpu_waits_then_lists_it() -> None:
    for name, wait in WAITING.items():
        with find_waits() as found:
            wait(torch.arange(4.0))
        assert found[:1] == [name]
