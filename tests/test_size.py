"""How large the package is, how dense its lines are and how it is named.

What a reader has to hold is measured, so that it does not depend on how lines are broken: the
statements of a folder, the nodes of the syntax tree a line of code, and class and module names that
occur once.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import megatron_distopt

PACKAGE = Path(megatron_distopt.__file__).parent
#: Folder -> statements that it may have at most: 5 % above what was reached, so that a limit never
#: asks for denser lines. "" has the files beside the folders.
MOST_STATEMENTS: dict[str, int] = {
    "": 463,
    "layout": 523,
    "buffers": 252,
    "comm": 1193,
    "optimizer": 2746,
    "checkpoint": 2470,
    "formats": 1500,
    "session": 198,
    "hosts": 4299,
    "plugin": 614,
    "cli": 1545,
}
MOST_STATEMENTS_IN_ALL = 15_150
#: Nodes of the syntax tree a line of code, of the package and of a file. PyTorch's FSDP2 has 4.1.
MOST_DENSE = 6.1
MOST_DENSE_FILE = 7.0
#: In smaller files the docstring decides and not the code.
LEAST_LINES = 20
#: Class names that a host gives, and file names by which all hosts split their code.
SHARED_CLASSES = {"DistributedOptimizer", "ChainedOptimizer"}
SHARED_FILES = {
    "__init__",
    "get_in",
    "facts",
    "translate",
    "model",
    "optimizer",
    "step",
    "buffers",
    "checkpoint",
}


@dataclass(frozen=True)
class Measure:
    statements: int  # without imports and docstrings
    nodes: int  # of the syntax tree
    lines: int  # of code: neither empty nor comments nor docstrings

    @property
    def density(self) -> float:
        return self.nodes / max(self.lines, 1)


def docstrings_of(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        documentable = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documentable) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def measure(text: str) -> Measure:
    tree = ast.parse(text)
    docstrings = list(docstrings_of(tree))
    documented: set[int] = set()
    for docstring in docstrings:
        documented.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    code = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in documented
    ]
    contexts = (ast.Load, ast.Store, ast.Del)
    nodes = [node for node in ast.walk(tree) if not isinstance(node, contexts)]
    imports = (ast.Import, ast.ImportFrom)
    statements = [
        node for node in nodes if isinstance(node, ast.stmt) and not isinstance(node, imports)
    ]
    return Measure(len(statements) - len(docstrings), len(nodes), len(code))


def measured(package: Path) -> dict[str, Measure]:
    """By file, named from the package's folder."""
    return {
        file.relative_to(package).as_posix(): measure(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }


def statements_by_folder(package: Path) -> Counter[str]:
    statements: Counter[str] = Counter()
    for file, found in measured(package).items():
        statements[file.rpartition("/")[0].partition("/")[0]] += found.statements
    return statements


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


@pytest.mark.parametrize("folder", MOST_STATEMENTS)
def test_folder_when_counted_then_within_its_statements(folder: str) -> None:
    found = statements_by_folder(PACKAGE)[folder]
    assert found <= MOST_STATEMENTS[folder], f"{folder or 'files beside the folders'}: {found}"


def test_package_when_counted_then_within_its_limits_and_every_folder_has_one() -> None:
    counts = statements_by_folder(PACKAGE)
    assert counts.keys() == MOST_STATEMENTS.keys()
    assert sum(counts.values()) <= MOST_STATEMENTS_IN_ALL


def test_package_when_measured_then_no_denser_than_its_limit() -> None:
    found = measured(PACKAGE).values()
    nodes = sum(each.nodes for each in found)
    assert nodes / sum(each.lines for each in found) <= MOST_DENSE


def test_files_when_measured_then_none_is_denser_than_their_limit() -> None:
    dense = {
        file: round(found.density, 1)
        for file, found in measured(PACKAGE).items()
        if found.lines >= LEAST_LINES and found.density > MOST_DENSE_FILE
    }
    assert dense == {}


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
    assert statements_by_folder(tmp_path) == {"": 3, "comm": 2}


def test_measure_when_lines_are_broken_otherwise_then_statements_stay_and_density_falls() -> None:
    dense = measure('"""Text."""\nimport os\nx = [a for a in range(3)]  # three\n')
    plain = measure('"""Text."""\nimport os\nx = [\n    a\n    for a in range(3)\n]\n')
    assert (dense.statements, plain.statements) == (1, 1)
    assert dense.nodes == plain.nodes
    assert (dense.lines, plain.lines) == (2, 5)
    assert plain.density < dense.density
