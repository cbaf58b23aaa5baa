"""Per-rank files of Megatron-LM 23.04: every rank's `state_dict()` holds the state of its own shards.

::

    {"optimizer": {"state": {number: {"exp_avg", "exp_avg_sq", ...}}, "param_groups": [{..., "params": [number]}]},
     "grad_scaler": ...,
     "shard_fp32_from_float16_groups": [[fp32 1-D, ...], ...]}

Numbers go through the groups; in a group come the shards of fp32 params, then those of 16-bit params, each in the order
in which the model registered them. Groups of which the rank owns nothing are left out. Values of fp32 params are not
in it: they come with the model. The layout has no names, so it fits the rank that wrote it and no other size.

The fork splits a grad buffer into one shard for each rank. A run with buckets of its own has other shards, so its ranks
send each other what belongs into their files (state_per_rank_split.py); the files are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.megatron_2023.state import (
    check_moments,
    check_step_of,
    group_dicts,
    has_begun,
    install_state,
    load_groups,
    load_loss_scale,
)
from megatron_distopt.hosts.megatron_2023.state_per_rank_facts import MAIN, Facts, agree, keys_of
from megatron_distopt.hosts.megatron_2023.state_per_rank_positions import FilePosition, flat, positions_by_group
from megatron_distopt.hosts.megatron_2023.state_per_rank_saved import (
    REMEDY,
    Numel,
    keys_in,
    moments_in,
    numel_of,
    saved_groups,
    values_of,
)
from megatron_distopt.hosts.megatron_2023.state_per_rank_split import from_files, to_files
from megatron_distopt.optimizer import count_updates

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["check_state_per_rank", "load_state_per_rank", "state_per_rank"]


def state_per_rank(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """This rank's state in the layout above; every tensor has memory of its own.

    Collective over the data-parallel ranks where the run's buckets are not those of the layout.
    """
    facts = agree(optimizer, Facts(keys_of(optimizer), count_updates(optimizer.sharded.inner), {}))
    values = to_files(optimizer, facts)
    by_group = positions_by_group(optimizer)
    numbers = {position.name: number for number, position in enumerate(flat(by_group))}
    dicts, counted = group_dicts(optimizer), {} if facts.step is None else {"step": facts.step}
    state: dict[str, Any] = {
        "optimizer": {
            "state": {number: _state_of(optimizer, values[name], facts) for name, number in numbers.items()},
            "param_groups": [
                {**dicts[group], **counted, "params": [numbers[position.name] for position in positions]}
                for group, positions in by_group.items()
            ],
        },
        "shard_fp32_from_float16_groups": [
            [values[position.name][MAIN] for position in positions if position.has_main]
            for positions in by_group.values()
        ],
    }
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def check_state_per_rank(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_state_per_rank` would take it.

    Raises:
        CheckpointError
    """
    missing = [key for key in ("optimizer", "shard_fp32_from_float16_groups") if key not in state]
    if missing or "state" not in state["optimizer"]:
        got = f"without {', '.join(missing) or 'state'}"
        remedy = "Load one that a distributed optimizer of this fork wrote, or write --no-load-optim"
        raise CheckpointError(refusal("optimizer state", got, "be a rank's own", remedy))
    by_group = positions_by_group(optimizer)
    saved = saved_groups(optimizer, by_group, state)
    ours = [_numels(positions) for positions in by_group.values()]
    theirs = [[numel_of(state, number) for number in group.numbers] for group in saved]
    if not _fit(ours, theirs):
        got, rule = f"shards of {theirs} elements by group", f"fit this rank's, of {ours}"
        raise CheckpointError(refusal("optimizer state", got, rule, REMEDY))
    mains = [[tensor.numel() for tensor in group.mains] for group in saved]
    wanted = [[each.shard.in_param.numel for each in positions if each.has_main] for positions in by_group.values()]
    if mains != wanted:
        got, rule = f"main params of {mains} elements by group", f"fit this rank's, of {wanted}"
        raise CheckpointError(refusal("optimizer state", got, rule, REMEDY))
    may_be_none = not has_begun(state["optimizer"])
    for kept in state["optimizer"]["state"].values():
        check_moments(optimizer, "optimizer state", moments_in(kept), may_be_none=may_be_none)
    check_step_of(optimizer, state["optimizer"])


@torch.no_grad()
def load_state_per_rank(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes `state_per_rank`, or what the fork's own optimizer wrote, back; after `check_state_per_rank`.

    Collective over the data-parallel ranks where the run's buckets are not those of the layout.
    """
    by_group = positions_by_group(optimizer)
    saved = saved_groups(optimizer, by_group, state)
    values = values_of(by_group, saved, state)
    groups = {number: each.options for number, each in zip(by_group, saved, strict=True)}
    step = check_step_of(optimizer, state["optimizer"])
    facts = agree(optimizer, Facts(keys_in(by_group, values), step, groups))
    load_groups([optimizer.param_groups[number] for number in facts.groups], list(facts.groups.values()))
    load_loss_scale(optimizer, state)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it
    install_state(optimizer, from_files(optimizer, values, facts), facts.step)


def _state_of(optimizer: DistributedOptimizer, values: Mapping[str, Tensor], facts: Facts) -> dict[str, Any]:
    state: dict[str, Any] = {key: tensor for key, tensor in values.items() if key != MAIN}
    if optimizer.host_is_torchs and facts.step is not None:
        state["step"] = torch.tensor(float(facts.step))
    return state


def _numels(positions: list[FilePosition]) -> list[int]:
    return [position.shard.in_param.numel for position in positions]


def _fit(ours: list[list[int]], theirs: list[list[Numel]]) -> bool:
    """Group by group; None fits everything."""
    if [len(group) for group in ours] != [len(group) for group in theirs]:
        return False
    pairs = [pair for mine, their in zip(ours, theirs, strict=True) for pair in zip(mine, their, strict=True)]
    return all(their is None or mine == their for mine, their in pairs)
