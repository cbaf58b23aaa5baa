"""Saving for a host: at once or in the background, and how many checkpoints stay."""

from __future__ import annotations

from pathlib import Path

from megatron_distopt.checkpoint import WholeModel, save_checkpoint
from megatron_distopt.checkpoint.background import BackgroundSaver
from megatron_distopt.checkpoint.folder import drop_older
from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig
from megatron_distopt.optimizer.step import finish_deferred_check


class Saver:
    """Saves the checkpoints of one optimizer of a host."""

    def __init__(self, config: DistOptConfig, everyone: Group) -> None:
        self._config, self._everyone = config, everyone
        nbytes = None if config.async_buffer_mb is None else config.async_buffer_mb * 10**6
        self._background = BackgroundSaver(everyone, nbytes) if config.async_save else None

    def save(self, folder: Path, model: WholeModel) -> None:
        """Collective: saves, or begins to.

        Raises:
            NonFiniteGradError: on all ranks, where the deferred check of the last step finds inf or nan and the policy
                is "raise".
        """
        finish_deferred_check([share.optimizer for share in model.shares], self._everyone)
        if self._background is not None:
            self._background.save(folder, model, lambda: self._drop_older(folder))
        else:
            save_checkpoint(folder, model, self._everyone)
            self._drop_older(folder)

    def finish(self) -> None:
        """Collective: waits for a save in the background; raises what went wrong in it."""
        if self._background is not None:
            self._background.finish()

    def _drop_older(self, folder: Path) -> None:
        if self._config.keep_last is not None and self._everyone.rank == 0:
            drop_older(folder, self._config.keep_last)
