"""Which files the fork's checkpoint calls write and read.

In a fork with a gathered file, the optimizer's tensors are saved in a folder beside that file, or
with --distopt-checkpoint-format gathered in the file itself. A load reads whichever it finds. In a
fork with per-rank files, the tensors are in every rank's `state_dict()`. Both kinds of forks also
load the state of a run without the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron import get_args

from megatron_distopt.checkpoint import is_checkpoint, load_checkpoint
from megatron_distopt.checkpoint.folder import not_found, optimizer_folder_of, remove_checkpoint
from megatron_distopt.checkpoint.whole_model import load_loss_scale
from megatron_distopt.comm import all_gather_objects, raise_together
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.plain import is_plain
from megatron_distopt.hosts.megatron.saving import head_with
from megatron_distopt.hosts.megatron_2023.fork_files import (
    check_head,
    group_dicts,
    is_of_other_kind,
    load_groups,
    load_rank_state,
    open_gathered,
    open_plain,
    open_rank_state,
    rank_state_dict,
    save_gathered,
)
from megatron_distopt.hosts.megatron_2023.model import ForkModel
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.session import Session


class ForkCheckpoints:
    """The checkpoints of one optimizer; the fork loads one in two calls."""

    def __init__(self, fork: ForkModel, session: Session) -> None:
        self._fork, self._session, self._everyone = fork, session, fork.everyone
        #: Updates so far, as `load_state_dict` found them.
        self._head_step: int | None = None
        #: Whether `load_state_dict` has loaded the whole state, so that the call for a file which
        #: follows has nothing to do.
        self._has_whole_state = False
        #: Undoes the changes of `load_state_dict`, in case the tensors cannot be loaded.
        self._take_back: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state that a gathered file does not have, or with per-rank files all of this rank's
        state. No gather of params may be in progress."""
        fork = self._fork
        if not fork.gathers_state:
            fork.check_weights()
            return rank_state_dict(fork)
        return head_with(group_dicts(fork), fork.sharded.plan.choice, fork.grad_scaler)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective: the first call of a load. With a gathered file it loads only param groups and
        the loss scale."""
        fork, everyone = self._fork, self._everyone
        self._has_whole_state = False
        self._session.begin_load()
        if not is_plain(state_dict) and fork.gathers_state:
            raise_together(lambda: check_head(fork, state_dict), everyone, "load")
            self._take_back = _undo_of(fork)
            if not is_of_other_kind(fork, state_dict):
                load_groups(fork.param_groups, state_dict["optimizer"]["param_groups"])
            load_loss_scale(fork.sharded.loss_scale, state_dict.get("grad_scaler") or {})
            self._head_step = the_step(state_dict["optimizer"]["param_groups"], "the checkpoint")
            self._session.note_loaded()
            return
        open_entry = open_plain if is_plain(state_dict) else open_rank_state
        load_rank_state(fork, partial(open_entry, fork, state_dict))
        self._has_whole_state = True
        self._session.end_load()

    def save(self, filename: str) -> None:
        """Collective: writes the tensors, into a folder or a gathered file. No gather of params may
        be in progress."""
        raise_together(self._fork.check_weights, self._everyone, "save")
        self._session.forget_newest()
        # each rank is given another file name; the first one's counts
        folder = all_gather_objects(optimizer_folder_of(filename), self._everyone)[0]
        if self._fork.sharded.config.checkpoint_format != "gathered":
            self._session.write(folder)
            return
        save_gathered(self._fork, filename)

        def remove_older() -> None:
            if self._everyone.rank == 0 and is_checkpoint(folder):
                remove_checkpoint(folder)

        # A load would prefer an older folder to the new file.
        raise_together(remove_older, self._everyone, "save")

    def load(self, filename: str) -> None:
        """Collective: reads the tensors, from a folder or the fork's file."""
        has_whole_state, self._has_whole_state = self._has_whole_state, False
        if has_whole_state or getattr(get_args(), "no_load_optim", False):
            return
        self._session.begin_load()
        folder = optimizer_folder_of(filename)
        found = (folder, is_checkpoint(folder), Path(filename).exists())
        folder, has_folder, has_file = all_gather_objects(found, self._everyone)[0]
        try:
            if has_folder:
                load_checkpoint(folder, self._fork.whole(), self._everyone)
            elif has_file:
                self._check_adams(filename)
                state_of = partial(open_gathered, self._fork, filename, self._head_step)
                load_rank_state(self._fork, state_of)
            else:
                raise not_found(folder, filename)
        except Exception:
            if self._take_back is not None:
                self._take_back()
            raise
        finally:
            self._take_back = None
        self._session.end_load()

    def _check_adams(self, filename: str) -> None:
        choice = self._fork.sharded.plan.choice
        if choice.updates_whole_params or any(map(is_muons_group, self._fork.param_groups)):
            raise CheckpointError(
                f"Optimizer file {filename} holds only the moments of Adam, but this run needs "
                f"the state of {choice.name if choice.updates_whole_params else 'Muon'}. Convert "
                "the file with megatron-distopt convert --to distopt, or write --no-load-optim."
            )


def _undo_of(fork: ForkModel) -> Callable[[], None]:
    """Returns a function that restores the present hyperparameters and loss scale."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in fork.param_groups
    ]
    scale = fork.sharded.loss_scale.state_dict()

    def undo() -> None:
        for group, before in zip(fork.param_groups, groups, strict=True):
            group.update(before)
        fork.sharded.loss_scale.load_state_dict(scale)

    return undo
