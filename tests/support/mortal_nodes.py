"""Nodes that die and come back, on one machine: each has a network, processes and a /dev/shm of its
own.

A node is a process that waits, first in its process namespace; commands enter it with nsenter. What
lies in its /dev/shm stays from one command to the next, and is lost with that process, as all other
processes of the node are. No namespace has a name: they end with their processes, and these end
with the process of the test.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

__all__ = ["Launch", "MortalNodes", "mortal_nodes", "port_of"]

_ROOT = Path(__file__).parents[2]
_SERVER = Path(__file__).with_name("node_process.py")
#: What workers find imported, because that takes a second of each of them.
IMPORTS = "tests.support.protected_training"
_PORT = 29400
#: Seconds; torchrun takes a node as lost after 10 of them, waits so long for further nodes, and for
#: the least number.
_RENDEZVOUS = {
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 5,
    "last_call_timeout": 3,
    "join_timeout": 200,
}
#: A process and its namespaces. Both end with the process that starts them.
_HOLD = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
]
_HOLD += ["--kill-child", "--mount-proc", "sh", "-c"]
#: $0 is the name of the node, $1 the size of its memory; the loop waits for processes that lost
#: their parent.
_NODE = (
    'mount -t tmpfs -o size="$1" tmpfs /dev/shm && hostname "$0" && ip link set lo up && echo up'
)
_NODE += " && while :; do sleep 0.2; done"


def port_of(name: str, more: int = 0) -> int:
    """Of torchrun's store, by the name of the job."""
    return _PORT + 2 * (sum(name.encode()) % 97) + more


class Launch:
    """torchrun on a node, with the time at which each line was written. It ends with its node."""

    def __init__(self, requests: socket.socket, **request: object) -> None:
        self.lines: list[tuple[float, str]] = []  # seconds of time.time()
        output, status = os.pipe(), os.pipe()
        socket.send_fds(requests, [json.dumps(request).encode()], [output[1], status[1]])
        os.close(output[1])
        os.close(status[1])
        self._status = status[0]
        self._reader = threading.Thread(
            target=self._read, args=(os.fdopen(output[0], errors="replace"),), daemon=True
        )
        self._reader.start()

    def _read(self, output: TextIO) -> None:
        with output:
            for line in output:
                self.lines.append((time.time(), line.rstrip("\n")))

    @property
    def is_running(self) -> bool:
        return not select.select([self._status], [], [], 0)[0]

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait_for(
        self, pattern: str, seconds: float = 120.0, *, since: int = 0
    ) -> tuple[float, re.Match[str]]:
        """When a line with this pattern was written, and what matched; `since` leaves out lines at
        the beginning."""
        deadline, expression = time.monotonic() + seconds, re.compile(pattern)
        while True:
            is_last_look = not self._reader.is_alive() or time.monotonic() > deadline
            for when, line in self.lines[since:]:
                match = expression.search(line)
                if match:
                    return when, match
            if is_last_look:
                raise AssertionError(f"no {pattern!r} in {seconds} s:\n{self.output}")
            time.sleep(0.02)

    def end(self, seconds: float) -> int | None:
        """Waits until it has ended; its status, or None where it still runs."""
        if not select.select([self._status], [], [], seconds)[0]:
            return None
        self._reader.join(10)
        return int(os.read(self._status, 100) or b"-9")


