"""Three nodes on one machine, for tests: network, process, mount and name spaces of their own, and
no shared memory.

Needs root, iproute2 and util-linux; `WHY_NOT` says what is missing. Files are shared, as on a
common disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.namespaces import Link, join, why_not

__all__ = ["WHY_NOT", "Nodes", "three_nodes"]

WHY_NOT = why_not("pytest")
#: Makes /dev/shm and /proc of a node its own; $0 is its name.
_ENTER = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class Nodes:
    """Three nodes, numbered from 0.

    Args:
        link: between them.
        names: of the hosts.
        shares_network: all are on that of this machine, as containers with the host's network are.
    """

    link: Link
    names: tuple[str, ...] = ("node0", "node1", "node2")
    shares_network: bool = False

    def alike(self, *, shares_network: bool) -> Nodes:
        """These with one host name, so that only their memory tells them apart, and if asked for
        with one network."""
        return replace(self, names=("node",) * self.link.num_ends, shares_network=shares_network)

    def address(self, node: int) -> str:
        """As the other nodes see it."""
        return "127.0.0.1" if self.shares_network else self.link.address(node)

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a command on a node, with the variable by which gloo finds the network."""
        unshare = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        inside = [*unshare, "sh", "-c", _ENTER, self.names[node], *command]
        interface = "lo" if self.shares_network else self.link.interface(node)
        inside = inside if self.shares_network else self.link.inside(node, inside)
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": interface, **environment}
        return subprocess.Popen(
            inside, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@contextmanager
def three_nodes() -> Iterator[Nodes]:
    """Makes the nodes, and removes them whatever happens."""
    with join(len(Nodes.names)) as link:
        yield Nodes(link)
