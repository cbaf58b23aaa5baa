"""Which format a path holds: its optimizer state as a `Source`, or loaded straight into a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint
from megatron_distopt.checkpoint.load import load_checkpoint, load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import Chunk
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import check_step, with_step
from megatron_distopt.formats.deepspeed_universal import (
    is_universal,
    is_zero,
    open_deepspeed_universal,
    refuse_zero,
)
from megatron_distopt.formats.megatron_2023.file_state import (
    FileState,
    ForkEntries,
    Slices,
    entries_in,
    whole_of,
)
from megatron_distopt.formats.megatron_2023.gathered import (
    is_gathered,
    read_gathered,
    write_gathered,
)
from megatron_distopt.formats.megatron_2023.model_file import ModelFile, open_model_files
from megatron_distopt.formats.megatron_2023.per_rank import (
    is_per_rank,
    read_per_rank,
    write_per_rank,
)
from megatron_distopt.formats.megatron_2023.plain import is_plain_file, read_plain, write_plain
from megatron_distopt.formats.megatron_core.nameless import is_nameless, refuse_nameless
from megatron_distopt.formats.megatron_core.torch_dist import open_torch_dist, recognises
from megatron_distopt.formats.pickles import understood
from megatron_distopt.formats.torch_files import open_torch_file
from megatron_distopt.layout import Box

#: The checkpoint of ours in an iteration folder of a fork.
BESIDE_MODEL = "distrib_optim.distopt"
#: In the --save folder of a Megatron: the newest iteration.
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Format:
    """A layout of files other than ours."""

    name: str
    is_at: Callable[[Path], bool]
    open: Callable[[Path], Source]  # or raises what to do instead


@dataclass(frozen=True)
class ForkFormat:
    """A layout of the Megatrons of 2023, beside their model files."""

    name: str
    is_of: Callable[[ModelFile], bool]
    read: Callable[[ModelFile], FileState]
    write: Callable[[Slices, Path], None]


#: In the order in which they are looked for.
FORMATS = (
    Format("torch", Path.is_file, open_torch_file),
    Format("megatron-core in flat buffers", is_nameless, refuse_nameless),
    Format("megatron-core torch_dist", recognises, open_torch_dist),
    Format("deepspeed universal", is_universal, open_deepspeed_universal),
    Format("deepspeed zero", is_zero, refuse_zero),
)
FORK_FORMATS = (
    ForkFormat("plain", is_plain_file, read_plain, write_plain),
    ForkFormat("gathered", is_gathered, read_gathered, write_gathered),
    ForkFormat("per-rank", is_per_rank, read_per_rank, write_per_rank),
)


@dataclass(frozen=True, eq=False)
class OpenedCheckpoint:
    """A checkpoint, with the model files of the same iteration, if any."""

    source: Source
    found: str
    files: tuple[ModelFile, ...] = ()
    entries: tuple[ForkEntries, ...] = ()


def open_any(path: Path, *, resume_step: int | None = None) -> Source:
    """The optimizer state at a path, whatever wrote it.

    Args:
        path: a folder with manifest.json, an iteration folder of a fork, or a file of `convert(...,
            "torch")`.
        resume_step: updates so far, for a fork's files that lost them.

    Raises:
        CheckpointError: there is none, or it is damaged; `read` raises it for values that cannot be
            the model's.
    """
    ours = _ours_at(path)
    if ours is not None and resume_step is None:
        return open_checkpoint(ours)
    return open_with_files(path, resume_step).source


def _ours_at(path: Path) -> Path | None:
    """The folder with the manifest that a path means."""
    folder = path.parent if path.name == MANIFEST else path
    return next((each for each in (folder, folder / BESIDE_MODEL) if is_checkpoint(each)), None)


def open_with_files(path: Path, resume_step: int | None) -> OpenedCheckpoint:
    """`open_any`, with the model files that lie in the same iteration."""
    ours = _ours_at(path)
    opened = _of_others(path) if ours is None else _of_ours(ours)
    head = with_step(opened.source.head, resume_step, path)
    return replace(opened, source=replace(opened.source, head=head))


def _of_ours(folder: Path) -> OpenedCheckpoint:
    files = open_model_files(folder.parent) if folder.name == BESIDE_MODEL else ()
    entries = tuple(entries_in(file.state) for file in files)
    return OpenedCheckpoint(open_checkpoint(folder), "distopt", files, entries)


def _of_others(path: Path) -> OpenedCheckpoint:
    found = next((each for each in FORMATS if each.is_at(path)), None)
    if found is None:
        return _of_a_fork(path)
    return OpenedCheckpoint(found.open(path), found.name)


def _of_a_fork(path: Path) -> OpenedCheckpoint:
    files = open_model_files(path)
    for each in FORK_FORMATS:
        if files and each.is_of(files[0]):
            with understood(path, f"hold what a fork saves as {each.name}"):
                parts = [each.read(file) for file in files]
                entries = tuple(part.entries for part in parts)
                return OpenedCheckpoint(whole_of(parts, each.name), each.name, files, entries)
    if files:
        raise CheckpointError(
            f"Checkpoint {path} has no optimizer state in {files[0].path}. Save it without "
            "--no-save-optim."
        )
    got = "is not in a known format" if path.exists() else "does not exist"
    raise CheckpointError(
        f"Checkpoint {path} {got}. It must be a folder with {MANIFEST}, an iteration folder of a "
        "fork, or a file of 'convert --to torch'. Give a folder such as SAVE/iter_0000010."
    )


def load_any(
    path: Path, model: WholeModel, everyone: Group, *, resume_step: int | None = None
) -> None:
    """Collective: reads this rank's shards from what is at a path; the params are not gathered yet.

    Of another software's files each rank reads what it needs, and reads it once. `resume_step` are
    the updates so far, for files that lost them.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    if is_checkpoint(path):
        load_checkpoint(path, model, everyone)
    else:
        load_state(lambda: _loadable(path, resume_step), model, everyone)


def _loadable(path: Path, resume_step: int | None) -> Loadable:
    """A source as what can be loaded, with every tensor as one chunk. What a plan needs is read
    before any state changes, so that damage is found in time."""
    source = open_any(path, resume_step=resume_step)
    check_step(source.head, path)
    check_groups(source.head.groups, str(path))
    # for each key the smallest box that holds what is needed
    parts: dict[str, tuple[Box, Tensor]] = {}

    def verify(reads: Sequence[Read]) -> None:
        needed: dict[str, list[Box]] = {}
        for each in reads:
            needed.setdefault(each.key, []).append(each.box)
        for key, boxes in needed.items():
            offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
            stops = map(max, zip(*(box.stops for box in boxes), strict=True))
            box = Box(
                offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True))
            )
            values = source.read_box(key, box)
            if tuple(values.shape) != box.sizes:
                raise CheckpointError(
                    f"Tensor {key!r} in {path} has shape {list(values.shape)} where the file says "
                    f"{list(box.sizes)}. Load an earlier checkpoint; this one is damaged."
                )
            parts[key] = box, values

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        for each in reads:
            box, values = parts[each.key]
            yield each, values[each.box.relative_to(box.offsets).as_slices()]

    records = {
        key: replace(record, chunks=(Chunk(Box.whole(record.shape), 0, 0, 0),))
        for key, record in source.tensors.items()
    }
    return Loadable(replace(source.head, tensors=records), str(path), read, verify)
