"""`verify`: what it finds in a damaged checkpoint, and which file and param it names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint import MANIFEST, read_manifest
from megatron_distopt.checkpoint.manifest import Chunk, Manifest
from megatron_distopt.checkpoint.source import open_checkpoint, write_checkpoint
from megatron_distopt.cli.show import size_text
from tests.support.checkpoint_commands import (
    EMBEDDING,
    QKV,
    Output,
    cells,
    changed,
    document,
    rewritten,
    run,
)


def test_verify_when_all_is_well_then_what_was_checked_and_status_0(
    whole: Path, capsys: Output
) -> None:
    manifest = read_manifest(whole)
    status, lines, err = run(capsys, "verify", whole)
    checked = {row[1]: row[2] for row in cells(lines) if row[0] == "ok"}
    assert (status, err, lines[-1]) == (0, "", "no problem found: the checkpoint is complete")
    assert checked.keys() == {"files", "metadata", "tensors", "values"}
    assert checked["files"].startswith(f"4 files, {size_text(manifest.nbytes)}")
    assert checked["tensors"].startswith("81 tensors of 27 params")
    assert checked["values"].startswith("7,119 values")


def problems(capsys: Output, folder: Path) -> list[list[str]]:
    """Cells of lines about and the verdict; the status must be 1."""
    status, lines, err = run(capsys, "verify", folder)
    assert (status, err) == (1, "")
    return [row for row in cells(lines[2:]) if row[0] != "ok"]


def chunk_of(manifest: Manifest, key: str, at: int = 0) -> Chunk:
    return manifest.tensors[key].chunks[at]


def test_verify_when_a_byte_of_a_value_changed_then_file_and_param_are_named(
    copied: Path, capsys: Output
) -> None:
    manifest = read_manifest(copied)
    chunk = chunk_of(manifest, f"exp_avg/{QKV}")
    file = manifest.files[chunk.file]
    data = bytearray((copied / file.name).read_bytes())
    stored = data.index(wanted_bytes(copied, f"exp_avg/{QKV}", chunk), chunk.start)
    data[stored] ^= 1
    (copied / file.name).write_bytes(data)
    found = problems(capsys, copied)
    assert found[0][:2] == ["problem", "files"]
    text = re.sub(r"CRC-32 [0-9a-f]{8},", "CRC-32 X,", found[0][2])
    assert text.startswith(f"{file.name} has CRC-32 X, not {file.crc32:08x}; it has a part of ")
    assert [f"{QKV} (main, exp_avg, exp_avg_sq)"] in found
    assert found[-1] == ["1 problem: load an earlier checkpoint"]


#: What happens to `.metadata`; the loader of torch refuses all of them, ours reads none.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "missing": lambda path: path.unlink(),
    "of another checkpoint": lambda path: path.write_bytes(
        path.read_bytes().replace(b"exp_avg/scale", b"exp_avg/scalf")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_when_the_metadata_for_torch_is_damaged_then_it_says_so(
    damage: str, copied: Path, tmp_path: Path, capsys: Output
) -> None:
    DAMAGES[damage](copied / ".metadata")
    found = problems(capsys, copied)
    assert found[0][:2] == ["problem", "metadata"]
    assert found[0][2].startswith(".metadata ") and "torch alone" in found[0][2]
    assert found[-1] == [
        f"1 problem: megatron-distopt convert {copied} NEW --to distopt repairs it"
    ]
    assert run(capsys, "convert", copied, tmp_path / "new", "--to", "distopt")[0] == 0
    assert run(capsys, "verify", tmp_path / "new")[0] == 0


def wanted_bytes(folder: Path, key: str, chunk: Chunk) -> bytes:
    tensor = open_checkpoint(folder).read(key)[chunk.box.as_slices()]
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def test_verify_when_files_are_missing_and_short_then_their_params_are_named(
    copied: Path, capsys: Output
) -> None:
    manifest = read_manifest(copied)
    short, missing = manifest.files[0], manifest.files[2]
    (copied / missing.name).unlink()
    (copied / short.name).write_bytes((copied / short.name).read_bytes()[:1000])
    found = problems(capsys, copied)
    assert found[0][2].startswith(
        f"{short.name} has 1,000 bytes, not {short.nbytes:,}; it has a part of "
    )
    start = found.index(
        ["problem", "files", f"{missing.name} is missing; it has a part of 13 params:"]
    )
    assert found[start + 1] == [
        "decoder.layers.0.input_layernorm.weight (main, exp_avg, exp_avg_sq)"
    ]
    assert found[start + 9 :] == [
        ["and 5 more: --json has all"],
        ["2 problems: load an earlier checkpoint"],
    ]
    status, outcome = document(capsys, "verify", copied)
    listed = outcome["problems"]
    assert (status, outcome["is_whole"], [each["subject"] for each in listed]) == (
        1,
        False,
        [short.name, missing.name],
    )  # type: ignore[attr-defined]
    assert f"main/{EMBEDDING}" in listed[1]["keys"]  # type: ignore[index]


def test_verify_when_a_value_is_not_finite_then_its_place_in_the_whole_tensor(
    copied: Path, capsys: Output
) -> None:
    def spoiled(key: str, tensor: Tensor) -> Tensor:
        if key == f"main/{QKV}":
            tensor[7, 2] = math.nan
        if key == "exp_avg/conv.weight":
            tensor[1:, 3, 4] = -math.inf
        return tensor

    write_checkpoint(copied, changed(open_checkpoint(copied), spoiled))
    conv, qkv, verdict = (row[-1] for row in problems(capsys, copied))
    assert conv.startswith("exp_avg/conv.weight holds -inf at [1, 3, 4], and 2 of ")
    assert qkv == f"main/{QKV} holds nan at [7, 2]"
    assert verdict == "2 problems: load an earlier checkpoint"


def test_verify_when_an_element_is_in_no_file_then_its_tensor_is_named(
    copied: Path, capsys: Output
) -> None:
    tensors = dict(read_manifest(copied).tensors)
    tensors["exp_avg/conv.weight"] = replace(tensors["exp_avg/conv.weight"], shape=(5, 4, 5))
    rewritten(copied, tensors=tensors)
    (area, text), verdict = problems(capsys, copied)[0][1:], problems(capsys, copied)[-1]
    assert (
        area == "tensors"
        and "'exp_avg/conv.weight' is not complete: 60 of its 100 elements" in text
    )
    assert verdict == ["1 problem: load an earlier checkpoint"]


def test_verify_when_the_manifest_is_damaged_then_that_is_the_problem(
    copied: Path, capsys: Output
) -> None:
    """What else is refused of one, such as a param in two groups, is in test_damage.py and
    test_group_values.py."""
    (copied / MANIFEST).write_text("{}", encoding="utf-8")
    status, lines, text = run(capsys, "verify", copied)
    assert (status, lines) == (1, [])
    assert str(copied / MANIFEST) in text and "KeyError('format')" in text
    assert "Load an earlier checkpoint; this one was damaged after it was written." in text
