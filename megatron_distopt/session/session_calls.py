"""The public calls that the package adds to every host's optimizer, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.comm import Group
from megatron_distopt.errors import AccessError, ConfigError
from megatron_distopt.session.on_all_ranks import on_all_ranks
from megatron_distopt.session.run_session import Session
from megatron_distopt.session.shown_averages import averages_shown


class SessionCalls:
    """A base class of every host's optimizer, in addition to the host's own class."""

    session: Session
    stats_group: Group  # the ranks that meet in a public call

    def started(self) -> Session:
        """The session. The first call is collective in hosts that cannot build it earlier."""
        return self.session

    @on_all_ranks
    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other layout of the same model.

        Args:
            folder: where the checkpoint is written, the same on all ranks; made if it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the other ranks.
        """
        session = self.started()
        session.bring_up_to_date()
        session.write(Path(folder))
        session.note_newest()

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background (`async_save`), and raises the error of a
        failed one."""
        self.started().finish_saving()

    @torch.no_grad()
    @on_all_ranks
    def load(self, folder: str | Path) -> None:
        """Collective: loads what `save` wrote, at this or any other layout, and gathers the params.

        Args:
            folder: the checkpoint to load, the same on all ranks. Other software may have written
                it, with these param names. One that megatron-core wrote in flat buffers without
                names loads only at the layout that wrote it, after the model's weights.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the other ranks.
        """
        session = self.started()
        with session.loading():
            session.host.read(Path(folder))
        session.note_newest()

    def protect(self, step: int, state: Callable[[], Any] = lambda: None) -> None:
        """Collective: keeps a snapshot of this step in memory, at every `protect_every`-th call.

        Call it after each step, and after the step of a scheduler. docs/protect.md shows a loop.

        Args:
            step: the number of steps that are done, the same on all ranks.
            state: returns what else this rank needs to continue from here, such as the state of a
                scheduler, a data loader and generators: tensors, numbers, strings, lists, tuples
                and dicts. It is called only when a snapshot is made.

        Raises:
            ConfigError: if `protect_every` is not set, or `resume` was not called before.
            CheckpointError, RanksDisagreeError: on all ranks, if one cannot keep its part.
        """
        session = self.started()
        protection = session.checked_protection("protect")
        protection.border(step, lambda: {"state": state(), "newest": session.newest})

    @torch.no_grad()
    @on_all_ranks
    def resume(self, newer_than: int = -1) -> Resumed | None:
        """Collective: loads the newest complete snapshot in memory, at this or any other size, and
        gathers the params.

        Args:
            newer_than: the step of a checkpoint that was loaded; an older snapshot is not loaded.

        Returns:
            `step` and the `state` that this rank gave to `protect`; rank 0's state if the number of
            ranks has changed. None if there is no snapshot to load; nothing has changed then.

        Raises:
            ConfigError: if `protect_every` is not set.
            CheckpointError: on all ranks, if `load` took an older checkpoint than the newest one at
                the time of the snapshot.
        """
        session = self.started()
        protection = session.checked_protection("resume")
        session.begin_load()
        resumed = protection.resume(newer_than, session.host.begin_training)
        if resumed is None:
            return None
        session.take_newest(resumed)
        session.end_load()
        return replace(resumed, state=resumed.state["state"])

    @contextmanager
    @on_all_ranks
    def averaged_params(self) -> Iterator[None]:
        """Collective: within `with optimizer.averaged_params():` the model has the averages of its
        params, rounded to their dtypes.

        Afterwards, also after an error, the params are what they were, to the bit; what was written
        to them in between is lost. Before the first step there are no averages, and the params
        stay. Module buffers always stay.

        Raises:
            ConfigError: on all ranks, if `ema_decay` is not set.
            AccessError: on all ranks, if it is nested. A step, a save or a load within it raises
                this, too.
        """
        session = self.started()
        optimizers = session.host.optimizers
        if optimizers[0].averages is None:
            raise ConfigError(
                "averaged_params() was called, but ema_decay is not set, so there are no averages. "
                "Set ema_decay to a number such as 0.999."
            )
        optimizers[0].check_has_params("averaged_params()")
        session.bring_up_to_date()
        with averages_shown(optimizers, session.host.gather_written):
            yield

    def reset_state(self) -> None:
        """Resets the optimizer state of all params. Call it on all ranks, between two steps.

        Moments become zero or absent, and counts of updates become 0; params, main params and
        averages stay. It resets all params because files of a Megatron have one count for them.
        """
        session = self.started()
        session.wait_for_snapshot()
        for sharded in session.host.optimizers:
            sharded.reset_state()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_copied("pickled")


def _not_copied(how: str) -> AccessError:
    return AccessError(
        f"The optimizer cannot be {how}, because the params of its model lie in its buffers. Copy "
        "optimizer.state_dict() instead, or build the model again and call distribute(...) or "
        "get_megatron_optimizer(...)."
    )
