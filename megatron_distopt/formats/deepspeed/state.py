"""What DeepSpeed's checkpoints of all kinds have in common: param groups, loss scale, and how slices make a param."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.head import inner_name
from megatron_distopt.formats.pickles import as_number, attribute
from megatron_distopt.layout import Placement

#: Patterns of params that a reader here does not put together, by their keys in the checkpoint.
_NOT_SLICED = ("parameter_to_average_patterns", "parameter_with_sub_params")


def convert_with_deepspeed(folder: Path) -> str:
    """What to type where only DeepSpeed can put the params together."""
    command = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder UNIVERSAL"
    return f"Run {command}, and give UNIVERSAL"


def folder_of(path: Path, latest: str) -> Path:
    """The folder of one step, also where that of all steps is given.

    Args:
        path: of either.
        latest: the file in the latter that names a step.
    """
    named = path / latest
    name = named.read_text(encoding="utf-8", errors="replace").strip() if named.is_file() else ""
    return path / name if name and (path / name).is_dir() else path


def step_of(state: Mapping[str, Any], group: Mapping[str, Any], common: Any = None) -> int | None:
    """Updates so far; torch's classes count in the state of each param, others in the param group."""
    found = next((each["step"] for each in (state, group) if each.get("step") is not None), common)
    return None if found is None else int(as_number(found))


def loss_scale_of(scaler: Any) -> dict[str, float]:
    """The loss scale of DeepSpeed's scaler; empty for a constant one."""
    if not attribute(scaler, "dynamic"):
        return {}
    good = int(attribute(scaler, "cur_iter")) - int(attribute(scaler, "last_overflow_iter")) - 1
    window = int(attribute(scaler, "scale_window"))
    tolerated = float(attribute(scaler, "cur_hysteresis"))
    return {"scale": float(attribute(scaler, "cur_scale")), "good_steps": float(good % window), "tolerated": tolerated}


def head_of(
    groups: Sequence[GroupRecord], kinds: Iterable[str], scaler: Any, skipped: Any, about: Mapping[str, str | int]
) -> Manifest:
    """The manifest without tensors.

    Args:
        groups: of all files.
        kinds: of tensors.
        scaler: DeepSpeed's loss scaler.
        skipped: number of steps that were skipped.
        about: of the writer.
    """
    return Manifest("", (), {}, tuple(groups), inner_name(kinds), loss_scale_of(scaler), int(skipped or 0), about)


def placement_of(
    name: str, shape: tuple[int, ...], cut: tuple[int, int], info: Mapping[str, Any] | None, folder: Path
) -> Placement:
    """How a tensor-parallel slice lies in the param of the whole model.

    Args:
        name: of the param.
        shape: of the slice.
        cut: (rank, size) in the tensor-parallel group.
        info: patterns of names, where the training wrote them ("universal_checkpoint_info").
        folder: of the checkpoint, for errors.

    Raises:
        CheckpointError: the checkpoint does not say it, or in a way that DeepSpeed alone knows.
    """
    rank, size = cut
    if size == 1:
        return Placement(name, shape)
    if not info or "tp_replicated_parameter_patterns" not in info:
        rule = "say how params are cut, in an entry universal_checkpoint_info of mp_rank_XX_model_states.pt"
        remedy = "Load it with tensor-parallel size 1 where it was trained, and save it again"
        raise CheckpointError(refusal(f"checkpoint {folder}", f"{size} tensor-parallel slices", rule, remedy))
    for key in (*_NOT_SLICED, "affine_map"):
        if _matches(_patterns_in(info.get(key)), name):
            got, rule = f"{name!r}, which is among {key}", "have slices that are parts of one dimension"
            raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, convert_with_deepspeed(folder)))
    if _matches(info["tp_replicated_parameter_patterns"], name):
        return Placement(name, shape)
    is_row = _matches(info.get("parameter_with_row_parallelism_patterns", ()), name)
    is_double = _matches(info.get("parameter_with_2_sub_params_cat_dim_0", ()), name)
    is_padded = _matches(info.get("vocabulary_parameter_patterns", ()), name)
    return Placement(name, shape, int(is_row), rank, size, stride=1 + is_double, is_padded=is_padded)


def _patterns_in(entry: Any) -> list[str]:
    """The patterns of an entry, which is a list of them or a mapping that holds one."""
    if isinstance(entry, Mapping):
        return [str(key) for key in entry.get("params", entry.get("patterns", ()))]
    return [text for each in entry or () for text in ([each] if isinstance(each, str) else _patterns_in(each))]


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)
