"""Optimizer state of one model file, and of the whole model: `whole_of` for readers, and `Slices` for writers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, join, key_of, kind_of, name_of, some_of
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.common import count_unlike, cut, fill, inner_name, loss_scale_of, the_step
from megatron_distopt.formats.megatron_2023.fork_groups import FileGroup, ForkEntries, written_groups
from megatron_distopt.formats.megatron_2023.model_file import FileParam, ModelFile
from megatron_distopt.layout import Box, Span

#: The key of what this package puts into a fork's file, and a key in it.
OURS, NUM_SKIPPED = "megatron_distopt", "num_skipped"
#: Ranks that hold the same param may drift apart in the last bits. Other params differ by their own size.
_LARGEST_DRIFT = 0.1


@dataclass(frozen=True, eq=False)
class FileState:
    """What a fork saved for one model file."""

    file: ModelFile
    groups: tuple[FileGroup, ...]
    kinds: Mapping[str, torch.dtype]  # what the inner optimizer kept for each element; the same for all params
    read: Callable[[str, int], Tensor]  # one tensor, by kind and number of the param, in the shape of the file's param
    entries: ForkEntries
    num_skipped: int = 0  # steps that were skipped, where the file says it

    def main(self, number: int) -> Tensor:
        """The main param, compared with the model's own."""
        tensor = self.read(MAIN, number)
        _check_rounds(tensor, self.file.params[number], self.file)
        return tensor


@dataclass(frozen=True, eq=False)
class _Home:
    """Where a param of the whole model is found: on the tensor-parallel ranks of one stage."""

    parts: tuple[FileState, ...]
    numbers: tuple[int, ...]

    @property
    def param(self) -> FileParam:
        return self.parts[0].file.params[self.numbers[0]]


