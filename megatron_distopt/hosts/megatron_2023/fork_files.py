"""The optimizer's state in the forms of the fork's own files, for a running fork.

A rank's own state is an entry of per-rank files (formats/megatron_2023/per_rank.py). With the
fork's one bucket for each grad buffer it is what the fork's own optimizer reads and writes; a run
with buckets of its own writes its shards with names. Either is read into any buckets, by ranks that
send each other what belongs elsewhere. The gathered file (formats/megatron_2023/gathered.py) is
written where there is one bucket, and read at any number of ranks: each reads what it owns. The
state of a run without the distributed optimizer (formats/megatron_2023/plain.py) is only read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron import get_args
from megatron.core import mpu
from torch import Tensor

from megatron_distopt.checkpoint import WholeModel
from megatron_distopt.checkpoint.load import note_averages
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.checkpoint.param_groups import take_options
from megatron_distopt.checkpoint.torch_state import moments_to_begin
from megatron_distopt.checkpoint.whole_model import load_loss_scale
from megatron_distopt.comm import Group, broadcast, exchange, gather_to_first, raise_together
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import known_step, no_step, the_step
from megatron_distopt.formats.megatron_2023.file_state import described, identity
from megatron_distopt.formats.megatron_2023.gathered import (
    GatheredFile,
    gathered_state,
    moments_in_file,
)
from megatron_distopt.formats.megatron_2023.per_rank import (
    SavedShard,
    in_file_order,
    missing_in,
    named_entry,
    named_shards,
    rank_entry,
    rank_state,
)
from megatron_distopt.formats.megatron_2023.plain import (
    ExpectedParam,
    OptimizerEntry,
    Origin,
    ParamEntry,
    plain_state,
)
from megatron_distopt.formats.pickles import load_file, save_whole
from megatron_distopt.hosts.megatron.saving import is_of_other_class, options_of_run
from megatron_distopt.hosts.megatron_2023.buffers import GradBuffer
from megatron_distopt.hosts.megatron_2023.model import ForkModel
from megatron_distopt.layout import ParamShard, Span, owned_shards
from megatron_distopt.optimizer.inner_state import count_updates, moments_of, restore, restore_group
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Which kernel updates is the choice of the run that loads.
_IMPLEMENTATION = (
    "params",
    "step",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "maximize",
    "amsgrad",
)
_REMEDY = "Load a checkpoint of the same model, or start from its weights with --no-load-optim"
WHAT, _CHECKPOINT = "optimizer state", "the checkpoint"
OF_OTHER_MODEL = Origin(WHAT, _REMEDY)
_OF_OTHER_RANKS = Origin(
    WHAT,
    "Resume with the ranks of the saved run; another size needs megatron-distopt convert --to "
    "per-rank --dp N",
)
_OF_OTHER_LAYOUT = Origin(
    WHAT, "Load one that a distributed optimizer of this fork wrote, or write --no-load-optim"
)
_OF_OTHER_SAVE = (
    "Load a checkpoint of this model at the same tensor- and pipeline-parallel size, or start from "
    "its weights with --no-load-optim"
)
_PERMUTED = (
    "Start from the weights with --no-load-optim, or convert the run before its first mixed save"
)


# Beside tensors: param groups, counts and the loss scale.


def group_dicts(fork: ForkModel) -> list[dict[str, Any]]:
    """The param groups without params, with the keys that the fork's own inner optimizer has, and
    the update count.

    torch's Adam keeps the count in the state of each param, which a gathered file lacks; apex has
    it in the group.
    """
    step = updates_so_far(fork)
    updates = {} if step is None else {"step": step}
    return [
        {
            key: value if key in _IMPLEMENTATION else ours.get(key, value)
            for key, value in template.items()
        }
        | updates
        for template, ours in zip(fork.host_groups, fork.param_groups, strict=True)
    ]


def updates_so_far(fork: ForkModel) -> int | None:
    """The update count for a file; None for a class that does not count, whose moments mean
    something without one."""
    num_updates = count_updates(fork.sharded.inner)
    return 0 if num_updates is None and fork.sharded.plan.choice.is_adam else num_updates


def is_of_other_kind(fork: ForkModel, state: Mapping[str, Any]) -> bool:
    """Whether one of the run and the state has Muon or a class of whole params, so that their param
    groups are others.

    [Note: another kind of optimizer] in checkpoint/ says what is loaded then.
    """
    head = state["optimizer"]
    ours, saved = (
        any(map(is_muons_group, groups)) for groups in (fork.param_groups, head["param_groups"])
    )
    return ours != saved or is_of_other_class(fork.sharded.plan.choice, head)


def check_head(fork: ForkModel, state: Mapping[str, Any]) -> None:
    """Refuses a `state_dict()` that does not belong to a gathered file of this run."""
    if (
        "optimizer" not in state
        or "param_groups" not in state.get("optimizer", {})
        or "state" in state["optimizer"]
    ):
        got = f"one with {', '.join(map(str, state)) or 'nothing'}"
        raise OF_OTHER_MODEL.refused(got, "be that of a distributed optimizer with a gathered file")
    if not is_of_other_kind(fork, state):
        match_groups(fork.param_groups, state["optimizer"]["param_groups"])


def match_groups(
    ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved groups in the order of ours, by what tells them apart; equal ones keep their
    order."""
    left = list(saved)
    matched = []
    for mine in ours:
        place = next(
            (place for place, group in enumerate(left) if identity(group) == identity(mine)), None
        )
        if place is None:
            raise CheckpointError(
                f"The checkpoint has no param group with {described(mine)}; it has "
                f"{', '.join(map(described, saved)) or 'no groups'}. {_REMEDY}."
            )
        matched.append(left.pop(place))
    if left:
        raise CheckpointError(
            f"The checkpoint has a param group with {described(left[0])} besides those of the run. "
            f"{_REMEDY}."
        )
    return matched


