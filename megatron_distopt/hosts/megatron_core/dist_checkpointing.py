"""The state as megatron-core's `dist_checkpointing` saves and loads it.

Every rank gives the boxes that it owns, each a `ShardedTensor` of the whole param. Boxes form no regular grid, so they
have no `axis_fragmentations`; the host's torch_dist strategy then hands them to torch's DCP one by one, which checks
that together they are the whole tensor. Keys are "optimizer.distopt.KIND.NAME", NAME as on every host.

What is no tensor is one text, the manifest of checkpoint/manifest.py without files, in the part of the state that is
the same on all ranks: the host lets rank 0 alone write that, so it is joined from all ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    Manifest,
    TensorRecord,
    check_joined,
    from_text,
    join,
    key_of,
    kind_of,
    name_of,
    to_text,
)
from megatron_distopt.checkpoint.save import Written, contribution_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, WholeModel, flat_params_of, owned_pieces
from megatron_distopt.comm import Group, exchange, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.megatron_core.facts import LAYER_WISE
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.inner import InnerChoice, moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Where the text is in the state; every other entry is one box.
HEAD = "distopt"
_PREFIX = "optimizer.distopt"
#: Of Megatron-LM's --ckpt-format: those that are written by `dist_checkpointing`.
_DISTRIBUTED_FORMATS = ("torch_dist", "zarr")
_REMEDY = "Call save(folder) and load(folder); with Megatron-LM's training script, type --ckpt-format torch"
#: In errors, where a path would be: the host does not say which folder it reads.
_WHERE = "of the host"


def check_takes_boxes() -> None:
    """Checks that the host's `dist_checkpointing` takes shards of any shape.

    Until 0.14 the offset of a shard has to be a multiple of its shape, and ours is where the buffers are cut.

    Raises:
        CheckpointError
    """
    try:
        ShardedTensor("probe", None, torch.float32, (2,), (3,), (1,), None).validate_metadata_integrity()
    except CheckpointingException as error:
        got = "called with a megatron-core whose dist_checkpointing takes shards of a regular grid only"
        raise CheckpointError(refusal("sharded_state_dict", got, "give shards of any shape", _REMEDY)) from error


def check_has_boxes(choice: InnerChoice) -> None:
    """Refuses an inner optimizer whose state does not consist of shards of params.

    Raises:
        ConfigError
    """
    if choice.updates_whole_params:
        features = {Feature.WHOLE_PARAMS: choice.name, Feature.HOST_BOXES: "sharded_state_dict()"}
        check_compatible(DistOptConfig(), features)


def check_script_can_save(script: ModuleType | None, choice: InnerChoice | None = None) -> None:
    """Refuses at the start what the first save of Megatron-LM's training script would refuse: what was trained is lost.

    Args:
        script: its module with the arguments; None where another script trains.
        choice: the inner optimizer, where it is known.

    Raises:
        CheckpointError: it is going to save through `dist_checkpointing`, which cannot take our shards, or by a method
            that only the host's layer-wise optimizer has.
    """
    args = getattr(script, "_GLOBAL_ARGS", None)
    is_saving = getattr(args, "save", None) and not getattr(args, "no_save_optim", None)
    if is_saving and getattr(args, LAYER_WISE, False) and getattr(args, "ckpt_format", None) == "torch":
        rule = "be torch_dist with --optimizer muon --use-distributed-optimizer"
        raise CheckpointError(refusal("ckpt_format", "'torch'", rule, "Write --ckpt-format torch_dist"))
    if is_saving and getattr(args, "ckpt_format", None) in _DISTRIBUTED_FORMATS:
        check_takes_boxes()
        if choice is not None:
            check_has_boxes(choice)


def state_to_save(model: WholeModel, everyone: Group) -> dict[str, Any]:
    """Collective: views of what this rank writes of the live state, and the text about all of it.

    Args:
        model: with this rank's optimizers.
        everyone: all ranks that hold a part of the model.

    Raises:
        CheckpointError: the inner optimizer keeps something that cannot be saved by param, or a param has no writer.
        RanksDisagreeError: on the ranks that could save theirs, where another could not.
    """
    contribution = raise_together(lambda: contribution_of(model), everyone, "save")
    written = tuple(contribution.tensors)
    records = {each.key: TensorRecord(each.shape, dtype_name(each.tensor.dtype), ()) for each in written}
    head = join(exchange(replace(contribution.head, tensors=records), everyone))
    check_joined(head)
    shards = {_entry(model, each.key, each.box): _shard(model, each) for each in (*written, *_not_begun(model))}
    return {HEAD: to_text(head), **shards}


def state_to_load(model: WholeModel) -> dict[str, Any]:
    """What the host has to fill, each in a tensor that it makes on the CPU: a load that fails changes nothing.

    Args:
        model: that will take the state.
    """
    return {
        _entry(model, key, piece.piece.in_global): _shard_to_fill(model, key, piece)
        for piece, keys in _pieces(model)
        for key in keys
    }


def load_sharded_state(model: WholeModel, state: Mapping[str, Any], everyone: Group) -> None:
    """Collective: takes over what the host has filled; the params are not gathered yet.

    Args:
        model: that takes the state.
        state: `state_to_load` as the host has filled it, with the text of `state_to_save`.
        everyone: all ranks that hold a part of the model.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    load_state(lambda: _loadable(model, state), model, everyone)


