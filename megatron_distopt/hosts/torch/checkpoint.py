"""The state of a model in torch's format, and the tensors that snapshots hold in addition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.checkpoint.load_torch_state import load_torch_state_dict, names_with_state
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.checkpoint.torch_state import TorchParams
from megatron_distopt.checkpoint.whole_model import untrained_tensors
from megatron_distopt.errors import CheckpointError, LayoutError
from megatron_distopt.hosts.start import named_params
from megatron_distopt.hosts.torch.model import ShardedModel
from megatron_distopt.hosts.watches.version_census import VersionCensus

#: The user's param groups.
_Groups = Sequence[dict[str, Any]]


def names_of_grouped(model: ShardedModel, groups: _Groups) -> dict[Parameter, str]:
    """The params in the user's groups."""
    names = {param: name for name, param in named_params(model.chunks).items()}
    grouped = [param for group in groups for param in group["params"]]
    num_left = sum(param not in names for param in grouped)
    if num_left:
        raise LayoutError(
            f"{num_left} params of the param groups are no longer in the model. This happens after "
            "load_state_dict(..., assign=True), or when a module is removed. Load without "
            "assign=True, or build the optimizer after the change."
        )
    return {param: names[param] for param in grouped}


def torch_params(model: ShardedModel, groups: _Groups) -> TorchParams:
    """What torch's format needs to know of the params in the user's groups."""
    name_of = names_of_grouped(model, groups)
    names = [[name_of[param] for param in group["params"]] for group in groups]
    empty = {
        name: tuple(param.shape)
        for param, name in name_of.items()
        if param.requires_grad and not param.numel()
    }
    return TorchParams(model.share(), names, groups, model.data, model.everyone, empty)


def load_torch_state(model: ShardedModel, groups: _Groups, state: Mapping[str, Any]) -> None:
    """Collective: takes a state in torch's format."""
    if model.untrained:
        model.begin_training_of_saved(names_with_state(torch_params(model, groups), state))
    load_torch_state_dict(torch_params(model, groups), state)
    model.params.options.sync()
    model.params.forget_followed()
    model.params.doubt()


class UntrainedTensors:
    """Module buffers and frozen params. Snapshots hold those that changed since the start.

    `is_cut`: whether the model is cut over ranks in addition to data parallelism.
    """

    def __init__(self, chunks: Sequence[Module], *, is_cut: bool) -> None:
        self._chunks, self._is_cut = chunks, is_cut
        self._census = VersionCensus({})  # as training began

    def changed(self) -> dict[str, Tensor]:
        """All module buffers, because torch's norms change theirs unnoticed, and the frozen params
        that were changed."""
        found = untrained_tensors(self._chunks)
        changed = set(self._census.changed(found))
        return {
            name: tensor
            for name, tensor in found.items()
            if name in changed or not isinstance(tensor, Parameter)
        }

    @torch.no_grad()
    def take(self, resumed: Resumed | None) -> Resumed | None:
        """Takes the tensors back from a snapshot, and remembers them as they are when training
        begins."""
        found = untrained_tensors(self._chunks)
        if resumed is not None:
            saved = resumed.state["beside"]
            is_cut_otherwise = not resumed.is_same_size and self._is_cut
            if saved and (
                is_cut_otherwise or any(saved[name].shape != found[name].shape for name in saved)
            ):
                raise CheckpointError(
                    "The snapshot has module buffers or frozen params of a model that was cut over "
                    "ranks differently. Start with the parallel sizes of the run before."
                )
            for name, tensor in saved.items():
                found[name].copy_(tensor)
            resumed = replace(resumed, state=resumed.state["state"])
        self._census = VersionCensus(found)
        return resumed
