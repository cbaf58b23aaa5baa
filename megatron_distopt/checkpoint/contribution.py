"""What one rank puts into a checkpoint: tensors of the pieces that it owns, and what its param groups say."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import data_file, write_part
from megatron_distopt.checkpoint.group_record import check_groups, join_groups
from megatron_distopt.checkpoint.history import earlier_saves
from megatron_distopt.checkpoint.loss_scale import saved_loss_scale
from megatron_distopt.checkpoint.manifest import (
    NOT_OPTIONS,
    Chunk,
    GroupRecord,
    Manifest,
    Scalar,
    TensorRecord,
    check_counts,
)
from megatron_distopt.checkpoint.tensor_file import TensorWriter
from megatron_distopt.checkpoint.whole_model import Share, WholeModel, owned_pieces
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, moments_of
from megatron_distopt.version import VERSION

__all__ = [
    "Contribution",
    "Written",
    "contribution_of",
    "plain_option",
    "scalars_of",
    "step_of",
    "write_contribution",
]

_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True, eq=False)
class Written:
    """One tensor to write.

    Args:
        key: see `key_of`.
        shape: of the whole param.
        box: that the tensor is of it.
        tensor: a view of the live state.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one rank writes.

    Args:
        head: its manifest without files and tensors, and until it is written without an id.
        tensors: in the order of the file; gone through once.
    """

    head: Manifest
    tensors: Iterable[Written]


def contribution_of(model: WholeModel) -> Contribution:
    """Views of the live state: write them, or copy them, before the next step.

    Raises:
        CheckpointError: the inner optimizer keeps something that cannot be saved by param, or has an option that no
            load would take.
    """
    tensors = tuple(
        Written(key, piece.placement.global_shape, piece.piece.in_global, tensor)
        for piece in owned_pieces(model)
        if piece.share.writes(piece.shard.name)
        for key, tensor in piece.tensors()
    )
    first = model.shares[0].optimizer
    groups = join_groups(group for share in model.shares for group in _groups_of(share))
    resting = join_groups(group for share in model.shares for group in _resting_of(share))
    check_groups((*groups, *resting), "the optimizer")
    head = Manifest(
        save_id="",
        files=(),
        tensors={},
        groups=groups,
        inner=first.plan.choice.name,
        loss_scale=saved_loss_scale(first.loss_scale),
        num_skipped=first.num_skipped,
        about={**model.about, "megatron_distopt": VERSION, "torch": torch.__version__},
        earlier=earlier_saves(model),
        resting=resting,
    )
    check_counts(head, "the optimizer")  # a part that no reader takes would be waited for in vain
    return Contribution(head, tensors)


def write_contribution(folder: Path, contribution: Contribution, save_id: str, rank: int) -> Manifest:
    """Writes this rank's file, tensor by tensor, and then its part of the manifest; both are on the disk afterwards.

    Raises:
        CheckpointError: the disk is full, or fails; what was written is removed again.
    """
    path = data_file(folder, save_id, rank)
    try:
        with disk.written(path) as file:
            part = _write(TensorWriter(path, file), contribution, save_id)
        write_part(folder, part, rank)
    except OSError as error:
        remedy = "Free space there, or save elsewhere; the last checkpoint is untouched"
        raise CheckpointError(refusal(f"file {path}", error, "be writable", remedy)) from error
    return part


def _write(writer: TensorWriter, contribution: Contribution, save_id: str) -> Manifest:
    tensors: dict[str, TensorRecord] = {}
    for each in contribution.tensors:
        stretch = writer.append(each.key, each.tensor)
        chunk = Chunk(each.box, 0, stretch.start, stretch.nbytes)
        before = tensors[each.key].chunks if each.key in tensors else ()
        tensors[each.key] = TensorRecord(each.shape, dtype_name(each.tensor.dtype), (*before, chunk))
    return replace(contribution.head, save_id=save_id, files=(writer.record(),), tensors=tensors)


def _groups_of(share: Share) -> Iterator[GroupRecord]:
    """Of the groups of which this rank owns something, one a flat param: another rank speaks for the others."""
    optimizer = share.optimizer
    for number, group in enumerate(optimizer.inner.param_groups):
        options, unsaved = _options_of(group)
        for flat in optimizer.flat_params:
            if flat.plan.key.group == number:
                names = dict.fromkeys(share.placements[shard.name].name for shard in flat.plan.shards)
                scalars = scalars_of(optimizer, flat)
                yield GroupRecord(tuple(names), options, step_of(optimizer, group, flat, scalars), scalars, unsaved)


def _resting_of(share: Share) -> Iterator[GroupRecord]:
    for number, names in share.resting.items():
        options, unsaved = _options_of(share.optimizer.inner.param_groups[number])
        yield GroupRecord(names, options, unsaved=unsaved)


def step_of(
    optimizer: ShardedOptimizer, group: Mapping[str, Any], flat: FlatParam, scalars: Mapping[str, Scalar]
) -> int | None:
    """Updates so far, wherever the class counts them; an Adam without moments has not updated it yet."""
    is_begun = bool(optimizer.inner.state.get(flat.main)) or not optimizer.plan.choice.is_adam
    if "step" in group and is_begun:
        return int(_scalar("step", group["step"]).value)
    return int(scalars["step"].value) if "step" in scalars else None


def _options_of(group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Those that a file keeps, and the types of the others."""
    given = {key: plain_option(value) for key, value in group.items() if key not in NOT_OPTIONS}
    unsaved = {key: type(group[key]).__name__ for key, value in given.items() if not _is_plain(value)}
    for key, name in unsaved.items():
        _log.warning("param group option %r is a %s and is not saved", key, name)
    return {key: value for key, value in given.items() if key not in unsaved}, unsaved


def plain_option(value: Any) -> Any:
    """A learning rate that is a tensor is a number in the file."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain_option(each) for key, each in value.items()}
    return list(map(plain_option, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(value: object) -> bool:
    """Whether JSON keeps it as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def scalars_of(optimizer: ShardedOptimizer, flat: FlatParam) -> dict[str, Scalar]:
    """What the inner optimizer keeps with a flat param beside tensors as large."""
    cut = moments_of(optimizer.inner, flat.main)
    state = optimizer.inner.state.get(flat.main, {})
    return {key: _scalar(key, value) for key, value in state.items() if key not in cut}


def _scalar(key: str, value: Any) -> Scalar:
    if torch.is_tensor(value) and value.numel() == 1:
        return Scalar(value.item(), dtype_name(value.dtype))
    if isinstance(value, (bool, int, float)):
        return Scalar(value, "")
    got = f"a tensor of {list(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
    remedy = "Use an element-wise inner optimizer"
    raise CheckpointError(
        refusal(f"state {key!r} of the inner optimizer", got, "be a number, or as large as its param", remedy)
    )
