"""The state that the host's checkpoint calls save and load.

`save` and `load` are our own and need nothing of the host. The host's training loop calls
`save_parameter_state` and `load_parameter_state` for checkpoints in the format torch, and
`sharded_state_dict` for those of its `dist_checkpointing`.

[Note: boxes in dist_checkpointing] Every rank gives the boxes that it owns, each as a
`ShardedTensor` of the whole param. Boxes form no regular grid, so they have no
`axis_fragmentations`. The host's torch_dist strategy then gives them to torch's DCP one by one,
which checks that together they are the whole tensor. Keys are "optimizer.distopt.KIND.NAME", with
the NAME that a param has on every host. Everything else is one text: the manifest of
checkpoint/manifest.py without files. It is in the part of the state that is the same on all ranks.
Only rank 0 writes that part, so the text is joined from all ranks first.

[Note: checkpoints of the host's own] The host asks which tensors to fill before it says which
checkpoint it loads. We ask for boxes, which a checkpoint of the host's own optimizer does not have.
So a replaced `dist_checkpointing.load` looks into the folder first. For a checkpoint of the host's
own it drops the boxes, and `load_state_dict` reads the state from that folder, as `load` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor, serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    TensorRecord,
    join,
    key_of,
    kind_of,
    name_of,
)
from megatron_distopt.checkpoint.manifest_text import from_text, to_text
from megatron_distopt.checkpoint.param_groups import NOT_OPTIONS, take_options
from megatron_distopt.checkpoint.save import TensorToWrite, contribution_of
from megatron_distopt.checkpoint.torch_state import moments_to_begin
from megatron_distopt.checkpoint.whole_model import OwnedPiece, WholeModel, owned_pieces
from megatron_distopt.comm import Group, all_gather_objects, all_gather_results, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.megatron_core.torch_dist import recognises
from megatron_distopt.formats.torch_files import open_dcp
from megatron_distopt.hosts.megatron.saving import head_with, is_of_other_class, options_of_run
from megatron_distopt.hosts.megatron_core.facts import (
    GROUP_IDENTIFIERS,
    LAYER_WISE,
    LOAD_POINT,
    arguments,
)
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.inner_options import IMPLEMENTATION
from megatron_distopt.optimizer.inner_state import count_updates, moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.main_params import by_group
from megatron_distopt.patch_points import Replacement, Undos, put_in

#: Key of the text in `sharded_state_dict()`; every other entry is one box.
HEAD = "distopt"
#: Key of the folder from which `load_state_dict` reads state of the host's own, see the note; None
#: for state of ours.
FOLDER = "distopt_folder"
_PREFIX = "optimizer.distopt"
#: Values of Megatron-LM's --ckpt-format that `dist_checkpointing` writes.
_DISTRIBUTED_FORMATS = ("torch_dist", "zarr")
#: Stands for a path in errors, because the host does not say which folder it reads.
_WHERE = "of the host"


def look_at_loads(undos: Undos) -> None:
    """Replaces `dist_checkpointing.load`, once, see [Note: checkpoints of the host's own]."""
    load = serialization.load
    if not LOAD_POINT.is_replaced:
        put_in(LOAD_POINT, Replacement(load, partial(_load, load)), undos)


def _load(
    original: Callable[..., Any],
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    ours = list(_entries_of_ours(sharded_state_dict))
    found = (
        all_gather_results(lambda: _found_in(Path(checkpoint_dir)), Group.of(), "load")[0]
        if ours
        else None
    )
    is_of_host, has_averages = found or (False, True)
    for entry in ours:
        for key in [
            key for key in entry if is_of_host or (kind_of(key) == AVERAGE and not has_averages)
        ]:
            del entry[key]
        if is_of_host:
            entry[FOLDER] = LocalNonpersistentObject(str(checkpoint_dir))
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def _found_in(path: Path) -> tuple[bool, bool]:
    """Whether a folder has state of the host's own, and whether it may have averages."""
    is_known = recognises(path)
    keys = list(open_dcp(path).tensors) if is_known else []
    kinds = {
        key.removeprefix(f"{_PREFIX}.").partition(".")[0]
        for key in keys
        if key.startswith(f"{_PREFIX}.")
    }
    return is_known and not kinds, AVERAGE in kinds or not is_known


def _entries_of_ours(state: Any) -> Iterator[dict[str, Any]]:
    """Finds the dicts that `sharded_state_dict` returned, wherever a framework has put them."""
    if isinstance(state, dict) and FOLDER in state:
        yield state
    elif isinstance(state, (dict, list)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _entries_of_ours(each)


def head_of(optimizer: OneOptimizer) -> dict[str, Any]:
    """The content of the host's own `state_dict`: param groups without params, and the grad
    scaler."""
    if optimizer.counts is not None:
        optimizer.counts.follow()
    step = count_updates(optimizer.sharded.inner)
    updates = {} if step is None else {"step": step}
    groups = [
        {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION)}
        | updates
        for group in optimizer.param_groups
    ]
    return head_with(groups, optimizer.sharded.plan.choice, optimizer.grad_scaler)


def check_head(optimizer: OneOptimizer, state: Mapping[str, Any]) -> None:
    """Refuses a state that `load_head` cannot load."""
    remedy = (
        "Load what optimizer.state_dict() returned, or start from the weights with --no-load-optim."
    )
    entry = state.get("optimizer") if isinstance(state, Mapping) else None
    if not isinstance(entry, Mapping) or "param_groups" not in entry:
        found = (
            f"a dict with {', '.join(map(str, state))}"
            if isinstance(state, Mapping) and state
            else repr(state)
        )
        raise CheckpointError(
            f"The optimizer state is {found}, but it must have 'optimizer' with param_groups. "
            f"{remedy}"
        )
    if is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        return
    num_saved, num_groups = len(state["optimizer"]["param_groups"]), len(optimizer.param_groups)
    if num_saved != num_groups:
        raise CheckpointError(
            f"The saved state has {num_saved} param groups, but this optimizer has {num_groups}. "
            f"{remedy}"
        )


def load_head(optimizer: OneOptimizer, state: Mapping[str, Any]) -> None:
    """Loads what `head_of` returned. `load_parameter_state` loads the tensors, by name."""
    if not is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        pairs = [
            (
                group,
                {
                    key: value
                    for key, value in saved.items()
                    if key in group and key not in NOT_OPTIONS
                },
            )
            for group, saved in zip(
                optimizer.param_groups,
                _in_order(optimizer.param_groups, state["optimizer"]["param_groups"]),
                strict=True,
            )
        ]
        take_options(pairs, optimizer.stats_group.rank, options_of_run(arguments()))
    if optimizer.grad_scaler is not None and "grad_scaler" in state:
        optimizer.grad_scaler.load_state_dict(state["grad_scaler"])


def _in_order(groups: Sequence[Any], saved: Sequence[Any]) -> Sequence[Any]:
    """The saved group for each group: the one with equal multipliers, at whatever place. If the
    multipliers do not match, as after a change of them, groups are matched by number."""
    keys = [tuple(map(group.get, GROUP_IDENTIFIERS)) for group in groups]
    saved_of = {tuple(map(group.get, GROUP_IDENTIFIERS)): group for group in saved}
    is_one_to_one = len(saved_of) == len(keys) and saved_of.keys() == set(keys)
    return [saved_of[key] for key in keys] if is_one_to_one else saved


def check_script_can_save(choice: InnerChoice | None = None) -> None:
    """Refuses at the start what the first save of Megatron-LM's script would refuse, because then
    the training until there would be lost."""
    args = arguments()
    if not getattr(args, "save", None) or getattr(args, "no_save_optim", None):
        return
    ckpt_format = getattr(args, "ckpt_format", None)
    if getattr(args, LAYER_WISE, False) and ckpt_format == "torch":
        raise CheckpointError(
            "ckpt_format is 'torch', but with --optimizer muon --use-distributed-optimizer it must "
            "be torch_dist. Write --ckpt-format torch_dist."
        )
    if ckpt_format in _DISTRIBUTED_FORMATS:
        takes_boxes(must=True)
        if choice is not None:
            check_is_cut(choice, Feature.HOST_BOXES, "sharded_state_dict()")


def takes_boxes(*, must: bool = False) -> bool:
    """Whether `dist_checkpointing` takes boxes. Before 0.14 the offset of a shard has to be a
    multiple of its shape."""
    try:
        ShardedTensor(
            "probe", None, torch.float32, (2,), (3,), (1,), None
        ).validate_metadata_integrity()
    except CheckpointingException as error:
        if must:
            raise CheckpointError(
                "sharded_state_dict was called, but dist_checkpointing of this megatron-core saves "
                "only shards of a regular grid. Call save(folder) and load(folder); with "
                "Megatron-LM's training script, write --ckpt-format torch."
            ) from error
        return False
    return True


def check_is_cut(choice: InnerChoice, feature: Feature, call: str) -> None:
    """Refuses a call if the inner optimizer updates whole params, so its state is not sharded by
    element."""
    if choice.updates_whole_params:
        check_compatible(DistOptConfig(), {Feature.WHOLE_PARAMS: choice.name, feature: call})


def state_to_save(model: WholeModel, everyone: Group) -> dict[str, Any]:
    """Collective: returns views of the state that this rank writes, and the text about the whole
    state."""
    contribution = raise_together(lambda: contribution_of(model), everyone, "save")
    written = tuple(contribution.tensors)
    records = {
        one.key: TensorRecord(one.shape, dtype_name(one.tensor.dtype), ()) for one in written
    }
    head = join(all_gather_objects(replace(contribution.head, tensors=records), everyone))
    state: dict[str, Any] = {HEAD: to_text(head)}
    for one in (*written, *_not_begun(model)):
        whole, tensor, box = _whole_key(model, one.key), as_plain(one.tensor), one.box
        shard = ShardedTensor(
            whole, tensor, one.tensor.dtype, box.sizes, one.shape, box.offsets, None
        )
        state[_box_key(model, one.key, box)] = shard
    return state


def state_to_load(model: WholeModel) -> dict[str, Any]:
    """The boxes that the host has to fill. It fills tensors on the CPU that it makes itself, so a
    load that fails changes nothing.

    They are fp32 whatever was saved, so that they do not depend on the checkpoint.
    """
    state: dict[str, Any] = {FOLDER: LocalNonpersistentObject(None)}
    # If the host takes no boxes, only checkpoints of the host's own exist.
    for piece, key, box in _boxes(model) if takes_boxes() else ():
        replica = 0 if piece.share.writes(piece.shard.name) else 1
        sizes = (
            None,
            torch.float32,
            box.sizes,
            piece.placement.global_shape,
            box.offsets,
            None,
            replica,
        )
        shard = ShardedTensor(
            _whole_key(model, key), *sizes, allow_shape_mismatch=piece.placement.is_padded
        )
        state[_box_key(model, key, box)] = shard
    return state


def _box_key(model: WholeModel, key: str, box: Box) -> str:
    return f"{kind_of(key)}/{model.canonical(name_of(key))} {list(box.offsets)} {list(box.sizes)}"


def _whole_key(model: WholeModel, key: str) -> str:
    return f"{_PREFIX}.{kind_of(key)}.{model.canonical(name_of(key))}"


def _boxes(model: WholeModel) -> Iterator[tuple[OwnedPiece, str, Box]]:
    """All boxes that this rank owns in a checkpoint of the host, with their piece and key.

    They are the same before and after the first step: a run that loads has made no step, and the
    host asks for tensors before it reads which there are.
    """
    kinds = _kinds_by_name(model)
    for piece in owned_pieces(model):
        for kind in (MAIN, *kinds[piece.placement.name]):
            yield piece, key_of(kind, piece.placement.name), piece.piece.in_global


def _not_begun(model: WholeModel) -> Iterator[TensorToWrite]:
    """Zeros for state that the inner optimizer does not keep yet. The text does not list them, so
    no load uses them."""
    for piece, key, box in _boxes(model):
        if piece.share.writes(piece.shard.name) and key not in dict(piece.tensors()):
            yield TensorToWrite(key, piece.placement.global_shape, box, torch.zeros(box.sizes))


def _kinds_by_name(model: WholeModel) -> dict[str, tuple[str, ...]]:
    """The kinds of state in addition to main params that are kept, or will be kept, for every
    element of this rank's params."""
    kinds_by_name: dict[str, tuple[str, ...]] = {}
    for share in model.shares:
        optimizer = share.optimizer
        members = by_group(optimizer.flat_params)
        for number, group in enumerate(optimizer.plan.groups):
            kinds = {
                kind for flat in members[number] for kind in moments_of(optimizer.inner, flat.main)
            }
            found = tuple(sorted(kinds or moments_to_begin(optimizer, number)))
            found += (AVERAGE,) if optimizer.averages is not None else ()
            kinds_by_name |= {share.placements[name].name: found for name in group.names}
    return kinds_by_name


def loadable(model: WholeModel, state: Mapping[str, Any]) -> Loadable:
    """The filled boxes of `state_to_load` that this run can use."""
    if HEAD not in state:
        raise CheckpointError(
            "The checkpoint has no optimizer state that can be read. Load only its weights with "
            "--no-load-optim, or load a checkpoint that this package or megatron-core has saved."
        )
    head = from_text(state[HEAD], _WHERE)
    boxes: dict[str, dict[Box, None]] = {}
    for _, key, box in _boxes(model):
        if _is_filled(state, _box_key(model, key, box), box):
            boxes.setdefault(_whole_key(model, key), {})[box] = None
    if not boxes and getattr(arguments(), "no_save_optim", False):
        raise CheckpointError(
            "The checkpoint has optimizer state, but with --no-save-optim the host's script does "
            "not load it. Drop --no-save-optim in this run."
        )
    kinds = {model.canonical(name): found for name, found in _kinds_by_name(model).items()}
    tensors = {
        key: replace(
            record,
            chunks=tuple(Chunk(box, 0, 0, 0) for box in boxes.get(_whole_key(model, key), ())),
        )
        for key, record in head.tensors.items()
        if kind_of(key) in (MAIN, AVERAGE, *kinds.get(model.canonical(name_of(key)), ()))
    }

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        for one in reads:
            yield one, state[_box_key(model, one.key, one.chunk.box)][one.in_chunk.as_slices()]

    return Loadable(replace(head, tensors=tensors), _WHERE, read)


def _is_filled(state: Mapping[str, Any], key: str, box: Box) -> bool:
    """Whether the host has filled a box. A load that is not strict leaves out what the checkpoint
    does not have; the load plan then says what is missing."""
    found = state.get(key)
    if found is not None and not (isinstance(found, Tensor) and tuple(found.shape) == box.sizes):
        kind = (
            f"of shape {list(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}"
        )
        raise CheckpointError(
            f"{key!r} in the optimizer state is {kind}, but it must be a tensor of shape "
            f"{list(box.sizes)}. Load what megatron.core.dist_checkpointing.load returned."
        )
    return found is not None
