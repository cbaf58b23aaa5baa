"""The state of a run without the distributed optimizer, in the model file itself.

::

    {"optimizer": {"optimizer": {"state": {number: {"exp_avg", ...}},    with 16-bit params
                                 "param_groups": [{..., "params": [number]}]},
                   "fp32_from_fp16_params": [[fp32, ...], ...], "grad_scaler": ...}}
    {"optimizer": {"state": ..., "param_groups": ...}}                   with fp32 params alone

Numbers go through the groups, in a group in the order in which the fork registers its params; main
params are those of the 16-bit ones, in the same order, shaped as the params. The values of fp32
params come with the model. A running fork hands the entry "optimizer" to every rank, so that a
distributed optimizer can be switched on in the middle of training. A rank's entry in per-rank files
has the same form, with shards in the place of params (`OptimizerEntry`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.file_state import (
    FileGroup,
    FileState,
    Slices,
    entries_in,
    groups_by_rule,
    skipped_in,
)
from megatron_distopt.formats.megatron_2023.model_file import MODEL, ModelFile
from megatron_distopt.formats.megatron_2023.saved_shards import Origin
from megatron_distopt.formats.pickles import save_whole
from megatron_distopt.layout import Span

_MAINS = "fp32_from_fp16_params"
_REMEDY = "Give a model file that a fork wrote, of a model without frozen params"


@dataclass(frozen=True)
class ExpectedParam:
    """A param, or a rank's shard of one, that a state must hold."""

    name: str  # of the param
    shape: tuple[int, ...]  # of its tensors
    has_main: bool  # one of fp32 is its own main param


