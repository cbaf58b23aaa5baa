"""How the ranks of a communicator exchange bytes: as files in memory that they share.

gloo answers a question of a few bytes in a millisecond where there are more threads than
processors, and a training of some steps has a hundred of them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Wire", "head_of", "tensors_of"]

#: Memory as a file system, where there is one.
_MEMORY = Path("/dev/shm")
_HEAD_NBYTES = 1024


class Wire:
    """Collective.

    Args:
        store: of the communicator.
        rank, size: of this process in it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        if rank == 0:
            store.set(
                "wire", tempfile.mkdtemp(prefix="sim_", dir=_MEMORY if _MEMORY.is_dir() else None)
            )
        self._folder = store.get("wire").decode()
        self._numbers = itertools.count()
        self._messages: dict[tuple[int, int, int], int] = {}
        Finalize(self, _leave, args=(self._folder, rank, size), exitpriority=0)

    def publish(self, head: str, tensors: Sequence[Tensor]) -> int:
        """Shows all ranks what this one contributes to a collective.

        Every rank has come to the last one, and has read what it needs of the one before.

        Returns:
            The number of the collective: the same on all ranks, because they begin theirs in the
                same order.
        """
        number = next(self._numbers)
        self._write(f"{number}.{self.rank}", head, tensors)
        if number >= 2:
            os.unlink(self._path(f"{number - 2}.{self.rank}"))
        return number

    def published(self, number: int, rank: int) -> bytes | None:
        """What a rank contributes; None where it has not come yet."""
        return self._read(f"{number}.{rank}")

    def message(self, src: int, dst: int, tag: int) -> str:
        """The name of the next message between two ranks."""
        number = self._messages[src, dst, tag] = self._messages.get((src, dst, tag), -1) + 1
        return f"{src}.{dst}.{tag}.{number}"

    def send(self, name: str, tensor: Tensor) -> None:
        """Leaves a message."""
        self._write(name, "", [tensor])

    def receive(self, name: str, into: Tensor) -> bool:
        """Takes a message; False where it has not come yet."""
        found = self._read(name)
        if found is None:
            return False
        os.unlink(self._path(name))
        into.copy_(tensors_of(found, [into])[0])
        return True

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _write(self, name: str, head: str, tensors: Sequence[Tensor]) -> None:
        unfinished = self._path(f"unfinished {name}")
        with open(unfinished, "wb", buffering=0) as file:
            padded = head.encode()[:_HEAD_NBYTES].ljust(_HEAD_NBYTES)
            file.write(b"".join((padded, *map(_bytes_of, tensors))))
        os.rename(unfinished, self._path(name))

    def _read(self, name: str) -> bytes | None:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            return None


def head_of(message: bytes) -> str:
    """What a rank called it."""
    return message[:_HEAD_NBYTES].decode().strip()


def tensors_of(message: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message, of the dtypes and shapes of others."""
    found, start = [], _HEAD_NBYTES
    for each in like:
        part = bytearray(message[start : start + each.nbytes])
        start += each.nbytes
        values = (
            torch.frombuffer(part, dtype=each.dtype) if part else torch.empty(0, dtype=each.dtype)
        )
        found.append(values.view(each.shape))
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _leave(folder: str, rank: int, size: int) -> None:
    """The last rank takes the folder away."""
    with open(f"{folder}/left {rank}", "wb"):
        pass
    if all(os.path.exists(f"{folder}/left {other}") for other in range(size)):
        shutil.rmtree(folder, ignore_errors=True)
