"""Optimizer state of one model file, and of the whole model: `whole_of` for readers, and `Slices`
for writers.

A gathered file does not say which param was in which group. Megatron's rule does, as long as there
are no more than two groups: one that decays and one that does not.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Manifest,
    TensorRecord,
    key_of,
    kind_of,
    name_of,
)
from megatron_distopt.checkpoint.param_groups import GroupRecord, join_groups, options_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError, some_of
from megatron_distopt.formats.common import (
    check_rounds,
    cut,
    fill,
    inner_name,
    loss_scale_of,
    the_step,
)
from megatron_distopt.formats.megatron_2023.model_file import FileParam, ModelFile, decays
from megatron_distopt.layout import Box, Span

#: The key of what this package puts into a fork's file, and a key in it.
OURS, NUM_SKIPPED = "megatron_distopt", "num_skipped"
#: Entries that some forks save with the model and others with the optimizer.
_ALSO_SAVED = ("opt_param_scheduler",)
#: What tells a fork's param groups apart.
_IDENTITY = ("name", "wd_mult", "lr_mult")
#: Ranks that hold the same param may drift apart in the last bits. Other params differ by their own
#: size.
_LARGEST_DRIFT = 0.1
_SAME_SAVE = "Give the optimizer state and the model of one save, unchanged."


@dataclass(frozen=True)
class FileGroup:
    """A param group in a fork's file."""

    options: Mapping[str, Any]  # as it has them, without params and update count
    members: tuple[int, ...]  # numbers of params of the model file, in its order


@dataclass(frozen=True)
class ForkEntries:
    """What is taken from a fork's files as it is."""

    # options, including keys that only the fork understands
    groups: tuple[Mapping[str, Any], ...] = ()
    grad_scaler: Mapping[str, Any] | None = None
    #: The scheduler, which forks save with the model or the optimizer.
    also_saved: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FileState:
    """What a fork saved for one model file."""

    file: ModelFile
    groups: tuple[FileGroup, ...]
    step: int | None  # updates so far, where the file says it
    # what the inner optimizer kept for each element; the same for all params
    kinds: Mapping[str, torch.dtype]
    # one tensor, by kind and number of the param, in the shape of the file's param
    read: Callable[[str, int], Tensor]
    entries: ForkEntries
    num_skipped: int = 0  # steps that were skipped, where the file says it

    def main(self, number: int) -> Tensor:
        """The main param, compared with the model's own."""
        tensor = self.read(MAIN, number)
        param = self.file.params[number]
        check_rounds(
            tensor, param.model, param.name, f"the optimizer state of {self.file.path}", _SAME_SAVE
        )
        return tensor


def entries_in(state: Mapping[str, Any]) -> ForkEntries:
    """What is taken from a file with an entry "optimizer"."""
    entry = state.get("optimizer")
    entry = entry if isinstance(entry, Mapping) else {}
    inner = entry.get("optimizer", entry)
    groups = inner.get("param_groups", ()) if isinstance(inner, Mapping) else ()
    also_saved = {key: state[key] for key in _ALSO_SAVED if key in state}
    options = tuple(map(_options_in, groups))
    return ForkEntries(options, entry.get("grad_scaler"), also_saved)


def _options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "step")}


def ours_in(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """What this package put into a fork's file; the fork does not look at it."""
    entry = state.get(OURS)
    return entry if isinstance(entry, Mapping) else {}


def skipped_in(state: Mapping[Any, Any]) -> int:
    """Steps that were skipped; 0 in a file that does not say it."""
    return int(ours_in(state).get(NUM_SKIPPED, 0))


# Param groups.


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a fork's param groups apart."""
    return tuple(group.get(key) for key in _IDENTITY)


def described(group: Mapping[str, Any]) -> str:
    """The same, for errors."""
    pairs = [f"{key}={group[key]}" for key in _IDENTITY if key in group]
    return f"({', '.join(pairs)})"


def group_decays(group: Mapping[str, Any]) -> bool:
    """Whether weights of the group decay; forks before 2023 have no factor for it."""
    return bool(group.get("wd_mult", group.get("weight_decay", 1.0)))


def groups_by_rule(file: ModelFile, groups: Sequence[Mapping[str, Any]]) -> tuple[FileGroup, ...]:
    """Which params were in which of the saved groups, by Megatron's rule."""
    by_decay = {group_decays(group): group for group in groups}
    members: dict[bool, list[int]] = {}
    for number, param in enumerate(file.params):
        decay = decays(param.name, tuple(param.model.shape))
        members.setdefault(decay, []).append(number)
    if len(by_decay) != len(groups) or by_decay.keys() != members.keys():
        ordered = sorted(groups, key=group_decays, reverse=True)
        saved = ", ".join(map(described, ordered)) or "none"
        needed = " and ".join(
            "decaying" if each else "not decaying" for each in sorted(members, reverse=True)
        )
        raise CheckpointError(
            f"The param groups in {file.folder} are {saved}. The file does not say which group a "
            f"param is in, so there must be one group of each kind: {needed}. Resume it in its "
            "own fork with this package installed, and convert what that run saves."
        )
    file_groups = []
    for group in groups:
        numbers = members[group_decays(group)]
        file_groups.append(FileGroup(_options_in(group), tuple(numbers)))
    return tuple(file_groups)


def _turn(record: GroupRecord) -> tuple[bool, bool]:
    """Orders groups as a fork makes them: groups that decay first, and among these, groups without
    a factor of the learning rate first."""
    return not group_decays(record.options), record.options.get("lr_mult", 1.0) != 1.0


def _options_to_write(record: GroupRecord, entries: ForkEntries) -> dict[str, Any]:
    """Adds the keys of the fork's own inner optimizer, where its files have them."""
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in record.options.items()
    }
    wanted = identity(options)
    for saved in entries.groups:
        if identity(saved) == wanted:
            return {key: options.get(key, value) for key, value in saved.items()}
    if "betas" in options:
        options.setdefault("bias_correction", True)  # apex asks for it
    return options


