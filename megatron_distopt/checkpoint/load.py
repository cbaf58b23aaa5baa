"""Loading by all ranks: each reads what it owns into its live state, without a second copy of the
state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.load_plan import (
    GroupMatch,
    Loadable,
    LoadPlan,
    Read,
    SavedState,
    plan_load,
    plan_reads,
)
from megatron_distopt.checkpoint.manifest import MAIN, FileRecord, Manifest, kind_of
from megatron_distopt.checkpoint.param_groups import as_kept, not_options, tell
from megatron_distopt.checkpoint.source import DAMAGED, read_saved
from megatron_distopt.checkpoint.tensor_file import TensorReader, crc_of_file
from megatron_distopt.checkpoint.whole_model import (
    WholeModel,
    load_loss_scale,
    shards_of,
    take_owned,
)
from megatron_distopt.comm import Group, all_gather_objects, all_gather_results, raise_together
from megatron_distopt.errors import CheckpointError, some_of
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner import part_for
from megatron_distopt.optimizer.inner_state import (
    counts_in_groups,
    moment_to_fill,
    restore,
    restore_group,
)
from megatron_distopt.optimizer.main_params import FlatParam, by_group
from megatron_distopt.optimizer.owners.sharded_muon import ShardedMuon
from megatron_distopt.optimizer.owners.whole_params import owned_params
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")
_AVERAGES_ANEW = "the loaded state has no averages of params; they start again from the main params"
_AVERAGES_LEFT_OUT = (
    "the averages of params in the loaded state are dropped; set ema_decay to continue them"
)


def load_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards of a checkpoint, whatever the layout they were saved in.

    Each file is verified by one rank. Arguments and errors are those of `load_state`.
    """
    load_state(lambda: loadable_checkpoint(folder, everyone.rank, everyone.size), model, everyone)


