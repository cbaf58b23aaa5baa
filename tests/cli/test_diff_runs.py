"""`diff` of two runs that have logged digests: where they parted, and what of damaged or foreign
files it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_commands import Output, document, run

PARAMS = ("embedding.weight", "layers.0.weight", "layers.1.weight")
STATE = ("main", "exp_avg", "exp_avg_sq")
KINDS = ("grad", *STATE)
FACTS = {"lr": [0.1], "weight_decay": [0.0], "updated": True, "norm": 1.5, "divisor": 1.0}
#: By step, kinds and names whose digest is another one from then on.
Pokes = Mapping[int, Iterable[tuple[str, str]]]


def _start(
    path: Path,
    *,
    start: int = 0,
    stop: int = 6,
    every: int = 1,
    pokes: Pokes | None = None,
    facts: Mapping[int, Mapping[str, Any]] | None = None,
    params: tuple[str, ...] = PARAMS,
) -> Path:
    """Appends a start of a run that was never trained: its digests are made of kind, param and
    step."""

    def digests(step: int, kinds: Iterable[str]) -> list[str]:
        poked = {pair for each, pairs in (pokes or {}).items() if each <= step for pair in pairs}
        return [
            f"{hash((kind, name, step, (kind, name) in poked)) % (1 << 64):x}"
            for kind in kinds
            for name in params
        ]

    def tensors(kinds: Iterable[str]) -> dict[str, Any]:
        return {"tensors": [[kind, name] for kind in kinds for name in params]}

    records = [
        {"format": "megatron-distopt digests 1", "step": start, "every": every, "about": {}},
        tensors(STATE),
        {"step": start, "digests": digests(start, STATE)},
        tensors(KINDS),
    ]
    for step in range(start + 1, stop + 1):
        if step % every == 0:
            records.append(
                {
                    "step": step,
                    **FACTS,
                    **(facts or {}).get(step, {}),
                    "digests": digests(step, KINDS),
                }
            )
    with path.open("a") as file:
        file.write(
            "\n" + "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        )
    return path


def _all(*kinds: str) -> list[tuple[str, str]]:
    return [(kind, name) for kind in kinds for name in PARAMS]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return _start(tmp_path / "first")


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"stop": 9, "every": 3},
        {"params": PARAMS[:2]},
        {"facts": {3: {"norm": 1.25}}},  # sums over other numbers of ranks have other roundings
    ],
    ids=str,
)
def test_diff_when_no_digest_differs_then_equal(
    first: Path, other: dict[str, Any], tmp_path: Path, capsys: Output
) -> None:
    status, found = document(capsys, "diff", first, _start(tmp_path / "other", **other))
    assert (status, found["is_equal"], found["parted"]) == (0, True, None)
    assert found["only_in_first"] == [
        name for name in PARAMS if name not in other.get("params", PARAMS)
    ]
    assert found["common_steps"] == [step for step in range(7) if step % other.get("every", 1) == 0]


LATER = {4: [(kind, PARAMS[1]) for kind in KINDS], 5: _all(*KINDS)}
PARTED: dict[str, tuple[dict[str, Any], int, int | None, dict[str, list[str]], str]] = {
    "a gradient": ({"pokes": LATER}, 4, 3, {kind: [PARAMS[1]] for kind in KINDS}, "data"),
    "the update": ({"pokes": {2: _all("main")}}, 2, 1, {"main": [*PARAMS]}, "update"),
    "its options": (
        {"pokes": {2: _all("main")}, "facts": {2: {"lr": [0.2]}}},
        2,
        1,
        {"main": [*PARAMS]},
        "options",
    ),
    "the beginning": (
        {"pokes": {0: _all(*STATE)}},
        0,
        None,
        {kind: [*PARAMS] for kind in STATE},
        "checkpoint of the start",
    ),
    "between": (
        {"every": 3, "pokes": LATER},
        6,
        3,
        {kind: [*PARAMS] for kind in KINDS},
        "steps 4 to 6",
    ),
    "a skipped step": ({"facts": {5: {"updated": False}}}, 5, 4, {}, "skipped"),
}


@pytest.mark.parametrize("name", PARTED)
def test_diff_when_runs_part_then_the_first_step_and_its_params_are_named(
    name: str, first: Path, tmp_path: Path, capsys: Output
) -> None:
    other, step, before, params, word = PARTED[name]
    path = _start(tmp_path / "other", **other)
    status, found = document(capsys, "diff", first, path)
    parted: Any = found["parted"]
    assert (status, found["is_equal"]) == (1, False)
    assert (parted["step"], parted["last_equal_step"], parted["params"]) == (step, before, params)
    assert word in parted["meaning"]
    status, lines, err = run(capsys, "diff", first, path)
    assert (status, err) == (1, "")
    assert lines[-1].startswith("Not the same, first ") and f" at step {step}. " in lines[-1]
    assert all(any(each in line for line in lines) for names in params.values() for each in names)


def test_diff_when_a_run_was_resumed_then_the_last_start_counts(
    first: Path, tmp_path: Path, capsys: Output
) -> None:
    # parted, and begun again after step 3
    resumed = _start(tmp_path / "resumed", stop=5, pokes={4: _all(*KINDS)})
    _start(resumed, start=3)
    status, found = document(capsys, "diff", first, resumed)
    assert (status, found["common_steps"]) == (0, [*range(7)])
    # again, with other values than the run had there
    _start(resumed, start=3, pokes={3: [("main", PARAMS[2])]})
    status, found = document(capsys, "diff", first, resumed)
    parted: Any = found["parted"]
    assert (status, parted["step"], parted["params"]) == (1, 3, {"main": [PARAMS[2]]})


def test_diff_when_a_run_was_killed_in_a_line_then_that_step_is_left_out(
    first: Path, tmp_path: Path, capsys: Output
) -> None:
    killed = _start(tmp_path / "killed", stop=5)
    killed.write_bytes(killed.read_bytes()[:-40])
    status, found = document(capsys, "diff", first, killed)
    assert (status, found["common_steps"]) == (0, [*range(5)])


def _replace(old: str, new: str) -> Callable[[Path, Path], Path]:
    def damaged(path: Path, checkpoint: Path) -> Path:
        _start(path)
        path.write_text(path.read_text().replace(old, new, 1))
        return path

    return damaged


BAD: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "a line is damaged": (_replace('{"step":2', '{"step:2'), "Line 7"),
    "a digest is missing": (_replace('"digests":["', '"digests":["0","'), "Line 4"),
    "later steps": (lambda path, _: _start(path, start=7, stop=9), "steps 7 to 9"),
    "other params": (lambda path, _: _start(path, params=("other",)), "no step and param"),
    "a checkpoint": (lambda path, checkpoint: checkpoint, "holds digests of a run"),
    "nothing": (lambda path, _: path, "holds digests of a run"),
}


@pytest.mark.parametrize("name", BAD)
def test_diff_when_there_is_nothing_to_compare_then_status_2_and_why(
    name: str, first: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    make, says = BAD[name]
    other = make(tmp_path / "other", whole)
    for paths in ((first, other), (other, first)):
        status, _, err = run(capsys, "diff", *paths)
        assert status == 2
        assert str(other) in err and says in err
