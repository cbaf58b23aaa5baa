"""The protection of one run: snapshots of its optimizer state in memory, while it trains, and the
way back.

A snapshot is begun by all ranks at the border between two steps. Each copies what it owns; the
device does that on a stream of its own, while training goes on. Then a thread writes the copy into
the memory of its node and sends it to the buddy on another node. At the next border at which ranks
talk they learn whether all of them have it, and only then the one before it goes. So there is
always one that is whole, of which each node holds its own and its neighbour's part.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.background import Staging, let_training_first, room_for
from megatron_distopt.checkpoint.folder import new_save_id
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.protect.nodes import LOCK, check_space, find_nodes, lock
from megatron_distopt.checkpoint.protect.restart import Resumed, restore
from megatron_distopt.checkpoint.protect.script_end import came_to_its_end, note_sigterm
from megatron_distopt.checkpoint.protect.snapshots import (
    FORM,
    NUM_RANKS,
    Snapshot,
    form_of,
    keep_only,
    key_of_state,
    note_end,
    packed,
)
from megatron_distopt.checkpoint.protect.transfer import Connections, receive_copy, send_copy
from megatron_distopt.checkpoint.save import (
    Contribution,
    TensorToWrite,
    contribution_of,
    write_tensors,
)
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, all_gather_objects, meet_in_call, raise_together
from megatron_distopt.comm.alive import LifeSigns, begin_thread, ended_by
from megatron_distopt.device import fence, mark, new_stream, on_stream
from megatron_distopt.errors import CheckpointError, ConfigError, RanksDisagreeError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision, as_plain

_log = logging.getLogger("megatron_distopt")
_SECONDS_AT_EXIT = 10.0
_RESUME_FIRST = (
    "Call resume() of the optimizer once before training, and protect(step, state=...) after each "
    "step"
)


@dataclass
class _Copying:
    """A snapshot under way on this rank."""

    snapshot: Snapshot
    threads: Sequence[threading.Thread] = ()
    has_failed: bool = False


class Protection:
    """Collective: takes the snapshots that `protect_every` asks for; a hook around each step.

    Args:
        every: steps between two snapshots.
        folder: in the memory of each node, on all ranks alike.
        whole: what this rank holds.
        everyone: all ranks of the model.
        device: of the params.
        prepare_snapshot: brings the state up to date before it is read.
        timeout: seconds after which a rank without a sign of life counts as lost.

    Raises:
        CheckpointError: on all ranks: the folder cannot be used, or has no room.
    """

    def __init__(
        self,
        every: int,
        folder: Path,
        whole: Callable[[], WholeModel],
        everyone: Group,
        device: torch.device,
        prepare_snapshot: Callable[[], None],
        timeout: float,
    ) -> None:
        self._every, self.folder, self._whole, self._everyone = every, folder, whole, everyone
        self._device, self._prepare_snapshot = device, prepare_snapshot
        self.nodes = find_nodes(folder, everyone)
        self._lock = lock(folder, self.nodes)
        check_space(folder, _expected_nbytes(whole()), self.nodes)
        self._connections, self._has_space = Connections(self.nodes), False
        self._staging: Staging | None = None
        self._stream = new_stream(device)
        # makes training wait for the copy of its state
        self._copied: Callable[[], None] | None = None
        self._copying: _Copying | None = None
        self._life = LifeSigns(everyone, timeout)
        self._kept: Snapshot | None = None  # the newest that is whole on all ranks
        self._is_ready = False  # whether `resume` was called
        self._num_steps = 0  # since the last border
        self._num_borders = 0
        self._last_step = -1  # at the last border
        self._script = [frame for frame, _ in walk_stack(sys._getframe())][-1]  # the outermost
        self._sigterm = threading.Event()
        Finalize(None, self._at_exit, exitpriority=0)

    def described(self) -> str:
        """For the block at the start: what is protected against what."""
        copies = (
            "one node, so there is no second copy: a killed process loses nothing, a lost node "
            "loses everything"
            if self.nodes.num_nodes == 1
            else f"the second copy is on the next of {self.nodes.num_nodes} nodes"
        )
        return f"every {self._every} steps in {self.folder}; {copies}"

    # --- a step, as its hook

    def before(self) -> None:
        """Refuses steps that no snapshot can follow; the state may change afterwards."""
        self._num_steps += 1
        if self._num_steps > 2:
            raise ConfigError(
                "This is the third step without a call of protect, and protect_every needs that "
                f"call between two steps. {_RESUME_FIRST}."
            )
        self.wait_for_copy()

    def after(self, decision: object) -> None:
        """Does nothing: a snapshot begins at the border, when the host has finished the step,
        too."""

    def loaded(self) -> None:
        """Does nothing."""

    def wait_for_copy(self) -> None:
        """Makes the device wait for the copy of its state; to be called before anything changes the
        state."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied()

    # --- the border between two steps

    def border(self, step: int, state: Callable[[], Any]) -> None:
        """Collective at the borders at which ranks talk: learns how the last snapshot went, and
        begins one.

        Args:
            step: the number of steps that are done, the same on all ranks.
            state: returns what else this rank needs to go on at this border; called where a
                snapshot begins.

        Raises:
            ConfigError: `resume` was not called.
            CheckpointError, RanksDisagreeError: on all ranks: `state` cannot be kept, or there is
                no memory.
        """
        if not self._is_ready:
            raise ConfigError(
                f"protect was called before resume(), which looks for a snapshot. {_RESUME_FIRST}."
            )
        self._life.is_paused, self._num_steps = False, 0
        self._last_step, self._num_borders = step, self._num_borders + 1
        if self._num_borders % self._every:
            return
        meet_in_call("protect", self._everyone)
        last = self._copying
        runs = last is not None and any(thread.is_alive() for thread in last.threads)
        said = step, runs, last is not None and last.has_failed, new_save_id()
        steps, run, have_failed, save_ids = zip(
            *all_gather_objects(said, self._everyone), strict=True
        )
        if len(set(steps)) > 1:
            raise RanksDisagreeError(
                f"protect was given step {min(steps)} on one rank and step {max(steps)} on "
                "another. Give it the number of steps that are done, the same on all ranks."
            )
        if any(run):
            self._say(
                "no snapshot of step %d is made, because the one before is still being written",
                step,
            )
            return
        if last is not None and not any(have_failed):
            self._kept = last.snapshot
        self._begin(Snapshot(step, save_ids[0]), state)

    def _begin(self, snapshot: Snapshot, state: Callable[[], Any]) -> None:
        """Collective: copies the state and lets threads write, send and receive."""
        self._prepare_snapshot()
        contribution, staging = raise_together(
            lambda: self._contribution(snapshot, state), self._everyone, "protect"
        )
        if not self._has_space:
            check_space(self.folder, room_for(list(contribution.tensors)), self.nodes)
            self._connections.connect_buddies()
            self._has_space = True
        if self.nodes.is_first:
            keep_only(self.folder, [each for each in (self._kept, snapshot) if each is not None])
        copy, ready = self._copy(contribution, staging)
        copying = self._copying = _Copying(snapshot)
        send = partial(self._send, snapshot, copy, ready)
        copying.threads = [
            begin_thread(self._guarded, "snapshot, send", copying, send),
            begin_thread(
                self._guarded, "snapshot, receive", copying, partial(self._receive, snapshot)
            ),
        ]

    def _contribution(
        self, snapshot: Snapshot, state: Callable[[], Any]
    ) -> tuple[Contribution, Staging]:
        """What this rank keeps, and the memory for a copy of it."""
        snapshot.folder(self.folder).mkdir(exist_ok=True)
        contribution, tensor = contribution_of(self._whole()), packed(state)
        shape = tuple(tensor.shape)
        training = TensorToWrite(key_of_state(self._everyone.rank), shape, Box.whole(shape), tensor)
        form, size = form_of(self._whole()), self._everyone.size
        about = {**contribution.head.about, NUM_RANKS: size, FORM: form}
        tensors = [*contribution.tensors, training]
        if self._staging is None or self._staging.nbytes < room_for(tensors):
            self._staging = None  # frees the old memory before the new one is allocated
            self._staging = Staging(room_for(tensors), self._device)
        return Contribution(replace(contribution.head, about=about), tensors), self._staging

    def _copy(
        self, contribution: Contribution, staging: Staging
    ) -> tuple[Contribution, Callable[[], None]]:
        """The copy, under way on a stream of its own, and a function that waits until it is
        there."""
        tensors = list(contribution.tensors)
        reached = fence(self._device)
        with on_stream(self._stream, self._device):
            reached()
            copies = staging.begin_copy(tensors)
            copied, ready = fence(self._device), mark(self._device)

        def wait(kept: Sequence[TensorToWrite] = tensors) -> None:
            copied()
            del kept  # what was made for the copy alone must not be used for something else before

        self._copied = wait
        return replace(contribution, tensors=copies), ready

    # --- threads

    def _guarded(self, copying: _Copying, task: Callable[[], bool]) -> None:
        """Runs a task; training goes on without this snapshot where it fails."""
        let_training_first()
        try:
            if not task():
                copying.has_failed = True
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            copying.has_failed = True
            _log.error("the snapshot of step %d was not kept: %s", copying.snapshot.step, error)

    def _send(self, snapshot: Snapshot, copy: Contribution, ready: Callable[[], None]) -> bool:
        """Writes this rank's copy, sends it to the buddy, and commits it where both have it;
        whether that was done."""
        ready()
        rank = self._everyone.rank
        buddy, path = self.nodes.buddy_of(rank), snapshot.file(self.folder, rank)
        try:
            _check_finite(copy, snapshot)
            part = write_tensors(path, copy, snapshot.save_id)
        except CheckpointError:
            if buddy is not None:  # waits for this copy
                send_copy(self._connections.to(buddy), path, None)
            raise
        is_there = buddy is None or send_copy(self._connections.to(buddy), path, part)
        if is_there:
            snapshot.commit(self.folder, rank, part)
        return is_there

    def _receive(self, snapshot: Snapshot) -> bool:
        for rank in self.nodes.protected_by(self._everyone.rank):
            receive_copy(self._connections.to(rank), snapshot, self.folder, rank)
        return True

    def finish(self) -> None:
        """Waits for the snapshot that is under way on this rank."""
        for thread in self._copying.threads if self._copying is not None else ():
            thread.join(_SECONDS_AT_EXIT)

    def _at_exit(self) -> None:
        """Frees the memory of a run that has ended, because the next run would continue from it,
        and notes for the next start how it ended."""
        self.finish()
        # Megatrons leave without an error where they cannot load
        is_over = self._is_ready and ended_by() is None
        if is_over and self.nodes.is_first and self.folder.is_dir():
            with suppress(CheckpointError):  # another run has had the folder since the release
                self._lock = self._lock or disk.lock(self.folder / LOCK)
                note_end(self.folder, self._freed(self._last_step))

    def _freed(self, step: int) -> str:
        """Removes the snapshots if the script came to its end; returns what the next start says
        about it."""
        if self._sigterm.is_set() or not came_to_its_end(self._script):
            return (
                f"it is not known whether the run before had ended at step {step}, as after "
                f"sys.exit() or SIGTERM: if it had, remove {self.folder} on all nodes"
            )
        keep_only(self.folder, ())
        self._say("this run ended at step %d, and its snapshots in memory are removed", step)
        return f"the run before had ended at step {step}, and its snapshots were removed"

    def release(self) -> None:
        """Ends the protection; the snapshots stay until the script has ended."""
        self.finish()
        self._life.stop()
        lock, self._lock = self._lock, None
        disk.unlock(lock)

    # --- the way back

    def resume(
        self, newer_than: int = -1, prepare: Callable[[Manifest], None] = lambda manifest: None
    ) -> Resumed | None:
        """Collective: loads the newest snapshot that is whole, at any parallel sizes; the params
        are not gathered yet.

        Args:
            newer_than: the step that the run has from elsewhere; an older snapshot is not taken.
            prepare: collective; called with the manifest before the state is planned.

        Returns:
            The step and what `state` returned for it; None where no snapshot can be taken, and
            nothing has changed.
        """
        self._is_ready = True
        note_sigterm(self._sigterm)
        if unwatched := self._life.start():
            self._say("%s", unwatched)
        self._life.is_paused = False
        found = restore(self.folder, self._connections, self._whole, newer_than, prepare)
        # until the first border: a host that builds its data set may stand still for long
        self._life.is_paused = True
        self._kept = found[0] if found is not None else None
        return found[1] if found is not None else None

    def _say(self, text: str, *values: object) -> None:
        if self._everyone.rank == 0:
            _log.warning(text, *values)


def _check_finite(copy: Contribution, snapshot: Snapshot) -> None:
    for written in copy.tensors:
        tensor = as_plain(written.tensor)
        values = (
            tensor.float() if tensor.is_floating_point() and tensor.element_size() < 2 else tensor
        )
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"The state of step {snapshot.step} has inf or nan in {written.key}, and a "
                "snapshot must be finite. Training continues, and the snapshot before it is kept."
            )


def _expected_nbytes(model: WholeModel) -> int:
    """What a snapshot of this rank will have at least, before there are moments."""
    nbytes = 0
    for optimizer in (share.optimizer for share in model.shares):
        num_moments = (
            len(optimizer.plan.choice.moments) if Precision.of(optimizer.config).is_full else 0
        )
        num_kept = 1 + num_moments + (optimizer.averages is not None)
        nbytes += sum(flat.main.nbytes for flat in optimizer.flat_params) * num_kept
    return nbytes
