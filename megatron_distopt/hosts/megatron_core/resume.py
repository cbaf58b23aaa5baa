"""Resuming from what the host's own optimizer saved without names, at the layout that wrote it.

Flat buffers say nothing about params. The buffers of the run do, where they are the ones that were
saved: as many buckets, each as long, and main params that round to the weights, which are loaded
first, as the host does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core import parallel_state
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    Manifest,
    TensorRecord,
    key_of,
    kind_of,
)
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.whole_model import (
    OwnedPiece,
    Share,
    WholeModel,
    owned_pieces,
    shards_of,
)
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
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, whole_model_of
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: What tells the host's param groups apart.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
#: The saved buffer of a param, by its name in an optimizer.
_Buffers = dict[tuple[ShardedOptimizer, str], NamelessBuffer]


def load_nameless(path: Path, optimizers: Sequence[OneOptimizer], everyone: Group) -> None:
    """Collective: takes the state in an iteration folder of the host; the params are not gathered
    yet. The model must have the weights of the same iteration."""
    model = whole_model_of(optimizers)
    load_state(lambda: _loadable(path, optimizers, model), model, everyone)


def _loadable(path: Path, optimizers: Sequence[OneOptimizer], model: WholeModel) -> Loadable:
    saved: list[NamelessOptimizer] = []
    buffer_of: _Buffers = {}
    groups: list[GroupRecord] = []
    for number, (optimizer, share) in enumerate(zip(optimizers, model.shares, strict=True)):
        if optimizer.buffers:
            saved.append(open_nameless(path, _place_of(optimizer, number)))
            groups += _records(saved[-1], optimizer, share, path)
            for adopted, buffer in zip(share.optimizer.buffers, saved[-1].buffers, strict=True):
                buffer_of |= {(share.optimizer, name): buffer for name in adopted.layout.slot_of}
    for share in model.shares:
        _check_rounds(share, buffer_of, path)
    pieces = list(owned_pieces(model))
    tensors = dict(_tensor_records(model, pieces, buffer_of))
    scaler = next((optimizer.grad_scaler for optimizer in saved if optimizer.grad_scaler), None)
    inner = inner_name(map(kind_of, tensors))
    manifest = Manifest("", (), tensors, tuple(groups), inner, loss_scale_of(scaler))
    # updates so far, for files that lost them
    head = with_step(manifest, optimizers[0].sharded.config.resume_step, path)
    check_step(head, path)

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        owner = {(piece.placement.name, piece.piece.in_global): piece for piece in pieces}
        for one in reads:
            kind, name = one.key.split("/", 1)
            yield (
                one,
                _values_of(owner[name, one.chunk.box], kind, buffer_of)[one.in_chunk.as_slices()],
            )

    return Loadable(head, str(path), read)


def _place_of(optimizer: OneOptimizer, number: int) -> OptimizerPlace:
    """The folder has the name that the host's training script gives it."""
    folder = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        folder += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    numels = tuple(
        tuple(bucket.numel_unpadded for bucket in buffer.buckets) for buffer in optimizer.buffers
    )
    return OptimizerPlace(folder, number, optimizer.data_parallel_group_idx, numels)


def _records(
    saved: NamelessOptimizer, optimizer: OneOptimizer, share: Share, path: Path
) -> Iterator[GroupRecord]:
    """The saved groups with names: the host makes the same groups in the same order in every
    run."""
    ours, step = optimizer.param_groups, the_step(saved.groups, path)
    identities = [
        [tuple(group.get(key) for key in _IDENTITY) for group in groups]
        for groups in (saved.groups, ours)
    ]
    if identities[0] != identities[1]:
        raise CheckpointError(
            f"The param groups in {path} have {', '.join(_IDENTITY)} of {identities[0]}, and those "
            f"of this run have {identities[1]}. Resume with the param groups of the saved run."
        )
    for group, planned in zip(saved.groups, share.optimizer.plan.groups, strict=True):
        names = tuple(dict.fromkeys(share.placements[name].name for name in planned.names))
        options = {key: value for key, value in group.items() if key != "params"}
        yield GroupRecord(names, options_of(options)[0], step)


def _check_rounds(share: Share, buffer_of: _Buffers, path: Path) -> None:
    """Refuses buffers in which params lie elsewhere, and a model whose weights are others."""
    for flat, shard in shards_of(share.optimizer):
        main = buffer_of[share.optimizer, shard.name].read(MAIN, shard.bucket, shard.in_bucket)
        num_unlike = count_unlike(main, flat.cut(flat.model, shard).detach().to(main.device))
        if num_unlike:
            raise CheckpointError(
                f"{num_unlike} of {main.numel()} main values that {path} has where this run keeps "
                f"{shard.name!r} are not the model's. Load the model's weights of the same "
                "iteration first, at the layout and with the bucket size of the run that saved. "
                f"{REMEDY}"
            )


def _values_of(piece: OwnedPiece, kind: str, buffer_of: _Buffers) -> Tensor:
    """The saved values in the shape of the piece's box."""
    shard = piece.shard
    in_bucket = piece.piece.in_param.moved_by(shard.in_bucket.start - shard.in_param.start)
    values = buffer_of[piece.share.optimizer, shard.name].read(kind, shard.bucket, in_bucket)
    return values.view(piece.piece.sizes)[piece.piece.inside.as_slices()]


def _tensor_records(
    model: WholeModel, pieces: Sequence[OwnedPiece], buffer_of: _Buffers
) -> Iterator[tuple[str, TensorRecord]]:
    """All params of this rank, in boxes of what it owns."""
    chunks: dict[str, list[Chunk]] = {}
    for piece in pieces:
        chunks.setdefault(piece.placement.name, []).append(Chunk(piece.piece.in_global, 0, 0, 0))
    for share in model.shares:
        for name, placement in share.placements.items():
            owned = tuple(chunks.get(placement.name, ()))
            for kind, dtype in buffer_of[share.optimizer, name].kinds.items():
                yield (
                    key_of(kind, placement.name),
                    TensorRecord(placement.global_shape, dtype_name(dtype), owned),
                )
