"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord
from megatron_distopt.cli.checkpoints import CheckpointPath, by_param, find, nbytes_of, settings_of
from megatron_distopt.cli.show import (
    Answer,
    listed,
    options_text,
    plural,
    ranges,
    rows,
    size_text,
    titled,
)
from megatron_distopt.formats import open_any


@dataclass(frozen=True)
class Param:
    """All tensors of one param."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of its first tensor
    nbytes: int  # of all
    # its tensors and their dtypes, such as "main in float32; exp_avg, exp_avg_sq in bfloat16"
    state: str
    group: int | None  # number of its param group; None for none

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def answer(parsed: argparse.Namespace) -> Answer:
    """Says what a checkpoint holds, without reading a tensor."""
    place = find(parsed.checkpoint)
    source = open_any(place.path)
    # Another format has no files and chunks that could be listed.
    manifest = read_manifest(place.path) if place.is_ours else source.head
    paths = [place.path / file.name for file in manifest.files]
    sizes = {path.name: path.stat().st_size for path in paths if path.is_file()}
    params = _params_of(manifest, source.tensors)
    parts: list[RenderableType] = [
        titled("checkpoint", rows(_head(place, manifest, params))),
        titled("param groups", rows(_group_rows(manifest, params))),
        titled("params, those that are alike in one line", rows(param_rows(params))),
    ]
    if manifest.files:
        parts.append(titled("files", rows(_file_rows(manifest, sizes))))
    return Answer(_document(place, manifest, source.tensors, sizes), parts)


def _params_of(manifest: Manifest, tensors: Mapping[str, TensorRecord]) -> list[Param]:
    group_of = {
        name: number for number, group in enumerate(manifest.groups) for name in group.names
    }
    params = []
    for name, infos in by_param(tensors).items():
        kinds: dict[str, list[str]] = {}
        for kind, info in infos.items():
            kinds.setdefault(info.dtype, []).append(kind)
        state = "; ".join(f"{', '.join(of_dtype)} in {dtype}" for dtype, of_dtype in kinds.items())
        shape, nbytes = next(iter(infos.values())).shape, sum(map(nbytes_of, infos.values()))
        params.append(Param(name, shape, nbytes, state, group_of.get(name)))
    return params


def _document(
    place: CheckpointPath,
    manifest: Manifest,
    tensors: Mapping[str, TensorRecord],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    def files_of(key: str) -> list[str]:
        chunks = manifest.tensors[key].chunks if key in manifest.tensors else ()
        return [manifest.files[number].name for number in sorted({chunk.file for chunk in chunks})]

    return {
        "checkpoint": str(place.path),
        "chosen": place.chosen,
        **{
            name: getattr(manifest, name)
            for name in ("save_id", "about", "inner", "loss_scale", "num_skipped")
        },
        "groups": [asdict(group) for group in manifest.groups],
        "files": [
            {**asdict(file), "nbytes_found": sizes.get(file.name)} for file in manifest.files
        ],
        "tensors": {
            key: {
                "shape": info.shape,
                "dtype": info.dtype,
                "nbytes": nbytes_of(info),
                "files": files_of(key),
            }
            for key, info in tensors.items()
        },
    }


def _head(
    place: CheckpointPath, manifest: Manifest, params: Sequence[Param]
) -> Iterator[tuple[str, str]]:
    steps = dict.fromkeys(_step_text(group.step) for group in manifest.groups)
    skipped = f"; {manifest.num_skipped:,} more were skipped" if manifest.num_skipped else ""
    states = {param.state for param in params}
    numel, nbytes = sum(param.numel for param in params), sum(param.nbytes for param in params)
    yield "where", str(place.path)
    yield "which", place.chosen
    yield (
        "written by",
        options_text({key: text for key, text in manifest.about.items() if isinstance(text, str)}),
    )
    yield (
        "layout",
        options_text(
            {key: size for key, size in manifest.about.items() if not isinstance(size, str)}
        ),
    )
    yield "optimizer", manifest.inner
    yield "steps", listed([*steps]) + skipped
    yield "loss scale", options_text(manifest.loss_scale) or "none, or one that never changes"
    yield (
        "size",
        f"{plural(len(params), 'param')}, {plural(numel, 'element')}, {size_text(nbytes)} of state",
    )
    yield "of each", states.pop() if len(states) == 1 else ""


def _step_text(step: int | None) -> str:
    return "not counted" if step is None else str(step)


def _group_rows(manifest: Manifest, params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    """Yields what distinguishes each group from the others, and what all of them have in common."""
    if not manifest.groups:
        yield "none", "the checkpoint says nothing about the options of its params"
        return
    settings = [{**settings_of(group), "step": _step_text(group.step)} for group in manifest.groups]
    same = {
        key: value
        for key, value in settings[0].items()
        if all((key, value) in each.items() for each in settings)
    }
    for number, group in enumerate(manifest.groups):
        numel = sum(param.numel for param in params if param.group == number)
        own = options_text(
            {key: value for key, value in settings[number].items() if key not in same}
        )
        text = f"{plural(len(group.names), 'param')}, {plural(numel, 'element')}"
        yield str(number), ", ".join(filter(None, (text, own)))
    yield "all", options_text(same)


def _file_rows(manifest: Manifest, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    files = manifest.files
    missing = [f"{file.name} is missing" for file in files if file.name not in sizes]
    wrong = [file for file in files if sizes.get(file.name, file.nbytes) != file.nbytes]
    faults = missing + [
        f"{file.name} has {sizes[file.name]:,} bytes, not {file.nbytes:,}" for file in wrong
    ]
    smallest, largest = (size_text(pick(file.nbytes for file in files)) for pick in (min, max))
    yield (
        plural(len(files), "file"),
        f"{files[0].name} to {files[-1].name}, {smallest} to {largest} each",
    )
    yield "not whole", listed(faults, most=8)


def param_rows(params: Sequence[Param]) -> Iterator[tuple[str, ...]]:
    """Yields one row for params that are alike but for the numbers in their names, such as those of
    layers."""
    alike: dict[tuple[object, ...], list[Param]] = {}
    for param in params:
        parts = tuple("" if part.isdecimal() else part for part in param.name.split("."))
        alike.setdefault((parts, param.shape, param.state, param.group), []).append(param)
    is_same = len({param.state for param in params}) == 1
    for members in alike.values():
        first, columns = (
            members[0],
            zip(*(member.name.split(".") for member in members), strict=True),
        )
        name = ".".join(
            ranges({*map(int, column)}) if column[0].isdecimal() else column[0]
            for column in columns
        )
        times = f"{len(members)} x " if len(members) > 1 else ""
        sizes = plural(first.numel, "element"), size_text(sum(param.nbytes for param in members))
        group = "no group" if first.group is None else f"group {first.group}"
        yield (
            name,
            f"{times}{list(first.shape)}",
            *sizes,
            group,
            *(() if is_same else (first.state,)),
        )
