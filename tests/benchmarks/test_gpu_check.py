"""scripts/gpu_check.sh: one bad check does not end the report, and the report says what was found
and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_check import correctness
from gpu_check.__main__ import line_of, parse_args, seconds_for
from gpu_check.checks import SUBJECTS, Check, Found, Outcome, Place, SkipError, Status, WrongError
from gpu_check.machine import DeviceError, Machine, device_type_of, look, rank_counts
from gpu_check.report import ARCHIVE, Report, write_report
from gpu_check.runner import CHECKS, NO_TIME, Batch, Runner, batches_of

from tests.support import mini_fork

ROOT = Path(__file__).parents[2]
VERSIONS = {"torch": "2.13.0", "megatron-core": "0.16.1", "apex": "not installed"}
MACHINE = Machine("xpu", ("Some GPU",) * 2, 2, 80 << 30, "xccl", "Linux", "3.11.7", VERSIONS)


def _timed(**seconds: list[float]) -> list[dict[str, Any]]:
    found = [
        {"name": name.replace("_", " "), "seconds": each, "why_not": ""}
        for name, each in seconds.items()
    ]
    return [
        *found,
        {"name": "apex", "seconds": [], "why_not": "not installed (No module named 'apex')"},
    ]


STEP = {
    "numel": 3 * 10**8,
    "copy": 3e12,
    "contestants": _timed(ours=[0.004, 0.0044], peer=[0.008, 0.009]),
}
TRAIN = {
    "numel": 6 * 10**8,
    "contestants": _timed(forward_and_backward_alone=[0.1], ours=[0.2, 0.21], peer=[0.4]),
}
BYTES = {"numel": 10, "held": 120, "step_peak": 125, "build_peak": 130, "why_not": ""}
HELD = {
    "numel": 10,
    "target": 12.0,
    "contestants": [{"contestant": "ours", **BYTES}, {"contestant": "peer", **BYTES}],
}
PASSED = (
    Outcome(
        "correctness",
        "overlaps",
        "both overlaps change no bit",
        2,
        Status.PASSES,
        1.5,
        "equal to the bit",
    ),
    Outcome(
        "correctness",
        "megatron_core",
        "agrees",
        2,
        Status.PASSES,
        3.0,
        "0.16.1",
        {"version": "0.16.1"},
    ),
    Outcome("correctness", "collectives", "in place", 1, Status.SKIPPED, 0.0, "one device"),
    Outcome("memory", "held", "bytes an element", 2, Status.PASSES, 9.0, "12.00", HELD),
    Outcome("speed", "step", "an optimizer step", 1, Status.PASSES, 9.0, "4.2 ms", STEP),
    Outcome("speed", "train", "training steps", 2, Status.PASSES, 9.0, "205 ms", TRAIN),
)
FAILED = Outcome(
    "correctness", "resume", "checkpoints resume", 2, Status.FAILS, 2.0, "rank 1: KeyError: 'a|b'"
)
REPORT = Report(MACHINE, PASSED, "2026-11-23", 61.0, "scripts/gpu_check.sh --device xpu")


def test_report_when_something_failed_then_says_so_first_and_packs_what_to_send(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("KeyError")
    report = replace(REPORT, outcomes=(*PASSED, FAILED))
    write_report(report, tmp_path, logs)
    text = (tmp_path / "report.md").read_text()
    assert "**5 passed, 1 failed, 1 skipped**" in text
    assert (
        text.index("What failed")
        < text.index("## Machine")
        < text.index("## What to send")
        < text.index(ARCHIVE)
    )
    assert text.count("rank 1: KeyError: 'a|b'") == 1 and r"KeyError: 'a\|b'" in text
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        assert {"gpu_check/report.json", "gpu_check/logs/rank0.log"} <= set(archive.getnames())
    assert (
        json.loads((tmp_path / "report.json").read_text())["outcomes"][-1]["detail"]
        == FAILED.detail
    )


def test_report_when_nothing_failed_then_has_ratios_and_memory_and_nothing_is_packed(
    tmp_path: Path,
) -> None:
    (tmp_path / ARCHIVE).write_text("of an earlier run")
    write_report(REPORT, tmp_path, tmp_path / "logs")
    assert not (tmp_path / ARCHIVE).exists()
    text = (tmp_path / "report.md").read_text()
    assert "Nothing failed" in text
    assert "| peer | 8.5 | 8 to 9 | 2.02 | 2 |  |" in text
    assert "| apex | | | | | not installed (No module named 'apex') |" in text
    assert "| ours | 12.00 | 12.50 | 13.00 |  |" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--devce cpu", "Write --device"),
        ("--minutes soon", "Write --minutes 10"),
        ("--only fast", "'memory', 'speed'"),
    ],
)
def test_options_when_they_are_not_known_then_says_what_to_type(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(words.split())
    assert error.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("device", ["xpu", "auto", "gpu"])
def test_device_when_it_is_not_there_then_says_what_to_type(device: str) -> None:
    with pytest.raises(DeviceError, match=r"--device cpu\.$"):
        device_type_of(device)


def test_batches_when_there_are_devices_then_every_check_runs_and_ranks_grow_to_all_of_them() -> (
    None
):
    assert [rank_counts(count) for count in (1, 2, 6, 8)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8),
    ]
    found = list(batches_of(6))
    assert [batch.ranks for batch in found if batch.checks[0].subject == "memory"] == [1, 6]
    assert {batch.ranks for batch in found if batch.checks[0].subject == "correctness"} == {
        1,
        2,
        4,
        6,
    }
    assert all(len(batch.checks) == 1 for batch in found if batch.checks[0].is_separate)
    assert {check.name for batch in found for check in batch.checks} == {
        check.name for check in CHECKS
    }
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.subject for check in CHECKS} == set(SUBJECTS)
    assert seconds_for(found, 300.0) > seconds_for(found, 30.0) >= 2.0


# Checks that end in every way; ranks import them from here.


def passes(place: Place) -> Found:
    return Found(f"rank {place.rank} of {place.size}", {"answer": 42})


def skips(place: Place) -> Found:
    raise SkipError("not on this device")


def is_wrong(place: Place) -> Found:
    raise WrongError("3 of 4 elements differ")


def raises_on_one_rank(place: Place) -> Found:
    if place.rank == 1:
        raise KeyError("only here")
    dist.barrier()
    return Found("")


def crashes(place: Place) -> Found:
    os.abort()


def hangs(place: Place) -> Found:
    time.sleep(600)
    return Found("")


def has_a_bad_peer(place: Place) -> Found:
    """Ends the process in the middle of its contestants, as a peer's kernel may."""
    for name in ("ours", "bad peer", "good peer"):
        if name not in place.without:
            place.say(name)
            if name == "bad peer":
                os.abort()
    return Found(f"without {', '.join(place.without)}")


