"""One run of a distributed optimizer: it is saved and protected here, and hooks run around its
steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megatron_distopt.checkpoint import is_checkpoint, read_manifest, save_checkpoint
from megatron_distopt.checkpoint.background import BackgroundSaver
from megatron_distopt.checkpoint.protect.nodes import folder_of
from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.comm import Group, all_gather_objects, raise_together
from megatron_distopt.errors import CheckpointError, ConfigError
from megatron_distopt.optimizer.inner_state import count_updates
from megatron_distopt.optimizer.step import finish_deferred_check
from megatron_distopt.options import variable_of
from megatron_distopt.session.announce import announce
from megatron_distopt.session.host_state import HostState

#: Key in a manifest's `about`: the global rank of the first of the ranks that saved together.
FIRST_RANK = "first_rank"


class HostScript(Protocol):
    """The training script of a host, which has state of its own in addition to the optimizer's."""

    def prepare_snapshot(self) -> None:
        """Collective: checks and collects what the script adds to a snapshot."""


class Session:
    """Collective: one run of a distributed optimizer in any host.

    Args:
        host: what differs between hosts.
        of_all: the session of all optimizers of the model, if this one is for only one of them.
            Both share one protection.

    Attributes:
        protection: makes snapshots; None without `protect_every`.
        hooks: called around each step and after a load; empty without `protect_every`.
        newest: number of updates in the newest checkpoint on disk, as `save` and `load` of a
            protected run have seen it; None if unknown.
        script: the host's training script, if that trains the model.

    Raises:
        ConfigError, CheckpointError: on all ranks, if there is no folder for snapshots or no space
            in it.
    """

    def __init__(self, host: HostState, of_all: Session | None = None) -> None:
        self.host, self.everyone = host, host.everyone
        self.config = config = host.optimizers[0].config
        self.script: HostScript | None = None
        self._background = BackgroundSaver(self.everyone) if config.async_save else None
        self.protection: Protection | None = (
            self._begin_protection() if of_all is None else of_all.protection
        )
        self.hooks: tuple[Protection, ...] = () if self.protection is None else (self.protection,)
        self.newest: int | None = None

    def _begin_protection(self) -> Protection | None:
        """Collective."""
        config = self.config
        if config.protect_every is None:
            return None
        folder = raise_together(
            lambda: folder_of(config.protect_folder, os.environ, self.everyone), self.everyone
        )
        protection = Protection(
            config.protect_every,
            folder,
            self.host.whole,
            self.everyone,
            self.host.optimizers[0].device,
            self._prepare_snapshot,
            config.protect_timeout,
        )
        if self.everyone.rank == 0:
            announce(f"megatron_distopt protects this run: {protection.described()}")
        return protection

    def enter_script(self, script: HostScript) -> None:
        """Notes that a host's script trains the model from now on."""
        self.script = script

    def _prepare_snapshot(self) -> None:
        """Collective."""
        self.bring_up_to_date()
        if self.script is not None:
            self.script.prepare_snapshot()
        finish_deferred_check(self.host.optimizers, self.everyone)

    # --- the state is read or replaced

    def wait_for_snapshot(self) -> None:
        """Waits until the device has copied the state for a snapshot, before the state changes."""
        if self.protection is not None:
            self.protection.wait_for_copy()

    def bring_up_to_date(self) -> None:
        """Collective: before the state is read."""
        self.wait_for_snapshot()
        self.host.bring_up_to_date()

    def begin_load(self) -> None:
        """Collective: before the state is replaced."""
        self.finish_saving()  # the checkpoint being saved may be the one to load
        self.wait_for_snapshot()
        self.host.begin_load()

    def end_load(self) -> None:
        """Collective: after the state was replaced; gathers the params."""
        self.host.loaded()
        self.note_loaded()
        self.host.gather_written()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Collective: wraps a load that replaces the state, or raises on all ranks."""
        self.begin_load()
        yield
        self.end_load()

    def note_loaded(self) -> None:
        """Tells the hooks that the state was replaced."""
        for hook in self.hooks:
            hook.loaded()

    # --- checkpoints

    def write(self, folder: Path) -> None:
        """Collective: saves the state, or begins to in the background. The deferred check of the
        last step may raise."""
        if self.everyone.size < Group.of().size:
            raise_together(lambda: self._check_folder(folder), self.everyone, "save")
        finish_deferred_check(self.host.optimizers, self.everyone)
        if self._background is not None:
            self._background.save(folder, self.host.whole())
        else:
            save_checkpoint(folder, self.host.whole(), self.everyone)

    def _check_folder(self, folder: Path) -> None:
        """Refuses a folder in which another process group of the job has saved: its checkpoint
        would be replaced."""
        if self.everyone.rank == 0 and is_checkpoint(folder):
            own = self.everyone.global_rank(0)
            first = read_manifest(folder).about.get(FIRST_RANK, own)
            if first != own:
                raise CheckpointError(
                    f"Checkpoint {folder} was saved by the process group whose first rank is "
                    f"{first}, and this group would replace it. Give each process group a folder "
                    "of its own."
                )

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background, and raises the error of a failed one."""
        if self._background is not None:
            self._background.finish()

    def note_newest(self) -> None:
        """Collective: notes that the newest checkpoint on disk has the present state. Not with
        `async_save`, where a crash may prevent the write."""
        if self.protection is not None and not self.config.async_save:
            self.newest = self._num_updates()

    def forget_newest(self) -> None:
        """Notes that the newest checkpoint is unknown, because the host saves by itself from now
        on."""
        self.newest = None

    # --- snapshots

    def checked_protection(self, call: str) -> Protection:
        self.host.optimizers[0].check_has_params(call)
        if self.protection is None:
            raise ConfigError(
                f"{call} was called, but protect_every is not set, so there are no snapshots. Set "
                "protect_every to a number of steps, such as 100."
            )
        return self.protection

    def take_newest(self, resumed: Resumed) -> None:
        """Collective: takes over what a snapshot says about the newest checkpoint. Refuses the
        snapshot if `load` took an older checkpoint than the newest at that time."""
        loaded, was = self.newest, resumed.state["newest"]
        self.newest = was if loaded is None else loaded
        if was not in (None, self.newest) and (loaded or 0) < self._num_updates():
            found = f"a checkpoint of {loaded} updates"
            self.refuse_change(resumed.step, found, f"one of {was} updates")

    def _num_updates(self) -> int:
        """Collective: the number of updates of the params that were updated most often."""
        counts = [count_updates(sharded.inner) or 0 for sharded in self.host.optimizers]
        return max(all_gather_objects(max(counts), self.everyone))

    def refuse_change(self, step: int, found: str, was: str) -> None:
        """Refuses a snapshot after which the checkpoints on disk were changed by hand, unless
        `protect_take` names it."""
        if self.config.protect_take != step:
            raise CheckpointError(
                f"This start found {found}, but when the snapshot of step {step} was made, the "
                f"newest checkpoint was {was}. To continue from the snapshot in memory, set "
                f"{variable_of('protect_take')}={step} on all nodes. To continue from the "
                "checkpoint, remove "
                f"{self.checked_protection('resume').folder} on all nodes."
            )

    def release(self) -> None:
        """Ends the protection."""
        if self.protection is not None:
            self.protection.release()
