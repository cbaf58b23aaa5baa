"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import FileRecord, Manifest
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.cli.checkpoints import (
    CheckpointPath,
    find,
    in_order,
    kinds_by_name,
    nbytes_of,
    settings_of,
)
from megatron_distopt.cli.show import Answer, counted, listed, options_text, ranges, rows, size_text, titled
from megatron_distopt.formats import open_any


def answer(parsed: argparse.Namespace) -> Answer:
    """Says what a checkpoint holds, without reading a tensor.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    held = _held_at(find(parsed.checkpoint))
    params = _params_of(held)
    parts: list[RenderableType] = [
        titled("checkpoint", rows(_head(held, params))),
        titled("param groups", rows(_group_rows(held.manifest.groups, params))),
        tree_of(params),
    ]
    return Answer(_document(held), [*parts, titled("files", rows(_file_rows(held)))] if held.manifest.files else parts)


@dataclass(frozen=True)
class _Held:
    """The content of a checkpoint, without the values of tensors.

    Args:
        place: where it is.
        manifest: its own, or that of another format: without files, and tensors without chunks.
        tensors: of both.
        sizes: bytes of the files that are there, by name.
    """

    place: CheckpointPath
    manifest: Manifest
    tensors: Mapping[str, TensorInfo]
    sizes: Mapping[str, int]


def _held_at(place: CheckpointPath) -> _Held:
    source = open_any(place.path)
    if not place.is_ours:
        return _Held(place, source.head, source.tensors, {})
    manifest = read_manifest(place.path)
    paths = [place.path / file.name for file in manifest.files]
    return _Held(place, manifest, source.tensors, {path.name: path.stat().st_size for path in paths if path.is_file()})


def _document(held: _Held) -> dict[str, Any]:
    manifest = held.manifest
    return {
        "checkpoint": str(held.place.path),
        "chosen": held.place.chosen,
        "save_id": manifest.save_id,
        "about": dict(manifest.about),
        "inner": manifest.inner,
        "loss_scale": dict(manifest.loss_scale),
        "num_skipped": manifest.num_skipped,
        "groups": [_group_document(group) for group in manifest.groups],
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "nbytes_found": held.sizes.get(file.name), "crc32": file.crc32}
            for file in manifest.files
        ],
        "tensors": {key: _tensor_document(manifest, key, info) for key, info in held.tensors.items()},
    }


def _group_document(group: GroupRecord) -> dict[str, Any]:
    scalars = {key: scalar.value for key, scalar in group.scalars.items()}
    return {"names": list(group.names), "options": dict(group.options), "step": group.step, "scalars": scalars}


def _tensor_document(manifest: Manifest, key: str, info: TensorInfo) -> dict[str, Any]:
    chunks = manifest.tensors[key].chunks if key in manifest.tensors else ()
    files = [manifest.files[number].name for number in sorted({chunk.file for chunk in chunks})]
    return {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes_of(info), "files": files}


@dataclass(frozen=True)
class Param:
    """All tensors of one param.

    Args:
        name: in the whole model.
        shape: of its first tensor.
        nbytes: of all.
        kinds: dtypes by kind, such as {"main": "float32"}.
        group: number of its param group; None for none.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    kinds: Mapping[str, str]
    group: int | None

    @property
    def numel(self) -> int:
        """Elements of its first tensor."""
        return math.prod(self.shape)

    @property
    def kept(self) -> str:
        """The kinds of its state, and their dtypes.

        >>> Param("w", (), 12, {"main": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}, 0).kept
        'main in float32; exp_avg, exp_avg_sq in bfloat16'
        """
        by_dtype: dict[str, list[str]] = {}
        for kind, dtype in self.kinds.items():
            by_dtype.setdefault(dtype, []).append(kind)
        return "; ".join(f"{', '.join(kinds)} in {dtype}" for dtype, kinds in by_dtype.items())


def _params_of(held: _Held) -> list[Param]:
    group_of = {name: number for number, group in enumerate(held.manifest.groups) for name in group.names}
    return [
        Param(
            name,
            next(iter(infos.values())).shape,
            sum(map(nbytes_of, infos.values())),
            {kind: info.dtype for kind, info in infos.items()},
            group_of.get(name),
        )
        for name, infos in kinds_by_name(held.tensors).items()
    ]


