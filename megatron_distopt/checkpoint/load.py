"""Loading by all ranks: each reads what it owns into its live state, without a second copy of the state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.load_groups import GroupMatch
from megatron_distopt.checkpoint.load_plan import LoadPlan, Read, plan_load
from megatron_distopt.checkpoint.manifest import MAIN, FileRecord, Manifest, no_collection, some_of
from megatron_distopt.checkpoint.owned_state import owned_by_name, take_owned
from megatron_distopt.checkpoint.param_groups import NOT_OPTIONS, Scalar
from megatron_distopt.checkpoint.saved_by_name import SavedState, check_names
from megatron_distopt.checkpoint.tensor_file import TensorReader, crc_of_file
from megatron_distopt.checkpoint.whole_model import (
    WholeModel,
    flat_params_of,
    load_loss_scale,
    remember_loaded,
    shards_of,
)
from megatron_distopt.comm import Group, exchange, exchange_together, raise_together
from megatron_distopt.config import ADAM_NAMES
from megatron_distopt.errors import CheckpointError, InvariantError, refusal
from megatron_distopt.optimizer.inner import moment_to_fill, part_for, restore, restore_group
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.flat_muon import FlatMuon
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True, eq=False)
class Loadable:
    """A state that can be loaded, wherever its tensors come from.

    Args:
        manifest: what the state consists of.
        where: the place of the state, for errors.
        read: yields the tensors of a plan's reads, in their order.
        verify: raises where something that a plan needs cannot be read. It may keep what it reads, for `read`.
    """

    manifest: Manifest
    where: str
    read: Callable[[LoadPlan], Iterator[tuple[Read, Tensor]]]
    verify: Callable[[LoadPlan], None] = lambda plan: None


def load_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards of a checkpoint, whatever the layout they were saved in.

    Each file is verified by one rank.

    Args:
        folder: of the checkpoint.
        model, everyone: as of `load_state`.

    Raises: as of `load_state`.
    """
    load_state(lambda: loadable_checkpoint(folder, everyone.rank, everyone.size), model, everyone)


