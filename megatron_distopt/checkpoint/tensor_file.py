"""A rank's file: tensors one after the other, each as `torch.save` writes it. That is what torch's
distributed checkpoints (DCP) are made of, so torch alone can read them.

Reading goes through `torch.load(weights_only=True)`, which executes nothing that a file says.

[Note: one checksum] `torch.save` writes a zip archive. It computes the CRC-32 of each part, writes
the part, and behind it a descriptor that begins with that CRC. The CRC of the file is combined from
them: computing it from the bytes again would take as long as writing them. Where torch was told to
leave CRCs out, they are computed here.

A CRC is the remainder of the bytes, as a polynomial over {0, 1}, by a fixed one. To append n bytes
multiplies what was before by x**(8n), so the CRC of the whole follows from those of its parts
without reading the bytes again. zlib's `crc32_combine` gives the same numbers; bit 31 of one is the
coefficient of x**0.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain

#: After so many bytes the disk is told to begin writing.
_PIECE_NBYTES = 8 << 20
#: Bytes that are read at once; they are still in the processor's cache when their checksum is
#: computed.
_CACHED_NBYTES = 1 << 20
#: The checksum of a part of this size or more is not computed again, see [Note: one checksum].
_LARGE_NBYTES = 1 << 20
_DESCRIPTOR = b"PK\x07\x08"
#: The first bytes that `torch.save` writes. torch's older formats are never opened: before 2.6 one
#: of them could execute code in spite of `weights_only`.
_MAGIC = b"PK\x03\x04"
_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorWriter(disk.Writer):
    """Appends tensors to a new file, and collects what the manifest says about it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file)
        self._path = path
        self._nbytes = self._begun_nbytes = self._crc32 = 0
        self._large: memoryview | None = None
        self._tensors: dict[str, TensorRecord] = {}

    def append(
        self,
        key: str,
        tensor: Tensor,
        *,
        shape: tuple[int, ...] | None = None,
        box: Box | None = None,
    ) -> Chunk:
        """Writes one tensor, on any device; a view of a larger tensor is written without the rest
        of it.

        A box of a larger tensor comes with `box` and the `shape` of the whole, in elements.
        """
        start = self._nbytes
        try:
            # `torch.save` calls `write` and `flush` alone
            torch.save(_alone(tensor), self)  # type: ignore[arg-type]
        except Exception as error:
            raise CheckpointError(
                f"Cannot write {key!r} to file {self._path}: {self.error or error}. Free space "
                "there, or save elsewhere; the last checkpoint is untouched."
            ) from error
        chunk = Chunk(
            Box.whole(tensor.shape) if box is None else box, 0, start, self._nbytes - start
        )
        before = self._tensors[key].chunks if key in self._tensors else ()
        whole = tuple(tensor.shape) if shape is None else shape
        self._tensors[key] = TensorRecord(whole, dtype_name(tensor.dtype), (*before, chunk))
        return chunk

    def write(self, data: bytes | memoryview) -> int:
        """Called by `torch.save`."""
        view = memoryview(data).cast("B")
        self._add_large_part(view)
        for start in range(0, len(view), _PIECE_NBYTES):
            self._nbytes += super().write(view[start : start + _PIECE_NBYTES])
            if self._nbytes - self._begun_nbytes >= _PIECE_NBYTES:
                disk.begin_sync(self.file, self._begun_nbytes, self._nbytes - self._begun_nbytes)
                self._begun_nbytes = self._nbytes
        if len(view) >= _LARGE_NBYTES:
            self._large = view
        else:
            self._crc32 = zlib.crc32(view, self._crc32)
        return len(view)

    def _add_large_part(self, following: memoryview) -> None:
        """Adds a large part to the checksum, once the bytes after it are known, see [Note: one
        checksum]."""
        large, self._large = self._large, None
        if large is None:
            return
        if following[:4] == _DESCRIPTOR and torch.serialization.get_crc32_options():
            self._crc32 = joined(self._crc32, int.from_bytes(following[4:8], "little"), len(large))
        else:
            self._crc32 = zlib.crc32(large, self._crc32)

    def part(self, head: Manifest, save_id: str) -> Manifest:
        """The manifest of this file alone; `head` is what it has besides files, tensors and save
        id."""
        record = FileRecord(self._path.name, self._nbytes, self._crc32)
        return replace(head, save_id=save_id, files=(record,), tensors=self._tensors)


def _alone(tensor: Tensor) -> Tensor:
    """The same values in a storage that holds nothing else, because `torch.save` writes whole
    storages.

    A contiguous tensor on the CPU gets a storage of its own over the same memory, for as long as
    `tensor` lives.
    """
    tensor = as_plain(tensor.detach()).cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class TensorReader:
    """Reads tensors from a file; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def read(self, key: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Reads one box of a tensor, of the dtype that the manifest says, to the CPU."""
        what, remedy = (
            f"Tensor {key!r} in {self._path}",
            "Load an earlier checkpoint; this file is damaged.",
        )
        try:
            stretch: Any = _Slice(self._file, chunk.start, chunk.nbytes)
            magic = stretch.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ValueError(f"it begins with {magic!r}, with which torch.save never begins")
            stretch.seek(0)
            tensor = torch.load(stretch, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's text would recommend to execute the file
            raise CheckpointError(
                f"{what} is not one plain tensor, and reading it must not execute anything. "
                f"{remedy}"
            ) from error
        except Exception as error:  # whatever damaged bytes make torch raise
            raise CheckpointError(f"{what} cannot be read: {error}. {remedy}") from error
        if (
            not torch.is_tensor(tensor)
            or tuple(tensor.shape) != chunk.box.sizes
            or tensor.dtype != dtype
        ):
            got = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if torch.is_tensor(tensor)
                else type(tensor).__name__
            )
            raise CheckpointError(
                f"{what} is {got}, and must be {dtype} {list(chunk.box.sizes)} as the manifest "
                f"says. {remedy}"
            )
        return tensor


class _Slice(io.RawIOBase):
    """A stretch of a file that can be read like a file."""

    def __init__(self, file: io.FileIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._position = file, start, nbytes, 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer: torch takes fewer bytes for damage, and Linux reads at most 2 GiB at
        once."""
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        self._file.seek(self._start + self._position)
        done = 0
        while done < len(view) and (count := self._file.readinto(view[done:])):
            done += count
        self._position += done
        return done


def crc_of_file(path: Path) -> int:
    crc32 = 0
    piece = memoryview(bytearray(_CACHED_NBYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc32 = zlib.crc32(piece[:count], crc32)
    return crc32


def joined(before: int, after: int, nbytes: int) -> int:
    """CRC-32 of two stretches of bytes, from that of each and the number of bytes of the second.

    >>> import zlib
    >>> joined(zlib.crc32(b"data-"), zlib.crc32(b"parallel"), 8) == zlib.crc32(b"data-parallel")
    True
    """
    return _product(_power(8 * nbytes), before) ^ after


def _product(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)  # times x
    return product


@cache
def _power(exponent: int) -> int:
    """The remainder of x**exponent. It is cached, because the tensors of a model have few sizes."""
    if exponent < 2:
        return _X if exponent else _ONE
    half = _power(exponent // 2)
    square = _product(half, half)
    return _product(square, _X) if exponent % 2 else square


def bits_of(values: Tensor) -> Tensor:
    """The bits of each element as an integer: nan equals nan, and -0.0 differs from 0.0."""
    return values.view(_INTEGERS[values.element_size()])
