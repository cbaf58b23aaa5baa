"""What the programs are compared by, and that one that fails can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.differential.compare import Outcome, Tolerance, difference, judge
from tests.differential.programs import Iteration, Phase, Program
from tests.differential.reference import run_reference
from tests.differential.scripts import namespace_of, program_text, written
from tests.differential.survey import draw, read


def test_program_when_written_down_then_the_same_one_is_read(tmp_path: Path) -> None:
    for program in draw(20, 0, is_calm=False):
        (tmp_path / "failure.txt").write_text(written(program, "what was seen"))
        assert read(tmp_path / "failure.txt") == program


def test_reference_when_a_rank_leaves_out_a_step_then_it_must_be_refused(tmp_path: Path) -> None:
    left_out = Program(phases=(Phase(2, (Iteration(step="not on one rank"), Iteration())),))
    phase = namespace_of(program_text(left_out))["phase_0"]
    ends = [rank["end"] for rank in run_reference(phase, 2, tmp_path)]
    assert any(end.startswith("must be refused: ranks [") for end in ends), ends


def _ranks(end: str, value: float = 1.0) -> list[dict[str, object]]:
    return [{"seen": [("x", torch.tensor([value]))], "end": end, "class": "LayoutError", "text": "words"}] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "may_refuse", "expected"),
    [
        (_ranks("finished"), _ranks("finished"), False, Outcome("equal", is_exact=True)),
        (_ranks("refused"), _ranks("finished"), True, Outcome("refused", "LayoutError: words")),
        (
            _ranks("refused"),
            _ranks("finished"),
            False,
            Outcome("failed", "refused though it promises to work: LayoutError: words"),
        ),
    ],
)
def test_judge_when_ranks_agree_then_equal_or_refused(
    ours: list[dict[str, object]], theirs: list[dict[str, object]], may_refuse: bool, expected: Outcome
) -> None:
    assert judge(ours, theirs, "float32", may_refuse) == expected


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
def test_judge_when_anything_else_happened_then_failed(ours: list[dict[str, object] | None], words: str) -> None:
    outcome = judge(ours, _ranks("finished"), "float32", may_refuse=True)
    assert outcome.kind == "failed" and words in outcome.text


def test_judge_when_a_rank_has_ended_and_the_others_miss_it_then_refused_but_only_with_its_whole_program() -> None:
    gone, told = _ranks("finished")[0], {**_ranks("refused")[0], "class": "RanksDisagreeError"}
    assert judge([gone, told], _ranks("finished"), "float32", may_refuse=True).kind == "refused"
    assert judge([gone, told], _ranks("finished"), "float32", may_refuse=False).kind == "failed"
    assert judge([{**gone, "seen": []}, told], _ranks("finished"), "float32", may_refuse=True).kind == "failed"


def test_judge_when_the_reference_could_not_go_on_then_finishing_is_a_failure() -> None:
    outcome = judge(_ranks("finished"), _ranks("must be refused: a gradient is not finite"), "float32", True)
    assert outcome == Outcome("failed", "finished, where the reference must be refused: a gradient is not finite")


@pytest.mark.parametrize("value", [[1.0, 2.0], {"a": 1}, None, "text", torch.ones(2), torch.ones(3).double()])
def test_difference_when_it_is_another_kind_of_value_then_in_words(value: object) -> None:
    assert difference(value, torch.ones(3), Tolerance(23)).startswith(("got", "3 of"))