def _entry(model: WholeModel, key: str, box: Box) -> str:
    """Of a box in the state."""
    return f"{kind_of(key)}/{model.canonical(name_of(key))} {list(box.offsets)} {list(box.sizes)}"


def _key(model: WholeModel, key: str) -> str:
    """Of a whole tensor in the host's checkpoint."""
    return f"{_PREFIX}.{kind_of(key)}.{model.canonical(name_of(key))}"


def _shard(model: WholeModel, each: Written) -> ShardedTensor:
    dtype, box = each.tensor.dtype, each.box
    return ShardedTensor(_key(model, each.key), as_plain(each.tensor), dtype, box.sizes, each.shape, box.offsets, None)


def _shard_to_fill(model: WholeModel, key: str, piece: OwnedPiece) -> ShardedTensor:
    """In fp32 whatever was saved: as wide as a main param, and what it takes does not depend on the checkpoint."""
    box, shape = piece.piece.in_global, piece.placement.global_shape
    return ShardedTensor(
        _key(model, key),
        None,
        torch.float32,
        box.sizes,
        shape,
        box.offsets,
        None,
        replica_id=0 if piece.share.writes(piece.shard.name) else 1,
        allow_shape_mismatch=piece.placement.is_padded,
    )


def _pieces(model: WholeModel) -> Iterator[tuple[OwnedPiece, tuple[str, ...]]]:
    """All that this rank owns, with the keys of what a checkpoint of the host holds of it.

    That is the same before the first step as after it: a run that loads has not begun, and the host asks for tensors
    before it has read which there are.
    """
    kinds = _kinds_by_name(model)
    for piece in owned_pieces(model):
        name = piece.placement.name
        yield piece, tuple(key_of(kind, name) for kind in (MAIN, *kinds[name]))


def _not_begun(model: WholeModel) -> Iterator[Written]:
    """Zeros for what the inner optimizer does not keep yet; the text does not know them, so nobody takes them over."""
    for piece, keys in _pieces(model):
        known = dict(piece.tensors())
        for key in keys if piece.share.writes(piece.shard.name) else ():
            if key not in known:
                box = piece.piece.in_global
                yield Written(key, piece.placement.global_shape, box, torch.zeros(box.sizes))


def _kinds_by_name(model: WholeModel) -> dict[str, tuple[str, ...]]:
    """What the inner optimizer keeps, or will keep, for every element of the params of this rank."""
    return {
        share.placements[name].name: kinds
        for share in model.shares
        for number, group in enumerate(share.optimizer.plan.groups)
        for kinds in [_kinds_of_group(share.optimizer, number)]
        for name in group.names
    }


def _kinds_of_group(optimizer: ShardedOptimizer, number: int) -> tuple[str, ...]:
    choice = optimizer.plan.choice
    kept = {kind for flat in flat_params_of(optimizer, number) for kind in moments_of(optimizer.inner, flat.main)}
    return tuple(sorted(kept | choice.moments if choice.is_adam else kept or _kinds_in_a_trial(optimizer, number)))


def _kinds_in_a_trial(optimizer: ShardedOptimizer, number: int) -> set[str]:
    """Of a class that says it after its first step: another instance of it takes one with a param of its own."""
    param = torch.zeros(3, device=optimizer.buffers[0].grad.device)
    param.grad = torch.zeros_like(param)
    inner = optimizer.plan.choice.build([{**optimizer.inner.param_groups[number], "params": [param]}])
    inner.step()
    return set(moments_of(inner, param))


def _loadable(model: WholeModel, state: Mapping[str, Any]) -> Loadable:
    head = from_text(state[HEAD], _WHERE)

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        for each in reads:
            yield each, state[_entry(model, each.key, each.chunk.box)][each.in_chunk.as_slices()]

    return Loadable(replace(head, tensors=_tensors_in(state, head, model)), _WHERE, read)


def _tensors_in(state: Mapping[str, Any], head: Manifest, model: WholeModel) -> dict[str, TensorRecord]:
    """What the checkpoint holds and this run takes; its boxes are those of this rank, which the host has read."""
    boxes: dict[str, dict[Box, None]] = {}
    for piece, keys in _pieces(model):
        for key in keys:
            if _is_filled(state, model, key, piece.piece.in_global):
                boxes.setdefault(_key(model, key), {})[piece.piece.in_global] = None
    kinds = {model.canonical(name): found for name, found in _kinds_by_name(model).items()}
    return {
        key: replace(record, chunks=tuple(Chunk(box, 0, 0, 0) for box in boxes.get(_key(model, key), ())))
        for key, record in head.tensors.items()
        if kind_of(key) in (MAIN, *kinds.get(model.canonical(name_of(key)), ()))
    }


def _is_filled(state: Mapping[str, Any], model: WholeModel, key: str, box: Box) -> bool:
    """A load that is not strict leaves out what the checkpoint lacks; the plan then says what is missing."""
    found = state.get(_entry(model, key, box))
    if found is None:
        return False
    if not isinstance(found, Tensor) or tuple(found.shape) != box.sizes:
        got = f"{list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        rule, remedy = f"be a tensor of {list(box.sizes)}", "Load what megatron.core.dist_checkpointing.load returned"
        raise CheckpointError(refusal(f"{_entry(model, key, box)!r} in the optimizer state", got, rule, remedy))
    return True
