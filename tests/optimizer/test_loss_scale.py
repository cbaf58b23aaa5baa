"""The dynamic loss scale, step by step, and a constant one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.config import DistOptConfig
from megatron_distopt.optimizer.loss_scale import (
    ConstantLossScale,
    DynamicLossScale,
    LossScale,
    make_loss_scale,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rules:
    """What a dynamic scale is told."""

    initial: float = 16.0
    minimum: float = 1.0
    growth_interval: int = 3
    hysteresis: int = 2

    def build(self) -> DynamicLossScale:
        config = DistOptConfig(
            loss_scale="dynamic",
            initial_loss_scale=self.initial,
            min_loss_scale=self.minimum,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
        )
        return DynamicLossScale(config, CPU)


def run(loss_scale: LossScale, overflows: Sequence[bool]) -> list[float]:
    scales = []
    for overflow in overflows:
        loss_scale.update(found_nonfinite=overflow)
        scales.append(loss_scale.scale.item())
    return scales


def steps(text: str) -> list[bool]:
    """ "x" for an overflow, "." for a good step."""
    return [letter == "x" for letter in text]


RULES = st.builds(
    Rules,
    initial=st.sampled_from((1.0, 4.0, 2.0**16, 2.0**125)),
    minimum=st.sampled_from((0.25, 1.0)),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
)
OVERFLOWS = st.lists(st.booleans(), max_size=40)


@pytest.mark.parametrize(
    ("overflows", "scales"),
    [
        pytest.param("...", [16, 16, 32], id="doubles after the interval"),
        pytest.param("......", [16, 16, 32, 32, 32, 64], id="counts anew after a growth"),
        pytest.param("..x...", [16, 16, 16, 16, 16, 32], id="counts anew after an overflow"),
        pytest.param("xx", [16, 8], id="halves when the hysteresis is used up"),
        pytest.param("xxxx", [16, 8, 4, 2], id="then halves at every overflow"),
        pytest.param("x.x.x", [16, 16, 8, 8, 4], id="good steps do not fill the hysteresis"),
        pytest.param("xx...x.x", [16, 8, 8, 8, 16, 16, 16, 8], id="a growth does"),
        pytest.param("xxxxxxxx", [16, 8, 4, 2, 1, 1, 1, 1], id="stops at the minimum"),
    ],
)
def test_dynamic_scale_when_steps_are_good_or_not_then_it_follows_the_table(
    overflows: str, scales: list[float]
) -> None:
    loss_scale = Rules().build()
    assert run(loss_scale, steps(overflows)) == scales
    assert loss_scale.can_back_off() == (scales[-1] > 1)


def test_dynamic_scale_when_it_is_near_infinity_then_it_stays_below() -> None:
    assert run(Rules(initial=2.0**126, growth_interval=1).build(), steps("...")) == [2.0**127] * 3


@settings(deadline=None)
@given(rules=RULES, before=OVERFLOWS, after=OVERFLOWS)
def test_state_dict_when_loaded_into_a_new_scale_then_both_go_on_alike(
    rules: Rules, before: list[bool], after: list[bool]
) -> None:
    first, second = rules.build(), rules.build()
    run(first, before)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert run(second, after) == run(first, after)


def test_scale_when_it_changes_then_the_tensor_stays_the_same_object() -> None:
    """Kernels and hosts keep a reference to it."""
    loss_scale = Rules(hysteresis=1, growth_interval=1).build()
    tensor, saved = loss_scale.scale, loss_scale.state_dict()
    run(loss_scale, steps("x.x"))
    assert saved["scale"] == 16.0
    loss_scale.load_state_dict({"scale": 64.0, "good_steps": 0, "tolerated": 1})
    assert loss_scale.scale is tensor
    assert (tensor.item(), tensor.dtype, tensor.shape) == (64.0, torch.float32, (1,))


def test_constant_scale_when_steps_overflow_then_it_stays_and_offers_no_cure() -> None:
    for option, scale in ((None, 1.0), (1024, 1024.0), (0.5, 0.5)):
        loss_scale = make_loss_scale(DistOptConfig(loss_scale=option), CPU)
        assert isinstance(loss_scale, ConstantLossScale) and not loss_scale.can_back_off()
        assert run(loss_scale, steps("xxx...")) == [scale] * 6
        loss_scale.load_state_dict(loss_scale.state_dict())
        assert loss_scale.scale.item() == scale
