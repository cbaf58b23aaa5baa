"""Checksums of parts put together, and that of a rank's file, which is put together from what torch
computed."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import FileRecord, Manifest
from megatron_distopt.checkpoint.tensor_file import TensorWriter, crc_of_file, joined
from megatron_distopt.layout import Box

LARGE = 1 << 18  # elements of fp32: the least that is not read for its checksum

TENSORS = {
    "nothing": torch.zeros(0),
    "small": torch.arange(5.0),
    "one element less than large": torch.arange(LARGE - 1.0),
    "large": torch.arange(LARGE + 0.0),
    "several pieces": torch.arange(5.0 * (1 << 20)).view(1024, -1),
    "a view": torch.arange(4.0 * LARGE).view(4, -1)[1:3],
    "16 bits": torch.arange(4.0 * LARGE).bfloat16(),
}


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_joined_when_there_are_two_parts_then_it_is_the_checksum_of_both(
    before: bytes, after: bytes
) -> None:
    assert joined(zlib.crc32(before), zlib.crc32(after), len(after)) == zlib.crc32(before + after)


def test_joined_when_more_than_4_gib_follow_then_it_is_the_same_in_two_halves() -> None:
    half = (1 << 33) + 5
    assert joined(joined(7, 0, half), 0, half) == joined(7, 0, 2 * half)


@pytest.fixture(params=[True, False], ids=["checksums by torch", "none by torch"])
def _by_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(request.param)
    yield
    torch.serialization.set_crc32_options(before)


def _written(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    with disk.written(path) as file:
        writer = TensorWriter(path, file)
        for key, tensor in tensors.items():
            # there is none of an empty tensor, and the bytes have none
            writer.append(key, tensor, box=Box((), ()))
    head = Manifest(save_id="", files=(), tensors={}, groups=(), inner="")
    return writer.part(head, "01234567").files[0]


@pytest.mark.usefixtures("_by_torch")
def test_file_when_it_holds_tensors_then_its_checksum_is_that_of_its_bytes(tmp_path: Path) -> None:
    for number, tensors in enumerate(
        (TENSORS, *({name: tensor} for name, tensor in TENSORS.items()))
    ):
        path = tmp_path / f"{number}"
        record = _written(path, tensors)
        crc32 = zlib.crc32(path.read_bytes())
        assert record == FileRecord(path.name, path.stat().st_size, crc32)
        assert crc_of_file(path) == crc32


def test_file_when_another_reader_of_archives_checks_it_then_it_finds_no_fault(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    _written(path, {"large": TENSORS["large"]})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
