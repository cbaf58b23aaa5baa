"""`megatron-distopt verify`: reads a whole checkpoint, and says what is wrong in which file and
param."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.folder import check_complete
from megatron_distopt.checkpoint.manifest import Manifest, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import crc_of_file
from megatron_distopt.cli.checkpoints import nbytes_of, open_at, params_text
from megatron_distopt.cli.show import (
    Answer,
    Status,
    more,
    plural,
    progress_of,
    rows,
    size_text,
    titled,
)
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.torch_files import METADATA

#: More problems than this, and more params of a damaged file, are only counted.
_LISTED, _LOST_LISTED = 20, 8
_METADATA_AREA = "metadata"
_Progress = Callable[[int], None]


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint."""

    area: str  # "files", "metadata", "tensors" or "values"
    subject: str  # a file, or the key of a tensor
    text: str  # what is wrong; a sentence that begins with the subject
    keys: tuple[str, ...] = ()  # of the tensors that it is about


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks a whole checkpoint: its files where it is ours, then all values."""
    found = open_at(parsed.checkpoint)
    manifest, tensors = found.manifest, found.source.tensors
    checked, problems = dict[str, str](), list[Problem]()
    with progress_of("verifying", manifest.nbytes + found.nbytes) as progress:
        if found.is_ours:
            text = f"{plural(len(manifest.files), 'file')}, {size_text(manifest.nbytes)}"
            checked["files"] = f"{text}: sizes and checksums are right"
            checked[_METADATA_AREA] = "size and checksum are right, so torch alone can read it"
            problems += _file_problems(found.path, manifest, progress)
        damaged = {key for problem in problems for key in problem.keys}
        whole = {key: info for key, info in tensors.items() if key not in damaged}
        for key, info in whole.items():
            problems += _value_problems(found.source, manifest, key)
            progress(nbytes_of(info))
    num_params = plural(len({name_of(key) for key in tensors}), "param")
    num_values = sum(math.prod(info.shape) for info in whole.values())
    text = f"{plural(len(tensors), 'tensor')} of {num_params}"
    checked["tensors"] = f"{text}: each element has one place"
    checked["values"] = f"{plural(num_values, 'value')}: all finite"
    verdict = "no problem found: the checkpoint is complete"
    if problems:
        remedy = "load an earlier checkpoint"
        if {problem.area for problem in problems} == {_METADATA_AREA}:
            remedy = f"megatron-distopt convert {found.path} NEW --to distopt repairs it"
        verdict = f"{plural(len(problems), 'problem')}: {remedy}"
    document = {
        **found.document,
        "is_whole": not problems,
        "checked": checked,
        "problems": [*map(asdict, problems)],
    }
    parts = [titled("checkpoint", rows(found.rows)), rows(_rows(checked, problems)), Text(verdict)]
    return Answer(document, parts, status=int(bool(problems)))


def _rows(
    checked: Mapping[str, str], problems: Sequence[Problem]
) -> Iterator[tuple[str, str, str]]:
    for area, text in checked.items():
        of_area = [problem for problem in problems if problem.area == area]
        if not of_area:
            yield Status.OK.value, area, text
        for problem in of_area[:_LISTED]:
            lost = params_text(problem.keys if area == "files" else ())
            lines = [f"{problem.subject} {problem.text}", *lost[:_LOST_LISTED]]
            lines += more(len(lost), _LOST_LISTED)
            yield Status.PROBLEM.value, area, "\n".join(lines)
        for line in more(len(of_area), _LISTED):
            yield Status.PROBLEM.value, area, line


def _file_problems(folder: Path, manifest: Manifest, progress: _Progress) -> Iterator[Problem]:
    keys = [dict[str, None]() for _ in manifest.files]
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            keys[chunk.file][key] = None
    for file, of_file in zip(manifest.files, keys, strict=True):
        text = _fault(folder / file.name, file.nbytes, file.crc32)
        if text:
            params = plural(len({name_of(key) for key in of_file}), "param")
            text += f"; it has a part of {params}:"
            yield Problem("files", file.name, text, tuple(of_file))
        progress(file.nbytes)
    text = "has no checksum in the manifest"
    if manifest.metadata is not None:
        text = _fault(folder / METADATA, *manifest.metadata)
    if text:
        text += ", so torch alone cannot rely on it; megatron-distopt does not need it"
        yield Problem(_METADATA_AREA, METADATA, text)


def _fault(path: Path, nbytes: int, crc32: int) -> str:
    """Says what is wrong with a file; empty where bytes and CRC-32 are as wanted."""
    try:
        found_nbytes = path.stat().st_size
        if found_nbytes != nbytes:
            return f"has {found_nbytes:,} bytes, not {nbytes:,}"
        found_crc32 = crc_of_file(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found_crc32 == crc32 else f"has CRC-32 {found_crc32:08x}, not {crc32:08x}"


def _value_problems(source: Source, manifest: Manifest, key: str) -> list[Problem]:
    try:
        if key in manifest.tensors:
            check_complete(replace(manifest, tensors={key: manifest.tensors[key]}))
        tensor = source.read(key)
    except CheckpointError as error:
        return [Problem("tensors", key, f"cannot be read: {error}", (key,))]
    places = non_finite(tensor)
    if not len(places):
        return []
    first = places[0].tolist()
    text = f"holds {tensor[tuple(first)].item()} at {first}"
    if len(places) > 1:
        text += f", and {len(places):,} of its values are not finite"
    return [Problem("values", key, text, (key,))]


def non_finite(tensor: Tensor) -> Tensor:
    """Returns the indices of the elements that are inf or nan, int64 [count, dimensions]."""
    none = torch.empty(0, tensor.dim(), dtype=torch.int64)
    if not tensor.is_floating_point():
        return none
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # A sum shows any inf or nan in one pass without a copy; a sum that overflows is checked again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return none
    return torch.isfinite(wide).logical_not_().nonzero()
