"""The memory of the simulated device: it is the CPU's, and torch takes it for the device's.

A block that is freed goes back to the stream that allocated it, which overwrites it, at once and
once more later: behind what is queued there, and behind what was queued on streams of which
`record_stream` told the allocator. So a read of freed memory, or of memory that was never written,
gives NaN.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from tests.support.sim.machine import SimError, Stream, machine

#: NaN in every floating dtype, -1 in integers.
_GARBAGE = 0xFF
#: What DLPack calls a device that it does not know, and dtypes.
_EXTENSION = 12
_KINDS = {torch.bool: 6, torch.bfloat16: 4, torch.uint8: 1}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Dtype(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


#: What torch calls with the address of a `_Managed` when it frees the tensor: a function of the C
#: library that writes a number there, over the address of the data. Python cannot be called then:
#: an exception may be on its way.
_MARK_AS_FREED = ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p).value
#: Most tensors that torch may hold at a time, and the 64-bit words of a `_Managed`.
_NUM_SLOTS, _SLOT_WORDS = 1 << 16, ctypes.sizeof(_Managed) // 8
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(eq=False)
class Block:
    """Memory of one allocation."""

    memory: Tensor  # uint8, of the CPU
    stream: Stream  # that allocated it
    nbytes: int  # of the tensor
    # other streams that the allocator was told of
    readers: set[Stream] = field(default_factory=set)
    kept: tuple[object, ...] = ()  # what torch's tensor points at

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class Memory:
    """All blocks, and how much they are."""

    def __init__(self) -> None:
        self._by_address: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._slots = np.zeros((_NUM_SLOTS, _SLOT_WORDS), dtype=np.uint64)
        #: The address in every slot; another one is there once torch has freed the tensor.
        self._lent = np.zeros(_NUM_SLOTS, dtype=np.uint64)
        self._num_slots = 0
        self._free_slots: list[int] = []
        self._in_slot: dict[int, Block] = {}
        self.held, self.peak = 0, 0

    def allocate(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of the device, full of garbage."""
        self.collect()
        numel = (
            0
            if 0 in shape
            else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        )
        # One byte at least, so that addresses differ, and 64 so that they are aligned as those of a
        # device are.
        memory = torch.empty(max(numel * dtype.itemsize, 1) + 512, dtype=torch.uint8).fill_(
            _GARBAGE
        )
        memory = memory[-memory.data_ptr() % 512 :]
        block = Block(memory, machine.current, numel * dtype.itemsize)
        managed = self._lend(block)
        c_shape, c_strides = (
            (ctypes.c_int64 * len(shape))(*shape),
            (ctypes.c_int64 * len(shape))(*strides),
        )
        kind = _KINDS.get(dtype, 2 if dtype.is_floating_point else 5 if dtype.is_complex else 0)
        device, described = _Device(_EXTENSION, 0), _Dtype(kind, dtype.itemsize * 8, 1)
        managed.tensor = _Tensor(
            block.address, device, len(shape), described, c_shape, c_strides, 0
        )
        managed.deleter = _MARK_AS_FREED
        block.kept = (c_shape, c_strides)
        self._by_address[block.address] = block
        insort(self._addresses, block.address)
        self.held += block.nbytes
        self.peak = max(self.peak, self.held)
        made: Tensor = torch._C._from_dlpack(
            _new_capsule(ctypes.addressof(managed), b"dltensor", None)
        )
        return made

    def _lend(self, block: Block) -> _Managed:
        """A slot for what torch is told of a block."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._in_slot[slot], self._lent[slot] = block, block.address
        self._slots[slot, 0] = block.address
        return _Managed.from_address(self._slots.ctypes.data + slot * ctypes.sizeof(_Managed))

    def collect(self) -> None:
        """Gives what torch has freed back to its streams."""
        with machine.lock:
            is_freed = self._slots[: self._num_slots, 0] != self._lent[: self._num_slots]
            if not is_freed.any():
                return
            freed = is_freed.nonzero()[0]
            blocks = [self._in_slot.pop(slot) for slot in freed.tolist()]
            self._lent[freed] = self._slots[freed, 0] = 0
            self._free_slots += freed.tolist()
        for block in blocks:
            del self._by_address[block.address]
            self._addresses.remove(block.address)
            self.held -= block.nbytes
            after = [stream.now for stream in block.readers if stream is not block.stream]
            fill = lambda memory=block.memory: void(memory.fill_(_GARBAGE))  # noqa: E731
            machine.launch("reuse", fill, after, on=block.stream)
            machine.launch("reuse later", fill, [block.stream.now], on=machine.later)

    def block_of(self, tensor: Tensor) -> Block:
        address = tensor.untyped_storage().data_ptr()
        at = bisect_right(self._addresses, address) - 1
        block = self._by_address.get(self._addresses[at]) if at >= 0 else None
        if block is None or address >= block.address + max(block.memory.numel(), 1):
            raise SimError(f"a tensor of {tuple(tensor.shape)} lies outside of the device's memory")
        return block

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor of the CPU; it may be read and written when the device
        does."""
        like = torch.empty(0, dtype=tensor.dtype)
        if not tensor.untyped_storage().nbytes():
            return like.new_empty(tensor.shape)
        block = self.block_of(tensor)
        in_block = tensor.untyped_storage().data_ptr() - block.address
        storage = block.memory.untyped_storage()
        in_storage = block.memory.storage_offset() + in_block
        offset = in_storage // tensor.dtype.itemsize + tensor.storage_offset()
        return like.set_(storage, offset, tensor.shape, tensor.stride())

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.block_of(tensor).readers.add(stream)

    def reset_peak(self) -> None:
        self.collect()
        self.peak = self.held


def void(_: object) -> None:
    """Makes a statement of an expression."""


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[at + 1 :]) for at in range(len(shape))]


memory = Memory()
