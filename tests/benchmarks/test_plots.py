"""`--plot` and `--from` of the benchmarks: a picture from a result, with a row also for a contestant that failed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.plot import Bar, Drawing, Panel, Row, draw_panels
from peers.plot_training import draw_memory, draw_step, draw_train
from peers.ratios import Spread

from scripts.plots import NAMES, PICTURES, Picture
from scripts.plots import draw as draw_picture

pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RATES = {f"{name}_bytes_per_second": Spread(1e10, 9e9, 2e10) for name in ("copy", "in_place")}
NOT_RUN = {"apex": "not installed (No module named 'apex')"}
SECONDS = {"alone": Spread(1, 0.5, 1.5), "ours": Spread(2, 1, 3), "peer": Spread(4, 3.5, 9), "apex": None}
TIMED = {"numel": 10**6, "peer / ours": {"peer": Spread(2, 1, 3), "apex": None}, "why_not": NOT_RUN, "seconds": SECONDS}
BYTES = {"peak of a step": 14.0, "held between steps": 12.0}
MEMORY = {"target": 12.0, "bytes an element": {"ours": BYTES, "peer": BYTES}, "why_not": NOT_RUN, "numel": 10**6}
RESULTS: dict[str, tuple[Callable[[Any, Path], None], dict[str, Any]]] = {
    "step": (draw_step, {"sizes": [{**TIMED, **RATES}] * 2}),
    "train": (draw_train, {"ranks": [{**TIMED, "ranks": 2}]}),
    "memory": (draw_memory, {"ranks": [{**MEMORY, "ranks": ranks} for ranks in (2, 4)]}),
}


def size_of(file: Path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def texts(figure: Any) -> set[str]:
    from matplotlib.text import Text

    return {text.get_text().strip() for text in figure.findobj(Text)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def savefig(self: Figure, *args: Any, **more: Any) -> None:
        figures.append(self)
        save(self, *args, **more)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


@pytest.mark.parametrize("name", RESULTS)
def test_plot_when_a_result_is_drawn_then_every_contestant_has_its_row(
    name: str, tmp_path: Path, drawn: list[Any]
) -> None:
    function, result = RESULTS[name]
    Drawing(tmp_path / "x.png", None).of_result(function, result)
    assert min(size_of(tmp_path / "x.png")) > 200
    assert {"ours", "peer", "apex", "not installed"} <= texts(drawn[0])


def test_plot_when_times_are_drawn_then_they_are_milliseconds_with_the_ratio(tmp_path: Path, drawn: list[Any]) -> None:
    function, result = RESULTS["train"]
    Drawing(tmp_path / "x.png", None).of_result(function, result)
    assert {"2000", "4000  (2.00 ×)", "alone", "2 ranks, 1.0 M elements"} <= texts(drawn[0])


def test_plot_when_memory_is_drawn_then_what_it_could_do_is_in_two_lines(tmp_path: Path, drawn: list[Any]) -> None:
    function, result = RESULTS["step"]
    Drawing(tmp_path / "x.png", None).of_result(function, result)
    floors = [f"30 bytes an element at the speed of a {what}" for what in ("copy", "product in place")]
    assert set(floors) <= texts(drawn[0])


#: Scripts, results and pictures; in one process, which imports torch once.
DRAWS_ALL = """
import json, runpy, sys
for script, result, picture in json.loads(sys.argv[1]):
    sys.argv[:] = [script, "--from", result, "--plot", picture]
    runpy.run_path(script, run_name="__main__")
"""


def script_of(result: Path) -> Path:
    """A file of results begins with the name of its script."""
    return max(
        (each for each in BENCHMARKS.glob("*.py") if result.stem.startswith(each.stem)), key=lambda each: len(each.stem)
    )


def test_from_when_any_kept_result_is_named_then_its_script_draws_it_and_runs_nothing(tmp_path: Path) -> None:
    results = sorted((BENCHMARKS / "results").glob("*.json"))
    pictures = {result: tmp_path / f"{result.stem}.png" for result in results}
    orders = [[str(script_of(result)), str(result), str(picture)] for result, picture in pictures.items()]
    command = [sys.executable, "-c", DRAWS_ALL, json.dumps(orders)]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert {script_of(result) for result in results} == set(BENCHMARKS.glob("*.py"))
    assert min(min(size_of(picture)) for picture in pictures.values()) > 200


def test_plot_when_it_is_not_asked_for_then_nothing_is_drawn(drawn: list[Any]) -> None:
    drawing = Drawing(None, None)
    drawing.of_result(draw_step, {})
    assert (drawing.of_kept(draw_step), drawn) == (False, [])


def test_plot_when_there_are_more_rows_then_the_picture_is_higher(tmp_path: Path) -> None:
    heights = []
    for number in (2, 12):
        rows = [Row(f"peer {each}", (Bar((3.0, 2.0, 4.0), "3"), None), mark=1.0) for each in range(number)]
        draw_panels("title", [[Panel("a", "s", rows), Panel("b", "s", rows, [(2.0, "line")])]], tmp_path / "x.png")
        heights.append(size_of(tmp_path / "x.png")[1])
    assert heights[1] > heights[0]


def test_arguments_when_they_are_taken_then_the_rest_is_what_was_measured() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, default=3)
    Drawing.add_arguments(parser)
    args = parser.parse_args(["--plot", "a.png", "--from", "b.json"])
    assert Drawing.taken_from(args, parser) == Drawing(Path("a.png"), Path("b.json"))
    assert json.dumps(vars(args)) == '{"sizes": 3}'


def test_from_when_there_is_no_plot_beside_it_then_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    Drawing.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        Drawing.taken_from(parser.parse_args(["--from", "x.json"]), parser)
    assert ended.value.code == 2
    said = "Invalid --from: no --plot beside it. Must say where to draw. Write --plot FILE beside it."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_readme_picture_when_compared_with_its_result_then_it_is_not_stale(picture: Picture) -> None:
    stored = re.findall(r"<dc:description>(\w+)</dc:description>", picture.path.read_text(encoding="utf-8"))
    assert stored == [picture.digest()], "draw the pictures again: python scripts/plots.py"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_readme_picture_when_drawn_twice_then_files_are_equal_with_every_contestant_and_number_of_ranks(
    picture: Picture, tmp_path: Path, drawn: list[Any]
) -> None:
    for name in ("a.svg", "b.svg"):
        draw_picture(picture, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    entries = json.loads(picture.result.read_text(encoding="utf-8"))["ranks"]
    titles = {f"{entry['ranks']} ranks" for entry in entries}
    found = texts(drawn[0])
    assert titles <= {text.partition(",")[0] for text in found}
    kind = "seconds" if "seconds" in entries[0] else "bytes an element"
    assert {NAMES[name] for name in NAMES if entries[0][kind].get(name)} <= found
