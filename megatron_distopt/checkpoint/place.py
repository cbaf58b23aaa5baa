"""Where checkpoints lie: next to the file that a host writes, and next to earlier ones of the same run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import (
    MANIFEST,
    is_checkpoint,
    lock_file,
    read_manifest,
    remove_checkpoint,
    saves_in,
)
from megatron_distopt.errors import CheckpointError, refusal

_SUFFIX = ".distopt"
#: Folders that a Megatron makes for each tensor- and pipeline-parallel rank. All of them share one checkpoint.
_OF_A_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
_ITERATION = re.compile(r"iter_(\d+)")


def folder_beside(filename: str) -> Path:
    """The folder of the checkpoint that belongs to a file of the host, the same for all ranks of the model.

    >>> folder_beside("run/iter_0000010/mp_rank_00_001/distrib_optim.pt").as_posix()
    'run/iter_0000010/distrib_optim.distopt'
    """
    path = Path(filename)
    parent = path.parent.parent if _OF_A_RANK.fullmatch(path.parent.name) else path.parent
    return parent / f"{path.stem}{_SUFFIX}"


def finished_beside(folder: Path) -> list[Path]:
    """Finished checkpoints of the other iterations of the same run, the latest first."""
    if not _ITERATION.fullmatch(folder.parent.name):
        return []
    found = folder.parent.parent.glob(f"iter_*/{folder.name}")
    own = (each for each in found if each != folder and not (each.is_symlink() or each.parent.is_symlink()))
    return sorted((each for each in own if is_checkpoint(each)), key=_iteration_of, reverse=True)


def _iteration_of(folder: Path) -> int:
    match = _ITERATION.fullmatch(folder.parent.name)
    return int(match.group(1)) if match else -1


def not_found(folder: Path, filename: str) -> CheckpointError:
    """The error where there is neither a checkpoint of ours nor the host's file."""
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
    """Removes an older checkpoint after the host's own file was written, so that a load takes the file."""
    if is_checkpoint(folder):
        remove_checkpoint(folder)


def drop_older(folder: Path, keep: int) -> None:
    """Removes all but the latest checkpoints of a run. Other files stay, also those in the folders of checkpoints.

    In a Megatron's folder of an iteration the numbers of the iterations say which checkpoints are older. Anywhere else
    the manifest names the saves before it. Of these, checkpoints in sibling folders are removed, and those in siblings
    of the parent under the same name (`epoch_1/optimizer`, `epoch_2/optimizer`).

    Args:
        folder: of the checkpoint that was just saved. Later ones stay: the run was resumed from an earlier checkpoint.
        keep: how many stay, this one included.
    """
    with suppress(OSError, CheckpointError):  # the new checkpoint is there, whatever becomes of older ones
        for each in _older(folder)[keep - 1 :]:
            _remove(each)


def _older(folder: Path) -> list[Path]:
    """Checkpoints of the same run, the latest first."""
    if _ITERATION.fullmatch(folder.parent.name):
        return [each for each in finished_beside(folder) if _iteration_of(each) < _iteration_of(folder)]
    number_of = {save_id: number for number, save_id in enumerate(read_manifest(folder).earlier)}
    here = folder.resolve()
    found: dict[Path, int] = {}
    for each in _folders_around(here):
        known = [save_id for save_id in saves_in(each) if save_id in number_of]
        if each != here and known and _save_id_of(each) in known:
            found[each] = number_of[_save_id_of(each)]
    return sorted(found, key=lambda each: found[each], reverse=True)


def _folders_around(folder: Path) -> Iterator[Path]:
    """Folders in which earlier checkpoints may lie. Symbolic links are left out: their targets lie elsewhere."""
    yield from filter(_is_folder, folder.parent.iterdir())
    for parent in folder.parent.parent.iterdir():
        if parent != folder.parent and _is_folder(parent) and _is_folder(parent / folder.name):
            yield parent / folder.name


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:  # another user's
        return False


def _remove(folder: Path) -> None:
    """Removes a checkpoint, unless another run is saving to its folder now."""
    lock = None
    try:
        lock = disk.lock(lock_file(folder))
        remove_checkpoint(folder)
    except (OSError, CheckpointError):
        return
    finally:
        disk.unlock(lock)


def _save_id_of(folder: Path) -> str:
    """The save id of the checkpoint in a folder; "" where there is none that can be read."""
    with suppress(CheckpointError):
        return read_manifest(folder).save_id
    return ""
