"""megatron-core's distributed checkpoints ("torch_dist") with names: `.metadata` beside files of
tensors.

What all ranks share is in `common.pt`, and since megatron-core 0.19 an object among the tensors.
Keys of state:

::

    decoder.layers.3.mlp.linear_fc2.weight       one param
    decoder.layers.mlp.linear_fc2.weight         that of all layers, stacked (until 0.14)
    decoder.layers.3.mlp.linear_fc1.weight_w     the gate, and with _v in place of _w the up
                                                 projection: one param
    optimizer.state.KIND.KEY                     of the param KEY (fully_reshardable,
                                                 fully_sharded_model_space, and optimizers that are
                                                 not distributed)

Until 0.14 each tensor-parallel rank's part of a state is flat: that of rank (i, j) of a grid of X
by Y ranks is row [i, j] of a tensor of shape [X, Y, elements of a part]. State in buckets has no
names, see nameless.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from megatron_distopt.formats.common import check_rounds, inner_name, loss_scale_of, the_step
from megatron_distopt.formats.megatron_2023.model_file import decays
from megatron_distopt.formats.pickles import as_number, load_file, understood
from megatron_distopt.formats.torch_files import METADATA, DcpFolder, open_dcp
from megatron_distopt.layout import Box

_COMMON, _CONFIG = "common.pt", "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"
_CHAIN = r"(?:chained_\d+\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<kind>\w+)\.(?P<key>.+)")
_NO_MODEL = re.compile(
    _CHAIN + r"(?:optimizer|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*"
)
_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?!\d+\.)(?P<after>.+)")
_GATE, _UP = "_w", "_v"
_AGAIN = (
    "Load it in the megatron-core that wrote it, and save it with "
    "--dist-ckpt-optim-fully-reshardable"
)
#: megatron-core 0.15 to 0.19 cuts params out of buffers at wrong places where there are several
#: buckets.
_MISPLACED = (
    "megatron-core 0.15 to 0.19 may put them in wrong places as it saves. Load only the "
    "weights with --no-load-optim, and save without --dist-ckpt-optim-fully-reshardable."
)
_MAIN_KINDS = ("param", "fp32_param")
#: Options other than weight decay that tell groups apart.
_IDENTITY = ("lr_mult", "is_expert_parallel", "is_decoupled_lr")


def recognises(path: Path) -> bool:
    """Whether a folder is such a checkpoint, also one without names."""
    return (path / METADATA).is_file() and any(
        (path / name).is_file() for name in (_COMMON, _CONFIG)
    )


def open_torch_dist(path: Path) -> Source:
    with understood(path, "be a distributed checkpoint of megatron-core"):
        folder = open_dcp(path)
        where = _COMMON_OBJECT if _COMMON_OBJECT in folder.objects else _COMMON
        common = (
            folder.read_object(where)[0] if where == _COMMON_OBJECT else load_file(path / where)
        )
        if not isinstance(common, Mapping):
            raise CheckpointError(
                f"{where} in {path} holds a {type(common).__name__} instead of the state that all "
                "ranks share, so it is damaged. Load an earlier checkpoint."
            )
        return _opened(folder, common)


def _opened(folder: DcpFolder, common: Mapping[str, Any]) -> Source:
    model = _named_tensors(
        folder, {key: key for key in folder.tensors if not _NO_MODEL.fullmatch(key)}
    )
    keys: dict[str, dict[str, str]] = {}
    for key in folder.tensors:
        match = _STATE.fullmatch(key)
        if match:
            kind = MAIN if match["kind"] in _MAIN_KINDS else match["kind"]
            keys.setdefault(kind, {})[match["key"]] = key
    if not keys:
        known = sorted(
            {".".join(key.split(".")[:2]) for key in folder.tensors if key.startswith("optimizer")}
        )
        got = "no optimizer state. Save it without --no-save-optim"
        if known:  # as what this package saves by `dist_checkpointing`
            got = (
                f"optimizer state {known[0]!r} in an unknown form. {_AGAIN}, or by "
                "optimizer.save(folder)"
            )
        raise CheckpointError(f"Checkpoint {folder.folder} has {got}.")
    found = {kind: _named_tensors(folder, of_kind, model) for kind, of_kind in keys.items()}
    # In an fp32 model the params themselves are what the optimizer updates.
    updated = {name for tensors in found.values() for name in tensors}
    mains = {
        name: model[name] for name in updated if name in model and model[name].dtype == "float32"
    }
    found[MAIN] = {**mains, **found.get(MAIN, {})}
    missing = sorted(updated - found[MAIN].keys())
    if missing:
        raise CheckpointError(
            f"Checkpoint {folder.folder} has no fp32 values of {missing[0]!r}. {_AGAIN}."
        )
    kinds = (MAIN, *sorted(found.keys() - {MAIN}))
    infos: dict[str, TensorRecord] = {}
    for name in found[MAIN]:
        for kind in kinds:
            tensor = found[kind].get(name)
            if tensor is not None:
                infos[key_of(kind, name)] = TensorRecord(tensor.shape, tensor.dtype)

    def read_box(key: str, box: Box) -> Tensor:
        name = name_of(key)
        kind = kind_of(key)
        values = found[kind][name].read(box)
        if kind == MAIN and name in model:
            of_model = model[name].read(box)
            check_rounds(values, of_model, name, folder.folder, _MISPLACED)
        return values

    return Source(_head(infos, common, folder.folder), infos, read_box)


def _head(infos: Mapping[str, TensorRecord], common: Mapping[str, Any], path: Path) -> Manifest:
    """The manifest without tensors; the way in which the state was sharded is the name of the
    format."""
    entry = common.get("optimizer")
    entries = [entry]
    if isinstance(entry, Mapping) and all(isinstance(key, int) for key in entry):
        entries = [*entry.values()]  # of a chain
    states = [each for each in entries if isinstance(each, Mapping)]
    kinds = (state.get("param_state_sharding_type") for state in states)
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    kind = kind or next((each for each in kinds if each is not None), "by param")
    about: dict[str, str | int] = {"host": "megatron-core", "format": f"torch_dist, {kind}"}
    if isinstance(common.get("iteration"), int):
        about["iteration"] = common["iteration"]
    scalers = [state.get("grad_scaler") for state in states]
    scaler = next(filter(None, scalers), None)
    mains = [key for key in infos if kind_of(key) == MAIN]
    shapes = {name_of(key): infos[key].shape for key in mains}
    records = tuple(_records(shapes, _groups_in(states), str(path)))
    return Manifest(
        "", (), {}, records, inner_name(map(kind_of, infos)), loss_scale_of(scaler), about=about
    )


def _groups_in(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Param groups, each once, with the step, which optimizers that are not distributed keep
    outside of the groups."""
    found: list[Mapping[str, Any]] = []
    for state in states:
        inner = state.get("optimizer", state)
        kept = inner.get("state") or {}
        step = {"step": kept["common_step"]} if "common_step" in kept else {}
        for group in inner["param_groups"]:
            own = {key: value for key, value in group.items() if key != "params"}
            options = {**step, **own}
            if options not in found:
                found.append(options)
    return found


