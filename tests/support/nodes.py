"""Two nodes on one machine, for tests: network, process, mount and name spaces of their own, and no shared memory.

Needs root, iproute2 and util-linux; `WHY_NOT` says what is missing. Files are shared, as on a common disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.namespaces import Link, join, why_not

__all__ = ["WHY_NOT", "Nodes", "two_nodes"]

WHY_NOT = why_not("pytest")
#: Makes /dev/shm and /proc of a node its own; $0 is its name.
_ENTER = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class Nodes:
    """Two nodes, numbered 0 and 1."""

    link: Link

    def address(self, node: int) -> str:
        """As the other node sees it."""
        return self.link.address(node)

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a command on a node, with the variable by which gloo finds the network."""
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = self.link.inside(node, [*unshare, "sh", "-c", _ENTER, f"node{node}", *command])
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": self.link.interface(node), **environment}
        return subprocess.Popen(inside, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Makes the nodes, and removes them whatever happens."""
    with join() as wire:
        yield Nodes(wire.link)
