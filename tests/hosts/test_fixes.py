"""Fixes of hosts that cannot start for other reasons than their optimizer: when they are made, and
the way back."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_distopt.config import config_from_environment, fixes_from
from megatron_distopt.errors import ConfigError, HostError
from megatron_distopt.patch_points import Undos, repairs
from megatron_distopt.plugin.fixes import FIXES, Fix, apply_fixes, needed_fixes
from megatron_distopt.plugin.fork_source import SourceTree
from tests.support.fork_trees import write_tree

VISION, _, _, DEFAULT, CONTIGUOUS = FIXES
STAND_IN = replace(
    VISION,
    module="hurt.vision",
    pattern=VISION.pattern.replace("torchvision", "absent_package"),
    absent=("absent_package", "absent_package.parts"),
)
ALL = (STAND_IN, replace(DEFAULT, module="hurt.training"), replace(CONTIGUOUS, module="hurt.model"))
FILES = {
    "hurt/__init__.py": "",
    "hurt/vision.py": (
        "import absent_package.parts as P\nfrom absent_package import Base\n\n\nclass "
        "Ours(Base):\n    pass\n"
    ),
    "hurt/training.py": "def setup(args):\n    if args.deepspeed:\n        "
    "args.deepspeed_config_dict = {}\n",
    "hurt/model.py": (
        "class CoreAttention:\n    def forward(self, query_layer, key_layer,\n                "
        "value_layer, mask):\n        return query_layer.view(-1), key_layer.view(-1), "
        "value_layer.view(-1), mask\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceTree]:
    """A package that needs three fixes, on the path."""
    write_tree(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    yield SourceTree((tmp_path,))
    for name in [name for name in sys.modules if name.partition(".")[0] == "hurt"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "text", "left_out"),
    [
        (
            "hurt/vision.py",
            "try:\n    import absent_package\nexcept ImportError:\n    pass\n",
            ALL[0],
        ),
        ("hurt/training.py", "def setup(args):\n    args.deepspeed_config_dict = {}\n", ALL[1]),
        ("hurt/model.py", FILES["hurt/model.py"].replace(".view", ".reshape"), ALL[2]),
        ("hurt/model.py", "class CoreAttention(:\n", ALL[2]),
    ],
)
def test_fixes_when_the_source_is_another_then_that_one_is_left_out(
    tree: SourceTree, file: str, text: str, left_out: Fix
) -> None:
    (tree.roots[0] / file).write_text(text)
    assert set(ALL) - set(needed_fixes(tree, ALL)) == {left_out}


@pytest.mark.parametrize("there", [("json", "json.decoder"), ("absent_package.parts",)])
def test_stand_in_when_the_module_is_there_or_its_package_is_not_then_it_is_not_needed(
    tree: SourceTree, there: tuple[str, ...]
) -> None:
    assert needed_fixes(tree, [replace(STAND_IN, absent=there)]) == ()


def test_fixes_when_applied_then_the_host_works_and_undo_takes_them_back(tree: SourceTree) -> None:
    assert needed_fixes(tree, ALL) == ALL
    undos = Undos()
    apply_fixes(ALL, undos)
    assert tuple(repairs) == ALL
    try:
        vision, attention = (
            import_module("hurt.vision"),
            import_module("hurt.model").CoreAttention(),
        )
        import_module("hurt.training")
        assert find_spec("absent_package") is None
        assert Namespace().deepspeed_config_dict is None
        assert "deepspeed_config_dict" not in vars(Namespace())
        turned = torch.arange(6.0).view(2, 3).t()
        assert (
            attention.forward(turned, turned, value_layer=turned, mask=1)[0].tolist()
            == turned.flatten().tolist()
        )
        for use in (vision.Ours, vision.P.Resize):
            with pytest.raises(HostError, match="absent_package"):
                use()
    finally:
        undos.undo()
        undos.undo()
    assert repairs == []
    assert not hasattr(Namespace(), "deepspeed_config_dict")
    with pytest.raises(RuntimeError):
        attention.forward(turned, turned, turned, 1)
    del sys.modules["hurt.vision"]
    with pytest.raises(ModuleNotFoundError):
        import_module("hurt.vision")


class _UsersHook(MetaPathFinder):
    """As tools have it that change modules at their import: asks the other finders, and wraps the
    loader."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_asking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "hurt.model" or self.is_asking:
            return None
        self.is_asking = True
        spec = find_spec(fullname)
        self.is_asking = False
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def seen(module: ModuleType) -> None:
            execute(module)
            self.seen.append(module.__name__)

        spec.loader.exec_module = seen  # type: ignore[method-assign]
        return spec


@pytest.mark.parametrize("is_first", [True, False])
def test_fixes_when_the_user_has_an_import_hook_then_both_act_once(
    tree: SourceTree, is_first: bool
) -> None:
    hook, mended = _UsersHook(), []
    fix = replace(ALL[2], after=lambda module, undos: mended.append(module.__name__))
    if is_first:
        sys.meta_path.insert(0, hook)
    undos = Undos()
    apply_fixes((fix,), undos)
    if not is_first:
        sys.meta_path.insert(0, hook)
    try:
        import_module("hurt.model")
        assert (hook.seen, mended) == (["hurt.model"], ["hurt.model"])
    finally:
        sys.meta_path.remove(hook)
        undos.undo()


def test_fixes_when_the_module_is_loaded_already_then_it_is_mended_at_once(
    tree: SourceTree,
) -> None:
    owner = import_module("hurt.model").CoreAttention
    original = owner.forward
    undos = Undos()
    apply_fixes(ALL[2:], undos)
    assert owner.forward is not original
    undos.undo()
    assert owner.forward is original


def test_fixes_when_applied_in_the_middle_of_an_import_then_they_hold_for_the_rest_of_it(
    tree: SourceTree,
) -> None:
    vision = ModuleType("hurt.vision")
    vars(vision)["mend"] = lambda: apply_fixes((STAND_IN,), Undos())
    sys.modules["hurt.vision"] = vision
    try:
        exec(f"import gc\nmend()\ngc.collect()\n{FILES['hurt/vision.py']}", vars(vision))
        assert repairs == [STAND_IN]
    finally:
        for name in STAND_IN.absent:
            sys.modules.pop(name, None)
        repairs.clear()


def test_variable_when_set_then_it_switches_the_fixes_and_no_option() -> None:
    for value, expected in (("no", False), ("0", False), ("yes", True)):
        environ = {"MEGATRON_DISTOPT_FIXES": value}
        assert fixes_from(environ) is expected
        assert config_from_environment(environ).explicit == frozenset()
    with pytest.raises(ConfigError, match="maybe"):
        config_from_environment({"MEGATRON_DISTOPT_FIXES": "maybe"})
