"""From any of the formats to any other: recognise what is there, read it as a `Source`, write it.

An iteration of a fork keeps its model files; only the optimizer's part of them is written anew, and everything lies
under another name until it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.exchange.foreign import open_foreign
from megatron_distopt.checkpoint.exchange.groups import Kept, kept_in
from megatron_distopt.checkpoint.exchange.model_file import MODEL, ModelFile, open_model_files
from megatron_distopt.checkpoint.exchange.native_gathered import (
    head_gathered,
    is_gathered,
    read_gathered,
    write_gathered,
)
from megatron_distopt.checkpoint.exchange.native_per_rank import is_per_rank, read_per_rank, write_per_rank
from megatron_distopt.checkpoint.exchange.part import Part, check_step, whole_of
from megatron_distopt.checkpoint.exchange.plain import is_plain, read_plain, write_plain
from megatron_distopt.checkpoint.exchange.safe import save_whole
from megatron_distopt.checkpoint.exchange.slices import Slices, check_all_written
from megatron_distopt.checkpoint.exchange.torch_file import open_torch_file, write_torch_file
from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint, new_save_id
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source, open_checkpoint, write_checkpoint
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["TARGETS", "Converted", "convert", "open_any"]

#: Formats that can be read and written.
TARGETS = ("distopt", "per-rank", "gathered", "plain", "torch")
_IN_ITERATION, _TRACKER = "distrib_optim.distopt", "latest_checkpointed_iteration.txt"
_BESIDE = ("opt_param_scheduler",)
#: Of the forks: name, whether a model file is of it, and its reader.
_FORMATS: tuple[tuple[str, Callable[[ModelFile], bool], Callable[[ModelFile], Part]], ...] = (
    ("plain", is_plain, read_plain),
    ("gathered", is_gathered, read_gathered),
    ("per-rank", is_per_rank, read_per_rank),
)


@dataclass(frozen=True)
class Converted:
    """What `convert` did.

    Args:
        found: format of what was read; one of `TARGETS`, or another software's.
        written: format of what was written.
        path: of it.
        is_iteration: whether it holds model files too, so that a fork can load it.
    """

    found: str
    written: str
    path: Path
    is_iteration: bool


@dataclass(frozen=True, eq=False)
class _Opened:
    """A checkpoint with the model files that lie beside its optimizer state, if any."""

    source: Source
    found: str
    files: tuple[ModelFile, ...] = ()
    kept: tuple[Kept, ...] = ()


def open_any(path: Path, *, resume_step: int | None = None) -> Source:
    """The optimizer state at a path, whatever wrote it.

    Args:
        path: a folder with manifest.json, an iteration folder of a fork, or a file of `convert(..., "torch")`.
        resume_step: updates so far, for a fork's files that lost them.

    Raises:
        CheckpointError: there is none, or it is damaged; `read` raises it for values that cannot be the model's.
    """
    ours = _ours_at(path)
    return open_checkpoint(ours) if ours is not None and resume_step is None else _open(path, resume_step).source


def _ours_at(path: Path) -> Path | None:
    """The folder with the manifest that a path means."""
    folder = path.parent if path.name == MANIFEST else path
    return next((each for each in (folder, folder / _IN_ITERATION) if is_checkpoint(each)), None)


def _open(path: Path, resume_step: int | None) -> _Opened:
    ours = _ours_at(path)
    if ours is not None:
        files = open_model_files(ours.parent) if ours.name == _IN_ITERATION else ()
        source = _with_step(open_checkpoint(ours), resume_step, ours)
        return _Opened(source, "distopt", files, tuple(kept_in(file.state, _BESIDE) for file in files))
    if path.is_file():
        return _Opened(_with_step(open_torch_file(path), resume_step, path), "torch")
    foreign = open_foreign(path)
    if foreign is not None:
        return _Opened(_with_step(foreign[1], resume_step, path), foreign[0])
    files = open_model_files(path)
    for written_as, is_so, read in _FORMATS:
        if files and is_so(files[0]):
            return _of_fork(path, files, written_as, read, resume_step)
    raise _nothing_at(path, files)


def _of_fork(
    path: Path, files: tuple[ModelFile, ...], written_as: str, read: Callable[[ModelFile], Part], step: int | None
) -> _Opened:
    try:
        parts = [read(file) for file in files]
        return _Opened(whole_of(parts, step, written_as), written_as, files, tuple(part.kept for part in parts))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # what strange content leads to
        got, rule = f"{error!r} while reading it", f"hold what a fork saves as {written_as}"
        remedy = "Give an iteration folder that a Megatron wrote, unchanged"
        raise CheckpointError(refusal(f"checkpoint {path}", got, rule, remedy)) from error


def _with_step(source: Source, resume_step: int | None, path: Path) -> Source:
    """The same with an update count that the checkpoint lost.

    Raises:
        CheckpointError: the checkpoint knows another one.
    """
    known = {group.step for group in source.head.groups} - {None}
    if resume_step is None or known == {resume_step}:
        return source
    if known:
        got, remedy = ", ".join(map(str, sorted(known, key=str))), "Drop --resume-step: the checkpoint knows it"
        rule = f"be the {resume_step} of --resume-step"
        raise CheckpointError(refusal(f"update count in {path}", got, rule, remedy))
    groups = tuple(replace(group, step=resume_step) for group in source.head.groups)
    return replace(source, head=replace(source.head, groups=groups))


def _nothing_at(path: Path, files: tuple[ModelFile, ...]) -> CheckpointError:
    rule = f"be a folder with {MANIFEST}, an iteration folder of a fork, or a file of 'convert --to torch'"
    got, remedy = "nothing of these", "Give a folder such as SAVE/iter_0000010"
    if not path.exists():
        got = "no such file or folder"
    elif files:
        got, remedy = f"{files[0].path} without optimizer state", "Save it without --no-save-optim"
    elif (path / _TRACKER).is_file():
        last = (path / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()[:20]
        name = f"iter_{int(last):07d}" if last.isdecimal() else last
        got, remedy = "a --save folder with its iterations", f"Give {path / name}"
    return CheckpointError(refusal(f"checkpoint {path}", got, rule, remedy))


def convert(
    src: Path,
    dst: Path,
    to: str,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
    dp: int | None = None,
    resume_step: int | None = None,
) -> Converted:
    """Writes the optimizer state of one format in another.

    Where model files lie beside the state, `dst` is a new iteration folder with them, for the same tensor- and
    pipeline-parallel sizes; their random states, schedulers and arguments stay as they are. Without them, or with a
    `dst` that ends in ".distopt", only the state is written.

    Args:
        src: see `open_any`.
        dst: must not be there yet; it appears when it is complete.
        to: one of `TARGETS`.
        progress: called with bytes as they are converted.
        dp: number of data-parallel ranks that will read files of a fork of 2023; None for that of the run that saved.
        resume_step: updates so far, for a fork's files that lost them.

    Raises:
        CheckpointError: `src` cannot be read, or cannot become that, or the disk fails; `dst` is not there then.
    """
    if to not in TARGETS:
        raise CheckpointError(refusal("format", repr(to), f"be one of {', '.join(TARGETS)}", "Write --to distopt"))
    if dst.exists():
        remedy = "Name a folder or file that is not there"
        raise CheckpointError(refusal(f"target {dst}", "it is there already", "be new", remedy))
    opened = _open(src, resume_step)
    check_step(opened.source, src)
    check_groups(opened.source.head.groups, str(src))
    if to == "torch":
        write_torch_file(dst, opened.source, progress)
        return Converted(opened.found, to, dst, is_iteration=False)
    if to != "distopt":
        _check_one_count(opened.source, src, to)
    is_iteration = to != "distopt" or (bool(opened.files) and dst.suffix != ".distopt")
    ranks = _ranks(opened, src, dp) if to in ("per-rank", "gathered") else 0
    unfinished = dst.with_name(f"{dst.name}.{new_save_id()}")
    try:
        if is_iteration:
            _write_iteration(unfinished, opened, src, to, ranks, progress)
        else:
            write_checkpoint(unfinished, opened.source, progress)
        disk.replace(unfinished, dst)
        disk.sync_folder(dst.parent)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(unfinished)
        if not isinstance(error, OSError):
            raise
        rule, remedy = "be writable", "Free space there, or write elsewhere"
        raise CheckpointError(refusal(f"target {dst}", error, rule, remedy)) from error
    return Converted(opened.found, to, dst, is_iteration)


def _check_one_count(source: Source, src: Path, to: str) -> None:
    """A fork's file has one count of updates for all params."""
    counts = {group.step: group.names[0] for group in reversed(source.head.groups) if group.names}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[-2:]
        got = f"{_updates(other)} of {second!r} and {_updates(one)} of {first!r}"
        rule = f"be as many for all params to become {to}, which holds one count"
        remedy = "Convert to distopt or torch, which hold a count for each param"
        raise CheckpointError(refusal(f"updates in {src}", got, rule, remedy))


