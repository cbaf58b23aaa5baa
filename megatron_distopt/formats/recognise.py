"""Which format a path holds, and its optimizer state as a `Source`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.deepspeed import universal, zero
from megatron_distopt.formats.head import with_step
from megatron_distopt.formats.megatron_2023.file_state import FileState, whole_of
from megatron_distopt.formats.megatron_2023.gathered import is_gathered, read_gathered
from megatron_distopt.formats.megatron_2023.model_file import ModelFile, open_model_files
from megatron_distopt.formats.megatron_2023.param_groups import Kept, kept_in
from megatron_distopt.formats.megatron_2023.per_rank import is_per_rank, read_per_rank
from megatron_distopt.formats.megatron_2023.plain import is_plain_file, read_plain
from megatron_distopt.formats.megatron_core import distrib_optim, torch_dist
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
#: Formats that are read and not written: name, whether a folder is of it, and its reader.
_READ_ONLY: tuple[tuple[str, Callable[[Path], bool], Callable[[Path], Source]], ...] = (
    ("megatron-core distrib_optim.pt", distrib_optim.recognises, distrib_optim.open_distrib_optim),
    ("megatron-core torch_dist", torch_dist.recognises, torch_dist.open_torch_dist),
    ("deepspeed universal", universal.recognises, universal.open_deepspeed_universal),
    ("deepspeed zero", zero.recognises, zero.open_deepspeed_zero),
)


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint, with the model files of the same iteration, if any."""

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
        source = with_step(open_checkpoint(ours), resume_step, ours)
        return Opened(source, "distopt", files, tuple(kept_in(file.state) for file in files))
    if path.is_file():
        return Opened(with_step(open_torch_file(path), resume_step, path), "torch")
    for name, is_so, read in _READ_ONLY if path.is_dir() else ():
        if is_so(path):
            return Opened(with_step(read(path), resume_step, path), name)
    files = open_model_files(path)
    for name, holds, read_part in _OF_2023:
        if files and holds(files[0]):
            with understood(path, f"hold what a fork saves as {name}"):
                parts = [read_part(file) for file in files]
                source = with_step(whole_of(parts, name), resume_step, path)
            return Opened(source, name, files, tuple(part.kept for part in parts))
    raise _nothing_at(path, files)


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
