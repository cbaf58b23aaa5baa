"""Per-rank files, Megatron-LM 23.04: every data-parallel rank has a file with the state of its own
shards.

::

    mp_rank_TT[_PPP]/model_rng.pt       the model, see model_file.py
    mp_rank_TT[_PPP]_DDD/optim.pt       {"optimizer": {
        "optimizer": {"state": {number: {"exp_avg", "exp_avg_sq", ...}},
                      "param_groups": [{..., "params": [number]}]},
        "shard_fp32_from_float16_groups": [[fp32 1-D, ...], ...], "grad_scaler": ...},
        "opt_param_scheduler": ...}

There are no names. A rank's shards follow from the model file and from the number of files: the
grad buffer is cut into as many equal parts. In a group come the shards of fp32 params and then
those of 16-bit params, each in the order in which the fork registers them; groups that a rank owns
nothing of are left out. Values of fp32 params come with the model. A running fork asks each rank
for its entry "optimizer", and hands it back.

A run of ours whose grad buffers are cut into buckets owns other shards. Its entry names them, and
the fork's own optimizer refuses it:

::

    {"optimizer": {"param_groups": [...]}, "grad_scaler": ...,
     "megatron_distopt": {"shards": {NAME: {"span": (start, stop) in the flattened param,
                                            "main", ...: 1-D}}}}
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.file_state import (
    OURS,
    FileGroup,
    FileState,
    Slices,
    entries_in,
    group_decays,
    groups_by_rule,
    identity,
    ours_in,
    skipped_in,
)
from megatron_distopt.formats.megatron_2023.model_file import (
    MODEL_PER_RANK,
    ModelFile,
    buffers_of,
    grads_in_fp32,
)
from megatron_distopt.formats.megatron_2023.plain import (
    ExpectedParam,
    OptimizerEntry,
    entry_of,
    entry_to_write,
)
from megatron_distopt.formats.megatron_2023.saved_shards import Origin, SavedShard, in_order, joined
from megatron_distopt.formats.pickles import load_file, save_whole
from megatron_distopt.layout import BufferLayout, Span, owned_shards

T = TypeVar("T")

_OPTIM, _MAINS, _SHARDS, _SPAN = "optim.pt", "shard_fp32_from_float16_groups", "shards", "span"
_SAME_SAVE = "Give the model file and all optim.pt of one save"


def in_file_order(registered: Iterable[T], has_main: Callable[[T], bool]) -> list[T]:
    """A rank's shards of one group in the order of its file, from those in the order of their
    params in the fork."""
    return sorted(registered, key=has_main)


def rank_entry(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[Hashable]]],
    mains: Mapping[Any, Tensor],
    states: Mapping[Any, Mapping[str, Any]],
) -> dict[str, Any]:
    """A rank's entry in the fork's form, see `entry_of`."""
    return entry_of(groups, mains, states, _MAINS)


def named_entry(
    groups: Sequence[Mapping[str, Any]], shards: Mapping[str, SavedShard]
) -> dict[str, Any]:
    """A rank's entry of a run with buckets of its own, without its loss scale; `shards` by name in
    the whole model."""
    found = {
        name: {_SPAN: (each.in_param.start, each.in_param.stop), **each.tensors}
        for name, each in shards.items()
    }
    return {"optimizer": {"param_groups": list(groups)}, OURS: {_SHARDS: found}}


def named_shards(entry: Mapping[str, Any]) -> dict[str, SavedShard] | None:
    """The shards of a `named_entry`, by name in the whole model; None for an entry in the fork's
    form."""
    found = ours_in(entry).get(_SHARDS)
    if found is None:
        return None
    shards = {}
    for name, saved in found.items():
        span = Span(*map(int, saved[_SPAN]))
        tensors = {key: value for key, value in saved.items() if torch.is_tensor(value)}
        if any(tensor.shape != (span.numel,) for tensor in tensors.values()):
            raise CheckpointError(
                f"A shard of {name!r} does not have the {span.numel} elements that its file says. "
                f"{_SAME_SAVE}."
            )
        shards[str(name)] = SavedShard(span, tensors)
    return shards


def missing_in(entry: Mapping[str, Any]) -> list[str]:
    """What an entry "optimizer" lacks to be a rank's."""
    if ours_in(entry).get(_SHARDS) is not None:
        return [key for key in ("optimizer",) if key not in entry]
    missing = [key for key in ("optimizer", _MAINS) if key not in entry]
    return missing or [key for key in ("state", "param_groups") if key not in entry["optimizer"]]


def rank_state(entry: Mapping[str, Any], origin: Origin) -> OptimizerEntry:
    """The state in a rank's entry in the fork's form, which lacks nothing."""
    return OptimizerEntry(entry["optimizer"], entry[_MAINS], origin, lists_every_group=True)


def is_per_rank(file: ModelFile) -> bool:
    """Whether data-parallel ranks have files of their own for a model file."""
    return file.path.name == MODEL_PER_RANK and _file(file.folder, 0).is_file()


def _file(model_folder: Path, rank: int) -> Path:
    return model_folder.with_name(f"{model_folder.name}_{rank:03d}") / _OPTIM


