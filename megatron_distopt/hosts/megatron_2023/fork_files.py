"""The optimizer's state in the forms of the fork's own files, for a running fork.

In per-rank files (formats/megatron_2023/per_rank.py) each rank has an entry with its own state. If
each grad buffer is one bucket, the fork's own optimizer reads and writes the same form; a run with
more buckets writes its shards with names. Both load with any buckets at the parallel size that
wrote them. The gathered file (formats/megatron_2023/gathered.py) is written only with one bucket,
and loads at any number of ranks: each rank reads what it owns. The state of a run without the
distributed optimizer (formats/megatron_2023/plain.py) can only be read.

Each of them is read into a `RankState` and then loaded like any other state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron import get_args
from megatron.core import mpu
from torch import Tensor

from megatron_distopt.checkpoint import WholeModel
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable
from megatron_distopt.checkpoint.manifest import MAIN, Manifest
from megatron_distopt.checkpoint.param_groups import take_options
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, saved_loss_scale, shards_of
from megatron_distopt.comm import (
    Group,
    all_gather_objects,
    broadcast,
    gather_to_first,
    raise_together,
)
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import known_step, loss_scale_of, no_step, the_step
from megatron_distopt.formats.megatron_2023.file_state import described, identity
from megatron_distopt.formats.megatron_2023.gathered import (
    GatheredFile,
    gathered_state,
    moments_in_file,
)
from megatron_distopt.formats.megatron_2023.per_rank import (
    in_file_order,
    missing_in,
    named_entry,
    named_shards,
    rank_entry,
    rank_state,
)
from megatron_distopt.formats.megatron_2023.plain import ExpectedParam, OptimizerEntry, plain_state
from megatron_distopt.formats.megatron_2023.saved_shards import Origin, SavedShard, in_order, joined
from megatron_distopt.formats.pickles import load_file, save_whole
from megatron_distopt.hosts.megatron.own_shards import group_record, loadable_of_shards
from megatron_distopt.hosts.megatron.saving import is_of_other_class, options_of_run
from megatron_distopt.hosts.megatron_2023.buffers import GradBuffer
from megatron_distopt.hosts.megatron_2023.model import ForkModel
from megatron_distopt.layout import Span, owned_shards
from megatron_distopt.optimizer.inner_state import count_updates, moments_of
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

#: Keys of param groups that a load leaves as they are: they depend on the kernel of the run.
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
_WHAT, _CHECKPOINT = "The optimizer state", "the checkpoint"
_OF_OTHER_MODEL = Origin(_WHAT, _REMEDY)
_OF_OTHER_RANKS = Origin(
    _WHAT,
    "Resume with as many ranks as the saved run had, or convert the checkpoint to another number "
    "with megatron-distopt convert --to per-rank --dp N",
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
    """The param groups without params, with the keys of the fork's own inner optimizer, and the
    update count.

    A gathered file has no state of single params, where torch's Adam keeps the count; so it is
    written into the groups, as by apex.
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
    """The update count for a file; None for a class that does not count updates and is not an
    Adam."""
    num_updates = count_updates(fork.sharded.inner)
    return 0 if num_updates is None and fork.sharded.plan.choice.is_adam else num_updates


def is_of_other_kind(fork: ForkModel, state: Mapping[str, Any]) -> bool:
    """Whether run and state differ in having Muon or a class that updates whole params, so that
    their param groups do not match.

    [Note: another kind of optimizer] in checkpoint/ says what is loaded then.
    """
    head = state["optimizer"]
    ours, saved = (
        any(map(is_muons_group, groups)) for groups in (fork.param_groups, head["param_groups"])
    )
    return ours != saved or is_of_other_class(fork.sharded.plan.choice, head)


def check_head(fork: ForkModel, state: Mapping[str, Any]) -> None:
    """Refuses a `state_dict()` that does not belong to a gathered file of this run."""
    head = state.get("optimizer", {})
    if "param_groups" not in head or "state" in head:
        held = ", ".join(map(str, state))
        raise CheckpointError(
            f"{_WHAT} in the checkpoint has {held or 'no keys'}, so no distributed optimizer with "
            f"a gathered file has saved it. {_REMEDY}."
        )
    if not is_of_other_kind(fork, state):
        match_groups(fork.param_groups, head["param_groups"])


