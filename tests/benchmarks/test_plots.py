"""The pictures of README.md and docs/: up to date with their results, and with every contestant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.plots import NAMES, PICTURES, Picture, draw

pytest.importorskip("matplotlib")
each_picture = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)


def texts(figure: Any) -> set[str]:
    from matplotlib.text import Text

    return {text.get_text().strip() for text in figure.findobj(Text)}


@each_picture
def test_picture_when_compared_with_its_result_then_it_is_not_stale(picture: Picture) -> None:
    stored = re.findall(
        r"<dc:description>(\w+)</dc:description>", picture.path.read_text(encoding="utf-8")
    )
    assert stored == [picture.digest()], "draw the pictures again: python scripts/plots.py"


@each_picture
def test_picture_when_drawn_twice_then_files_are_equal_with_every_contestant_of_the_result(
    picture: Picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **more: (figures.append(self), save(self, *args, **more)),
    )
    names = ("a.svg", "b.svg") if picture is PICTURES[0] else ("a.svg",)
    for name in names:
        draw(picture, tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    result = json.loads(picture.result.read_text(encoding="utf-8"))
    found = texts(figures[0])
    if "runs" in result:
        assert {run["name"] for run in result["runs"]} <= found
        return
    assert {f"{entry['ranks']} ranks" for entry in result["ranks"]} <= {
        text.partition(",")[0] for text in found
    }
    kind = "seconds" if "seconds" in result["ranks"][0] else "bytes an element"
    assert {NAMES[name] for name in NAMES if result["ranks"][0][kind].get(name)} <= found
