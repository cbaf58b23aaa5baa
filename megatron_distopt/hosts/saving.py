"""What hosts share of their checkpoints: when they are saved and how many stay, and what goes into
a host's own files.

[Note: heads of other classes] A host keeps param groups in a file of its own, the head, and reads
them before the tensors. Numbers of the same name are not the same in two classes: `eps` of
Adafactor is a pair. So the head names a class that updates whole params, and a run with another
optimizer leaves these groups alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_distopt.checkpoint import WholeModel, save_checkpoint
from megatron_distopt.checkpoint.background import BackgroundSaver
from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.checkpoint.load_plan import class_of
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.param_groups import SCHEDULE
from megatron_distopt.checkpoint.protect.nodes import folder_of
from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.comm import Group, exchange, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import CheckpointError, ConfigError
from megatron_distopt.hosts.averaging import AveragedCalls
from megatron_distopt.hosts.on_all_ranks import on_all_ranks
from megatron_distopt.hosts.report import announce
from megatron_distopt.optimizer.inner import InnerChoice, count_updates
from megatron_distopt.optimizer.step import finish_deferred_check
from megatron_distopt.options import variable_of

_CLASS = "updates_whole_params"
#: What a host calls around each step and after a load.
StepHook = DigestLog | Protection


class Saver:
    """Saves the checkpoints of one optimizer of a host."""

    def __init__(self, config: DistOptConfig, everyone: Group) -> None:
        self._everyone = everyone
        self._background = BackgroundSaver(everyone) if config.async_save else None

    def save(self, folder: Path, model: WholeModel) -> None:
        """Collective: saves, or begins to; the deferred check of the last step may raise."""
        finish_deferred_check([share.optimizer for share in model.shares], self._everyone)
        if self._background is not None:
            self._background.save(folder, model)
        else:
            save_checkpoint(folder, model, self._everyone)

    def finish(self) -> None:
        """Collective: waits for a save in the background; raises what went wrong in it."""
        if self._background is not None:
            self._background.finish()


def protection_of(
    config: DistOptConfig,
    whole: Callable[[], WholeModel],
    everyone: Group,
    device: torch.device,
    settle: Callable[[], None],
) -> Protection | None:
    """Collective: what `protect_every` asks for; None where it asks for nothing.

    `settle` is collective, and brings the state up to date before it is read.

    Raises:
        ConfigError, CheckpointError: on all ranks: there is no folder for snapshots, or no room in
            it.
    """
    if config.protect_every is None:
        return None
    folder = raise_together(
        lambda: folder_of(config.protect_folder, os.environ, everyone), everyone
    )

    def settled() -> None:
        settle()
        finish_deferred_check([share.optimizer for share in whole().shares], everyone)

    protection = Protection(
        config.protect_every, folder, whole, everyone, device, settled, config.protect_timeout
    )
    if everyone.rank == 0:
        announce(f"megatron_distopt protects this run: {protection.described()}")
    return protection


def untrained_tensors(chunks: Iterable[Module]) -> dict[str, Tensor]:
    """What a model has beside the params that train, by name: frozen params and persistent
    buffers."""
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        for prefix, module in chunk.named_modules(prefix=str(number)):
            buffers = module.named_buffers(prefix, recurse=False)
            skipped = {f"{prefix}.{name}" for name in module._non_persistent_buffers_set}
            found |= {name: buffer for name, buffer in buffers if name not in skipped}
            params = module.named_parameters(prefix, recurse=False)
            found |= {name: param for name, param in params if not param.requires_grad}
    return found


class ProtectedCalls(AveragedCalls):
    """What an optimizer answers about snapshots of its state; a Megatron's own script calls it, see
    protecting.py."""

    protection: Protection | None
    #: Updates of the newest checkpoint on disk, from `save` and `load` of a protected run; None
    #: where that is not known.
    _newest: int | None = None

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
        self._protected("protect").border(step, lambda: {"state": state(), "newest": self._newest})

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
        protection, loaded = self._protected("resume"), self._newest
        self._begin_load()
        resumed = protection.resume(newer_than, self._grow_to_saved)
        if resumed is None:
            return None
        was = resumed.state["newest"]
        self._newest = was if loaded is None else loaded
        if was not in (None, self._newest) and (loaded or 0) < self._num_updates(protection):
            self.refuse_change(
                resumed.step, f"a checkpoint of {loaded} updates", f"one of {was} updates"
            )
        self._end_load()
        return replace(resumed, state=resumed.state["state"])

    def _protected(self, call: str) -> Protection:
        self._all_sharded()[0].check_has_params(call)
        if self.protection is None:
            raise ConfigError(
                f"{call} was called in a run that is not protected. Give protect_every a number of "
                "steps, such as 100."
            )
        return self.protection

    def note_newest(self) -> None:
        """Collective: the present state is that of the newest checkpoint on disk, unless one is
        written in the background, which a crash may prevent."""
        is_written = not self._all_sharded()[0].config.async_save
        if self.protection is not None and is_written:
            self._newest = self._num_updates(self.protection)

    def _num_updates(self, protection: Protection) -> int:
        """Collective: of the params that were updated most often."""
        counts = [count_updates(sharded.inner) or 0 for sharded in self._all_sharded()]
        return max(exchange(max(counts), protection.nodes.group))

    def refuse_change(self, step: int, found: str, was: str) -> None:
        """Refuses a snapshot after which the checkpoints on disk were changed by hand, unless
        `protect_take` names it."""
        if self._all_sharded()[0].config.protect_take != step:
            raise CheckpointError(
                f"This start found {found}, and the newest checkpoint was {was} when the snapshot "
                f"of step {step} in memory was made. To go on from memory, set "
                f"{variable_of('protect_take')}={step} on all nodes. To go on from the checkpoint, "
                f"remove {self._protected('resume').folder} on all nodes."
            )

    def _begin_load(self) -> None:
        """Collective: ends what reads or writes the state."""
        raise NotImplementedError

    def _grow_to_saved(self, manifest: Manifest) -> None:
        """Collective: begins what was saved and has not begun here."""

    def _end_load(self) -> None:
        """Collective: gathers the params of the state that was loaded."""
        raise NotImplementedError


def hooks_of(
    protection: Protection | None,
    config: DistOptConfig,
    whole: Callable[[], WholeModel],
    everyone: Group,
) -> tuple[StepHook, ...]:
    """What is called around each step and after a load; nothing without options that ask for it."""
    digests = () if config.log_digests is None else (DigestLog(config, whole, everyone),)
    return digests if protection is None else (protection, *digests)


def head_entry(choice: InnerChoice) -> dict[str, str]:
    """What the head says beside param groups; nothing for classes whose groups have the keys of
    Adam's."""
    return {_CLASS: class_of(choice.name)} if choice.updates_whole_params else {}


def is_of_other_class(choice: InnerChoice, head: Mapping[str, Any]) -> bool:
    """Whether param groups of a head mean something else here, see [Note: heads of other
    classes]."""
    return head.get(_CLASS) != head_entry(choice).get(_CLASS)


def options_of_run(args: object) -> frozenset[str]:
    """The options of param groups that a load leaves as the run has them, from the arguments of a
    Megatron's script.

    Megatron takes them from the checkpoint, so that its --override-opt_param-scheduler moves the lr
    that it logs alone.
    """
    names = ("use_checkpoint_opt_param_scheduler", "use_checkpoint_lr_scheduler")
    return frozenset() if any(getattr(args, name, False) for name in names) else SCHEDULE
