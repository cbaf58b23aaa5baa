"""One save: begun by all ranks, written by each, committed by the first."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.contribution import Contribution, write_contribution
from megatron_distopt.checkpoint.folder import (
    commit,
    lock_file,
    new_save_id,
    read_failure,
    read_part,
    withdraw,
    write_failure,
)
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.comm import Group, exchange_together
from megatron_distopt.errors import CheckpointError, DistOptError, refusal

__all__ = ["Saving", "begin", "should_have_appeared"]

#: Network file systems show another machine's file with a delay.
_SECONDS_TO_APPEAR = 120.0


@dataclass(frozen=True)
class Saving:
    """A save that was begun.

    Args:
        folder: of the checkpoint.
        save_id: in the names of its files.
        rank: of this process among those that save.
        size: how many they are.
        lock: of the first rank.
    """

    folder: Path
    save_id: str
    rank: int
    size: int
    lock: int | None

    def write(self, contribution: Contribution) -> Manifest:
        """Writes this rank's file.

        Raises:
            CheckpointError: the disk is full, or fails.
        """
        return write_contribution(self.folder, contribution, self.save_id, self.rank)

    def commit(self, is_hopeless: Callable[[], bool] | None = None) -> None:
        """Makes it the checkpoint, on the first rank; nothing on the others.

        Args:
            is_hopeless: says, while other ranks may still be writing, whether waiting for them has become useless;
                None where all of them have written.

        Raises:
            CheckpointError: a rank's part is not to be seen, or the parts do not fit together.
        """
        if self.rank != 0:
            return
        try:
            commit(self.folder, [self._part_of(rank, is_hopeless) for rank in range(self.size)])
        except OSError as error:
            remedy = "Free space there, or save elsewhere; the checkpoint there is the one before, or this one"
            raise CheckpointError(refusal(f"checkpoint {self.folder}", error, "be writable", remedy)) from error

    def _part_of(self, rank: int, is_hopeless: Callable[[], bool] | None) -> Manifest:
        start = time.monotonic()
        is_over = is_hopeless or (lambda: should_have_appeared(start))
        while True:
            part = read_part(self.folder, self.save_id, rank)
            if part is not None:
                return part
            failure = read_failure(self.folder, self.save_id, rank)
            if failure is not None:
                remedy = "Mend what that rank reports"
                raise CheckpointError(
                    refusal("save", f"rank {rank} failed with «{failure}»", "pass on all ranks", remedy)
                )
            if is_over():
                break
            time.sleep(0.05)
        got, rule = f"no file of rank {rank} to be seen", f"be on a disk that all {self.size} ranks share"
        raise CheckpointError(refusal(f"checkpoint {self.folder}", got, rule, "Give a folder on a shared disk"))

    def report(self, error: BaseException) -> None:
        """Tells the first rank, which waits for a file, that none will come."""
        with suppress(OSError, DistOptError):
            write_failure(self.folder, self.save_id, self.rank, str(error))

    def abandon(self) -> None:
        """Removes what was written, on the first rank; the checkpoint that was there stays."""
        if self.rank == 0:
            withdraw(self.folder, self.save_id)

    def release(self) -> None:
        """Lets other runs save there."""
        disk.unlock(self.lock)


def should_have_appeared(written_at: float) -> bool:
    """Whether a file that another rank had written by then, as `time.monotonic` counts, is overdue here."""
    return time.monotonic() >= written_at + _SECONDS_TO_APPEAR


def begin(folder: Path, everyone: Group, prepare: Callable[[], object] = lambda: None) -> Saving:
    """Collective: the first rank makes the folder and keeps others from it.

    Args:
        folder: of the checkpoint; made where it is missing.
        everyone: all ranks that save.
        prepare: what a rank does before, which may raise: one exchange tells all of both.

    Raises:
        CheckpointError: on the first rank, where another run is saving there or the folder cannot be made.
        RanksDisagreeError: on the others.
    """
    locks: list[int | None] = []

    def claim() -> str:
        prepare()
        if everyone.rank == 0:
            locks.append(_claim(folder))
        return new_save_id()

    try:
        save_id = exchange_together(claim, everyone, "save")[0]
    except BaseException:
        for lock in locks:
            disk.unlock(lock)
        raise
    return Saving(folder, save_id, everyone.rank, everyone.size, *(locks or (None,)))


def _claim(folder: Path) -> int | None:
    try:
        disk.make_folder(folder)
        return disk.lock(lock_file(folder))
    except OSError as error:
        rule, remedy = "be a folder that can be written", "Free space there, or give another folder"
        raise CheckpointError(refusal(f"checkpoint {folder}", error, rule, remedy)) from error
