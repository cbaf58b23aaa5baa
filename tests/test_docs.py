"""What README.md and docs/ name exists and is linked: files, commands, flags, variables."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from megatron_distopt.cli import main as cli
from megatron_distopt.config import (
    FIXES_VARIABLE,
    FREE_OPTIONS,
    config_from_environment,
    switch_from,
)
from megatron_distopt.plugin.arguments import add_arguments
from scripts.plan_page import MARKED, with_outputs
from scripts.plan_page import PAGE as PLAN
from scripts.reference import PAGE as REFERENCE
from scripts.reference import with_table

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "configs", "patches")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
#: What a stranger reads.
READ = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)

VARIABLES = {
    "MEGATRON_DISTOPT",
    FIXES_VARIABLE,
    *(f"MEGATRON_DISTOPT_{name.upper()}" for name in FREE_OPTIONS),
}
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
    spans = re.findall(r"`([^`\n]+)`", _without_code(text))
    words = {
        word
        for span in spans
        for word in span.split()
        if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word)
    }
    return {word for word in words if "/" in word and _is_ours(word)}


def _is_ours(word: str) -> bool:
    first = word.partition("/")[0]
    if first in _FOREIGN:
        return False
    return (
        (ROOT / first).is_dir()
        or (ROOT / "megatron_distopt" / first).is_dir()
        or word.endswith(_ENDINGS)
    )


def _without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def _links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of every link of a page into the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text(encoding="utf-8")))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in parts]


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(
        r"^#+ (.+)$", _without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE
    )
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.stem
)
def test_page_of_the_docs_when_it_begins_then_with_the_question_that_it_answers(page: Path) -> None:
    assert re.match(r"# [^\n]+\n\n\*[A-Z][^\n]*\?\*\n", page.read_text(encoding="utf-8")), (
        "no *question?* first"
    )


@each_page
def test_page_when_it_links_then_file_and_heading_exist(page: Path) -> None:
    links = _links(page)
    assert links, "a page without links leads nowhere"
    assert [file for file, _ in links if not file.is_file()] == []
    assert [
        (file, anchor) for file, anchor in links if anchor and anchor not in _anchors(file)
    ] == []


@each_page
def test_page_when_it_names_a_file_then_it_links_to_it(page: Path) -> None:
    text = re.sub(
        r"<!-- (\w+): begin -->.*?<!-- \1: end -->",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    linked = {file for file, _ in _links(page)} | {page}
    bases = (ROOT, ROOT / "megatron_distopt", page.parent)
    spans = re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", _without_code(text))
    named = {base / word for word in spans for base in bases if (base / word).is_file()}
    assert sorted(file.resolve() for file in named if file.resolve() not in linked) == []


@each_page
def test_page_when_it_names_a_path_then_that_exists(page: Path) -> None:
    bases = (ROOT, ROOT / "megatron_distopt", page.parent)
    named = _named_paths(page.read_text(encoding="utf-8"))
    missing = [
        word
        for word in sorted(named)
        if not any(any(base.glob(word.rstrip("/"))) for base in bases)
    ]
    assert not missing


@each_page
def test_page_when_it_shows_a_command_then_the_parser_takes_it(page: Path) -> None:
    for line in _code(page.read_text(encoding="utf-8")):
        words = (
            shlex.split(line.strip().removeprefix("$ "), comments=True)
            if "megatron-distopt " in line
            else []
        )
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
    named = set(
        re.findall(
            r"\bMEGATRON_DISTOPT(?:_[A-Z_]*[A-Z])?(?![A-Z_*])", page.read_text(encoding="utf-8")
        )
    )
    assert named <= VARIABLES


@each_page
def test_page_when_it_sets_a_variable_of_ours_then_the_value_is_taken(page: Path) -> None:
    for name, value in re.findall(
        r"\b(MEGATRON_DISTOPT\w*)=([\w.:]*\w)", page.read_text(encoding="utf-8")
    ):
        switch_from({name: value})
        config_from_environment({name: value})


#: Words of a sentence.
LONGEST_SENTENCE = 40


def _sentences(text: str) -> Iterator[str]:
    """Of prose, list items, headings and cells of tables. A code span and a link's text count as
    they are read: the span as one word, the address not at all."""
    text = re.sub(r"<!--.*?-->", "", _without_code(text), flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            blocks += [[cell] for cell in line.strip("|").split("|")]
        elif not line.strip() or re.match(r" *([-*>]|#+|\d+\.) ", line):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    for block in blocks:
        yield from re.split(r"(?<=[.!?])[\"')*_\]]*\s+", " ".join(block))


def _too_long(text: str) -> list[str]:
    return [
        sentence.strip()
        for sentence in _sentences(text)
        if len(re.findall(r"\S*\w\S*", sentence)) > LONGEST_SENTENCE
    ]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_when_read_then_no_sentence_has_more_than_40_words(page: Path) -> None:
    assert _too_long(page.read_text(encoding="utf-8")) == []


def test_sentences_when_too_long_then_they_are_found_in_prose_lists_and_cells() -> None:
    most, more = " ".join(["word"] * LONGEST_SENTENCE), " ".join(["word"] * (LONGEST_SENTENCE + 1))
    assert _too_long(f"{most}. {most}.\n\n- {most}\n- {most}\n\n| {most} | {most} |\n") == []
    assert _too_long(f"```\n{more}\n```\n\n`{more}` [a](page.md) <!-- {more} -->") == []
    assert _too_long(f"Short. {more}.\n") == [f"{more}."]
    assert _too_long(f"{most}\n{most}\n") == [f"{most} {most}"]
    assert _too_long(f"- short\n  and {more}\n") == [f"- short   and {more}"]
    assert _too_long(f"| a | {more} |\n|---|---|\n") == [more]


def test_reference_when_compared_with_the_options_then_its_table_is_theirs() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    assert page == with_table(page), "write the table again: python scripts/reference.py"


def test_plan_page_when_its_commands_run_then_they_print_what_it_shows() -> None:
    page = PLAN.read_text(encoding="utf-8")
    assert len(MARKED.findall(page)) == page.count("<!-- output: ") > 0
    assert page == with_outputs(page), "write the outputs again: python scripts/plan_page.py"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """Of the wheel, whose description is the page of a package index."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "wheel").mkdir()  # which older releases of setuptools do not make
    for name in ("setup.py", "pyproject.toml", "README.md", "megatron_distopt/version.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    code = "import setuptools.build_meta as build; build.prepare_metadata_for_build_wheel('.')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=120, check=True
    )
    [written] = folder.glob("*.dist-info/METADATA")
    return Parser().parsestr(written.read_text(encoding="utf-8"))