# The whole model from its files.


#: A param of the whole model on the tensor-parallel ranks of one stage: the state of each and its
#: number there.
_Parts: TypeAlias = list[tuple[FileState, int]]


def whole_of(parts: Sequence[FileState], written_as: str) -> Source:
    """The state of the whole model from that of all its model files; `written_as` names the
    format."""
    kinds = dict(parts[0].kinds)
    params: dict[str, _Parts] = {}  # in the order of stages
    for part in parts:
        if part.kinds != kinds:
            both = [", ".join(sorted(each)) or "only main params" for each in (part.kinds, kinds)]
            raise CheckpointError(
                f"The optimizer state in {part.file.folder} holds {both[0]}, but that in "
                f"{parts[0].file.folder} holds {both[1]}. Give the files of one save."
            )
        members = [number for group in part.groups for number in group.members]
        for number in sorted(members):
            param = part.file.params[number]
            if not param.is_copy:
                params.setdefault(param.name, []).append((part, number))
    file = parts[0].file
    counts = [{"step": part.step} for part in parts]
    step = the_step(counts, file.folder.parent)
    infos = {
        key_of(kind, name): TensorRecord(
            part.file.params[number].placement.global_shape, dtype_name(dtype)
        )
        for name, ((part, number), *_) in params.items()
        for kind, dtype in {MAIN: torch.float32, **kinds}.items()
    }
    scale = loss_scale_of(parts[0].entries.grad_scaler)
    sizes = {"tensor_parallel": file.tensor[1], "pipeline_parallel": file.stage[1]}
    about: dict[str, str | int] = {"host": "a Megatron of 2023", "format": written_as, **sizes}
    groups = join_groups(record for part in parts for record in _records(part, step))
    head = Manifest("", (), {}, groups, inner_name(kinds), scale, parts[0].num_skipped, about)

    def read(key: str, box: Box) -> Tensor:
        of_param = params[name_of(key)]
        return _read(of_param, kind_of(key), infos[key], box)

    return Source(head, infos, read)


def _records(part: FileState, step: int | None) -> tuple[GroupRecord, ...]:
    return tuple(
        GroupRecord(
            tuple(dict.fromkeys(part.file.params[number].name for number in group.members)),
            options_of(group.options)[0],
            step,
        )
        for group in part.groups
    )


@torch.no_grad()
def _read(parts: _Parts, kind: str, info: TensorRecord, box: Box) -> Tensor:
    """A part of a tensor; a main param is read whole, because it is compared with the model's."""
    wanted = Box.whole(info.shape) if kind == MAIN else box
    whole = torch.empty(wanted.sizes, dtype=getattr(torch, info.dtype))
    for part, number in parts:
        placement = part.file.params[number].placement
        is_copy = part is not parts[0][0]
        if placement.dim is not None or not is_copy:
            local = part.main(number) if kind == MAIN else part.read(kind, number)
            pieces = placement.pieces(Span(0, local.numel()))
            fill(whole, wanted, local.reshape(-1), 0, pieces)
        elif kind == MAIN:
            _check_same(part.main(number), whole, part, number)
    return whole if wanted == box else whole[box.as_slices()].clone()


def _check_same(local: Tensor, whole: Tensor, part: FileState, number: int) -> None:
    """Checks that ranks hold the same values of a param that was taken for a replicated one: if it
    were split, all but its first part would be lost."""
    distance = torch.linalg.vector_norm(local - whole)
    size = torch.linalg.vector_norm(whole)
    is_same = distance <= _LARGEST_DRIFT * size
    if not is_same:  # also where one of them is not a number
        name = part.file.params[number].name
        raise CheckpointError(
            f"Param {name!r} on tensor-parallel rank {part.file.tensor[0]} differs from that on "
            "rank 0, and its name does not say how it is split. Convert it at tensor-parallel "
            "size 1."
        )


