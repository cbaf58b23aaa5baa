"""How large the package is and how it is named: lines and files by folder, class and module names that occur once.

A limit is what was reached. It may fall; whoever raises one says in the commit what users get for the lines.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import megatron_distopt

PACKAGE = Path(megatron_distopt.__file__).parent
#: Folder -> (lines, files) that it may have at most. "" has the files beside the folders.
LIMITS: dict[str, tuple[int, int]] = {
    "": (950, 8),
    "layout": (1104, 7),
    "buffers": (541, 4),
    "comm": (2351, 10),
    "optimizer": (5216, 27),
    "checkpoint": (4671, 22),
    "formats": (2765, 16),
    "hosts": (9356, 47),
    "plugin": (334, 5),
    "cli": (2805, 17),
}
#: 28,000 in 150 files; 900 lines for snapshots in memory, 350 for averages of weights, 500 for `compare`,
#: 350 for gradients in 8 bits between nodes.
TOTAL = (30_093, 163)
#: Class names that a host gives, and file names by which all three hosts split their optimizer.
SHARED_CLASSES = {"DistributedOptimizer", "ChainedOptimizer"}
SHARED_FILES = {"__init__", "optimizer", "step", "checkpoint"}


def measured(package: Path) -> dict[str, tuple[int, int]]:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else ""
        lines[folder] += file.read_text(encoding="utf-8").count("\n")
        files[folder] += 1
    return {folder: (lines[folder], files[folder]) for folder in files}


def class_names(package: Path) -> dict[str, list[str]]:
    """Files in which a class of this name is defined, leading underscores left out."""
    names: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")].append(file.relative_to(package).as_posix())
    return names


def module_names(package: Path) -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        names[file.stem].append(file.relative_to(package).as_posix())
    return names


def repeated(names: dict[str, list[str]], allowed: set[str]) -> dict[str, list[str]]:
    return {name: where for name, where in names.items() if len(where) > 1 and name not in allowed}


@pytest.mark.parametrize("folder", LIMITS)
def test_folder_when_counted_then_within_its_lines_and_files(folder: str) -> None:
    lines, files = measured(PACKAGE).get(folder, (0, 0))
    most_lines, most_files = LIMITS[folder]
    assert lines <= most_lines, f"{folder or 'files beside the folders'}: {lines} lines"
    assert files <= most_files, f"{folder or 'files beside the folders'}: {files} files"


def test_package_when_counted_then_within_its_lines_and_files_and_every_folder_has_a_limit() -> None:
    counts = measured(PACKAGE)
    assert counts.keys() == LIMITS.keys()
    assert sum(lines for lines, _ in counts.values()) <= TOTAL[0]
    assert sum(files for _, files in counts.values()) <= TOTAL[1]


def test_classes_when_listed_then_no_two_share_a_name() -> None:
    assert repeated(class_names(PACKAGE), SHARED_CLASSES) == {}


def test_modules_when_listed_then_no_two_share_a_name() -> None:
    assert repeated(module_names(PACKAGE), SHARED_FILES) == {}


def test_names_when_two_files_have_the_same_class_then_found(tmp_path: Path) -> None:
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "a.py").write_text("class Lane:\n    pass\n", encoding="utf-8")
    (tmp_path / "a.py").write_text("class _Lane:\n    class Inner: ...\n", encoding="utf-8")
    assert repeated(class_names(tmp_path), set()) == {"Lane": ["a.py", "comm/a.py"]}
    assert repeated(module_names(tmp_path), set()) == {"a": ["a.py", "comm/a.py"]}
    assert measured(tmp_path) == {"": (2, 1), "comm": (2, 1)}
