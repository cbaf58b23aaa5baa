"""What README.md and docs/ name exists: files, commands, flags, variables."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_distopt.config import FREE_OPTIONS, config_from_environment, switch_from
from megatron_distopt.plugin import add_arguments, cli

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

VARIABLES = {"MEGATRON_DISTOPT", *(f"MEGATRON_DISTOPT_{name.upper()}" for name in FREE_OPTIONS)}
#: What a path of the repository ends with, where its first folder does not give it away.
_ENDINGS = (".py", ".md", ".sh", ".patch", ".toml")
#: Folders of the user's or of a host, which are not here.
_FOREIGN = ("megatron", "path", "runs", "tools", "tasks")


def _code(text: str) -> Iterator[str]:
    """Lines of fenced blocks and contents of code spans."""
    outside = []
    for number, part in enumerate(re.split(r"^ *```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            yield from part.splitlines()
        else:
            outside.append(part)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(outside)))


def _named_paths(text: str) -> set[str]:
    """Words in backticks that look like a path of the repository."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))
    words = {word for span in spans for word in span.split() if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word)}
    return {word for word in words if "/" in word and _is_ours(word)}


def _is_ours(word: str) -> bool:
    first = word.partition("/")[0]
    if first in _FOREIGN:
        return False
    return (ROOT / first).is_dir() or (ROOT / "megatron_distopt" / first).is_dir() or word.endswith(_ENDINGS)


@each_page
def test_page_when_it_links_then_the_file_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@each_page
def test_page_when_it_names_a_path_then_that_exists(page: Path) -> None:
    bases = (ROOT, ROOT / "megatron_distopt", page.parent)
    named = _named_paths(page.read_text(encoding="utf-8"))
    missing = [word for word in sorted(named) if not any(any(base.glob(word.rstrip("/"))) for base in bases)]
    assert not missing


@each_page
def test_page_when_it_shows_a_command_then_the_parser_takes_it(page: Path) -> None:
    for line in _code(page.read_text(encoding="utf-8")):
        words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "megatron-distopt " in line else []
        if words[:1] == ["megatron-distopt"] and len(words) > 1:
            own = words[1 : words.index("--")] if "--" in words else words[1:]
            try:
                cli._parser().parse_args(own)
            except SystemExit as stopped:
                assert not stopped.code, line


@each_page
def test_page_when_it_names_a_flag_of_ours_then_the_parser_knows_it(page: Path) -> None:
    known = add_arguments(argparse.ArgumentParser())._option_string_actions
    named = set(re.findall(r"--distopt[-_][a-z][a-z_-]*", page.read_text(encoding="utf-8")))
    assert named <= set(known)


@each_page
def test_page_when_it_names_a_variable_of_ours_then_that_is_read(page: Path) -> None:
    named = set(re.findall(r"\bMEGATRON_DISTOPT(?:_[A-Z_]*[A-Z])?(?![A-Z_*])", page.read_text(encoding="utf-8")))
    assert named <= VARIABLES


@each_page
def test_page_when_it_sets_a_variable_of_ours_then_the_value_is_taken(page: Path) -> None:
    for name, value in re.findall(r"\b(MEGATRON_DISTOPT\w*)=([\w.:]*\w)", page.read_text(encoding="utf-8")):
        switch_from({name: value})
        config_from_environment({name: value})
