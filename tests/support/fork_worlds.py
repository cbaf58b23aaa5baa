"""The small fork of 2023 in one spawn: worlds of several sizes one after the other, and what a run
of it holds.

A process costs seconds and a training a tenth of one, so the ranks of one spawn form world after
world:

    fork = ForkInWorlds("gathered", rank, folder, ranks=6) if fork.enters(2):                      #
    the first two of them; the others wait in the next world that they are in
        run = fork.train("--bf16", "--train-iters", "4")
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_distopt.comm import pairwise
from tests.support.mini_fork import InstalledFork, Iteration, TrainingRun
from tests.support.refusals import raised
from tests.support.values import same


class ForkInWorlds:
    """The fork in one rank of a spawn of `ranks`, quiet. All ranks share the folder."""

    def __init__(self, file_layout: str, rank: int, folder: Path, *, ranks: int) -> None:
        self.rank, self.folder, self.file_layout = rank, folder, file_layout
        self.fork = InstalledFork.imported(file_layout=file_layout, adam="fused")
        self._worlds, self._ranks = 0, ranks

    def enters(self, size: int) -> bool:
        """Collective: whether this rank is one of the first `size`, which are all that there are
        from here on."""
        self._worlds += 1
        self.fork.uninstall()  # while it is installed, all ranks of a new world have to have it
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.rank >= size:
            return False  # it waits in the next world that it is part of
        sizes = {name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), **sizes)
        store = dist.FileStore(str(self.folder / f"world{self._worlds}"), size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=size, timeout=timedelta(seconds=600)
        )
        dist.barrier()  # a rank that left at once would close connections that others still make
        return True

    def leaves(self) -> None:
        """Collective: all ranks of the spawn meet again, as `run_ranks` expects it."""
        self.enters(self._ranks)

    def first(self, look: Callable[[Any], object]) -> contextlib.AbstractContextManager[object]:
        """In the block trainings call `look(optimizer)` before their first iteration."""
        train = self.fork.training.train

        def look_and_train(forward_step: Any, model: Any, optimizer: Any, *args: Any) -> Any:
            look(optimizer)
            return train(forward_step, model, optimizer, *args)

        return mock.patch.object(self.fork.training, "train", look_and_train)

    def train(self, *words: str, ours: bool = True) -> TrainingRun:
        """Collective: the fork's own `pretrain`."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.fork.train(*words, ours=ours)


@dataclasses.dataclass(frozen=True)
class Continued:
    """The iterations after the checkpoint, on the rank that logs, of the run that had none and of
    the one that did."""

    uninterrupted: tuple[Iteration, ...]
    resumed: tuple[Iteration, ...]
    same_end: bool = True

    @property
    def largest_deviation(self) -> float:
        """Of the loss."""
        pairs = zip(self.uninterrupted, self.resumed, strict=True)
        return max(abs(one.loss - other.loss) for one, other in pairs)


@contextlib.contextmanager
def adam_of_the_fork(kind: type) -> Iterator[None]:
    """The fork's `Adam` in all modules that have it by value, as MINI_FORK_ADAM chooses at
    import."""
    import megatron.optimizer as package
    from megatron.optimizer import distrib_optimizer, fused_adam

    with contextlib.ExitStack() as stack:
        for module in (package, distrib_optimizer, fused_adam):
            stack.enter_context(mock.patch.object(module, "Adam", kind))
        yield


@contextlib.contextmanager
def slow_gathers(seconds: float = 0.005) -> Iterator[None]:
    """In it, gathers in the background take their time: whoever does not wait for one has old
    values."""
    gather = pairwise.all_gather

    def slow(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        gather(*args)

    with mock.patch.object(pairwise, "all_gather", slow):
        yield


def distance(one: TrainingRun, other: TrainingRun) -> float:
    """The largest difference of any element of the params of this rank."""
    return max(
        float((one.params[name].double() - other.params[name].double()).abs().max())
        for name in one.params
    )


def held(run: TrainingRun) -> dict[str, Any]:
    """Copies of all that training goes on from, of an optimizer of ours."""
    optimizer, sharded = run.optimizer, run.optimizer.sharded
    return copy.deepcopy(
        {
            "params": {name: param.detach() for name, param in run.model[0].named_parameters()},
            "main": [each.main.detach() for each in sharded.flat_params],
            "state": [dict(sharded.inner.state.get(each.main, {})) for each in sharded.flat_params],
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ],
            "loss scale": None
            if optimizer.grad_scaler is None
            else optimizer.grad_scaler.state_dict(),
        }
    )


@dataclasses.dataclass(frozen=True)
class Refused:
    """What a rank raised, and whether all that it held was the same afterwards."""

    kind: str
    text: str
    unchanged: bool


def refusal(run: TrainingRun, call: Callable[[], object]) -> Refused:
    """What came of a call that may change what a run holds."""
    before, (kind, text) = held(run), raised(call)
    return Refused(kind, text, same(held(run), before))
