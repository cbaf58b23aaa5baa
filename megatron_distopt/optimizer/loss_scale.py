"""The loss scale: the loss is multiplied by it so that 16-bit gradients do not vanish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_distopt.config import LARGEST_SCALE, DistOptConfig


class LossScale(Protocol):
    """The interface of a loss scale that the sharded step needs. Hosts wrap their own."""

    @property
    def scale(self) -> Tensor:
        """fp32 [1]."""

    @property
    def value(self) -> float:
        """The same number on the CPU. Reading it waits for the device only with a host's loss
        scale."""

    def can_back_off(self) -> bool:
        """Whether a smaller scale may prevent an overflow. If not, `nonfinite` decides."""

    def update(self, found_nonfinite: bool) -> None:
        """Called once in each step, with the same argument on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ConstantLossScale:
    """A loss scale that never changes; 1.0 for none."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self.scale = torch.tensor([scale], dtype=torch.float32, device=device)
        self.value = scale

    def can_back_off(self) -> bool:
        return False

    def update(self, found_nonfinite: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}  # the scale is an option, not a state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class DynamicLossScale:
    """Halves after `hysteresis` overflows, doubles after `growth_interval` steps without one.

    Once the hysteresis is used up, every further overflow halves the scale. A growth restores the
    hysteresis. These are the rules of Megatron's DynamicGradScaler, so that loss-scale curves can
    be compared, except that the scale never becomes infinite.
    """

    def __init__(self, config: DistOptConfig, device: torch.device) -> None:
        self.scale = torch.tensor([config.initial_loss_scale], dtype=torch.float32, device=device)
        self.value = config.initial_loss_scale
        self._min_scale = config.min_loss_scale
        self._growth_interval = config.growth_interval
        self._hysteresis = config.hysteresis
        #: Plain numbers. It is always the same object, so that others may hold it.
        self.state: dict[str, Any] = {
            "scale": self.value,
            "good_steps": 0,
            "tolerated": config.hysteresis,
        }

    def can_back_off(self) -> bool:
        return self.value > self._min_scale

    def update(self, found_nonfinite: bool) -> None:
        state = self.state
        if found_nonfinite:
            state["good_steps"] = 0
            state["tolerated"] -= 1
            if state["tolerated"] <= 0:
                self._set(max(self.value / 2, self._min_scale))
            return
        state["good_steps"] += 1
        if state["good_steps"] == self._growth_interval:
            state |= {"good_steps": 0, "tolerated": self._hysteresis}
            self._set(min(self.value * 2, LARGEST_SCALE))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state.update(state)
        self._set(state["scale"])

    def _set(self, value: float) -> None:
        self.value = self.state["scale"] = value
        self.scale.fill_(value)


def make_loss_scale(config: DistOptConfig, device: torch.device) -> LossScale:
    if config.loss_scale == "dynamic":
        return DynamicLossScale(config, device)
    return ConstantLossScale(float(config.loss_scale or 1.0), device)
