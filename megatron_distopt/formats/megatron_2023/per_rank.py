"""Per-rank files, Megatron-LM 23.04: every data-parallel rank has a file with the state of its own shards.

::

    mp_rank_TT[_PPP]/model_rng.pt       the model, see model_file.py
    mp_rank_TT[_PPP]_DDD/optim.pt       {"optimizer": {
        "optimizer": {"state": {number: {"exp_avg", "exp_avg_sq", ...}}, "param_groups": [{..., "params": [number]}]},
        "shard_fp32_from_float16_groups": [[fp32 1-D, ...], ...], "grad_scaler": ...}, "opt_param_scheduler": ...}

There are no names. A rank's shards follow from the model file and from the number of files: the grad buffer is cut into
as many equal parts. In a group come the shards of fp32 params and then those of 16-bit params, each in the order in
which the fork registers them; groups that a rank owns nothing of are left out. Values of fp32 params come with the
model. A running fork asks each rank for its entry "optimizer", and hands it back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.head import the_step
from megatron_distopt.formats.megatron_2023.file_state import FileState, Slices, skipped_in
from megatron_distopt.formats.megatron_2023.model_file import MODEL_PER_RANK, ModelFile, buffers_of, grads_in_fp32
from megatron_distopt.formats.megatron_2023.param_groups import (
    FileGroup,
    group_decays,
    groups_by_rule,
    identity,
    kept_in,
)
from megatron_distopt.formats.megatron_2023.plain import ExpectedParam, Origin, SavedParam, SavedState
from megatron_distopt.formats.pickles import load_kept, save_whole
from megatron_distopt.layout import BufferLayout, Span, owned_shards

T = TypeVar("T")

_OPTIM, _MAINS = "optim.pt", "shard_fp32_from_float16_groups"
_SAME_SAVE = "Give the model file and all optim.pt of one save"


def in_file_order(registered: Iterable[T], has_main: Callable[[T], bool]) -> list[T]:
    """A rank's shards of one group in the order of its file.

    Args:
        registered: the shards, in the order in which the fork registers their params.
        has_main: whether the param of a shard has a main param.
    """
    return sorted(registered, key=has_main)


def rank_entry(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[Hashable]]],
    mains: Mapping[Any, Tensor],
    states: Mapping[Any, Mapping[str, Any]],
) -> dict[str, Any]:
    """A rank's entry "optimizer", without its loss scale.

    Args:
        groups: options and shards of each group that the rank owns something of, in the order of the file.
        mains: by shard, for those that have one.
        states: of the inner optimizer, by shard.
    """
    numbers = {shard: number for number, shard in enumerate(shard for _, shards in groups for shard in shards)}
    return {
        "optimizer": {
            "state": {number: states[shard] for shard, number in numbers.items() if shard in states},
            "param_groups": [{**options, "params": [numbers[shard] for shard in shards]} for options, shards in groups],
        },
        _MAINS: [[mains[shard] for shard in shards if shard in mains] for _, shards in groups],
    }


def missing_in(entry: Mapping[str, Any]) -> list[str]:
    """What an entry "optimizer" lacks to be a rank's."""
    missing = [key for key in ("optimizer", _MAINS) if key not in entry]
    return missing or [key for key in ("state", "param_groups") if key not in entry["optimizer"]]


def rank_state(entry: Mapping[str, Any], origin: Origin) -> SavedState:
    """The state in a rank's entry, which lacks nothing."""
    return SavedState(entry["optimizer"], entry[_MAINS], origin, lists_every_group=True)


def is_per_rank(file: ModelFile) -> bool:
    """Whether data-parallel ranks have files of their own for a model file."""
    return file.path.name == MODEL_PER_RANK and _file(file.folder, 0).is_file()


def _file(model_folder: Path, rank: int) -> Path:
    return model_folder.with_name(f"{model_folder.name}_{rank:03d}") / _OPTIM


def _paths(file: ModelFile) -> list[Path]:
    """Files of all ranks. One of a higher rank is left from an earlier save."""
    found = list(takewhile(Path.is_file, (_file(file.folder, rank) for rank in count())))
    told = file.number("data_parallel_size", len(found))
    if len(found) < told:
        got, rule = f"no {_file(file.folder, len(found))}", f"hold a file of each of {told} data-parallel ranks"
        raise CheckpointError(refusal(f"checkpoint {file.folder.parent}", got, rule, _SAME_SAVE))
    return found[:told]


def read_per_rank(file: ModelFile) -> FileState:
    """The state that belongs to one model file.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or has other shards than it must have.
    """
    paths = _paths(file)
    contents = [_loaded(path) for path in paths]
    states = [
        rank_state(content["optimizer"], Origin(f"file {path}", _SAME_SAVE))
        for content, path in zip(contents, paths, strict=True)
    ]
    groups = groups_by_rule(file, _groups_of_all(states))
    found: dict[int, list[_SavedShard]] = {}
    buffers = buffers_of(file, range(len(file.params)), len(paths), in_fp32=grads_in_fp32(file)).values()
    for rank, state in enumerate(states):
        owned = [(group, _owned(file, group.members, buffers, rank)) for group in groups]
        for each in _of_rank(file, state, owned):
            found.setdefault(each.shard.number, []).append(each)
    groups = tuple(replace(group, step=the_step(_holders(states, found, group), file.folder)) for group in groups)
    saved = [each.saved for shards in found.values() for each in shards]
    kinds = {kind: tensor.dtype for each in saved for kind, tensor in each.moments.items()}

    def read(kind: str, number: int) -> Tensor:
        model = file.params[number].model
        if kind == MAIN and not file.params[number].has_main:
            return model
        return torch.cat([each.tensor(kind) for each in found[number]]).view(model.shape)

    kept = replace(kept_in(contents[0]), groups=tuple(group.options for group in groups))
    return FileState(file, groups, kinds, read, kept, skipped_in(contents[0]))


