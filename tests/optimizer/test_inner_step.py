"""One step of the inner optimizer: where the kernel of torch's Adam is called by itself, every bit
is as of torch's own step."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from megatron_distopt import DistOptConfig
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner_step import skips_by_itself, step_divided, update_mains

#: Several vectors of the kernel, a rest that fills none, one element.
NUMELS = (1000, 37, 90, 128, 1)
STEPS = 5


def _mains() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def _built(kind: type[Optimizer], mains: list[Tensor], **options: Any) -> Any:
    groups = [
        {"params": mains[:3], "weight_decay": 0.1},
        {"params": mains[3:], "lr": 5e-3},
        {"params": []},
    ]
    return kind(groups, lr=1e-2, weight_decay=0.0, fused=True, **options)  # type: ignore[call-arg]


def _trained(
    kind: type[Optimizer], *, divisor: Any, bad: int = -1, by_value: bool, **options: Any
) -> tuple[list[Tensor], list[int]]:
    """Main params, state and gradients after some steps, one param without a gradient in one of
    them; and in which steps the user's hook on the inner optimizer was called."""
    mains, hooked = _mains(), list[int]()
    inner = _built(kind, mains, **options)
    inner.register_step_pre_hook(lambda *_: hooked.append(step))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        grads: list[Tensor | None] = [
            torch.randn(main.shape, generator=generator) for main in mains
        ]
        if step == 2:
            grads[1] = None
        found_inf = torch.tensor(float(step == bad)) if bad >= 0 else None
        if by_value:
            update_mains(inner, mains, grads, divisor, found_inf)
            assert all(main.grad is None for main in mains)
        else:
            for main, grad in zip(mains, grads, strict=True):
                main.grad = grad
            step_divided(inner, [grad for grad in grads if grad is not None], divisor, found_inf)
    states = [inner.state[main][key] for main in mains for key in ("step", "exp_avg", "exp_avg_sq")]
    return [*mains, *states, *(grad for grad in grads if grad is not None)], hooked


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize(
    ("divisor", "bad"), [(1.0, -1), (3.7, -1), (torch.tensor(3.7), 3), (1.0, 4)]
)
def test_update_mains_when_adam_is_fused_then_the_kernel_alone_is_called_and_every_bit_is_torchs(
    kind: type[Optimizer], divisor: Any, bad: int
) -> None:
    with mock.patch("torch.optim.adam.adam", wraps=import_module("torch.optim.adam").adam) as own:
        found, hooked = _trained(kind, divisor=divisor, bad=bad, by_value=True)
    assert own.call_count == 3  # in the first step, by param group: it makes the state
    wanted, _ = _trained(kind, divisor=divisor, bad=bad, by_value=False)
    assert len(found) == len(wanted) == 5 * len(NUMELS)
    assert all(map(torch.equal, found, wanted))
    assert hooked == []


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}])
def test_update_mains_when_a_group_is_unusual_then_it_is_as_torchs(options: Any) -> None:
    found, wanted = (
        _trained(AdamW, divisor=2.0, by_value=by_value, **options)[0] for by_value in (True, False)
    )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_update_mains_when_a_group_says_how_weights_decay_then_it_is_as_torchs(
    is_decoupled: bool,
) -> None:
    trained = list[list[Tensor]]()
    for by_value in (True, False):
        mains = _mains()
        inner = _built(Adam, mains)
        inner.param_groups[0]["decoupled_weight_decay"] = is_decoupled
        for _ in range(3):
            grads = [torch.ones_like(main) for main in mains]
            if by_value:
                update_mains(inner, mains, grads, 1.0)
                continue
            for main, grad in zip(mains, grads, strict=True):
                main.grad = grad
            inner.step()
        trained.append(mains)
    assert all(map(torch.equal, *trained))


def test_update_mains_when_step_was_replaced_then_that_is_called() -> None:
    mains = _mains()
    inner, called = _built(AdamW, mains), list[str]()
    grads = [torch.ones_like(main) for main in mains]
    update_mains(inner, mains, grads, 1.0)
    inner.step = lambda: called.append("replaced")
    update_mains(inner, mains, grads, 1.0)
    assert called == ["replaced"]


def test_choose_inner_when_fused_then_torchs_own_class_that_skips_by_itself() -> None:
    for decay, kind in (("decoupled", AdamW), ("l2", Adam)):
        choice = choose_inner(DistOptConfig(adam="torch_fused", decay=decay), "cpu")
        assert type(choice.build([{"params": [torch.zeros(2)]}])) is kind
        assert skips_by_itself(choice.build([{"params": []}]))
