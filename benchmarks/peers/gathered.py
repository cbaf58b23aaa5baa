"""The algorithm of Megatron-LM 23.06 and Megatron-DeepSpeed: gather on the first rank, which writes one file.

It is written here anew after what their files hold: for each of main params and moments one fp32 buffer of the whole
model. Shards travel over gloo, as there; nobody holds model params here, which take no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import Group, gather_to_first
from peers.contestant import Contestant, Entry, Memory
from peers.state import KINDS, Setting, fill

_FILE = "distrib_optim.pt"


class Gathered(Contestant):
    """A shard of each kind; what it takes to find params in it is left out."""

    def __init__(self, setting: Setting) -> None:
        self._group = Group.of(None)
        shard_numel = -(-setting.numel // setting.size)
        self._shards = {kind: fill(torch.empty(shard_numel)) for kind in KINDS}

    def save(self, folder: Path) -> None:
        wholes = {kind: gather_to_first(shard, self._group) for kind, shard in self._shards.items()}
        if self._group.rank == 0:
            torch.save({0: {torch.float32: wholes}}, folder / _FILE)

    def load(self, folder: Path) -> None:
        wholes: dict[str, Tensor] = {}
        if self._group.rank == 0:
            wholes = torch.load(folder / _FILE, map_location="cpu", weights_only=True)[0][torch.float32]
        for kind, shard in self._shards.items():
            parts = list(wholes[kind].split(shard.numel())) if self._group.rank == 0 else None
            if parts is not None and self._group.size == 1:
                shard.copy_(parts[0])
            else:
                dist.scatter(shard, parts, src=self._group.global_rank(0), group=self._group.handle)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._shards.values()

    def close(self) -> None:
        self._shards.clear()


GATHERED = Entry(
    "gather",
    "gather on rank 0, which writes one file with torch.save",
    Gathered,
    lambda numel, ranks: Memory(24 * numel, 24 * numel),
)
