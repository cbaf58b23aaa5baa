"""Writes every message of the package with its file and line, so that all can be read in one go.

A message is a text of at least three words that is not a docstring: that of an error, a warning, a
line of the log or a help text, or a part of one. A value in it stands as its expression in braces.

Usage: python scripts/messages.py [FOLDER ...], such as comm checkpoint/protect
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_distopt"
LEAST_WORDS = 3


@dataclass(frozen=True)
class Message:
    file: str  # named from the package's folder
    line: int  # that it begins on
    text: str


class _Texts(ast.NodeVisitor):
    """Collects line and text of all strings, except those that are statements: docstrings."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append((node.lineno, node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.found.append((node.lineno, _text_of(node)))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)  # may have texts, too


def _text_of(node: ast.JoinedStr) -> str:
    text = ""
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            text += "{" + ast.unparse(part.value) + "}"
        elif isinstance(part, ast.Constant):
            text += part.value
    return text


def messages(package: Path = PACKAGE) -> Iterator[Message]:
    """Yields all messages, by file and line."""
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        texts = _Texts()
        texts.visit(ast.parse(path.read_text(encoding="utf-8")))
        for line, text in texts.found:
            if len(text.split()) >= LEAST_WORDS:
                yield Message(file, line, text)


def main(folders: list[str]) -> None:
    for message in messages():
        if not folders or message.file.startswith(tuple(f"{folder}/" for folder in folders)):
            sys.stdout.write(f"{message.file}:{message.line}\n    {message.text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
