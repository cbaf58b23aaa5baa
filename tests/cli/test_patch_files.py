"""The entry point: what is put into a fork's file, where, and out again to the byte."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.cli.patch import as_diff
from megatron_distopt.errors import DistOptError
from megatron_distopt.plugin import fork_edit
from megatron_distopt.plugin.entry_point_block import (
    BEGIN,
    BLOCK,
    END,
    GROUP,
    has_marker,
    intact_block,
)
from megatron_distopt.plugin.fork_edit import Edit, find_block, plan_apply, plan_undo, write
from megatron_distopt.plugin.fork_source import fork_at
from tests.support.fork_trees import FACTORY_OF_2023, core, gathered_2023, per_rank_2023, write_tree
from tests.support.refusals import assert_mentions

ROOT = Path(__file__).parents[2]
FACTORY = "megatron/optimizer/__init__.py"
PATCHES = sorted((ROOT / "patches").glob("*/optimizer_factories.patch"))
MARKED = "\n".join(BLOCK) + "\n"


def applied(fork: Path) -> Edit:
    edit = plan_apply(fork_at(fork))
    write(edit)
    return edit


def undone(fork: Path) -> Edit:
    edit = planned_undo(fork)
    write(edit)
    return edit


def planned_undo(fork: Path) -> Edit:
    tree = fork_at(fork)
    block = find_block(tree)
    assert block is not None
    return plan_undo(tree, block)


def refusal_of(action: Callable[[], object]) -> str:
    with pytest.raises(DistOptError) as error:
        action()
    return str(error.value)


def run(
    source: str, entries: Iterable[Any], monkeypatch: pytest.MonkeyPatch, *, is_old: bool = False
) -> Any:
    """Runs a patched file where those packages are installed, as Python 3.8 lists them or as ours
    does."""
    entries = tuple(entries)
    found: Any = (
        {GROUP: entries, "other": ()} if is_old else importlib.metadata.EntryPoints(entries)
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: found)
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["get_megatron_optimizer"]


class Entry:
    """An entry point whose factory puts its name in front."""

    group = GROUP

    def __init__(self, name: str, value: str = "module:attribute") -> None:
        self.name, self.value = name, value

    def load(self) -> Callable[[Callable[..., str]], Callable[..., str]]:
        return lambda factory: lambda *args: f"{self.name} {factory(*args)}"

    def matches(self, **wanted: str) -> bool:
        return wanted == {"group": GROUP}


HOST = "def get_megatron_optimizer(model):\n    return 'host'\n"


@pytest.mark.parametrize("is_old", [False, True])
def test_block_when_packages_are_registered_then_they_wrap_in_order_of_names(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Entry("b"), Entry("a"), Entry("b")]  # one may be listed twice
    source = f"{HOST}own = get_megatron_optimizer\n{MARKED}"
    assert run(source, entries, monkeypatch, is_old=is_old)(None) == "b a host"
    factory = run(source, [], monkeypatch, is_old=is_old)
    assert factory is factory.__globals__["own"]
    ast.parse(MARKED, feature_version=(3, 8))  # forks run on old Pythons
    assert len(BLOCK) <= 30


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (per_rank_2023, FACTORY),
        (gathered_2023, FACTORY),
        (core, "megatron/core/optimizer/__init__.py"),
    ],
)
def test_patch_when_applied_then_the_block_is_right_after_the_function(
    make: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    file = make(tmp_path) / name
    before = file.read_text()
    assert find_block(fork_at(tmp_path)) is None
    edit = applied(tmp_path)
    assert edit.name == name
    assert find_block(fork_at(tmp_path)) is not None
    body = "    return DistributedOptimizer(" + ("model)\n" if name == FACTORY else "config)\n")
    assert file.read_text() == before.replace(body, body + MARKED)
    undone(tmp_path)
    assert file.read_text() == before
    assert find_block(fork_at(tmp_path)) is None


DRIFTED = '''\
"""A docstring that names get_megatron_optimizer(model)."""
import functools
from .distrib_optimizer import DistributedOptimizer

# def get_megatron_optimizer(model): an old one
def outer():
    def get_megatron_optimizer(model):
        return None
    return get_megatron_optimizer

class Tools:
    def get_megatron_optimizer(self): ...


@functools.lru_cache(
    None
)
# a comment between
def get_megatron_optimizer(model,
                           no_weight_decay_cond=None,  # inserted
                           scale_lr_cond=None,
                           lr_mult=1.0, *, extra=None):
    """Ours."""
    def get_megatron_optimizer(model):
        return None
    return """
text at the left margin
"""  # \u00e9nd of the function
# a comment after

LAST = 1
'''


@pytest.mark.parametrize(
    ("is_last", "newline", "has_final_newline"),
    [(False, "\n", True), (True, "\r\n", True), (True, "\n", False)],
)
def test_patch_when_the_fork_drifted_then_applied_and_undone_to_the_byte_by_the_command_and_by_git(
    is_last: bool, newline: str, has_final_newline: bool, tmp_path: Path
) -> None:
    text = DRIFTED.partition("# a comment after")[0] if is_last else DRIFTED
    text = (text if has_final_newline else text[:-1]).replace("\n", newline)
    file = write_tree(per_rank_2023(tmp_path), {FACTORY: text}) / FACTORY
    before = file.read_bytes()
    edit = applied(tmp_path)
    lines = file.read_bytes().decode().split(newline)
    first = lines.index(BEGIN)
    assert lines[first : first + len(BLOCK)] == list(BLOCK)
    assert lines[first - 1] == '"""  # \u00e9nd of the function'
    assert file.read_bytes().endswith(newline.encode()) == has_final_newline
    back = planned_undo(tmp_path)
    for diff, content in ((as_diff(back), before), (as_diff(edit), edit.after)):
        command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"]
        subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True)
        assert file.read_bytes() == content
    undone(tmp_path)
    assert file.read_bytes() == before


