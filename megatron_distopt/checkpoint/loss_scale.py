"""The loss scale in a checkpoint: the same three numbers, whoever keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from megatron_distopt.optimizer import LossScale

__all__ = ["load_loss_scale", "saved_loss_scale"]

_log = logging.getLogger("megatron_distopt")
#: What Megatron's grad scaler calls them, and what we do.
_NAMES = {"scale": "scale", "growth_tracker": "good_steps", "hysteresis_tracker": "tolerated"}


def saved_loss_scale(loss_scale: LossScale) -> dict[str, float]:
    """Its state as plain numbers; empty for one that never changes."""
    return {_NAMES.get(key, key): _number(value) for key, value in loss_scale.state_dict().items()}


def load_loss_scale(loss_scale: LossScale, saved: Mapping[str, float]) -> None:
    """Takes the numbers over, where both have a loss scale; a run may start or stop using one."""
    current = loss_scale.state_dict()
    missing = [key for key in current if _NAMES.get(key, key) not in saved]
    if not missing and current:
        loss_scale.load_state_dict({key: _like(value, saved[_NAMES.get(key, key)]) for key, value in current.items()})
    elif current:
        _log.warning("the checkpoint has no loss scale; it starts from the initial one")
    elif saved:
        _log.warning("the checkpoint has a loss scale and this run has none; it is left out")


def _number(value: Any) -> float:
    return float(value.item()) if torch.is_tensor(value) else value


def _like(current: Any, number: float) -> Any:
    """In the type and shape in which this run keeps it."""
    return torch.full_like(current, number) if torch.is_tensor(current) else type(current)(number)
