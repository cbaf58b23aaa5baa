"""Notes and files that comments and docstrings of the package point to are there.

A note is a paragraph that begins with its name in brackets. It is defined once and cited by that
name, as in "see [Note: deferred check] in deferred.py".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_distopt"
ROOT = PACKAGE.parent
#: A paragraph begins after an empty line, or where a docstring or comment does.
_DEFINITION = re.compile(r'(?:\A|\n\s*#?\s*\n|""")\s*(?:#\s*)?\[Note: ([^\]]+)\] (?!in )')
_CITATION = re.compile(r"\[Note: ([^\]]+)\](?: in ((?:\w+/)*\w+\.py))?")
_COMMENT = re.compile(r"\n\s*#:? ?")
_FILE = re.compile(r"(?<![\w/.~-])((?:[a-z]\w*/)*[a-z_]\w*\.py)\b")
#: Files of others, which comments name.
_FOREIGN = {"pretrain_gpt.py", "setup.py", "training.py"}


@dataclass(frozen=True)
class Pointers:
    """What the texts of files define and cite, by file."""

    defined: Mapping[str, Path]  # by the name of the note
    twice: list[str]  # notes that are defined again
    lost: list[str]  # citations of what is not there


def _in_one_line(text: str) -> str:
    """A name that is wrapped over lines of a comment or a docstring."""
    return re.sub(r"\s*\n\s*#?:?\s*", " ", text)


def _find(root: Path) -> Pointers:
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    defined: dict[str, Path] = {}
    twice, lost = [], []
    for path, text in texts.items():
        for match in _DEFINITION.finditer(text):
            name = _in_one_line(match[1])
            if name in defined:
                twice.append(f"{path.name}: [Note: {name}]")
            defined[name] = path
    for path, text in texts.items():
        for match in _CITATION.finditer(_COMMENT.sub(" ", text)):
            name, file = _in_one_line(match[1]), match[2]
            if name not in defined:
                lost.append(f"{path.name}: [Note: {name}] is not defined")
            elif file is not None and not str(defined[name]).endswith(f"/{file}"):
                lost.append(f"{path.name}: [Note: {name}] is in {defined[name].name}, not {file}")
    return Pointers(defined, twice, lost)


def _lost_files(root: Path, places: list[Path]) -> list[str]:
    """Files that texts below a folder name and that no place has, by the end of their paths."""
    known = {str(path) for place in places for path in place.rglob("*.py")}
    lost = []
    for path in sorted(root.rglob("*.py")):
        for name in _FILE.findall(path.read_text()):
            is_there = any(each.endswith(f"/{name}") for each in known)
            is_foreign = name in _FOREIGN or name.startswith("torch/")
            if not is_there and not is_foreign:
                lost.append(f"{path.relative_to(root)}: {name}")
    return lost


def test_note_when_it_is_cited_then_it_is_defined_once_and_in_the_file_that_is_named() -> None:
    found = _find(PACKAGE)
    assert len(found.defined) > 20, "notes are not recognised"
    assert found.twice == []
    assert found.lost == []


def test_file_when_it_is_named_in_a_comment_then_it_is_there() -> None:
    places = [PACKAGE, ROOT / "tests", ROOT / "scripts", ROOT / "benchmarks"]
    assert _lost_files(PACKAGE, places) == []


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ('"""[Note: here] A reason."""\n# see [Note: here] in one.py\n', 0),
        ('"""[Note: here] A reason."""\n# see [Note: here] in other.py\n', 1),
        ('"""[Note: here] A reason."""\n# see [Note: there]\n', 1),
        ('"""[Note: a long\nname] A reason."""\n# see [Note: a\n# long name]\n', 0),
    ],
)
def test_pointer_when_it_leads_nowhere_then_it_is_found(
    text: str, lost: int, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text(text)
    assert len(_find(tmp_path).lost) == lost


def test_file_when_it_is_named_and_not_there_then_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("# as in gone/away.py and in one.py\n")
    assert _lost_files(tmp_path, [tmp_path]) == ["one.py: gone/away.py"]