def test_patch_when_written_then_mode_and_links_stay_and_nothing_is_left_beside(
    tmp_path: Path,
) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    real = file.with_name("real.txt")
    os.chmod(file.rename(real), 0o640)
    file.symlink_to(real)
    names = sorted(os.listdir(file.parent))
    applied(tmp_path)
    assert file.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert has_marker(real.read_bytes())
    assert sorted(os.listdir(file.parent)) == names


def test_patch_when_writing_fails_then_the_file_is_as_before_and_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    before, names = file.read_bytes(), sorted(os.listdir(file.parent))

    def fail(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fork_edit.os, "replace", fail)
    assert_mentions(
        refusal_of(lambda: applied(tmp_path)), str(file.resolve()), "Permission denied", "on a copy"
    )
    assert (file.read_bytes(), sorted(os.listdir(file.parent))) == (before, names)


def test_patch_when_the_file_changes_after_the_plan_then_refused(tmp_path: Path) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    edit = plan_apply(fork_at(tmp_path))
    file.write_text(FACTORY_OF_2023 + "# edited\n")
    assert_mentions(refusal_of(lambda: write(edit)), FACTORY, "Run the command again.")
    assert file.read_text() == FACTORY_OF_2023 + "# edited\n"


@pytest.mark.parametrize(
    "edit",
    [
        (BLOCK[6], BLOCK[6] + "  # mine"),
        (BEGIN + "\n", ""),
        (END + "\n", ""),
        (MARKED, MARKED + MARKED),
    ],
    ids=["changed", "no begin", "no end", "twice"],
)
def test_undo_when_the_block_was_edited_then_refused_and_nothing_changes(
    edit: tuple[str, str], tmp_path: Path
) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    applied(tmp_path)
    file.write_text(file.read_text().replace(*edit))
    before = file.read_bytes()
    text = refusal_of(lambda: find_block(fork_at(tmp_path)))
    assert_mentions(text, FACTORY, repr(BEGIN), repr(END), "Delete the lines by hand")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("model, no_weight", "chunks, no_weight"),
            (f"{FACTORY}:4", "(chunks, ", "(model, ", "docs/hosts.md"),
        ),
        (
            ("(model)\n", "(model)\n\n\nfrom foreign import get_megatron_optimizer\n"),
            (f"{FACTORY}:8", "Remove the other patch"),
        ),
        (
            ("def get_megatron_optimizer", "if True:\n  def get_megatron_optimizer"),
            (f"{FACTORY}:5", "Use the runner or megatron_distopt.install()"),
        ),
        (("def get_megatron_optimizer", "def get_optimizer"), ("is missing", "docs/hosts.md")),
    ],
    ids=["signature", "other patcher", "under an if", "gone"],
)
def test_patch_when_the_patch_point_is_not_as_expected_then_refused_and_nothing_changes(
    change: tuple[str, str], said: tuple[str, ...], tmp_path: Path
) -> None:
    file = per_rank_2023(tmp_path) / FACTORY
    file.write_text(FACTORY_OF_2023.replace(*change))
    before = file.read_bytes()
    assert_mentions(
        refusal_of(lambda: applied(tmp_path)), "megatron.optimizer.get_megatron_optimizer", *said
    )
    assert file.read_bytes() == before


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.parent.name)
def test_shipped_patch_when_read_then_it_adds_what_the_command_adds_and_nothing_of_the_fork(
    file: Path,
) -> None:
    header, _, diff = file.read_text(encoding="utf-8").partition("--- a/")
    hunk = re.fullmatch(r"(\S+)\n\+\+\+ b/\1\n@@ -(\d+),0 \+(\d+),(\d+) @@\n(.*)", diff, re.DOTALL)
    assert hunk is not None
    name, line, first, count, added = hunk.groups()
    assert name in (FACTORY, "megatron/core/optimizer/__init__.py")
    assert added.splitlines() == ["+" + line for line in BLOCK]
    assert int(first) == int(line) + 1
    assert int(count) == len(BLOCK) <= 30
    assert "Why it must exist" in header and "megatron-distopt patch --check" in header
    assert f"ends at line {line}," in header


def test_shipped_patch_when_the_fork_is_real_then_it_is_the_commands_own() -> None:
    if "MEGATRON_FORK" not in os.environ:
        pytest.skip("MEGATRON_FORK names no checkout of a fork")
    original = plan_apply(fork_at(Path(os.environ["MEGATRON_FORK"])))
    assert any(patch.read_text(encoding="utf-8").endswith(as_diff(original)) for patch in PATCHES)
    block = intact_block(original.after)
    assert block is not None
    assert original.after[: block.start] + original.after[block.stop :] == original.before
