"""The public calls that an optimizer of ours answers beside those of its host, written once."""

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
    """The base beside the host's own class."""

    session: Session
    stats_group: Group  # the ranks that meet in a public call

    def started(self) -> Session:
        """The session; collective at the first call where a host cannot build it before."""
        return self.session

    @on_all_ranks
    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other layout of the same model.

        Args:
            folder: of the checkpoint, the same on all ranks; made where it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the others.
        """
        session = self.started()
        session.bring_up_to_date()
        session.write(Path(folder))
        session.note_newest()

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background (`async_save`); raises what went wrong in
        it."""
        self.started().finish_saving()

    @torch.no_grad()
    @on_all_ranks
    def load(self, folder: str | Path) -> None:
        """Collective: takes what `save` wrote, at this or any other layout, and gathers the params.

        Args:
            folder: of the checkpoint, the same on all ranks; also one of other software that has
                these param names. One that megatron-core wrote in flat buffers without names is
                taken at the layout that wrote it, after the model's weights were loaded.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the others.
        """
        session = self.started()
        with session.loading():
            session.host.read(Path(folder))
        session.note_newest()

    def protect(self, step: int, state: Callable[[], Any] = lambda: None) -> None:
        """Collective: keeps a snapshot of this step in memory, at every `protect_every`-th call.

        To be called after each step, when a scheduler has made its step, too. docs/protect.md shows
        a loop.

        Args:
            step: the number of steps that are done, the same on all ranks.
            state: returns what else this rank needs to go on from here, such as the state of a
                scheduler, of a data loader and of generators: tensors, numbers, texts, lists,
                tuples and dicts. Called for a snapshot alone.

        Raises:
            ConfigError: `protect_every` is not set, or `resume` was not called before.
            CheckpointError, RanksDisagreeError: on all ranks, where one cannot take its part.
        """
        session = self.started()
        protection = session.checked_protection("protect")
        protection.border(step, lambda: {"state": state(), "newest": session.newest})

    @torch.no_grad()
    @on_all_ranks
    def resume(self, newer_than: int = -1) -> Resumed | None:
        """Collective: takes the newest whole snapshot in memory, at this or any other size, and
        gathers the params.

        Args:
            newer_than: the step that the run has from a checkpoint; an older snapshot is not taken.

        Returns:
            `step` and the `state` that this rank gave to `protect`, or where the number of ranks
            has changed rank 0; None where memory has nothing to take, and nothing has changed.

        Raises:
            ConfigError: `protect_every` is not set.
            CheckpointError: on all ranks: `load` took an older checkpoint before than was the
                newest when the snapshot was made.
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
        """Collective: `with optimizer.averaged_params(): ...` evaluates averages, rounded to the
        dtypes of the params.

        Afterwards, also after an error, the params are what they were, to the bit; what was written
        to them within is lost. Before the first step there are no averages, and the params stay.
        Module buffers always stay.

        Raises:
            ConfigError: on all ranks: `ema_decay` is not set.
            AccessError: on all ranks: it is within another one. A step, a save and a load within it
                raise this, too.
        """
        session = self.started()
        optimizers = session.host.optimizers
        if optimizers[0].averages is None:
            raise ConfigError(
                "averaged_params() is called, and the run has no ema_decay and so no averages. "
                "Give ema_decay a number such as 0.999."
            )
        optimizers[0].check_has_params("averaged_params()")
        session.bring_up_to_date()
        with averages_shown(optimizers, session.host.gather_written):
            yield

    def reset_state(self) -> None:
        """Lets the optimizer state of all params begin anew, on all ranks and between two steps.

        Moments are zero or absent, and counts of updates are 0; params, main params and averages
        stay. Of all params, because files of a Megatron have one count for them.
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
        f"The optimizer cannot be {how}, because the params of its model lie in its buffers. Keep "
        "optimizer.state_dict(), or build the model again and call distribute(...) or "
        "get_megatron_optimizer(...)."
    )
