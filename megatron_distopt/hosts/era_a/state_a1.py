"""A1, Megatron-LM 23.04: every rank's `state_dict()` holds the state of its own shards, in a file of its own.

::

    {"optimizer": {"state": {number: {"exp_avg", "exp_avg_sq", ...}}, "param_groups": [{..., "params": [number]}]},
     "grad_scaler": ...,
     "shard_fp32_from_float16_groups": [[fp32 1-D, ...], ...]}

Numbers go through the groups; in a group come the shards of fp32 params, then those of 16-bit params, each in the order
in which the model registered them. Groups of which the rank owns nothing are left out. Values of fp32 params are not
in it: they come with the model. The layout has no names, so it fits the rank that wrote it and no other size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.era_a.state import (
    check_groups,
    check_moments,
    check_step,
    group_dicts,
    install_state,
    load_groups,
    load_loss_scale,
    saved_step,
    shards_of,
)
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer import MainRun, count_updates, moments_of

if TYPE_CHECKING:
    from megatron_distopt.hosts.era_a.optimizer import DistributedOptimizer

__all__ = ["check_state_a1", "load_state_a1", "state_a1"]

_REMEDY = "Resume with the ranks of the saved run; another size needs a checkpoint in another layout"


@dataclass(frozen=True)
class _Position:
    """One numbered param of the layout."""

    group: int
    run: MainRun
    shard: ParamShard

    @property
    def name(self) -> str:
        return self.shard.name


def state_a1(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """This rank's state in the layout above; every tensor has memory of its own."""
    by_group = _positions(optimizer)
    numbers = {position.name: number for number, position in enumerate(_flat(by_group))}
    dicts = group_dicts(optimizer)
    state: dict[str, Any] = {
        "optimizer": {
            "state": {number: _state_of(optimizer, position) for number, position in enumerate(_flat(by_group))},
            "param_groups": [
                {**dicts[group], "params": [numbers[position.name] for position in positions]}
                for group, positions in by_group.items()
            ],
        },
        "shard_fp32_from_float16_groups": [
            [_cut(position, position.run.main) for position in positions if position.run.owns_memory]
            for positions in by_group.values()
        ],
    }
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def check_state_a1(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_state_a1` would take it.

    Raises:
        CheckpointError
    """
    missing = [key for key in ("optimizer", "shard_fp32_from_float16_groups") if key not in state]
    if missing or "state" not in state["optimizer"]:
        got = f"without {', '.join(missing) or 'state'}"
        remedy = "Load one that a distributed optimizer of this fork wrote, or write --no-load-optim"
        raise CheckpointError(refusal("optimizer state", got, "be a rank's own", remedy))
    by_group = _positions(optimizer)
    saved = _saved_groups(optimizer, by_group, state)
    ours = [_numels(positions) for positions in by_group.values()]
    theirs = [[_numel_of(state, number) for number in group.numbers] for group in saved]
    if not _fit(ours, theirs):
        got, rule = f"shards of {theirs} elements by group", f"fit this rank's, of {ours}"
        raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
    mains = [[tensor.numel() for tensor in group.mains] for group in saved]
    wanted = [
        [each.shard.in_param.numel for each in positions if each.run.owns_memory] for positions in by_group.values()
    ]
    if mains != wanted:
        got, rule = f"main params of {mains} elements by group", f"fit this rank's, of {wanted}"
        raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
    has_begun = any(state["optimizer"]["state"].values())
    for kept in state["optimizer"]["state"].values():
        check_moments(optimizer, "optimizer state", _moments_in(kept), may_be_none=not has_begun)
    check_step(optimizer, _step_of(state))


@torch.no_grad()
def load_state_a1(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes `state_a1`, or what the fork's own optimizer wrote, back; after `check_state_a1`."""
    by_group = _positions(optimizer)
    saved = _saved_groups(optimizer, by_group, state)
    load_groups(_groups_here(optimizer, by_group), state["optimizer"]["param_groups"])
    load_loss_scale(optimizer, state)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it
    moments: dict[MainRun, dict[str, Tensor]] = {run: {} for run in optimizer.sharded.runs}
    for positions, group in zip(by_group.values(), saved, strict=True):
        owning = [position for position in positions if position.run.owns_memory]
        for position, tensor in zip(owning, group.mains, strict=True):
            position.run.cut(position.run.main, position.shard).copy_(tensor)
        for position, number in zip(positions, group.numbers, strict=True):
            for key, tensor in _moments_in(state["optimizer"]["state"].get(number, {})).items():
                whole = moments[position.run].setdefault(key, torch.zeros_like(position.run.main))
                position.run.cut(whole, position.shard).copy_(tensor)
    install_state(optimizer, moments, check_step(optimizer, _step_of(state)))


@dataclass(frozen=True)
class _SavedGroup:
    """What a state holds of one group: numbers of params, and main params of the 16-bit ones."""

    numbers: list[int]
    mains: list[Tensor]


def _saved_groups(
    optimizer: DistributedOptimizer, by_group: Mapping[int, list[_Position]], state: Mapping[str, Any]
) -> list[_SavedGroup]:
    """In the order of this rank's groups, by what tells groups apart.

    Raises:
        CheckpointError
    """
    saved, mains = state["optimizer"]["param_groups"], state["shard_fp32_from_float16_groups"]
    matched = check_groups(_groups_here(optimizer, by_group), saved)
    if len(mains) != len(saved):
        got, rule = f"main params of {len(mains)} groups", f"be as many as its {len(saved)} param groups"
        raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
    places = [next(place for place, group in enumerate(saved) if group is wanted) for wanted in matched]
    return [_SavedGroup(list(saved[place]["params"]), list(mains[place])) for place in places]


def _groups_here(optimizer: DistributedOptimizer, by_group: Mapping[int, list[_Position]]) -> list[dict[str, Any]]:
    """Groups that this rank owns nothing of are not in the file."""
    return [optimizer.param_groups[number] for number in by_group]


def _positions(optimizer: DistributedOptimizer) -> dict[int, list[_Position]]:
    """By group, without empty groups, in the order of the layout."""
    owned = shards_of(optimizer.sharded)
    by_group: dict[int, list[_Position]] = {}
    for name in optimizer.names_as_registered():
        if name in owned:
            run, shard = owned[name]
            by_group.setdefault(run.run.key.group, []).append(_Position(run.run.key.group, run, shard))
    return {group: sorted(by_group[group], key=lambda each: each.run.owns_memory) for group in sorted(by_group)}


def _flat(by_group: Mapping[int, list[_Position]]) -> list[_Position]:
    return [position for positions in by_group.values() for position in positions]


def _cut(position: _Position, tensor: Tensor) -> Tensor:
    """A copy: a view would be saved with everything that it is a view of."""
    return position.run.cut(tensor, position.shard).detach().clone()


def _state_of(optimizer: DistributedOptimizer, position: _Position) -> dict[str, Any]:
    moments = moments_of(optimizer.sharded.inner, position.run.main)
    state: dict[str, Any] = {key: _cut(position, tensor) for key, tensor in moments.items()}
    step = count_updates(optimizer.sharded.inner)
    if optimizer.host_is_torchs and step is not None:
        state["step"] = torch.tensor(float(step))
    return state


def _moments_in(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in saved.items() if torch.is_tensor(value) and value.dim() == 1}


def _numel_of(state: Mapping[str, Any], number: int) -> int | None:
    """None where there is nothing to tell it from: a state from before the first step."""
    moments = _moments_in(state["optimizer"]["state"].get(number, {}))
    return next((tensor.numel() for tensor in moments.values()), None)


def _numels(positions: list[_Position]) -> list[int]:
    return [position.shard.in_param.numel for position in positions]


def _fit(ours: list[list[int]], theirs: list[list[int | None]]) -> bool:
    """Group by group; None fits everything."""
    if [len(group) for group in ours] != [len(group) for group in theirs]:
        return False
    pairs = [pair for mine, their in zip(ours, theirs, strict=True) for pair in zip(mine, their, strict=True)]
    return all(their is None or mine == their for mine, their in pairs)


def _step_of(state: Mapping[str, Any]) -> int | None:
    saved = state["optimizer"]
    found = saved_step(saved["param_groups"], list(saved["state"].values()))
    return 0 if found is None and not any(saved["state"].values()) else found
