"""The host's checkpoint calls, for one optimizer and for a chain of them.

`save` and `load` are our own and need nothing of the host's. `save_parameter_state` and
`load_parameter_state` are what its training loop calls for checkpoints of its first kind,
`sharded_state_dict` for those of its `dist_checkpointing`.

[Note: boxes in dist_checkpointing] Every rank gives the boxes that it owns, each a `ShardedTensor`
of the whole param. Boxes form no regular grid, so they have no `axis_fragmentations`; the host's
torch_dist strategy then hands them to torch's DCP one by one, which checks that together they are
the whole tensor. Keys are "optimizer.distopt.KIND.NAME", NAME as on every host. What is no tensor
is one text, the manifest of checkpoint/manifest.py without files, in the part
of the state that is the same on all ranks: the host lets rank 0 alone write that, so it is joined
from all ranks first.

[Note: checkpoints of the host's own] What is to be filled is asked for before the host says where
from: in boxes, which a checkpoint of its own optimizer does not have. So `dist_checkpointing.load`
looks into its folder first. Of the host's own state it is asked for nothing, and `load_state_dict`
reads it from that folder, as `load` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor, serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint import is_checkpoint
from megatron_distopt.checkpoint.folder import not_found, optimizer_folder_of
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    TensorRecord,
    from_text,
    join,
    key_of,
    kind_of,
    name_of,
    to_text,
)
from megatron_distopt.checkpoint.param_groups import NOT_OPTIONS, take_options
from megatron_distopt.checkpoint.save import Written, contribution_of
from megatron_distopt.checkpoint.torch_state import moments_to_begin
from megatron_distopt.checkpoint.whole_model import OwnedPiece, WholeModel, owned_pieces
from megatron_distopt.comm import Group, exchange, exchange_together, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.megatron_core.nameless import is_nameless
from megatron_distopt.formats.megatron_core.torch_dist import recognises
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.formats.torch_files import open_dcp
from megatron_distopt.hosts.between_steps import not_copied
from megatron_distopt.hosts.megatron_core.facts import (
    GROUP_IDENTIFIERS,
    LAYER_WISE,
    LOAD_POINT,
    arguments,
)
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, whole_model_of
from megatron_distopt.hosts.megatron_core.resume import load_nameless
from megatron_distopt.hosts.megatron_core.step import StepCalls
from megatron_distopt.hosts.on_all_ranks import on_all_ranks
from megatron_distopt.hosts.patch_points import Replacement, rebind, replaced_since
from megatron_distopt.hosts.saving import Saver, head_entry, is_of_other_class, options_of_run
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner import IMPLEMENTATION, InnerChoice, count_updates, moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.main_params import by_group
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Where the text is in `sharded_state_dict()`; every other entry is one box.
HEAD = "distopt"
#: Where `dist_checkpointing.load` says in which folder state of the host's own is, see the note;
#: None for ours.
_FOLDER = "distopt_folder"
_PREFIX = "optimizer.distopt"
#: Of Megatron-LM's --ckpt-format: those that are written by `dist_checkpointing`.
_DISTRIBUTED_FORMATS = ("torch_dist", "zarr")
#: In errors, where a path would be: the host does not say which folder it reads.
_WHERE = "of the host"


class CheckpointCalls(StepCalls):
    """What a class of ours answers to the host's checkpointing, beside its training loop."""

    _saver: Saver | None = None

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickled")

    def check_is_there(self, what: str) -> None:
        """Collective: refuses `what` on all ranks where other code has emptied the state of one, or
        changed it."""

        def check() -> None:
            for optimizer in self.ours():
                if optimizer.counts is not None:
                    optimizer.counts.follow()
                optimizer.offloaded.check_is_there()
                if what == "save":
                    optimizer.written.check()

        if what == "load":
            self.wait_for_snapshot()
        raise_together(check, self.ours()[0].stats_group, what)

    def _settle(self) -> None:
        self.check_is_there("save")
        self.wait_for_snapshot()
        self._end_gathers()
        self._settle_script()

    def _all_sharded(self) -> Sequence[ShardedOptimizer]:
        return [optimizer.sharded for optimizer in self.ours()]

    def _gather_written(self) -> None:
        for optimizer in self.ours():
            optimizer.written.forget()
        for chunk in self._chunks():
            chunk.start_param_sync(force_sync=True)

    @on_all_ranks
    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other layout of the same model.

        Args:
            folder: of the checkpoint, the same on all ranks; made where it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the others.
        """
        self.check_is_there("save")
        self._saver = self._saver or Saver(self.ours()[0].sharded.config, Group.of())
        self._saver.save(Path(folder), whole_model_of(self.ours()))
        self.note_newest()

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background, where there is one; raises what went
        wrong in it."""
        if self._saver is not None:
            self._saver.finish()

    def offload_to_cpu(self) -> None:
        """Moves main params and moments of this rank into the host's memory, between two phases of
        training.

        A step is refused until `restore_from_cpu`; a save and a load work. fp32 params are their
        own main params, which stay in the host's param buffers. megatron-core has the call since
        0.15.
        """
        for optimizer in self.ours():
            _check_is_cut(optimizer.sharded.plan.choice, Feature.MOVED_STATE, "offload_to_cpu()")
        self.finish_saving()
        self.wait_for_snapshot()
        for optimizer in self.ours():
            optimizer.offloaded.move_to(torch.device(CPU))

    def restore_from_cpu(self) -> None:
        """Moves back what `offload_to_cpu` has moved."""
        for optimizer in self.ours():
            optimizer.offloaded.move_to(optimizer.sharded.device)

    @on_all_ranks
    def load(self, folder: str | Path) -> None:
        """Collective: takes what `save` wrote, at this or any other layout, and gathers the params.

        Args:
            folder: of the checkpoint, the same on all ranks; also one that the host's own optimizer
                wrote. One in flat buffers without names is taken at the layout that wrote it, after
                the model's weights were loaded.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the others.
        """
        self.finish_saving()
        self.check_is_there("load")
        path, everyone, resume_step = (
            Path(folder),
            Group.of(),
            self.ours()[0].sharded.config.resume_step,
        )
        nameless = exchange_together(
            lambda: not is_checkpoint(path) and is_nameless(path), everyone, "load"
        )
        with self._new_params():
            if any(nameless):
                load_nameless(path, self.ours(), everyone, resume_step=resume_step)
            else:
                load_any(path, whole_model_of(self.ours()), everyone, resume_step=resume_step)
        self.note_newest()

    @on_all_ranks
    def load_state_dict(self, state_dict: Any) -> None:
        """Collective: takes back `state_dict()`, or `sharded_state_dict()` that
        `dist_checkpointing.load` has filled.

        Raises:
            CheckpointError: on a rank that cannot take its state; nothing is changed on any rank
                then.
            RanksDisagreeError: on the others.
        """
        if isinstance(state_dict, Mapping) and isinstance(folder := state_dict.get(_FOLDER), str):
            self.load(folder)
            return
        self.check_is_there("load")
        if isinstance(state_dict, Mapping) and (HEAD in state_dict or _FOLDER in state_dict):
            model = whole_model_of(self.ours())
            with self._new_params():
                load_state(lambda: _loadable(model, state_dict), model, Group.of())
        elif self in self.ours():
            (optimizer,) = self.ours()
            raise_together(lambda: check_head(optimizer, state_dict), optimizer.stats_group, "load")
            load_head(optimizer, state_dict)
        else:  # the host's chain gives each its own
            super().load_state_dict(state_dict)
            for hook in self.hooks:
                hook.loaded()

    @contextmanager
    def _new_params(self) -> Iterator[None]:
        """Collective: gathers the params that the block has written.

        A gather that is in flight is ended first: it would write over them, and the host would take
        it for ours.
        """
        self._end_gathers()
        yield
        self._end_load()

    def _chunks(self) -> list[Any]:
        return list(
            dict.fromkeys(chunk for optimizer in self.ours() for chunk in optimizer.model_chunks)
        )

    def _end_gathers(self) -> None:
        for chunk in self._chunks():
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    def _begin_load(self) -> None:
        self.finish_saving()
        self.check_is_there("load")
        self._end_gathers()

    def _end_load(self) -> None:
        for counts in (optimizer.counts for optimizer in self.ours()):
            if counts is not None:
                counts.show()
        for hook in self.hooks:
            hook.loaded()
        self._gather_written()

    @on_all_ranks
    def save_parameter_state(self, filename: str) -> None:
        """Collective: `save`, into a folder beside the file that the host chose; or that file, if
        it is asked for."""
        if self._writes_hosts_own("save"):
            super().save_parameter_state(filename)
        else:
            self.save(optimizer_folder_of(exchange(filename, Group.of())[0]))

    def _writes_hosts_own(self, what: str) -> bool:
        """Collective: whether the methods of the host are to write, which go by [Note: aligned
        lists]."""
        self._newest = None  # of what the host saves
        if self.ours()[0].sharded.config.checkpoint_format != "gathered":
            return False
        if not hasattr(DistributedOptimizer, "_get_main_param_and_optimizer_states"):
            raise CheckpointError(
                "checkpoint_format is 'gathered', and must be 'distopt' with this megatron-core."
            )
        self.finish_saving()
        self.check_is_there(what)
        return True

    @on_all_ranks
    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Collective: `load`, from the folder beside the file that the host names, or from that
        file.

        Args:
            filename: of the host, another one on every tensor- and pipeline-parallel rank.
            update_legacy_format: kept for the host.
        """
        first = exchange(filename, Group.of())[0]
        folder = optimizer_folder_of(first)
        found = exchange((is_checkpoint(folder), Path(first).exists()), Group.of())[0]
        if not any(found):
            raise not_found(folder, filename)
        # The host's own has a file in each folder of a model-parallel rank; all of them together
        # are opened.
        self.load(folder if found[0] else folder.parent)

    @on_all_ranks
    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Collective: the state of this rank, for `dist_checkpointing` to save or to fill.

        Args:
            model_sharded_state_dict: for the host's own format; our names come from the model
                itself.
            is_loading: whether the host fills it.
            sharding_type, metadata: for the host's own format; ours is one for any layout.

        Raises:
            CheckpointError: this version of the host saves shards of a regular grid only.
        """
        _check_is_cut(
            self.ours()[0].sharded.plan.choice, Feature.HOST_BOXES, "sharded_state_dict()"
        )
        self.check_is_there("load" if is_loading else "save")
        if is_loading:
            look_at_loads()
            return _state_to_load(whole_model_of(self.ours()))
        if self._writes_hosts_own("save"):
            given = {"sharding_type": sharding_type, "metadata": metadata}
            given = {name: value for name, value in given.items() if value is not None}
            of_host: dict[str, Any] = super().sharded_state_dict(
                model_sharded_state_dict, False, **given
            )
            return of_host
        _takes_boxes(must=True)
        return _state_to_save(whole_model_of(self.ours()), Group.of())