@dataclass
class _Holder:
    """The waiting process of one node, or of the bridge between nodes."""

    process: subprocess.Popen[str]
    inside: int  # process id of the first process in its namespaces, as it is seen here

    @classmethod
    def start(cls, script: str, *arguments: str) -> _Holder:
        process = subprocess.Popen([*_HOLD, script, *arguments], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "up\n", (
            f"no namespaces for {arguments}"
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return cls(process, int(children[0]))

    def enter(self, *command: str) -> list[str]:
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return ["nsenter", f"--target={self.inside}", *spaces, *command]

    def ip(self, *words: str) -> None:
        """Changes its network; process ids are those that are seen here."""
        subprocess.run(["nsenter", f"--target={self.inside}", "--net", "ip", *words], check=True)

    def end(self) -> None:
        """Kills all processes in it; returns when none is left."""
        self.process.kill()
        self.process.wait()
        while Path(f"/proc/{self.inside}").exists():
            time.sleep(0.005)


@dataclass
class MortalNodes:
    """Nodes 0, 1, ..., all on one bridge. Made by `mortal_nodes`."""

    memory: str  # of each node's /dev/shm, as mount spells it
    hub: _Holder
    requests: socket.socket  # to what forks agents
    up: dict[int, _Holder] = field(default_factory=dict)
    # workers from a process that has imported torch; otherwise they import it, as usual
    forks: bool = True
    starts: int = 0

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def boot(self, node: int, memory: str = "") -> None:
        """Starts a node with nothing in its memory; one that is up stays as it is, unless it is to
        have less memory."""
        if node in self.up and not memory:
            return
        if node in self.up:
            self.kill(node)
        holder = self.up[node] = _Holder.start(_NODE, f"node{node}", memory or self.memory)
        self.starts += 1
        # as one that is known to the others
        port, mac = f"p{node}s{self.starts}", f"02:00:00:00:00:{node + 1:02x}"
        end = ["peer", "name", "eth0", "address", mac, "netns", str(holder.inside)]
        self.hub.ip("link", "add", port, "type", "veth", *end)
        self.hub.ip("link", "set", port, "master", "bridge", "up")
        holder.ip("address", "add", f"{self.address(node)}/24", "dev", "eth0")
        holder.ip("link", "set", "eth0", "up")

    def kill(self, *nodes: int) -> float:
        """A loss of power: nobody hears from these nodes, also not that connections end. Returns
        the time."""
        when = time.time()
        for node in nodes:
            self.up[node].ip("link", "set", "eth0", "down")
        for node in nodes:
            self.up.pop(node).end()
        return when

    def do(self, node: int, script: str) -> str:
        """What a line of shell writes on a node."""
        command = self.up[node].enter("sh", "-c", script)
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def torchrun(
        self,
        node: int,
        size: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        name: str,
        port: int = 0,
    ) -> Launch:
        """torchrun's agent on a node; its store is on node 0.

        Args:
            size: how many nodes the job has at least and at most, as MIN:MAX.
            words: further options, script and arguments.
            name: of the job; jobs with other names have other ports, and those with another `port`.
        """
        port = port_of(name, port)
        settings = {**_RENDEZVOUS, "is_host": int(node == 0)}
        # Otherwise a node that comes back waits for an address that torchrun (2.13) writes in its
        # first round alone.
        variables = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            **variables,
        }
        line = [
            "--nnodes",
            size,
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self.address(0)}:{port}",
        ]
        line += [
            "--rdzv-id",
            name,
            "--rdzv-conf",
            ",".join(f"{key}={value}" for key, value in settings.items()),
        ]
        line += ["--local-addr", self.address(node), "--monitor-interval", "0.1", *words]
        inside = self.up[node].inside
        return Launch(
            self.requests, inside=inside, words=line, variables=variables, is_forked=self.forks
        )


@contextmanager
def mortal_nodes(
    count: int, memory: str = "256m", *, imports: str = IMPORTS
) -> Iterator[MortalNodes]:
    """Makes the nodes, and ends whatever runs on them when the block ends; workers find a module
    imported."""
    requests, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        sys.executable,
        str(_SERVER),
        str(served.fileno()),
        imports,
    ]
    path = (*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT), str(_ROOT / "examples"))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    server = subprocess.Popen(command, pass_fds=[served.fileno()], env=variables)
    served.close()
    hub = _Holder.start(
        "ip link add bridge type bridge && ip link set bridge up && echo up && exec sleep infinity"
    )
    made = MortalNodes(memory, hub, requests)
    try:
        assert requests.recv(100) == b"ready", "torch was not imported"
        for node in range(count):
            made.boot(node)
        yield made
    finally:
        for holder in (*made.up.values(), hub):
            holder.end()
        requests.close()
        server.wait(30)
