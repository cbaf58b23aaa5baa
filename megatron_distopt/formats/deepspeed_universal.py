"""DeepSpeed's universal checkpoints: every param of the whole model in a folder of its own.

::

    zero/PARAM_NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   {"param": tensor, ...}, or the tensor
    zero/optimizer_state.pt                             param groups, loss scaler
    mp_rank_MM_model_states.pt                          names and shapes of the params of each group

DeepSpeed makes one of what its ZeRO optimizers save, with `ds_to_universal`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

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
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import inner_name, the_step
from megatron_distopt.formats.pickles import attribute, load_file, understood
from megatron_distopt.layout import Box

_LATEST, _LATEST_ZERO = "latest_universal", "latest"
_ZERO, _FP32, _STEP = "zero", "fp32", "step"
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_OF_ZERO = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_AGAIN = "Run python -m deepspeed.checkpoint.ds_to_universal again."


def is_universal(path: Path) -> bool:
    """Whether a folder is such a checkpoint, or names one in its file "latest_universal"."""
    zero = _folder_of(path, _LATEST) / _ZERO
    return zero.is_dir() and next(zero.rglob(f"{_FP32}.pt"), None) is not None


def is_zero(path: Path) -> bool:
    """Whether a folder holds what DeepSpeed's ZeRO optimizers save, or names the step that does."""
    folder = _folder_of(path, _LATEST_ZERO)
    return folder.is_dir() and any(_OF_ZERO.fullmatch(each.name) for each in folder.iterdir())


def refuse_zero(path: Path) -> NoReturn:
    """Raises the error for the files of ZeRO, which only DeepSpeed itself can put together."""
    folder = _folder_of(path, _LATEST_ZERO)
    raise CheckpointError(
        f"Checkpoint {folder} holds the files of DeepSpeed's ZeRO, one for each rank, which must "
        "first become one universal checkpoint. Run python -m "
        f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder UNIVERSAL, "
        "and give UNIVERSAL."
    )


def _folder_of(path: Path, latest: str) -> Path:
    """The folder of one step, also where that of all steps is given, in which the file `latest`
    names a step."""
    named = path / latest
    if not named.is_file():
        return path
    name = named.read_text(encoding="utf-8", errors="replace").strip()
    return path / name if name and (path / name).is_dir() else path


@dataclass(frozen=True)
class _Folder:
    """A universal checkpoint; tensors stay on the disk."""

    path: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        zero = self.path / _ZERO
        return tuple(
            sorted(path.parent.relative_to(zero).as_posix() for path in zero.rglob(f"{_FP32}.pt"))
        )

    @cached_property
    def model_files(self) -> list[Mapping[str, Any]]:
        return [
            load_file(path) for path in sorted(self.path.iterdir()) if _MODEL.fullmatch(path.name)
        ]

    @cached_property
    def groups(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Shapes of the params of each group, of the model-parallel ranks together; shapes are
        those of slices."""
        found: dict[int, dict[str, tuple[int, ...]]] = {}
        for content in self.model_files:
            for number, group in enumerate(content.get("param_shapes") or ()):
                for name, shape in group.items():
                    found.setdefault(number, {}).setdefault(str(name), tuple(shape))
        return tuple(found.values())

    def kinds_of(self, name: str) -> list[str]:
        """Kinds of tensors that are kept for a param, "fp32" first."""
        files = (self.path / _ZERO / name).glob("*.pt")
        return sorted(
            (path.stem for path in files if path.stem != _STEP),
            key=lambda kind: (kind != _FP32, kind),
        )

    def tensor(self, name: str, kind: str) -> Tensor:
        path = self.path / _ZERO / name / f"{kind}.pt"
        content = load_file(path)
        tensor = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"File {path} does not hold a tensor. {_AGAIN}")
        known = [group[name] for group in self.groups if name in group]
        shape = known[0] if known else tuple(tensor.shape)
        is_flat = tensor.dim() == 1 and math.prod(shape) == tensor.numel()  # of ZeRO stage 3
        return tensor.view(shape) if is_flat else tensor

    def step(self, name: str) -> Mapping[str, Any]:
        """The number of updates of a param under the key "step"; empty where it is not kept for
        each param."""
        path = self.path / _ZERO / name / f"{_STEP}.pt"
        return {_STEP: load_file(path)} if path.is_file() else {}


def open_deepspeed_universal(path: Path) -> Source:
    with understood(path, "be a universal checkpoint of DeepSpeed"):
        return _opened(_Folder(_folder_of(path, _LATEST)))


def _opened(folder: _Folder) -> Source:
    state_path = folder.path / _ZERO / "optimizer_state.pt"
    state = load_file(state_path) if state_path.is_file() else {}
    kinds: dict[str, str] = {}
    infos: dict[str, TensorRecord] = {}
    for name in folder.names:
        for of_file in folder.kinds_of(name):
            kind = MAIN if of_file == _FP32 else of_file
            kinds[kind] = of_file
            tensor = folder.tensor(name, of_file)
            key = key_of(kind, name)
            infos[key] = TensorRecord(tuple(tensor.shape), dtype_name(tensor.dtype))
    about = {
        "host": "deepspeed",
        "deepspeed": str(state.get("ds_version", "unknown")),
        "format": "universal",
    }
    counts = [each.get("skipped_steps") for each in folder.model_files]
    skipped = int(counts[0] or 0) if counts else 0
    scale = _loss_scale_of(state.get("loss_scaler"))
    groups = tuple(_records(folder, state))
    head = Manifest("", (), {}, groups, inner_name(kinds), scale, skipped, about)

    def read(key: str, box: Box) -> Tensor:
        of_file = kinds[kind_of(key)]
        whole = folder.tensor(name_of(key), of_file)
        return whole[box.as_slices()].clone()

    return Source(head, infos, read)


def _loss_scale_of(scaler: Any) -> dict[str, float]:
    """The loss scale of DeepSpeed's scaler; empty for a constant one."""
    if not attribute(scaler, "dynamic"):
        return {}
    last = int(attribute(scaler, "last_overflow_iter"))
    good = int(attribute(scaler, "cur_iter")) - last - 1
    window = int(attribute(scaler, "scale_window"))
    tolerated = float(attribute(scaler, "cur_hysteresis"))
    return {
        "scale": float(attribute(scaler, "cur_scale")),
        "good_steps": float(good % window),
        "tolerated": tolerated,
    }


def _records(folder: _Folder, state: Mapping[str, Any]) -> Iterator[GroupRecord]:
    """The param groups. A param without moments has never been updated, and is in no group.

    torch's classes count updates in the state of each param, others in the param group or once.
    """
    updated = {name for name in folder.names if len(folder.kinds_of(name)) > 1}
    options: Sequence[Mapping[str, Any]] = state.get("param_groups") or ()
    groups = [[name for name in group if name in updated] for group in folder.groups]
    in_a_group = {name for names in groups for name in names}
    if updated - in_a_group or len(groups) != len(options):
        raise CheckpointError(
            f"Checkpoint {folder.path} has {len(options)} param groups, but names the params of "
            f"{len(groups)}. Its mp_rank_XX_model_states.pt must say which group each param is "
            f"in. {_AGAIN}"
        )
    for names, group in zip(groups, options, strict=True):
        others = {_STEP: group.get(_STEP, state.get("base_optimizer_state_step"))}
        counts = [folder.step(name) or others for name in names]
        step = the_step(counts, folder.path)
        if names:
            yield GroupRecord(tuple(names), options_of(group)[0], step)
