"""Which ranks share the memory of a node, and which rank of another node keeps a second copy of
what a rank owns.

Ranks that see the same folder are on one node: they read in it the id that the first of them wrote.
Nodes form a ring, in the order of their lowest ranks; the second copy goes to the next one, to the
rank of the same place there.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.comm import Group, all_gather_objects, all_gather_results, raise_together
from megatron_distopt.errors import CheckpointError, ConfigError

_MEMORY = Path("/dev/shm")
#: Processes that a killed rank has forked, such as data loaders, hold its lock until they notice.
_SECONDS_OF_A_LOCK = 20.0
LOCK = "protecting.lock"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run."""

    group: Group  # all ranks
    numbers: tuple[int, ...]  # of the node, by rank
    name: str = ""  # of this start of the run, which no other has

    @property
    def num_nodes(self) -> int:
        return max(self.numbers) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, number in enumerate(self.numbers) if number == node]

    @property
    def own(self) -> list[int]:
        """The ranks of this node."""
        return self.ranks(self.numbers[self.group.rank])

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once a node."""
        return self.own[0] == self.group.rank

    def buddy_of(self, rank: int) -> int | None:
        """The rank that keeps the second copy; None where there is one node.

        >>> nodes = Nodes(Group(None, 0, 5), (0, 0, 0, 1, 2))
        >>> [nodes.buddy_of(rank) for rank in range(5)]
        [3, 3, 3, 4, 0]
        """
        node = self.numbers[rank]
        there = self.ranks((node + 1) % self.num_nodes)
        return there[self.ranks(node).index(rank) % len(there)] if self.num_nodes > 1 else None

    def protected_by(self, rank: int) -> list[int]:
        """The ranks whose second copy a rank keeps."""
        return [other for other in range(self.group.size) if self.buddy_of(other) == rank]


def find_nodes(folder: Path, everyone: Group) -> Nodes:
    """Collective: which ranks see the same folder, which is made where it is missing."""
    found = all_gather_results(
        lambda: (_id_of(folder), secrets.token_hex(8)), everyone, "set-up of protect_folder"
    )
    ids, names = zip(*found, strict=True)
    numbers = {each: number for number, each in enumerate(dict.fromkeys(ids))}
    return Nodes(everyone, tuple(numbers[each] for each in ids), names[0])


def _id_of(folder: Path) -> str:
    with disk.refused(
        f"write to protect_folder {folder}", "Write protect_folder='/a/folder/in/memory'"
    ):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path, draft = folder / "node", folder / f"node-{secrets.token_hex(8)}"
        draft.write_text(secrets.token_hex(8), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(draft, path)  # one rank is the first, and nobody reads a part of it
        draft.unlink()
        return path.read_text(encoding="utf-8")


def folder_of(given: str | None, environ: Mapping[str, str], group: Group) -> Path:
    """Where snapshots lie: what was given, or below /dev/shm a folder with the names of the user
    and of torchrun's job.

    Raises:
        ConfigError: the job has no name, or torchrun would not start it anew.
    """
    # torchrun shares one store between its starts: ranks that it starts anew read there where those
    # before them were.
    if (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        raise ConfigError(
            "torchrun shares one store between all starts of the job, and with that a restart "
            "hangs. Write export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on all "
            "nodes."
        )
    job = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given is None and (job in ("", "none") or not _MEMORY.is_dir()):
        raise ConfigError(
            "The job has neither a name nor a protect_folder, and one of them must name its "
            "memory. Start with torchrun --rdzv-id NAME, or write "
            f"protect_folder='{_MEMORY}/NAME'."
        )
    base = (
        Path(given)
        if given is not None
        else _MEMORY / f"megatron_distopt-{getpass.getuser()}-{job}"
    )
    return base / f"{group.global_rank(0)}"  # process groups of one job that train apart


def lock(folder: Path, nodes: Nodes) -> int | None:
    """Collective: locks the folder for this run, once a node, until `disk.unlock` of what it
    returns.

    Raises:
        CheckpointError: another run that is alive uses it.
    """
    end = time.monotonic() + _SECONDS_OF_A_LOCK

    def locked() -> int | None:
        while nodes.is_first:
            try:
                return disk.lock(folder / LOCK)
            except CheckpointError:
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"protect_folder {folder} is in use by another run, and only one run at a "
                        "time can use it. End that run, or start this one with another --rdzv-id "
                        "or protect_folder."
                    ) from None
                time.sleep(0.1)
        return None

    return raise_together(locked, nodes.group, "set-up of protect_folder")


def check_space(folder: Path, nbytes: int, nodes: Nodes) -> None:
    """Collective: refuses a folder without room for two snapshots of the ranks of its node and of
    their buddies.

    `nbytes` has a snapshot of this rank.
    """
    of_rank = all_gather_objects(nbytes, nodes.group)
    kept = [*nodes.own, *(other for rank in nodes.own for other in nodes.protected_by(rank))]
    needed = 2 * sum(of_rank[rank] for rank in kept)

    def check() -> None:
        used = sum(path.stat().st_size for path in folder.glob("*/*"))
        free = shutil.disk_usage(folder).free + used
        if free < needed:
            raise CheckpointError(
                f"protect_folder {folder} has {free / 1e6:,.0f} MB free, and two snapshots of "
                f"{len(kept)} ranks need {needed / 1e6:,.0f} MB. Start the container with "
                f"--shm-size={needed // 10**9 + 1}g or --ipc=host, or give another folder."
            )

    raise_together(check, nodes.group, "set-up of protect_folder")