def load_groups(ours: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Takes the hyperparameters over, for those keys that ours have."""
    pairs = [
        (
            mine,
            {
                key: value
                for key, value in theirs.items()
                if key in mine and key not in _IMPLEMENTATION
            },
        )
        for mine, theirs in zip(ours, match_groups(ours, saved), strict=True)
    ]
    take_options(pairs, Group.of().rank, options_of_run(get_args()))


def check_update_count(fork: ForkModel, step: int | None) -> int | None:
    checked = known_step([step], fork.sharded.config.resume_step, _CHECKPOINT)
    if checked is None and fork.sharded.plan.choice.is_adam:
        raise no_step(_CHECKPOINT)
    return checked


def check_moments(
    fork: ForkModel, what: str, found: Collection[str], *, may_be_none: bool = True
) -> None:
    """Refuses the state of another class than the run's, which would be left out, or fail at the
    next step."""
    if not found and may_be_none:
        return
    numbers = range(len(fork.param_groups))
    wanted = [moments_to_begin(fork.sharded, number) for number in numbers]
    if set(found) not in wanted:
        raise CheckpointError(
            f"The {what} has {', '.join(sorted(found)) or 'params alone'}, and "
            f"{fork.sharded.plan.choice.name} needs {', '.join(sorted(wanted[0]))}. Resume "
            "with the optimizer of the saved run, or start from its weights with --no-load-optim."
        )


def install_state(
    fork: ForkModel, moments: Mapping[FlatParam, Mapping[str, Tensor]], step: int | None
) -> None:
    """Gives the inner optimizer its state back and rounds the loaded main params into the param
    buffers."""
    inner = fork.sharded.inner
    fork.sharded.forget_deferred_check()
    note_averages([fork.sharded], are_loaded=False, is_told=fork.everyone.rank == 0)
    for group in inner.param_groups:
        restore_group(inner, group, step)
    for flat in fork.sharded.flat_params:
        # A count without moments is not what torch's classes keep before their first step.
        group, num_updates = (
            inner.param_groups[flat.plan.key.group],
            step if moments[flat] else None,
        )
        restore(inner, group, flat.main, moments[flat], num_updates)
        flat.write_model()


# A rank's own state.


def shards_of(optimizer: ShardedOptimizer) -> dict[str, tuple[FlatParam, ParamShard]]:
    """By param name what this rank owns; at most one shard a param, because each lies in one
    bucket."""
    return {
        shard.name: (flat, shard) for flat in optimizer.flat_params for shard in flat.plan.shards
    }


def rank_state_dict(fork: ForkModel, model: WholeModel) -> dict[str, Any]:
    """This rank's own state; every tensor has memory of its own."""
    shards = {}
    for name, (flat, shard) in shards_of(fork.sharded).items():
        kept = {MAIN: flat.main.detach()} if flat.owns_memory else {}
        kept |= moments_of(fork.sharded.inner, flat.main)
        # A copy: a view would be saved with everything that it is a view of.
        shards[name] = SavedShard(
            shard.in_param, {key: flat.cut(each, shard).clone() for key, each in kept.items()}
        )
    dicts, step = group_dicts(fork), count_updates(fork.sharded.inner)
    if fork.has_forks_buckets:
        groups = [
            (dicts[number], [param.name for param in params])
            for number, params in _own_params(fork).items()
        ]
        mains = {
            name: saved.tensors[MAIN] for name, saved in shards.items() if MAIN in saved.tensors
        }
        states: dict[str, dict[str, Any]] = {}
        for name, saved in shards.items():
            states[name] = {key: tensor for key, tensor in saved.tensors.items() if key != MAIN}
            if fork.host_is_torchs and step is not None:
                # one each, because torch's class counts in place
                states[name]["step"] = torch.tensor(float(step))
        state = rank_entry(groups, mains, states)
    else:
        placements = model.shares[0].placements
        state = named_entry(dicts, {placements[name].name: saved for name, saved in shards.items()})
    if fork.grad_scaler is not None:
        state["grad_scaler"] = fork.grad_scaler.state_dict()
    return state


def _own_params(fork: ForkModel) -> dict[int, list[ExpectedParam]]:
    """What a file in the fork's form has of this rank, by group, in its order; groups without
    params are left out."""
    group_of = {
        name: number
        for number, group in enumerate(fork.sharded.plan.groups)
        for name in group.names
    }
    spans, by_group = _spans_in_file(fork), dict[int, list[ExpectedParam]]()
    name_of = {param: name for name, param in fork.start.named.items()}
    index_maps = [
        spans for model in fork.models for spans in model._grad_buffer_param_index_map.values()
    ]
    # as the fork registers them
    for param in (param for index_map in index_maps for param in index_map):
        name = name_of.get(param)
        if name is not None and name in spans:
            expected = ExpectedParam(
                name, (spans[name].numel,), has_main=param.dtype is not torch.float32
            )
            by_group.setdefault(group_of[name], []).append(expected)
    return {
        number: in_file_order(by_group[number], lambda each: each.has_main)
        for number in sorted(by_group)
    }


def _spans_in_file(fork: ForkModel) -> dict[str, Span]:
    """By name this rank's part of each param in files in the fork's form.

    The fork cuts each grad buffer into one shard a rank, whatever the buckets of the run.
    """
    return {
        shard.name: shard.in_param
        for plan in (buffer.plan for buffer in fork.grad_buffers)
        for shard in owned_shards(plan.file_layout, plan.group.rank)
        if shard.name in plan.params and shard.name in fork.start.named
    }


def _saved_in(
    fork: ForkModel, state: OptimizerEntry, expected: Mapping[int, Sequence[ExpectedParam]]
) -> tuple[dict[int, Mapping[str, Any]], dict[str, ParamEntry]]:
    """The saved group of each group of the run, and what is saved of each param, by name, checked.

    `expected` says by number of the group what the state must hold of its params, in its order.
    """
    matched = match_groups([fork.param_groups[number] for number in expected], state.groups)
    entries: dict[str, ParamEntry] = {}
    for params, group in zip(expected.values(), matched, strict=True):
        index = next(index for index, each in enumerate(state.groups) if each is group)
        entries |= {entry.name: entry for entry in state.params(index, params)}
    for entry in entries.values():
        check_moments(fork, WHAT, entry.moments, may_be_none=not state.has_begun)
    return dict(zip(expected, matched, strict=True)), entries


@dataclass(frozen=True, eq=False)
class RankState:
    """A state for `load_state_dict`, checked: what it has for this rank before ranks send each
    other anything."""

    groups: Mapping[int, Mapping[str, Any]]  # saved, by number of the run's group
    shards: Mapping[str, SavedShard]  # by name in the optimizer
    step: int | None
    is_for_this_rank: bool  # whether the shards are exactly those that this rank owns


def open_plain(fork: ForkModel, entry: Mapping[str, Any]) -> RankState:
    """The state of a run without the distributed optimizer, of which every rank has all."""
    choice = fork.sharded.plan.choice
    if choice.updates_whole_params:
        raise OF_OTHER_MODEL.refused(
            "that of a class which does not update whole params", f"be of {choice.name}"
        )
    state, params = plain_state(entry, OF_OTHER_MODEL), fork.start.named
    expected = {
        number: [
            ExpectedParam(name, tuple(params[name].shape), params[name].dtype is not torch.float32)
            for name in group.names
        ]
        for number, group in enumerate(fork.sharded.plan.groups)
    }
    groups, entries = _saved_in(fork, state, expected)
    shards = {}
    for name, (_, shard) in shards_of(fork.sharded).items():
        span = shard.in_param
        cut = {
            key: tensor.reshape(-1)[span.as_slice()]
            for key, tensor in entries[name].tensors.items()
        }
        shards[name] = SavedShard(span, cut)
    return RankState(groups, shards, _step_in(fork, state), is_for_this_rank=True)


def open_rank_state(fork: ForkModel, entry: Mapping[str, Any], model: WholeModel) -> RankState:
    """What `rank_state_dict`, or the fork's own optimizer, gave for this rank."""
    missing = missing_in(entry)
    if missing:
        raise _OF_OTHER_LAYOUT.refused(f"without {', '.join(missing)}", "be a rank's own")
    named = named_shards(entry)
    if named is None:
        state, spans = rank_state(entry, _OF_OTHER_RANKS), _spans_in_file(fork)
        groups, entries = _saved_in(fork, state, _own_params(fork))
        shards = {name: SavedShard(spans[name], each.tensors) for name, each in entries.items()}
        return RankState(groups, shards, _step_in(fork, state), fork.has_forks_buckets)
    saved_groups = match_groups(fork.param_groups, entry["optimizer"]["param_groups"])
    name_of = {placement.name: name for name, placement in model.shares[0].placements.items()}
    unknown = [name for name in named if name not in name_of]
    if unknown:
        raise OF_OTHER_MODEL.refused(f"with {unknown[0]!r}", "hold params of the run")
    shards = {name_of[name]: shard for name, shard in named.items()}
    for shard in shards.values():
        check_moments(fork, WHAT, shard.tensors.keys() - {MAIN})
    owned = {name: shard.in_param for name, (_, shard) in shards_of(fork.sharded).items()}
    is_same = {name: shard.in_param for name, shard in shards.items()} == owned
    has_begun = any(shard.tensors.keys() - {MAIN} for shard in shards.values())
    step = the_step(saved_groups, _CHECKPOINT)
    checked = check_update_count(fork, step) if step is not None or has_begun else 0
    return RankState(dict(enumerate(saved_groups)), shards, checked, is_same)


def _step_in(fork: ForkModel, state: OptimizerEntry) -> int | None:
    """The update count to go on from; that of an optimizer that had not begun is 0 unless the flag
    says more."""
    step = the_step([*state.groups, *state.inner["state"].values()], _CHECKPOINT)
    is_known = step is not None or fork.sharded.config.resume_step is not None
    return check_update_count(fork, step) if is_known or state.has_begun else 0


@torch.no_grad()
def load_rank_state(fork: ForkModel, state: RankState, entry: Mapping[str, Any]) -> None:
    """Collective: takes a checked state over; the params are not gathered yet."""
    everywhere = exchange(
        (state.is_for_this_rank, state.groups, state.step, bool(state.shards)), fork.start.data
    )
    groups, step, owned = state.groups, state.step, shards_of(fork.sharded)
    buffers = [] if all(is_for_it for is_for_it, *_ in everywhere) else fork.grad_buffers
    listed = []
    for buffer in buffers:
        mine = [(name, each) for name, each in state.shards.items() if name in buffer.plan.params]
        listed.append(
            exchange(
                [(name, each.in_param, tuple(each.tensors)) for name, each in mine],
                buffer.plan.group,
            )
        )
    raise_together(lambda: _check_complete(buffers, listed, owned), fork.everyone, "load")
    if buffers:  # a rank may have saved nothing of what it owns now
        found = {
            number: group
            for _, of_rank, _, _ in reversed(everywhere)
            for number, group in of_rank.items()
        }
        groups = dict(sorted(found.items()))
        step = max(
            (count for _, _, count, has_any in everywhere if has_any and count is not None),
            default=None,
        )
    load_groups([fork.param_groups[number] for number in groups], list(groups.values()))
    load_loss_scale(fork.sharded.loss_scale, entry.get("grad_scaler") or {})
    for sharded in fork.sharded.buffers:
        sharded.collect()  # fp32 params came with the model, and packed ones are copies of it
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in fork.sharded.flat_params}
    for name, saved in () if buffers else state.shards.items():
        _take(owned[name], saved, moments)
    for buffer, by_rank in zip(buffers, listed, strict=True):
        for name, saved in _sent_around(buffer, state.shards, by_rank):
            if name in owned:
                _take(owned[name], saved, moments)
    install_state(fork, moments, step)


