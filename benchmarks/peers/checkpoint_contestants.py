"""What a contestant of checkpoint.py is, this package, and what users have without another
package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group, gather_to_first
from megatron_distopt.optimizer.inner_state import moments_of, restore
from peers.state import KINDS, Setting, Weights, fill, groups_of, named_shapes, untouched_zeros


class Contestant:
    """Optimizer state of one model on all ranks, and a way to save it and load it.

    Its constructor builds that state. Every call is collective.
    """

    #: The last one is read. A save in the background is in its steady state from the second on.
    saves = 1

    def save(self, folder: Path) -> None:
        """Writes the state into a folder that is there and empty."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what `save` left to do in the background."""

    def load(self, folder: Path) -> None:
        """Takes back what `save` wrote."""
        raise NotImplementedError

    def forget(self) -> None:
        """Before `load`: overwrites the state, so that a load that does nothing is noticed."""
        for tensor in self.tensors():
            tensor.detach().zero_()

    def tensors(self) -> Iterator[Tensor]:
        """The live state of this rank: main params and moments."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of all memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes of an element of the model at its worst: of each rank, and of all ranks together
    besides."""

    rank: int
    together: int

    def nbytes(self, numel: int, ranks: int) -> int:
        return (self.rank * ranks + self.together) * numel


@dataclass(frozen=True)
class Entry:
    """A contestant before it is built. By its memory, what does not fit is left out and not
    killed."""

    name: str  # in results
    build: Callable[[Setting], Contestant]  # it, from the setting
    save: Memory  # while it is built and saves
    load: Memory  # while it loads


class Ours(Contestant):
    """One optimizer of this package with its state filled in: `distribute(model).save(folder)`."""

    def __init__(self, setting: Setting, *, async_save: bool = False) -> None:
        config = DistOptConfig(accelerator="torch", async_save=async_save)
        with untouched_zeros():
            model = Weights(setting)
            self._optimizer = distribute(model, config, param_groups=groups_of(model))
        sharded = self._optimizer.sharded
        with torch.no_grad():
            for run in sharded.flat_params:
                fill(run.main)
                moments = {kind: fill(torch.empty_like(run.main)) for kind in KINDS[1:]}
                restore(
                    sharded.inner,
                    sharded.inner.param_groups[run.plan.key.group],
                    run.main,
                    moments,
                    step=10,
                )

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


class Gathered(Contestant):
    """The algorithm of Megatron-LM 23.06 and Megatron-DeepSpeed: gather on the first rank, which
    writes one file.

    It is written here anew after what their files hold: for each of main params and moments one
    fp32 buffer of the whole model. Shards travel over gloo, as there; nobody holds model params
    here, and what it takes to find params in a shard is left out.
    """

    _FILE = "distrib_optim.pt"

    def __init__(self, setting: Setting) -> None:
        self._group = Group.of(None)
        shard_numel = -(-setting.numel // setting.size)
        self._shards = {kind: fill(torch.empty(shard_numel)) for kind in KINDS}

    def save(self, folder: Path) -> None:
        wholes = {kind: gather_to_first(shard, self._group) for kind, shard in self._shards.items()}
        if self._group.rank == 0:
            torch.save({0: {torch.float32: wholes}}, folder / self._FILE)

    def load(self, folder: Path) -> None:
        wholes: dict[str, Tensor] = {}
        if self._group.rank == 0:
            wholes = torch.load(folder / self._FILE, map_location="cpu", weights_only=True)[0][
                torch.float32
            ]
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


class Undistributed(Contestant):
    """torch's AdamW over fp32 main params: the first rank saves the whole state with torch.save,
    all load it.

    Ranks that do not save have their state from the load on. What they would have before takes no
    part in the save, and there is not memory for it at every size.
    """

    _FILE = "optimizer.pt"

    def __init__(self, setting: Setting) -> None:
        self._rank = setting.rank
        self._mains = [Parameter(torch.empty(shape)) for shape in named_shapes(setting).values()]
        self._optimizer = torch.optim.AdamW(self._mains, fused=True)
        for main in self._mains if setting.rank == 0 else ():
            moments = {kind: fill(torch.empty_like(main)) for kind in KINDS[1:]}
            self._optimizer.state[fill(main)] = {"step": torch.tensor(10.0), **moments}

    def save(self, folder: Path) -> None:
        if self._rank == 0:
            torch.save(
                {"main": self._mains, "optimizer": self._optimizer.state_dict()},
                folder / self._FILE,
            )

    def forget(self) -> None:
        """As in a new run: its moments come with the checkpoint."""
        self._optimizer.state.clear()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        state = torch.load(folder / self._FILE, map_location="cpu", weights_only=True)
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


# Params twice while they move into their buffer, 12 bytes of state, a tensor in hand; in the
# background a copy of it.
SYNC = Entry("ours", Ours, save=Memory(4, 12), load=Memory(2, 13))
ASYNC = Entry("ours async", OursInBackground, save=Memory(4, 24), load=Memory(2, 25))
GATHERED = Entry("gather", Gathered, save=Memory(0, 24), load=Memory(0, 24))
UNDISTRIBUTED = Entry("undistributed", Undistributed, save=Memory(0, 12), load=Memory(16, 0))
