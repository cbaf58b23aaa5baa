"""The state of the inner optimizer, taken out and put back into a new one of any class: the next
steps are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.optimizer.inner_state import count_updates, moments_of, restore, restore_group

NUMELS = (7, 1, 12)
Build = Callable[[list[dict[str, Any]]], Optimizer]


class ApexLike(Optimizer):
    """Counts in the group, as apex.optimizers.FusedAdam does; the update is some element-wise
    one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 0.1)
                param.sub_(state["exp_avg"] * group["lr"] / (1 - 0.9 ** group["step"]))


class DeepSpeedLike(ApexLike):
    """Counts beside the moments with an int, as deepspeed.ops.adam.DeepSpeedCPUAdam does."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(param))
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                param.sub_(state["exp_avg"] * group["lr"] / (1 - 0.9 ** state["step"]))


DeepSpeedLike.__module__ = "deepspeed.ops.adam.cpu_adam"

BUILDS: dict[str, Build] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=False, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=False),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "sgd with momentum fused": lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, fused=True
    ),
    "apex": ApexLike,
    "deepspeed": DeepSpeedLike,
}


def _mains() -> list[Tensor]:
    return list((torch.arange(float(sum(NUMELS))) / 16 - 0.5).split(NUMELS))


def _built(name: str, mains: list[Tensor]) -> Optimizer:
    mains = [main.clone() for main in mains]
    return BUILDS[name]([{"params": mains[:2]}, {"params": mains[2:], "lr": 0.05}])


def _held(inner: Optimizer) -> list[Tensor]:
    return [main for group in inner.param_groups for main in group["params"]]


def _train(inner: Optimizer, first: int, steps: int) -> Optimizer:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for main in _held(inner):
            main.grad = torch.randn(main.shape, generator=generator)
        inner.step()
    return inner


def _moved(inner: Optimizer, name: str, step: int | None) -> Optimizer:
    """A new optimizer with the main params and the state of another."""
    new = _built(name, _held(inner))
    for group in new.param_groups:
        restore_group(new, group, step)
    for old, main in zip(_held(inner), _held(new), strict=True):
        group = next(
            group for group in new.param_groups if any(each is main for each in group["params"])
        )
        restore(
            new,
            group,
            main,
            {key: value.clone() for key, value in moments_of(inner, old).items()},
            step,
        )
    return new


@pytest.mark.parametrize("name", BUILDS)
def test_restore_when_into_a_new_optimizer_then_the_next_steps_are_the_same(name: str) -> None:
    whole = _train(_built(name, _mains()), 0, 6)
    begun = _train(_built(name, _mains()), 0, 3)
    moved = _train(_moved(begun, name, count_updates(begun)), 3, 3)
    assert all(map(torch.equal, _held(moved), _held(whole)))
    assert count_updates(moved) == count_updates(whole)
    for mine, other in zip(_held(moved), _held(whole), strict=True):
        left, right = moments_of(moved, mine), moments_of(whole, other)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", BUILDS)
def test_restore_when_the_optimizer_has_trained_then_its_own_state_is_gone(name: str) -> None:
    """A checkpoint may be loaded into a run that has already made steps."""
    whole = _train(_built(name, _mains()), 0, 6)
    begun = _train(_built(name, _mains()), 0, 3)
    other = _train(_built(name, _mains()), 7, 4)
    for old, main in zip(_held(begun), _held(other), strict=True):
        main.copy_(old)
        group = next(
            group for group in other.param_groups if any(each is main for each in group["params"])
        )
        restore(other, group, main, dict(moments_of(begun, old)), count_updates(begun))
        restore_group(other, group, count_updates(begun))
    assert all(map(torch.equal, _held(_train(other, 3, 3)), _held(whole)))


@pytest.mark.parametrize("source", ["adamw", "adamw fused", "adamw foreach"])
def test_restore_when_another_implementation_wrote_the_state_then_it_goes_on_as_that_one(
    source: str,
) -> None:
    whole = _train(_built(source, _mains()), 0, 6)
    for name in ("adamw", "adamw fused", "adamw foreach"):
        moved = _train(_moved(_train(_built(source, _mains()), 0, 3), name, 3), 3, 3)
        for found, wanted in zip(_held(moved), _held(whole), strict=True):
            # The kernels round in another order: an ulp of 1 at each of three steps.
            assert torch.allclose(found, wanted, rtol=0, atol=4e-7)


def test_restore_when_there_is_neither_state_nor_step_then_the_main_param_has_none() -> None:
    inner = _train(_built("adamw", _mains()), 0, 2)
    for main in _held(inner):
        restore(inner, inner.param_groups[0], main, {}, None)
    assert len(inner.state) == 0
    fresh = _train(_built("adamw", _held(inner)), 0, 2)
    assert all(map(torch.equal, _held(_train(inner, 0, 2)), _held(fresh)))