def read_per_rank(file: ModelFile) -> FileState:
    all_paths = (_file(file.folder, rank) for rank in count())
    found = list(takewhile(Path.is_file, all_paths))
    told = file.number("data_parallel_size", len(found))
    if len(found) < told:
        missing = _file(file.folder, len(found))
        raise CheckpointError(
            f"Checkpoint {file.folder.parent} has no {missing}, but the run that saved it had "
            f"{told} data-parallel ranks. {_SAME_SAVE}."
        )
    paths = found[:told]  # one of a higher rank is left from an earlier save
    contents = [_loaded(path) for path in paths]
    entries = [content["optimizer"] for content in contents]
    of_ranks = [group for entry in entries for group in entry["optimizer"]["param_groups"]]
    by_identity: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for group in of_ranks:  # a rank has those that it owns params of
        by_identity.setdefault(identity(group), group)
    groups = groups_by_rule(file, sorted(by_identity.values(), key=group_decays, reverse=True))
    holders = list(of_ranks)  # of update counts, which are there or in the state of each param
    shards: dict[int, list[SavedShard]] = {}
    buffers = buffers_of(
        file, range(len(file.params)), len(paths), in_fp32=grads_in_fp32(file)
    ).values()
    for rank, (entry, path) in enumerate(zip(entries, paths, strict=True)):
        holders += entry["optimizer"].get("state", {}).values()
        origin = Origin(f"File {path}", _SAME_SAVE)
        for number, shard in _shards_in(file, entry, groups, buffers, rank, origin):
            shards.setdefault(number, []).append(shard)
    origin = Origin(f"The state of the ranks for {file.folder}", _SAME_SAVE)
    for number in {number for group in groups for number in group.members}:
        param = file.params[number]
        if not param.is_copy:
            every = Span(0, param.model.numel())
            shards[number] = in_order(param.name, every, shards.get(number, ()), origin)
    saved = [shard for of_param in shards.values() for shard in of_param]
    kinds = {kind: each.dtype for shard in saved for kind, each in shard.moments.items()}

    def read(kind: str, number: int) -> Tensor:
        model = file.params[number].model
        if kind == MAIN and not file.params[number].has_main:
            return model
        return joined(shards[number], kind).view(model.shape)

    kept = replace(entries_in(contents[0]), groups=tuple(group.options for group in groups))
    step, num_skipped = the_step(holders, file.folder), skipped_in(contents[0])
    return FileState(file, groups, step, kinds, read, kept, num_skipped)


def _loaded(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = load_file(path)
    entry = state.get("optimizer") if isinstance(state, Mapping) else None
    missing = missing_in(entry) if isinstance(entry, Mapping) else ["optimizer"]
    if missing:
        raise CheckpointError(
            f"File {path} has no {', '.join(missing)}, which a rank of a fork's distributed "
            f"optimizer saves. {_SAME_SAVE}."
        )
    return state


def _shards_in(
    file: ModelFile,
    entry: Mapping[str, Any],
    groups: Sequence[FileGroup],
    buffers: Iterable[BufferLayout],
    rank: int,
    origin: Origin,
) -> Iterator[tuple[int, SavedShard]]:
    """Number of the param, and shard, of all that one rank saved."""
    named = named_shards(entry)
    if named is not None:
        for number, param in enumerate(file.params):
            if param.name in named and not param.is_copy:
                yield number, named[param.name]
        return
    state = rank_state(entry, origin)
    places = {group_decays(group): place for place, group in enumerate(state.groups)}
    for group in groups:
        owned = _owned(file, group.members, buffers, rank)
        place = places.get(group_decays(group.options))
        if place is None and owned:
            raise CheckpointError(
                f"{origin.what} has no param group with {dict(group.options)}, and must hold "
                f"{len(owned)} params of it. {origin.remedy}."
            )
        params = [(file.params[number], span.numel) for number, span in owned]
        expected = [ExpectedParam(param.name, (numel,), param.has_main) for param, numel in params]
        saved = [] if place is None else state.params(place, expected)
        for (number, span), each in zip(owned, saved, strict=True):
            each.check_numbers(origin)
            yield number, SavedShard(span, each.tensors)


def _owned(
    file: ModelFile, members: Sequence[int], buffers: Iterable[BufferLayout], rank: int
) -> list[tuple[int, Span]]:
    """Numbers of a rank's params of one group, each with its shard, in the order of its file."""
    spans = {
        int(each.name): each.in_param for layout in buffers for each in owned_shards(layout, rank)
    }
    numbers = sorted(number for number in members if number in spans)
    return [
        (number, spans[number])
        for number in in_file_order(numbers, lambda each: file.params[each].has_main)
    ]


def write_per_rank(slices: Slices, folder: Path) -> None:
    """Writes a model file into a new folder, and one file of each data-parallel rank."""
    in_fp32 = grads_in_fp32(slices.file)
    buffers = buffers_of(slices.file, slices.trained, slices.ranks, in_fp32=in_fp32)
    more = {**slices.entries.also_saved, **slices.ours()}
    for rank in range(slices.ranks):
        groups = []
        for group in slices.groups:
            owned = _owned(slices.file, group.members, buffers.values(), rank)
            if owned:
                groups.append((group, owned))
        entry = entry_to_write(slices, groups, _MAINS)
        save_whole({"optimizer": entry, **more}, _file(folder, rank))
    save_whole(slices.model_state(fits_ranks=True), folder / MODEL_PER_RANK)