def _head(held: _Held, params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    manifest = held.manifest
    skipped = f"; {manifest.num_skipped:,} more were skipped" if manifest.num_skipped else ""
    kept = {param.kept for param in params}
    yield "where", str(held.place.path)
    yield "which", held.place.chosen
    yield "written by", options_text({key: said for key, said in manifest.about.items() if isinstance(said, str)})
    yield "layout", options_text({key: said for key, said in manifest.about.items() if not isinstance(said, str)})
    yield "optimizer", manifest.inner
    yield "steps", listed(list(dict.fromkeys(_step(group) for group in manifest.groups))) + skipped
    yield "loss scale", options_text(manifest.loss_scale) or "none, or one that never changes"
    numel, nbytes = sum(param.numel for param in params), sum(param.nbytes for param in params)
    yield "size", f"{counted(len(params), 'param')}, {counted(numel, 'element')}, {size_text(nbytes)} of state"
    yield "of each", kept.pop() if len(kept) == 1 else ""


def _group_rows(groups: Sequence[GroupRecord], params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    """Yields what distinguishes each group from the others, and what all of them have in common."""
    if not groups:
        yield "none", "the checkpoint says nothing about the options of its params"
        return
    settings = [{**settings_of(group), "step": _step(group)} for group in groups]
    same = {key: value for key, value in settings[0].items() if all((key, value) in each.items() for each in settings)}
    for number, group in enumerate(groups):
        numel = sum(param.numel for param in params if param.group == number)
        own = options_text({key: value for key, value in settings[number].items() if key not in same})
        said = f"{counted(len(group.names), 'param')}, {counted(numel, 'element')}"
        yield str(number), ", ".join(filter(None, (said, own)))
    yield "all", options_text(same)


def _step(group: GroupRecord) -> str:
    return "not counted" if group.step is None else str(group.step)


def _file_rows(held: _Held) -> Iterator[tuple[str, str]]:
    files = held.manifest.files
    sizes = sorted(file.nbytes for file in files)
    faults = [f"{file.name} {_fault(held, file)}" for file in files if _fault(held, file)]
    said = f"{files[0].name} to {files[-1].name}, {size_text(sizes[0])} to {size_text(sizes[-1])} each"
    yield counted(len(files), "file"), said
    yield "not whole", listed(faults, most=8)


def _fault(held: _Held, file: FileRecord) -> str:
    found = held.sizes.get(file.name)
    if found is None:
        return "is missing"
    return "" if found == file.nbytes else f"has {found:,} bytes, not {file.nbytes:,}"


#: A param, with the part of its name below that of the branch which it belongs to.
_Item = tuple[tuple[str, ...], Param]


def tree_of(params: Sequence[Param]) -> Tree:
    """Returns the params as a tree of names; layers that are alike are one branch, with the params of one of them."""
    tree = Tree(Text("params; below those that are alike, one of them", style="bold"))
    by_name = {param.name: param for param in params}
    is_same = len({param.kept for param in params}) == 1
    _grow(tree, [(tuple(name.split(".")), by_name[name]) for name in in_order(by_name)], is_same=is_same)
    return tree


def _grow(tree: Tree, items: Sequence[_Item], *, is_same: bool) -> None:
    """Adds a branch for each name, up to its first number, and each group of numbers below which all is alike."""
    numbered: dict[tuple[str, ...], dict[int, list[_Item]]] = {}
    for parts, param in items:
        at = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))
        number = int(parts[at]) if at < len(parts) else -1
        numbered.setdefault(parts[:at], {}).setdefault(number, []).append((parts[at + 1 :], param))
    for prefix, by_number in numbered.items():
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, below in by_number.items():
            look = tuple((rest, param.shape, param.kept, param.group) for rest, param in below)
            alike.setdefault(look, []).append(number)
        for numbers in alike.values():
            label = ".".join([*prefix, *([ranges(numbers)] if numbers != [-1] else [])])
            _add_branch(tree, label, [by_number[number] for number in numbers], is_same=is_same)


def _add_branch(tree: Tree, label: str, alike: Sequence[Sequence[_Item]], *, is_same: bool) -> None:
    """Adds one branch for layers, or params, that are alike; or a leaf for a single param."""
    (rest, first), count = alike[0][0], len(alike)
    if len(alike[0]) > 1 or (rest and count > 1):
        nbytes = count * sum(param.nbytes for _, param in alike[0])
        branch = tree.add(f"{label}: {f'{count} alike, ' * (count > 1)}{size_text(nbytes)}")
        _grow(branch, alike[0], is_same=is_same)
        return
    times = f"{count} x " if count > 1 else ""
    group = "no group" if first.group is None else f"group {first.group}"
    kept = "" if is_same else f", {first.kept}"
    shown = f"{times}{list(first.shape)}, {counted(first.numel, 'element')}, {size_text(first.nbytes)}, {group}{kept}"
    tree.add(f"{'.'.join([label, *rest])}  {shown}")
