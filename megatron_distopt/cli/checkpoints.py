"""Finds the checkpoint that a path means, and sorts its tensors and param groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import torch

from megatron_distopt.checkpoint.folder import MANIFEST, finished_iterations, is_checkpoint
from megatron_distopt.checkpoint.manifest import MAIN, TensorRecord, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.errors import CheckpointError

_Value = TypeVar("_Value")
_TRACKER, _IN_ITERATION = "latest_checkpointed_iteration.txt", "distrib_optim.distopt"
_DATA = ".distcp"
_WANTED = f"a folder with {MANIFEST}, an iteration, or the --save folder of a run"


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint."""

    path: Path  # the folder with the manifest, or what another format's reader takes
    is_ours: bool  # whether it is in this package's own format
    chosen: str = ""  # why this one where there are several, such as "the latest in /save"


def find(path: Path) -> CheckpointPath:
    """Finds the checkpoint that a path means; refuses one that is not there or not finished."""
    if not path.exists():
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, names, n=1)
        meant = f"Did you mean {path.parent / near[0]}?" if near else ""
        raise CheckpointError(f"There is no file or folder {path}. {meant or f'Write {_WANTED}.'}")
    if path.is_file() and path.name in (MANIFEST, _TRACKER):
        path = path.parent
    if path.suffix == _DATA:
        raise CheckpointError(
            f"{path} is one file of a checkpoint. Write the folder {path.parent}."
        )
    for folder in (path, path / _IN_ITERATION):
        if is_checkpoint(folder):
            return CheckpointPath(folder, is_ours=True)
    if (path / _TRACKER).is_file():
        return _latest(path)
    for folder in (path, path / _IN_ITERATION):
        _check_finished(folder)
    return CheckpointPath(path, is_ours=False)


def _latest(root: Path) -> CheckpointPath:
    text = (root / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isdecimal() else "release"
    if not (text.isdecimal() or text == name) or not (root / name).is_dir():
        iterations = sorted(root.glob("iter_*"))
        raise CheckpointError(
            f"{root / _TRACKER} says {text[:20]!r}, and there is no such iteration. "
            f"Write {iterations[-1] if iterations else _WANTED}."
        )
    return replace(find(root / name), chosen=f"the latest in {root}")


def _check_finished(folder: Path) -> None:
    """Refuses a folder in which a save of this package did not finish.

    Such a folder has data files but neither a manifest nor .metadata, which are written last.
    """
    files = len(list(folder.glob(f"*{_DATA}"))) if folder.is_dir() else 0
    if files and not (folder / ".metadata").exists():
        earlier = next(
            (str(manifest.parent) for manifest in finished_iterations(folder)), "an earlier one"
        )
        raise CheckpointError(
            f"A save into {folder} was not finished: it has {files} {_DATA} "
            f"file{'s' * (files > 1)} and no {MANIFEST}. Wait if a run is saving there now; if "
            f"that run has died, take {earlier}."
        )


def nbytes_of(info: TensorRecord) -> int:
    return math.prod(info.shape) * torch.empty(0, dtype=getattr(torch, info.dtype)).element_size()


def by_param(tensors: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
    """Sorts what is known of tensors by param and kind: its values come first, then its state in
    alphabetical order."""
    found: dict[str, dict[str, _Value]] = {}
    for key in sorted(tensors, key=lambda key: (kind_of(key) != MAIN, key)):
        found.setdefault(name_of(key), {})[kind_of(key)] = tensors[key]
    return {name: found[name] for name in in_order(found)}


def params_text(keys: Iterable[str]) -> list[str]:
    """Writes params with the kinds of their tensors, such as "a (main, exp_avg)"."""
    return [f"{name} ({', '.join(kinds)})" for name, kinds in by_param(dict.fromkeys(keys)).items()]


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names alphabetically, and the numbers in them by size."""

    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]

    return sorted(names, key=order)


def settings_of(group: GroupRecord) -> dict[str, object]:
    """Returns everything that a checkpoint says about the params of a group, the number of updates
    included."""
    scalars = {key: scalar.value for key, scalar in group.scalars.items() if key != "step"}
    return {"step": group.step, **scalars, **group.options}
