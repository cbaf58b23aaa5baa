"""The manifest: what a checkpoint holds and where.

Every rank makes one of its own file (a `Manifest` with one entry in `files`); joined, they are the
checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_distopt.checkpoint.param_groups import GroupRecord, check_names_once, join_groups
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE

#: The kind of the fp32 param itself; the other kinds are the inner optimizer's own names, such as
#: "exp_avg".
MAIN = "main"


def key_of(kind: str, name: str) -> str:
    """The key of a tensor in a checkpoint.

    >>> key_of("exp_avg", "decoder.final_layernorm.weight")
    'exp_avg/decoder.final_layernorm.weight'
    """
    return f"{kind}/{name}"


def kind_of(key: str) -> str:
    """The kind of a key: "main", or the inner optimizer's name for a moment."""
    return key.partition("/")[0]


def name_of(key: str) -> str:
    return key.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor, and the bytes that hold it, as `torch.save` wrote them."""

    box: Box  # of the whole tensor
    file: int  # number in `Manifest.files`
    start: int  # first byte in that file
    nbytes: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: str  # e.g. "float32"
    # disjoint; together they are the whole tensor; none where a `Source` reads it
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    """One file: its name beside the manifest, size, and the CRC-32 of all its bytes."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    save_id: str  # in the names of the save's files
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]  # by `key_of`
    groups: tuple[GroupRecord, ...]
    inner: str  # name of the inner optimizer
    loss_scale: Mapping[str, float] = field(default_factory=dict)  # empty where it never changes
    num_skipped: int = 0  # steps that were skipped so far
    # host, sizes and versions of the run, for people
    about: Mapping[str, str | int] = field(default_factory=dict)
    # bytes and CRC-32 of `.metadata`; None in old checkpoints
    metadata: tuple[int, int] | None = None
    # of params that never trained; their options count once they are unfrozen
    untrained: tuple[GroupRecord, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the params, in the order of the keys."""
        return tuple(name_of(key) for key in self.tensors if kind_of(key) == MAIN)

    @cached_property
    def has_averages(self) -> bool:
        return bool(self.names) and all(
            key_of(AVERAGE, name) in self.tensors for name in self.names
        )

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def join(parts: Sequence[Manifest]) -> Manifest:
    """Joins the manifests of the ranks, in their order, into that of the checkpoint.

    What is said once, such as the loss scale, is taken from the first. Checks what no rank can see
    alone: every param of a group was written, and every param is in one group.
    """
    chunks: dict[str, list[Chunk]] = {}
    records: dict[str, TensorRecord] = {}
    files: list[FileRecord] = []
    for part in parts:
        for key, record in part.tensors.items():
            known = records.setdefault(key, record)
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                one, other = (f"{each.dtype} {list(each.shape)}" for each in (record, known))
                raise CheckpointError(
                    f"Tensor {key!r} is {one} on one rank and {other} on another, and must be the "
                    "same on all ranks. Report this as a bug."
                )
            moved = (replace(chunk, file=chunk.file + len(files)) for chunk in record.chunks)
            chunks.setdefault(key, []).extend(moved)
        files += part.files
    groups = join_groups(group for part in parts for group in part.groups)
    untrained = join_groups(group for part in parts for group in part.untrained)
    tensors = {key: replace(records[key], chunks=tuple(chunks[key])) for key in sorted(records)}
    for name in (name for group in groups for name in group.names):
        if key_of(MAIN, name) not in tensors:
            raise CheckpointError(
                f"No rank has written param {name!r}, although one of the ranks that hold it "
                "must. Report this as a bug."
            )
    check_names_once((*groups, *untrained), "the checkpoint that is being saved")
    return replace(
        parts[0], files=tuple(files), tensors=tensors, groups=groups, untrained=untrained
    )
