"""From any of the formats to any other: recognise what is there, read it as a `Source`, write it.

An iteration of a fork keeps its model files; only the optimizer's part of them is written anew, and everything lies
under another name until it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import new_save_id
from megatron_distopt.checkpoint.owned_state import is_owned
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source, write_checkpoint
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.head import check_step
from megatron_distopt.formats.megatron_2023.file_state import Slices, check_all_written
from megatron_distopt.formats.megatron_2023.gathered import (
    head_gathered,
    write_gathered,
)
from megatron_distopt.formats.megatron_2023.model_file import MODEL
from megatron_distopt.formats.megatron_2023.per_rank import write_per_rank
from megatron_distopt.formats.megatron_2023.plain import write_plain
from megatron_distopt.formats.pickles import save_whole
from megatron_distopt.formats.recognise import BESIDE_MODEL, Opened, open_with_files
from megatron_distopt.formats.torch.single_file import write_torch_file
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

#: Formats that can be read and written.
TARGETS = ("distopt", "per-rank", "gathered", "plain", "torch")


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

    Where there are model files in the same iteration, `dst` is a new iteration folder with them, for the same
    tensor- and pipeline-parallel sizes; their random states, schedulers and arguments stay as they are. Without them,
    or with a `dst` that ends in ".distopt", only the state is written.

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
    opened = open_with_files(src, resume_step)
    check_step(opened.source, src)
    check_groups(opened.source.head.groups, str(src))
    if to != "distopt":
        _check_none_owned(opened.source, src, to)
    if to == "torch":
        write_torch_file(dst, opened.source, progress)
        return Converted(opened.found, to, dst, is_iteration=False)
    if to != "distopt":
        _check_no_muon(opened.source, src, to)
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


def _check_no_muon(source: Source, src: Path, to: str) -> None:
    """An optimizer of a fork would take the momentum of Muon for that of SGD."""
    names = [name for group in source.head.groups if is_muons_group(group.options) for name in group.names]
    if names:
        got, rule = f"that of {names[0]!r} is Muon's", f"be Adam's or SGD's to become {to}"
        raise CheckpointError(refusal(f"momentum in {src}", got, rule, "Convert to distopt or torch"))


def _check_none_owned(source: Source, src: Path, to: str) -> None:
    """Another format has no place for what an optimizer of whole params keeps."""
    owned = next(filter(is_owned, source.tensors), None)
    if owned is not None:
        got, rule = f"{owned!r} of {source.head.inner}", f"be cut like its param to become {to}"
        raise CheckpointError(refusal(f"state in {src}", got, rule, "Convert to distopt"))


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


def _ranks(opened: Opened, src: Path, dp: int | None) -> int:
    """Data-parallel, of the run that will read the files."""
    known = dp if dp is not None else opened.files[0].number("data_parallel_size") if opened.files else 1
    if known < 1:
        got, remedy = f"{dp} for {src}", "Write --dp 8 for a run on 8 data-parallel ranks"
        raise CheckpointError(refusal("dp", got, "be at least 1", remedy))
    return known


def _write_iteration(
    folder: Path, opened: Opened, src: Path, to: str, ranks: int, progress: Callable[[int], None]
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
        write_checkpoint(folder / BESIDE_MODEL, opened.source, progress)


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