def _check_rounds(main: Tensor, param: FileParam, file: ModelFile) -> None:
    check_rounds(main, param.model, param.name, f"the optimizer state for {file.path}", _SAME_SAVE)


# The files from the whole model.


@dataclass(frozen=True, eq=False)
class Slices:
    """A model file and the state that is written for it."""

    file: ModelFile
    source: Source  # of the whole model
    entries: ForkEntries  # of the fork's files that are converted
    ranks: int  # data-parallel ones that will read per-rank files or a gathered file
    progress: Callable[[int], None]  # called with bytes as they are read
    _last: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What is kept for each element in addition to the main param."""
        return tuple(sorted({kind_of(key) for key in self.source.tensors} - {MAIN}))

    @cached_property
    def groups(self) -> list[FileGroup]:
        """Param groups of this file, in the order in which a fork makes them; without those that it
        has no param of."""
        groups = []
        for record in sorted(self.source.head.groups, key=_turn):
            names = set(record.names)
            members = tuple(
                number for number, param in enumerate(self.file.params) if param.name in names
            )
            if members:
                groups.append(FileGroup(_options_to_write(record, self.entries), members))
        return groups

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the params that the optimizer updates, in the order in which the fork
        registers them."""
        return tuple(sorted(number for group in self.groups for number in group.members))

    @property
    def step(self) -> int | None:
        return max(
            (record.step for record in self.source.head.groups if record.step is not None),
            default=None,
        )

    @torch.no_grad()
    def read(self, kind: str, number: int) -> Tensor:
        """This file's part of a tensor, contiguous, in the param's shape; zeros where nothing was
        kept."""
        last = self._last.get(kind)
        # a param on the border of two ranks is asked for twice
        if last is None or last[0] != number:
            self._last[kind] = last = (number, self._part_of_file(kind, number))
        return last[1]

    def cut(self, kind: str, number: int, span: Span | None) -> Tensor:
        """Like `read`, or a 1-D copy of some of its elements. It is a copy because a view would be
        saved with the whole tensor behind it."""
        values = self.read(kind, number)
        if span is None:
            return values
        return values.reshape(-1)[span.as_slice()].clone()

    def _part_of_file(self, kind: str, number: int) -> Tensor:
        param = self.file.params[number]
        key = key_of(kind, param.name)
        placement = param.placement
        if key not in self.source.tensors:
            return torch.zeros(param.model.shape)
        shape = self.source.tensors[key].shape
        if shape != placement.global_shape:
            needed = list(placement.global_shape)
            raise CheckpointError(
                f"Tensor {key!r} has shape {list(shape)}, and the model in {self.file.path} needs "
                f"{needed}. {_SAME_SAVE}"
            )
        whole = self.source.read(key)
        local = cut(placement, torch.float32, lambda box: whole[box.as_slices()])
        if kind == MAIN:
            _check_rounds(local, param, self.file)
        self.progress(local.numel() * local.element_size())
        return local

    def model_state(self, *, fits_ranks: bool = False) -> dict[str, Any]:
        """The entries of the model file that are the model's; where files fit one number of
        data-parallel ranks only, its arguments say it."""
        left_out = {"optimizer", OURS, *self.entries.also_saved}
        state = {key: value for key, value in self.file.state.items() if key not in left_out}
        if fits_ranks and "args" in state:
            arguments = {**vars(state["args"]), "data_parallel_size": self.ranks}
            state["args"] = Namespace(**arguments)
        return state

    def grad_scaler(self) -> dict[str, Any]:
        """The loss scale as the entry of a fork's state, where there is one."""
        if self.entries.grad_scaler is not None:
            return {"grad_scaler": dict(self.entries.grad_scaler)}
        scale = self.source.head.loss_scale
        if not scale:
            return {}
        trackers = {
            "growth_tracker": int(scale["good_steps"]),
            "hysteresis_tracker": int(scale["tolerated"]),
        }
        return {"grad_scaler": {"scale": torch.tensor([scale["scale"]]), **trackers}}

    def count(self) -> dict[str, int]:
        """The update count, for the groups and for the state of each param: some classes look for
        it here and some there."""
        return {} if self.step is None else {"step": self.step}

    def ours(self) -> dict[str, Any]:
        """The entry of this package's own with the number of skipped steps, where there are any."""
        count = self.source.head.num_skipped
        return {OURS: {NUM_SKIPPED: count}} if count else {}


def check_all_written(slices: list[Slices]) -> None:
    names = {each.file.params[number].name for each in slices for number in each.trained}
    missing = [
        name_of(key)
        for key in slices[0].source.tensors
        if kind_of(key) == MAIN and name_of(key) not in names
    ]
    if missing:
        raise CheckpointError(
            f"The optimizer state has {some_of(missing)}, which no model file in "
            f"{slices[0].file.folder.parent} has. {_SAME_SAVE}"
        )