def look_at_loads() -> Callable[[], None]:
    """Replaces `dist_checkpointing.load`, once, see [Note: checkpoints of the host's own]; returns
    the undo."""
    if not LOAD_POINT.is_replaced:
        rebind(
            [serialization.load],
            [Replacement(serialization.load, partial(_load, serialization.load))],
        )
    ours = serialization.load

    def undo() -> None:
        if serialization.load not in (ours, ours.original):
            raise replaced_since(LOAD_POINT)
        rebind([ours], [ours.original])

    return undo


def _load(
    original: Callable[..., Any],
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    ours = list(_entries_of_ours(sharded_state_dict))
    found = (
        exchange_together(lambda: _found_in(Path(checkpoint_dir)), Group.of(), "load")[0]
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
            entry[_FOLDER] = LocalNonpersistentObject(str(checkpoint_dir))
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
    """What `sharded_state_dict` returned, wherever a framework has put it."""
    if isinstance(state, dict) and _FOLDER in state:
        yield state
    elif isinstance(state, (dict, list)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _entries_of_ours(each)


def head_of(optimizer: OneOptimizer) -> dict[str, Any]:
    """What the host's own `state_dict` has: param groups without params, and the grad scaler."""
    if optimizer.counts is not None:
        optimizer.counts.follow()
    step = count_updates(optimizer.sharded.inner)
    updates = {} if step is None else {"step": step}
    groups = [
        {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION)}
        | updates
        for group in optimizer.param_groups
    ]
    state: dict[str, Any] = {
        "optimizer": {"param_groups": groups, **head_entry(optimizer.sharded.plan.choice)}
    }
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def check_head(optimizer: OneOptimizer, state: Mapping[str, Any]) -> None:
    """Refuses what `load_head` would not take."""
    remedy = (
        "Load what optimizer.state_dict() returned, or start from the weights with --no-load-optim."
    )
    entry = state.get("optimizer") if isinstance(state, Mapping) else None
    if not isinstance(entry, Mapping) or "param_groups" not in entry:
        found = ", ".join(map(str, state)) if isinstance(state, Mapping) and state else repr(state)
        raise CheckpointError(
            f"The optimizer state has {found}, and no 'optimizer' with param_groups. {remedy}"
        )
    if is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        return
    num_saved, num_groups = len(state["optimizer"]["param_groups"]), len(optimizer.param_groups)
    if num_saved != num_groups:
        found = (
            f"The number of param groups is {num_saved} in the state and {num_groups} in this "
            "optimizer"
        )
        raise CheckpointError(f"{found}. {remedy}")


def load_head(optimizer: OneOptimizer, state: Mapping[str, Any]) -> None:
    """Takes `head_of` back; the tensors come with `load_parameter_state`, which then goes by
    name."""
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
    """The saved group of each group: the one with its multipliers, which may be in another place;
    by number where multipliers differ, as after a change of them."""
    keys = [tuple(map(group.get, GROUP_IDENTIFIERS)) for group in groups]
    saved_of = {tuple(map(group.get, GROUP_IDENTIFIERS)): group for group in saved}
    is_one_to_one = len(saved_of) == len(keys) and saved_of.keys() == set(keys)
    return [saved_of[key] for key in keys] if is_one_to_one else saved


def check_script_can_save(choice: InnerChoice | None = None) -> None:
    """Refuses at the start what the first save of Megatron-LM's script would refuse: what was
    trained would be lost."""
    args = arguments()
    if not getattr(args, "save", None) or getattr(args, "no_save_optim", None):
        return
    ckpt_format = getattr(args, "ckpt_format", None)
    if getattr(args, LAYER_WISE, False) and ckpt_format == "torch":
        raise CheckpointError(
            "ckpt_format is 'torch', and must be torch_dist with --optimizer muon "
            "--use-distributed-optimizer. Write --ckpt-format torch_dist."
        )
    if ckpt_format in _DISTRIBUTED_FORMATS:
        _takes_boxes(must=True)
        if choice is not None:
            _check_is_cut(choice, Feature.HOST_BOXES, "sharded_state_dict()")


def _takes_boxes(*, must: bool = False) -> bool:
    """Whether `dist_checkpointing` does; before 0.14 the offset of a shard has to be a multiple of
    its shape."""
    try:
        ShardedTensor(
            "probe", None, torch.float32, (2,), (3,), (1,), None
        ).validate_metadata_integrity()
    except CheckpointingException as error:
        if must:
            raise CheckpointError(
                "sharded_state_dict was called with a megatron-core whose dist_checkpointing takes "
                "shards of a regular grid only. Call save(folder) and load(folder); with "
                "Megatron-LM's training script, type --ckpt-format torch."
            ) from error
        return False
    return True


def _check_is_cut(choice: InnerChoice, feature: Feature, call: str) -> None:
    """Refuses a call with an inner optimizer whose state does not consist of shards of params."""
    if choice.updates_whole_params:
        check_compatible(DistOptConfig(), {Feature.WHOLE_PARAMS: choice.name, feature: call})


def _state_to_save(model: WholeModel, everyone: Group) -> dict[str, Any]:
    """Collective: views of what this rank writes of the live state, and the text about all of
    it."""
    contribution = raise_together(lambda: contribution_of(model), everyone, "save")
    written = tuple(contribution.tensors)
    records = {
        one.key: TensorRecord(one.shape, dtype_name(one.tensor.dtype), ()) for one in written
    }
    head = join(exchange(replace(contribution.head, tensors=records), everyone))
    state: dict[str, Any] = {HEAD: to_text(head)}
    for one in (*written, *_not_begun(model)):
        whole, tensor, box = _whole_key(model, one.key), as_plain(one.tensor), one.box
        shard = ShardedTensor(
            whole, tensor, one.tensor.dtype, box.sizes, one.shape, box.offsets, None
        )
        state[_box_key(model, one.key, box)] = shard
    return state


def _state_to_load(model: WholeModel) -> dict[str, Any]:
    """What the host has to fill, each in a tensor that it makes on the CPU: a load that fails
    changes nothing.

    In fp32 whatever was saved: as wide as a main param, and what it takes does not depend on the
    checkpoint.
    """
    state: dict[str, Any] = {_FOLDER: LocalNonpersistentObject(None)}
    # Without boxes there are checkpoints of the host's own alone.
    for piece, key, box in _boxes(model) if _takes_boxes() else ():
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
    """All boxes that this rank owns, by piece and by key, of what a checkpoint of the host holds.

    Those are the same before the first step as after it: a run that loads has not begun, and the
    host asks for tensors before it has read which there are.
    """
    kinds = _kinds_by_name(model)
    for piece in owned_pieces(model):
        for kind in (MAIN, *kinds[piece.placement.name]):
            yield piece, key_of(kind, piece.placement.name), piece.piece.in_global


def _not_begun(model: WholeModel) -> Iterator[Written]:
    """Zeros for what the inner optimizer does not keep yet; the text does not know them, so nobody
    takes them over."""
    for piece, key, box in _boxes(model):
        if piece.share.writes(piece.shard.name) and key not in dict(piece.tensors()):
            yield Written(key, piece.placement.global_shape, box, torch.zeros(box.sizes))


def _kinds_by_name(model: WholeModel) -> dict[str, tuple[str, ...]]:
    """What is kept, or will be kept, for every element of the params of this rank beside main
    params."""
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


def _loadable(model: WholeModel, state: Mapping[str, Any]) -> Loadable:
    """What `_state_to_load` was filled with: the tensors that this run takes, in the boxes of this
    rank."""
    if HEAD not in state:
        remedy = (
            "Load its weights alone with --no-load-optim, or what this package or megatron-core "
            "has saved"
        )
        raise CheckpointError(f"The checkpoint has no optimizer state that can be read. {remedy}.")
    head = from_text(state[HEAD], _WHERE)
    boxes: dict[str, dict[Box, None]] = {}
    for _, key, box in _boxes(model):
        if _is_filled(state, _box_key(model, key, box), box):
            boxes.setdefault(_whole_key(model, key), {})[box] = None
    if not boxes and getattr(arguments(), "no_save_optim", False):
        text = (
            "The checkpoint has optimizer state, of which a script that is told --no-save-optim "
            "asks for no tensor"
        )
        raise CheckpointError(f"{text}. Drop --no-save-optim in the run that loads it.")
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
    """A load that is not strict leaves out what the checkpoint lacks; the plan then says what is
    missing."""
    found = state.get(key)
    if found is not None and not (isinstance(found, Tensor) and tuple(found.shape) == box.sizes):
        kind = f"{list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise CheckpointError(
            f"{key!r} in the optimizer state is {kind}, and must be a tensor of {list(box.sizes)}. "
            "Load what megatron.core.dist_checkpointing.load returned."
        )
    return found is not None
