"""What a state in per-rank files holds, as it came out of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.megatron_2023.state import check_groups
from megatron_distopt.hosts.megatron_2023.state_per_rank_facts import MAIN, Kind
from megatron_distopt.hosts.megatron_2023.state_per_rank_positions import FilePosition, flat

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = [
    "REMEDY",
    "Numel",
    "SavedGroup",
    "keys_in",
    "moments_in",
    "numel_of",
    "saved_groups",
    "values_of",
]

REMEDY = "Resume with the ranks of the saved run; another size needs a checkpoint in another layout"

#: None where there is nothing to tell it from, a state from before the first step; several where moments contradict.
Numel = int | tuple[int, ...] | None


@dataclass(frozen=True)
class SavedGroup:
    """What a state holds of one group: numbers of params, main params of the 16-bit ones, and everything else."""

    numbers: list[int]
    mains: list[Tensor]
    options: Mapping[str, Any]


def saved_groups(
    optimizer: DistributedOptimizer, by_group: Mapping[int, list[FilePosition]], state: Mapping[str, Any]
) -> list[SavedGroup]:
    """In the order of this rank's groups, by what tells groups apart.

    Raises:
        CheckpointError
    """
    saved, mains = state["optimizer"]["param_groups"], state["shard_fp32_from_float16_groups"]
    matched = check_groups(_groups_here(optimizer, by_group), saved)
    if len(mains) != len(saved):
        got, rule = f"main params of {len(mains)} groups", f"be as many as its {len(saved)} param groups"
        raise CheckpointError(refusal("optimizer state", got, rule, REMEDY))
    places = [next(place for place, group in enumerate(saved) if group is wanted) for wanted in matched]
    options = [{key: value for key, value in group.items() if key != "params"} for group in matched]
    return [
        SavedGroup(list(saved[place]["params"]), list(mains[place]), about)
        for place, about in zip(places, options, strict=True)
    ]


def _groups_here(optimizer: DistributedOptimizer, by_group: Mapping[int, list[FilePosition]]) -> list[dict[str, Any]]:
    """Groups that this rank owns nothing of are not in the file."""
    return [optimizer.param_groups[number] for number in by_group]


def values_of(
    by_group: Mapping[int, list[FilePosition]], saved: Sequence[SavedGroup], state: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """By param name, then key: 1-D, main params and moments."""
    values: dict[str, dict[str, Tensor]] = {}
    for positions, group in zip(by_group.values(), saved, strict=True):
        mains = iter(group.mains)
        for position, number in zip(positions, group.numbers, strict=True):
            main = {MAIN: next(mains)} if position.has_main else {}
            values[position.name] = main | moments_in(state["optimizer"]["state"].get(number, {}))
    return values


def keys_in(
    by_group: Mapping[int, list[FilePosition]], values: Mapping[str, Mapping[str, Tensor]]
) -> dict[Kind, dict[str, torch.dtype]]:
    """Of what: every key is loaded in fp32."""
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    for position in flat(by_group):
        keys.setdefault(position.kind, {}).update(dict.fromkeys(values[position.name], torch.float32))
    return keys


def moments_in(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of one param, by key."""
    return {key: value for key, value in saved.items() if torch.is_tensor(value) and value.dim() == 1}


def numel_of(state: Mapping[str, Any], number: int) -> Numel:
    """Elements of one param."""
    moments = moments_in(state["optimizer"]["state"].get(number, {}))
    numels = tuple(dict.fromkeys(tensor.numel() for tensor in moments.values()))
    return numels if len(numels) > 1 else next(iter(numels), None)
