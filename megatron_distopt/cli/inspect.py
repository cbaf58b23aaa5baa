"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord
from megatron_distopt.cli.checkpoints import Checkpoint, by_param, nbytes_of, open_at, settings_of
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

#: What is known of the tensors of a param, by kind; its main params come first.
_Kinds = Mapping[str, TensorRecord]


def answer(parsed: argparse.Namespace) -> Answer:
    """Says what a checkpoint holds, without reading a tensor."""
    found = open_at(parsed.checkpoint)
    manifest, params = found.manifest, by_param(found.source.tensors)
    document = {
        **found.document,
        "save_id": manifest.save_id,
        "about": manifest.about,
        "inner": manifest.inner,
        "loss_scale": manifest.loss_scale,
        "num_skipped": manifest.num_skipped,
        "groups": [asdict(group) for group in manifest.groups],
        "files": [asdict(file) for file in manifest.files],
        "tensors": {
            key: {"shape": info.shape, "dtype": info.dtype, "nbytes": nbytes_of(info)}
            for key, info in found.source.tensors.items()
        },
    }
    parts = [
        titled("checkpoint", rows([*found.rows, *_head(found, params)])),
        titled("param groups", rows(_group_rows(manifest, params))),
        titled("params, with similar ones in one line", rows(_param_rows(manifest, params))),
    ]
    return Answer(document, parts)


def _numel(kinds: _Kinds) -> int:
    return math.prod(next(iter(kinds.values())).shape)


def _head(found: Checkpoint, params: Mapping[str, _Kinds]) -> list[tuple[str, str]]:
    manifest = found.manifest
    numel = sum(map(_numel, params.values()))
    nums = plural(len(params), "param"), plural(numel, "element")
    steps = dict.fromkeys(_step_text(group.step) for group in manifest.groups)
    skipped = ""
    if manifest.num_skipped:
        skipped = f"; {manifest.num_skipped:,} more were skipped"
    files = ""
    if found.is_ours:
        files = f"{plural(len(manifest.files), 'file')}, {size_text(manifest.nbytes)}"
    scale = options_text(manifest.loss_scale)
    return [
        ("written by", options_text(manifest.about)),
        ("optimizer", manifest.inner),
        ("steps", listed([*steps]) + skipped),
        ("loss scale", scale or "none, or a constant one"),
        ("size", f"{', '.join(nums)}, {size_text(found.nbytes)} of state"),
        ("on disk", files),
    ]


def _step_text(step: int | None) -> str:
    return "not counted" if step is None else str(step)


def _group_rows(
    manifest: Manifest, params: Mapping[str, _Kinds]
) -> Iterator[tuple[str, str, str, str]]:
    for number, group in enumerate(manifest.groups):
        known = [params[name] for name in group.names if name in params]
        settings = settings_of(group)
        settings["step"] = _step_text(group.step)
        yield (
            str(number),
            plural(len(group.names), "param"),
            plural(sum(map(_numel, known)), "element"),
            options_text(settings),
        )
    if not manifest.groups:
        yield "none", "", "", "the checkpoint says nothing about the options of its params"


def _param_rows(manifest: Manifest, params: Mapping[str, _Kinds]) -> Iterator[tuple[str, ...]]:
    """Yields one row for params that are alike but for the numbers in their names, such as those of
    layers."""
    groups = dict[str, str]()
    for number, group in enumerate(manifest.groups):
        groups |= dict.fromkeys(group.names, f"group {number}")
    alike: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for name, kinds in params.items():
        pattern = ".".join("#" if part.isdecimal() else part for part in name.split("."))
        shape = next(iter(kinds.values())).shape
        group_text = groups.get(name, "no group")
        alike.setdefault((pattern, shape, group_text, _state_text(kinds)), []).append(name)
    for (_, shape, group_text, state), names in alike.items():
        columns = zip(*(name.split(".") for name in names), strict=True)
        times = f"{len(names)} x " if len(names) > 1 else ""
        nbytes = sum(map(nbytes_of, params[names[0]].values()))
        yield (
            ".".join(map(_column_text, columns)),
            f"{times}{list(shape)}",
            plural(math.prod(shape), "element"),
            size_text(len(names) * nbytes),
            group_text,
            state,
        )


def _state_text(kinds: _Kinds) -> str:
    return ", ".join(f"{kind} {info.dtype}" for kind, info in kinds.items())


def _column_text(parts: tuple[str, ...]) -> str:
    """The parts of alike names at one place, which are numbers or the same word."""
    if parts[0].isdecimal():
        return ranges({*map(int, parts)})
    return parts[0]
