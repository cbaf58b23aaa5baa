"""Saving while training goes on: one save at a time, and nobody forgets it.

A thread of this process writes what `Staging` holds; it never communicates, because training does that meanwhile. The
first rank's thread waits for the other ranks' files and commits. What went wrong is raised by the next call, on all
ranks, and said at the end of the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path

from megatron_distopt.checkpoint.collector import no_collection
from megatron_distopt.checkpoint.contribution import Contribution, contribution_of
from megatron_distopt.checkpoint.history import remember_saved
from megatron_distopt.checkpoint.saving import Saving, begin, should_have_appeared
from megatron_distopt.checkpoint.staging import Staging, room_for
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["BackgroundSaver"]

_log = logging.getLogger("megatron_distopt")
#: How long the end of the process waits for the files of other ranks, which write for about as long as this one.
_SECONDS_AT_EXIT = 600.0
#: A tenth of the processor time that a thread of training gets where both want the same core.
_NICE = 10


@dataclass(eq=False)
class _Task:
    """One save in the background, on this rank.

    Args:
        saving: what was begun.
        thread: that writes.
        written: this rank's file is there, or never will be.
        cancelled: nobody waits for the files of other ranks any more.
        all_written_at: when this rank learned that all have written.
        error: what went wrong; it is there before `written` is set where this rank's file never will be.
    """

    saving: Saving
    thread: threading.Thread | None = None
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    all_written_at: float | None = None
    error: BaseException | None = None

    def is_hopeless(self) -> bool:
        """Whether files of other ranks that are not to be seen will not be."""
        is_late = self.all_written_at is not None and should_have_appeared(self.all_written_at)
        return self.cancelled.is_set() or is_late


class BackgroundSaver:
    """Saves of one model, one after the other.

    Args:
        everyone: all ranks that hold a part of the model.
        most_nbytes: memory for the copy on this rank; a larger state is copied in waves.
    """

    def __init__(self, everyone: Group, most_nbytes: int) -> None:
        self._everyone, self._most_nbytes = everyone, most_nbytes
        self._staging: Staging | None = None
        self._task: _Task | None = None
        # Not `atexit`, which processes that `multiprocessing` has started do not run.
        Finalize(None, self._at_exit, exitpriority=0)

    @no_collection()
    def save(self, folder: Path, model: WholeModel, then: Callable[[], None]) -> None:
        """Collective: copies the state and returns; the checkpoint is there some time later.

        Args:
            folder: of the checkpoint; made where it is missing.
            model: with this rank's optimizers.
            then: called on the first rank, in its thread, once the checkpoint is there.

        Raises:
            CheckpointError: on a rank whose last save failed, or that cannot begin this one.
            RanksDisagreeError: on the others, with that rank's text.
        """
        self.finish()
        prepared: list[Contribution] = []
        saving = begin(folder, self._everyone, lambda: prepared.append(self._prepared(model)))
        remember_saved(model, saving.save_id)
        self._start(_Task(saving), prepared[0], then)

    def _prepared(self, model: WholeModel) -> Contribution:
        contribution = contribution_of(model)
        tensors = list(contribution.tensors)
        wanted = min(room_for(tensors), self._most_nbytes)
        if self._staging is None or self._staging.nbytes < wanted:
            on_device = any(each.tensor.device.type != "cpu" for each in tensors)
            self._staging = None  # the old one goes before the new one comes
            self._staging = Staging(wanted, pinned=on_device)
        return replace(contribution, tensors=tensors)

    def _start(self, task: _Task, contribution: Contribution, then: Callable[[], None]) -> None:
        self._task, staging = task, self._staging
        if staging is None:
            raise CheckpointError(refusal("staging buffer", "none", "be there before a save", "Report this"))
        arguments = (task, contribution, staging, then)
        task.thread = threading.Thread(target=_write, args=arguments, name="megatron_distopt save", daemon=True)
        task.thread.start()
        with suppress(Exception):  # the thread has it, too: all ranks raise it together in the next call
            staging.fill(list(contribution.tensors))

    def finish(self) -> None:
        """Collective: waits for the save that is under way, where there is one.

        Raises:
            CheckpointError: on a rank that could not write; the checkpoint before is still there.
            RanksDisagreeError: on the others, with that rank's text.
        """
        task, self._task = self._task, None
        if task is None or task.thread is None:
            return
        task.written.wait()
        try:
            raise_together(lambda: _raise(task), self._everyone, "save")
            task.all_written_at = time.monotonic()
            task.thread.join()
            raise_together(lambda: _raise(task), self._everyone, "save")
        except BaseException:
            task.cancelled.set()
            task.thread.join()
            task.saving.abandon()
            self._staging = None  # what was not written is still in it
            raise
        finally:
            task.saving.release()

    def _at_exit(self) -> None:
        """Ranks may have lost each other by now: each waits for itself, the first one for the files of all."""
        task = self._task
        if task is None or task.thread is None:
            return
        task.thread.join(_SECONDS_AT_EXIT)
        task.cancelled.set()
        if task.thread.is_alive() or task.error is not None:
            what = task.error or f"not finished within {_SECONDS_AT_EXIT:.0f} s"
            _log.error("checkpoint %s was not saved: %s", task.saving.folder, what)


def _step_back() -> None:
    """Training comes first. On Linux a thread has a priority of its own; elsewhere it is that of the whole process."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _raise(task: _Task) -> None:
    if task.error is not None:
        raise task.error


def _write(task: _Task, contribution: Contribution, staging: Staging, then: Callable[[], None]) -> None:
    """In the thread: this rank's file, and on the first rank the commit once all ranks have written."""
    _step_back()
    try:
        task.saving.write(replace(contribution, tensors=staging.drain()))
    except BaseException as error:  # noqa: BLE001 - raised by the next call, or said at the end of the process
        task.error = error
        staging.discard()
        task.saving.report(error)
        return
    finally:
        task.written.set()
    try:
        task.saving.commit(task.is_hopeless)
        if task.saving.rank == 0:
            then()
    except BaseException as error:  # noqa: BLE001 - as above
        task.error = error
