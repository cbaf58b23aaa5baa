"""Files between the memories of two nodes, through gloo groups of two ranks that nothing else uses.

They use the network that the user has set for gloo. Threads use them while training communicates in
its own groups. Bytes are checked while they arrive.
"""

from __future__ import annotations

import os
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.manifest_text import from_text, to_text
from megatron_distopt.checkpoint.protect.nodes import Nodes
from megatron_distopt.checkpoint.protect.snapshots import Snapshot
from megatron_distopt.comm import Group
from megatron_distopt.comm.groups import default_store
from megatron_distopt.errors import CheckpointError

#: Of one message.
_PIECE_NBYTES = 16 << 20
#: Tags of messages: two ranks may send each other a copy at the same time.
_COPY, _ANSWER = 0, 1
_TIMEOUT = timedelta(minutes=10)


class Connections:
    """The connections of this rank, each made once, when it is asked for; ranks ask for several in
    one order."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._connections: dict[int, Connection] = {}

    def to(self, other: int) -> Connection:
        """Collective of the two, the first time."""
        if other not in self._connections:
            self._connections[other] = Connection(
                self.nodes.group, other, f"megatron_distopt/{self.nodes.name}"
            )
        return self._connections[other]

    def connect_buddies(self) -> None:
        """Collective: makes those to the buddy and to the ranks that this one is the buddy of."""
        own = self.nodes.group.rank
        others = self.nodes.protected_by(own)
        buddy = self.nodes.buddy_of(own)
        if buddy is not None:
            others.append(buddy)
        for other in sorted(others, key=lambda other: (min(own, other), max(own, other))):
            self.to(other)


class Connection:
    """A connection to another rank, a gloo group of two."""

    def __init__(self, everyone: Group, other: int, name: str) -> None:
        """Collective of the two; `name` is one that no connection had before.

        `torch.distributed.new_group` would need all ranks, or as many groups before on the one as
        on the other.
        """
        ranks = sorted((everyone.rank, other))
        store = distributed_c10d.PrefixStore(f"{name}/{ranks}", default_store())
        self._there = 1 - ranks.index(everyone.rank)
        self._group: Any = dist.ProcessGroupGloo(store, 1 - self._there, 2, _TIMEOUT)

    def send(self, tensor: Tensor, tag: int = _COPY) -> None:
        self._group.send([tensor], self._there, tag).wait()

    def receive(self, tensor: Tensor, tag: int = _COPY) -> Tensor:
        self._group.recv([tensor], self._there, tag).wait()
        return tensor

    def send_number(self, number: int, tag: int = _COPY) -> None:
        self.send(torch.tensor([number]), tag)

    def receive_number(self, tag: int = _COPY) -> int:
        return int(self.receive(torch.zeros(1, dtype=torch.int64), tag).item())


def send_copy(connection: Connection, path: Path, part: Manifest | None) -> bool:
    """Sends a rank's file and its manifest, or that there is none; returns whether the other rank
    has the copy now."""
    text = b"" if part is None else to_text(part).encode()
    connection.send_number(len(text))
    if part is None:
        return False
    connection.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if not connection.receive_number(_ANSWER):
        return False
    content = torch.from_file(str(path), size=part.files[0].nbytes, dtype=torch.uint8)
    for start in range(0, content.numel(), _PIECE_NBYTES):
        connection.send(content[start : start + _PIECE_NBYTES])
    return connection.receive_number(_ANSWER) != 0


def receive_copy(connection: Connection, snapshot: Snapshot, base: Path, rank: int) -> None:
    """Receives the copy of a rank into memory and says so; does nothing where there is none.

    Raises:
        CheckpointError: there is no room for it, or it has changed on its way; the other rank
            knows.
    """
    length = connection.receive_number()
    if not length:
        return
    text = connection.receive(torch.empty(length, dtype=torch.uint8))
    part = from_text(bytes(text.numpy()).decode(), f"of rank {rank}")
    path, record = snapshot.file(base, rank), part.files[0]
    try:
        content = _room(path, record.nbytes)
        connection.send_number(1, _ANSWER)
        for start in range(0, content.numel(), _PIECE_NBYTES):
            connection.receive(content[start : start + _PIECE_NBYTES])
        if zlib.crc32(content.numpy().data) != record.crc32:
            raise OSError("the bytes that arrived are not those that were sent")
        snapshot.commit(base, rank, part)
    except OSError as error:
        connection.send_number(0, _ANSWER)
        raise CheckpointError(
            f"Snapshot {path} of rank {rank} was not received: {error}. It needs {record.nbytes} "
            "bytes. Free space there."
        ) from error
    connection.send_number(1, _ANSWER)


def _room(path: Path, nbytes: int) -> Tensor:
    """A new file of the memory as a tensor: uint8, 1-D [nbytes]."""
    disk.remove(path)
    with disk.create(path) as file:
        # a page that is missing later would end the process
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
