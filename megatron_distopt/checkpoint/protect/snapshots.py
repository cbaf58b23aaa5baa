"""The files of snapshots in the memory of a node.

::

    protecting.lock, node               which run uses the folder; which node it is
    ended                               how the run ended, for the next start
    0000000120-1f2e3d4c/                a snapshot of step 120
      1f2e3d4c-00003.distcp             what rank 3 owns and its training state; as in a checkpoint
      1f2e3d4c-00003.part               the manifest of that file; written last, it is there where
                                        the copy is whole

A node holds the files of its own ranks and of those whose buddies are on it. Plain files outlive
every process of the node; Python's shared memory ends with the process that made it.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import file_of
from megatron_distopt.checkpoint.manifest import Manifest, key_of
from megatron_distopt.checkpoint.manifest_text import from_text, to_text
from megatron_distopt.checkpoint.tensor_file import crc_of_file
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.errors import CheckpointError
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision

_NAME = re.compile(r"(\d{10})-([0-9a-f]{8})")
_RECORD = re.compile(r"[0-9a-f]{8}-(\d{5,})\.part")
#: The file that says how a run ended.
ENDED = "ended"
#: Keys of `Manifest.about`.
NUM_RANKS, FORM = "snapshot_ranks", "snapshot_form"


@dataclass(frozen=True, order=True)
class Snapshot:
    """One saved state of a run."""

    step: int
    save_id: str

    def folder(self, base: Path) -> Path:
        return base / f"{self.step:010d}-{self.save_id}"

    def file(self, base: Path, rank: int) -> Path:
        return file_of(self.folder(base), self.save_id, rank)

    def record(self, base: Path, rank: int) -> Path:
        return file_of(self.folder(base), self.save_id, rank, "part")

    def commit(self, base: Path, rank: int, part: Manifest) -> None:
        """Writes the record of a copy that is whole."""
        draft = file_of(self.folder(base), self.save_id, rank, "new")
        disk.remove(draft)
        disk.write_file(draft, to_text(part).encode())
        disk.replace(draft, self.record(base, rank))

    def checked(self, base: Path, rank: int) -> Manifest:
        """The manifest of a copy, whose bytes are read once.

        Raises:
            CheckpointError: it is damaged.
        """
        path = self.file(base, rank)
        with disk.refused(f"read snapshot {path}", "Another copy will be tried"):
            record = self.record(base, rank)
            part = from_text(record.read_text(encoding="utf-8", errors="replace"), str(record))
            if (crc32 := crc_of_file(path)) == part.files[0].crc32:
                return part
        raise CheckpointError(
            f"Snapshot {path} has CRC-32 {crc32:08x}, and must have {part.files[0].crc32:08x}. "
            "Another copy will be tried."
        )


def held(base: Path) -> dict[Snapshot, list[int]]:
    """The ranks of which a node has a copy that was whole, by snapshot."""
    found = {}
    for folder in base.iterdir():
        if match := _NAME.fullmatch(folder.name):
            ranks = [
                int(record[1])
                for path in folder.iterdir()
                if (record := _RECORD.fullmatch(path.name))
            ]
            found[Snapshot(int(match[1]), match[2])] = sorted(ranks)
    return found


def keep_only(base: Path, kept: Iterable[Snapshot]) -> None:
    """Removes all other snapshots, and the note about the end of the run before, which now
    continues."""
    names = {snapshot.folder(base).name for snapshot in kept}
    for folder in base.iterdir():
        if _NAME.fullmatch(folder.name) and folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)
    disk.remove(base / ENDED)


def form_of(model: WholeModel) -> str:
    """The dtypes of a rank's params, and the forms of its state."""
    optimizer = model.shares[0].optimizer
    dtypes = sorted({dtype_name(buffer.param.dtype) for buffer in optimizer.buffers})
    return f"params of {' and '.join(dtypes)}, {Precision.of(optimizer.config)}"


def note_end(base: Path, text: str) -> None:
    """Leaves how a run ended, for the next start to say."""
    with suppress(OSError):  # it is for a line of the log alone
        (base / ENDED).write_text(text, encoding="utf-8")


# --- what a run needs besides its optimizer, as one tensor


def key_of_state(rank: int) -> str:
    return key_of("training", f"rank-{rank:05d}")


def packed(state: Callable[[], Any]) -> Tensor:
    """What `state` returns: uint8, 1-D.

    Raises:
        CheckpointError: it has something that cannot be read again without executing what a file
            says.
    """
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    tensor = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        unpacked(tensor)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"The training state that was given to protect cannot be kept: {reason}. It may hold "
            "only tensors, numbers, texts, lists, tuples and dicts. Convert anything else, for "
            "example by torch.from_numpy(array)."
        ) from error
    return tensor


def unpacked(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(bytes(tensor.numpy())), map_location="cpu", weights_only=True)
