"""The state of a run without the distributed optimizer, in the model file itself.

::

    {"optimizer": {"optimizer": {"state": {number: {"exp_avg", ...}}, "param_groups": [{..., "params": [number]}]},
                   "fp32_from_fp16_params": [[fp32, ...], ...], "grad_scaler": ...}}          with 16-bit params
    {"optimizer": {"state": ..., "param_groups": ...}}                                        with fp32 params alone

Numbers go through the groups, in a group in the order in which the fork registers its params; main params are those of
the 16-bit ones, in the same order, shaped as the params. A running fork hands the entry "optimizer" to every rank, so
that a distributed optimizer can be switched on in the middle of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.formats.head import the_step
from megatron_distopt.formats.megatron_2023.file_state import FileState, Slices, skipped_in
from megatron_distopt.formats.megatron_2023.model_file import MODEL, ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import groups_by_rule, kept_in
from megatron_distopt.formats.megatron_2023.saved import ExpectedParam, Origin, SavedParam, params_of_group
from megatron_distopt.formats.pickles import save_whole

__all__ = ["inner_of", "is_plain", "is_plain_file", "plain_params", "read_plain", "write_plain"]

_MAINS = "fp32_from_fp16_params"
_REMEDY = "Give a model file that a fork wrote, of a model without frozen params"


def is_plain(entry: Mapping[str, Any]) -> bool:
    """Whether an entry "optimizer" is of a run without the distributed optimizer."""
    return _MAINS in entry or {"state", "param_groups"} <= entry.keys()


def inner_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's own state dict in it."""
    inner: Mapping[str, Any] = entry.get("optimizer", entry)
    return inner


def plain_params(
    entry: Mapping[str, Any], place: int, expected: Sequence[ExpectedParam], origin: Origin
) -> Iterator[SavedParam]:
    """What the entry holds of each param of one group.

    Args:
        entry: see above.
        place: of the group in it.
        expected: the params of the group, in the order in which the fork registers them.
        origin: for errors.

    Raises:
        CheckpointError: the group has other params.
    """
    return params_of_group(inner_of(entry), entry.get(_MAINS) or (), place, expected, origin)


def is_plain_file(file: ModelFile) -> bool:
    """Whether a model file holds the whole state."""
    entry = file.state.get("optimizer")
    return isinstance(entry, Mapping) and is_plain(entry)


def read_plain(file: ModelFile) -> FileState:
    """The state in one model file.

    Raises:
        CheckpointError: it is of other params than the model's.
    """
    entry, origin = file.state["optimizer"], Origin(f"optimizer state in {file.path}", _REMEDY)
    groups = groups_by_rule(file, inner_of(entry)["param_groups"])
    saved: dict[int, SavedParam] = {}
    for place, group in enumerate(groups):
        params = [file.params[number] for number in group.members]
        expected = [ExpectedParam(each.name, tuple(each.model.shape), each.has_main) for each in params]
        saved |= dict(zip(group.members, plain_params(entry, place, expected, origin), strict=True))
    for each in saved.values():
        each.check_numbers(origin)
    groups = tuple(
        replace(group, step=the_step([{"step": group.step}, *(saved[each].state for each in group.members)], file.path))
        for group in groups
    )
    kinds = {kind: tensor.dtype for each in saved.values() for kind, tensor in each.moments.items()}

    def read(kind: str, number: int) -> Tensor:
        model, of_param = file.params[number].model, saved[number]
        found = of_param.main if kind == MAIN else of_param.moments.get(kind)
        if found is None:
            return model if kind == MAIN else torch.zeros(model.shape)
        return found

    return FileState(file, groups, kinds, read, kept_in(file.state), skipped_in(file.state))


def write_plain(slices: Slices, folder: Path) -> None:
    """The model file with the state in it.

    Args:
        slices: of one model file.
        folder: of the new one.
    """
    numbers = [number for group in slices.groups for number in group.members]
    place = {number: at for at, number in enumerate(numbers)}
    mains = {number: slices.read(MAIN, number) for number in numbers}  # those of fp32 are compared with the model's
    state = {place[number]: _state_of(slices, number) for number in numbers} if slices.kinds else {}
    inner = {
        "state": state,
        "param_groups": [
            {**group.as_saved, "params": [place[number] for number in group.members]} for group in slices.groups
        ],
    }
    entry: dict[str, Any] = inner
    if slices.is_16_bit:
        of_groups = [[mains[number] for number in _with_main(slices, group.members)] for group in slices.groups]
        entry = {"optimizer": inner, **slices.grad_scaler(), _MAINS: of_groups}
    save_whole({**slices.model_state(), "optimizer": entry, **slices.also_saved(), **slices.ours()}, folder / MODEL)


def _with_main(slices: Slices, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if slices.file.params[number].has_main]


def _state_of(slices: Slices, number: int) -> dict[str, Any]:
    return {**{kind: slices.read(kind, number) for kind in slices.kinds}, **slices.step_in_state()}
