"""Two network namespaces of this machine, joined by a pair of virtual interfaces whose rate is limited.

[Note: size of the bucket] `tbf` lets through what lies in its token bucket, so after a pause that much leaves at the
speed of memory: half a millisecond's worth, or 128 KiB where that is more. With a bucket smaller than TCP's largest
packet (64 KiB, before it is cut into frames) the kernel would cut it earlier, and half of the rate would be reached.
What is reached is measured (overlap_probe.py), not believed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NUM_ENDS = 2
#: Of all namespaces that this script makes; the rest of a name is the process id and the rank.
PREFIX = "distopt-overlap-"
_BURST_SECONDS, _LEAST_BURST_NBYTES = 0.5e-3, 128 << 10
#: Of a queue, so long that TCP fills its own buffers before it: nothing is dropped and sent twice.
_QUEUE_NBYTES = 32 << 20
_SHAPER, _DELAYER = "1:", "10:"

Command = list[str]


@dataclass(frozen=True)
class Link:
    """The names of both ends; end k is that of rank k."""

    owner: int  # process id of the script

    def namespace(self, end: int) -> str:
        return f"{PREFIX}{self.owner}-{end}"

    def interface(self, end: int) -> str:
        """At most 15 characters, with ten digits of the process id."""
        return f"do{self.owner}v{end}"

    def address(self, end: int) -> str:
        """No other network sees it."""
        return f"10.77.0.{end + 1}"

    def inside(self, end: int, command: Sequence[str]) -> Command:
        """A command as it is run in a namespace; it keeps its process id and its open files."""
        return ["ip", "netns", "exec", self.namespace(end), *command]

    def setup(self) -> list[Command]:
        """What makes both namespaces and joins them."""
        ends = range(NUM_ENDS)
        there = ["peer", "name", self.interface(1), "netns", self.namespace(1)]
        here = ["name", self.interface(0), "netns", self.namespace(0)]
        return [
            *(["ip", "netns", "add", self.namespace(end)] for end in ends),
            ["ip", "link", "add", *here, "type", "veth", *there],
            *(command for end in ends for command in self._up(end)),
        ]

    def _up(self, end: int) -> list[Command]:
        ip = ["ip", "-n", self.namespace(end)]
        return [
            [*ip, "address", "add", f"{self.address(end)}/24", "dev", self.interface(end)],
            [*ip, "link", "set", "lo", "up"],
            [*ip, "link", "set", self.interface(end), "up"],
        ]

    def removal(self) -> list[Command]:
        """The interfaces go with their namespaces."""
        return [["ip", "netns", "delete", self.namespace(end)] for end in range(NUM_ENDS)]


def shape(link: Link, end: int, gigabits: float, delay_us: float = 0.0) -> list[Command]:
    """What limits what one end sends, and delays it.

    Args:
        link: that is there.
        end: which.
        gigabits: a second, 10**9 bits; 0 for no limit.
        delay_us: one way, microseconds; 0 for none.
    """
    where = ["tc", "-n", link.namespace(end), "qdisc"]
    root = ["dev", link.interface(end), "root"]
    bits = round(gigabits * 1e9)
    burst = max(round(bits / 8 * _BURST_SECONDS), _LEAST_BURST_NBYTES)
    limit = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "limit", f"{_QUEUE_NBYTES}b"]
    limits = [[*where, "replace", *root, "handle", _SHAPER, *limit]] if bits else []
    parent = ["dev", link.interface(end), "parent", f"{_SHAPER}1"] if bits else root
    delay = [*where, "add", *parent, "handle", _DELAYER, "netem", "delay", f"{delay_us:g}us", "limit", "100000"]
    return [*limits, *([delay] if delay_us else [])]


def unshape(link: Link, end: int) -> Command:
    """Takes off what `shape` put on; fails where nothing is."""
    return ["tc", "-n", link.namespace(end), "qdisc", "delete", "dev", link.interface(end), "root"]


class Wire:
    """A link that is there.

    Args:
        link: its names.
        delay_us: asked for, one way, microseconds.
    """

    def __init__(self, link: Link, delay_us: float = 0.0) -> None:
        self.link = link
        self.delay_us = delay_us
        #: Why there is less delay than was asked for.
        self.note = ""
        if delay_us:
            self._try_delay()

    def _try_delay(self) -> None:
        done = _run(shape(self.link, 0, 0.0, self.delay_us)[0])
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            self.note = f"this kernel cannot delay packets (netem: {said}); everything runs without delay"
            self.delay_us = 0.0

    def set_rate(self, gigabits: float) -> None:
        """Of both directions; connections stay.

        Args:
            gigabits: a second; 0 for no limit.
        """
        for end in range(NUM_ENDS):
            _run(unshape(self.link, end))
            for command in shape(self.link, end, gigabits, self.delay_us):
                _do(command)


@contextmanager
def join(delay_us: float = 0.0) -> Iterator[Wire]:
    """Makes the link, and removes it whatever happens, SIGTERM included; first what killed processes left.

    Args:
        delay_us: one way, microseconds.
    """
    for name in leftovers(_run(["ip", "netns", "list"]).stdout, _is_alive):
        _run(["ip", "netns", "delete", name])
    link = Link(os.getpid())
    with _terminable():
        try:
            for command in link.setup():
                _do(command)
            yield Wire(link, delay_us)
        finally:
            for command in link.removal():
                _run(command)


def leftovers(listing: str, is_alive: Callable[[int], bool]) -> list[str]:
    """Namespaces of this script whose process is gone.

    Args:
        listing: of `ip netns list`: a name in front of each line.
        is_alive: whether there is a process with an id.
    """
    names = [line.split()[0] for line in listing.splitlines() if line.startswith(PREFIX)]
    owners = [(name, name.removeprefix(PREFIX).partition("-")[0]) for name in names]
    return [name for name, owner in owners if owner.isdecimal() and not is_alive(int(owner))]


def refused(user: int, has: Callable[[str], object], command: str) -> str:
    """Why no namespace can be made, and what to type; empty where nothing speaks against it.

    Args:
        user: effective id.
        has: whether a program is there.
        command: that was typed.
    """
    for program in ("ip", "tc"):
        if not has(program):
            remedy = "Install them: apt-get install iproute2"
            return f"Invalid programs: no {program!r}. Must have ip and tc, which make and limit the network. {remedy}."
    if user != 0:
        return f"Invalid user: id {user}. Must be root, who alone makes network namespaces. Run sudo -E {command}."
    return ""


def why_not(command: str) -> str:
    """`refused` on this machine, with one namespace made for a trial where nothing speaks against it."""
    said = refused(os.geteuid(), shutil.which, command)
    if said:
        return said
    name = Link(os.getpid()).namespace(0)
    done = _run(["ip", "netns", "add", name])
    if done.returncode:
        got = (done.stderr.strip().splitlines() or ["ip netns add failed"])[-1]
        remedy = "Run it on a machine or in a container with CAP_SYS_ADMIN: docker run --privileged"
        return f"Invalid machine: {got}. Must be able to make network namespaces. {remedy}."
    _run(["ip", "netns", "delete", name])
    return ""


def _is_alive(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _do(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, so that what was made is removed."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
