"""megatron-core's distributed checkpoints ("torch_dist"): `.metadata` beside files of tensors.

What all ranks share is in `common.pt`, and since megatron-core 0.19 an object among the tensors. Optimizer state is
found by the keys alone:

::

    optimizer.state.KIND.KEY                    one tensor a param (fully_reshardable, fully_sharded_model_space, and
                                                optimizers that are not distributed)
    optimizer.distributed.dp_group_idx_G.gbuf_idx_N.dtype_(P, Q).bucket_idx_B.KIND     a flat bucket (dp_reshardable)
    optimizer.distributed.dp_group_idx_G.param_state       an object with flat buffers (dp_zero_gather_scatter)

G counts tensor-parallel ranks, and pipeline stages of as many ranks each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.located import count_unlike, source_of
from megatron_distopt.formats.megatron_core.buckets import located_in_buckets, objects_of
from megatron_distopt.formats.megatron_core.head import head_of
from megatron_distopt.formats.megatron_core.tensors import NamedTensor, named_tensors
from megatron_distopt.formats.pickles import load_file, understood
from megatron_distopt.formats.torch.dcp_reader import METADATA, DcpFolder, open_dcp
from megatron_distopt.layout import Box

_COMMON, _CONFIG = "common.pt", "metadata.json"
_COMMON_OBJECT = "common_state/shard_0_1"
_CHAIN = r"(?:chained_\d+\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<kind>\w+)\.(?P<key>.+)")
_BUCKETS = re.compile(_CHAIN + r"optimizer\.distributed\.dp_group_idx_\d+\..*(?:bucket_idx_\d+|param_state).*")
_NO_MODEL = re.compile(_CHAIN + r"(?:optimizer|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*")
_MAIN_KINDS = ("param", "fp32_param")
_RESAVE = "Load it where it was written, and save it in another format"


def recognises(path: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (path / METADATA).is_file() and any((path / name).is_file() for name in (_COMMON, _CONFIG))


def open_torch_dist(path: Path) -> Source:
    """Opens a checkpoint.

    Args:
        path: folder of an iteration.

    Raises:
        CheckpointError: it is damaged or has no optimizer state, or params cannot be found; `read` raises it for values
            that cannot be the model's.
    """
    with understood(path, "be a distributed checkpoint of megatron-core"):
        return _opened(path)


def _opened(path: Path) -> Source:
    folder = open_dcp(path)
    common = _common_of(folder)
    model = named_tensors(folder, {key: key for key in folder.tensors if not _NO_MODEL.fullmatch(key)})
    if any(map(_STATE.fullmatch, folder.tensors)):
        return _by_param(folder, common, model)
    if any(_BUCKETS.fullmatch(key) for key in (*folder.tensors, *folder.objects)):
        found = located_in_buckets(folder, model, common.get("args"))
        scaler = next((state for _, state in objects_of(folder, "grad_scaler")), None)
        states = [{**state, "grad_scaler": scaler} for _, state in objects_of(folder, "optimizer")]
        return source_of(found, str(path), lambda infos: _head(infos, states, common, path))
    raise _refused(path, folder)


def _common_of(folder: DcpFolder) -> Mapping[str, Any]:
    """What all ranks share."""
    where = _COMMON_OBJECT if _COMMON_OBJECT in folder.objects else _COMMON
    common = folder.read_object(where)[0] if where == _COMMON_OBJECT else load_file(folder.folder / where)
    if not isinstance(common, Mapping):
        rule, remedy = "hold the state that all ranks share", "Load an earlier checkpoint; this one is damaged"
        raise CheckpointError(refusal(f"{where} in {folder.folder}", f"a {type(common).__name__}", rule, remedy))
    return common


def _refused(path: Path, folder: DcpFolder) -> CheckpointError:
    known = {".".join(key.split(".")[:2]) for key in folder.tensors if key.startswith("optimizer")}
    got = f"optimizer state {sorted(known)[0]!r}" if known else "no optimizer state"
    rule = "have optimizer state by param, or in buckets of megatron-core's distributed optimizer"
    return CheckpointError(
        refusal(f"checkpoint {path}", got, rule, _RESAVE if known else "Save it without --no-save-optim")
    )


def _by_param(folder: DcpFolder, common: Mapping[str, Any], model: Mapping[str, NamedTensor]) -> Source:
    keys: dict[str, dict[str, str]] = {}
    for key in folder.tensors:
        match = _STATE.fullmatch(key)
        if match:
            kind = MAIN if match["kind"] in _MAIN_KINDS else match["kind"]
            keys.setdefault(kind, {})[match["key"]] = key
    found = {kind: named_tensors(folder, of_kind, model) for kind, of_kind in keys.items()}
    # What an fp32 model computes with is what its optimizer updates.
    updated = {name for tensors in found.values() for name in tensors}
    mains = {name: model[name] for name in updated if name in model and model[name].dtype is torch.float32}
    found[MAIN] = {**mains, **found.get(MAIN, {})}
    _check_mains(found, folder)
    infos = {
        key_of(kind, name): TensorInfo(found[kind][name].shape, dtype_name(found[kind][name].dtype))
        for name in found[MAIN]
        for kind in (MAIN, *sorted(found.keys() - {MAIN}))
        if name in found[kind]
    }
    head = _head(infos, list(_optimizer_states(common)), common, folder.folder)

    def read_box(key: str, box: Box) -> Tensor:
        name, tensor = name_of(key), found[kind_of(key)][name_of(key)].read(box)
        if kind_of(key) == MAIN and name in model:
            _check_rounds(tensor, model[name].read(box), name, folder.folder)
        return tensor

    return Source(head, infos, read_box)


def _check_mains(found: Mapping[str, Mapping[str, NamedTensor]], folder: DcpFolder) -> None:
    missing = sorted({name for tensors in found.values() for name in tensors} - found[MAIN].keys())
    if missing:
        got, rule = f"no fp32 values of {missing[0]!r}", "hold main params and what the optimizer keeps of them"
        raise CheckpointError(refusal(f"checkpoint {folder.folder}", got, rule, _RESAVE))


def _check_rounds(main: Tensor, param: Tensor, name: str, where: Path) -> None:
    """megatron-core 0.15 to 0.19 cuts params out of buffers at wrong places where there are several buckets."""
    num_unlike = count_unlike(main, param)
    if num_unlike:
        got = f"{num_unlike} of {main.numel()} main values of {name!r} are not the model's"
        rule = "hold main params that round to the model's; megatron-core 0.15 to 0.19 may misplace them as it saves"
        remedy = "Load the weights alone with --no-load-optim, and save without --dist-ckpt-optim-fully-reshardable"
        raise CheckpointError(refusal(f"optimizer state in {where}", got, rule, remedy))


def _optimizer_states(common: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The state of each optimizer of a chain."""
    entry = common.get("optimizer")
    entries = entry.values() if isinstance(entry, Mapping) and all(isinstance(key, int) for key in entry) else (entry,)
    yield from (each for each in entries if isinstance(each, Mapping))


def _head(
    infos: Mapping[str, TensorInfo], states: Sequence[Mapping[str, Any]], common: Mapping[str, Any], path: Path
) -> Manifest:
    """With the way in which the state was sharded as the name of the format."""
    content = common.get("content_metadata") or {}
    kinds = (state.get("param_state_sharding_type") for state in _optimizer_states(common))
    kind = content.get("distrib_optim_sharding_type") or next((each for each in kinds if each is not None), "by param")
    return head_of(infos, states, f"torch_dist, {kind}", common.get("iteration"), str(path))
