"""The state of a run without the distributed optimizer, in the model file itself.

::

    {"optimizer": {"optimizer": {"state": {number: {"exp_avg", ...}}, "param_groups": [{..., "params": [number]}]},
                   "fp32_from_fp16_params": [[fp32, ...], ...], "grad_scaler": ...}}          with 16-bit params
    {"optimizer": {"state": ..., "param_groups": ...}}                                        with fp32 params alone

Numbers go through the groups, in a group in the order in which the fork registers its params; main params are those of
the 16-bit ones, in the same order, shaped as the params. Values of fp32 params come with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.model_file import MODEL, ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import PartGroup, groups_by_rule, kept_in, the_step
from megatron_distopt.formats.megatron_2023.part import Part, skipped_in
from megatron_distopt.formats.megatron_2023.slices import Slices
from megatron_distopt.formats.safe import save_whole

__all__ = ["is_plain", "read_plain", "write_plain"]

_MAINS = "fp32_from_fp16_params"
_REMEDY = "Give a model file that a fork wrote, of a model without frozen params"


@dataclass(frozen=True, eq=False)
class _Saved:
    """What the file holds of one param; `main` is None for one of fp32."""

    main: Tensor | None
    state: Mapping[str, Any]

    @property
    def moments(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.items() if torch.is_tensor(value) and key != "step"}


def is_plain(file: ModelFile) -> bool:
    """Whether a model file holds the whole state."""
    inner = _inner(file)
    return "state" in inner and "param_groups" in inner


def _inner(file: ModelFile) -> Mapping[str, Any]:
    """torch's own state dict in it; empty where there is none."""
    entry = file.state.get("optimizer")
    inner = entry.get("optimizer", entry) if isinstance(entry, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def read_plain(file: ModelFile) -> Part:
    """The state in one model file.

    Raises:
        CheckpointError: it is of other params than the model's.
    """
    groups = groups_by_rule(file, _inner(file)["param_groups"])
    saved: dict[int, _Saved] = {}
    for place, group in enumerate(groups):
        saved |= dict(zip(group.members, _saved_in_group(file, place, group), strict=True))
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

    return Part(file, groups, kinds, read, kept_in(file.state, ("opt_param_scheduler",)), skipped_in(file.state))


def _saved_in_group(file: ModelFile, place: int, group: PartGroup) -> Iterator[_Saved]:
    """By member."""
    inner, mains = _inner(file), file.state["optimizer"].get(_MAINS)
    numbers = list(inner["param_groups"][place]["params"])
    left = list(mains[place]) if mains is not None else []
    has_main = [file.params[number].model.dtype is not torch.float32 for number in group.members]
    if len(numbers) != len(group.members) or len(left) != sum(has_main):
        got = f"{len(numbers)} params, {len(left)} of them with a main param, in group {place}"
        rule = f"hold the model's {len(group.members)}, {sum(has_main)} of them of 16 bits"
        raise CheckpointError(refusal(f"optimizer state in {file.path}", got, rule, _REMEDY))
    for member, number, is_16_bit in zip(group.members, numbers, has_main, strict=True):
        saved, param = _Saved(left.pop(0) if is_16_bit else None, inner["state"].get(number, {})), file.params[member]
        for tensor in (*saved.moments.values(), *([] if saved.main is None else [saved.main])):
            if tensor.shape != param.model.shape:
                got, rule = f"{list(tensor.shape)} for {param.name!r}", f"have its shape {list(param.model.shape)}"
                raise CheckpointError(refusal(f"optimizer state in {file.path}", got, rule, _REMEDY))
        yield saved


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
            {**group.options, "params": [place[number] for number in group.members]} for group in slices.groups
        ],
    }
    entry: dict[str, Any] = inner
    if slices.is_16_bit:
        of_groups = [[mains[number] for number in _with_main(slices, group.members)] for group in slices.groups]
        entry = {"optimizer": inner, **slices.grad_scaler(), _MAINS: of_groups}
    save_whole({**slices.model_state(), "optimizer": entry, **slices.beside(), **slices.ours()}, folder / MODEL)


def _with_main(slices: Slices, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if slices.has_main(number)]


def _state_of(slices: Slices, number: int) -> dict[str, Any]:
    return {**{kind: slices.read(kind, number) for kind in slices.kinds}, **slices.step_in_state()}
