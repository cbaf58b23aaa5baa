"""What is read off a fork's source, without importing it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_distopt.errors import UnknownHostError
from megatron_distopt.plugin.detect import MEGATRON_2023, MEGATRON_CORE, Generation, recognise
from megatron_distopt.plugin.entry_point_block import as_bytes
from megatron_distopt.plugin.fork_source import (
    PatchPointInSource,
    UnreadableSourceError,
    fork_at,
    importable_host,
    patch_points_of,
)
from tests.support.fork_trees import (
    FACTORY_OF_2023,
    core,
    early_core,
    gathered_2023,
    neox,
    per_rank_2023,
    pre_distopt,
    write_tree,
)
from tests.support.refusals import assert_mentions, refused

FACTORY = "megatron/optimizer/__init__.py"
BLOCK_TEXT = as_bytes(b"\n").decode()


def generation_of(folder: Path) -> Generation:
    return recognise(fork_at(folder).has)


def read(folder: Path) -> tuple[PatchPointInSource, ...]:
    return patch_points_of(fork_at(folder), generation_of(folder))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (per_rank_2023, MEGATRON_2023.name),
        (gathered_2023, MEGATRON_2023.name),
        (core, MEGATRON_CORE.name),
        (early_core, "Megatron-LM with megatron-core 0.4 or 0.5"),
        (pre_distopt, "Megatron without a distributed optimizer"),
        (neox, "GPT-NeoX"),
    ],
)
def test_survey_when_a_fork_is_of_a_generation_then_says_which(
    make: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    generation = generation_of(make(tmp_path))
    points = read(tmp_path)
    assert generation.name == name
    assert bool(points) == generation.is_supported
    assert [point.refusal for point in points] == [None] * len(points)


def test_survey_when_a_fork_is_whole_then_every_patch_point_has_its_place(tmp_path: Path) -> None:
    factory, parser = read(per_rank_2023(tmp_path))
    assert not factory.is_patched and not parser.is_patched
    assert (factory.place, parser.place) == (f"{FACTORY}:4", "megatron/arguments.py:1")
    assert factory.parameters == ("model", "no_weight_decay_cond", "scale_lr_cond", "lr_mult")


@pytest.mark.parametrize(
    ("rebound", "found"),
    [
        ("get_megatron_optimizer = wrap()\n", f"{FACTORY}:6"),
        (f"{BLOCK_TEXT}get_megatron_optimizer = None\n", "assigns something else"),
    ],
)
def test_survey_when_the_name_is_bound_again_then_refused(
    rebound: str, found: str, tmp_path: Path
) -> None:
    """See test_patch_files.py for what else may be wrong with the function."""
    write_tree(per_rank_2023(tmp_path), {FACTORY: FACTORY_OF_2023 + rebound})
    assert_mentions(read(tmp_path)[0].refusal, found, "Remove the other patch")


@pytest.mark.parametrize(
    "harmless",
    [
        "def other():\n    get_megatron_optimizer = 1\n    def get_megatron_optimizer(): ...\n",
        "class Other:\n    def get_megatron_optimizer(self): ...\n    get_megatron_optimizer = 2\n",
    ],
)
def test_survey_when_the_name_is_bound_in_another_scope_then_the_patch_point_is_free(
    harmless: str, tmp_path: Path
) -> None:
    write_tree(per_rank_2023(tmp_path), {FACTORY: FACTORY_OF_2023 + harmless})
    assert read(tmp_path)[0].refusal is None


def test_survey_when_our_block_is_in_then_the_patch_point_is_patched(tmp_path: Path) -> None:
    write_tree(per_rank_2023(tmp_path), {FACTORY: FACTORY_OF_2023 + BLOCK_TEXT})
    patch_point = read(tmp_path)[0]
    assert (patch_point.is_patched, patch_point.refusal, patch_point.place) == (
        True,
        None,
        f"{FACTORY}:4",
    )


def test_survey_when_a_patch_points_file_is_no_python_then_refused_with_file_and_line(
    tmp_path: Path,
) -> None:
    write_tree(per_rank_2023(tmp_path), {FACTORY: "import torch\nprint 'two'\n"})
    assert_mentions(
        refused(UnreadableSourceError, lambda: read(tmp_path)), f"{FACTORY}:2", "Correct that line."
    )


def test_survey_when_a_patch_points_file_may_not_be_read_then_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert_mentions(
        refused(UnreadableSourceError, lambda: read(tmp_path)), FACTORY, f"chmod +r {file}"
    )


def test_fork_when_the_path_is_wrong_then_refused_with_what_to_write(tmp_path: Path) -> None:
    fork, empty = per_rank_2023(tmp_path / "fork"), tmp_path / "empty"
    empty.mkdir()
    cases = {
        tmp_path / "nowhere": "Write the path of your Megatron's checkout.",
        empty: "Write the path of your Megatron's checkout.",
        fork / "pretrain_gpt.py": "does not contain a folder megatron",
    }
    for path, remedy in cases.items():
        assert_mentions(
            refused(UnknownHostError, lambda path=path: fork_at(path)), str(path), remedy
        )


def test_fork_when_its_folder_megatron_is_somebody_elses_then_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, {"megatron/transformers/__init__.py": ""})
    assert_mentions(
        refused(UnknownHostError, lambda: read(tmp_path)), "Start in the folder of your fork"
    )


def test_importable_host_when_the_working_directory_has_one_then_it_comes_first(
    tmp_path: Path,
) -> None:
    here, there = per_rank_2023(tmp_path / "here"), core(tmp_path / "there" / "site-packages")
    tree = importable_host([str(here), str(there)])
    assert tree.roots == (here.resolve(),)
    tree = importable_host([str(tmp_path), str(there), str(here)])
    assert tree.roots == (here.resolve(),)  # a package comes before a namespace, wherever it lies
    tree = importable_host([str(tmp_path), str(there)])
    assert tree.roots == (there.resolve(),)
    assert recognise(tree.has) is MEGATRON_CORE


def test_importable_host_when_there_is_none_then_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    with pytest.raises(UnknownHostError):
        recognise(importable_host([str(tmp_path)]).has)


def test_survey_when_read_from_the_installed_megatron_core_then_its_patch_point_is_free() -> None:
    tree = importable_host(["/", *sys.path])
    if not tree.has("megatron.core.optimizer"):
        pytest.skip("megatron-core is not installed")
    assert recognise(tree.has) is MEGATRON_CORE
    assert patch_points_of(tree, MEGATRON_CORE)[0].refusal is None
