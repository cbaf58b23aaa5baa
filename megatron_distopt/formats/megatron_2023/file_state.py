"""Optimizer state of one model file, param by param, and how such parts become the state of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, join, key_of, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.located import fill
from megatron_distopt.formats.megatron_2023.model_file import FileParam, ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import FileGroup, Kept, record_of, the_step
from megatron_distopt.layout import Box, Span

__all__ = ["NUM_SKIPPED", "OURS", "FileState", "check_rounds", "check_step", "ours_in", "skipped_in", "whole_of"]

#: The key of what this package puts into a fork's file, and a key in it.
OURS, NUM_SKIPPED = "megatron_distopt", "num_skipped"
_ADAM = frozenset(("exp_avg", "exp_avg_sq"))
#: What a source of another software calls its inner optimizer.
_IS_ADAM = "adam"
_NAMES_OF_SCALE = {"scale": "scale", "growth_tracker": "good_steps", "hysteresis_tracker": "tolerated"}
#: Ranks that hold the same param may drift apart in the last bits. Other params differ by their own size.
_LARGEST_DRIFT = 0.1


@dataclass(frozen=True, eq=False)
class FileState:
    """What a fork saved for one model file.

    Args:
        file: of the model.
        groups: param groups.
        kinds: what the inner optimizer kept for each element, with dtypes; the same for all params.
        read: one tensor, by kind and number of the param, in the shape of the file's param.
        kept: what is not for the whole model.
        num_skipped: steps that were skipped, where the file says it.
    """

    file: ModelFile
    groups: tuple[FileGroup, ...]
    kinds: Mapping[str, torch.dtype]
    read: Callable[[str, int], Tensor]
    kept: Kept
    num_skipped: int = 0

    def main(self, number: int) -> Tensor:
        """The main param, compared with the model's own."""
        tensor = self.read(MAIN, number)
        check_rounds(tensor, self.file.params[number], self.file)
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


def check_rounds(main: Tensor, param: FileParam, file: ModelFile) -> None:
    """Whether the model's values are the main param's, to the rounding of the model's dtype.

    It says that the state is of this very model, and that every element is where it is looked for.

    Raises:
        CheckpointError
    """
    numbers = torch.finfo(param.model.dtype)
    rounded = main.view(param.model.shape).to(param.model.dtype)
    same = torch.isclose(rounded, param.model, rtol=numbers.eps, atol=numbers.tiny, equal_nan=True)
    if not bool(same.all()):
        got = f"{int((~same).sum())} of {same.numel()} values of {param.name!r} are not the model's"
        rule = f"be of the model in {file.path}, whose values are those of the main params, rounded"
        remedy = "Give the optimizer state and the model of one save, unchanged"
        raise CheckpointError(refusal("optimizer state", got, rule, remedy))


def whole_of(parts: Sequence[FileState], resume_step: int | None, written_as: str) -> Source:
    """The state of the whole model from that of its model files.

    Args:
        parts: of all model files.
        resume_step: updates so far, for files that do not say it.
        written_as: name of the format.

    Raises:
        CheckpointError: the files disagree; `read` raises it where values do not fit.
    """
    kinds, homes = dict(parts[0].kinds), _homes_of(parts)
    for part in parts:
        if part.kinds != kinds:
            got, remedy = f"{_listed(part.kinds)} in {part.file.folder}", "Give the files of one save"
            raise CheckpointError(refusal("optimizer state", got, f"hold {_listed(kinds)} as the others", remedy))
    step = _known_step(parts, resume_step)
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


def check_step(source: Source, where: object) -> None:
    """Whether a run can go on from it; to look at, a file that lost its update count is as good as any.

    Raises:
        CheckpointError: the state is Adam's, and its update count is unknown.
    """
    if source.head.inner == _IS_ADAM and any(group.step is None for group in source.head.groups):
        got = "none: torch's Adam keeps it where this file layout does not save it"
        remedy = "Convert it with --resume-step N, the number of updates so far (iterations without skipped ones)"
        raise CheckpointError(refusal(f"update count in {where}", got, "be there for Adam", remedy))


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


def _known_step(parts: Sequence[FileState], resume_step: int | None) -> int | None:
    where = parts[0].file.folder.parent
    known = the_step([{"step": group.step} for part in parts for group in part.groups], where)
    if known is not None and resume_step is not None and known != resume_step:
        remedy = "Drop --resume-step: the checkpoint knows it"
        raise CheckpointError(
            refusal(f"update count in {where}", known, f"be the {resume_step} of --resume-step", remedy)
        )
    return known if known is not None else resume_step


def _head(part: FileState, kinds: Mapping[str, torch.dtype], written_as: str) -> Manifest:
    inner = _IS_ADAM if kinds.keys() >= _ADAM else "torch_sgd" if "momentum_buffer" in kinds else "unknown"
    saved = part.kept.grad_scaler or {}
    scale = {name: float(saved[key]) for key, name in _NAMES_OF_SCALE.items() if key in saved}
    sizes = {"tensor_parallel": part.file.tensor[1], "pipeline_parallel": part.file.stage[1]}
    about: dict[str, str | int] = {"host": "a Megatron of 2023", "format": written_as, **sizes}
    return Manifest("", (), {}, (), inner, scale, part.num_skipped, about)


def _records(part: FileState, step: int | None) -> Iterator[GroupRecord]:
    for group in part.groups:
        names = dict.fromkeys(part.file.params[number].name for number in group.members)
        yield record_of(group, tuple(names), step)


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
