"""The same programs with `megatron_distopt.distribute`: the only file of these tests that knows how
it is called."""

from __future__ import annotations

import dataclasses
import faulthandler
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import megatron_distopt
from megatron_distopt.errors import DistOptError
from tests.differential.reference import plain

#: A rank that waits longer for another one is in a collective that the other will not join.
SECONDS_IN_A_COLLECTIVE = 25.0


@dataclasses.dataclass
class OurWorld:
    """One real rank, as a program sees it; `ReferenceWorld` has the same calls."""

    rank: int
    size: int
    folder: Path
    seen: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    def see(self, label: str, value: Any) -> None:
        """Records a value that has to be the same as the reference's."""
        self.seen.append((label, plain(value)))

    def all_ranks(self, place: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def average_now(self) -> None:
        """Nothing: what the program does with `p.grad` next has to work by itself, or be
        refused."""

    def through_torch(self, model: nn.Module, optimizer: Any, way: int) -> None:
        """Collective: takes the state out in one of torch's formats, and loads it."""
        if way % 3 == 0:
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
            return
        if way % 3 == 1:
            state = optimizer.full_state_dict()
        else:
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict() if self.rank == 0 else {}
        optimizer.load_state_dict(self.all_ranks("state", state)[0])

    def distribute(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
        """`distribute`, in the form that the README shows; other classes than torch's are
        declared."""
        if type(optimizer).__module__.partition(".")[0] != "torch":
            options["updates"] = "elements"
        return megatron_distopt.distribute(model, optimizer, **options)


def run_our_rank(
    phase: Callable[[Any], None], rank: int, size: int, folder: Path, number: int
) -> dict[str, Any]:
    """Runs one phase of a program on this rank of a gloo group of `size` processes.

    Args:
        number: of the phase; its processes find each other in a file of this name.

    Returns:
        What it saw, and how it ended: "finished", "refused" with the class and text of an error of
            ours, or "raised".
    """
    torch.set_num_threads(1)
    store, limit = (
        dist.FileStore(str(folder / f"store{number}"), size),
        timedelta(seconds=SECONDS_IN_A_COLLECTIVE),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    world = OurWorld(rank, size, folder)
    faulthandler.dump_traceback_later(
        SECONDS_IN_A_COLLECTIVE, file=(folder / f"stuck{rank}").open("w")
    )
    try:
        phase(world)
    except DistOptError as error:
        # Other classes that the error came from do not matter: a user sees this one.
        return {
            "seen": world.seen,
            "end": "refused",
            "class": type(error).__name__,
            "text": str(error),
        }
    except BaseException:  # noqa: BLE001 - anything but an error of ours is what these tests look for
        return {"seen": world.seen, "end": "raised", "text": traceback.format_exc()}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"seen": world.seen, "end": "finished"}