def match_groups(
    ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Finds the saved group of each group of ours by its identifying options, and returns their
    numbers. Groups with equal ones keep their order."""
    left = dict(enumerate(saved))
    matched = []
    for mine in ours:
        wanted = identity(mine)
        same = [number for number, group in left.items() if identity(group) == wanted]
        if not same:
            raise CheckpointError(
                f"This run has a param group with {described(mine)}, but the checkpoint has only "
                f"{', '.join(map(described, saved)) or 'no groups'}. {_REMEDY}."
            )
        matched.append(same[0])
        del left[same[0]]
    for group in left.values():
        raise CheckpointError(
            f"The checkpoint has a param group with {described(group)}, but this run has no such "
            f"group. {_REMEDY}."
        )
    return matched


def load_groups(ours: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Takes over the saved hyperparameters that our groups have as well."""
    matched = zip(ours, match_groups(ours, saved), strict=True)
    pairs = [(mine, _options_for(mine, saved[number])) for mine, number in matched]
    take_options(pairs, Group.of().rank, options_of_run(get_args()))


def _options_for(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options of a param group that the group of the run has as well."""
    return {
        key: value for key, value in saved.items() if key in mine and key not in _IMPLEMENTATION
    }


def _step_of(
    fork: ForkModel, holders: Iterable[Mapping[str, Any]], *, has_begun: bool = True
) -> int | None:
    """The update count from which to continue. For an optimizer that had made no step it is 0,
    unless `resume_step` is given."""
    given = fork.sharded.config.resume_step
    step = known_step([the_step(holders, _CHECKPOINT)], given, _CHECKPOINT)
    if step is None and not has_begun:
        return 0
    if step is None and fork.sharded.plan.choice.is_adam:
        raise no_step(_CHECKPOINT)
    return step


# Loading.


@dataclass(frozen=True, eq=False)
class RankState:
    """The state that a file or an entry has for this rank."""

    where: str  # where it comes from, for errors
    groups: Mapping[int, Mapping[str, Any]]  # options to take over, by number of the run's group
    step: int | None
    # by name in the optimizer; if this rank owns more than this, ranks send shards to each other
    shards: Mapping[str, SavedShard]
    loss_scale: Mapping[str, float]
    num_skipped: int


@torch.no_grad()
def load_rank_state(fork: ForkModel, opened: Callable[[], RankState]) -> None:
    """Collective: loads the state that `opened` returns. It does not gather the params.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the other ranks, with that rank's text.
    """
    state = raise_together(opened, fork.everyone, "load")
    model = fork.whole()
    owned = {shard.name: shard.in_param for _, shard in shards_of(fork.sharded)}
    saved = state.shards
    parts = {name: [shard] for name, shard in saved.items()}
    has_all = all(name in saved and saved[name].holds(span) for name, span in owned.items())
    step = state.step if parts else None  # a rank may have nothing of its own in the file
    everywhere = all_gather_objects((has_all, state.groups, step), fork.start.data)
    if not all(has_all for has_all, *_ in everywhere):
        parts = {name: [] for name in owned}
        for buffer in fork.grad_buffers:
            for name, part in _sent_around(buffer, state.shards, owned):
                parts[name].append(part)
    groups = {number: each for _, of_rank, _ in everywhere for number, each in of_rank.items()}
    steps = [step for *_, step in everywhere if step is not None]

    def loadable() -> Loadable:
        found = {name: _whole(name, span, parts[name]) for name, span in owned.items()}
        step = max(steps, default=None)
        shards = {**state.shards, **found}
        of_all = replace(state, groups=groups, step=step, shards=shards)
        return _loadable(fork, model, of_all)

    load_state(loadable, model, fork.everyone)


def _whole(name: str, span: Span, parts: Sequence[SavedShard]) -> SavedShard:
    """A shard that has at least the elements `span` of a param, joined from parts."""
    if len(parts) == 1 and parts[0].holds(span):
        return parts[0]
    found = in_order(name, span, parts, _OF_OTHER_RANKS)
    kinds = {kind for part in found for kind in part.tensors}
    return SavedShard(span, {kind: joined(found, kind) for kind in kinds})


def _loadable(fork: ForkModel, model: WholeModel, state: RankState) -> Loadable:
    share = model.shares[0]
    plan = fork.sharded.plan
    groups = []
    for number, group in enumerate(plan.groups):
        # Other ranks know which state the other params have.
        known = [name for name in group.names if name in state.shards]
        others = [name for name in group.names if name not in state.shards]
        options = state.groups.get(number, {})
        groups.append(group_record(share, known, options, state.step))
        groups.append(group_record(share, others, options, None))
    scale = dict(state.loss_scale)
    head = Manifest("", (), {}, tuple(groups), plan.choice.name, scale, state.num_skipped)

    def kinds_of(_: Share, name: str) -> dict[str, torch.dtype]:
        if name not in state.shards:
            return {MAIN: torch.float32}
        kinds = {kind: each.dtype for kind, each in state.shards[name].tensors.items()}
        return kinds if _has_main(fork, name) else {MAIN: torch.float32, **kinds}

    def values_of(piece: OwnedPiece, kind: str) -> Tensor:
        name, in_param = piece.shard.name, piece.piece.in_param
        saved = state.shards[name]
        if kind in saved.tensors:
            in_saved = in_param.relative_to(saved.in_param.start)
            return saved.tensors[kind][in_saved.as_slice()]
        # An fp32 param is its own main param, and its values came with the model.
        values = fork.start.named[name].detach().reshape(-1)
        return values[in_param.as_slice()]

    return loadable_of_shards(model, head, state.where, kinds_of, values_of)


def _has_main(fork: ForkModel, name: str) -> bool:
    return fork.start.named[name].dtype is not torch.float32


def _sent_around(
    buffer: GradBuffer, shards: Mapping[str, SavedShard], owned: Mapping[str, Span]
) -> Iterator[tuple[str, SavedShard]]:
    """Collective: yields what ranks have saved of the params of one buffer, cut to what this rank
    owns. Tensors are broadcast one after the other."""
    group, device = buffer.plan.group, buffer.grad.device
    mine = [
        (name, shard.in_param, tuple(shard.tensors))
        for name, shard in shards.items()
        if name in buffer.plan.params
    ]
    for rank, of_rank in enumerate(all_gather_objects(mine, group)):
        for name, span, kinds in of_rank:
            both = owned[name].intersect(span) if name in owned else None
            tensors: dict[str, Tensor] = {}
            for kind in kinds:
                sent = torch.empty(span.numel, dtype=torch.float32, device=device)
                if rank == group.rank:
                    sent.copy_(shards[name].tensors[kind])
                broadcast(sent, rank, group)
                if both is not None:
                    in_sent = both.relative_to(span.start)
                    # a copy: a view would keep all of it in memory
                    tensors[kind] = sent[in_sent.as_slice()].cpu().clone()
            if both is not None:
                yield name, SavedShard(both, tensors)


# A rank's own state.


def rank_state_dict(fork: ForkModel) -> dict[str, Any]:
    """This rank's own state. No tensor is a view."""
    shards: dict[str, SavedShard] = {}
    for flat, shard in shards_of(fork.sharded):
        kept = {MAIN: flat.main.detach()} if flat.owns_memory else {}
        kept |= moments_of(fork.sharded.inner, flat.main)
        # A copy, because torch.save writes the whole storage of a view.
        copies = {key: flat.cut(each, shard).clone() for key, each in kept.items()}
        shards[shard.name] = SavedShard(shard.in_param, copies)
    if fork.has_forks_buckets:
        state = _forks_entry(fork, shards)
    else:
        placements = fork.whole().shares[0].placements
        named = {placements[name].name: shard for name, shard in shards.items()}
        state = named_entry(group_dicts(fork), named)
    if fork.grad_scaler is not None:
        state["grad_scaler"] = fork.grad_scaler.state_dict()
    return state


def _forks_entry(fork: ForkModel, shards: Mapping[str, SavedShard]) -> dict[str, Any]:
    """The entry in the fork's form."""
    dicts, step = group_dicts(fork), count_updates(fork.sharded.inner)
    groups = [
        (dicts[number], [param.name for param in params])
        for number, params in _own_params(fork).items()
    ]
    mains: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, shard in shards.items():
        states[name] = dict(shard.tensors)
        if MAIN in shard.tensors:
            mains[name] = states[name].pop(MAIN)
        if fork.host_is_torchs and step is not None:
            # a tensor for each param, because torch's class counts in place
            states[name]["step"] = torch.tensor(float(step))
    return rank_entry(groups, mains, states)


def _own_params(fork: ForkModel) -> dict[int, list[ExpectedParam]]:
    """The params that a file in the fork's form has for this rank, by group and in the file's
    order. Groups without params are left out."""
    spans = _spans_in_file(fork)
    name_of = {param: name for name, param in fork.start.named.items() if name in spans}
    registered: list[str] = []
    for model in fork.models:
        for index_map in model._grad_buffer_param_index_map.values():
            registered += [name_of[param] for param in index_map if param in name_of]
    by_group: dict[int, list[ExpectedParam]] = {}
    for number, group in enumerate(fork.sharded.plan.groups):
        members = frozenset(group.names)
        own = [
            ExpectedParam(name, (spans[name].numel,), _has_main(fork, name))
            for name in registered
            if name in members
        ]
        if own:
            by_group[number] = in_file_order(own, lambda each: each.has_main)
    return by_group


def _spans_in_file(fork: ForkModel) -> dict[str, Span]:
    """By name, this rank's part of each param in files in the fork's form.

    There each grad buffer is cut into one shard for each rank, whatever the buckets of the run.
    """
    return {
        shard.name: shard.in_param
        for plan in (buffer.plan for buffer in fork.grad_buffers)
        for shard in owned_shards(plan.file_layout, plan.group.rank)
        if shard.name in plan.params and shard.name in fork.start.named
    }


def open_plain(fork: ForkModel, entry: Mapping[str, Any]) -> RankState:
    """The state of a run without the distributed optimizer. Every rank has all of it."""
    choice = fork.sharded.plan.choice
    if choice.updates_whole_params:
        raise CheckpointError(
            f"{_WHAT} in the checkpoint is of an optimizer that does not update whole params, but "
            f"this run trains with {choice.name}. {_REMEDY}."
        )
    shapes = {name: tuple(param.shape) for name, param in fork.start.named.items()}
    expected = {
        number: [ExpectedParam(name, shapes[name], _has_main(fork, name)) for name in group.names]
        for number, group in enumerate(fork.sharded.plan.groups)
    }
    spans = {name: Span(0, math.prod(shape)) for name, shape in shapes.items()}
    return _opened(fork, plain_state(entry, _OF_OTHER_MODEL), expected, spans, entry)


def open_rank_state(fork: ForkModel, entry: Mapping[str, Any]) -> RankState:
    """The state that `rank_state_dict` or the fork's own optimizer has saved for this rank."""
    missing = missing_in(entry)
    if missing:
        raise CheckpointError(
            f"{_WHAT} in the checkpoint has no {', '.join(missing)}, so it is not the state of one "
            "rank. Load a checkpoint that a distributed optimizer of this fork wrote, or write "
            "--no-load-optim."
        )
    named = named_shards(entry)
    if named is None:
        state = rank_state(entry, _OF_OTHER_RANKS)
        return _opened(fork, state, _own_params(fork), _spans_in_file(fork), entry)
    saved = entry["optimizer"]["param_groups"]
    groups = {
        number: saved[place] for number, place in enumerate(match_groups(fork.param_groups, saved))
    }
    placements = fork.whole().shares[0].placements
    name_of = {placement.name: name for name, placement in placements.items()}
    unknown = next((name for name in named if name not in name_of), None)
    if unknown is not None:
        raise CheckpointError(
            f"{_WHAT} in the checkpoint has the param {unknown!r}, which this run does not train. "
            f"{_REMEDY}."
        )
    has_begun = any(shard.tensors.keys() - {MAIN} for shard in named.values())
    step = _step_of(fork, saved, has_begun=has_begun)
    return _rank_state(fork, entry, groups, step, {name_of[name]: named[name] for name in named})


def _opened(
    fork: ForkModel,
    state: OptimizerEntry,
    expected: Mapping[int, Sequence[ExpectedParam]],
    spans: Mapping[str, Span],
    entry: Mapping[str, Any],
) -> RankState:
    """The state in an entry without param names.

    `expected` has, by number of the group, the params that the entry must hold, in its order, and
    `spans` the elements of each.
    """
    matched = match_groups([fork.param_groups[number] for number in expected], state.groups)
    groups: dict[int, Mapping[str, Any]] = {}
    shards: dict[str, SavedShard] = {}
    for (number, params), place in zip(expected.items(), matched, strict=True):
        groups[number] = state.groups[place]
        for each in state.params(place, params):
            tensors = {kind: tensor.reshape(-1) for kind, tensor in each.tensors.items()}
            shards[each.name] = SavedShard(spans[each.name], tensors)
    holders = [*state.groups, *state.inner["state"].values()]
    step = _step_of(fork, holders, has_begun=state.has_begun)
    return _rank_state(fork, entry, groups, step, shards)


def _rank_state(
    fork: ForkModel,
    entry: Mapping[str, Any],
    groups: Mapping[int, Mapping[str, Any]],
    step: int | None,
    shards: Mapping[str, SavedShard],
) -> RankState:
    options = {
        number: _options_for(fork.param_groups[number], group) for number, group in groups.items()
    }
    scale = loss_scale_of(entry.get("grad_scaler"))
    return RankState("of the fork", options, step, shards, scale, fork.sharded.num_skipped)


# The gathered file.


@torch.no_grad()
def save_gathered(fork: ForkModel, filename: str) -> None:
    """Collective: gathers the state of this pipeline stage and tensor-parallel slice on its first
    data-parallel rank, which writes the file."""
    sharded, data = fork.sharded, fork.start.data
    kept = {
        flat: {MAIN: flat.main.detach(), **moments_of(sharded.inner, flat.main)}
        for flat in sharded.flat_params
    }
    keys = {
        key
        for found in all_gather_objects(
            sorted({key for each in kept.values() for key in each}), data
        )
        for key in found
    }
    moments = moments_in_file(keys - {MAIN}, is_adam=sharded.plan.choice.is_adam)
    gathered: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
    for buffer in fork.grad_buffers:
        gather_group, device = _gather_group(data, buffer)
        tensors = gathered[buffer.plan.chunk, buffer.plan.dtype] = {}
        # one after the other: only one of them is whole in the device's memory
        for key in (MAIN, *moments):
            part = torch.zeros(buffer.plan.layout.shard_numel, dtype=torch.float32, device=device)
            for flat, shard in shards_of(sharded):
                if shard.name in buffer.plan.params and key in kept[flat]:
                    values = flat.cut(kept[flat][key], shard)
                    part[shard.in_shard.as_slice()] = values.to(device)
            whole = gather_to_first(part, gather_group)
            if whole is not None:
                tensors[key] = whole.cpu()

    def write() -> None:
        if data.rank == 0:
            save_whole(
                gathered_state(gathered, updates_so_far(fork), sharded.num_skipped), Path(filename)
            )

    raise_together(write, fork.everyone)


def _gather_group(group: Group, buffer: GradBuffer) -> tuple[Group, torch.device]:
    """The group and device with which the parts are gathered: if possible the fork's gloo group of
    the same ranks, which needs no device memory."""
    cpu = torch.device("cpu")
    if "gloo" in group.backend or group.size == 1:
        return group, cpu
    gloo = getattr(mpu, "get_data_parallel_group_gloo", None)
    if gloo is not None and group == Group.of(mpu.get_data_parallel_group()):
        return Group.of(gloo()), cpu
    return group, buffer.grad.device


def open_gathered(fork: ForkModel, filename: str, head_step: int | None) -> RankState:
    """The state in a gathered file, which every rank reads.

    `head_step` is the update count from `load_state_dict`, which has also loaded the param groups
    and the loss scale.
    """
    origin = Origin(f"The optimizer file {filename}", _OF_OTHER_SAVE)
    file = GatheredFile(load_file(Path(filename)), origin)
    shards: dict[str, SavedShard] = {}
    for plan in (buffer.plan for buffer in fork.grad_buffers):
        if plan.is_ours:
            raise CheckpointError(
                f"{origin.what} has no state of experts, but the model has experts. "
                f"{origin.remedy}."
            )
        for group in fork.sharded.plan.groups:
            dtypes = {plan.params[name].dtype for name in group.names if name in plan.params}
            file.check_order(is_mixed=len(dtypes) > 1, remedy=_PERMUTED)
        flats = file.tensors(plan.chunk, plan.dtype, plan.file_numel)
        for name in plan.params:
            in_file = plan.in_file[name]
            tensors = {kind: flat[in_file.as_slice()] for kind, flat in flats.items()}
            shards[name] = SavedShard(Span(0, in_file.numel), tensors)
    step = _step_of(fork, [{"step": file.step if head_step is None else head_step}])
    scale = saved_loss_scale(fork.sharded.loss_scale)
    return RankState(filename, {}, step, shards, scale, file.num_skipped)
