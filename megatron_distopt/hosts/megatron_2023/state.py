"""The optimizer's state in the forms that the fork's checkpointing asks for: `state_dict` and `load_state_dict`.

A rank's own state is an entry of per-rank files (formats/megatron_2023/per_rank.py), which the fork's own optimizer can
read, and the other way round. The fork splits a grad buffer into one shard for each rank. A run with buckets of its own
has other shards, so its ranks send each other what belongs into their files (resplit.py); the files are the same, bit
for bit. They have no names, so they fit the rank that wrote them and no other size. The state of a run without the
distributed optimizer (formats/megatron_2023/plain.py) is only read. With a gathered file (state_gathered.py) only param
groups and loss scale are here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.param_groups import described, identity
from megatron_distopt.formats.megatron_2023.per_rank import in_file_order, missing_in, rank_entry, rank_state
from megatron_distopt.formats.megatron_2023.plain import ExpectedParam, Origin, SavedParam, SavedState, plain_state
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.hosts.megatron_2023.resplit import (
    Facts,
    Kind,
    agree,
    from_files,
    keys_of,
    kinds,
    positions_in,
    shards_of,
    to_files,
)
from megatron_distopt.hosts.whole_params import check_own_entry, is_of_other_class, own_entry, take_own_entry
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer.inner import count_updates, restore, restore_group
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

_log = logging.getLogger("megatron_distopt")

#: Which kernel updates is the choice of the run that loads.
_IMPLEMENTATION = ("params", "step", "fused", "foreach", "capturable", "differentiable", "maximize", "amsgrad")
_REMEDY = "Load a checkpoint of the same model, or start from its weights with --no-load-optim"
_WHAT = "optimizer state"
_OF_OTHER_MODEL = Origin(_WHAT, _REMEDY)
_OF_OTHER_RANKS = Origin(
    _WHAT, "Resume with the ranks of the saved run; another size needs a checkpoint in another layout"
)
_OF_OTHER_LAYOUT = Origin(_WHAT, "Load one that a distributed optimizer of this fork wrote, or write --no-load-optim")
#: What a state must hold of the params of a group of the run, by its number; in the order of the state.
_Expected = Mapping[int, Sequence[ExpectedParam]]


def group_dicts(optimizer: BuiltOptimizer) -> list[dict[str, Any]]:
    """The param groups without params, with the keys that the fork's own inner optimizer has, and the update count.

    torch's Adam keeps the count in the state of each param, which a gathered file lacks; apex has it in the group.
    """
    step = updates_so_far(optimizer)
    counted = {} if step is None else {"step": step}
    return [
        {key: value if key in _IMPLEMENTATION else ours.get(key, value) for key, value in template.items()} | counted
        for template, ours in zip(optimizer.host_groups, optimizer.param_groups, strict=True)
    ]


def updates_so_far(optimizer: BuiltOptimizer) -> int | None:
    """The update count for a file; None for a class that does not count, whose moments mean something without one."""
    counted = count_updates(optimizer.sharded.inner)
    return 0 if counted is None and optimizer.sharded.plan.choice.is_adam else counted


def state_per_rank(optimizer: BuiltOptimizer) -> dict[str, Any]:
    """This rank's own state; every tensor has memory of its own.

    Collective over the data-parallel ranks where the run's buckets are not those of the files.
    """
    facts = agree(optimizer, Facts(keys_of(optimizer), count_updates(optimizer.sharded.inner), {}))
    values = to_files(optimizer, facts)
    by_group = _shards_by_group(optimizer)
    names = [shard.name for shards in by_group.values() for shard in shards]
    dicts, counted = group_dicts(optimizer), {} if facts.step is None else {"step": facts.step}
    groups = [({**dicts[group], **counted}, [shard.name for shard in shards]) for group, shards in by_group.items()]
    mains = {name: values[name][MAIN] for name in names if MAIN in values[name]}
    state = rank_entry(groups, mains, {name: _state_of(optimizer, values[name], facts) for name in names})
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return {**state, **own_entry(optimizer.sharded)}


def _state_of(optimizer: BuiltOptimizer, values: Mapping[str, Tensor], facts: Facts) -> dict[str, Any]:
    state: dict[str, Any] = {key: tensor for key, tensor in values.items() if key != MAIN}
    if optimizer.host_is_torchs and facts.step is not None:
        state["step"] = torch.tensor(float(facts.step))
    return state


def _shards_by_group(optimizer: BuiltOptimizer) -> dict[int, list[ParamShard]]:
    """By group of the run, without those that this rank owns nothing of, in the order of the files."""
    kind_of = kinds(optimizer)
    here = {shard.name: shard for buffer in optimizer.grad_buffers for _, shard in positions_in(buffer.plan, kind_of)}
    by_group: dict[int, list[ParamShard]] = {}
    for name in optimizer.names_as_registered():
        if name in here:
            by_group.setdefault(kind_of[name].group, []).append(here[name])
    return {
        group: in_file_order(by_group[group], lambda shard: kind_of[shard.name].has_main) for group in sorted(by_group)
    }


def check_head(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> None:
    """Whether the `state_dict()` that belongs to a gathered file can be taken.

    Raises:
        CheckpointError
    """
    if "optimizer" not in state or "param_groups" not in state.get("optimizer", {}) or "state" in state["optimizer"]:
        got = f"one with {', '.join(map(str, state)) or 'nothing'}"
        rule = "be that of a distributed optimizer with a gathered file"
        raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
    if not is_of_other_kind(optimizer, state):
        check_groups(optimizer.param_groups, state["optimizer"]["param_groups"])


def is_of_other_kind(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> bool:
    """Whether one of the run and the state has Muon or a class of whole params, so that their param groups are others.

    See [Note: another kind of optimizer] in checkpoint/load_plan.py.
    """
    if is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        return True
    both = (optimizer.param_groups, state["optimizer"]["param_groups"])
    ours, saved = (any(map(is_muons_group, groups)) for groups in both)
    return ours != saved


def check_groups(ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The saved groups in the order of ours, by what tells them apart; equal ones keep their order.

    Raises:
        CheckpointError: a group of ours is not among them, or one too many is.
    """
    left = list(saved)
    matched = []
    for mine in ours:
        like = [group for group in left if identity(group) == identity(mine)]
        if not like:
            got = f"none with {described(mine)} among {', '.join(map(described, saved)) or 'no groups'}"
            raise CheckpointError(
                refusal("param groups in the checkpoint", got, "hold every group of the run", _REMEDY)
            )
        matched.append(like[0])
        left = [group for group in left if group is not like[0]]
    if left:
        got = f"{described(left[0])} besides those of the run"
        raise CheckpointError(refusal("param groups in the checkpoint", got, "be those of the run", _REMEDY))
    return matched


