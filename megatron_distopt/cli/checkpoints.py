"""Finds the checkpoint that a path means, and sorts its tensors and param groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import torch

from megatron_distopt.checkpoint.folder import (
    MANIFEST,
    finished_iterations,
    is_checkpoint,
    read_manifest,
)
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, TensorRecord, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.cli.show import plural
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any

_Value = TypeVar("_Value")
_TRACKER, _IN_ITERATION = "latest_checkpointed_iteration.txt", "distrib_optim.distopt"
_DATA = ".distcp"
_WANTED = f"a folder with {MANIFEST}, an iteration, or the --save folder of a run"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open."""

    path: Path  # the folder with the manifest, or what another format's reader takes
    chosen: str  # why this one where there are several, such as "the latest in /save"
    is_ours: bool  # whether it is in this package's own format
    source: Source
    manifest: Manifest  # with files and chunks where it is ours, which other formats lack

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(map(nbytes_of, self.source.tensors.values()))

    @property
    def document(self) -> dict[str, str]:
        return {"checkpoint": str(self.path), "chosen": self.chosen}

    @property
    def text(self) -> str:
        return f"{self.path}, {self.chosen}" if self.chosen else str(self.path)

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [("where", str(self.path)), ("which", self.chosen)]


def open_at(path: Path, *, resume_step: int | None = None) -> Checkpoint:
    """Opens the checkpoint that a path means; refuses one that is not there or not finished.

    Args:
        resume_step: updates so far, for a fork's files that lost them.
    """
    if not path.exists():
        beside = {file.name: file for file in path.parent.glob("*")}
        remedy = f"Write {_WANTED}."
        for name in get_close_matches(path.name, beside, n=1):
            remedy = f"Did you mean {beside[name]}?"
        raise CheckpointError(f"There is no file or folder {path}. {remedy}")
    if path.is_file() and path.name in (MANIFEST, _TRACKER):
        path = path.parent
    if path.suffix == _DATA:
        raise CheckpointError(
            f"{path} is one file of a checkpoint. Write the folder {path.parent}."
        )
    chosen, ours = "", _ours_at(path)
    if ours is None and (path / _TRACKER).is_file():
        chosen = f"the latest in {path}"
        path = _latest(path)
        ours = _ours_at(path)
    if ours is None:
        _check_finished(path)
        _check_finished(path / _IN_ITERATION)
    found = ours or path
    source = open_any(found, resume_step=resume_step)
    manifest = source.head if ours is None else read_manifest(ours)
    return Checkpoint(found, chosen, ours is not None, source, manifest)


def _ours_at(path: Path) -> Path | None:
    folders = (path, path / _IN_ITERATION)
    return next((folder for folder in folders if is_checkpoint(folder)), None)


def _latest(root: Path) -> Path:
    text = (root / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isdecimal() else "release"
    is_named = text.isdecimal() or text == name
    if is_named and (root / name).is_dir():
        return root / name
    iterations = sorted(root.glob("iter_*"))
    remedy = iterations[-1] if iterations else _WANTED
    raise CheckpointError(
        f"{root / _TRACKER} says {text[:20]!r}, but there is no such iteration. Write {remedy}."
    )


def _check_finished(folder: Path) -> None:
    """Refuses a folder in which a save of this package did not finish.

    Such a folder has data files but neither a manifest nor .metadata, which are written last.
    """
    num_files = sum(1 for _ in folder.glob(f"*{_DATA}"))
    files = plural(num_files, f"{_DATA} file")
    if num_files and not (folder / ".metadata").exists():
        earlier = next((each.parent for each in finished_iterations(folder)), "an earlier one")
        raise CheckpointError(
            f"The save into {folder} did not finish: it has {files} and no {MANIFEST}. "
            "Wait if a run is saving there now. "
            f"If that run has died, take {earlier}."
        )


def nbytes_of(info: TensorRecord) -> int:
    dtype: torch.dtype = getattr(torch, info.dtype)
    return math.prod(info.shape) * dtype.itemsize


def by_param(tensors: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
    """Sorts what is known of tensors by param and kind: its values come first, then its state in
    alphabetical order."""
    found: dict[str, dict[str, _Value]] = {}
    mains_first = sorted(tensors, key=lambda key: (kind_of(key) != MAIN, key))
    for key in mains_first:
        of_param = found.setdefault(name_of(key), {})
        of_param[kind_of(key)] = tensors[key]
    return {name: found[name] for name in in_order(found)}


def params_text(keys: Iterable[str]) -> list[str]:
    """Writes params with the kinds of their tensors, such as "a (main, exp_avg)"."""
    found = by_param(dict.fromkeys(keys))
    return [f"{name} ({', '.join(kinds)})" for name, kinds in found.items()]


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names alphabetically, and the numbers in them by size."""
    return sorted(names, key=lambda name: [_part_order(part) for part in name.split(".")])


def _part_order(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def settings_of(group: GroupRecord) -> dict[str, object]:
    """Returns everything that a checkpoint says about the params of a group, the number of updates
    included."""
    scalars = {key: scalar.value for key, scalar in group.scalars.items()}
    return {**scalars, "step": group.step, **group.options}