@no_collection()
def load_state(opened: Callable[[], Loadable], model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards; the params are not gathered yet.

    Everything is verified on all ranks before anything is changed on one.

    Args:
        opened: opens the state; called once, on every rank.
        model: with this rank's optimizers.
        everyone: all ranks that hold a part of the model.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    names = _names_of_all(model, everyone)
    checked: list[tuple[Loadable, LoadPlan]] = []

    def check() -> str:
        state = opened()
        checked.append((state, check_state(state, model, names)))
        return state.manifest.save_id

    save_ids = exchange_together(check, everyone, "load")
    state, plan = checked[0]
    _check_same_save(state.where, save_ids)
    raise_together(lambda: take_state(state, plan, model), everyone, "load")


def _names_of_all(model: WholeModel, everyone: Group) -> set[str]:
    """Collective: names in the whole model of the params that train on any rank.

    Args: as of `load_state`.
    """
    return {name for names in exchange(_names_begun_here(model), everyone) for name in names}


def _names_begun_here(model: WholeModel) -> list[str]:
    """Names of the params of which this rank owns the first element; all ranks together name every param."""
    return [
        share.placements[shard.name].name
        for share in model.shares
        for _, shard in shards_of(share.optimizer)
        if shard.in_param.start == 0
    ]


def check_state(state: Loadable, model: WholeModel, names: Iterable[str]) -> LoadPlan:
    """Checks a state against the model, and plans what this rank reads of it; nothing is changed.

    Args:
        state: to load.
        model: with this rank's optimizers.
        names: in the whole model, of the params of all ranks.

    Raises:
        CheckpointError: the state is damaged, or of another model.
    """
    check_names(state.manifest, state.where, model, names)
    plan = plan_load(state.manifest, state.where, model)
    state.verify(plan)
    return plan


def _check_same_save(where: str, save_ids: Sequence[str]) -> None:
    """Raises where another run has saved there while the ranks were reading."""
    if len(set(save_ids)) > 1:
        got, rule = f"saves {', '.join(sorted(set(save_ids)))} on different ranks", "stay as it is while it is read"
        raise CheckpointError(refusal(f"checkpoint {where}", got, rule, "Let one run save there at a time"))


@torch.no_grad()
def take_state(state: Loadable, plan: LoadPlan, model: WholeModel) -> None:
    """Reads what was planned into the live state; the params are not gathered yet.

    In addition to the state, which is filled in place where it has the right dtype, at most one tensor is in memory.

    Args:
        state: as it was given to `check_state`.
        plan: as `check_state` returned it.
        model: for which the plan was made.

    Raises:
        CheckpointError: a file was removed or changed since it was verified; a part of the state is loaded then.
    """
    if separate(plan.groups):
        plan = plan_load(state.manifest, state.where, model)
    fill_groups(plan.groups, state.read(plan), lambda optimizer: _is_same_class(plan.manifest.inner, optimizer))
    _fill_owned(state, plan, model)
    for optimizer in (share.optimizer for share in model.shares):
        load_loss_scale(optimizer.loss_scale, plan.manifest.loss_scale)
        optimizer.num_skipped = plan.manifest.num_skipped
        for flat in optimizer.flat_params:
            flat.write_model()
    remember_loaded(model, plan.manifest)
    _say_anew(plan.anew, state.where)


def _fill_owned(state: Loadable, plan: LoadPlan, model: WholeModel) -> None:
    """Gives the owners of whole params what they keep, or lets them begin anew."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for read, tensor in state.read(replace(plan, reads=tuple(plan.owned))):
        found.setdefault(plan.owned[read], []).append((read.key, tensor))
    for share in model.shares:
        for name, (owned, options) in owned_by_name(share).items():
            take_owned(owned, options, found.get(name, ()), state.where)


def _say_anew(names: Sequence[str], where: str) -> None:
    """See [Note: another kind of optimizer] in saved_by_name.py."""
    if names:
        text = "optimizers of other kinds, or of other parts of params, share no state: that of %s in %s begins anew"
        _log.warning(text, some_of(names), where)


def _is_same_class(saved: str, optimizer: ShardedOptimizer) -> bool:
    """Whether the inner optimizer computes what the saved one did; all of Adam's implementations do."""
    adams = {*ADAM_NAMES, torch.optim.Adam.__name__, torch.optim.AdamW.__name__}
    return saved == optimizer.plan.choice.name or {saved, optimizer.plan.choice.name} <= adams


def loadable_checkpoint(folder: Path, rank: int = 0, size: int = 1) -> Loadable:
    """The checkpoint in a folder.

    Args:
        folder: of the checkpoint.
        rank, size: of this process among those that load; each verifies its part of the files.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    files = manifest.files[rank::size]
    return Loadable(manifest, str(folder), partial(_read_from, folder), lambda plan: _verify_files(folder, files))


def _verify_files(folder: Path, files: Iterable[FileRecord]) -> None:
    """Raises where a file is missing, or has another size or checksum than the manifest says."""
    for file in files:
        path = folder / file.name
        what, remedy = f"file {path}", "Load an earlier checkpoint; this one was damaged after it was written"
        try:
            nbytes = path.stat().st_size
            if nbytes != file.nbytes:
                raise CheckpointError(refusal(what, f"{nbytes} bytes", f"have {file.nbytes} bytes", remedy))
            crc32 = crc_of_file(path)
        except OSError as error:
            raise CheckpointError(refusal(what, error, "be readable", remedy)) from error
        if crc32 != file.crc32:
            raise CheckpointError(refusal(what, f"CRC-32 {crc32:08x}", f"have {file.crc32:08x}", remedy))


def _read_from(folder: Path, plan: LoadPlan) -> Iterator[tuple[Read, Tensor]]:
    for number, reads in groupby(plan.reads, key=lambda read: read.chunk.file):
        with _opened(folder / plan.manifest.files[number].name) as reader:
            for read in reads:
                yield read, reader.read(read.key, read.chunk, read.dtype)


def _opened(path: Path) -> TensorReader:
    try:
        return TensorReader(path)
    except OSError as error:
        rule, remedy = "stay as it is while it is read", "Start the run again: its state is loaded in part"
        raise CheckpointError(refusal(f"file {path}", error, rule, remedy)) from error


def separate(matches: Iterable[GroupMatch]) -> bool:
    """Cuts flat params whose params have different counts of updates or different moments in the state to load.

    No value changes. A plan that was made before must be made again where a flat param was cut.

    Returns:
        Whether any was cut.
    """
    states: dict[ShardedOptimizer, dict[str, SavedState]] = {}
    for match in matches:
        states.setdefault(match.optimizer, {}).update(match.states)
    before = sum(len(optimizer.flat_params) for optimizer in states)
    for optimizer, by_name in states.items():
        optimizer.separate(by_name.get)
    return sum(len(optimizer.flat_params) for optimizer in states) > before


def fill_groups(
    matches: Sequence[GroupMatch],
    tensors: Iterable[tuple[Read, Tensor]],
    is_same_class: Callable[[ShardedOptimizer], bool] = lambda optimizer: True,
    *,
    main_kind: str = MAIN,
) -> None:
    """Copies tensors into main params and moments, then gives the inner optimizers options, counts and moments.

    Args:
        matches: param groups, after `separate`.
        tensors: each with the places that it goes to.
        is_same_class: whether the class of an inner optimizer is the one that saved.
        main_kind: the kind of the tensors that go into main params.
    """
    moments = {match: _moments_for(match) for match in matches}
    into = {
        (id(flat), kind): tensor
        for match in matches
        for flat, _, by_kind in moments[match]
        for kind, tensor in {**by_kind, main_kind: flat.main}.items()
    }
    for read, tensor in tensors:
        _place(tensor, read, into)
        del tensor  # otherwise it stays in memory while the next one is read
    for match in matches:
        _restore_match(match, moments[match], same_inner=is_same_class(match.optimizer))


def _flat_params_of(match: GroupMatch) -> Iterator[tuple[FlatParam, SavedState]]:
    for flat in flat_params_of(match.optimizer, match.number):
        states = {match.states[shard.name] for shard in flat.plan.shards}
        if len(states) > 1:
            got, rule = f"{len(states)} saved states in one", "be cut before the load"
            raise InvariantError(refusal("flat param", got, rule, "Call separate first"))
        yield flat, states.pop()


def _moments_for(match: GroupMatch) -> list[tuple[FlatParam, SavedState, dict[str, Tensor]]]:
    """Memory for the moments of each flat param: its present moments where they fit, else new ones; padding is zero.

    Args:
        match: after `separate`.
    """
    found = []
    for flat, state in _flat_params_of(match):
        moments = {kind: _moment_for(match.optimizer, flat, kind, dtype) for kind, dtype in state.kinds}
        found.append((flat, state, moments))
    return found


def _moment_for(optimizer: ShardedOptimizer, flat: FlatParam, kind: str, dtype: torch.dtype) -> Tensor:
    inner = optimizer.inner
    updater = part_for(inner, inner.param_groups[flat.plan.key.group])
    if optimizer.plan.choice.is_adam or isinstance(updater, (torch.optim.Adam, torch.optim.AdamW, FlatMuon)):
        dtype = flat.main.dtype  # whatever it was saved in
    known = moment_to_fill(inner, flat.main, kind, dtype)
    return flat.zeros(dtype) if known is None else known


def _place(tensor: Tensor, read: Read, into: dict[tuple[int, str], Tensor]) -> None:
    for target in read.targets:
        whole = into[id(target.piece.flat), target.kind]
        target.piece.view(whole)[target.in_piece.as_slices()].copy_(tensor[target.in_chunk.as_slices()])


def _restore_match(
    match: GroupMatch, moments: list[tuple[FlatParam, SavedState, dict[str, Tensor]]], *, same_inner: bool
) -> None:
    """Gives a param group its options, and the inner optimizer the states of its params.

    Args:
        match: a param group.
        moments: from `_moments_for`, filled.
        same_inner: whether the class that loads is the one that saved.
    """
    inner = match.optimizer.inner
    group = inner.param_groups[match.number]
    for key, value in match.options.items():
        if key not in NOT_OPTIONS and (key in group or same_inner):
            group[key] = as_kept(value, group.get(key))
    restore_group(inner, group, match.step)
    for flat, state, kinds in moments:
        restore(inner, group, flat.main, kinds, state.step if kinds else None)
        if same_inner and not match.optimizer.plan.choice.is_adam:
            _restore_scalars(inner.state, flat.main, dict(state.scalars))


def as_kept(saved: Any, current: Any) -> Any:
    """A saved option in the form that the group has now; a tensor is filled in place, because others may hold it."""
    if torch.is_tensor(current) and saved is not None:
        return current.fill_(saved)
    return tuple(saved) if isinstance(current, tuple) and saved is not None else saved


def _restore_scalars(state: Any, main: Tensor, scalars: Any) -> None:
    """Gives the state the numbers that it lacks, in the form that the class keeps them in."""
    for key, scalar in scalars.items():
        if key not in state.get(main, {}):
            state[main][key] = _as_was(scalar, main)


def _as_was(scalar: Scalar, main: Tensor) -> Any:
    if not scalar.dtype:
        return scalar.value
    return torch.tensor(scalar.value, dtype=getattr(torch, scalar.dtype), device=main.device)
