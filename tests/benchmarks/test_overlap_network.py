"""The network of benchmarks/overlap.py: what is typed for it, what is left of it, and why there may be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.namespaces import Link, join, leftovers, refused, shape, why_not
from peers.overlap_probe import rate_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINK = Link(42)
#: The largest process id that Linux gives.
LARGEST = 4_194_304
WHY_NOT = why_not("pytest")


def _text(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_setup_when_made_then_joins_two_namespaces_of_this_process() -> None:
    assert _text(LINK.setup()) == [
        "ip netns add distopt-overlap-42-0",
        "ip netns add distopt-overlap-42-1",
        "ip link add name do42v0 netns distopt-overlap-42-0 type veth peer name do42v1 netns distopt-overlap-42-1",
        "ip -n distopt-overlap-42-0 address add 10.77.0.1/24 dev do42v0",
        "ip -n distopt-overlap-42-0 link set lo up",
        "ip -n distopt-overlap-42-0 link set do42v0 up",
        "ip -n distopt-overlap-42-1 address add 10.77.0.2/24 dev do42v1",
        "ip -n distopt-overlap-42-1 link set lo up",
        "ip -n distopt-overlap-42-1 link set do42v1 up",
    ]


def test_interface_when_process_id_is_the_largest_then_kernel_takes_its_name() -> None:
    assert len(Link(LARGEST).interface(1)) <= 15


@pytest.mark.parametrize(
    ("gigabits", "said"),
    [
        (1.0, "rate 1000000000bit burst 131072b limit 33554432b"),  # half a millisecond would be 62,500
        (25.0, "rate 25000000000bit burst 1562500b limit 33554432b"),
    ],
)
def test_shape_when_given_a_rate_then_bucket_holds_half_a_millisecond_or_128_kib(gigabits: float, said: str) -> None:
    wanted = f"tc -n distopt-overlap-42-1 qdisc replace dev do42v1 root handle 1: tbf {said}"
    assert _text(shape(LINK, 1, gigabits)) == [wanted]


def test_shape_when_nothing_is_limited_then_nothing_is_typed() -> None:
    assert shape(LINK, 0, 0.0) == []


def test_shape_when_delayed_then_delay_is_below_the_limit_or_alone() -> None:
    where = "tc -n distopt-overlap-42-0 qdisc add dev do42v0"
    limited, delayed = _text(shape(LINK, 0, 5.0, delay_us=50.0))
    assert "tbf rate 5000000000bit" in limited
    assert delayed == f"{where} parent 1:1 handle 10: netem delay 50us limit 100000"
    assert _text(shape(LINK, 0, 0.0, delay_us=50.0)) == [f"{where} root handle 10: netem delay 50us limit 100000"]


def test_leftovers_when_some_owners_live_then_are_those_of_the_dead() -> None:
    listing = "\n".join(
        ["distopt-overlap-7-0 (id: 3)", "distopt-overlap-7-1", "distopt-overlap-8-0", "mine-7-0", "distopt-overlap-x-0"]
    )
    assert leftovers(listing, lambda process: process == 8) == ["distopt-overlap-7-0", "distopt-overlap-7-1"]


def test_refused_when_not_root_then_says_what_to_type() -> None:
    assert refused(1000, lambda program: True, "python benchmarks/overlap.py --quick") == (
        "Invalid user: id 1000. Must be root, who alone makes network namespaces. "
        "Run sudo -E python benchmarks/overlap.py --quick."
    )


def test_refused_when_a_program_is_missing_then_says_what_to_install() -> None:
    assert refused(0, lambda program: program != "tc", "python x.py") == (
        "Invalid programs: no 'tc'. Must have ip and tc, which make and limit the network. "
        "Install them: apt-get install iproute2."
    )


def test_refused_when_root_has_both_programs_then_says_nothing() -> None:
    assert refused(0, lambda program: True, "python x.py") == ""


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
    with pytest.raises(ZeroDivisionError), join() as wire:
        assert wire.link.namespace(1) in _names()
        wire.set_rate(1.0)
        wire.set_rate(0.0)
        raise ZeroDivisionError
    assert wire.link.namespace(0) not in _names()
    assert wire.link.namespace(1) not in _names()


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