def _take(
    owned: tuple[FlatParam, ParamShard],
    saved: SavedShard,
    moments: Mapping[FlatParam, dict[str, Tensor]],
) -> None:
    """Copies those elements of a saved shard that this rank owns."""
    flat, shard = owned
    both = shard.in_param.intersect(saved.in_param)
    if both is None:
        return
    for key, tensor in saved.tensors.items():
        whole = flat.main if key == MAIN else moments[flat].setdefault(key, flat.zeros())
        inside = flat.cut(whole, shard)[both.relative_to(shard.in_param.start).as_slice()]
        inside.copy_(tensor[both.relative_to(saved.in_param.start).as_slice()])


#: What each rank of a group saved of one buffer: name, elements of the param, and keys.
_Listed = Sequence[Sequence[tuple[str, Span, tuple[str, ...]]]]


def _check_complete(
    buffers: Sequence[GradBuffer],
    listed: Sequence[_Listed],
    owned: Mapping[str, tuple[FlatParam, ParamShard]],
) -> None:
    """Refuses shards of which an element that this rank owns is in no rank's state."""
    for buffer, by_rank in zip(buffers, listed, strict=True):
        saved: dict[str, int] = {}
        for name, span, _ in (each for of_rank in by_rank for each in of_rank):
            both = owned[name][1].in_param.intersect(span) if name in owned else None
            saved[name] = saved.get(name, 0) + (both.numel if both else 0)
        for name, (_, shard) in owned.items():
            if name in buffer.plan.params and saved.get(name, 0) != shard.in_param.numel:
                got = (
                    f"{saved.get(name, 0)} of the {shard.in_param.numel} elements of {name!r} that "
                    "this rank owns"
                )
                raise _OF_OTHER_RANKS.refused(got, "hold each of them once on one rank")


