"""Resumes from a checkpoint of the host's own optimizer without names, at the layout that wrote it.

The saved flat buffers do not say which params they hold. The buffers of the run do, if they are the
same ones. So they must have as many buckets of the same lengths, and the saved main params must
round to the model's weights, which the host loads first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable
from megatron_distopt.checkpoint.manifest import MAIN, Manifest
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, shards_of
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import (
    check_rounds,
    check_step,
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
from megatron_distopt.hosts.megatron.own_shards import group_record, loadable_of_shards
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, whole_model_of
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: The keys by which the host identifies param groups.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_OTHER_WEIGHTS = (
    "Load the model's weights of the same iteration first, with the layout and bucket size of the "
    f"saved run. {REMEDY}"
)
#: The saved buffer of a param, by its name in an optimizer.
_Buffers = dict[tuple[ShardedOptimizer, str], NamelessBuffer]


def load_nameless(path: Path, optimizers: Sequence[OneOptimizer], everyone: Group) -> None:
    """Collective: loads the state in an iteration folder of the host, without gathering the params.
    The model must have the weights of the same iteration."""
    model = whole_model_of(optimizers)
    load_state(lambda: _loadable(path, optimizers, model), model, everyone)


def _loadable(path: Path, optimizers: Sequence[OneOptimizer], model: WholeModel) -> Loadable:
    saved: list[NamelessOptimizer] = []
    buffer_of: _Buffers = {}
    groups: list[GroupRecord] = []
    for number, (optimizer, share) in enumerate(zip(optimizers, model.shares, strict=True)):
        if not optimizer.buffers:
            continue
        opened = open_nameless(path, _place_of(optimizer, number))
        saved.append(opened)
        groups += _records(opened, optimizer, share, path)
        for adopted, buffer in zip(share.optimizer.buffers, opened.buffers, strict=True):
            for name in adopted.layout.slot_of:
                buffer_of[share.optimizer, name] = buffer
        # Refuses buffers in which params lie at other places, and a model with other weights.
        for flat, shard in shards_of(share.optimizer):
            buffer = buffer_of[share.optimizer, shard.name]
            main = buffer.read(MAIN, shard.bucket, shard.in_bucket)
            model_shard = flat.cut(flat.model, shard).detach().to(main.device)
            check_rounds(main, model_shard, shard.name, path, _OTHER_WEIGHTS)
    scaler = next((optimizer.grad_scaler for optimizer in saved if optimizer.grad_scaler), None)
    inner = inner_name(kind for buffer in buffer_of.values() for kind in buffer.kinds)
    manifest = Manifest("", (), {}, tuple(groups), inner, loss_scale_of(scaler))
    head = with_step(manifest, optimizers[0].sharded.config.resume_step, path)
    check_step(head, path)

    def kinds_of(share: Share, name: str) -> Mapping[str, torch.dtype]:
        return buffer_of[share.optimizer, name].kinds

    def values_of(piece: OwnedPiece, kind: str) -> Tensor:
        shard = piece.shard
        in_shard = piece.piece.in_param.relative_to(shard.in_param.start)
        in_bucket = in_shard.moved_by(shard.in_bucket.start)
        return buffer_of[piece.share.optimizer, shard.name].read(kind, shard.bucket, in_bucket)

    return loadable_of_shards(model, head, str(path), kinds_of, values_of)


def _place_of(optimizer: OneOptimizer, number: int) -> OptimizerPlace:
    """The place of an optimizer's state, in the folder that the host's training script names."""
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
    """Records of the saved groups with the names of the run's groups: the host makes the same
    groups in the same order in every run."""
    theirs, ours = (
        [tuple(group.get(key) for key in _IDENTITY) for group in groups]
        for groups in (saved.groups, optimizer.param_groups)
    )
    if theirs != ours:
        raise CheckpointError(
            f"{', '.join(_IDENTITY)} of the param groups are {theirs} in {path}, but {ours} in "
            "this run. Resume with the param groups of the saved run."
        )
    step = the_step(saved.groups, path)
    for group, planned in zip(saved.groups, share.optimizer.plan.groups, strict=True):
        yield group_record(share, planned.names, group, step)
