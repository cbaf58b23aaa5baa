"""megatron-core's flat optimizer state without names, which only a model with the same buffers can
take.

::

    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt      "--ckpt-format torch", a list for a chain
        {"buckets_coalesced": True, buffer: {(param dtype, grad dtype): {"param", "exp_avg", ...}}}
    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    the model, and the param groups without params

    in torch_dist, dp_reshardable:
        optimizer.distributed.dp_group_idx_G.gbuf_idx_N.dtype_(P, Q).bucket_idx_B.KIND
    in torch_dist, dp_zero_gather_scatter: an object like distrib_optim.pt
        optimizer.distributed.dp_group_idx_G.param_state

Buckets lie there with the padding between params and without that at their ends. A gathered buffer
has one bucket after the other. Which param lies where, only the buffers of the run that wrote them
say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.pickles import load_file
from megatron_distopt.formats.torch_files import METADATA, DcpFolder, open_dcp
from megatron_distopt.layout import Box, Span

_OPTIMIZER, _MODEL, _COALESCED = "distrib_optim.pt", "model_optim_rng.pt", "buckets_coalesced"
_CHAIN = r"(?:chained_(?P<chain>\d+)\.)?"
_PLACE = _CHAIN + r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_BUCKET = re.compile(
    _PLACE
    + r"gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.\w+, .*\)"
    + r"\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
_OBJECT = re.compile(_PLACE + r"(?P<what>param_state|optimizer|grad_scaler)(?:/.*)?")
_BY_PARAM = re.compile(_CHAIN + r"optimizer\.state\.\w+\..+")
REMEDY = (
    "Resume it in megatron-core at the parallel sizes that wrote it, with or without this package, "
    "and save it once with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, which "
    "writes names."
)


def is_nameless(path: Path) -> bool:
    """Whether a folder is an iteration with such state."""
    if (path / METADATA).is_file():
        folder = open_dcp(path)
        objects = filter(None, map(_OBJECT.fullmatch, folder.objects))
        is_flat = any(map(_BUCKET.fullmatch, folder.tensors)) or any(
            each["what"] == "param_state" for each in objects
        )
        return is_flat and not any(map(_BY_PARAM.fullmatch, folder.tensors))
    first = next(iter(sorted(path.glob(f"mp_rank_*/{_OPTIMIZER}"))), None)
    return first is not None and any(
        state.get(_COALESCED) for state in _states_in(load_file(first))
    )


def refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"The optimizer state in {path} is in flat buffers without names of params. {REMEDY}"
    )


@dataclass(frozen=True)
class OptimizerPlace:
    """Which optimizer of a run is asked for, and what its buffers are like."""

    folder: str  # of its model-parallel rank, such as "mp_rank_00_001"
    chain: int  # its number in the chain of optimizers
    # number of its data-parallel group, which the host counts through tensor ranks, then stages
    group: int
    # elements of each bucket of each buffer, without the padding at its end
    numels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class NamelessBuffer:
    """One grad buffer of the host, with all that is kept of it."""

    kinds: Mapping[str, torch.dtype]  # "main", and what the inner optimizer keeps
    # kind, number of the bucket, span in the bucket -> 1-D
    read: Callable[[str, int, Span], Tensor]


@dataclass(frozen=True, eq=False)
class NamelessOptimizer:
    """The state of one optimizer."""

    buffers: tuple[NamelessBuffer, ...]
    groups: Sequence[Mapping[str, Any]]  # param groups without params
    grad_scaler: Mapping[str, Any] | None


def open_nameless(path: Path, place: OptimizerPlace) -> NamelessOptimizer:
    """Opens the state of one optimizer of the run."""
    if (path / METADATA).is_file():
        return _of_folder(open_dcp(path), place)
    states = _states_in(_loaded(path / place.folder / _OPTIMIZER))
    entry = _loaded(path / place.folder / _MODEL).get("optimizer")
    heads = [
        each
        for each in (entry if isinstance(entry, list) else [entry])
        if isinstance(each, Mapping)
    ]
    if len(states) <= place.chain or len(heads) <= place.chain:
        raise _unlike(
            path / place.folder,
            f"{min(len(states), len(heads))} optimizers",
            f"{place.chain + 1} or more",
        )
    buffers = _coalesced(states[place.chain], place, str(path / place.folder / _OPTIMIZER))
    return _with_head(buffers, heads[place.chain], heads[place.chain].get("grad_scaler"), path)


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"There is no file {path}. Copy the whole iteration folder, from all machines of the "
            "run."
        )
    return load_file(path)


def _states_in(found: Any) -> list[Mapping[Any, Any]]:
    """States of the optimizers of a chain; one that is not distributed has none there."""
    return [
        state
        for state in (found if isinstance(found, list) else [found])
        if isinstance(state, Mapping)
    ]


def _unlike(where: object, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer state in {where} has {got}, and this run has {expected}. Without names it "
        f"loads only into the buffers that it was saved from. {REMEDY}"
    )


def _with_head(
    buffers: Sequence[NamelessBuffer], head: Mapping[str, Any], scaler: Any, path: Path
) -> NamelessOptimizer:
    inner = head.get("optimizer", head)
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        raise CheckpointError(
            f"There are no param groups in {path}. Save it without --no-save-optim."
        )
    return NamelessOptimizer(tuple(buffers), inner["param_groups"], scaler)


def _of_folder(folder: DcpFolder, place: OptimizerPlace) -> NamelessOptimizer:
    objects = {
        match["what"]: folder.read_object(key)[0]
        for match, key in _mine(folder.objects, _OBJECT, place)
    }
    if "param_state" in objects:
        buffers = _coalesced(objects["param_state"], place, str(folder.folder))
    else:
        buffers = _in_buckets(folder, place)
    if "optimizer" not in objects:
        raise _unlike(folder.folder, f"no state of data-parallel group {place.group}", "it")
    return _with_head(
        buffers, {"optimizer": objects["optimizer"]}, objects.get("grad_scaler"), folder.folder
    )


def _mine(
    keys: Mapping[str, Any], pattern: re.Pattern[str], place: OptimizerPlace
) -> Iterator[tuple[re.Match[str], str]]:
    """Keys of the optimizer, each with its parts. A chain of one optimizer may have no number."""
    for key in keys:
        match = pattern.fullmatch(key)
        if (
            match
            and int(match["group"]) == place.group
            and int(match["chain"] or place.chain) == place.chain
        ):
            yield match, key


def _in_buckets(folder: DcpFolder, place: OptimizerPlace) -> list[NamelessBuffer]:
    keys: dict[tuple[int, int], dict[str, str]] = {}
    for match, key in _mine(folder.tensors, _BUCKET, place):
        keys.setdefault((int(match["buffer"]), int(match["bucket"])), {})[_kind(match["kind"])] = (
            key
        )
    shapes = {
        number: folder.tensors[of_kind[MAIN]].shape
        for number, of_kind in keys.items()
        if MAIN in of_kind
    }
    expected = {
        (buffer, bucket): (numel,)
        for buffer, row in enumerate(place.numels)
        for bucket, numel in enumerate(row)
    }
    if shapes != expected or keys.keys() != expected.keys():
        got = [list(shapes.get(number, ())) for number in sorted(keys)]
        raise _unlike(
            folder.folder, f"buckets of {got}", str([list(shape) for shape in expected.values()])
        )
    buffers = []
    for number in range(len(place.numels)):
        kinds = {
            kind: getattr(torch, folder.tensors[key].dtype) for kind, key in keys[number, 0].items()
        }

        def read(kind: str, bucket: int, span: Span, number: int = number) -> Tensor:
            return folder.read_box(keys[number, bucket][kind], Box((span.start,), (span.numel,)))

        buffers.append(NamelessBuffer(kinds, read))
    return buffers


def _coalesced(state: Mapping[Any, Any], place: OptimizerPlace, where: str) -> list[NamelessBuffer]:
    """The buffers of a state that data-parallel rank 0 gathered (megatron-core since 0.7)."""
    if not isinstance(state, Mapping) or not state.get(_COALESCED):
        raise CheckpointError(
            f"The optimizer state in {where} has no {_COALESCED!r}, which megatron-core writes "
            "since 0.7. Load it with the megatron-core that wrote it, and save it with a later one."
        )
    found = [
        tensors
        for of_dtype in state.values()
        if isinstance(of_dtype, Mapping)
        for tensors in of_dtype.values()
    ]
    flats = [
        {
            _kind(key): each
            for key, each in tensors.items()
            if torch.is_tensor(each) and each.dim() == 1
        }
        for tensors in found
    ]
    numels, expected = [each[MAIN].numel() for each in flats], [sum(row) for row in place.numels]
    if numels != expected:
        raise _unlike(where, f"buffers of {numels} elements", str(expected))
    return [_gathered(flat, row) for flat, row in zip(flats, place.numels, strict=True)]


def _gathered(tensors: Mapping[str, Tensor], numels: Sequence[int]) -> NamelessBuffer:
    starts = [0, *accumulate(numels)]
    kinds = {kind: tensor.dtype for kind, tensor in tensors.items()}
    return NamelessBuffer(
        kinds, lambda kind, bucket, span: tensors[kind][span.moved_by(starts[bucket]).as_slice()]
    )


def _kind(key: str) -> str:
    return MAIN if key == "param" else key
