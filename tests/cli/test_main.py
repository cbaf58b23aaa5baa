"""The command line: what it prints, its exit status, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from megatron_distopt.cli import doctor, doctor_machine
from megatron_distopt.cli.main import main
from megatron_distopt.cli.show import ok, problem
from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import Accelerator
from megatron_distopt.plugin.entry_point_block import BLOCK, GROUP
from tests.support.fork_trees import neox, per_rank_2023
from tests.support.refusals import assert_mentions

FACTORY = "megatron/optimizer/__init__.py"
Output = pytest.CaptureFixture[str]


def run(capsys: Output, *words: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_patch_when_checked_applied_and_undone_then_says_what_it_did(
    tmp_path: Path, capsys: Output
) -> None:
    fork = per_rank_2023(tmp_path)
    before = (fork / FACTORY).read_bytes()
    place = f"{FACTORY}, {len(BLOCK)} lines after line 5"
    status, out, err = run(capsys, "patch", "--check", fork)
    head, _, diff = out.partition("\n\n")
    assert (status, err) == (0, "")
    assert (
        head
        == f"can be applied: {place}. To put them in, run megatron-distopt patch --apply {fork}"
    )
    assert diff.startswith(
        f"--- a/{FACTORY}\n+++ b/{FACTORY}\n@@ -5,0 +6,{len(BLOCK)} @@\n+{BLOCK[0]}\n"
    )
    assert (fork / FACTORY).read_bytes() == before
    undo = f"To take them out, run megatron-distopt patch --undo {fork}\n"
    assert run(capsys, "patch", "--apply", fork) == (0, f"applied: {place}. {undo}", "")
    assert run(capsys, "patch", "--apply", fork) == (0, "is applied already: nothing to do\n", "")
    assert run(capsys, "patch", "--check", fork) == (0, f"is applied: {place}. {undo}", "")
    assert run(capsys, "patch", "--undo", fork) == (
        0,
        f"undone: {place}; the file is as it was before\n",
        "",
    )
    assert (fork / FACTORY).read_bytes() == before
    assert run(capsys, "patch", "--undo", fork) == (0, "is not applied: nothing to undo\n", "")


def test_patch_when_the_fork_is_none_then_one_line_and_status_1(
    tmp_path: Path, capsys: Output
) -> None:
    status, out, err = run(capsys, "patch", "--undo", tmp_path)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert_mentions(
        err, "megatron-distopt: ", str(tmp_path), "Write the path of your Megatron's checkout."
    )
    status, out, err = run(capsys, "patch", "--apply", neox(tmp_path / "neox"))
    assert (status, out) == (1, "")
    assert_mentions(
        err, "GPT-NeoX", 'Write "zero_optimization": {"stage": 1} in the DeepSpeed config'
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", ()),
        ("patch", ()),
        ("patch --check", ()),
        ("patch --check --apply x", ()),
        ("doctor --nonsense", ("--nonsense",)),
        ("convert a b --to per_rank", ("argument --to: ", "'per_rank'")),
        ("convert a b --to Torch", ("argument --to: ", "'Torch'")),
        ("convert a b --to torch --dp 0", ("argument --dp: ", "'0'")),
        ("plan --bucket-size 0", ("argument --bucket-size: ", "'0'")),
        ("plan --bucket-size some", ("argument --bucket-size: ", "'some'")),
        ("plan --memory nan", ("argument --memory: ", "nan")),
        ("plan --backward-ms 1", ("--backward-ms",)),
    ],
)
def test_command_when_the_command_line_is_bad_then_status_2(
    line: str, named: tuple[str, ...], capsys: Output
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert_mentions(capsys.readouterr().err, "usage: megatron-distopt", *named)


def test_doctor_when_there_is_a_problem_then_status_1_and_both_forms_say_the_same(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    findings = [ok("fork", "source", "/fork")]
    monkeypatch.setattr(
        doctor, "diagnose", lambda *words, has_trial: given.append((*words, has_trial)) or findings
    )
    status, out, _ = run(capsys, "doctor", "--no-trial", tmp_path, "--", "--bf16", "--json")
    assert status == 0
    assert_mentions(out.splitlines()[-1], "no problem found", "the import was not tried")
    assert given == [(tmp_path, ["--bf16", "--json"], False)]
    findings.append(problem("fork", "flag", "Bad."))
    assert run(capsys, "doctor")[0] == 1
    status, out, _ = run(capsys, "doctor", "--json")
    row = {"section": "fork", "subject": "flag", "status": "problem", "text": "Bad."}
    assert (status, json.loads(out)["can_start"], json.loads(out)["findings"][1]) == (1, False, row)


def test_doctor_when_json_is_asked_for_then_stdout_is_one_document_whatever_others_print(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed, where it is installed, logs while it is imported."""
    monkeypatch.setattr(
        doctor_machine,
        "find_accelerator",
        lambda choice: sys.stdout.write("log\n") and Accelerator(CPU, "torch"),
    )
    status, out, err = run(capsys, "doctor", "--no-trial", per_rank_2023(tmp_path), "--json")
    assert json.loads(out)["can_start"] is (status == 0)
    assert "log" in err.splitlines()


def test_command_when_it_only_reads_files_or_computes_then_torch_is_not_imported(
    tmp_path: Path,
) -> None:
    fork, sizes = per_rank_2023(tmp_path), ["--layers", "2", "--hidden", "64", "--vocab", "128"]
    probe = (
        "import sys; from megatron_distopt.cli.main import main; assert main(['patch', '--check', "
        f"{str(fork)!r}]) == main({['plan', *sizes]}) == 0; sys.exit(str([name for name in "
        "('torch', 'megatron', 'deepspeed') if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == "[]\n"


def test_installation_when_asked_then_command_and_entry_point_are_registered() -> None:
    values = {
        entry.name: entry.value
        for group in ("console_scripts", GROUP)
        for entry in entry_points(group=group)
        if entry.value.startswith("megatron_distopt.")
    }
    assert values == {
        "megatron-distopt": "megatron_distopt.cli.main:main",
        "distopt": "megatron_distopt.plugin.entry_point:distopt",
    }, (
        "the installed metadata is older than setup.py: run pip install -e . again, and remove a "
        "stale *.egg-info"
    )
