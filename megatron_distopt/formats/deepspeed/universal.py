"""DeepSpeed's universal checkpoints: every param of the whole model in a folder of its own.

::

    zero/PARAM_NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   {"param": tensor, ...}, or the tensor
    zero/optimizer_state.pt                             param groups, loss scaler
    mp_rank_MM_model_states.pt                          names and shapes of the params of each group
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import MAIN, key_of, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.deepspeed.state import folder_of, head_of, step_of
from megatron_distopt.formats.pickles import load_file, understood

_LATEST, _ZERO, _FP32, _STEP = "latest_universal", "zero", "fp32", "step"
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_REMEDY = "Run python -m deepspeed.checkpoint.ds_to_universal again"


@dataclass(frozen=True)
class _Folder:
    """A universal checkpoint; tensors stay on the disk."""

    path: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all params."""
        zero = self.path / _ZERO
        return tuple(sorted(path.parent.relative_to(zero).as_posix() for path in zero.rglob(f"{_FP32}.pt")))

    @cached_property
    def groups(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Shapes of the params of each group, of the model-parallel ranks together; shapes are those of slices."""
        found: dict[int, dict[str, tuple[int, ...]]] = {}
        for path in _model_files(self.path):
            for number, group in enumerate(load_file(path).get("param_shapes") or ()):
                for name, shape in group.items():
                    found.setdefault(number, {}).setdefault(str(name), tuple(shape))
        return tuple(found.values())

    def kinds_of(self, name: str) -> list[str]:
        """Kinds of tensors that are kept for a param, "fp32" first."""
        files = (self.path / _ZERO / name).glob("*.pt")
        return sorted((path.stem for path in files if path.stem != _STEP), key=lambda kind: (kind != _FP32, kind))

    def tensor(self, name: str, kind: str) -> Tensor:
        """One tensor, in the shape of the param."""
        path = self.path / _ZERO / name / f"{kind}.pt"
        content = load_file(path)
        tensor = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(refusal(f"file {path}", "no tensor", "hold a param", _REMEDY))
        shape = next((group[name] for group in self.groups if name in group), tuple(tensor.shape))
        is_flat = tensor.dim() == 1 and math.prod(shape) == tensor.numel()  # of ZeRO stage 3
        return tensor.view(shape) if is_flat else tensor

    def step(self, name: str) -> Mapping[str, Any]:
        """Updates of a param so far, under "step"; empty where they are not counted for each param."""
        path = self.path / _ZERO / name / f"{_STEP}.pt"
        return {"step": load_file(path)} if path.is_file() else {}


def recognises(path: Path) -> bool:
    """Whether a folder is such a checkpoint, or names one in its file "latest_universal"."""
    zero = folder_of(path, _LATEST) / _ZERO
    return zero.is_dir() and next(zero.rglob(f"{_FP32}.pt"), None) is not None


def open_deepspeed_universal(path: Path) -> Source:
    """Opens a checkpoint.

    Args:
        path: folder of a step, or of all steps.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    with understood(path, "be a universal checkpoint of DeepSpeed"):
        return _opened(_Folder(folder_of(path, _LATEST)))


def _opened(folder: _Folder) -> Source:
    if not folder.names:
        got, rule = "no param", f"hold folders {_ZERO}/PARAM_NAME with {_FP32}.pt"
        raise CheckpointError(refusal(f"checkpoint {folder.path}", got, rule, _REMEDY))
    state_path = folder.path / _ZERO / "optimizer_state.pt"
    state = load_file(state_path) if state_path.is_file() else {}
    kinds = {(MAIN if kind == _FP32 else kind): kind for name in folder.names for kind in folder.kinds_of(name)}
    infos = dict(_infos(folder))
    about = {"host": "deepspeed", "deepspeed": str(state.get("ds_version", "unknown")), "format": "universal"}
    skipped = next((load_file(each).get("skipped_steps") for each in _model_files(folder.path)), 0)
    head = head_of(tuple(_records(folder, state)), kinds, state.get("loss_scaler"), skipped, about)

    def read(key: str) -> Tensor:
        return folder.tensor(name_of(key), kinds[kind_of(key)])

    return Source(head, infos, lambda key, box: read(key)[box.as_slices()].clone())


def _model_files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.iterdir()) if _MODEL.fullmatch(path.name))


def _infos(folder: _Folder) -> Iterator[tuple[str, TensorInfo]]:
    for name in folder.names:
        for kind in folder.kinds_of(name):
            tensor = folder.tensor(name, kind)
            info = TensorInfo(tuple(tensor.shape), dtype_name(tensor.dtype))
            yield key_of(MAIN if kind == _FP32 else kind, name), info


def _records(folder: _Folder, state: Mapping[str, Any]) -> Iterator[GroupRecord]:
    """The param groups. A param without moments has never been updated, and is in no group."""
    updated = {name for name in folder.names if len(folder.kinds_of(name)) > 1}
    options: Sequence[Mapping[str, Any]] = state.get("param_groups") or ()
    groups = [[name for name in group if name in updated] for group in folder.groups]
    in_a_group = {name for names in groups for name in names}
    if updated - in_a_group or len(groups) != len(options):
        got = f"{len(options)} param groups, and names of params of {len(groups)}"
        rule = "say in mp_rank_XX_model_states.pt which params are in which of them"
        raise CheckpointError(refusal(f"checkpoint {folder.path}", got, rule, _REMEDY))
    for names, group in zip(groups, options, strict=True):
        steps = {step_of(folder.step(name), group, state.get("base_optimizer_state_step")) for name in names}
        if len(steps) > 1:
            got, rule = f"updates {sorted(map(str, steps))}", "be as many for all params of a group"
            remedy = "Convert a run whose params were all trained from its start"
            raise CheckpointError(refusal(f"param group in {folder.path}", got, rule, remedy))
        if names:
            yield GroupRecord(tuple(names), options_of(group)[0], steps.pop())
