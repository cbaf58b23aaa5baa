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

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.pickles import load_file
from megatron_distopt.formats.torch_files import METADATA, DcpFolder, open_dcp
from megatron_distopt.layout import Box, Span

_OPTIMIZER, _MODEL = "distrib_optim.pt", "model_optim_rng.pt"
_COALESCED, _GATHERED, _MAIN_IN_FILE = "buckets_coalesced", "param_state", "param"
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
        if any(_BY_PARAM.fullmatch(key) for key in folder.tensors):
            return False
        objects = [_OBJECT.fullmatch(key) for key in folder.objects]
        is_gathered = any(match and match["what"] == _GATHERED for match in objects)
        return is_gathered or any(_BUCKET.fullmatch(key) for key in folder.tensors)
    first = min(path.glob(f"mp_rank_*/{_OPTIMIZER}"), default=None)
    return first is not None and any(state.get(_COALESCED) for state in _of_chain(load_file(first)))


def refuse_nameless(path: Path) -> NoReturn:
    raise CheckpointError(
        f"The optimizer state in {path} is in flat buffers without names of params. {REMEDY}"
    )


@dataclass(frozen=True)
class OptimizerPlace:
    """Which optimizer of a run is opened, and how its buffers are laid out."""

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

    buffers: Sequence[NamelessBuffer]
    groups: Sequence[Mapping[str, Any]]  # param groups without params
    grad_scaler: Mapping[str, Any] | None


def open_nameless(path: Path, place: OptimizerPlace) -> NamelessOptimizer:
    """Opens the state of one optimizer of the run."""
    if (path / METADATA).is_file():
        folder = open_dcp(path)
        mine = _mine(folder.objects, _OBJECT, place)
        head: Mapping[str, Any] = {match["what"]: folder.read_object(key)[0] for match, key in mine}
        state = head.get(_GATHERED)
        buffers = _in_buckets(folder, place) if state is None else _coalesced(state, place, path)
    else:
        files = path / place.folder
        states = _of_chain(_loaded(files / _OPTIMIZER))
        heads = _of_chain(_loaded(files / _MODEL).get("optimizer"))
        known = min(len(states), len(heads))
        if known <= place.chain:
            raise _unlike(files, f"{known} optimizers", f"{place.chain + 1} or more")
        head = heads[place.chain]
        buffers = _coalesced(states[place.chain], place, files / _OPTIMIZER)
    inner = head.get("optimizer", head)
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        raise CheckpointError(
            f"{path} has no param groups of optimizer {place.chain} of data-parallel group "
            f"{place.group}. Load the iteration of a run with these parallel sizes that was saved "
            "without --no-save-optim."
        )
    return NamelessOptimizer(buffers, inner["param_groups"], head.get("grad_scaler"))


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"There is no file {path}. Copy the whole iteration folder, from all machines of the "
            "run."
        )
    return load_file(path)


def _of_chain(found: Any) -> list[Mapping[Any, Any]]:
    """What each optimizer of a chain has; one that is not distributed has nothing there."""
    every = found if isinstance(found, list) else [found]
    return [each for each in every if isinstance(each, Mapping)]


def _unlike(where: object, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer state in {where} has {got}, and this run has {expected}. Without names it "
        f"loads only into the buffers that it was saved from. {REMEDY}"
    )


def _mine(
    keys: Mapping[str, Any], pattern: re.Pattern[str], place: OptimizerPlace
) -> Iterator[tuple[re.Match[str], str]]:
    """Keys of the optimizer, each with its parts. A chain of one optimizer may have no number."""
    for key in keys:
        match = pattern.fullmatch(key)
        if match is None or int(match["group"]) != place.group:
            continue
        if match["chain"] is None or int(match["chain"]) == place.chain:
            yield match, key


def _in_buckets(folder: DcpFolder, place: OptimizerPlace) -> list[NamelessBuffer]:
    keys: dict[tuple[int, int, str], str] = {}  # by number of the buffer, of the bucket, and kind
    for match, key in _mine(folder.tensors, _BUCKET, place):
        keys[int(match["buffer"]), int(match["bucket"]), _kind(match["kind"])] = key
    numels = {
        key[:2]: math.prod(folder.tensors[stored_as].shape)
        for key, stored_as in keys.items()
        if key[2] == MAIN
    }
    expected = {
        (buffer, bucket): numel
        for buffer, row in enumerate(place.numels)
        for bucket, numel in enumerate(row)
    }
    _check_numels(numels, expected, folder.folder)
    buffers = []
    for number in range(len(place.numels)):
        kinds = {
            kind: getattr(torch, folder.tensors[key].dtype)
            for (buffer, bucket, kind), key in keys.items()
            if buffer == number and bucket == 0
        }

        def read(kind: str, bucket: int, span: Span, number: int = number) -> Tensor:
            return folder.read_box(keys[number, bucket, kind], Box((span.start,), (span.numel,)))

        buffers.append(NamelessBuffer(kinds, read))
    return buffers


def _coalesced(state: Any, place: OptimizerPlace, where: Path) -> list[NamelessBuffer]:
    """The buffers of a state that data-parallel rank 0 gathered (megatron-core since 0.7)."""
    if not isinstance(state, Mapping) or not state.get(_COALESCED):
        raise CheckpointError(
            f"The optimizer state in {where} has no {_COALESCED!r}, which megatron-core has "
            "written since 0.7. Load it with the megatron-core that wrote it, and save it with a "
            "later one."
        )
    of_buffers = [
        tensors
        for of_dtypes in state.values()
        if isinstance(of_dtypes, Mapping)
        for tensors in of_dtypes.values()
    ]
    numels = [tensors[_MAIN_IN_FILE].numel() for tensors in of_buffers]
    _check_numels(numels, [sum(row) for row in place.numels], where)
    return [_gathered(*each) for each in zip(of_buffers, place.numels, strict=True)]


def _gathered(tensors: Mapping[str, Any], numels: Sequence[int]) -> NamelessBuffer:
    flats = {
        _kind(key): torch.split(each, list(numels))
        for key, each in tensors.items()
        if torch.is_tensor(each) and each.dim() == 1
    }
    kinds = {kind: parts[0].dtype for kind, parts in flats.items()}
    return NamelessBuffer(kinds, lambda kind, bucket, span: flats[kind][bucket][span.as_slice()])


def _check_numels(found: object, expected: object, where: Path) -> None:
    if found != expected:
        raise _unlike(where, f"buffers or buckets of {found} elements", str(expected))


def _kind(key: str) -> str:
    return MAIN if key == _MAIN_IN_FILE else key
