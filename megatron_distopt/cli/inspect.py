"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

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
    content = _content_of(find(parsed.checkpoint))
    params = _params_of(content)
    parts: list[RenderableType] = [
        titled("checkpoint", rows(_head(content, params))),
        titled("param groups", rows(_group_rows(content.manifest.groups, params))),
        titled("params, those that are alike in one line", rows(param_rows(params))),
    ]
    return Answer(
        _document(content), [*parts, titled("files", rows(_file_rows(content)))] if content.manifest.files else parts
    )


@dataclass(frozen=True)
class _Content:
    """The content of a checkpoint, without the values of tensors."""

    place: CheckpointPath
    manifest: Manifest  # its own, or that of another format: without files, and tensors without chunks
    tensors: Mapping[str, TensorInfo]
    sizes: Mapping[str, int]  # bytes of the files that are there, by name


def _content_of(place: CheckpointPath) -> _Content:
    source = open_any(place.path)
    if not place.is_ours:
        return _Content(place, source.head, source.tensors, {})
    manifest = read_manifest(place.path)
    paths = [place.path / file.name for file in manifest.files]
    return _Content(
        place, manifest, source.tensors, {path.name: path.stat().st_size for path in paths if path.is_file()}
    )


def _document(content: _Content) -> dict[str, Any]:
    manifest, sizes = content.manifest, content.sizes
    return {
        "checkpoint": str(content.place.path),
        "chosen": content.place.chosen,
        "save_id": manifest.save_id,
        "about": dict(manifest.about),
        "inner": manifest.inner,
        "loss_scale": dict(manifest.loss_scale),
        "num_skipped": manifest.num_skipped,
        "groups": [_group_document(group) for group in manifest.groups],
        "files": [
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "nbytes_found": sizes.get(file.name),
                "crc32": file.crc32,
            }
            for file in manifest.files
        ],
        "tensors": {key: _tensor_document(manifest, key, info) for key, info in content.tensors.items()},
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
    """All tensors of one param."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of its first tensor
    nbytes: int  # of all
    kinds: Mapping[str, str]  # dtypes by kind, such as {"main": "float32"}
    group: int | None  # number of its param group; None for none

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


def _params_of(content: _Content) -> list[Param]:
    group_of = {name: number for number, group in enumerate(content.manifest.groups) for name in group.names}
    return [
        Param(
            name,
            next(iter(infos.values())).shape,
            sum(map(nbytes_of, infos.values())),
            {kind: info.dtype for kind, info in infos.items()},
            group_of.get(name),
        )
        for name, infos in kinds_by_name(content.tensors).items()
    ]


def _head(content: _Content, params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    manifest = content.manifest
    skipped = f"; {manifest.num_skipped:,} more were skipped" if manifest.num_skipped else ""
    kept = {param.kept for param in params}
    yield "where", str(content.place.path)
    yield "which", content.place.chosen
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


def _file_rows(content: _Content) -> Iterator[tuple[str, str]]:
    files = content.manifest.files
    sizes = sorted(file.nbytes for file in files)
    faults = [f"{file.name} {_fault(content, file)}" for file in files if _fault(content, file)]
    said = f"{files[0].name} to {files[-1].name}, {size_text(sizes[0])} to {size_text(sizes[-1])} each"
    yield counted(len(files), "file"), said
    yield "not whole", listed(faults, most=8)


def _fault(content: _Content, file: FileRecord) -> str:
    found = content.sizes.get(file.name)
    if found is None:
        return "is missing"
    return "" if found == file.nbytes else f"has {found:,} bytes, not {file.nbytes:,}"


def param_rows(params: Sequence[Param]) -> Iterator[tuple[str, ...]]:
    """Yields one row for params that are alike but for the numbers in their names, such as those of layers."""
    by_name = {param.name: param for param in params}
    alike: dict[tuple[object, ...], list[Param]] = {}
    for name in in_order(by_name):
        param = by_name[name]
        parts = tuple("" if part.isdecimal() else part for part in name.split("."))
        alike.setdefault((parts, param.shape, param.kept, param.group), []).append(param)
    is_same = len({param.kept for param in params}) == 1
    for members in alike.values():
        first, columns = members[0], zip(*(member.name.split(".") for member in members), strict=True)
        name = ".".join(ranges({*map(int, column)}) if column[0].isdecimal() else column[0] for column in columns)
        times = f"{len(members)} x " if len(members) > 1 else ""
        sizes = counted(first.numel, "element"), size_text(sum(param.nbytes for param in members))
        group = "no group" if first.group is None else f"group {first.group}"
        yield name, f"{times}{list(first.shape)}", *sizes, group, *(() if is_same else (first.kept,))
