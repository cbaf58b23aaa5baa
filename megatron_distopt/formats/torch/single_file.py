"""One file of `torch.save`, of plain containers: for scripts of the user.

::

    {"format": "megatron_distopt.torch", "version": 1,
     "tensors": {"main/NAME": fp32, "exp_avg/NAME": fp32, ...},           whole params
     "groups": [{"names": [...], "options": {...}, "step": 10, "scalars": {}}],
     "inner": "adam", "loss_scale": {...}, "num_skipped": 0, "about": {...}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.param_groups import check_groups, group_from_json, group_to_json
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.pickles import load_file, save_whole

_FORMAT, _VERSION = "megatron_distopt.torch", 1


def open_torch_file(path: Path) -> Source:
    """The state in a file that `write_torch_file` wrote."""
    state = load_file(path)
    found = state.get("format") if isinstance(state, Mapping) else None
    if found != _FORMAT or state.get("version") != _VERSION:
        rule = f"be {_FORMAT!r} of version {_VERSION}, or lie in an iteration folder"
        remedy = "Give the iteration folder for a Megatron's file, or a file of 'convert --to torch'"
        raise CheckpointError(refusal(f"file {path}", f"format {found!r}", rule, remedy))
    try:
        head, tensors = _head(state), {str(key): _tensor(value) for key, value in state["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        rule, remedy = "hold what 'convert --to torch' writes", "Convert it again"
        raise CheckpointError(refusal(f"file {path}", f"{error!r} while reading it", rule, remedy)) from None
    check_groups((*head.groups, *head.resting), f"file {path}")
    infos = {key: TensorInfo(tuple(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in tensors.items()}
    return Source(head, infos, lambda key, box: tensors[key][box.as_slices()].clone())


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} among the tensors")
    return value


def _head(state: Mapping[str, Any]) -> Manifest:
    groups, resting = (tuple(map(group_from_json, state.get(key, ()))) for key in ("groups", "resting"))
    scale = {str(key): float(value) for key, value in state["loss_scale"].items()}
    about = dict(state["about"])
    return Manifest("", (), {}, groups, str(state["inner"]), scale, int(state["num_skipped"]), about, resting=resting)


def write_torch_file(path: Path, source: Source, progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Writes all tensors into one file; they are in memory together."""
    head, tensors = replace(source.head, files=(), tensors={}), {}
    for key in source.tensors:
        tensors[key] = source.read(key).contiguous()
        progress(tensors[key].numel() * tensors[key].element_size())
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        "tensors": tensors,
        "groups": [group_to_json(group) for group in head.groups],
        "resting": [group_to_json(group) for group in head.resting],
        "inner": head.inner,
        "loss_scale": dict(head.loss_scale),
        "num_skipped": head.num_skipped,
        "about": dict(head.about),
    }
    save_whole(state, path)
