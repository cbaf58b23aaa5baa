"""What can be wrong with a checkpoint without looking at a value: gaps, doubles, and groups that do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, TensorRecord, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.layout import Box
from megatron_distopt.plugin.commands.show import counted, listed
from megatron_distopt.plugin.commands.tensors import kinds_by_name

__all__ = ["Problem", "box_text", "check_chunks", "check_groups", "check_kinds"]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Args:
        area: "manifest", "files", "tensors", "values" or "groups".
        subject: a file, the key of a tensor, or the name of a param.
        text: what is wrong with it, after its name.
        keys: of all tensors that it spoils, where that is known.
        lost: the same for people, a line a param.
    """

    area: str
    subject: str
    text: str
    keys: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def box_text(box: Box) -> str:
    """As Python slices it.

    >>> box_text(Box((0, 6), (2, 3)))
    '[0:2, 6:9]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offsets, box.stops, strict=True))}]"


def check_chunks(manifest: Manifest) -> Iterator[Problem]:
    """Whether the chunks of every tensor are disjoint and together all of it."""
    for key, record in manifest.tensors.items():
        double = _double(record)
        numel, wanted = sum(chunk.box.numel for chunk in record.chunks), math.prod(record.shape)
        if double is not None:
            files = listed([manifest.files[number].name for number in sorted({chunk.file for chunk in record.chunks})])
            yield Problem("tensors", key, f"is there twice: {double}, in {files}", (key,))
        elif numel != wanted:
            said = f"is not complete: {numel:,} of {counted(wanted, 'element')} were saved"
            yield Problem("tensors", key, said, (key,))


def _double(record: TensorRecord) -> str | None:
    """Two chunks with an element in common; a chunk is not compared with those that end before it begins."""
    dims = range(len(record.shape))
    dim = max(dims, key=lambda each: len({chunk.box.offsets[each] for chunk in record.chunks}), default=None)
    if dim is None:
        return "two chunks hold its one element" if len(record.chunks) > 1 else None
    reaching: list[Box] = []
    for box in sorted((chunk.box for chunk in record.chunks), key=lambda box: box.offsets[dim]):
        reaching = [each for each in reaching if each.stops[dim] > box.offsets[dim]]
        other = next((each for each in reaching if each.intersect(box) is not None), None)
        if other is not None:
            return f"{box_text(other)} and {box_text(box)} overlap"
        reaching.append(box)
    return None


def check_kinds(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Whether every param has its values, and beside them the same as the others of its group, in the same shape."""
    kinds = kinds_by_name(tensors)
    for name, infos in kinds.items():
        shapes = {kind: list(info.shape) for kind, info in infos.items()}
        if MAIN not in infos:
            yield Problem("tensors", name, f"has {', '.join(infos)} and no {MAIN}")
        elif any(shape != shapes[MAIN] for shape in shapes.values()):
            yield Problem("tensors", name, f"has shapes that differ: {', '.join(map(_pair, shapes.items()))}")
    for number, group in enumerate(groups):
        members = {name: kinds[name] for name in group.names if name in kinds}
        # Without a count of updates there may have been none, and a param that never had a gradient has no state.
        begun = {name: infos for name, infos in members.items() if group.step is not None or infos.keys() != {MAIN}}
        yield from _check_alike(number, begun)


def _pair(item: tuple[str, object]) -> str:
    return f"{item[0]} {item[1]}"


def _check_alike(number: int, members: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[Problem]:
    """Compares with what most of the group have."""
    looks = {name: _look(infos) for name, infos in members.items()}
    usual = Counter(looks.values()).most_common(1)[0][0] if looks else ""
    for name, look in looks.items():
        if look != usual:
            yield Problem("groups", name, f"has {look} beside it, where others of group {number} have {usual}")


def _look(infos: Mapping[str, TensorInfo]) -> str:
    return ", ".join(f"{kind} in {info.dtype}" for kind, info in infos.items() if kind != MAIN) or "nothing"


def check_groups(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Whether every param is in one group, and every param of a group is there."""
    found: dict[str, list[int]] = {name_of(key): [] for key in tensors}
    for number, group in enumerate(groups):
        for name in group.names:
            if name in found:
                found[name].append(number)
            else:
                yield Problem("groups", name, f"is in group {number} and has no tensor")
    for name, numbers in found.items():
        if not numbers:
            yield Problem("groups", name, "is in no group")
        elif len(numbers) > 1:
            yield Problem("groups", name, f"is in groups {' and '.join(map(str, numbers))}")
