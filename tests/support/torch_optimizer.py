"""A torch optimizer over a `distribute(...)`: what torch's own state-dict calls need of one."""

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
from megatron_distopt.layout import Placement

__all__ = ["TorchOptimizer"]


class TorchOptimizer(torch.optim.Optimizer):
    """Its groups hold model params; `state` and the state dict are made of the shards.

    Args:
        model: whose params are distributed.
        config: of the optimizer.
        param_groups: as for torch; one of everything where None.
    """

    def __init__(self, model: Module, config: DistOptConfig, param_groups: Any = None) -> None:
        self.plain = distribute(model, config, param_groups=param_groups)
        self._named = {param: name for name, param in model.named_parameters()}
        inner = self.plain.sharded.inner
        super().__init__(param_groups or list(model.parameters()), dict(inner.defaults))
        for group, flat in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in flat.items() if key != "params"})

    @property
    def params(self) -> TorchParams:
        """As they are now."""
        sharded = self.plain.sharded
        placements = {name: Placement(name, tuple(param.shape)) for param, name in self._named.items()}
        names = [[self._named[param] for param in group["params"]] for group in self.param_groups]
        stats = sharded.plan.stats_group()
        return TorchParams(Share(sharded, placements), names, self.param_groups, self.plain.data, stats)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By param."""
        return StateByParam(
            self.params, {param: self._named[param] for g in self.param_groups for param in g["params"]}
        )

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor sets it."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """In torch's format."""
        return torch_state_dict(self.params)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Collective."""
        load_torch_state_dict(self.params, state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective."""
        return full_state_dict(self.params)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Options are the live ones."""
        for group, flat in zip(self.param_groups, self.plain.sharded.inner.param_groups, strict=True):
            flat.update({key: value for key, value in group.items() if key != "params"})
        self.plain.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the grad buffers."""
        self.plain.zero_grad()