def _sent_around(
    buffer: GradBuffer, shards: Mapping[str, SavedShard], listed: _Listed
) -> Iterator[tuple[str, SavedShard]]:
    """Collective: the saved shards of one buffer of all ranks, each with one of its tensors, in
    fp32."""
    group, device = buffer.plan.group, buffer.grad.device
    for rank, of_rank in enumerate(listed):
        for key in dict.fromkeys(key for _, _, keys in of_rank for key in keys):
            parts = [(name, span) for name, span, keys in of_rank if key in keys]
            numels = [span.numel for _, span in parts]
            sent = torch.empty(sum(numels), dtype=torch.float32, device=device)
            if rank == group.rank:
                sent.copy_(
                    torch.cat(
                        [shards[name].tensors[key].to(device, torch.float32) for name, _ in parts]
                    )
                )
            broadcast(sent, rank, group)
            for (name, span), values in zip(parts, torch.split(sent, numels), strict=True):
                yield name, SavedShard(span, {key: values})


# The gathered file.


@torch.no_grad()
def save_gathered(fork: ForkModel, filename: str) -> None:
    """Collective: gathers this pipeline stage and tensor-parallel slice on its first rank, which
    writes the file."""
    sharded, data = fork.sharded, fork.start.data
    kept = {
        flat: {MAIN: flat.main.detach(), **moments_of(sharded.inner, flat.main)}
        for flat in sharded.flat_params
    }
    keys = {
        key
        for found in exchange(sorted({key for each in kept.values() for key in each}), data)
        for key in found
    }
    moments = moments_in_file(keys - {MAIN}, is_adam=sharded.plan.choice.is_adam)
    owned = shards_of(sharded)
    gathered: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
    for buffer in fork.grad_buffers:
        carrier, device = _carrier(data, buffer)
        tensors = gathered[buffer.plan.chunk, buffer.plan.dtype] = {}
        # one after the other: only one of them is whole in the device's memory
        for key in (MAIN, *moments):
            part = torch.zeros(buffer.plan.layout.shard_numel, dtype=torch.float32, device=device)
            for name, (flat, shard) in owned.items():
                if name in buffer.plan.params and key in kept[flat]:
                    part[shard.in_shard.as_slice()] = flat.cut(kept[flat][key], shard).to(device)
            whole = gather_to_first(part, carrier)
            if whole is not None:
                tensors[key] = whole.cpu()

    def write() -> None:
        if data.rank == 0:
            save_whole(
                gathered_state(gathered, updates_so_far(fork), sharded.num_skipped), Path(filename)
            )

    raise_together(write, fork.everyone)