def _updates(step: int | None) -> str:
    return "none" if step is None else str(step)


def _ranks(opened: _Opened, src: Path, dp: int | None) -> int:
    """Data-parallel, of the run that will read the files."""
    known = dp if dp is not None else opened.files[0].number("data_parallel_size") if opened.files else 1
    if known < 1:
        got, remedy = f"{dp} for {src}", "Write --dp 8 for a run on 8 data-parallel ranks"
        raise CheckpointError(refusal("dp", got, "be at least 1", remedy))
    return known


def _write_iteration(
    folder: Path, opened: _Opened, src: Path, to: str, ranks: int, progress: Callable[[int], None]
) -> None:
    if not opened.files:
        rule = "lie beside the model files of its iteration (mp_rank_00/model_optim_rng.pt ...)"
        remedy = "Convert to distopt or torch, which hold the optimizer state alone"
        raise CheckpointError(refusal(f"checkpoint {src}", f"no model files for {to}", rule, remedy))
    pairs = zip(opened.files, opened.kept, strict=True)
    slices = [Slices(file, opened.source, kept, progress) for file, kept in pairs]
    check_all_written(slices)
    for each in slices:
        _write_one(folder / each.file.folder.name, each, to, ranks)
    if to == "distopt":
        write_checkpoint(folder / _IN_ITERATION, opened.source, progress)


def _write_one(folder: Path, slices: Slices, to: str, ranks: int) -> None:
    """What belongs to one model file."""
    if to == "per-rank":
        write_per_rank(slices, folder, ranks)
    elif to == "gathered":
        write_gathered(slices, folder, ranks)
    elif to == "plain":
        write_plain(slices, folder)
    else:
        save_whole(head_gathered(slices), folder / MODEL)
