"""Which format a path holds, and its optimizer state as a `Source`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import with_step
from megatron_distopt.formats.deepspeed import universal
from megatron_distopt.formats.megatron_2023.file_state import FileState, whole_of
from megatron_distopt.formats.megatron_2023.fork_groups import ForkEntries, entries_in
from megatron_distopt.formats.megatron_2023.gathered import is_gathered, read_gathered
from megatron_distopt.formats.megatron_2023.model_file import ModelFile, open_model_files
from megatron_distopt.formats.megatron_2023.per_rank import is_per_rank, read_per_rank
from megatron_distopt.formats.megatron_2023.plain import is_plain_file, read_plain
from megatron_distopt.formats.megatron_core import nameless, torch_dist
from megatron_distopt.formats.pickles import understood
from megatron_distopt.formats.torch.single_file import open_torch_file

#: The checkpoint of ours in an iteration folder of a fork.
BESIDE_MODEL = "distrib_optim.distopt"
_TRACKER = "latest_checkpointed_iteration.txt"
#: Layouts of the Megatrons of 2023: name, whether a model file is of it, and its reader.
_OF_2023: tuple[tuple[str, Callable[[ModelFile], bool], Callable[[ModelFile], FileState]], ...] = (
    ("plain", is_plain_file, read_plain),
    ("gathered", is_gathered, read_gathered),
    ("per-rank", is_per_rank, read_per_rank),
)


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint, with the model files of the same iteration, if any."""

    source: Source
    found: str
    files: tuple[ModelFile, ...] = ()
    entries: tuple[ForkEntries, ...] = ()


def open_any(path: Path, *, resume_step: int | None = None) -> Source:
    """The optimizer state at a path, whatever wrote it.

    Args:
        path: a folder with manifest.json, an iteration folder of a fork, or a file of `convert(..., "torch")`.
        resume_step: updates so far, for a fork's files that lost them.

    Raises:
        CheckpointError: there is none, or it is damaged; `read` raises it for values that cannot be the model's.
    """
    ours = _ours_at(path)
    if ours is not None and resume_step is None:
        return open_checkpoint(ours)
    return open_with_files(path, resume_step).source


def _ours_at(path: Path) -> Path | None:
    """The folder with the manifest that a path means."""
    folder = path.parent if path.name == MANIFEST else path
    return next((each for each in (folder, folder / BESIDE_MODEL) if is_checkpoint(each)), None)


def open_with_files(path: Path, resume_step: int | None) -> Opened:
    """`open_any`, with the model files that lie in the same iteration."""
    ours = _ours_at(path)
    if ours is not None:
        files = open_model_files(ours.parent) if ours.name == BESIDE_MODEL else ()
        opened = Opened(open_checkpoint(ours), "distopt", files, tuple(entries_in(file.state) for file in files))
    elif path.is_file():
        opened = Opened(open_torch_file(path), "torch")
    elif path.is_dir() and nameless.is_nameless(path):
        raise nameless.refused(path)
    elif path.is_dir() and torch_dist.recognises(path):
        opened = Opened(torch_dist.open_torch_dist(path), "megatron-core torch_dist")
    elif path.is_dir() and universal.recognises(path):
        opened = Opened(universal.open_deepspeed_universal(path), "deepspeed universal")
    elif path.is_dir() and universal.is_zero(path):
        raise universal.zero_refused(path)
    else:
        opened = _of_a_fork(path)
    source = opened.source
    return replace(opened, source=replace(source, head=with_step(source.head, resume_step, path)))


def _of_a_fork(path: Path) -> Opened:
    files = open_model_files(path)
    for name, holds, read_part in _OF_2023:
        if files and holds(files[0]):
            with understood(path, f"hold what a fork saves as {name}"):
                parts = [read_part(file) for file in files]
                return Opened(whole_of(parts, name), name, files, tuple(part.entries for part in parts))
    got, remedy = "is none of these", "Give a folder such as SAVE/iter_0000010."
    if not path.exists():
        got = "does not exist"
    elif files:
        got, remedy = f"has no optimizer state in {files[0].path}", "Save it without --no-save-optim."
    elif (path / _TRACKER).is_file():
        last = (path / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()[:20]
        name = f"iter_{int(last):07d}" if last.isdecimal() else last
        got, remedy = "is a --save folder with its iterations", f"Give {path / name}."
    raise CheckpointError(
        f"Checkpoint {path} {got}. It has to be a folder with {MANIFEST}, an iteration folder of a fork, or a file of "
        f"'convert --to torch'. {remedy}"
    )
