"""Saving by all ranks: every rank writes what it owns into a file of its own, and the first rank
commits.

Only short messages travel between the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import commit, file_of, lock_file, new_save_id, withdraw
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.manifest_text import check_counts, from_text, to_text
from megatron_distopt.checkpoint.param_groups import (
    GroupRecord,
    Scalar,
    check_values,
    given_otherwise,
    join_groups,
    not_options,
    options_of,
    step_of,
)
from megatron_distopt.checkpoint.tensor_file import TensorWriter
from megatron_distopt.checkpoint.whole_model import (
    Share,
    WholeModel,
    owned_pieces,
    owned_tensors,
    saved_loss_scale,
)
from megatron_distopt.comm import Group, all_gather_results, raise_together
from megatron_distopt.errors import CheckpointError, DistOptError, RanksDisagreeError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.inner_state import moments_of, state_of
from megatron_distopt.optimizer.main_params import by_group
from megatron_distopt.version import VERSION

#: Network file systems show the files of other machines with a delay.
_SECONDS_TO_APPEAR = 120.0
_FREE_SPACE = "Free space there, or save elsewhere"


@dataclass(frozen=True, eq=False)
class TensorToWrite:
    """One tensor to write."""

    key: str
    shape: tuple[int, ...]  # of the whole param
    box: Box  # which part of the param the tensor is
    tensor: Tensor  # a view of the live state


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one rank writes."""

    head: Manifest  # without files, tensors and save id
    tensors: Iterable[TensorToWrite]  # in the order of the file; iterated once


def contribution_of(model: WholeModel) -> Contribution:
    """What this rank writes, as views of the live state: write or copy them before the next
    step."""
    pieces = (
        TensorToWrite(key, piece.placement.global_shape, piece.piece.in_global, tensor)
        for piece in owned_pieces(model)
        if piece.share.writes(piece.shard.name)
        for key, tensor in piece.tensors()
    )
    owned = (
        TensorToWrite(key, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor)
        for share in model.shares
        for key, tensor in owned_tensors(share)
    )
    tensors = (*pieces, *owned)
    first = model.shares[0].optimizer
    groups = join_groups(group for share in model.shares for group in _groups_of(share))
    untrained = join_groups(group for share in model.shares for group in _untrained_of(share))
    check_values((*groups, *untrained), "the optimizer")
    head = Manifest(
        save_id="",
        files=(),
        tensors={},
        groups=groups,
        inner=first.plan.choice.name,
        loss_scale=saved_loss_scale(first.loss_scale),
        num_skipped=first.num_skipped,
        about={**model.about, "megatron_distopt": VERSION, "torch": torch.__version__},
        untrained=untrained,
    )
    check_counts(head.loss_scale, head.num_skipped, "the optimizer")
    return Contribution(head, tensors)


def write_tensors(path: Path, contribution: Contribution, save_id: str) -> Manifest:
    """Writes the file of a rank, tensor by tensor, and returns its manifest; the file is on the
    disk afterwards."""
    with (
        disk.refused(f"write file {path}", f"{_FREE_SPACE}; the last checkpoint is untouched"),
        disk.written(path) as file,
    ):
        writer = TensorWriter(path, file)
        for written in contribution.tensors:
            writer.append(written.key, written.tensor, shape=written.shape, box=written.box)
    return writer.part(contribution.head, save_id)


def _groups_of(share: Share) -> Iterator[GroupRecord]:
    """The groups of which this rank owns something, once for each flat param; other ranks add the
    other groups."""
    optimizer = share.optimizer
    members = by_group(optimizer.flat_params)
    for number, group in enumerate(optimizer.inner.param_groups):
        options, unsaved = options_of(group, not_options(optimizer))
        for flat in members[number]:
            names = dict.fromkeys(share.placements[shard.name].name for shard in flat.plan.shards)
            moments = moments_of(optimizer.inner, flat.main)
            kept = state_of(optimizer.inner, flat.main).items()
            scalars = {key: Scalar.of(value) for key, value in kept if key not in moments}
            step = step_of(optimizer, group, flat, scalars)
            given = given_otherwise(optimizer.plan.groups[number].options, options)
            yield GroupRecord(tuple(names), options, step, scalars, unsaved, given)


def _untrained_of(share: Share) -> Iterator[GroupRecord]:
    for number, names in share.untrained.items():
        options, unsaved = options_of(
            share.optimizer.inner.param_groups[number], not_options(share.optimizer)
        )
        yield GroupRecord(names, options, unsaved=unsaved)


