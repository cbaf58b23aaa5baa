"""`diff` of two runs that have logged digests: where they parted, and what of damaged or foreign folders it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.checkpoint.digest_files import DigestWriter, LoggedStep, Start, read_run
from megatron_distopt.checkpoint.digests import GRADS, DigestKey
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from tests.support.checkpoint_commands import Output, document, run
from tests.support.refusals import assert_says

PARAMS = ("embedding.weight", "layers.0.weight", "layers.1.weight")
KINDS = (GRADS, "exp_avg", "exp_avg_sq", MAIN)
FACTS = {"lr": [0.1], "weight_decay": [0.0], "updated": True, "norm": 1.5, "divisor": 1.0}


@dataclass(frozen=True)
class Run:
    """A run that was never trained: its digests are made of the kind, the param and the step.

    Args:
        start, stop: the first start's; steps from the one after `start` to `stop`.
        every: steps between records.
        ranks: that write.
        poked: by step, kinds and names whose digest is another one from then on.
        facts: by step, numbers that differ.
        params: names.
        dtypes: of kinds, where they are not fp32.
        host: that the file says.
    """

    start: int = 0
    stop: int = 6
    every: int = 1
    ranks: int = 2
    poked: Mapping[int, Iterable[tuple[str, str]]] = field(default_factory=dict)
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    params: tuple[str, ...] = PARAMS
    dtypes: Mapping[str, str] = field(default_factory=dict)
    host: str = "any torch module"

    def step(self, number: int, rank: int, kinds: Iterable[str] = KINDS) -> LoggedStep:
        poked = {pair for step, pairs in self.poked.items() if step <= number for pair in pairs}
        # Each rank has a part of every digest. The parts add up to the same for any number of ranks.
        part = 7 if rank else -7 * (self.ranks - 1)
        digests = {
            DigestKey(kind, name): part + (0 if rank else _number(kind, name, number) + ((kind, name) in poked))
            for kind in kinds
            for name in self.params
        }
        dtypes = {kind: self.dtypes.get(kind, "float32") for kind in kinds}
        facts = {} if GRADS not in kinds else {**FACTS, **self.facts.get(number, {})}
        return LoggedStep(number, digests, dtypes, facts)

    def write(self, folder: Path, number: int = 1, ranks: Iterable[int] | None = None) -> Path:
        start = Start(self.start, self.every, self.ranks, {"host": self.host, "data_parallel": self.ranks})
        for rank in range(self.ranks) if ranks is None else ranks:
            writer = DigestWriter(folder, number, rank, start)
            writer.write(self.step(self.start, rank, [MAIN] if self.start == 0 else KINDS[1:]))
            for step in range(self.start + 1, self.stop + 1):
                if step % self.every == 0:
                    writer.write(self.step(step, rank))
        return folder


def _number(kind: str, name: str, step: int) -> int:
    return (1 << 63) + 1000 * KINDS.index(kind) + 100 * PARAMS.index(name) + step if name in PARAMS else step


def _all(*kinds: str, names: Iterable[str] = PARAMS) -> list[tuple[str, str]]:
    return [(kind, name) for kind in kinds for name in names]


PLAIN = Run()
STATE = (MAIN, "exp_avg", "exp_avg_sq")
LATER = {4: [(GRADS, PARAMS[1]), *((kind, PARAMS[1]) for kind in STATE)], 5: _all(*KINDS)}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return PLAIN.write(tmp_path / "first")


@pytest.mark.parametrize(
    "other",
    [
        PLAIN,
        replace(PLAIN, stop=9),
        replace(PLAIN, every=3),
        replace(PLAIN, ranks=3),
        replace(PLAIN, params=PARAMS[:2]),
        replace(PLAIN, facts={3: {"norm": 1.25}}),  # sums over other numbers of ranks have other roundings
    ],
    ids=["itself", "longer", "every 3", "3 ranks", "fewer params", "another norm"],
)
def test_diff_when_no_digest_differs_then_equal(first: Path, other: Run, tmp_path: Path, capsys: Output) -> None:
    status, found = document(capsys, "diff", first, other.write(tmp_path / "other"))
    assert (status, found["is_equal"], found["parted"]) == (0, True, None)
    assert found["only_in_first"] == [name for name in PARAMS if name not in other.params]
    assert found["common_steps"] == [step for step in range(7) if step % other.every == 0]


PARTED = {
    "a gradient": (Run(poked=LATER), 4, 3, {GRADS: [PARAMS[1]], **{kind: [PARAMS[1]] for kind in STATE}}, "gradients"),
    "the update": (Run(poked={2: _all(MAIN)}), 2, 1, {MAIN: [*PARAMS]}, "update"),
    "its options": (Run(poked={2: _all(MAIN)}, facts={2: {"lr": [0.2]}}), 2, 1, {MAIN: [*PARAMS]}, "options"),
    "the beginning": (Run(poked={0: _all(*KINDS)}), 0, None, {MAIN: [*PARAMS]}, "initial weights"),
    "between records": (
        Run(every=3, poked=LATER),
        6,
        3,
        {kind: [*PARAMS] for kind in (GRADS, *STATE)},
        "steps 4 to 6",
    ),
    "a skipped step": (Run(facts={5: {"updated": False}}), 5, 4, {}, "skipped"),
}


@pytest.mark.parametrize("name", PARTED)
def test_diff_when_runs_part_then_the_first_step_and_its_params_are_named(
    name: str, first: Path, tmp_path: Path, capsys: Output
) -> None:
    other, step, before, params, word = PARTED[name]
    folder = other.write(tmp_path / "other")
    status, found = document(capsys, "diff", first, folder)
    parted: Any = found["parted"]
    assert (status, found["is_equal"]) == (1, False)
    assert (parted["step"], parted["last_equal_step"], parted["params"]) == (step, before, params)
    assert word in parted["meaning"]
    status, lines, err = run(capsys, "diff", first, folder)
    assert (status, err) == (1, "")
    assert f"parted at step {step}" in lines[-1]
    assert all(any(each in line for line in lines) for names in params.values() for each in names)


def test_diff_when_a_kind_has_another_dtype_then_it_is_said_and_not_compared(
    first: Path, tmp_path: Path, capsys: Output
) -> None:
    other = Run(dtypes={GRADS: "bfloat16"}, poked={1: _all(GRADS)}, host="megatron-core").write(tmp_path / "other")
    status, found = document(capsys, "diff", first, other)
    assert (status, found["not_compared"]) == (0, {GRADS: "float32 and bfloat16"})


def test_diff_when_a_run_was_resumed_then_the_last_start_counts(first: Path, tmp_path: Path, capsys: Output) -> None:
    resumed = Run(stop=5, poked={4: _all(*KINDS)}).write(tmp_path / "resumed")  # parted, and begun again after step 3
    Run(start=3, ranks=3).write(resumed, number=2)
    status, found = document(capsys, "diff", first, resumed)
    assert (status, found["changed_at_start"]) == (0, [{}, {}])
    assert found["common_steps"] == [*range(7)]
    one, other = resumed / "start-0001", resumed / "start-0002"
    status, found = document(capsys, "diff", one, other)
    assert (status, found["parted"] and found["parted"]["step"]) == (1, 4)  # type: ignore[index]


def test_diff_when_a_path_is_in_a_digest_folder_then_its_start_is_meant(
    first: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(first / "start-0001")
    for path in (".", "rank-00001.jsonl", first):
        status, found = document(capsys, "diff", first, path)
        assert (status, found["common_steps"]) == (0, [*range(7)])


def test_diff_when_a_resumed_run_began_with_other_values_then_it_is_said(
    first: Path, tmp_path: Path, capsys: Output
) -> None:
    resumed = Run(stop=5).write(tmp_path / "resumed")
    Run(start=3, poked={3: [(MAIN, PARAMS[2])]}).write(resumed, number=2)
    _, found = document(capsys, "diff", first, resumed)
    assert found["changed_at_start"] == [{}, {"3": [PARAMS[2]]}]
    _, lines, _ = run(capsys, "diff", first, resumed)
    assert any("step 3" in line and PARAMS[2] in line for line in lines)


@pytest.mark.parametrize("cut", [1, 40, 150])
def test_diff_when_a_rank_was_killed_in_a_line_then_that_step_is_left_out(
    cut: int, first: Path, tmp_path: Path, capsys: Output
) -> None:
    killed = Run(stop=5).write(tmp_path / "killed")
    file = killed / "start-0001" / "rank-00001.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    status, found = document(capsys, "diff", first, killed)
    last = read_run(killed).incomplete
    assert (status, found["common_steps"]) == (0, [*range(5)])
    assert "step 5" in last and "rank 1" in last


def _without_rank(folder: Path) -> None:
    (folder / "start-0001" / "rank-00001.jsonl").unlink()


def _damaged(folder: Path) -> None:
    file = folder / "start-0001" / "rank-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], lines[3][:50] + "\n", *lines[4:]]))


def _foreign(folder: Path) -> None:
    (folder / "start-0001" / "rank-00000.jsonl").write_text('{"format": "something else"}\n')


def _of_another_start(folder: Path) -> None:
    _without_rank(folder)
    Run(start=4, ranks=2).write(folder, ranks=[1])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank is missing": (_without_rank, "2 ranks"),
    "a line is damaged": (_damaged, "rank-00000.jsonl: line 3"),
    "a foreign file": (_foreign, "rank-00000.jsonl"),
    "files of two starts": (_of_another_start, "start-0001"),
}


@pytest.mark.parametrize("name", BAD)
def test_diff_when_a_folder_is_not_whole_then_status_2_and_where(
    name: str, first: Path, tmp_path: Path, capsys: Output
) -> None:
    other = PLAIN.write(tmp_path / "other")
    damage, says = BAD[name]
    damage(other)
    status, _, err = run(capsys, "diff", first, other)
    assert status == 2
    assert str(other) in err and says in err


def test_diff_when_steps_or_names_have_nothing_in_common_then_status_2(
    first: Path, tmp_path: Path, capsys: Output
) -> None:
    status, _, err = run(capsys, "diff", first / "start-0001", Run(start=7, stop=9).write(tmp_path / "later"))
    assert status == 2
    assert_says(err, f"Invalid pair of runs: {first}/start-0001 logged steps 0 to 6 and 7 to 9. --distopt-log-digests.")
    status, _, err = run(capsys, "diff", first, Run(params=("other",)).write(tmp_path / "foreign"))
    assert status == 2
    assert_says(err, "Invalid pair of runs: no param in common.")


def test_diff_when_one_path_is_a_checkpoint_then_status_2_and_which(
    first: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    for words in ((first, whole), (whole, first), (first, tmp_path / "nowhere")):
        status, _, err = run(capsys, "diff", *words)
        assert status == 2
        assert_says(err, f"Invalid pair of paths: {words[0]} and {words[1]}. --distopt-log-digests.")


def test_writer_when_the_folder_cannot_be_made_then_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        PLAIN.write(tmp_path / "file")
    assert_says(str(caught.value), f"Invalid digest folder {tmp_path}/file: --distopt-digest-folder digest_folder=")
