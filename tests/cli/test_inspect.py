"""`inspect`: what it says about a checkpoint, and which checkpoint a path means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_distopt.checkpoint import MANIFEST, read_manifest
from megatron_distopt.version import VERSION
from tests.support.checkpoint_commands import EMBEDDING, ITERATION, Output, cells, document, run
from tests.support.refusals import assert_mentions

WANTED = "a folder with manifest.json, an iteration, or the --save folder of a run"


def test_inspect_when_asked_then_everything_in_one_look(whole: Path, capsys: Output) -> None:
    status, lines, err = run(capsys, "inspect", whole)
    assert (status, err) == (0, "")
    shown = cells(lines)
    for row in (
        ["where", str(whole)],
        ["written by", f"megatron_distopt {VERSION}, torch {torch.__version__}"],
        ["optimizer", "torch_fused"],
        ["steps", "10"],
        ["loss scale", "scale 1024.0, good_steps 0.0, tolerated 2.0"],
        ["size", "27 params, 2,373 elements, 27.8 KiB of state"],
    ):
        assert row in shown
    first, second = (row for row in shown if row[0] in "01")
    assert first[1:3] == ["18 params", "2,220 elements"] and "weight_decay 0.1" in first[3]
    assert second[1:3] == ["9 params", "153 elements"] and "weight_decay 0.0" in second[3]
    assert "lr 0.001" in first[3] and "betas [0.9, 0.999], eps 1e-08" in first[3]
    state = "main float32, exp_avg float32, exp_avg_sq float32"
    assert [
        "decoder.layers.0-3.mlp.linear_fc2.weight",
        "4 x [6, 16]",
        "96 elements",
        "4.5 KiB",
        "group 0",
        state,
    ] in shown
    assert ["scale", "[1]", "1 element", "12 B", "group 1", state] in shown


def test_inspect_when_json_then_one_document_with_all_tensors(
    saved: Path, whole: Path, capsys: Output
) -> None:
    manifest = read_manifest(whole)
    status, found = document(capsys, "inspect", saved)
    assert (status, found["checkpoint"], found["chosen"]) == (
        0,
        str(whole),
        f"the latest in {saved}",
    )
    assert found["loss_scale"] == {"scale": 1024.0, "good_steps": 0.0, "tolerated": 2.0}
    assert [group["step"] for group in found["groups"]] == [10, 10]  # type: ignore[attr-defined]
    assert found["tensors"].keys() == manifest.tensors.keys()  # type: ignore[attr-defined]
    files = [file.name for file in manifest.files]
    wanted = {"shape": [40, 6], "dtype": "float32", "nbytes": 960}
    assert found["tensors"][f"main/{EMBEDDING}"] == wanted  # type: ignore[index]
    assert found["files"][0] == {  # type: ignore[index]
        "name": files[0],
        "nbytes": manifest.files[0].nbytes,
        "crc32": manifest.files[0].crc32,
    }


def test_inspect_when_given_all_of_a_run_or_another_path_then_it_finds_the_checkpoint(
    saved: Path, whole: Path, capsys: Output
) -> None:
    for below in ("", "latest_checkpointed_iteration.txt"):
        status, lines, _ = run(capsys, "inspect", saved / below)
        assert status == 0
        assert cells(lines)[1:3] == [["where", str(whole)], ["which", f"the latest in {saved}"]]
    same = run(capsys, "inspect", whole)
    for below in (ITERATION, f"{ITERATION}/distrib_optim.distopt/{MANIFEST}"):
        assert run(capsys, "inspect", saved / below) == same


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_when_the_path_is_wrong_then_one_line_that_helps(
    command: str, saved: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    data = whole / read_manifest(whole).files[0].name
    misspelled = saved / "iter_000100"
    for path, remedy in (
        (tmp_path / "none", f"Write {WANTED}."),
        (misspelled, f"Did you mean {saved / ITERATION}?"),
        (data, f"Write the folder {whole}."),
    ):
        status, lines, err = run(capsys, command, path)
        assert (status, lines, err.count("\n")) == (1, [], 1)
        assert_mentions(err, "megatron-distopt: ", str(path), remedy)


@pytest.mark.parametrize("text", ["300", "../x"])
def test_inspect_when_the_latest_iteration_is_not_there_then_another_is_offered(
    text: str, saved: Path, tmp_path: Path, capsys: Output
) -> None:
    for number in (100, 200):
        (tmp_path / f"iter_{number:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    status, lines, err = run(capsys, "inspect", tmp_path)
    assert (status, lines) == (1, [])
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert_mentions(err, f"{tracker} says {text!r}", f"Write {tmp_path / 'iter_0000200'}.")


def test_inspect_when_a_save_was_not_finished_then_what_to_do(
    saved: Path, tmp_path: Path, capsys: Output
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(saved / ITERATION, tmp_path / "run" / "iter_0000200")
    unfinished = tmp_path / "run" / "iter_0000200" / "distrib_optim.distopt"
    (unfinished / MANIFEST).unlink()
    (unfinished / ".metadata").unlink()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("200", encoding="utf-8")
    for earlier in (str(tmp_path / "run" / ITERATION), "an earlier one"):
        status, lines, err = run(capsys, "inspect", tmp_path / "run")
        assert (status, lines) == (1, [])
        assert_mentions(
            err, str(unfinished), "did not finish", "4 .distcp files", "Wait", f"take {earlier}."
        )
        shutil.rmtree(tmp_path / "run" / ITERATION, ignore_errors=True)