@dataclass(frozen=True)
class Saving:
    """A save that was begun, on one rank."""

    folder: Path
    save_id: str  # in the names of its files
    rank: int
    size: int  # ranks that save
    lock: int | None  # that the first rank holds

    def write(self, contribution: Contribution) -> Manifest:
        """Writes this rank's file, tensor by tensor, and returns its manifest; the file is on the
        disk afterwards.

        Ranks other than the first, which commits, write the manifest as well.
        """
        path = file_of(self.folder, self.save_id, self.rank)
        part = write_tensors(path, contribution, self.save_id)
        with disk.refused(f"write file {path}", f"{_FREE_SPACE}; the last checkpoint is untouched"):
            if self.rank != 0:
                disk.write_file(
                    file_of(self.folder, self.save_id, self.rank, "part"), to_text(part).encode()
                )
        return part

    def commit(self, part: Manifest, is_hopeless: Callable[[], bool] | None = None) -> None:
        """Commits the save on the first rank, given its own part; does nothing on the others.

        `is_hopeless` says whether waiting for ranks that are still writing has become useless; None
        where all have written.
        """
        if self.rank != 0:
            return
        remedy = f"{_FREE_SPACE}; the folder holds the checkpoint before, or already this one"
        with disk.refused(f"commit checkpoint {self.folder}", remedy):
            others = [self._wait_for_part(rank, is_hopeless) for rank in range(1, self.size)]
            commit(self.folder, [part, *others])

    def _wait_for_part(self, rank: int, is_hopeless: Callable[[], bool] | None) -> Manifest:
        start = time.monotonic()
        path, failure = (
            file_of(self.folder, self.save_id, rank, suffix) for suffix in ("part", "failed")
        )
        while True:
            # not there yet, or not complete
            with suppress(OSError, UnicodeDecodeError, CheckpointError):
                return from_text(path.read_text(encoding="utf-8"), str(path))
            if failure.exists():
                text = failure.read_text(encoding="utf-8", errors="replace")
                raise CheckpointError(
                    f"The save failed, because rank {rank} raised «{text}». Fix what that rank "
                    "reports."
                )
            if is_hopeless() if is_hopeless is not None else should_have_appeared(start):
                raise CheckpointError(
                    f"No file of rank {rank} has appeared in checkpoint {self.folder}, which must "
                    f"be on a disk that all {self.size} ranks share. Give a folder on a shared "
                    "disk."
                )
            time.sleep(0.05)

    def report(self, error: BaseException) -> None:
        """Tells the first rank, which waits for this rank's part, that none will come."""
        with suppress(OSError, DistOptError):
            disk.write_file(
                file_of(self.folder, self.save_id, self.rank, "failed"), str(error).encode()
            )

    def abandon(self) -> None:
        """Removes what was written, on the first rank; the checkpoint that was there stays."""
        if self.rank == 0:
            withdraw(self.folder, self.save_id)

    def release(self) -> None:
        disk.unlock(self.lock)


def should_have_appeared(written_at: float) -> bool:
    """Whether a file that another rank had written at a time of `time.monotonic` is overdue
    here."""
    return time.monotonic() >= written_at + _SECONDS_TO_APPEAR


def begin(folder: Path, everyone: Group, prepare: Callable[[], object] = lambda: None) -> Saving:
    """Collective: begins a save. The first rank makes the folder and locks it, if `prepare` raises
    on no rank.

    Raises:
        RanksDisagreeError: ranks would save to different folders.
    """
    lock: int | None = None

    def claim() -> tuple[str, str, str]:
        nonlocal lock
        prepare()
        if everyone.rank == 0:
            with disk.refused(f"write checkpoint {folder}", _FREE_SPACE):
                disk.make_folder(folder)
                lock = disk.lock(lock_file(folder))
        return new_save_id(), str(folder), str(folder.absolute())

    try:
        save_ids, names, places = zip(*all_gather_results(claim, everyone, "save"), strict=True)
        if len(set(names)) > 1 and len(set(places)) > 1:
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            raise RanksDisagreeError(
                f"The folder to save to is {names[0]!r} on rank {everyone.global_rank(0)} and "
                f"{names[other]!r} on rank {everyone.global_rank(other)}. Give save(...) the same "
                "name on all ranks."
            )
    except BaseException:
        disk.unlock(lock)
        raise
    return Saving(folder, save_ids[0], everyone.rank, everyone.size, lock)


def save_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: writes every rank's shards; the folder holds the new checkpoint afterwards, or
    still the old one.

    Raises:
        CheckpointError: on a rank that cannot write.
        RanksDisagreeError: on the others, with that rank's text.
    """
    saving = begin(folder, everyone)
    try:
        part = raise_together(lambda: saving.write(contribution_of(model)), everyone, "save")
        raise_together(lambda: saving.commit(part), everyone, "save")
    except BaseException:
        saving.abandon()
        raise
    finally:
        saving.release()
