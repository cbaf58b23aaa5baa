"""Network namespaces of this machine, joined by virtual interfaces whose rate is limited.

Two have a pair of interfaces; more of them are each joined to a switch, in a namespace of its own.

[Note: size of the bucket] `tbf` lets through what lies in its token bucket, so after a pause that
much leaves at the speed of memory: half a millisecond's worth, or 128 KiB where that is more. With
a bucket smaller than TCP's largest packet (64 KiB, before it is cut into frames) the kernel would
cut it earlier, and half of the rate would be reached. What is reached is measured
(overlap_rank.py), not believed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NUM_ENDS = 2
#: Of all namespaces that this script makes; the rest of a name is the process id and the rank.
PREFIX = "distopt-overlap-"
_BURST_SECONDS, _LEAST_BURST_NBYTES = 0.5e-3, 128 << 10
#: Of a queue, so long that TCP fills its own buffers before it: nothing is dropped and sent twice.
_QUEUE_NBYTES = 32 << 20

Command = list[str]


@dataclass(frozen=True)
class Link:
    """The names of the ends; of two, end k is that of rank k."""

    owner: int  # process id of the script
    num_ends: int = NUM_ENDS

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
        """What makes the namespaces and joins them."""
        ends = range(self.num_ends)
        joined = (
            [self._pair(self._end(0), self._end(1))] if self.num_ends == 2 else self._switched()
        )
        return [
            *(["ip", "netns", "add", self.namespace(end)] for end in self._all()),
            *joined,
            *(command for end in ends for command in self._up(end)),
        ]

    def _all(self) -> Iterable[int]:
        """The ends and, where there are more than two, the switch."""
        return range(self.num_ends + (self.num_ends > 2))

    def _end(self, end: int) -> list[str]:
        return ["name", self.interface(end), "netns", self.namespace(end)]

    def _pair(self, here: list[str], there: list[str]) -> Command:
        return ["ip", "link", "add", *here, "type", "veth", "peer", *there]

    def _switched(self) -> Iterator[Command]:
        """A bridge, and a pair of interfaces between it and each end."""
        switch = self.namespace(self.num_ends)
        link = ["ip", "-n", switch, "link"]
        yield [*link, "add", "name", "bridge", "type", "bridge"]
        yield [*link, "set", "bridge", "up"]
        for end in range(self.num_ends):
            yield self._pair(self._end(end), ["name", f"port{end}", "netns", switch])
            yield [*link, "set", f"port{end}", "master", "bridge", "up"]

    def _up(self, end: int) -> list[Command]:
        ip = ["ip", "-n", self.namespace(end)]
        return [
            [*ip, "address", "add", f"{self.address(end)}/24", "dev", self.interface(end)],
            [*ip, "link", "set", "lo", "up"],
            [*ip, "link", "set", self.interface(end), "up"],
        ]

    def removal(self) -> list[Command]:
        """The interfaces go with their namespaces."""
        return [["ip", "netns", "delete", self.namespace(end)] for end in self._all()]

    def limit(self, end: int, gigabits: float) -> Command:
        """What limits what one end sends to so many 10**9 bits a second."""
        bits = round(gigabits * 1e9)
        burst = max(round(bits / 8 * _BURST_SECONDS), _LEAST_BURST_NBYTES)
        bucket = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "limit", f"{_QUEUE_NBYTES}b"]
        return [
            "tc",
            "-n",
            self.namespace(end),
            "qdisc",
            "replace",
            "dev",
            self.interface(end),
            "root",
            *bucket,
        ]

    def set_rate(self, gigabits: float) -> None:
        """Limits what each end of a link that is there sends; 0 for no limit. Connections stay."""
        for end in range(self.num_ends):
            where = ["dev", self.interface(end), "root"]
            # fails where nothing is limited
            _run(["tc", "-n", self.namespace(end), "qdisc", "delete", *where])
            if gigabits:
                _do(self.limit(end, gigabits))


@contextmanager
def join(num_ends: int = NUM_ENDS) -> Iterator[Link]:
    """Makes the link, and removes it whatever happens, SIGTERM included; first what killed
    processes left."""
    for name in leftovers(
        _run(["ip", "netns", "list"]).stdout, lambda process: os.path.exists(f"/proc/{process}")
    ):
        _run(["ip", "netns", "delete", name])
    link = Link(os.getpid(), num_ends)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for command in link.setup():
            _do(command)
        yield link
    finally:
        for command in link.removal():
            _run(command)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that what was made is removed."""
    raise SystemExit(128 + number)


def leftovers(listing: str, is_alive: Callable[[int], bool]) -> list[str]:
    """Namespaces in what `ip netns list` says whose process is gone."""
    names = [line.split()[0] for line in listing.splitlines() if line.startswith(PREFIX)]
    owners = [(name, name.removeprefix(PREFIX).partition("-")[0]) for name in names]
    return [name for name, owner in owners if owner.isdecimal() and not is_alive(int(owner))]


def why_not(command: str) -> str:
    """Why no namespace can be made here, and what to type instead of `command`; empty where one can
    be."""
    absent = [program for program in ("ip", "tc") if not shutil.which(program)]
    if absent:
        remedy = "Install them: apt-get install iproute2"
        return (
            f"Invalid programs: no {absent[0]!r}. Must have ip and tc, which make and limit the "
            f"network. {remedy}."
        )
    if os.geteuid() != 0:
        remedy = f"Run sudo -E {command}"
        return (
            f"Invalid user: id {os.geteuid()}. Must be root, who alone makes network namespaces. "
            f"{remedy}."
        )
    name = Link(os.getpid()).namespace(0)
    done = _run(["ip", "netns", "add", name])
    if done.returncode:
        got = (done.stderr.strip().splitlines() or ["ip netns add failed"])[-1]
        remedy = "Run it on a machine or in a container with CAP_SYS_ADMIN: docker run --privileged"
        return f"Invalid machine: {got}. Must be able to make network namespaces. {remedy}."
    _run(["ip", "netns", "delete", name])
    return ""


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _do(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
