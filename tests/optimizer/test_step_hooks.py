"""Step hooks of torch see one optimizer a step, the one that the user of a host holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module
from torch.optim import Adafactor, AdamW, Muon
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_distopt import distribute
from megatron_distopt.comm import Group
from megatron_distopt.optimizer.step import HostStep, run_step

pytestmark = pytest.mark.usefixtures("one_rank")

#: Of torch's, those that are updated by an optimizer of another one, or by a kernel.
GIVEN: dict[str, tuple[Callable[[Module], Any], dict[str, Any]]] = {
    "fused": (lambda model: AdamW(model.parameters()), {}),
    "not fused": (lambda model: AdamW(model.parameters(), foreach=True), {}),
    "low precision": (lambda model: None, {"exp_avg_dtype": "bfloat16"}),
    "whole params": (lambda model: Adafactor(model.parameters()), {}),
    "matrices": (lambda model: Muon(model.parameters()), {}),
}


@pytest.mark.parametrize("shows_inner", [True, False])
@pytest.mark.parametrize("name", GIVEN)
def test_hooks_when_a_step_is_made_then_called_once_where_users_hold_the_inner_optimizer(
    name: str, shows_inner: bool
) -> None:
    build, options = GIVEN[name]
    model = Linear(4, 4, bias=False)
    sharded = distribute(model, build(model), accelerator="torch", **options).sharded
    model(torch.ones(2, 4)).sum().backward()
    seen = list[tuple[str, Any]]()

    def note(word: str) -> Callable[..., None]:
        return lambda optimizer, *_: seen.append((word, optimizer))

    handles = [
        register_optimizer_step_pre_hook(note("before, all")),
        register_optimizer_step_post_hook(note("after, all")),
        sharded.inner.register_step_pre_hook(note("before, own")),
        sharded.inner.register_step_post_hook(note("after, own")),
    ]
    step = HostStep(optimizers=[sharded], everyone=Group.of(), shows_inner=shows_inner)
    (decision,) = run_step(step)
    assert decision.updated
    words = ["before, all", "before, own", "after, own", "after, all"] if shows_inner else []
    assert seen == [(word, sharded.inner) for word in words]
    for handle in handles:
        handle.remove()
