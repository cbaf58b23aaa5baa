"""Loading by all ranks: a checkpoint is read into the shards of each rank, without a second copy of the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.load_plan import GroupMatch, LoadPlan, Read, SavedState, check_names, plan_load
from megatron_distopt.checkpoint.manifest import MAIN, FileRecord, no_collection
from megatron_distopt.checkpoint.param_groups import NOT_OPTIONS, Scalar
from megatron_distopt.checkpoint.tensor_file import TensorReader, crc_of_file
from megatron_distopt.checkpoint.whole_model import WholeModel, load_loss_scale, remember_loaded
from megatron_distopt.comm import Group, exchange, raise_together
from megatron_distopt.config import ADAM_SOURCES
from megatron_distopt.errors import CheckpointError, InvariantError, refusal
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, moments_of, restore, restore_group

__all__ = [
    "as_kept",
    "install",
    "load_checkpoint",
    "load_planned",
    "moments_for",
    "names_of_all",
    "restore_match",
    "separate",
    "verify_files",
]


@no_collection()
def load_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards, whatever the layout they were saved in; the params are not gathered yet.

    Everything is verified before anything is changed: each file by one rank, and by every rank that what it needs is
    there.

    Args: as of `save_checkpoint`.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    names = names_of_all(model, everyone)
    plan = raise_together(lambda: _verified(folder, model, everyone, names), everyone, "load")
    _check_same_save(folder, exchange(plan.manifest.save_id, everyone))
    ready = plan_load(plan.manifest, str(folder), model) if separate(plan.groups) else plan
    raise_together(lambda: load_planned(folder, ready, model), everyone, "load")


def _verified(folder: Path, model: WholeModel, everyone: Group, names: Iterable[str]) -> LoadPlan:
    manifest = read_manifest(folder)
    check_names(manifest, str(folder), model, names)
    plan = plan_load(manifest, str(folder), model)
    verify_files(folder, manifest.files[everyone.rank :: everyone.size])
    return plan


def _check_same_save(folder: Path, save_ids: Sequence[str]) -> None:
    """Another run may have saved there while the ranks were reading."""
    if len(set(save_ids)) > 1:
        got, rule = f"saves {', '.join(sorted(set(save_ids)))} on different ranks", "stay as it is while it is read"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, "Let one run save there at a time"))


def names_of_all(model: WholeModel, everyone: Group) -> set[str]:
    """Collective: names in the whole model of the params that train on any rank.

    Args: as of `save_checkpoint`.
    """
    return {name for names in exchange(_names_begun_here(model), everyone) for name in names}


def _names_begun_here(model: WholeModel) -> list[str]:
    """Names of the params of which this rank owns the first element: together each param once or a few times."""
    return [
        share.placements[shard.name].name
        for share in model.shares
        for flat in share.optimizer.flat_params
        for shard in flat.plan.shards
        if shard.in_param.start == 0
    ]


def verify_files(folder: Path, files: Iterable[FileRecord]) -> None:
    """Whether files are whole, byte for byte.

    Args:
        folder: of the checkpoint.
        files: as the manifest names them.

    Raises:
        CheckpointError: one is missing, too short or long, or was changed.
    """
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


def load_planned(folder: Path, plan: LoadPlan, model: WholeModel) -> None:
    """Does what `plan_load` decided; the params are not gathered yet.

    At most one saved tensor is in memory beside the state, which is filled in place where it has the right dtype.

    Raises:
        CheckpointError: a file was removed or changed since it was verified; a part of the state is loaded then.
    """
    install(plan, model, _read_from(folder, plan))


def _read_from(folder: Path, plan: LoadPlan) -> Iterator[tuple[Read, Tensor]]:
    for number, reads in groupby(plan.reads, key=lambda read: read.chunk.file):
        with _opened(folder / plan.manifest.files[number].name) as reader:
            for read in reads:
                yield read, reader.read(read.key, read.chunk, read.dtype)


@torch.no_grad()
def install(plan: LoadPlan, model: WholeModel, tensors: Iterable[tuple[Read, Tensor]]) -> None:
    """Takes the state over, wherever its tensors come from; the params are not gathered yet.

    Args:
        plan: of the load, made after `separate`.
        model: for which it was made.
        tensors: for each of `plan.reads` what it reads.
    """
    moments = {match: moments_for(match) for match in plan.groups}
    into = {
        (id(flat), kind): tensor
        for match in plan.groups
        for flat, _, by_kind in moments[match]
        for kind, tensor in by_kind.items()
    }
    for read, tensor in tensors:
        _place(tensor, read, into)
        del tensor  # or it is in memory while the next one is read
    for match in plan.groups:
        restore_match(match, moments[match], same_inner=_is_same_class(plan.manifest.inner, match.optimizer))
    for optimizer in (share.optimizer for share in model.shares):
        load_loss_scale(optimizer.loss_scale, plan.manifest.loss_scale)
        optimizer.num_skipped = plan.manifest.num_skipped
        for flat in optimizer.flat_params:
            flat.write_model()
    remember_loaded(model, plan.manifest)


def _is_same_class(saved: str, optimizer: ShardedOptimizer) -> bool:
    """Whether the inner optimizer computes what the saved one did; all of Adam's implementations do."""
    adams = {*ADAM_SOURCES, torch.optim.Adam.__name__, torch.optim.AdamW.__name__}
    return saved == optimizer.plan.choice.name or {saved, optimizer.plan.choice.name} <= adams


