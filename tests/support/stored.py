"""States that say which save they are from, so that a checkpoint can be told from a mixture of
two."""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import MANIFEST, lock_file, new_save_id, read_manifest
from megatron_distopt.checkpoint.save import Saving, contribution_of
from megatron_distopt.optimizer.inner_state import moments_of
from tests.support.simulated import KINDS, Param, World, element_numbers

#: Cut across a row by two ranks, and in two param groups.
TINY = (Param("w", (5, 3)), Param("norm", (3,), decays=False, dtype=torch.float32))
#: Between the states of two saves; more than any element of TINY, and exact in fp32 with it.
_APART = 4096.0


@dataclass
class Numbered:
    """A world whose state is that of save number `now`."""

    world: World
    now: int = 0

    def become(self, number: int) -> Numbered:
        """Every element, the count of updates and that of skipped steps say the number."""
        for rank in self.world.ranks:
            optimizer = rank.optimizer
            optimizer.num_skipped = number
            for run in optimizer.flat_params:
                moments = moments_of(optimizer.inner, run.main)
                for tensor in (run.main.detach(), *moments.values()):
                    tensor.add_((number - self.now) * _APART)
                optimizer.inner.state[run.main]["step"].fill_(number)
                run.write_model()
        self.now = number
        return self

    def save(self, folder: Path, number: int) -> None:
        """As that number; see `save`."""
        save(self.become(number).world, folder)


def savings(world: World, folder: Path, save_id: str, lock: int | None = None) -> list[Saving]:
    """Of all ranks."""
    size = len(world.ranks)
    return [Saving(folder, save_id, rank, size, None if rank else lock) for rank in range(size)]


def save(world: World, folder: Path) -> None:
    """What `save_checkpoint` does on all ranks, one after the other."""
    disk.make_folder(folder)
    by_rank = savings(world, folder, new_save_id(), disk.lock(lock_file(folder)))
    try:
        parts = [
            s.write(contribution_of(rank.model))
            for s, rank in zip(by_rank, world.ranks, strict=True)
        ]
        by_rank[0].commit(parts[0])
    except BaseException:
        by_rank[0].abandon()
        raise
    finally:
        by_rank[0].release()


def number_in(folder: Path, reader: World) -> int:
    """Which save a folder holds, after every element of it was read and compared.

    Args:
        folder: of a checkpoint of a `Numbered`.
        reader: takes its state; of the same params, at any layout.
    """
    for rank in reader.ranks:
        for run in rank.optimizer.flat_params:
            for tensor in (run.main.detach(), *moments_of(rank.optimizer.inner, run.main).values()):
                tensor.fill_(math.nan)
    reader.load(folder)
    number = reader.ranks[0].optimizer.num_skipped
    for kind in KINDS:
        for param in reader.params:
            wanted = element_numbers(param, kind, param.shape) + number * _APART
            assert torch.equal(reader.whole(kind)[param.name], wanted), (
                f"{kind} of {param.name} in save {number}"
            )
    steps = {
        int(each["step"]) for rank in reader.ranks for each in rank.optimizer.inner.state.values()
    }
    assert steps == {number}, f"steps {steps} in save {number}"
    return number


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Somebody changes the body of a manifest, and writes the checksum that belongs to it."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document["body"])
    canonical = json.dumps(document["body"], separators=(",", ":"), sort_keys=True)
    path.write_text(json.dumps({**document, "crc32": zlib.crc32(canonical.encode())}))


def leftovers(folder: Path) -> set[str]:
    """Files that do not belong to the checkpoint of the folder."""
    named = {file.name for file in read_manifest(folder).files} | {
        MANIFEST,
        ".metadata",
        "saving.lock",
    }
    return {path.name for path in folder.iterdir()} - named


def snapshot(world: World) -> list[Any]:
    """A copy of all that a load may change."""
    return [
        copy.deepcopy(
            [
                [run.main.detach() for run in optimizer.flat_params],
                [buffer.param for buffer in optimizer.buffers],
                optimizer.inner.state_dict(),
                optimizer.loss_scale.state_dict(),
                optimizer.num_skipped,
            ]
        )
        for optimizer in (rank.optimizer for rank in world.ranks)
    ]
