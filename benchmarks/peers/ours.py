"""This package: `distribute(model).save(folder)`, at once and in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.optimizer.inner import moments_of, restore
from peers.contestant import Contestant, Entry, Memory
from peers.state import KINDS, Setting, Weights, fill, groups_of, untouched_zeros


class Ours(Contestant):
    """One optimizer of this package with its state filled in."""

    def __init__(self, setting: Setting, *, async_save: bool = False) -> None:
        config = DistOptConfig(accelerator="torch", async_save=async_save)
        with untouched_zeros():
            model = Weights(setting)
            self._optimizer = distribute(model, config, param_groups=groups_of(model))
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        sharded = self._optimizer.sharded
        for run in sharded.flat_params:
            fill(run.main)
            moments = {kind: fill(torch.empty_like(run.main)) for kind in KINDS[1:]}
            restore(sharded.inner, sharded.inner.param_groups[run.plan.key.group], run.main, moments, step=10)

    def save(self, folder: Path) -> None:
        self._optimizer.save(folder)

    def load(self, folder: Path) -> None:
        self._optimizer.load(folder)

    def tensors(self) -> Iterator[Tensor]:
        for run in self._optimizer.sharded.flat_params:
            yield run.main
            yield from moments_of(self._optimizer.sharded.inner, run.main).values()

    def close(self) -> None:
        del self._optimizer


class OursInBackground(Ours):
    """The same, with `async_save`."""

    saves = 2

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, async_save=True)

    def finish(self) -> None:
        self._optimizer.finish_saving()


def _memory(numel: int, ranks: int) -> Memory:
    """Params twice while they move into their buffer; the state; a tensor in hand."""
    return Memory((4 * ranks + 12) * numel, (2 * ranks + 13) * numel)


def _memory_in_background(numel: int, ranks: int) -> Memory:
    """And a copy of the state."""
    memory = _memory(numel, ranks)
    return Memory(memory.save + 12 * numel, memory.load + 12 * numel)


SYNC = Entry("ours", "this package, on the disk when save() returns", Ours, _memory)
ASYNC = Entry("ours async", "this package, async_save", OursInBackground, _memory_in_background)
