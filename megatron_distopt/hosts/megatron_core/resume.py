"""Resuming from what the host's own optimizer saved without names, at the layout that wrote it.

Flat buffers say nothing about params. The buffers of the run do, where they are the ones that were saved: as many
buckets, each as long, and main params that round to the weights, which are loaded first, as the host does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.core import parallel_state
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import MAIN, Chunk, Manifest, TensorRecord, key_of, kind_of
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces, shards_of
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import (
    check_step,
    count_unlike,
    inner_name,
    loss_scale_of,
    the_step,
    with_step,
)
from megatron_distopt.formats.megatron_core.nameless import (
    REMEDY,
    NamelessBuffer,
    NamelessOptimizer,
    OptimizerPlace,
    open_nameless,
)
from megatron_distopt.hosts.megatron_core.whole import HoldsState, whole_model_of
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: What tells the host's param groups apart.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


class HasHostBuffers(HoldsState, Protocol):
    """An optimizer of ours over the host's buffers."""

    buffers: list[Any]
    data_parallel_group_idx: int


def load_nameless(
    path: Path, optimizers: Sequence[HasHostBuffers], everyone: Group, *, resume_step: int | None = None
) -> None:
    """Collective: takes the state in an iteration folder of the host; the params are not gathered yet.

    Args:
        path: for which `is_nameless` holds.
        optimizers: of the chain on this rank, over a model whose weights are those of the same iteration.
        everyone: all ranks that hold a part of the model.
        resume_step: updates so far, for files that lost them.

    Raises: as `load_state`; also where the buffers are not those that were saved.
    """
    model = whole_model_of(optimizers)
    load_state(lambda: _loadable(path, optimizers, model, resume_step), model, everyone)


def _loadable(path: Path, optimizers: Sequence[HasHostBuffers], model: WholeModel, resume_step: int | None) -> Loadable:
    saved: dict[ShardedOptimizer, NamelessOptimizer] = {}
    groups: list[GroupRecord] = []
    for number, (optimizer, share) in enumerate(zip(optimizers, model.shares, strict=True)):
        if optimizer.buffers:
            saved[share.optimizer] = open_nameless(path, _place_of(optimizer, number))
            groups += _records(saved[share.optimizer], optimizer, share, path)
    values = _Values(saved)
    for share in model.shares:
        _check_rounds(share, values, path)
    pieces = list(owned_pieces(model))
    tensors = dict(_records_of_tensors(model, pieces, values))
    scaler = next((each.grad_scaler for each in saved.values() if each.grad_scaler), None)
    inner = inner_name(map(kind_of, tensors))
    head = Manifest("", (), tensors, tuple(groups), inner, loss_scale_of(scaler))
    head = with_step(head, resume_step, path)
    check_step(head, path)

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        owner = {(piece.placement.name, piece.piece.in_global): piece for piece in pieces}
        for each in reads:
            kind, name = each.key.split("/", 1)
            yield each, values.of_piece(kind, owner[name, each.chunk.box])[each.in_chunk.as_slices()]

    return Loadable(head, str(path), read)


def _place_of(optimizer: HasHostBuffers, number: int) -> OptimizerPlace:
    """The folder has the name that the host's training script gives it."""
    folder = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        folder += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    numels = tuple(tuple(bucket.numel_unpadded for bucket in buffer.buckets) for buffer in optimizer.buffers)
    return OptimizerPlace(folder, number, optimizer.data_parallel_group_idx, numels)


def _records(saved: NamelessOptimizer, optimizer: HasHostBuffers, share: Share, path: Path) -> Iterator[GroupRecord]:
    """The saved groups with names: the host makes the same groups in the same order in every run."""
    ours, step = optimizer.param_groups, the_step(saved.groups, path)
    identities = [[tuple(group.get(key) for key in _IDENTITY) for group in groups] for groups in (saved.groups, ours)]
    if identities[0] != identities[1]:
        raise CheckpointError(
            f"The param groups in {path} have {', '.join(_IDENTITY)} of {identities[0]}, and those of this run have "
            f"{identities[1]}. Resume with the param groups of the saved run."
        )
    for group, planned in zip(saved.groups, share.optimizer.plan.groups, strict=True):
        names = tuple(dict.fromkeys(share.placements[name].name for name in planned.names))
        options = {key: value for key, value in group.items() if key != "params"}
        yield GroupRecord(names, options_of(options)[0], step)


class _Values:
    """The saved values of what this rank owns."""

    def __init__(self, saved: dict[ShardedOptimizer, NamelessOptimizer]) -> None:
        self._buffer_of: dict[tuple[ShardedOptimizer, str], NamelessBuffer] = {
            (optimizer, name): buffer
            for optimizer, state in saved.items()
            for adopted, buffer in zip(optimizer.buffers, state.buffers, strict=True)
            for name in adopted.layout.slot_of
        }

    def kinds(self, share: Share, name: str) -> dict[str, str]:
        """Names of dtypes by kind, of a param by its name in the optimizer."""
        kinds = self._buffer_of[share.optimizer, name].kinds
        return {kind: dtype_name(dtype) for kind, dtype in kinds.items()}

    def of_piece(self, kind: str, piece: OwnedPiece) -> Tensor:
        """In the shape of its box."""
        buffer, shard = self._buffer_of[piece.share.optimizer, piece.shard.name], piece.shard
        in_bucket = piece.piece.in_param.moved_by(shard.in_bucket.start - shard.in_param.start)
        values = buffer.read(kind, shard.bucket, in_bucket).view(piece.piece.sizes)
        return values[piece.piece.inside.as_slices()]

    def mains(self, share: Share) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, saved main values, and the model's values of each shard, 1-D."""
        for flat, shard in shards_of(share.optimizer):
            buffer = self._buffer_of[share.optimizer, shard.name]
            yield shard.name, buffer.read(MAIN, shard.bucket, shard.in_bucket), flat.cut(flat.model, shard)


def _check_rounds(share: Share, values: _Values, path: Path) -> None:
    """Refuses buffers in which params lie elsewhere, and a model whose weights are others."""
    for name, main, model in values.mains(share):
        num_unlike = count_unlike(main, model.detach().to(main.device))
        if num_unlike:
            raise CheckpointError(
                f"{num_unlike} of {main.numel()} main values that {path} has where this run keeps {name!r} are not the "
                "model's. Load the model's weights of the same iteration first, at the layout and with the bucket "
                f"size of the run that saved. {REMEDY}"
            )


def _records_of_tensors(
    model: WholeModel, pieces: Sequence[OwnedPiece], values: _Values
) -> Iterator[tuple[str, TensorRecord]]:
    """All params of this rank, in boxes of what it owns."""
    chunks: dict[str, list[Chunk]] = {}
    for piece in pieces:
        chunks.setdefault(piece.placement.name, []).append(Chunk(piece.piece.in_global, 0, 0, 0))
    for share in model.shares:
        for name, placement in share.placements.items():
            for kind, dtype in values.kinds(share, name).items():
                owned = tuple(chunks.get(placement.name, ()))
                yield key_of(kind, placement.name), TensorRecord(placement.global_shape, dtype, owned)
