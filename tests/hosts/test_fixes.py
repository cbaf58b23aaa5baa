"""Repairs of hosts that cannot start for other reasons than their optimizer: when they are made, and the way back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from megatron_distopt.config import config_from_environment, fixes_from
from megatron_distopt.errors import ConfigError, HostError
from megatron_distopt.hosts import fixes
from megatron_distopt.hosts.fixes import (
    ArgumentDefault,
    ContiguousArguments,
    StandIn,
    Substitute,
    applied_fixes,
    apply_fixes,
    needed_fixes,
)
from megatron_distopt.hosts.source.tree import SourceTree
from megatron_distopt.version import VERSION
from tests.support.fork_trees import write_tree

STAND_IN = StandIn("hurt.vision", ("absent_package", "absent_package.parts"), "only vision needs it")
DEFAULT = ArgumentDefault("hurt.training", "args.engine", "engine_settings", None, "read for every model")
CONTIGUOUS = ContiguousArguments("hurt.model", "Attention", "forward", ("query", "key"), "view refuses others")
ALL = (STAND_IN, DEFAULT, CONTIGUOUS)
FILES = {
    "hurt/__init__.py": "",
    "hurt/vision.py": (
        "import absent_package.parts as P\nfrom absent_package import Base\n\n\nclass Ours(Base):\n    pass\n"
    ),
    "hurt/training.py": "def setup(args):\n    if args.engine:\n        args.engine_settings = {}\n",
    "hurt/model.py": (
        "class Attention:\n    def forward(self, query, key, mask):\n"
        "        return query.view(-1), key.view(-1), mask\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceTree]:
    """A package that needs all three repairs, on the path."""
    write_tree(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    yield SourceTree((tmp_path,))
    for name in [name for name in sys.modules if name.partition(".")[0] == "hurt"]:
        del sys.modules[name]


def changed(tree: SourceTree, file: str, text: str) -> SourceTree:
    (tree.roots[0] / file).write_text(text)
    return tree


def test_fixes_when_everything_is_as_expected_then_all_are_needed(tree: SourceTree) -> None:
    assert needed_fixes(tree, ALL) == ALL


@pytest.mark.parametrize(
    ("file", "text", "left_out"),
    [
        ("hurt/vision.py", "import json\n", STAND_IN),
        ("hurt/vision.py", "try:\n    import absent_package\nexcept ImportError:\n    pass\n", STAND_IN),
        ("hurt/training.py", "def setup(args):\n    args.engine_settings = {}\n", DEFAULT),
        ("hurt/model.py", "class Attention:\n    def forward(self, key, query):\n        query.view()\n", CONTIGUOUS),
        ("hurt/model.py", "class Attention:\n    def forward(self, query, key):\n        pass\n", CONTIGUOUS),
        ("hurt/model.py", "class Attention(:\n", CONTIGUOUS),
    ],
)
def test_fixes_when_the_source_is_another_then_that_one_is_left_out(
    tree: SourceTree, file: str, text: str, left_out: object
) -> None:
    assert set(ALL) - set(needed_fixes(changed(tree, file, text), ALL)) == {left_out}


def test_fixes_when_applied_then_the_host_works_and_undo_takes_them_back(tree: SourceTree) -> None:
    torch = import_module("torch")
    undo = apply_fixes(ALL)
    assert applied_fixes() == ALL
    try:
        vision, attention = import_module("hurt.vision"), import_module("hurt.model").Attention()
        assert find_spec("absent_package") is None
        assert argparse.Namespace().engine_settings is None
        assert "engine_settings" not in vars(argparse.Namespace())
        turned = torch.arange(6.0).view(2, 3).t()
        assert attention.forward(turned, key=turned, mask=1)[0].tolist() == turned.flatten().tolist()
        for use in (vision.Ours, vision.P.Resize):
            with pytest.raises(HostError, match="absent_package"):
                use()
    finally:
        undo()
        undo()
    assert applied_fixes() == ()
    assert not hasattr(argparse.Namespace(), "engine_settings")
    with pytest.raises(RuntimeError):
        attention.forward(turned, turned, 1)
    del sys.modules["hurt.vision"]
    with pytest.raises(ModuleNotFoundError):
        import_module("hurt.vision")


def test_fixes_when_the_module_is_loaded_already_then_the_method_is_mended_at_once(tree: SourceTree) -> None:
    owner = import_module("hurt.model").Attention
    original = owner.forward
    undo = apply_fixes((CONTIGUOUS,))
    assert owner.forward is not original
    undo()
    assert owner.forward is original


@pytest.mark.parametrize(("value", "expected"), [("no", False), ("0", False), ("yes", True)])
def test_variable_when_set_then_it_switches_the_fixes_and_no_option(value: str, expected: bool) -> None:
    environ = {"MEGATRON_DISTOPT_FIXES": value}
    assert fixes_from(environ) is expected
    assert config_from_environment(environ).explicit == frozenset()


def test_variable_when_it_is_neither_yes_nor_no_then_refused() -> None:
    with pytest.raises(ConfigError, match="maybe"):
        config_from_environment({"MEGATRON_DISTOPT_FIXES": "maybe"})


def test_fixes_when_nobody_keeps_the_way_back_then_they_stay(tree: SourceTree) -> None:
    changed(tree, "hurt/vision.py", f"import gc\nmend()\ngc.collect()\n{FILES['hurt/vision.py']}")
    vision = ModuleType("hurt.vision")
    vars(vision)["mend"] = lambda: (apply_fixes((STAND_IN,)), None)[1]
    sys.modules["hurt.vision"] = vision
    try:
        exec((tree.roots[0] / "hurt/vision.py").read_text(), vars(vision))
        assert applied_fixes() == (STAND_IN,)
    finally:
        for name in STAND_IN.modules:
            sys.modules.pop(name, None)
        fixes._applied.clear()


SUBSTITUTE = Substitute(
    "hurt.training", ("absent_package", "absent_package.parts"), "megatron_distopt.version", "calls"
)


def test_substitute_when_applied_then_the_functions_are_there_and_undo_takes_them_back(tree: SourceTree) -> None:
    changed(tree, "hurt/training.py", "import absent_package\n")
    assert needed_fixes(tree, (SUBSTITUTE,)) == (SUBSTITUTE,)
    undo = apply_fixes((SUBSTITUTE,))
    try:
        package, parts = import_module("absent_package"), import_module("absent_package.parts")
        assert (package.VERSION, package.parts) == (VERSION, parts)
        with pytest.raises(HostError, match="absent_package"):
            package.Profile()
    finally:
        undo()
    assert find_spec("absent_package") is None
