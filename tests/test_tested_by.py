"""scripts/tested_by.py: every module of the package has a test file that a reader can find."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts import tested_by

MODULES = {
    str(file.relative_to(tested_by.PACKAGE)): file
    for file in sorted(tested_by.PACKAGE.rglob("*.py"))
    if file.name not in ("__init__.py", "__main__.py")
}


def test_modules_when_listed_then_each_has_a_test_file() -> None:
    untested = [module for module in MODULES if not tested_by.tests_of(module)]
    assert untested == [], 'write "Exercises PATH." in the docstring of a test file that runs them'


def test_docstrings_when_they_say_what_they_exercise_then_it_is_there() -> None:
    said: set[str] = set()
    for file in (tested_by.ROOT / "tests").rglob("test_*.py"):
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        for sentence in re.findall(r"Exercises ([\w/,. \n]+?\.py)\.", doc):
            said.update(re.split(r",?\s+(?:and\s+)?", sentence))
    assert said <= MODULES.keys()
    assert len(said) > 20, "they are found"


def test_tests_when_asked_for_then_those_that_import_a_module_or_a_name_of_it_or_say_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "pack/__init__.py": "",
        "pack/comm/__init__.py": "from pack.comm.groups import Group",
        "pack/comm/groups.py": "class Group: ...",
        "tests/test_name.py": "from pack.comm import Group",
        "tests/test_module.py": "from pack.comm import groups",
        "tests/test_private.py": "from pack.comm.groups import _find",
        "tests/test_path.py": '"""Exercises comm/groups.py."""',
        "tests/test_other.py": "from pack.comm import Other",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(tested_by, "ROOT", tmp_path)
    monkeypatch.setattr(tested_by, "PACKAGE", tmp_path / "pack")
    found = [f"tests/test_{name}.py" for name in ("module", "name", "path", "private")]
    assert tested_by.tests_of("comm/groups.py") == found
