"""No distributed optimizer: every rank has the whole state, the first one saves it with torch.save, all load it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from peers.contestant import Contestant, Entry, Memory
from peers.state import Setting, fill, named_shapes

_FILE = "optimizer.pt"


class Undistributed(Contestant):
    """torch's AdamW over fp32 main params. Ranks that do not save have their state from the load on.

    What they would have before takes no part in the save, and there is not memory for it at every size.
    """

    def __init__(self, setting: Setting) -> None:
        self._rank = setting.rank
        empty = fill if setting.rank == 0 else _nothing
        self._mains = [Parameter(empty(torch.empty(shape))) for shape in named_shapes(setting).values()]
        self._optimizer = torch.optim.AdamW(self._mains, fused=True)
        if setting.rank == 0:
            for main in self._mains:
                moments = {"exp_avg": fill(torch.empty_like(main)), "exp_avg_sq": fill(torch.empty_like(main))}
                self._optimizer.state[main] = {"step": torch.tensor(10.0), **moments}

    def save(self, folder: Path) -> None:
        if self._rank == 0:
            torch.save({"main": self._mains, "optimizer": self._optimizer.state_dict()}, folder / _FILE)

    def forget(self) -> None:
        """As in a new run: its moments come with the checkpoint."""
        self._optimizer.state.clear()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
        for main, saved in zip(self._mains, state["main"], strict=True):
            main.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])

    def tensors(self) -> Iterator[Tensor]:
        for main in self._mains:
            state = self._optimizer.state.get(main)
            if state:
                yield main
                yield from (state["exp_avg"], state["exp_avg_sq"])

    def close(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.param_groups.clear()
        self._mains.clear()


def _nothing(tensor: Tensor) -> Tensor:
    return tensor


UNDISTRIBUTED = Entry(
    "undistributed",
    "whole state on every rank; rank 0 writes it with torch.save, all read it",
    Undistributed,
    lambda numel, ranks: Memory(12 * numel, 16 * numel * ranks),
)