def _records(
    shapes: Mapping[str, tuple[int, ...]], groups: Sequence[Mapping[str, Any]], where: str
) -> Iterator[GroupRecord]:
    """Assigns params to groups by megatron-core's rule if one group decays and one does not.
    Otherwise all params get the options that all groups share, and the run that loads keeps its own
    for the rest."""
    step = the_step(groups, where)
    by_decay = {bool(group.get("wd_mult", 1.0)): group for group in groups}
    if (
        len(groups) == len(by_decay) == 2
        and len({tuple(group.get(key) for key in _IDENTITY) for group in groups}) == 1
    ):
        for decay, group in by_decay.items():
            names = [name for name, shape in shapes.items() if decays(name, shape) is decay]
            if names:
                options, _ = options_of(group)
                yield GroupRecord(tuple(names), options, step)
    else:
        first, *others = [
            {key: as_number(value) for key, value in group.items()} for group in groups
        ]
        shared = {
            key: value
            for key, value in first.items()
            if all((key, value) in each.items() for each in others)
        }
        options, _ = options_of(shared)
        yield GroupRecord(tuple(shapes), options, step)


@dataclass(frozen=True, eq=False)
class _NamedTensor:
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Box], Tensor]  # a box of it


def _named_tensors(
    folder: DcpFolder, keys: Mapping[str, str], model: Mapping[str, _NamedTensor] | None = None
) -> dict[str, _NamedTensor]:
    """Tensors by the names of params in the whole model, from the keys under which params and
    tensors are saved.

    `model` has the params where the tensors may be their flat parts.
    """
    found: dict[str, _NamedTensor] = {}
    for key, stored_as in keys.items():
        found |= _layers_of(folder, key, stored_as)
    if model is not None:
        found = {
            name: _in_shape(tensor, name, model.get(name), folder) for name, tensor in found.items()
        }
    return dict(_with_pairs(found))