def test_metadata_when_built_then_it_is_complete_and_has_no_address(metadata: Message) -> None:
    assert metadata["Author"] == "The megatron-distopt developers"
    assert metadata["Summary"] and metadata["Keywords"] and metadata.get_all("Classifier")
    assert any(
        requirement.startswith("torch>=") for requirement in metadata.get_all("Requires-Dist", [])
    )
    assert metadata["Home-page"] is None and metadata["Project-URL"] is None


def test_index_page_when_built_then_it_needs_no_checkout(metadata: Message) -> None:
    page = metadata.get_payload()
    assert isinstance(page, str) and "pip install megatron-distopt" in page
    assert re.findall(r"\]\((?!https?:)", page) == []
    assert [
        name
        for name in ("scripts/", "configs/", "examples/", "benchmarks/", "<!--")
        if name in page
    ] == []


def _bare_params(text: str) -> list[str]:
    """What prose calls a param; code, code spans, tables and the targets of links may say it."""
    without_code = re.sub(r"`[^`]*`", "", _without_code(text))
    prose = re.sub(r"^ *\|.*$|\]\([^)]*\)", "", without_code, flags=re.MULTILINE)
    return re.findall(r".{,30}\b[Pp]arams?\b.{,30}", prose)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which is in the words of its time
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_prose_when_it_means_a_parameter_then_it_writes_the_word_out(page: Path) -> None:
    assert _bare_params(page.read_text(encoding="utf-8")) == []


def test_bare_params_when_the_word_is_in_prose_then_found_and_nowhere_else() -> None:
    said = "# Flat params\n\nA main param is rounded."
    assert _bare_params(said) == ["# Flat params", "A main param is rounded."]
    spans = "A `param` of `3\nparams`, a [link](page.md#main-param)."
    blocks = "| a param |\n\n```\nparam\n```"
    assert _bare_params(f"{spans}\n\n{blocks}") == []
