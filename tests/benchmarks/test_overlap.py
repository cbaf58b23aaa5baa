"""benchmarks/overlap.py: its arithmetic, its network, and why there may be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers import namespaces
from peers.namespaces import Link, join, why_not
from peers.overlap_readings import WiredReading, exposed_part, lines, processor_part, summary
from peers.report import Rounds
from peers.train_readings import TrainReading

from tests.support.mini_fork import run_script
from tests.support.spawn import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS, NUMEL = 2, 10_000_000
BEST = "ours, both overlaps"
LINK = Link(42)
WHY_NOT = why_not("pytest")
with_network = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def _reading(name: str, seconds: float, losses: tuple[float, ...] = (4.0, 2.0)) -> TrainReading:
    return TrainReading(name, RANKS, NUMEL, 0, (seconds,), 2 * seconds, 3.0 * NUMEL, losses)


def _summary(reached: float, *more: TrainReading) -> dict[str, Any]:
    """In parts of a second so that what comes out is exact."""
    mute = {"forward alone": 0.125, "forward and backward alone": 0.375, "ours": 0.5, BEST: 0.5, "fork of 2023": 1.0}
    wired = {"ours": 1.0, BEST: 0.625, "fork of 2023": 2.0}
    readings = [WiredReading(None, 1.0, _reading(name, seconds)) for name, seconds in mute.items()]
    readings += [WiredReading(5.0, 2.0, _reading(name, seconds)) for name, seconds in wired.items()]
    return summary(5.0, [*readings, *(WiredReading(5.0, 2.0, each) for each in more)], reached, cores=2)


def test_summary_when_read_then_compares_each_with_itself_with_ours_and_with_the_wire() -> None:
    found = _summary(5.0)
    exposed = {name: part.median for name, part in found["exposed part of the step"].items()}
    assert exposed == {"ours": 0.5, BEST: 0.2, "fork of 2023": 0.5}
    ratios = {name: ratio.median for name, ratio in found["peer / ours with overlap"].items()}
    assert ratios == {"ours": 1.6, "fork of 2023": 3.2}
    # 10 M elements, of which each of two ranks sends 5 M: 20 MB of fp32 and 10 MB of bf16 at 0.625 GB/s.
    assert (found["reduce_scatter_seconds"], found["all_gather_seconds"]) == pytest.approx((0.032, 0.016), rel=1e-12)


def test_last_line_when_too_much_is_exposed_then_says_so_where_backward_is_long_enough() -> None:
    # Backward takes 0.25 s; 30 MB take 0.24 s at 1 Gbit/s.
    *_, said = lines([_summary(1.0)])
    assert said == "5 Gbit/s: no overlap/ours 1.60, exposed 20% (NOT below 10%), fork of 2023/ours 3.20"
    *_, said = lines([_summary(0.9)])
    assert "exposed 20% (backward is shorter than the communication), fork of 2023" in said


def test_lines_when_losses_differ_or_a_contestant_was_not_run_then_say_so() -> None:
    apart, failed = _reading("torch FSDP2", 1.0, losses=(4.0, 2.5)), replace(_reading("apex", 1.0), seconds=())
    rows = list(lines([_summary(5.0, apart, replace(failed, why_not="not installed"))]))
    row_of = {row.split("  ")[0]: row for row in rows}
    assert row_of["torch FSDP2"].endswith("NOT THE SAME WORK: losses differ by more than 0.1%")
    assert "NOT" not in row_of["fork of 2023"]
    assert row_of["apex"].endswith("not installed")


def _rounds(*seconds: float | None) -> Rounds[TrainReading]:
    """Of one contestant, whose processor time is twice its time; None for a round that failed."""
    found = [replace(_reading("ours", each or 0.0), round=number) for number, each in enumerate(seconds)]
    return Rounds([each if each.seconds[0] else replace(each, seconds=(), why_not="not run") for each in found])


def test_parts_when_rounds_fail_or_are_faster_than_without_communication_then_are_of_the_same_round() -> None:
    steps, mute = _rounds(1.0, 2.0), _rounds(0.75, 2.5)
    assert [exposed_part(mute, each) for each in steps.of["ours"]] == [0.25, -0.25]
    for steps, mute in ((_rounds(None, 2.0), _rounds(1.0, 1.0)), (_rounds(9.0, 2.0), _rounds(None, 1.0))):
        assert [exposed_part(mute, each) for each in steps.of["ours"]] == [None, 0.5]
        # 4 s of processor time, of which 2 without communication, on two cores.
        assert [processor_part(mute, 2, each) for each in steps.of["ours"]] == [None, 0.5]


# The network


def test_why_not_when_not_root_then_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: program)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    said = why_not("python benchmarks/overlap.py --quick")
    assert said.startswith("Invalid user: id 1000.") and "sudo -E python benchmarks/overlap.py --quick" in said


def test_script_when_there_is_no_ip_then_says_so_in_a_line_and_exits_with_2(tmp_path: Path) -> None:
    command, environment = [str(BENCHMARKS / "overlap.py"), "--quick"], {**os.environ, "PATH": str(tmp_path)}
    (done,) = run_ranks(run_script, 1, command, environment, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("Invalid programs: no 'ip'.")


def _names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@with_network
def test_join_when_left_by_an_error_then_removes_its_namespaces() -> None:
    with pytest.raises(ZeroDivisionError), join() as link:
        assert link.namespace(1) in _names()
        link.set_rate(1.0)
        link.set_rate(0.0)
        raise ZeroDivisionError
    assert link.namespace(0) not in _names()
    assert link.namespace(1) not in _names()


_WAITS = """
import signal, sys, time
sys.path.append(sys.argv[1])
from peers.namespaces import join
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
with join():
    print("there", flush=True)
    time.sleep(60)
"""


@with_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_join_when_the_process_ends_then_its_namespaces_are_removed_at_once_or_by_the_next_one(
    number: signal.Signals,
) -> None:
    waits = [sys.executable, "-c", _WAITS, BENCHMARKS]
    with subprocess.Popen(waits, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "stdout is a pipe"
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        assert process.wait(30) != 0
    name = Link(process.pid).namespace(0)
    assert (name in _names()) is (number is signal.SIGKILL)
    with join():
        assert name not in _names()