def _layers_of(folder: DcpFolder, key: str, stored_as: str) -> Iterator[tuple[str, _NamedTensor]]:
    stored = folder.tensors[stored_as]
    whole = _NamedTensor(stored.shape, stored.dtype, lambda box: folder.read_box(stored_as, box))
    match = _STACKED.fullmatch(key)
    by_layer = all(chunk.box.sizes[:1] == (1,) for chunk in stored.chunks)
    if match is None or not by_layer:
        yield key, whole
        return
    for layer in range(stored.shape[0]):

        def read(box: Box, layer: int = layer) -> Tensor:
            in_whole = Box((layer, *box.offsets), (1, *box.sizes))
            return whole.read(in_whole)[0]

        yield (
            f"{match['before']}{layer}.{match['after']}",
            _NamedTensor(stored.shape[1:], stored.dtype, read),
        )


def _in_shape(
    tensor: _NamedTensor, name: str, param: _NamedTensor | None, folder: DcpFolder
) -> _NamedTensor:
    if param is None or param.shape == tensor.shape:
        return tensor
    cuts, numel = tensor.shape[:-1], tensor.shape[-1]
    is_grid = len(cuts) == len(param.shape) and all(
        s % c == 0 for s, c in zip(param.shape, cuts, strict=True)
    )
    if not is_grid or math.prod(cuts) * numel != math.prod(param.shape):
        raise CheckpointError(
            f"State of {name!r} in {folder.folder} has shape {list(tensor.shape)}, which is "
            f"neither the shape {list(param.shape)} of the param nor that of its flat parts. Load "
            "it with megatron-core 0.15 or newer, and save it again."
        )
    return replace(
        param, dtype=tensor.dtype, read=lambda box: _unfold(tensor, param.shape)[box.as_slices()]
    )


def _unfold(parts: _NamedTensor, shape: tuple[int, ...]) -> Tensor:
    """Reshapes [X, Y, elements of a part] into [rows, columns], for any number of dimensions."""
    cuts, dims = parts.shape[:-1], len(shape)
    sizes = [numel // cut for numel, cut in zip(shape, cuts, strict=True)]
    alternating = [
        dim for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for dim in pair
    ]
    return (
        parts.read(Box.whole(parts.shape))
        .reshape(*cuts, *sizes)
        .permute(alternating)
        .reshape(shape)
    )


def _with_pairs(tensors: Mapping[str, _NamedTensor]) -> Iterator[tuple[str, _NamedTensor]]:
    """Puts the halves of gated projections together."""
    for name, tensor in tensors.items():
        base = name[: -len(_GATE)]
        suffix = name[-len(_GATE) :]
        gate, up = f"{base}{_GATE}", f"{base}{_UP}"
        is_half = base not in tensors and gate in tensors and up in tensors
        if is_half and suffix == _GATE:
            yield base, _stacked(tensor, tensors[up])
        elif not (is_half and suffix == _UP):
            yield name, tensor


def _stacked(gate: _NamedTensor, up: _NamedTensor) -> _NamedTensor:
    rows, *rest = gate.shape
    zeros = [0] * len(rest)

    def read(box: Box) -> Tensor:
        parts = []
        for number, half in enumerate((gate, up)):
            offsets = (number * rows, *zeros)
            inside = box.intersect(Box(offsets, gate.shape))
            if inside:
                parts.append(half.read(inside.relative_to(offsets)))
        return torch.cat(parts)

    return replace(gate, shape=(2 * rows, *rest), read=read)