@dataclass(frozen=True, eq=False)
class ParamEntry:
    """What a state holds of a param, or of a shard of one."""

    name: str  # of the param
    main: Tensor | None  # None for a param of fp32
    state: Mapping[str, Any]  # of the inner optimizer

    @property
    def moments(self) -> dict[str, Tensor]:
        """What is kept for each element, by key."""
        return {
            key: value
            for key, value in self.state.items()
            if torch.is_tensor(value) and value.dim() > 0
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The same with the main param."""
        return ({} if self.main is None else {MAIN: self.main}) | self.moments

    def check_numbers(self, origin: Origin) -> None:
        """Refuses a number that is kept once for the param, other than an update count, because it
        would be lost."""
        for key, value in self.state.items():
            if torch.is_tensor(value) and value.dim() == 0 and key != "step":
                raise CheckpointError(
                    f"{origin.what} holds one number {key!r} for {self.name!r}, and must hold one "
                    f"for each element. {origin.remedy}."
                )


@dataclass(frozen=True, eq=False)
class OptimizerEntry:
    """An entry "optimizer" of a plain file, or of a rank's."""

    inner: Mapping[str, Any]  # torch's own state dict
    mains: Sequence[Sequence[Tensor]]  # main params, by group
    origin: Origin
    lists_every_group: bool = False  # whether `mains` has a list for every group, even an empty one

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        groups: Sequence[Mapping[str, Any]] = self.inner["param_groups"]
        return groups

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer that saved it had made an update."""
        return any(self.inner["state"].values())

    def params(self, place: int, expected: Sequence[ExpectedParam]) -> Iterator[ParamEntry]:
        """What it holds of each param of its group number `place`, which must have the `expected`
        ones, in order."""
        numbers = list(self.groups[place].get("params", ()))
        if self.lists_every_group and len(self.mains) != len(self.groups):
            raise CheckpointError(
                f"{self.origin.what} holds main params of {len(self.mains)} groups, and must hold "
                f"those of its {len(self.groups)} param groups. {self.origin.remedy}."
            )
        left = list(self.mains[place]) if place < len(self.mains) else []
        num_mains = sum(each.has_main for each in expected)
        if len(numbers) != len(expected) or len(left) != num_mains:
            raise CheckpointError(
                f"{self.origin.what} holds {len(numbers)} params in group {place}, {len(left)} of "
                f"them with a main param, but the model has {len(expected)} there, {num_mains} of "
                f"them in 16 bits. {self.origin.remedy}."
            )
        of_main = iter(left)
        for each, number in zip(expected, numbers, strict=True):
            main = next(of_main) if each.has_main else None
            state = self.inner["state"].get(number, {})
            saved = ParamEntry(each.name, main, state)
            for tensor in saved.tensors.values():
                if tuple(tensor.shape) != each.shape:
                    raise CheckpointError(
                        f"{self.origin.what} holds a tensor of shape {list(tensor.shape)} for "
                        f"{each.name!r}, whose shape is {list(each.shape)}. "
                        f"{self.origin.remedy}."
                    )
            yield saved


def is_plain(entry: Mapping[str, Any]) -> bool:
    """Whether an entry "optimizer" is of a run without the distributed optimizer."""
    return _MAINS in entry or {"state", "param_groups"} <= entry.keys()


def plain_state(entry: Mapping[str, Any], origin: Origin) -> OptimizerEntry:
    """The state in an entry for which `is_plain` holds."""
    return OptimizerEntry(entry.get("optimizer", entry), entry.get(_MAINS) or (), origin)


def is_plain_file(file: ModelFile) -> bool:
    """Whether a model file holds the whole state."""
    entry = file.state.get("optimizer")
    return isinstance(entry, Mapping) and is_plain(entry)


def read_plain(file: ModelFile) -> FileState:
    state = plain_state(
        file.state["optimizer"], Origin(f"The optimizer state in {file.path}", _REMEDY)
    )
    groups = groups_by_rule(file, state.groups)
    saved: dict[int, ParamEntry] = {}
    for place, group in enumerate(groups):
        params = [file.params[number] for number in group.members]
        expected = [
            ExpectedParam(each.name, tuple(each.model.shape), each.has_main) for each in params
        ]
        saved |= dict(zip(group.members, state.params(place, expected), strict=True))
    for each in saved.values():
        each.check_numbers(state.origin)
    step = the_step([*state.groups, *state.inner["state"].values()], file.path)
    kinds = {kind: tensor.dtype for each in saved.values() for kind, tensor in each.moments.items()}

    def read(kind: str, number: int) -> Tensor:
        model = file.params[number].model
        found = saved[number].tensors.get(kind)
        if found is None:
            return model if kind == MAIN else torch.zeros(model.shape)
        return found

    entries = entries_in(file.state)
    return FileState(file, groups, step, kinds, read, entries, skipped_in(file.state))


def write_plain(slices: Slices, folder: Path) -> None:
    groups = [(group, [(number, None) for number in group.members]) for group in slices.groups]
    entry = entry_to_write(slices, groups, _MAINS)
    is_short = slices.file.option("fp16") or slices.file.option("bf16")
    if not is_short and not any(entry[_MAINS]):
        entry = entry["optimizer"]
    state = {**slices.model_state(), "optimizer": entry}
    save_whole({**state, **slices.entries.also_saved, **slices.ours()}, folder / MODEL)


def entry_to_write(
    slices: Slices,
    groups: Sequence[tuple[FileGroup, Sequence[tuple[int, Span | None]]]],
    mains_key: str,
) -> dict[str, Any]:
    """An entry "optimizer" with params, or some elements of them, of each group."""
    mains: dict[tuple[int, Span | None], Tensor] = {}
    states: dict[tuple[int, Span | None], dict[str, Any]] = {}
    shards = [shard for _, owned in groups for shard in owned]
    # In the order of the buffer, where the shards of two ranks meet in one param.
    for shard in sorted(shards, key=lambda shard: -shard[0]):
        main = slices.cut(MAIN, *shard)  # that of an fp32 param is compared with the model's
        if slices.file.params[shard[0]].has_main:
            mains[shard] = main
        if slices.kinds:
            moments = {kind: slices.cut(kind, *shard) for kind in slices.kinds}
            states[shard] = {**moments, **slices.count()}
    of_groups = [({**group.options, **slices.count()}, owned) for group, owned in groups]
    return {**entry_of(of_groups, mains, states, mains_key), **slices.grad_scaler()}


def entry_of(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[Hashable]]],
    mains: Mapping[Any, Tensor],
    states: Mapping[Any, Mapping[str, Any]],
    mains_key: str,
) -> dict[str, Any]:
    """An entry "optimizer" without its loss scale: options and params of each group, in the order
    of the file; main params and inner state by param, which is anything that tells it from
    others."""
    every = [param for _, params in groups for param in params]
    numbers = {param: number for number, param in enumerate(every)}
    return {
        "optimizer": {
            "state": {numbers[param]: states[param] for param in every if param in states},
            "param_groups": [
                {**options, "params": [numbers[param] for param in params]}
                for options, params in groups
            ],
        },
        mains_key: [[mains[param] for param in params if param in mains] for _, params in groups],
    }
