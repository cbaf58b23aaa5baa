"""Per-rank files, Megatron-LM 23.04: every data-parallel rank has a file with the state of its own shards.

::

    mp_rank_TT[_PPP]/model_rng.pt       the model, see model_file.py
    mp_rank_TT[_PPP]_DDD/optim.pt       {"optimizer": {
        "optimizer": {"state": {number: {"exp_avg", "exp_avg_sq", ...}}, "param_groups": [{..., "params": [number]}]},
        "shard_fp32_from_float16_groups": [[fp32 1-D, ...], ...], "grad_scaler": ...}, "opt_param_scheduler": ...}

There are no names. A rank's shards follow from the model file and from the number of files: the grad buffer is cut into
as many equal parts. In a group come the shards of fp32 params and then those of 16-bit params, each in the order in
which the fork registers them; groups that a rank owns nothing of are left out. Values of fp32 params come with the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.grad_buffers import buffers_of, grads_in_fp32
from megatron_distopt.formats.megatron_2023.model_file import MODEL_PER_RANK, ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import (
    PartGroup,
    WrittenGroup,
    group_decays,
    groups_by_rule,
    identity,
    kept_in,
    the_step,
)
from megatron_distopt.formats.megatron_2023.part import Part, skipped_in
from megatron_distopt.formats.megatron_2023.slices import Slices
from megatron_distopt.formats.safe import load_safely, save_whole
from megatron_distopt.layout import BufferLayout, Span, owned_shards

__all__ = ["is_per_rank", "read_per_rank", "write_per_rank"]

_OPTIM, _MAINS = "optim.pt", "shard_fp32_from_float16_groups"
_SAME_SAVE = "Give the model file and all optim.pt of one save"


def is_per_rank(file: ModelFile) -> bool:
    """Whether data-parallel ranks have files of their own beside a model file."""
    return file.path.name == MODEL_PER_RANK and _file(file.folder, 0).is_file()


def _file(model_folder: Path, rank: int) -> Path:
    return model_folder.with_name(f"{model_folder.name}_{rank:03d}") / _OPTIM


def _paths(file: ModelFile) -> list[Path]:
    """Of all ranks; a file of a higher one is left from an earlier save."""
    found = list(takewhile(Path.is_file, (_file(file.folder, rank) for rank in count())))
    told = file.number("data_parallel_size", len(found))
    if len(found) < told:
        got, rule = f"no {_file(file.folder, len(found))}", f"hold a file of each of {told} data-parallel ranks"
        raise CheckpointError(refusal(f"checkpoint {file.folder.parent}", got, rule, _SAME_SAVE))
    return found[:told]


def read_per_rank(file: ModelFile) -> Part:
    """The state beside one model file.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or has other shards than it must have.
    """
    paths = _paths(file)
    states = [_loaded(path) for path in paths]
    groups = groups_by_rule(file, _groups_of_all(states))
    found: dict[int, list[_Saved]] = {}
    for rank, (state, path) in enumerate(zip(states, paths, strict=True)):
        for saved in _of_rank(file, state["optimizer"], groups, rank, len(paths), path):
            found.setdefault(saved.shard.number, []).append(saved)
    groups = tuple(replace(group, step=the_step(_holders(states, found, group), file.folder)) for group in groups)
    kinds = {kind: tensor.dtype for each in found.values() for saved in each for kind, tensor in saved.moments.items()}

    def read(kind: str, number: int) -> Tensor:
        shape, pieces = file.params[number].model.shape, found[number]
        if kind == MAIN and not _has_main(file, number):
            return file.params[number].model
        return torch.cat([saved.tensor(kind) for saved in pieces]).view(shape)

    kept = kept_in(states[0], ("opt_param_scheduler",))
    return Part(
        file, groups, kinds, read, replace(kept, groups=tuple(group.options for group in groups)), skipped_in(states[0])
    )


@dataclass(frozen=True)
class _Shard:
    """A rank's part of one param."""

    number: int
    in_param: Span


@dataclass(frozen=True, eq=False)
class _Saved:
    """What a rank saved of a shard; `main` is None for an fp32 param."""

    shard: _Shard
    main: Tensor | None
    state: Mapping[str, Any]

    @property
    def moments(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.items() if torch.is_tensor(value) and key != "step"}

    def tensor(self, kind: str) -> Tensor:
        """1-D; zeros for a param that was never updated."""
        found = self.main if kind == MAIN else self.moments.get(kind)
        return torch.zeros(self.shard.in_param.numel) if found is None else found