def _carrier(group: Group, buffer: GradBuffer) -> tuple[Group, torch.device]:
    """Who moves the parts: the group, or the fork's gloo group of the same ranks, which needs no
    device memory."""
    cpu = torch.device("cpu")
    if "gloo" in group.backend or group.size == 1:
        return group, cpu
    gloo = getattr(mpu, "get_data_parallel_group_gloo", None)
    if gloo is not None and group == Group.of(mpu.get_data_parallel_group()):
        return Group.of(gloo()), cpu
    return group, buffer.grad.device


@torch.no_grad()
def load_gathered(fork: ForkModel, filename: str, head_step: int | None) -> None:
    """Collective: every rank reads what it owns; the params are not gathered yet.

    `head_step` is the update count that came with `load_state_dict`. A rank that cannot read the
    file raises before anything is changed, and the others with it.
    """

    def read() -> tuple[list[dict[str, Tensor]], int | None, int]:
        file = GatheredFile(
            load_file(Path(filename)), Origin(f"optimizer file {filename}", _OF_OTHER_SAVE)
        )
        found = [_checked_tensors(fork, file, buffer) for buffer in fork.grad_buffers]
        return (
            found,
            check_update_count(fork, file.step if head_step is None else head_step),
            file.num_skipped,
        )

    of_buffers, step, num_skipped = raise_together(read, fork.everyone)
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in fork.sharded.flat_params}
    owned = shards_of(fork.sharded)
    for buffer, tensors in zip(fork.grad_buffers, of_buffers, strict=True):
        for name in owned.keys() & buffer.plan.params.keys():
            span = owned[name][1].in_param
            in_file = span.moved_by(buffer.plan.in_file[name].start).as_slice()
            _take(
                owned[name],
                SavedShard(span, {key: each[in_file] for key, each in tensors.items()}),
                moments,
            )
    install_state(fork, moments, step)
    fork.sharded.num_skipped = num_skipped


def _checked_tensors(fork: ForkModel, file: GatheredFile, buffer: GradBuffer) -> dict[str, Tensor]:
    plan, choice = buffer.plan, fork.sharded.plan.choice
    if plan.is_ours:
        raise file.origin.refused("without experts", "hold every param of the model")
    tensors = file.tensors(plan.chunk, plan.dtype, plan.file_numel)
    # Adam's moments are there even before the first step, so a file without them has lost them.
    check_moments(fork, file.origin.what, tensors.keys() - {MAIN}, may_be_none=not choice.is_adam)
    for group in fork.sharded.plan.groups:
        dtypes = {plan.params[name].dtype for name in group.names if name in plan.params}
        file.check_order(is_mixed=len(dtypes) > 1, remedy=_PERMUTED)
    return tensors