def load_groups(ours: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Takes the hyperparameters over, for those keys that ours have."""
    for mine, theirs in zip(ours, check_groups(ours, saved), strict=True):
        mine.update({key: theirs[key] for key in mine if key in theirs and key not in _IMPLEMENTATION})


def saved_step(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]] = ()) -> int | None:
    """The update count of a saved optimizer, wherever its class kept it; None where it was lost.

    apex leaves it out in groups that had no param on the rank that wrote them.
    """
    return max((int(holder["step"]) for holder in [*groups, *states] if "step" in holder), default=None)


def check_step(optimizer: BuiltOptimizer, step: int | None) -> int | None:
    """The update count to go on from.

    Raises:
        CheckpointError: Adam needs one and it is unknown, or the file and the flag say different ones.
    """
    choice, given = optimizer.sharded.plan.choice, optimizer.sharded.config.resume_step
    if given is not None and step is not None and given != step:
        known, rule = f"{step} in the checkpoint", f"be the {given} of --distopt-resume-step"
        remedy = "Drop --distopt-resume-step: the checkpoint knows it"
        raise CheckpointError(refusal("update count", known, rule, remedy))
    if given is not None or step is not None:
        return given if given is not None else step
    if choice.is_adam:
        got = "none: torch's Adam keeps it where this file layout does not save it"
        remedy = "Write --distopt-resume-step N with the number of updates so far (iterations without skipped ones)"
        raise CheckpointError(refusal("update count in the checkpoint", got, "be there for Adam", remedy))
    return None


def check_moments(optimizer: BuiltOptimizer, what: str, found: Collection[str], *, may_be_none: bool = True) -> None:
    """Whether this is the state of the class that the run has: another's would be left out, or fail at the next step.

    Args:
        optimizer: that would take the state.
        what: the state's name in the error.
        found: keys of the tensors as large as a param.
        may_be_none: whether a state from before the first step has none.

    Raises:
        CheckpointError
    """
    choice = optimizer.sharded.plan.choice
    wanted = choice.moments
    if not wanted <= set(found) and (found or not may_be_none):
        got = f"with {', '.join(sorted(found)) or 'params alone'}"
        rule = f"hold {', '.join(sorted(wanted))} for {choice.name}"
        remedy = "Resume with the optimizer of the saved run, or start from its weights with --no-load-optim"
        raise CheckpointError(refusal(what, got, rule, remedy))


def load_loss_scale(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> None:
    """Into the fork's grad scaler, where both have one."""
    scaler, saved = optimizer.grad_scaler, state.get("grad_scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)
    elif scaler is not None and optimizer.fp16:
        _log.warning("the checkpoint has no loss scale; it starts from the initial one")
    elif saved is not None:
        _log.warning("the checkpoint has a loss scale and this run has none; it is left out")


def install_state(
    optimizer: BuiltOptimizer, moments: Mapping[FlatParam, Mapping[str, Tensor]], step: int | None
) -> None:
    """Gives the inner optimizer its state back and rounds the main params into the param buffers.

    Args:
        optimizer: whose main params are loaded.
        moments: of every flat param; taken over.
        step: the update count; None for a class that does not count.
    """
    inner = optimizer.sharded.inner
    optimizer.sharded.forget_deferred_check()
    for group in inner.param_groups:
        restore_group(inner, group, step)
    for flat in optimizer.sharded.flat_params:
        # A count without moments is not what torch's classes keep before their first step.
        group, counted = inner.param_groups[flat.plan.key.group], step if moments[flat] else None
        restore(inner, group, flat.main, moments[flat], counted)
        flat.write_model()


def check_plain(optimizer: BuiltOptimizer, entry: Mapping[str, Any]) -> None:
    """Whether `load_plain` would take it.

    Raises:
        CheckpointError
    """
    check_own_entry(optimizer.sharded, entry)
    _check(optimizer, plain_state(entry, _OF_OTHER_MODEL), _whole_params(optimizer))


@torch.no_grad()
def load_plain(optimizer: BuiltOptimizer, entry: Mapping[str, Any]) -> None:
    """Takes this rank's shards of the state of a run without the distributed optimizer; after `check_plain`.

    Every rank has all of it. The params are not gathered yet.
    """
    state, owned = plain_state(entry, _OF_OTHER_MODEL), shards_of(optimizer.sharded)
    _load_groups_and_scale(optimizer, dict(enumerate(check_groups(optimizer.param_groups, state.groups))), entry)
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in optimizer.sharded.flat_params}
    for saved in (param for _, _, params in _saved_in(optimizer, state, _whole_params(optimizer)) for param in params):
        if saved.name in owned:
            flat, shard = owned[saved.name]
            for key, tensor in saved.tensors.items():
                whole = flat.main if key == MAIN else moments[flat].setdefault(key, flat.zeros())
                flat.cut(whole, shard).copy_(tensor.reshape(-1)[shard.in_param.as_slice()])
    install_state(optimizer, moments, _step_in(optimizer, state))


def check_state_per_rank(optimizer: BuiltOptimizer, entry: Mapping[str, Any]) -> None:
    """Whether `load_state_per_rank` would take it.

    Raises:
        CheckpointError
    """
    missing = missing_in(entry)
    if missing:
        raise _OF_OTHER_LAYOUT.refused(f"without {', '.join(missing)}", "be a rank's own")
    check_own_entry(optimizer.sharded, entry)
    _check(optimizer, rank_state(entry, _OF_OTHER_RANKS), _own_shards(optimizer))


@torch.no_grad()
def load_state_per_rank(optimizer: BuiltOptimizer, entry: Mapping[str, Any]) -> None:
    """Takes `state_per_rank`, or what the fork's own optimizer wrote, back; after `check_state_per_rank`.

    Collective over the data-parallel ranks where the run's buckets are not those of the files.
    """
    state = rank_state(entry, _OF_OTHER_RANKS)
    saved = list(_saved_in(optimizer, state, _own_shards(optimizer)))
    values = {param.name: param.tensors for _, _, params in saved for param in params}
    groups = {number: {key: value for key, value in group.items() if key != "params"} for number, group, _ in saved}
    facts = agree(optimizer, Facts(_keys_in(optimizer, values), _step_in(optimizer, state), groups))
    _load_groups_and_scale(optimizer, facts.groups, entry)
    install_state(optimizer, from_files(optimizer, values, facts), facts.step)
    take_own_entry(optimizer.sharded, entry)


def _whole_params(optimizer: BuiltOptimizer) -> _Expected:
    named, groups = optimizer.start.named, optimizer.sharded.plan.groups
    return {
        number: [
            ExpectedParam(name, tuple(named[name].shape), named[name].dtype is not torch.float32)
            for name in group.names
        ]
        for number, group in enumerate(groups)
    }


def _own_shards(optimizer: BuiltOptimizer) -> _Expected:
    kind_of = kinds(optimizer)
    return {
        number: [ExpectedParam(each.name, (each.in_param.numel,), kind_of[each.name].has_main) for each in shards]
        for number, shards in _shards_by_group(optimizer).items()
    }


def _saved_in(
    optimizer: BuiltOptimizer, state: SavedState, expected: _Expected
) -> Iterator[tuple[int, Mapping[str, Any], list[SavedParam]]]:
    """Each group of the run: its number, the saved group, and its params.

    Raises:
        CheckpointError: the state has other groups, or other params.
    """
    matched = check_groups([optimizer.param_groups[number] for number in expected], state.groups)
    for (number, params), group in zip(expected.items(), matched, strict=True):
        place = next(place for place, each in enumerate(state.groups) if each is group)
        yield number, group, list(state.params(place, params))


def _check(optimizer: BuiltOptimizer, state: SavedState, expected: _Expected) -> None:
    saved = list(_saved_in(optimizer, state, expected))
    for each in (param for _, _, params in saved for param in params):
        check_moments(optimizer, _WHAT, each.moments, may_be_none=not state.has_begun)
    _step_in(optimizer, state)


def _step_in(optimizer: BuiltOptimizer, state: SavedState) -> int | None:
    """The update count to go on from; that of an optimizer that had not begun is 0 unless the flag says more."""
    step = saved_step(state.groups, list(state.inner["state"].values()))
    is_known = step is not None or optimizer.sharded.config.resume_step is not None
    return check_step(optimizer, step) if is_known or state.has_begun else 0


def _load_groups_and_scale(
    optimizer: BuiltOptimizer, groups: Mapping[int, Mapping[str, Any]], entry: Mapping[str, Any]
) -> None:
    """Takes hyperparameters and loss scale over.

    Args:
        optimizer: that takes the state.
        groups: the saved ones, by number of the run's group.
        entry: that has the loss scale.
    """
    load_groups([optimizer.param_groups[number] for number in groups], list(groups.values()))
    load_loss_scale(optimizer, entry)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it


def _keys_in(
    optimizer: BuiltOptimizer, values: Mapping[str, Mapping[str, Tensor]]
) -> dict[Kind, dict[str, torch.dtype]]:
    """What the state holds of params of each kind; all of it is loaded in fp32."""
    kind_of = kinds(optimizer)
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    for name, of_param in values.items():
        keys.setdefault(kind_of[name], {}).update(dict.fromkeys(of_param, torch.float32))
    return keys