def ours_in(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """What this package put into a fork's file; the fork does not look at it."""
    found = state.get(OURS)
    return found if isinstance(found, Mapping) else {}


def skipped_in(state: Mapping[Any, Any]) -> int:
    """Steps that were skipped; 0 in a file that does not say it."""
    return int(ours_in(state).get(NUM_SKIPPED, 0))


def _check_rounds(main: Tensor, param: FileParam, file: ModelFile) -> None:
    """Refuses a main param whose rounded values are not the model's."""
    num_unlike = count_unlike(main, param.model)
    if num_unlike:
        got = f"{num_unlike} of {main.numel()} values of {param.name!r} are not the model's"
        rule = f"be of the model in {file.path}, whose values are those of the main params, rounded"
        remedy = "Give the optimizer state and the model of one save, unchanged"
        raise CheckpointError(refusal("optimizer state", got, rule, remedy))


def whole_of(parts: Sequence[FileState], written_as: str) -> Source:
    """The state of the whole model from that of all its model files; `written_as` names the format."""
    kinds, homes = dict(parts[0].kinds), _homes_of(parts)
    for part in parts:
        if part.kinds != kinds:
            got, remedy = f"{_listed(part.kinds)} in {part.file.folder}", "Give the files of one save"
            raise CheckpointError(refusal("optimizer state", got, f"hold {_listed(kinds)} as the others", remedy))
    step = the_step([{"step": group.step} for part in parts for group in part.groups], parts[0].file.folder.parent)
    infos = {
        key_of(kind, name): TensorInfo(home.param.placement.global_shape, dtype_name(dtype))
        for name, home in homes.items()
        for kind, dtype in {MAIN: torch.float32, **kinds}.items()
    }
    head = _head(parts[0], kinds, written_as)
    groups = join([replace(head, groups=tuple(_records(part, step))) for part in parts]).groups
    return Source(
        replace(head, groups=groups), infos, lambda key, box: _read(homes[name_of(key)], kind_of(key), infos[key], box)
    )


def _homes_of(parts: Sequence[FileState]) -> dict[str, _Home]:
    """Where each param is found, by name, in the order of stages."""
    homes: dict[str, _Home] = {}
    for part in parts:
        for number in sorted(number for group in part.groups for number in group.members):
            param = part.file.params[number]
            if param.is_copy:
                continue
            known = homes.get(param.name, _Home((), ()))
            homes[param.name] = _Home((*known.parts, part), (*known.numbers, number))
    return homes


def _listed(kinds: Mapping[str, torch.dtype]) -> str:
    return ", ".join(sorted(kinds)) or "main params alone"


def _head(part: FileState, kinds: Mapping[str, torch.dtype], written_as: str) -> Manifest:
    inner = "torch_sgd" if "momentum_buffer" in kinds else inner_name(kinds)
    sizes = {"tensor_parallel": part.file.tensor[1], "pipeline_parallel": part.file.stage[1]}
    about: dict[str, str | int] = {"host": "a Megatron of 2023", "format": written_as, **sizes}
    return Manifest("", (), {}, (), inner, loss_scale_of(part.entries.grad_scaler), part.num_skipped, about)


def _records(part: FileState, step: int | None) -> Iterator[GroupRecord]:
    for group in part.groups:
        names = dict.fromkeys(part.file.params[number].name for number in group.members)
        yield GroupRecord(tuple(names), options_of(group.options)[0], step)


@torch.no_grad()
def _read(home: _Home, kind: str, info: TensorInfo, box: Box) -> Tensor:
    """A part of a tensor; a main param is read whole, because it is compared with the model's."""
    wanted = Box.whole(info.shape) if kind == MAIN else box
    found = torch.empty(wanted.sizes, dtype=getattr(torch, info.dtype))
    for part, number in zip(home.parts, home.numbers, strict=True):
        placement, is_copy = part.file.params[number].placement, part is not home.parts[0]
        if kind == MAIN and placement.dim is None and is_copy:
            _check_same(part.main(number), found, part, number)
        elif placement.dim is not None or not is_copy:
            local = part.main(number) if kind == MAIN else part.read(kind, number)
            fill(found, wanted, local.reshape(-1), 0, placement.pieces(Span(0, local.numel())))
    return found if wanted == box else found[box.as_slices()].clone()


def _check_same(local: Tensor, whole: Tensor, part: FileState, number: int) -> None:
    """A param that was taken for one that all ranks hold, and is cut, would be lost but for its first part."""
    if torch.linalg.vector_norm(local - whole) <= _LARGEST_DRIFT * torch.linalg.vector_norm(whole):
        return
    name, rank = part.file.params[number].name, part.file.tensor[0]
    got, rule = f"another one on tensor-parallel rank {rank}", "be cut along a dimension that Megatron's names tell"
    remedy = "Convert it at tensor-parallel size 1; this name says nothing about how it is cut"
    raise CheckpointError(refusal(f"param {name!r}", got, rule, remedy))


@dataclass(frozen=True, eq=False)
class Slices:
    """A model file and the state that is written for it."""

    file: ModelFile
    source: Source  # of the whole model
    entries: ForkEntries  # of the fork's files that are converted
    progress: Callable[[int], None]  # called with bytes as they are read
    _last: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What is kept for each element in addition to the main param."""
        return tuple(sorted({kind_of(key) for key in self.source.tensors} - {MAIN}))

    @cached_property
    def groups(self) -> list[FileGroup]:
        """Param groups of this file."""
        return written_groups(self.file, self.source.head.groups, self.entries)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the params that the optimizer updates, in the order in which the fork registers them."""
        return tuple(sorted(number for group in self.groups for number in group.members))

    @property
    def step(self) -> int | None:
        """Updates so far."""
        return max((record.step for record in self.source.head.groups if record.step is not None), default=None)

    @property
    def is_16_bit(self) -> bool:
        """Whether the fork keeps main params apart from the model's."""
        told = self.file.option("fp16") or self.file.option("bf16")
        return bool(told) or any(self.file.params[number].has_main for number in self.trained)

    @torch.no_grad()
    def read(self, kind: str, number: int) -> Tensor:
        """This file's part of a tensor, contiguous, in the param's shape; zeros where nothing was kept."""
        known = self._last.get(kind)
        if known is None or known[0] != number:  # a param on the border of two ranks is asked for twice
            self._last[kind] = known = (number, self._cut(kind, number))
        return known[1]

    def _cut(self, kind: str, number: int) -> Tensor:
        param = self.file.params[number]
        key, shape, placement = key_of(kind, param.name), tuple(param.model.shape), param.placement
        if key not in self.source.tensors:
            return torch.zeros(shape)
        if self.source.tensors[key].shape != placement.global_shape:
            got, remedy = f"of shape {list(self.source.tensors[key].shape)}", "Give the state and the model of one save"
            rule = f"have the shape {list(placement.global_shape)} of the model in {self.file.path}"
            raise CheckpointError(refusal(f"tensor {key!r}", got, rule, remedy))
        whole = self.source.read(key)
        local = cut(placement, torch.float32, lambda box: whole[box.as_slices()])
        if kind == MAIN:
            _check_rounds(local, param, self.file)
        self.progress(local.numel() * local.element_size())
        return local

    def also_saved(self) -> dict[str, Any]:
        """Entries that forks save with the optimizer or with the model."""
        return dict(self.entries.also_saved)

    def model_state(self, ranks: int | None = None) -> dict[str, Any]:
        """The entries of the model file that are the model's.

        Where files fit one number of data-parallel ranks only, `ranks`, its arguments say it.
        """
        gone = {"optimizer", OURS, *self.also_saved()}
        state = {key: value for key, value in self.file.state.items() if key not in gone}
        if ranks is not None and "args" in state:
            state["args"] = Namespace(**{**vars(state["args"]), "data_parallel_size": ranks})
        return state

    def grad_scaler(self) -> dict[str, Any]:
        """The loss scale as the entry of a fork's state, where there is one."""
        if self.entries.grad_scaler is not None:
            return {"grad_scaler": dict(self.entries.grad_scaler)}
        scale = self.source.head.loss_scale
        if not scale:
            return {}
        trackers = {"growth_tracker": int(scale["good_steps"]), "hysteresis_tracker": int(scale["tolerated"])}
        return {"grad_scaler": {"scale": torch.tensor([scale["scale"]]), **trackers}}

    def step_in_state(self) -> dict[str, int]:
        """The update count where torch's and DeepSpeed's classes look for it; both take a number."""
        return {} if self.step is None or not self.kinds else {"step": self.step}

    def ours(self) -> dict[str, Any]:
        """The entry of this package's own with the number of skipped steps, where there are any."""
        count = self.source.head.num_skipped
        return {OURS: {NUM_SKIPPED: count}} if count else {}


def check_all_written(slices: list[Slices]) -> None:
    """Refuses a source with params that no model file has."""
    here = {each.file.params[number].name for each in slices for number in each.trained}
    source = slices[0].source
    foreign = [name_of(key) for key in source.tensors if kind_of(key) == MAIN and name_of(key) not in here]
    if foreign:
        got = f"{some_of(foreign)}, which no model file has"
        rule = f"hold the params of the model files in {slices[0].file.folder.parent}"
        raise CheckpointError(refusal("optimizer state", got, rule, "Give the state and the model of one save"))
