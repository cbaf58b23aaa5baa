"""Which checkpoint a path means: the folder itself, its manifest, an iteration, or all that a run saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from megatron_distopt.checkpoint.exchange import open_any
from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint
from megatron_distopt.checkpoint.place import finished_beside
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["Place", "find", "open_place"]

_TRACKER, _IN_ITERATION = "latest_checkpointed_iteration.txt", "distrib_optim.distopt"
_DATA = ".distcp"
_RULE = f"be a folder with {MANIFEST}, an iteration, or the --save folder of a run"


@dataclass(frozen=True)
class Place:
    """A checkpoint.

    Args:
        path: the folder with the manifest, or what another format's reader takes.
        is_ours: whether it is in this package's own format.
        chosen: why this one where there are several, such as "the latest in /save".
    """

    path: Path
    is_ours: bool
    chosen: str = ""


def find(path: Path) -> Place:
    """The checkpoint that a path means.

    Raises:
        CheckpointError: it means none.
    """
    if not path.exists():
        raise _refused(path, "no such file or folder", _nearest(path))
    if path.is_file() and path.name in (MANIFEST, _TRACKER):
        path = path.parent
    if path.suffix == _DATA:
        raise _refused(path, "one file of a checkpoint", f"Write the folder: {path.parent}")
    if path.is_file():
        return Place(path, is_ours=False)
    for folder in (path, path / _IN_ITERATION):
        if is_checkpoint(folder):
            return Place(folder, is_ours=True)
    if (path / _TRACKER).is_file():
        return _latest(path)
    for folder in (path, path / _IN_ITERATION):
        _check_finished(folder)
    return Place(path, is_ours=False)


def open_place(place: Place) -> Source:
    """Its optimizer state.

    Raises:
        CheckpointError: it is damaged.
    """
    if place.is_ours:
        return open_checkpoint(place.path)
    return open_any(place.path)


def _latest(root: Path) -> Place:
    text = (root / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isdecimal() else "release"
    if not (text.isdecimal() or text == name) or not (root / name).is_dir():
        there = sorted(root.glob("iter_*"))
        got = f"{_TRACKER} says {text[:20]!r}, and there is no such iteration"
        raise _refused(root, got, f"Write an iteration: {there[-1]}" if there else "Write the folder of a checkpoint")
    return replace(find(root / name), chosen=f"the latest in {root}")


def _check_finished(folder: Path) -> None:
    """Refuses a folder of ours without a manifest. We write .metadata last: a folder with that alone is not ours."""
    files = len(list(folder.glob(f"*{_DATA}"))) if folder.is_dir() else 0
    if files and not (folder / ".metadata").exists():
        got = f"a save that was not finished: {files} {_DATA} file{'s' * (files > 1)} and no {MANIFEST}"
        earlier = [str(each.parent) for each in finished_beside(folder)][:1] or ["an earlier one"]
        remedy = f"Wait if a run is saving there now; if that run has died, take {earlier[0]}"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, f"hold {MANIFEST}", remedy))


def _nearest(path: Path) -> str:
    """What it may have been meant to be."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return f"Write {path.parent / near[0]}, which is there" if near else "Write the path of one of these"


def _refused(path: Path, got: str, remedy: str) -> CheckpointError:
    return CheckpointError(refusal(f"checkpoint {path}", got, _RULE, remedy))
