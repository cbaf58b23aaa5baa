"""A hook of mkdocs: files of the repository that the pages link to become pages of the site, and
the links lead there.

On a disk and in a repository browser a link such as `../benchmarks/step.py` works as it is. The
site has no files outside of docs/, so each linked file is added as a page below `repository/`:
Markdown as it is, everything else as one block of code. A link to a file that does not exist is
left alone; mkdocs then fails in strict mode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of the repository that a page, or a page that was added, links to."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target not in seen and not target.is_relative_to(ROOT / "docs"):
                files.append(File.generated(config, _uri_of(target), content=_content(target)))
                waiting += [target] if target.suffix == ".md" else []
            seen.add(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sends links between files of the repository to their pages."""
    origin = _origin(page.file.src_uri)

    def sent(match: re.Match[str]) -> str:
        target = _resolved(origin, match[2])
        if target is None:
            return match[0]
        return match[1] + relpath(_uri_of(target), dirname(page.file.src_uri) or ".") + match[3]

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(sent, part) for index, part in enumerate(parts))


def _targets(page: Path) -> Iterator[Path]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = (_resolved(page, match[2]) for match in _LINK.finditer(text))
    yield from (target for target in found if target is not None)


def _resolved(page: Path, link: str) -> Path | None:
    """The file of the repository that a link of a page names; None for anything else."""
    target = Path(os.path.normpath(page.parent / link))
    return (
        target if "://" not in link and target.is_file() and target.is_relative_to(ROOT) else None
    )


def _uri_of(file: Path) -> str:
    """Where a file of the repository is in the site."""
    if file.is_relative_to(ROOT / "docs"):
        return file.relative_to(ROOT / "docs").as_posix()
    name = f"{FOLDER}/{file.relative_to(ROOT).as_posix()}"
    return name if file.suffix == ".md" else f"{name}.md"


def _origin(uri: str) -> Path:
    """The file that a page was made from."""
    if not uri.startswith(f"{FOLDER}/"):
        return ROOT / "docs" / uri
    file = ROOT / uri.removeprefix(f"{FOLDER}/")
    return file if file.is_file() else file.with_suffix("")


def _content(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = {".py": "python", ".sh": "bash", ".patch": "diff"}.get(file.suffix, "text")
    title = file.relative_to(ROOT).as_posix()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n````{language}\n{text}\n````\n"
