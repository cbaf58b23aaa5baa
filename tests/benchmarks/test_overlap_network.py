"""The network of benchmarks/overlap.py: what is typed for it, what is left of it, and why there may be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.namespaces import Link, join, leftovers, refused, token_bucket, why_not
from peers.overlap_probe import rate_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WHY_NOT = why_not("pytest")


def test_interface_when_process_id_is_the_largest_then_kernel_takes_its_name() -> None:
    assert len(Link(4_194_304).interface(1)) <= 15


def test_limit_when_given_a_rate_then_bucket_holds_half_a_millisecond_or_128_kib() -> None:
    # Half a millisecond of 1 Gbit/s would be 62,500 bytes.
    assert [token_bucket(rate)[2:5] for rate in (1.0, 25.0)] == [
        ["1000000000bit", "burst", "131072b"],
        ["25000000000bit", "burst", "1562500b"],
    ]


def test_leftovers_when_some_owners_live_then_are_those_of_the_dead() -> None:
    listing = "\n".join(
        ["distopt-overlap-7-0 (id: 3)", "distopt-overlap-7-1", "distopt-overlap-8-0", "mine-7-0", "distopt-overlap-x-0"]
    )
    assert leftovers(listing, lambda process: process == 8) == ["distopt-overlap-7-0", "distopt-overlap-7-1"]


def test_refused_when_something_is_missing_then_says_what_to_type() -> None:
    assert "sudo -E python benchmarks/overlap.py --quick" in refused(1000, bool, "python benchmarks/overlap.py --quick")
    said = refused(0, lambda program: program != "tc", "python x.py")
    assert "no 'tc'" in said and "apt-get install iproute2" in said
    assert refused(0, bool, "python x.py") == ""


def test_script_when_there_is_no_ip_then_says_so_in_a_line_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "overlap.py", "--quick"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("Invalid programs: no 'ip'.")


def test_rate_when_the_beginning_is_slow_then_leaves_it_out() -> None:
    # Bytes count from the first arrival after a tenth of a second on: 300 in half a second.
    assert rate_of([(0.0, 999), (0.05, 1), (0.25, 5), (0.5, 100), (0.75, 200)]) == 600.0


def _names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_join_when_left_by_an_error_then_removes_its_namespaces() -> None:
    with pytest.raises(ZeroDivisionError), join() as link:
        assert link.namespace(1) in _names()
        link.set_rate(1.0)
        link.set_rate(0.0)
        raise ZeroDivisionError
    assert link.namespace(0) not in _names() and link.namespace(1) not in _names()


_WAITS = """
import signal, sys, time
sys.path.append(sys.argv[1])
from peers.namespaces import join
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
with join():
    print("there", flush=True)
    time.sleep(60)
"""


def _waiting() -> subprocess.Popen[str]:
    """A process that has its namespaces."""
    started = subprocess.Popen(
        [sys.executable, "-c", _WAITS, BENCHMARKS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert started.stdout is not None, "stdout is a pipe"
    assert started.stdout.readline() == "there\n"
    return started


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_join_when_the_process_is_told_to_end_then_removes_its_namespaces(number: signal.Signals) -> None:
    with _waiting() as process:
        process.send_signal(number)
        assert process.wait(30) != 0
    assert Link(process.pid).namespace(0) not in _names()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_join_when_another_process_was_killed_then_removes_what_it_left() -> None:
    with _waiting() as process:
        process.kill()
        process.wait(30)
    assert Link(process.pid).namespace(0) in _names()
    with join():
        assert Link(process.pid).namespace(0) not in _names()
