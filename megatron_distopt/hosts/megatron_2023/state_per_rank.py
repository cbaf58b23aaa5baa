"""A rank's state in per-rank files of Megatron-LM 23.04, see formats/megatron_2023/per_rank.py for the layout.

The fork splits a grad buffer into one shard for each rank. A run with buckets of its own has other shards, so its ranks
send each other what belongs into their files (resplit.py); the files are the same, bit for bit. The layout has no
names, so it fits the rank that wrote it and no other size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.formats.megatron_2023.per_rank import missing_in, rank_entry, rank_params
from megatron_distopt.formats.megatron_2023.saved import ExpectedParam, Origin, SavedParam, has_begun
from megatron_distopt.hosts.megatron_2023.resplit import (
    Facts,
    FilePosition,
    Kind,
    agree,
    from_files,
    keys_of,
    kinds,
    positions_in,
    to_files,
)
from megatron_distopt.hosts.megatron_2023.state import (
    check_groups,
    check_moments,
    check_step_of,
    group_dicts,
    install_state,
    load_groups,
    load_loss_scale,
)
from megatron_distopt.optimizer import count_updates

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["check_state_per_rank", "load_state_per_rank", "state_per_rank"]

_OF_OTHER_RANKS = Origin(
    "optimizer state", "Resume with the ranks of the saved run; another size needs a checkpoint in another layout"
)
_OF_OTHER_LAYOUT = Origin(
    "optimizer state", "Load one that a distributed optimizer of this fork wrote, or write --no-load-optim"
)
#: What a state holds of the params of a group of the run: its options, and each param.
_Saved = dict[int, tuple[Mapping[str, Any], list[SavedParam]]]


def state_per_rank(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """This rank's state in that layout; every tensor has memory of its own.

    Collective over the data-parallel ranks where the run's buckets are not those of the layout.
    """
    facts = agree(optimizer, Facts(keys_of(optimizer), count_updates(optimizer.sharded.inner), {}))
    values = to_files(optimizer, facts)
    by_group = _positions_by_group(optimizer)
    names = [position.name for positions in by_group.values() for position in positions]
    dicts, counted = group_dicts(optimizer), {} if facts.step is None else {"step": facts.step}
    groups = [
        ({**dicts[group], **counted}, [position.name for position in positions])
        for group, positions in by_group.items()
    ]
    mains = {name: values[name][MAIN] for name in names if MAIN in values[name]}
    state = rank_entry(groups, mains, {name: _state_of(optimizer, values[name], facts) for name in names})
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def _state_of(optimizer: DistributedOptimizer, values: Mapping[str, Tensor], facts: Facts) -> dict[str, Any]:
    state: dict[str, Any] = {key: tensor for key, tensor in values.items() if key != MAIN}
    if optimizer.host_is_torchs and facts.step is not None:
        state["step"] = torch.tensor(float(facts.step))
    return state


def check_state_per_rank(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_state_per_rank` would take it.

    Raises:
        CheckpointError
    """
    missing = missing_in(state)
    if missing:
        raise _OF_OTHER_LAYOUT.refused(f"without {', '.join(missing)}", "be a rank's own")
    saved = _saved_by_group(optimizer, state)
    may_be_none = not has_begun(state["optimizer"])
    for each in (param for _, params in saved.values() for param in params):
        check_moments(optimizer, "optimizer state", each.moments, may_be_none=may_be_none)
    check_step_of(optimizer, state["optimizer"])


@torch.no_grad()
def load_state_per_rank(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes `state_per_rank`, or what the fork's own optimizer wrote, back; after `check_state_per_rank`.

    Collective over the data-parallel ranks where the run's buckets are not those of the layout.
    """
    saved = _saved_by_group(optimizer, state)
    values = {param.name: _values_of(param) for _, params in saved.values() for param in params}
    groups = {number: options for number, (options, _) in saved.items()}
    step = check_step_of(optimizer, state["optimizer"])
    facts = agree(optimizer, Facts(_keys_in(optimizer, values), step, groups))
    load_groups([optimizer.param_groups[number] for number in facts.groups], list(facts.groups.values()))
    load_loss_scale(optimizer, state)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it
    install_state(optimizer, from_files(optimizer, values, facts), facts.step)


def _positions_by_group(optimizer: DistributedOptimizer) -> dict[int, list[FilePosition]]:
    """By group of the run, without those that this rank owns nothing of, in the order of the layout."""
    kind_of = kinds(optimizer)
    here = (each for buffer in optimizer.grad_buffers for each in positions_in(buffer.plan, kind_of))
    in_file = {each.name: each for each in here}
    by_group: dict[int, list[FilePosition]] = {}
    for name in optimizer.names_as_registered():
        if name in in_file:
            by_group.setdefault(in_file[name].group, []).append(in_file[name])
    return {group: sorted(by_group[group], key=lambda each: each.has_main) for group in sorted(by_group)}


def _saved_by_group(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> _Saved:
    """What the state holds, by group of the run; groups are found by what tells them apart.

    Raises:
        CheckpointError: it is not of this rank's shards.
    """
    by_group, groups = _positions_by_group(optimizer), state["optimizer"]["param_groups"]
    matched = check_groups([optimizer.param_groups[number] for number in by_group], groups)
    found: _Saved = {}
    for (number, positions), group in zip(by_group.items(), matched, strict=True):
        place = next(place for place, each in enumerate(groups) if each is group)
        expected = [ExpectedParam(each.name, (each.shard.in_param.numel,), each.has_main) for each in positions]
        options = {key: value for key, value in group.items() if key != "params"}
        found[number] = (options, list(rank_params(state, place, expected, _OF_OTHER_RANKS)))
    return found


def _values_of(param: SavedParam) -> dict[str, Tensor]:
    """1-D, by key: main param and moments."""
    main = {} if param.main is None else {MAIN: param.main}
    return main | param.moments


def _keys_in(
    optimizer: DistributedOptimizer, values: Mapping[str, Mapping[str, Tensor]]
) -> dict[Kind, dict[str, torch.dtype]]:
    """What the state holds of params of each kind; all of it is loaded in fp32."""
    kind_of = kinds(optimizer)
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    for name, of_param in values.items():
        keys.setdefault(kind_of[name], {}).update(dict.fromkeys(of_param, torch.float32))
    return keys
