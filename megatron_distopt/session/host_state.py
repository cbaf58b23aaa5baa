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
    """What a `Session` asks of its host. No snapshot reads the state while the host brings it up to
    date or replaces it."""

    everyone: Group  # all ranks that hold a part of the model
    # of this rank's part of the model, such as one of dense and one of expert params
    optimizers: Sequence[ShardedOptimizer]

    def whole(self) -> WholeModel:
        """How this rank's part lies in the whole model."""

    def bring_up_to_date(self) -> None:
        """Collective: makes the state that of the params as they are, or raises on all ranks."""

    def begin_load(self) -> None:
        """Collective: ends what would read or write the state while a load replaces it."""

    def begin_training(self, saved: Manifest) -> None:
        """Collective: gives those params a state that were saved with one and have none here."""
        return None

    def read(self, folder: Path) -> None:
        """Collective: reads what is in a folder into the state; the params are not gathered."""
        resume_step = self.optimizers[0].config.resume_step
        load_any(folder, self.whole(), self.everyone, resume_step=resume_step)

    def loaded(self) -> None:
        """Collective: follows a load, before the params are gathered."""
        return None

    def gather_written(self) -> None:
        """Collective: brings to all ranks what was written into the shards of the param buffers."""
