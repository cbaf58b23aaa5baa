"""`keep_last`: older checkpoints of the same run are removed under any name, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_distopt.checkpoint import disk, is_checkpoint, load_checkpoint
from megatron_distopt.checkpoint.folder import lock_file
from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.saving import Saver
from tests.support.simulated import World
from tests.support.stored import TINY

ALONE = Group(None, 0, 1)


class Run:
    """One run that saves and resumes."""

    def __init__(self, keep: int, *, is_async: bool = False) -> None:
        self.model = World.of(TINY).ranks[0].model
        self.saver = Saver(DistOptConfig(keep_last=keep, async_save=is_async), ALONE)

    def save(self, folder: Path) -> None:
        """And waits until it is there."""
        self.saver.save(folder, self.model)
        self.saver.finish()

    def load(self, folder: Path) -> Run:
        load_checkpoint(folder, self.model, ALONE)
        return self


NAMINGS: dict[str, Callable[[int], str]] = {
    "words": lambda number: ("zeta", "alpha", "mid", "beta")[number],
    "iterations": lambda number: f"iter_{number:07d}/distrib_optim.distopt",
}


def _left(root: Path, naming: Callable[[int], str]) -> list[int]:
    return [number for number in range(4) if is_checkpoint(root / naming(number))]


@pytest.mark.parametrize("naming", NAMINGS)
def test_keep_last_when_checkpoints_have_any_names_then_the_latest_stay(naming: str, tmp_path: Path) -> None:
    run = Run(2, is_async=naming == "iterations")
    for number in range(4):
        run.save(tmp_path / NAMINGS[naming](number))
    assert _left(tmp_path, NAMINGS[naming]) == [2, 3]


def test_keep_last_when_the_run_was_resumed_then_it_goes_on_with_what_it_was_resumed_from(tmp_path: Path) -> None:
    naming = NAMINGS["words"]
    first = Run(3)
    for number in range(3):
        first.save(tmp_path / naming(number))
    Run(2).load(tmp_path / naming(2)).save(tmp_path / naming(3))
    assert _left(tmp_path, naming) == [2, 3]


def test_keep_last_when_checkpoints_are_of_another_run_or_life_then_they_stay(tmp_path: Path) -> None:
    Run(1).save(tmp_path / "another run")
    first = Run(9)
    for number in range(3):
        first.save(tmp_path / f"step_{number}")
    Run(1).load(tmp_path / "step_0").save(tmp_path / "resumed from 0")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"another run", "step_1", "step_2", "resumed from 0"}


def test_keep_last_when_other_files_lie_in_the_folder_then_they_stay(tmp_path: Path) -> None:
    run = Run(1)
    run.save(tmp_path / "a")
    (tmp_path / "a" / "model.pt").write_bytes(b"weights")
    run.save(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model.pt"]


def test_keep_last_when_a_name_is_a_symbolic_link_then_what_it_names_stays(tmp_path: Path) -> None:
    run = Run(1)
    (tmp_path / "runs").mkdir()
    run.save(tmp_path / "archive" / "a")
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "archive" / "a")
    run.save(tmp_path / "runs" / "b")
    assert is_checkpoint(tmp_path / "archive" / "a")


def test_keep_last_when_another_run_is_saving_to_an_older_one_then_it_stays(tmp_path: Path) -> None:
    run = Run(1)
    run.save(tmp_path / "a")
    held = disk.lock(lock_file(tmp_path / "a"))
    run.save(tmp_path / "b")
    disk.unlock(held)
    assert is_checkpoint(tmp_path / "a")


def test_keep_last_when_the_same_folder_is_saved_again_then_it_is_the_new_one(tmp_path: Path) -> None:
    run = Run(1)
    for _ in range(2):
        run.save(tmp_path / "latest")
    assert is_checkpoint(tmp_path / "latest")
    Run(1).load(tmp_path / "latest")
