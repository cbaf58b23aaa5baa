"""Where a checkpoint lies, seen from the file name that a host chose for its own."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["SUFFIX", "disown", "drop_older", "finished_beside", "folder_beside", "not_found"]

SUFFIX = ".distopt"
#: A folder that a Megatron makes for each tensor- and pipeline-parallel rank; there is one checkpoint for all of them.
_OF_A_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
_ITERATION = re.compile(r"iter_(\d+)")


def folder_beside(filename: str) -> Path:
    """The folder of the checkpoint, the same for all ranks of the model.

    >>> folder_beside("run/iter_0000010/mp_rank_00_001/distrib_optim.pt").as_posix()
    'run/iter_0000010/distrib_optim.distopt'
    """
    path = Path(filename)
    parent = path.parent.parent if _OF_A_RANK.fullmatch(path.parent.name) else path.parent
    return parent / f"{path.stem}{SUFFIX}"


def finished_beside(folder: Path) -> list[Path]:
    """Finished checkpoints of the other iterations of the same run, the latest first."""
    if not _ITERATION.fullmatch(folder.parent.name):
        return []
    found = folder.parent.parent.glob(f"iter_*/{folder.name}")
    return sorted((each for each in found if is_checkpoint(each) and each != folder), key=_iteration_of, reverse=True)


def _iteration_of(folder: Path) -> int:
    match = _ITERATION.fullmatch(folder.parent.name)
    return int(match.group(1)) if match else -1


def not_found(folder: Path, filename: str) -> CheckpointError:
    """What is raised where there is neither our checkpoint nor the host's file."""
    others = finished_beside(folder)
    remedy = "Start from the weights with --no-load-optim"
    if others:
        latest = _iteration_of(others[0])
        remedy = (
            f"Write {latest} into latest_checkpointed_iteration.txt: the save of this iteration never ended, "
            f"that of {latest} did"
        )
    got = f"neither {folder / MANIFEST} nor {filename}"
    return CheckpointError(refusal("optimizer state", got, "be in one of the two", remedy))


def disown(folder: Path) -> None:
    """After the host's own file was written: an older checkpoint beside it must not be taken for the state."""
    if is_checkpoint(folder):
        _remove(folder)


def drop_older(folder: Path, keep: int) -> None:
    """Removes all but the latest checkpoints of a run; the host's own files stay.

    Args:
        folder: of the checkpoint that was just saved; later ones are of another life of the run and stay too.
        keep: how many stay, this one among them.
    """
    older = [each for each in finished_beside(folder) if _iteration_of(each) < _iteration_of(folder)]
    for each in older[keep - 1 :]:
        with suppress(OSError):
            _remove(each)


def _remove(folder: Path) -> None:
    """The manifest first, and for good: a power cut must not leave one without files."""
    disk.remove(folder / MANIFEST)
    disk.sync_folder(folder)
    shutil.rmtree(folder)