ON_ONE_RANK = (
    Check("skips", "is skipped", skips),
    Check("is_wrong", "is wrong", is_wrong),
    Check("crashes", "crashes", crashes),
    Check("has_a_bad_peer", "has a bad peer", has_a_bad_peer),
    Check("passes", "passes", passes),
    Check("hangs", "hangs", hangs, limit=0.5),
)
#: The first is a real one.
ON_TWO_RANKS = (
    next(check for check in correctness.CHECKS if check.name == "collectives"),
    Check("raises", "raises on one rank", raises_on_one_rank, least_ranks=2),
)
ALL = (*ON_ONE_RANK, *ON_TWO_RANKS)

STATUSES = {
    "skips": (Status.SKIPPED, "not on this device"),
    "is_wrong": (Status.FAILS, "3 of 4 elements differ"),
    "crashes": (Status.FAILS, "was ended by SIGABRT"),
    "has_a_bad_peer": (Status.PASSES, "without bad peer"),
    "passes": (Status.PASSES, "rank 0 of 1"),
    "hangs": (Status.FAILS, "no end after 0.5 s; stacks are in the logs"),
    "collectives": (
        Status.PASSES,
        "12 combinations of dtype, length and async_op, equal to the bit",
    ),
    "raises": (Status.FAILS, "rank 1: KeyError: 'only here'"),
}


def test_checks_when_they_end_in_any_way_then_the_others_are_run_and_what_was_found_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSpeed takes each process a while to ask
    monkeypatch.setenv("MEGATRON_DISTOPT_ACCELERATOR", "torch")
    runner = Runner(look("cpu"), tmp_path, defined_in="tests.benchmarks.test_gpu_check:ALL")
    batches = Batch(1, ON_ONE_RANK), Batch(2, ON_TWO_RANKS)
    found = [outcome for batch in batches for outcome in runner.run(batch, time.time() + 100, 1.0)]
    assert [outcome.check for outcome in found] == list(STATUSES)
    for outcome, (status, said) in zip(found, STATUSES.values(), strict=True):
        assert outcome.status is status and said in outcome.detail, outcome
        assert line_of(outcome).startswith(("passes", "FAILS", "skipped"))
    assert next(each for each in found if each.check == "passes").figures == {"answer": 42}
    printed = "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert "KeyError" in printed and "in hangs" in printed


@pytest.mark.long
def test_command_when_run_on_a_cpu_then_everything_passes(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "MINI_FORK_CORE": str(mini_fork.core_folder()),
    }
    command = [
        str(ROOT / "scripts" / "gpu_check.sh"),
        "--device",
        "cpu",
        "--minutes",
        "6",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["outcomes"]
    others = [each for each in found if each["status"] != "passes"]
    assert {each["check"] for each in others if each["subject"] != "speed"} == set()
    # A machine that does something else as well may not come to all of them.
    assert {each["detail"] for each in others if each["subject"] == "speed"} <= {NO_TIME}
