"""An optimizer of `distribute(...)` whose state dict has torch's own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.checkpoint import Share
from megatron_distopt.checkpoint.full_state import full_state_dict
from megatron_distopt.checkpoint.load_torch_state import load_torch_state_dict
from megatron_distopt.checkpoint.torch_state import StateByParam, TorchParams, torch_state_dict
from megatron_distopt.hosts.base import named_params
from megatron_distopt.hosts.torch.optimizer import TorchDistributedOptimizer

__all__ = ["TorchOptimizer", "made"]


def made(model: Module, config: DistOptConfig, param_groups: Any = None) -> TorchOptimizer:
    """Of a model."""
    optimizer: Any = distribute(model, config, param_groups=param_groups)
    optimizer.__class__ = TorchOptimizer
    distributed: TorchOptimizer = optimizer
    return distributed


class TorchOptimizer(TorchDistributedOptimizer):
    """Takes the place of the calls that are about one rank's state."""

    @property
    def params(self) -> TorchParams:
        """As they are now."""
        model = self._model
        name_of = {param: name for name, param in named_params(model.chunks).items()}
        names = [[name_of[param] for param in group["params"]] for group in self.param_groups]
        share = Share(self.sharded, model.placements, self.sharded.plan.counted)
        return TorchParams(share, names, self.param_groups, model.ranks.data, model.ranks.stats)

    @property
    def state(self) -> Any:
        """By param."""
        name_of = {param: name for name, param in named_params(self._model.chunks).items()}
        grouped = [param for group in self.param_groups for param in group["params"]]
        return StateByParam(self.params, {param: name_of[param] for param in grouped})

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """In torch's format; no collective."""
        self.finish_param_gather()
        return torch_state_dict(self.params)  # main params as they are: loading compares them with the model's

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective."""
        self._before_state()
        load_torch_state_dict(self.params, state_dict)
        for each in self._model.params._short:
            each._version = -1  # the main param follows the model param before the next step, where they differ

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Collective."""
        self.finish_param_gather()
        return full_state_dict(self.params)
