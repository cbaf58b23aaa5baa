"""`convert`, and what all commands on checkpoints share: width, progress, interrupts.

Exercises cli/checkpoints.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint import read_manifest
from megatron_distopt.checkpoint.source import open_checkpoint, write_checkpoint
from megatron_distopt.cli import convert_command
from megatron_distopt.cli import main as cli
from tests.support.checkpoint_commands import ITERATION, Output, cells, changed, rewritten, run


def test_commands_when_the_terminal_has_a_width_then_no_line_is_wider(
    saved: Path, copied: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths: one that is longer than the terminal has to be wider."""
    width = 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    (copied / read_manifest(copied).files[1].name).unlink()
    rewritten(
        copied,
        groups=read_manifest(copied).groups[:1],
        about={"host": "megatron-core", "tensor_parallel": 2},
    )
    shutil.copytree(saved, "saved")
    write_checkpoint(
        Path("other"),
        changed(open_checkpoint(Path("saved") / ITERATION / "distrib_optim.distopt"), halved),
    )
    for words in (
        ["inspect", "copied"],
        ["verify", "copied"],
        ["diff", "saved/" + ITERATION, "other"],
    ):
        status, lines, _ = run(capsys, *words)
        assert max(map(len, lines)) <= width, words
        assert len(lines) > 10 and status == (words[0] != "inspect")


def halved(key: str, tensor: Tensor) -> Tensor:
    return tensor / 2


def test_convert_when_to_torch_then_any_command_takes_it_and_nothing_differs(
    saved: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "state.pt"
    status, lines, err = run(capsys, "convert", saved, target, "--to", "torch")
    assert (status, err) == (0, "")
    assert cells(lines)[1:] == [
        ["from", f"{whole} (distopt)"],
        ["which", f"the latest in {saved}"],
        ["to", f"{target} (torch)"],
        ["next", f"torch.load({str(target)!r}, weights_only=True)"],
    ]
    assert torch.load(target, weights_only=True)["groups"][0]["step"] == 10
    assert run(capsys, "diff", whole, target)[0] == 0
    assert run(capsys, "inspect", target)[1][3:7] == run(capsys, "inspect", whole)[1][3:7]
    status, lines, _ = run(capsys, "verify", target)
    assert (status, lines[-1]) == (0, "no problem found: the checkpoint is complete")
    assert [row[1] for row in cells(lines) if row[0] == "ok"] == ["tensors", "values"]


def test_convert_when_it_needs_model_files_then_refused_and_nothing_written(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    status, lines, err = run(
        capsys, "convert", whole, tmp_path / "new", "--to", "gathered", "--dp", "4"
    )
    assert (status, lines, list(tmp_path.iterdir())) == (1, [], [])
    assert str(whole) in err and "no model files" in err


def test_commands_when_interrupted_then_a_line_and_the_status_of_a_shell(
    whole: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_command, "convert", interrupted)
    words = ("convert", whole, tmp_path / "new", "--to", "torch")
    assert run(capsys, *words) == (130, [], "megatron-distopt: interrupted\n")


def test_commands_when_the_reader_of_their_output_has_gone_then_no_traceback(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert cli.main(["inspect", str(whole)]) == 1
