"""The grad scaler of a Megatron, used as a `LossScale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.optimizer.loss_scale import ConstantLossScale, LossScale


def loss_scale_of(grad_scaler: Any, device: torch.device) -> LossScale:
    """The host's grad scaler, or a constant 1.0 if it has none."""
    return ConstantLossScale(1.0, device) if grad_scaler is None else HostLossScale(grad_scaler)


class HostLossScale:
    """Delegates to the host's own grad scaler, a MegatronGradScaler."""

    def __init__(self, grad_scaler: Any) -> None:
        self._grad_scaler = grad_scaler

    @property
    def scale(self) -> Tensor:
        """fp32 [1]."""
        scale: Tensor = self._grad_scaler.scale
        return scale

    @property
    def value(self) -> float:
        return float(self.scale.item())

    def can_back_off(self) -> bool:
        """Whether the scale is dynamic and above its minimum."""
        minimum = getattr(self._grad_scaler, "min_scale", None)
        return minimum is not None and bool(self.scale > minimum)

    def update(self, found_nonfinite: bool) -> None:
        self._grad_scaler.update(found_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._grad_scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._grad_scaler.load_state_dict(state)
