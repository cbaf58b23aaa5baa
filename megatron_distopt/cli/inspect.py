"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import FileRecord, Manifest, key_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.cli.checkpoints import (
    CheckpointPath,
    find,
    in_order,
    kinds_by_name,
    nbytes_of,
    open_source,
    settings_of,
)
from megatron_distopt.cli.show import (
    Answer,
    Column,
    FittingTable,
    counted,
    facts,
    listed,
    number_text,
    options_text,
    ranges,
    size_text,
    titled,
)

__all__ = ["Held", "Param", "TreeRow", "answer", "files_of", "held_at", "params_of", "rows"]


def answer(parsed: argparse.Namespace) -> Answer:
    """Reads no tensor.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    held = held_at(find(parsed.checkpoint))
    params = params_of(held)
    return Answer(_document(held), _parts(held, params))


def _document(held: Held) -> dict[str, Any]:
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
        "tensors": {key: _tensor_document(held, key, info) for key, info in held.tensors.items()},
    }


def _group_document(group: GroupRecord) -> dict[str, Any]:
    scalars = {key: scalar.value for key, scalar in group.scalars.items()}
    return {"names": list(group.names), "options": dict(group.options), "step": group.step, "scalars": scalars}


def _tensor_document(held: Held, key: str, info: TensorInfo) -> dict[str, Any]:
    files = [held.manifest.files[number].name for number in files_of(held, key)]
    return {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes_of(info), "files": files}


@dataclass(frozen=True)
class Held:
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


def held_at(place: CheckpointPath) -> Held:
    """Reads the manifest and the sizes of files.

    Raises:
        CheckpointError: it is damaged.
    """
    if not place.is_ours:
        source = open_source(place)
        return Held(place, source.head, source.tensors, {})
    manifest = read_manifest(place.path)
    tensors = {key: TensorInfo(record.shape, record.dtype) for key, record in manifest.tensors.items()}
    paths = [place.path / file.name for file in manifest.files]
    return Held(place, manifest, tensors, {path.name: path.stat().st_size for path in paths if path.is_file()})


def params_of(held: Held) -> list[Param]:
    """Sorts the tensors by param."""
    group_of = {name: number for number, group in enumerate(held.manifest.groups) for name in group.names}
    kinds = kinds_by_name(held.tensors)
    return [_param(held, name, kinds[name], group_of.get(name)) for name in kinds]


def _param(held: Held, name: str, kinds: Mapping[str, TensorInfo], group: int | None) -> Param:
    shape = next(iter(kinds.values())).shape
    return Param(
        name,
        shape,
        math.prod(shape),
        sum(map(nbytes_of, kinds.values())),
        {kind: info.dtype for kind, info in kinds.items()},
        group,
        frozenset(number for kind in kinds for number in files_of(held, key_of(kind, name))),
    )


def files_of(held: Held, key: str) -> list[int]:
    """Numbers of the files in which a tensor lies."""
    record = held.manifest.tensors.get(key)
    return sorted({chunk.file for chunk in record.chunks}) if record is not None else []


#: More files than this are not listed one by one.
_FILES_LISTED = 16


def _parts(held: Held, params: Sequence[Param]) -> list[RenderableType]:
    parts = [
        titled("checkpoint", facts(_head(held, params))),
        titled("param groups", *_groups(held.manifest.groups, params)),
        _params_table(params),
    ]
    return [*parts, titled("files", _files_table(held))] if held.manifest.files else parts


def _head(held: Held, params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    manifest = held.manifest
    skipped = f"; {manifest.num_skipped:,} more were skipped" if manifest.num_skipped else ""
    kept = {_kept(param) for param in params}
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


def _kept(param: Param) -> str:
    """Says which kinds of state a param has, and in which dtypes.

    >>> _kept(Param("w", (), 1, 12, {"main": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}, 0))
    'main in float32; exp_avg, exp_avg_sq in bfloat16'
    """
    by_dtype: dict[str, list[str]] = {}
    for kind, dtype in param.kinds.items():
        by_dtype.setdefault(dtype, []).append(kind)
    return "; ".join(f"{', '.join(kinds)} in {dtype}" for dtype, kinds in by_dtype.items())


def _groups(groups: Sequence[GroupRecord], params: Sequence[Param]) -> Iterator[RenderableType]:
    """Shows options that differ between groups as columns, or as one text a group where those are too wide.

    What all groups have in common is below them.
    """
    if not groups:
        yield Text("  none")
        return
    settings = [{**settings_of(group), "step": _step(group)} for group in groups]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    same = [key for key in keys if all(key in each and each[key] == settings[0][key] for each in settings)]
    titles = ["group", "params", "elements", *(key for key in keys if key not in same)]
    rows = []
    for number, group in enumerate(groups):
        numel = sum(param.numel for param in params if param.group == number)
        given = [number_text(settings[number].get(key, "")) for key in titles[3:]]
        rows.append([str(number), f"{len(group.names):,}", f"{numel:,}", *given])
    texts = [(row[0], ", ".join(map(" ".join, zip(titles[1:], row[1:], strict=True)))) for row in rows]
    yield FittingTable([*map(Column, titles)], rows, instead=facts(texts))
    yield facts([("  all", options_text({key: settings[0][key] for key in same}))])


def _step(group: GroupRecord) -> str:
    return "not counted" if group.step is None else str(group.step)


def _params_table(params: Sequence[Param]) -> RenderableType:
    is_same = len({_kept(param) for param in params}) == 1
    columns = [
        Column("name", is_left=True),
        Column("shape"),
        Column("size"),
        Column("group"),
        Column("elements", is_optional=True),
        Column("files", is_left=True, is_optional=True),
        Column("kept", is_left=True, is_optional=True),
    ]
    drawn = rows(params)
    heading = "params; below those that are alike, one of them" if any(row.depth for row in drawn) else "params"
    return titled(heading, FittingTable(columns, [_param_row(row, is_same=is_same) for row in drawn]))


def _param_row(row: TreeRow, *, is_same: bool) -> list[str]:
    shape = [] if row.param is None else [str(list(row.param.shape))]
    times = [f"{row.count} alike"] if row.count > 1 and row.param is None else [f"{row.count} x"] * (row.count > 1)
    files = ranges(row.files)
    return [
        "  " * row.depth + row.label,
        " ".join([*times, *shape]),
        size_text(row.nbytes),
        "" if row.param is None else "none" if row.param.group is None else str(row.param.group),
        f"{row.numel:,}",
        files if len(files) <= 12 else f"{len(row.files)} files",
        "" if row.param is None or is_same else _kept(row.param),
    ]


def _files_table(held: Held) -> RenderableType:
    files = held.manifest.files
    if len(files) <= _FILES_LISTED:
        cells = [[str(at), file.name, size_text(file.nbytes), _fault(held, file)] for at, file in enumerate(files)]
        columns = [Column("file"), Column("name", is_left=True), Column("size"), Column("", is_left=True)]
        return FittingTable(columns, cells)
    sizes = sorted(file.nbytes for file in files)
    faults = [f"{file.name} {_fault(held, file)}" for file in files if _fault(held, file)]
    said = f"{files[0].name} to {files[-1].name}, {size_text(sizes[0])} to {size_text(sizes[-1])} each"
    return facts([(f"{len(files):,} files", said), ("not whole", listed(faults, most=8))])


def _fault(held: Held, file: FileRecord) -> str:
    found = held.sizes.get(file.name)
    if found is None:
        return "is missing"
    return "" if found == file.nbytes else f"has {found:,} bytes, not {file.nbytes:,}"


@dataclass(frozen=True)
class Param:
    """All tensors of one param.

    Args:
        name: in the whole model.
        shape: of its first tensor.
        numel: of that one.
        nbytes: of all.
        kinds: dtypes by kind, such as {"main": "float32"}.
        group: number of its param group; None for none.
        files: numbers of the files that hold parts of it.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    kinds: Mapping[str, str]
    group: int | None
    files: frozenset[int] = frozenset()

    @property
    def look(self) -> tuple[object, ...]:
        """Equal for params that are alike."""
        return self.shape, tuple(self.kinds.items()), self.group


