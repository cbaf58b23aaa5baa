"""Saving while training goes on, one save at a time.

The state is copied into memory of a fixed size, from which a thread of this process writes it. The
thread never communicates, because training does that meanwhile: the first rank's waits for the
other ranks' files and commits. An error is raised by the next call, on all ranks, or logged at the
end of the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from megatron_distopt.checkpoint.save import (
    Contribution,
    Saving,
    TensorToWrite,
    begin,
    contribution_of,
    should_have_appeared,
)
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, meet_in_call, raise_together
from megatron_distopt.comm.alive import begin_thread
from megatron_distopt.device import CPU, mark, pinned
from megatron_distopt.errors import CheckpointError

#: Tensors of every dtype may start at multiples of this.
_ALIGNMENT_NBYTES = 64
_log = logging.getLogger("megatron_distopt")
#: How long the end of the process waits for the files of other ranks, which write for about as long
#: as this one.
_SECONDS_AT_EXIT = 600.0
#: Where the thread and training want the same core, the thread gets a tenth of training's time.
_NICE = 10


class Staging:
    """Memory of a fixed size, pinned where a device copies into it, for a copy of the state of this
    rank."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self._memory = pinned([nbytes], torch.uint8, device)  # uint8, 1-D [nbytes]
        # the first touch of a page takes time: once here, instead of in a save
        self._memory.fill_(0)

    def copy(self, tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
        """Copies everything, for which there is room; what it returned before is overwritten."""
        copies = self.begin_copy(tensors)
        mark(self._device)()  # the device copies one after the other, and the CPU waits once
        return copies

    def begin_copy(self, tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
        """The same on the current stream of the device, without waiting for it."""
        copies, start = [], 0
        for written in tensors:
            flat = self._memory[start : start + written.tensor.nbytes].view(written.tensor.dtype)
            copy = flat.view(written.tensor.shape).copy_(written.tensor, non_blocking=True)
            copies.append(replace(written, tensor=copy))
            start += _aligned(written.tensor.nbytes)
        return copies


def room_for(tensors: Sequence[TensorToWrite]) -> int:
    """Bytes of memory that hold a copy of all of the tensors."""
    return sum(_aligned(written.tensor.nbytes) for written in tensors)


def let_training_first() -> None:
    """Gives this thread less of a core that training wants, too; only Linux has priorities of
    threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


@dataclass(eq=False)
class _Task:
    """One save in the background, on this rank."""

    saving: Saving
    thread: threading.Thread | None = None  # writes
    # set once this rank's file is there or failed
    written: threading.Event = field(default_factory=threading.Event)
    # set once nothing waits for files of others
    cancelled: threading.Event = field(default_factory=threading.Event)
    all_written_at: float | None = None  # when this rank learned that all have written
    # of the thread; one of this rank's file is set before `written`
    error: BaseException | None = None

    def is_hopeless(self) -> bool:
        """Whether waiting for files of other ranks that are not there yet is useless."""
        is_late = self.all_written_at is not None and should_have_appeared(self.all_written_at)
        return self.cancelled.is_set() or is_late

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def run(self, contribution: Contribution) -> None:
        """Runs in the thread: writes this rank's file, and on the first rank commits once all ranks
        have written."""
        let_training_first()
        try:
            part = self.saving.write(contribution)
        except BaseException as error:  # noqa: BLE001 - raised by the next call, or logged at the end of the process
            self.error = error
            self.saving.report(error)
            return
        finally:
            self.written.set()
        try:
            self.saving.commit(part, self.is_hopeless)
        except BaseException as error:  # noqa: BLE001 - as above
            self.error = error


class BackgroundSaver:
    """Saves one model in the background, one save after the other."""

    def __init__(self, everyone: Group) -> None:
        self._everyone = everyone
        self._staging: Staging | None = None
        self._task: _Task | None = None
        # Not `atexit`, which processes that `multiprocessing` has started do not run.
        Finalize(None, self._at_exit, exitpriority=0)

    def save(self, folder: Path, model: WholeModel) -> None:
        """Collective: copies the state and returns; raises what went wrong in the last save, as
        `finish` does."""
        self.finish()
        copied: list[Contribution] = []
        saving = begin(folder, self._everyone, lambda: copied.append(self._copied(model)))
        task = self._task = _Task(saving)
        task.thread = begin_thread(task.run, "save", copied[0])

    def _copied(self, model: WholeModel) -> Contribution:
        contribution = contribution_of(model)
        tensors = list(contribution.tensors)
        nbytes = room_for(tensors)
        if self._staging is None or self._staging.nbytes < nbytes:
            devices = (
                written.tensor.device for written in tensors if written.tensor.device.type != CPU
            )
            self._staging = None  # frees the old memory before the new one is allocated
            try:
                self._staging = Staging(nbytes, next(devices, torch.device(CPU)))
            except RuntimeError as error:
                raise CheckpointError(
                    f"async_save needs {nbytes // 10**6} MB to copy this rank's optimizer state, "
                    f"and that much memory cannot be allocated ({error}). Leave async_save out, "
                    "or free memory."
                ) from error
        return replace(contribution, tensors=self._staging.copy(tensors))

    def finish(self) -> None:
        """Collective: waits for the end of a running save; raises on all ranks what went wrong on
        one."""
        task, self._task = self._task, None
        if task is None or task.thread is None:
            return
        meet_in_call("finish_saving", self._everyone)
        task.written.wait()
        try:
            raise_together(task.raise_error, self._everyone, "save")
            task.all_written_at = time.monotonic()
            task.thread.join()
            raise_together(task.raise_error, self._everyone, "save")
        except BaseException:
            task.cancelled.set()
            task.thread.join()
            task.saving.abandon()
            raise
        finally:
            task.saving.release()

    def _at_exit(self) -> None:
        """Waits for this rank's thread alone, because others may have ended; the first rank's waits
        for all files."""
        task = self._task
        if task is None or task.thread is None:
            return
        task.thread.join(_SECONDS_AT_EXIT)
        task.cancelled.set()
        if task.thread.is_alive() or task.error is not None:
            what = task.error or f"it did not finish within {_SECONDS_AT_EXIT:.0f} s"
            _log.error("checkpoint %s was not saved: %s", task.saving.folder, what)
