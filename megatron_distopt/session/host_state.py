"""What differs between hosts: how the state of an optimizer is read and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_distopt.checkpoint import WholeModel
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.comm import Group
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class HostState(Protocol):
    """What a `Session` needs from its host. While the host brings the state up to date or replaces
    it, no snapshot reads it."""

    everyone: Group  # all ranks that hold a part of the model
    # those of this rank's part of the model, such as one for dense and one for expert params
    optimizers: Sequence[ShardedOptimizer]

    def whole(self) -> WholeModel:
        """How this rank's part lies in the whole model."""

    def bring_up_to_date(self) -> None:
        """Collective: makes the state match the params as they are now, or raises on all ranks."""

    def begin_load(self) -> None:
        """Collective: before a load, ends everything that reads or writes the state."""

    def begin_training(self, saved: Manifest) -> None:
        """Collective: gives state to params that were saved with state and have none here."""
        return None

    def read(self, folder: Path) -> None:
        """Collective: reads a checkpoint folder into the state, without gathering the params."""
        resume_step = self.optimizers[0].config.resume_step
        load_any(folder, self.whole(), self.everyone, resume_step=resume_step)

    def loaded(self) -> None:
        """Collective: called after a load, before the params are gathered."""
        return None

    def gather_written(self) -> None:
        """Collective: gathers on all ranks what was written into shards of the param buffers."""