@dataclass(frozen=True)
class TreeRow:
    """One line of the tree.

    Args:
        depth: 0 at the left.
        label: the name below that of the row which it belongs to; with ranges, "layers.0-3".
        count: how many are alike; the rows below it, and `numel` of a param, are of one of them.
        numel, nbytes: of the param, or of all that is alike together.
        files: of the param, or of all that is alike.
        param: None for what has rows below it.
    """

    depth: int
    label: str
    count: int
    numel: int
    nbytes: int
    files: frozenset[int]
    param: Param | None = None


_Item = tuple[tuple[str, ...], Param]


def rows(params: Sequence[Param]) -> list[TreeRow]:
    """Returns the params as a tree of names, from top to bottom.

    Layers that are alike are one line, with the lines of one of them below it.
    """
    by_name = {param.name: param for param in params}
    return list(_rows([(tuple(name.split(".")), by_name[name]) for name in in_order(by_name)], 0))


def _rows(items: Sequence[_Item], depth: int) -> Iterator[TreeRow]:
    """Yields the rows of the items below one name, in order."""
    numbered: dict[tuple[str, ...], dict[int, list[_Item]]] = {}
    for parts, param in items:
        prefix, number, rest = _split(parts)
        numbered.setdefault(prefix, {}).setdefault(number, []).append((rest, param))
    for prefix, by_number in numbered.items():
        for numbers, below in _alike(by_number):
            label = ".".join([*prefix, *([ranges(numbers)] if numbers != [-1] else [])])
            yield from _of_one(label, numbers, below, depth)


def _split(parts: tuple[str, ...]) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """Splits a name before and after its first number, which is -1 where there is none."""
    at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return (parts, -1, ()) if at is None else (parts[:at], int(parts[at]), parts[at + 1 :])


def _alike(by_number: Mapping[int, list[_Item]]) -> Iterator[tuple[list[int], list[list[_Item]]]]:
    """Groups the numbers below which the same names look the same, with the items of each."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, items in by_number.items():
        alike.setdefault(tuple((rest, param.look) for rest, param in items), []).append(number)
    for numbers in alike.values():
        yield numbers, [by_number[number] for number in numbers]


def _of_one(label: str, numbers: Sequence[int], below: Sequence[list[_Item]], depth: int) -> Iterator[TreeRow]:
    params = [param for items in below for _, param in items]
    numel, nbytes = sum(param.numel for param in params), sum(param.nbytes for param in params)
    files = frozenset().union(*(param.files for param in params))
    rest, first = below[0][0]
    if len(params) == 1:
        yield TreeRow(depth, ".".join([label, *rest]), 1, numel, nbytes, files, first)
    elif not rest:
        yield TreeRow(depth, label, len(numbers), first.numel, first.nbytes, files, first)
    else:
        yield TreeRow(depth, label, len(numbers), numel, nbytes, files)
        merged = [_merged([items[at] for items in below]) for at in range(len(below[0]))]
        yield from _rows(merged, depth + 1)


def _merged(items: Sequence[_Item]) -> _Item:
    """Returns the first param, with the files of all of them."""
    rest, param = items[0]
    return rest, replace(param, files=frozenset().union(*(each.files for _, each in items)))
