"""A checkpoint on which the commands are tested."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.checkpoint_commands import ITERATION
from tests.support.simulated import World, small_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --save folder with one iteration, written by 2 x 2 ranks."""
    root = tmp_path_factory.mktemp("run")
    World.of(small_model(), dp=2, tp=2).save(root / ITERATION / "distrib_optim.distopt")
    (root / "latest_checkpointed_iteration.txt").write_text("100\n", encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def whole(saved: Path) -> Path:
    """The folder of the checkpoint; not to be changed."""
    return saved / ITERATION / "distrib_optim.distopt"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    shutil.copytree(whole, tmp_path / "copied")
    return tmp_path / "copied"