def _loaded(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = load_safely(path)
    entry = state.get("optimizer") if isinstance(state, Mapping) else None
    entry = entry if isinstance(entry, Mapping) else {}
    inner = entry.get("optimizer")
    if not isinstance(inner, Mapping) or _MAINS not in entry or not {"state", "param_groups"} <= inner.keys():
        rule = "be what a rank of a fork's distributed optimizer saves"
        raise CheckpointError(refusal(f"file {path}", f"without {_MAINS} or state", rule, _SAME_SAVE))
    return state


def _groups_of_all(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each of them once, in the order in which a fork makes them; a rank has those that it owns something of."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for state in states:
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            found.setdefault(identity(group), group)
    return sorted(found.values(), key=group_decays, reverse=True)


def _has_main(file: ModelFile, number: int) -> bool:
    return file.params[number].model.dtype is not torch.float32


def _owned(file: ModelFile, members: Sequence[int], buffers: Iterable[BufferLayout], rank: int) -> list[_Shard]:
    """A rank's shards of one group, in the order of its file."""
    spans = {int(each.name): each.in_param for layout in buffers for each in owned_shards(layout, rank)}
    numbers = sorted((number for number in members if number in spans), key=lambda each: (_has_main(file, each), each))
    return [_Shard(number, spans[number]) for number in numbers]


def _of_rank(
    file: ModelFile, entry: Mapping[str, Any], groups: Sequence[PartGroup], rank: int, ranks: int, path: Path
) -> Iterator[_Saved]:
    """What one file holds, in the words of the model file."""
    inner, mains = entry["optimizer"], entry[_MAINS]
    buffers = buffers_of(file, range(len(file.params)), ranks, in_fp32=grads_in_fp32(file)).values()
    places = {group_decays(group): place for place, group in enumerate(inner["param_groups"])}
    for group in groups:
        shards, place = _owned(file, group.members, buffers, rank), places.get(group_decays(group.options))
        numbers = [] if place is None else list(inner["param_groups"][place]["params"])
        left = [] if place is None or place >= len(mains) else list(mains[place])
        wanted = [shard.in_param.numel for shard in shards if _has_main(file, shard.number)]
        if len(numbers) != len(shards) or [tensor.numel() for tensor in left] != wanted:
            got = f"{len(numbers)} shards, main params of {[tensor.numel() for tensor in left]} elements in a group"
            raise CheckpointError(refusal(f"file {path}", got, f"hold {len(shards)}, of {wanted}", _SAME_SAVE))
        for shard, number in zip(shards, numbers, strict=True):
            main = left.pop(0) if _has_main(file, shard.number) else None
            yield _checked(_Saved(shard, main, inner["state"].get(number, {})), path)


def _checked(saved: _Saved, path: Path) -> _Saved:
    numels = {kind: tensor.numel() for kind, tensor in saved.moments.items()}
    if any(numel != saved.shard.in_param.numel for numel in numels.values()):
        rule = f"hold tensors of {saved.shard.in_param.numel} elements for param {saved.shard.number} of the model"
        raise CheckpointError(refusal(f"file {path}", numels, rule, _SAME_SAVE))
    return saved


def _holders(
    states: Sequence[Mapping[str, Any]], found: Mapping[int, Sequence[_Saved]], group: PartGroup
) -> Iterator[Mapping[str, Any]]:
    """What may keep the update count of a group."""
    for state in states:
        groups = state["optimizer"]["optimizer"]["param_groups"]
        yield from (each for each in groups if group_decays(each) is group_decays(group.options))
    yield from (saved.state for number in group.members for saved in found[number])


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
        save_whole({"optimizer": state, **slices.beside(), **slices.ours()}, _file(folder, rank))
    save_whole(slices.model_state(ranks), folder / MODEL_PER_RANK)


def _state_of_rank(slices: Slices, owned: Sequence[tuple[WrittenGroup, list[_Shard]]]) -> dict[str, Any]:
    flat = [shard for _, shards in owned for shard in shards]
    # In the order of the buffer, where the shards of two ranks meet in one param.
    cut = {shard.number: _cut(slices, shard) for shard in sorted(flat, key=lambda shard: -shard.number)}
    place = {shard.number: number for number, shard in enumerate(flat)}
    return {
        "optimizer": {
            "state": {place[shard.number]: cut[shard.number].state for shard in flat if cut[shard.number].state},
            "param_groups": [
                {**group.options, "params": [place[shard.number] for shard in shards]} for group, shards in owned
            ],
        },
        _MAINS: [
            [main for main in (cut[shard.number].main for shard in shards) if main is not None] for _, shards in owned
        ],
        **slices.grad_scaler(),
    }


def _cut(slices: Slices, shard: _Shard) -> _Saved:
    """Copies: a view would be saved with everything that it is a view of."""

    def of(kind: str) -> Tensor:
        return slices.read(kind, shard.number).reshape(-1)[shard.in_param.as_slice()].clone()

    main = of(MAIN)
    state: dict[str, Any] = {kind: of(kind) for kind in slices.kinds}
    return _Saved(shard, main if slices.has_main(shard.number) else None, state | slices.step_in_state())