def load_state(opened: Callable[[], Loadable], model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards; the params are not gathered yet.

    Everything is verified on all ranks before anything is changed on one. `opened` is called once,
    on every rank.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    take_checked(check_state(opened, model, everyone), everyone)


def check_state(opened: Callable[[], Loadable], model: WholeModel, everyone: Group) -> LoadPlan:
    """Collective: the first half of `load_state`, which changes nothing."""
    names = names_of_all(model, everyone)
    plans: list[LoadPlan] = []

    def check() -> dict[str, str]:
        state = opened()
        plans.append(plan_load(state, model, names))
        state.verify(plans[0].reads)
        return {"id of the save": state.manifest.save_id, **state.alike}

    _check_alike(all_gather_results(check, everyone, "load"), plans[0].state.where)
    return plans[0]


def _check_alike(by_rank: Sequence[Mapping[str, str]], where: str) -> None:
    """Raises the same error on all ranks where two were given different states."""
    known: dict[str, tuple[int, str]] = {}
    for rank, alike in enumerate(by_rank):
        for what, here in alike.items():
            first, there = known.setdefault(what, (rank, here))
            if there != here:
                raise CheckpointError(
                    f"The {what} in checkpoint {where} is {there} on rank {first} and {here} on "
                    f"rank {rank}. Load one state on all ranks, and let nothing else save there "
                    "meanwhile."
                )


def take_checked(plan: LoadPlan, everyone: Group) -> None:
    """Collective: the second half of `load_state`."""
    is_told = everyone.rank == 0
    changed = all_gather_objects(
        [line for match in plan.groups for line in match.differences()], everyone
    )
    raise_together(lambda: take_state(plan), everyone, "load")
    if is_told:
        tell(line for lines in changed for line in lines)
    optimizers = [share.optimizer for share in plan.model.shares]
    note_averages(optimizers, are_loaded=plan.state.manifest.has_averages, is_told=is_told)


def note_averages(
    optimizers: Sequence[ShardedOptimizer], *, are_loaded: bool, is_told: bool
) -> None:
    """Notes whether the loaded state had averages; if `is_told`, logs that the run differs in
    that."""
    averages = [each.averages for each in optimizers if each.averages is not None]
    for each in averages:
        each.has_begun = are_loaded
    if is_told and are_loaded != bool(averages):
        _log.warning(_AVERAGES_LEFT_OUT if are_loaded else _AVERAGES_ANEW)


def names_of_all(model: WholeModel, everyone: Group) -> set[str]:
    """Collective: names in the whole model of the params that train; each is sent by the rank of
    its first element."""
    begun_here = [
        share.placements[shard.name].name
        for share in model.shares
        for _, shard in shards_of(share.optimizer)
        if shard.in_param.start == 0
    ]
    return {name for names in all_gather_objects(begun_here, everyone) for name in names}


@torch.no_grad()
def take_state(plan: LoadPlan) -> None:
    """Reads what was planned into the live state; the params are not gathered yet.

    In addition to the state, which is filled in place where it has the right dtype, at most one
    tensor is in memory.

    Raises:
        CheckpointError: a file was removed or changed since it was verified; a part of the state is
            loaded then.
    """
    state = plan.state
    separate(plan.groups)
    # of flat params as they are cut now
    fill_groups(plan.groups, state.read(plan_reads(state, plan.saved, plan.model)))
    for share in plan.model.shares:
        for name, owned, options in owned_params(share.optimizer.inner):
            keys = plan.saved[share.placements[name].name].owned
            tensors = [(key, read(key)) for key in keys if (read := state.read_owned) is not None]
            take_owned(owned, options, tensors, state.where)
    for optimizer in (share.optimizer for share in plan.model.shares):
        load_loss_scale(optimizer.loss_scale, state.manifest.loss_scale)
        optimizer.num_skipped = state.manifest.num_skipped
        for flat in optimizer.flat_params if state.has_model_params else ():
            flat.write_model()
    anew = [name for name, saved in plan.saved.items() if saved.begins_anew]
    if anew:
        text = (
            "the state of %s in %s is of another kind of optimizer or of other parts of the "
            "params, so it begins anew"
        )
        _log.warning(text, some_of(anew), state.where)


def loadable_checkpoint(folder: Path, rank: int = 0, size: int = 1) -> Loadable:
    """The checkpoint in a folder; each of the `size` processes that load verifies its part of the
    files."""
    manifest = read_manifest(folder)
    return replace(
        loadable_files(folder, manifest),
        verify=lambda reads: _verify_files(folder, manifest.files[rank::size]),
    )


def loadable_files(folder: Path, manifest: Manifest) -> Loadable:
    """The files of a manifest in a folder, which were verified before."""
    return Loadable(
        manifest,
        str(folder),
        read=partial(_read_from, folder, manifest),
        read_owned=lambda key: read_saved(
            folder, manifest, key, Box.whole(manifest.tensors[key].shape)
        ),
    )


def _verify_files(folder: Path, files: Iterable[FileRecord]) -> None:
    for file in files:
        path = folder / file.name
        with disk.refused(f"read file {path}", DAMAGED):
            got, wanted = f"{path.stat().st_size} bytes", f"{file.nbytes} bytes"
            if got == wanted:
                got, wanted = f"CRC-32 {crc_of_file(path):08x}", f"CRC-32 {file.crc32:08x}"
        if got != wanted:
            raise CheckpointError(f"File {path} has {got}, and must have {wanted}. {DAMAGED}.")


def _read_from(
    folder: Path, manifest: Manifest, reads: Sequence[Read]
) -> Iterator[tuple[Read, Tensor]]:
    """Reads each chunk once, where reads of the same chunk follow one another."""
    for number, of_file in groupby(reads, key=lambda read: read.chunk.file):
        path = folder / manifest.files[number].name
        remedy = (
            "Start the run again, because its state is loaded only in part, and let nothing change "
            "the file while it is read"
        )
        with disk.refused(f"read file {path}", remedy):
            reader = TensorReader(path)
        with reader:
            for (key, chunk), of_chunk in groupby(of_file, key=lambda read: (read.key, read.chunk)):
                tensor = reader.read(key, chunk, getattr(torch, manifest.tensors[key].dtype))
                for read in of_chunk:
                    yield read, tensor[read.in_chunk.as_slices()]
                del tensor  # otherwise it stays in memory while the next one is read


def separate(matches: Iterable[GroupMatch]) -> None:
    """Cuts flat params whose params have different counts of updates or different moments in the
    state to load. No value changes."""
    states: dict[ShardedOptimizer, dict[str, SavedState]] = {}
    for match in matches:
        states.setdefault(match.optimizer, {}).update(match.states)
    for optimizer, by_name in states.items():
        optimizer.separate(by_name.get)


def fill_groups(matches: Sequence[GroupMatch], tensors: Iterable[tuple[Read, Tensor]]) -> None:
    """Copies tensors into main params and moments, then gives the inner optimizers options, counts
    and moments.

    `separate` has cut the flat params.
    """
    optimizers = dict.fromkeys(match.optimizer for match in matches)
    members = {optimizer: by_group(optimizer.flat_params) for optimizer in optimizers}
    flat_params = [
        (match, flat, match.states[flat.plan.shards[0].name])
        for match in matches
        for flat in members[match.optimizer][match.number]
    ]
    moments = {
        flat: {kind: _moment_for(match.optimizer, flat, kind, dtype) for kind, dtype in saved.kinds}
        for match, flat, saved in flat_params
    }
    for read, tensor in tensors:
        flat, kind = read.piece.flat, kind_of(read.key)
        kept = {MAIN: flat.main, AVERAGE: flat.average}.get(kind)
        into = read.piece.view(moments[flat][kind] if kept is None else kept)
        into[read.box.relative_to(read.piece.piece.in_global.offsets).as_slices()].copy_(tensor)
        del tensor  # as in `_read_from`
    for match in matches:
        left_out = (*not_options(match.optimizer), *match.kept)
        for key, value in match.options.items():
            if key not in left_out and (key in match.group or match.is_same_class):
                match.group[key] = as_kept(value, match.group.get(key))
        if counts_in_groups(match.optimizer.plan.choice, match.optimizer.inner):
            restore_group(match.optimizer.inner, match.group, match.step)
    for match, flat, saved in flat_params:
        inner = match.optimizer.inner
        step = saved.step if moments[flat] else None
        restore(inner, inner.param_groups[match.number], flat.main, moments[flat], step)
        if match.is_same_class and not match.optimizer.plan.choice.is_adam:
            _restore_scalars(inner.state, flat.main, saved)


def _moment_for(
    optimizer: ShardedOptimizer, flat: FlatParam, kind: str, dtype: torch.dtype
) -> Tensor:
    """Memory for a moment: the present one where it fits, else a new one; padding is zero."""
    inner = optimizer.inner
    updater = part_for(inner, inner.param_groups[flat.plan.key.group])
    if optimizer.plan.choice.is_adam or isinstance(
        updater, (torch.optim.Adam, torch.optim.AdamW, ShardedMuon)
    ):
        dtype = flat.main.dtype  # whatever it was saved in
    known = moment_to_fill(inner, flat.main, kind, dtype)
    return flat.zeros(dtype) if known is None else known


def _restore_scalars(state: Any, main: Tensor, saved: SavedState) -> None:
    for key, scalar in saved.scalars:
        if key not in state.get(main, {}):
            dtype = getattr(torch, scalar.dtype) if scalar.dtype else None
            device = None if key == "step" else main.device  # counts are on the CPU, as in torch
            state[main][key] = (
                torch.tensor(scalar.value, dtype=dtype, device=device) if dtype else scalar.value
            )
