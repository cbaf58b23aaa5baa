"""Saving while training goes on, one save at a time.

A thread of this process writes what `Staging` holds; it never communicates, because training does that meanwhile. The
first rank's thread waits for the other ranks' files and commits. An error is raised by the next call, on all ranks,
or logged at the end of the process.

[Note: waves] The buffer has two halves. While one is being written the other is filled. Training goes on as soon as the
last part of the state is copied. A state that fits into the buffer is copied at the speed of memory; a larger one
is copied in waves, each waiting for the half that it needs.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import no_collection
from megatron_distopt.checkpoint.save import Contribution, Saving, Written, begin, contribution_of, should_have_appeared
from megatron_distopt.checkpoint.whole_model import WholeModel, remember_saved
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.device import CPU, mark, pinned
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box

#: Tensors of every dtype may start at multiples of this.
_ALIGNMENT_NBYTES = 64
_log = logging.getLogger("megatron_distopt")
#: How long the end of the process waits for the files of other ranks, which write for about as long as this one.
_SECONDS_AT_EXIT = 600.0
#: Where the thread and training want the same core, the thread gets a tenth of training's time.
_NICE = 10


@dataclass(frozen=True)
class _Wave:
    """Tensors in the buffer, and the halves that are free again once they are written."""

    halves: tuple[int, ...]
    tensors: list[Written]


class Staging:
    """A buffer of a fixed size that one thread fills and another empties, see [Note: waves].

    Args:
        nbytes: of the whole buffer, rounded up.
        device: from which is copied.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._half_nbytes = _aligned(max(-(-nbytes // 2), 1))
        self._memory = pinned([2 * self._half_nbytes], torch.uint8, device)
        self._memory.fill_(0)  # the first touch of a page takes time: once here, instead of in a save
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (0, 1):
            self._free.put(number)
        self._waves: queue.SimpleQueue[_Wave | BaseException | None] = queue.SimpleQueue()
        self._is_discarded = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return 2 * self._half_nbytes

    def fill(self, tensors: Sequence[Written]) -> None:
        """Copies everything; returns as soon as the last tensor is in the buffer, or the buffer was discarded.

        Args:
            tensors: of the live state.

        Raises:
            Exception: a copy failed; `drain` raises it, too.
        """
        fits = room_for(tensors) <= self.nbytes
        try:
            for wave in [list(tensors)] if fits else self._in_waves(tensors):
                halves = tuple(self._free.get() for _ in range(2 if fits else 1))
                if self._is_discarded:
                    return
                copied = list(self._copied(wave, min(halves) * self._half_nbytes))
                mark(self._device)()  # the device copies one after the other, and the CPU waits once
                self._waves.put(_Wave(halves, copied))
        except BaseException as error:
            self._waves.put(error)
            raise
        self._waves.put(None)

    def _in_waves(self, tensors: Sequence[Written]) -> Iterator[list[Written]]:
        """The tensors in groups that fit into a half of the buffer."""
        wave: list[Written] = []
        left_nbytes = self._half_nbytes
        for each in (part for whole in tensors for part in split(whole, self._half_nbytes)):
            nbytes = room_for([each])
            if nbytes > left_nbytes:
                yield wave
                wave, left_nbytes = [], self._half_nbytes
            wave.append(each)
            left_nbytes -= nbytes
        yield wave

    def _copied(self, tensors: Iterable[Written], start: int) -> Iterator[Written]:
        for each in tensors:
            flat = self._memory[start : start + _nbytes(each.tensor)].view(each.tensor.dtype)
            yield replace(each, tensor=flat.view(each.tensor.shape).copy_(each.tensor, non_blocking=True))
            start += _aligned(_nbytes(each.tensor))

    def drain(self) -> Iterator[Written]:
        """The copied tensors, in order. Their memory is filled again once the next wave is asked for.

        Iterate to the end, or call `discard`: otherwise a thread that fills waits for ever.

        Raises:
            Exception: the thread that fills could not copy.
        """
        while (wave := self._waves.get()) is not None:
            if isinstance(wave, BaseException):
                raise wave
            yield from wave.tensors
            for half in wave.halves:
                self._free.put(half)

    def discard(self) -> None:
        """Lets a thread that fills return, now or later, after writing has failed. Drop the buffer afterwards."""
        self._is_discarded = True
        for half in (0, 1):  # the thread may wait for one half or for both
            self._free.put(half)


def room_for(tensors: Iterable[Written]) -> int:
    """Bytes of a buffer that holds all of the tensors at once."""
    return sum(_aligned(_nbytes(each.tensor)) for each in tensors)


def split(written: Written, most_nbytes: int) -> Iterator[Written]:
    """Cuts a tensor into boxes of at most `most_nbytes` bytes.

    Args:
        written: one tensor.
        most_nbytes: not below the bytes of one element.
    """
    shape = tuple(written.tensor.shape)
    if _nbytes(written.tensor) <= most_nbytes:
        yield written
        return
    dim = next(dim for dim, numel in enumerate(shape) if numel > 1)
    row_nbytes = prod(shape[dim + 1 :]) * written.tensor.element_size()
    step = max(most_nbytes // row_nbytes, 1)
    for start in range(0, shape[dim], step):
        numel = min(step, shape[dim] - start)
        offsets, sizes = list(written.box.offsets), list(written.box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, numel
        box = Box(tuple(offsets), tuple(sizes))
        yield from split(replace(written, box=box, tensor=written.tensor.narrow(dim, start, numel)), most_nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(eq=False)
class _Task:
    """One save in the background, on this rank.

    Args:
        saving: the save that was begun.
        thread: writes.
        written: set once this rank's file is there, or never will be.
        cancelled: set once nothing waits for the files of other ranks any more.
        all_written_at: when this rank learned that all have written.
        error: of the thread; where this rank's file will never be there, it is set before `written`.
    """

    saving: Saving
    thread: threading.Thread | None = None
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    all_written_at: float | None = None
    error: BaseException | None = None

    def is_hopeless(self) -> bool:
        """Whether waiting for files of other ranks that are not there yet is useless."""
        is_late = self.all_written_at is not None and should_have_appeared(self.all_written_at)
        return self.cancelled.is_set() or is_late


class BackgroundSaver:
    """Saves one model in the background, one save after the other.

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
            devices = (each.tensor.device for each in tensors if each.tensor.device.type != CPU)
            self._staging = None  # frees the old buffer before the new one is allocated
            self._staging = Staging(wanted, next(devices, torch.device(CPU)))
        return replace(contribution, tensors=tensors)

    def _start(self, task: _Task, contribution: Contribution, then: Callable[[], None]) -> None:
        self._task, staging = task, self._staging
        if staging is None:
            raise CheckpointError(refusal("staging buffer", "none", "be there before a save", "Report this"))
        arguments = (task, contribution, staging, then)
        task.thread = threading.Thread(target=_write, args=arguments, name="megatron_distopt save", daemon=True)
        task.thread.start()
        with suppress(Exception):  # the thread has the error, too: all ranks raise it together in the next call
            staging.fill(list(contribution.tensors))

    def finish(self) -> None:
        """Collective: waits for the end of a running save.

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
            self._staging = None  # it still holds what was not written
            raise
        finally:
            task.saving.release()

    def _at_exit(self) -> None:
        """Waits for this rank's thread alone, because others may have ended; the first rank's waits for all files."""
        task = self._task
        if task is None or task.thread is None:
            return
        task.thread.join(_SECONDS_AT_EXIT)
        task.cancelled.set()
        if task.thread.is_alive() or task.error is not None:
            what = task.error or f"not finished within {_SECONDS_AT_EXIT:.0f} s"
            _log.error("checkpoint %s was not saved: %s", task.saving.folder, what)


def _step_back() -> None:
    """Lowers the priority of the thread, because training comes first. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _raise(task: _Task) -> None:
    if task.error is not None:
        raise task.error


def _write(task: _Task, contribution: Contribution, staging: Staging, then: Callable[[], None]) -> None:
    """Runs in the thread: writes this rank's file, and on the first rank commits once all ranks have written."""
    _step_back()
    try:
        task.saving.write(replace(contribution, tensors=staging.drain()))
    except BaseException as error:  # noqa: BLE001 - raised by the next call, or logged at the end of the process
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