@dataclass(frozen=True)
class _Shard:
    """A rank's part of one param."""

    number: int
    in_param: Span


@dataclass(frozen=True, eq=False)
class _SavedShard:
    """A rank's part of one param with what it saved of it."""

    shard: _Shard
    saved: SavedParam

    def tensor(self, kind: str) -> Tensor:
        """1-D; zeros for a param that was never updated."""
        found = self.saved.tensors.get(kind)
        return torch.zeros(self.shard.in_param.numel) if found is None else found


def _loaded(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = load_kept(path)
    entry = state.get("optimizer") if isinstance(state, Mapping) else None
    missing = missing_in(entry) if isinstance(entry, Mapping) else ["optimizer"]
    if missing:
        origin = Origin(f"file {path}", _SAME_SAVE)
        raise origin.refused(f"without {', '.join(missing)}", "be what a rank of a fork's distributed optimizer saves")
    return state


def _groups_of_all(states: Sequence[SavedState]) -> list[Mapping[str, Any]]:
    """Param groups of all ranks, each once, in the fork's order. A rank has those that it owns params of."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for state in states:
        for group in state.groups:
            found.setdefault(identity(group), group)
    return sorted(found.values(), key=group_decays, reverse=True)


def _owned(file: ModelFile, members: Sequence[int], buffers: Iterable[BufferLayout], rank: int) -> list[_Shard]:
    """A rank's shards of one group, in the order of its file."""
    spans = {int(each.name): each.in_param for layout in buffers for each in owned_shards(layout, rank)}
    numbers = sorted(number for number in members if number in spans)
    return [_Shard(number, spans[number]) for number in in_file_order(numbers, lambda each: file.params[each].has_main)]


def _of_rank(
    file: ModelFile, state: SavedState, owned: Sequence[tuple[FileGroup, list[_Shard]]]
) -> Iterator[_SavedShard]:
    """What one file holds of the shards that the rank must have owned."""
    places = {group_decays(group): place for place, group in enumerate(state.groups)}
    for group, shards in owned:
        place = places.get(group_decays(group.options))
        if place is None and shards:
            raise state.origin.refused("a param group missing", f"hold {len(shards)} params of {dict(group.options)}")
        params = [(file.params[shard.number], shard.in_param.numel) for shard in shards]
        expected = [ExpectedParam(param.name, (numel,), param.has_main) for param, numel in params]
        saved = [] if place is None else state.params(place, expected)
        for shard, each in zip(shards, saved, strict=True):
            each.check_numbers(state.origin)
            yield _SavedShard(shard, each)


def _holders(
    states: Sequence[SavedState], found: Mapping[int, Sequence[_SavedShard]], group: FileGroup
) -> Iterator[Mapping[str, Any]]:
    """What may keep the update count of a group."""
    for state in states:
        yield from (each for each in state.groups if group_decays(each) is group_decays(group.options))
    yield from (each.saved.state for number in group.members for each in found[number])


def write_per_rank(slices: Slices, folder: Path, ranks: int) -> None:
    """The model file and one of each data-parallel rank.

    Args:
        slices: of one model file.
        folder: of the new model file.
        ranks: data-parallel; the files fit this number only.
    """
    buffers = buffers_of(slices.file, slices.trained, ranks, in_fp32=grads_in_fp32(slices.file))
    for rank in range(ranks):
        owned = [(group, _owned(slices.file, group.members, buffers.values(), rank)) for group in slices.groups]
        state = _state_of_rank(slices, [(group, shards) for group, shards in owned if shards])
        save_whole({"optimizer": state, **slices.also_saved(), **slices.ours()}, _file(folder, rank))
    save_whole(slices.model_state(ranks), folder / MODEL_PER_RANK)


def _state_of_rank(slices: Slices, owned: Sequence[tuple[FileGroup, list[_Shard]]]) -> dict[str, Any]:
    mains: dict[_Shard, Tensor] = {}
    states: dict[_Shard, dict[str, Any]] = {}
    # In the order of the buffer, where the shards of two ranks meet in one param.
    for shard in sorted((shard for _, shards in owned for shard in shards), key=lambda shard: -shard.number):
        main = _cut(slices, shard, MAIN)  # that of an fp32 param is compared with the model's
        if slices.file.params[shard.number].has_main:
            mains[shard] = main
        state: dict[str, Any] = {kind: _cut(slices, shard, kind) for kind in slices.kinds}
        if slices.kinds:
            states[shard] = state | slices.step_in_state()
    groups = [(group.as_saved, shards) for group, shards in owned]
    return {**rank_entry(groups, mains, states), **slices.grad_scaler()}


def _cut(slices: Slices, shard: _Shard, kind: str) -> Tensor:
    """A copy: a view would be saved with everything that it is a view of."""
    return slices.read(kind, shard.number).reshape(-1)[shard.in_param.as_slice()].clone()
