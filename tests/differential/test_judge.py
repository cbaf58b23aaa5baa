"""What the programs are compared by, and that one that fails can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.differential.compare import Outcome, judge
from tests.differential.drawing import draw
from tests.differential.rerun import read
from tests.differential.scripts import written


def test_program_when_written_down_then_the_same_one_is_read(tmp_path: Path) -> None:
    for program in draw(20, 0):
        (tmp_path / "failure.txt").write_text(written(program, "what was seen"))
        assert read(tmp_path / "failure.txt") == program


def _ranks(end: str, value: float = 1.0) -> list[dict[str, object]]:
    return [
        {
            "seen": [("x", torch.tensor([value]))],
            "end": end,
            "class": "LayoutError",
            "text": "words",
        }
    ] * 2


def test_judge_when_ranks_agree_then_equal_or_refused_where_that_is_allowed() -> None:
    refused, finished = _ranks("refused"), _ranks("finished")
    assert judge(finished, finished, "float32", may_refuse=False) == Outcome("equal", is_exact=True)
    assert judge(refused, finished, "float32", may_refuse=True) == Outcome(
        "refused", "LayoutError: words"
    )
    assert judge(refused, finished, "float32", may_refuse=False).kind == "failed"


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (_ranks("finished", 1.001), "1 of 1 elements differ"),
        (_ranks("refused", 1.001), "after it was wrong already"),
        ([_ranks("refused")[0], _ranks("finished")[0]], "ranks ended as ['finished', 'refused']"),
        ([_ranks("finished")[0], None], "ranks ended as ['finished', 'stuck']"),
        (_ranks("raised"), "ranks ended as ['raised']"),
    ],
)
def test_judge_when_anything_else_happened_then_failed(
    ours: list[dict[str, object] | None], words: str
) -> None:
    outcome = judge(ours, _ranks("finished"), "float32", may_refuse=True)
    assert outcome.kind == "failed" and words in outcome.text


def test_judge_when_a_rank_has_ended_then_refused_only_with_its_whole_program() -> None:
    gone, told = _ranks("finished")[0], {**_ranks("refused")[0], "class": "RanksDisagreeError"}
    assert judge([gone, told], _ranks("finished"), "float32", may_refuse=True).kind == "refused"
    assert judge([gone, told], _ranks("finished"), "float32", may_refuse=False).kind == "failed"
    assert (
        judge([{**gone, "seen": []}, told], _ranks("finished"), "float32", may_refuse=True).kind
        == "failed"
    )


def test_judge_when_the_reference_could_not_go_on_then_finishing_is_a_failure() -> None:
    outcome = judge(
        _ranks("finished"), _ranks("must be refused: a gradient is not finite"), "float32", True
    )
    assert outcome == Outcome(
        "failed", "finished, where the reference must be refused: a gradient is not finite"
    )