def _opened(path: Path) -> TensorReader:
    try:
        return TensorReader(path)
    except OSError as error:
        rule, remedy = "stay as it is while it is read", "Start the run again: its state is loaded in part"
        raise CheckpointError(refusal(f"file {path}", error, rule, remedy)) from error


def separate(matches: Iterable[GroupMatch]) -> bool:
    """Cuts flat params whose params have other counts of updates or other moments in what is to be loaded.

    No value changes. A plan that was made before is of no use after it.

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


def _flat_params_of(match: GroupMatch) -> Iterator[tuple[FlatParam, SavedState]]:
    for flat in match.optimizer.flat_params:
        if flat.plan.key.group == match.number:
            states = {match.states[shard.name] for shard in flat.plan.shards}
            if len(states) > 1:
                got, rule = f"{len(states)} saved states in one", "be cut before the load"
                raise InvariantError(refusal("flat param", got, rule, "Call separate first"))
            yield flat, states.pop()


def moments_for(match: GroupMatch) -> list[tuple[FlatParam, SavedState, dict[str, Tensor]]]:
    """Memory for the moments of each flat param: those that are there, where they fit; padding is zero in them.

    Args:
        match: after `separate`.
    """
    found = []
    for flat, state in _flat_params_of(match):
        known = moments_of(match.optimizer.inner, flat.main)
        found.append((flat, state, {kind: _fitting(known.get(kind), flat, dtype) for kind, dtype in state.kinds}))
    return found


def _fitting(known: Tensor | None, flat: FlatParam, dtype: torch.dtype) -> Tensor:
    return known if known is not None and known.dtype == dtype else torch.zeros_like(flat.main, dtype=dtype)


def _place(tensor: Tensor, read: Read, into: dict[tuple[int, str], Tensor]) -> None:
    for target in read.targets:
        flat = target.piece.flat
        whole = flat.main if target.kind == MAIN else into[id(flat), target.kind]
        target.piece.view(whole)[target.in_piece.as_slices()].copy_(tensor[target.in_chunk.as_slices()])


def restore_match(
    match: GroupMatch, moments: list[tuple[FlatParam, SavedState, dict[str, Tensor]]], *, same_inner: bool
) -> None:
    """Takes over options and states.

    Args:
        match: a param group.
        moments: as of `moments_for`, filled.
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
    """In the form in which the group has it: what reads a tensor goes on reading that one."""
    if torch.is_tensor(current) and saved is not None:
        return current.fill_(saved)
    return tuple(saved) if isinstance(current, tuple) and saved is not None else saved


def _restore_scalars(state: Any, main: Tensor, scalars: Any) -> None:
    """In the form in which the same class had them."""
    for key, scalar in scalars.items():
        if key not in state.get(main, {}):
            state[main][key] = _as_was(scalar, main)


def _as_was(scalar: Scalar, main: Tensor) -> Any:
    if not scalar.dtype:
        return scalar.value
    return torch.tensor(scalar.value, dtype=getattr(torch, scalar.dtype), device=main.device)
