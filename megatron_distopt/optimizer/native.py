"""State in other forms than fp32, read and written in one pass by a CPU; see native_codes.c.

`library` returns the functions, or None where torch's operators do the same with the same bits: on other devices, and
where no C compiler is. Before they are trusted they are compared with these operators on known values.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import CDLL, Structure, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_distopt.device import CPU
from megatron_distopt.layout.estimate import BLOCK_NUMEL
from megatron_distopt.optimizer import codes as torch_codes
from megatron_distopt.optimizer.codes import CODES, Code
from megatron_distopt.optimizer.native_build import CannotBuild, load

_log = logging.getLogger("megatron_distopt")

#: Fewer elements than this are not worth another thread.
_LEAST_OF_A_THREAD = 1 << 13
#: Tensors whose memory is what it seems to be; a subclass may be anything.
_PLAIN = (Tensor, torch.nn.Parameter)
#: fp32 numbers in a cache line.
_LINE = 16
#: Gives fp32 memory of a CPU for a number of values.
Out = Callable[[int], Tensor]
_NOT_USED = "optimizer state on the CPU is converted by torch's operators, which is slower: %s"


class Form(Structure):
    """`Form` of native_codes.c."""

    _fields_ = [(name, c_int32) for name in ("nbytes", "shift", "top", "is_root", "has_ties")]


@cache
def form_of(code: Code, is_root: bool, has_ties: bool) -> Form:
    """How codes are read and made."""
    return Form(code.storage.itemsize, code.shift, code.top, is_root, has_ties)


#: The types of the arguments, of which the last is always the number of threads.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "decode": (c_void_p, c_void_p, Form, c_int64, c_void_p, c_int64),
    "encode": (c_void_p, c_void_p, Form, c_int64, c_void_p, c_void_p, c_int64),
    "read_plain": (c_void_p, c_int32, c_int32, c_void_p, c_int64),
    "write_plain": (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int64),
    "read_remainder": (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int64),
    "update_remainder": (c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64),
    "random_bits": (c_void_p, c_int64, c_uint32, c_uint32),
    "adam": (*(c_void_p,) * 5, c_int64, c_int64),
}


class Native:
    """The functions of native_codes.c and native_adam.c, on 1-D tensors that `library` has approved.

    Args:
        loaded: the library.
    """

    def __init__(self, loaded: CDLL) -> None:
        for name, types in _SIGNATURES.items():
            function = getattr(loaded, f"distopt_{name}")
            function.argtypes, function.restype = (*types, c_int32), None
            setattr(self, f"_{name}", function)

    _decode: Any
    _encode: Any
    _read_plain: Any
    _write_plain: Any
    _read_remainder: Any
    _update_remainder: Any
    _random_bits: Any
    _adam: Any

    def decode(self, codes: Tensor, exponents: Tensor, code: Code, *, head: int, is_root: bool, out: Tensor) -> Tensor:
        """Reads neighbouring values.

        Args:
            codes: of the values.
            exponents: of their blocks.
            code: that they were encoded with.
            head: how many values of the first block lie before them.
            is_root: whether codes are of the root, and their signs those of somebody else.
            out: fp32, for the values.

        Returns:
            `out`.
        """
        form, numel = form_of(code, is_root, False), out.numel()
        self._decode(codes.data_ptr(), exponents.data_ptr(), form, head, out.data_ptr(), numel, _threads(numel))
        return out

    def encode(
        self,
        values: Tensor,
        noise: Tensor | None,
        codes: Tensor,
        exponents: Tensor,
        code: Code,
        *,
        head: int,
        is_root: bool,
        has_ties: bool,
    ) -> None:
        """Rounds values to codes, the inverse of `decode`.

        Args:
            values: fp32; whole blocks but at the ends of the state.
            noise: int32 random bits for every value, or None to round to nearest.
            codes, exponents: written.
            code, head, is_root: see `decode`.
            has_ties: whether the signs of the codes stay as they are.
        """
        form, numel = form_of(code, is_root, has_ties), values.numel()
        pointers = _pointer(noise), form, head, codes.data_ptr(), exponents.data_ptr()
        self._encode(values.data_ptr(), *pointers, numel, _threads(numel))

    def read_plain(self, kept: Tensor, *, has_ties: bool, out: Tensor) -> Tensor:
        """Reads fp32 or bf16 numbers as fp32, without their signs if these are ties."""
        numel = out.numel()
        self._read_plain(kept.data_ptr(), kept.element_size(), has_ties, out.data_ptr(), numel, _threads(numel))
        return out

    def write_plain(self, values: Tensor, noise: Tensor | None, kept: Tensor, *, has_ties: bool) -> None:
        """Rounds to fp32 or bf16 numbers; those keep their signs if these are ties."""
        numel, nbytes = values.numel(), kept.element_size()
        pointers = values.data_ptr(), _pointer(noise)
        self._write_plain(*pointers, nbytes, has_ties, kept.data_ptr(), numel, _threads(numel))
        increment_version(kept)

    def read_remainder(self, model: Tensor, low: Tensor, second: Tensor, out: Tensor) -> Tensor:
        """Reads fp32 main params from bf16 params, their remainders and the signs of a second moment."""
        pointers, numel = (model.data_ptr(), low.data_ptr(), second.data_ptr()), out.numel()
        self._read_remainder(*pointers, second.element_size(), out.data_ptr(), numel, _threads(numel))
        return out

    def update_remainder(self, values: Tensor, model: Tensor, low: Tensor, second: Tensor) -> None:
        """The inverse of `read_remainder`."""
        pointers, numel = (model.data_ptr(), low.data_ptr(), second.data_ptr()), values.numel()
        self._update_remainder(values.data_ptr(), *pointers, second.element_size(), numel, _threads(numel))
        increment_version(model)

    def random_bits(self, start: int, count: int, salt: int, out: Tensor) -> Tensor:
        """See `random_bits` in codes.py; `out` is int32, one for each element."""
        numel = out.numel()
        self._random_bits(out.data_ptr(), numel, start & 0xFFFFFFFF, seed_of(count, salt), _threads(numel))
        return out

    def adam(self, update: Structure, kept: Sequence[Structure], grad: Tensor, head: int) -> None:
        """Updates a flat param; see native_adam.py.

        Args:
            update: the numbers of this update.
            kept: how main param and moments are kept.
            grad: fp32; divided in place.
            head: values of the first block that are not its own.
        """
        pointers, numel = (ctypes.addressof(each) for each in (update, *kept)), grad.numel()
        self._adam(*pointers, grad.data_ptr(), head, numel, _threads(numel))


def seed_of(count: int, salt: int) -> int:
    """What is added to the numbers of elements; see `random_bits` in codes.py."""
    return (count * 0xC2B2AE35 + salt * 0x27D4EB2F) & 0xFFFFFFFF


def memory(numel: int) -> Tensor:
    """Memory of a CPU for some values."""
    return torch.empty(numel, dtype=torch.float32)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(numel: int) -> int:
    return max(1, min(torch.get_num_threads(), numel // _LEAST_OF_A_THREAD))


def library(*tensors: Tensor | None) -> Native | None:
    """The functions, if they can be used on all of some tensors; None where torch's operators have to be."""
    for each in tensors:
        if each is not None and (type(each) not in _PLAIN or each.device.type != CPU or not each.is_contiguous()):
            return None
    return _library()


class Scratch:
    """Memory that stretches use one after the other, so that it stays in the cache of a CPU and is not allocated anew.

    Args:
        numel: most fp32 values that are in use at once; more of them are allocated.
    """

    def __init__(self, numel: int) -> None:
        self._memory = torch.empty(numel, dtype=torch.float32)
        self._used = 0

    def take(self, numel: int) -> Tensor:
        """Some of it, fp32 [numel], until `give_back`."""
        start, self._used = self._used, self._used + -(-numel // _LINE) * _LINE
        taken = self._memory[start : start + numel]
        return taken if taken.numel() == numel else torch.empty(numel, dtype=torch.float32)

    def give_back(self) -> None:
        """Ends the use of all that was taken."""
        self._used = 0


def random_bits(start: int, numel: int, count: Tensor, salt: int, out: Out = memory) -> Tensor:
    """See `random_bits` in codes.py, which this is on every device; `out` is as in `Kept.read`."""
    native = library(count)
    if native is None:
        return torch_codes.random_bits(start, numel, count, salt)
    return native.random_bits(start, int(count), salt, out(numel).view(torch.int32))


@cache
def _library() -> Native | None:
    """Loads and tries the library, once in a process."""
    try:
        native = Native(load())
    except (CannotBuild, AttributeError) as error:
        _log.info(_NOT_USED, error)
        return None
    if wrong := next((name for name, is_right in _tried(native).items() if not is_right), None):
        _log.info(_NOT_USED, f"the compiled functions give other numbers for {wrong}")
        return None
    return native


def _tried(native: Native) -> dict[str, bool]:
    """Whether each function gives the numbers that torch's operators give for values of all sizes."""
    values = torch.arange(-512.0, 512.0).mul_(1.001).exp2_().clamp_(2.0**-140, 2.0**100)
    values = values.view(8, -1).t().reshape(-1)[::2].contiguous()
    values[::3].neg_()
    values[:2] = torch.tensor([0.0, 1.0 + 2.0**-8])  # nothing, and halfway between two bf16 numbers
    noise = torch_codes.random_bits(7, values.numel(), torch.tensor(3.0), 5)
    right = {name: _encodes(native, values, noise, code) for name, code in CODES.items()}
    right["random bits"] = torch.equal(native.random_bits(7, 3, 5, torch.empty_like(noise)), noise)
    right["bfloat16"] = _rounds_to_bf16(native, values, noise & 0xFFFF)
    right["remainder"] = _splits(native, values)
    return right


def _encodes(native: Native, values: Tensor, noise: Tensor, code: Code) -> bool:
    """Signed to nearest, and roots at random."""
    right = True
    for random, is_root in ((None, False), (noise, True)):
        given = values.abs() if is_root else values
        blocks = (torch_codes.root_of(given) if is_root else given.clone()).view(-1, BLOCK_NUMEL)
        short = None if random is None else random.to(torch.int16).view_as(blocks)
        wanted, scales = torch_codes.encode(blocks, code, short)
        if is_root:
            wanted.add_((wanted == 0) & (blocks > 0))
        read = torch_codes.decode(wanted, scales, code).view(-1)
        made, exponents, out = torch.empty_like(wanted), torch.empty_like(scales), torch.empty_like(given)
        native.encode(given, random, made, exponents, code, head=0, is_root=is_root, has_ties=False)
        native.decode(made, exponents, code, head=0, is_root=is_root, out=out)
        right = right and torch.equal(made, wanted) and torch.equal(exponents, scales)
        right = right and torch.equal(out, read.square() if is_root else read)
    return right


def _rounds_to_bf16(native: Native, values: Tensor, noise: Tensor) -> bool:
    made = torch.empty(values.numel(), dtype=torch.bfloat16)
    native.write_plain(values, noise, made, has_ties=False)
    at_random = torch.equal(made, torch_codes.round_to_bf16(values, noise))
    native.write_plain(values, None, made, has_ties=False)
    read = native.read_plain(made, has_ties=False, out=torch.empty_like(values))
    return at_random and torch.equal(made, values.to(torch.bfloat16)) and torch.equal(read, made.to(torch.float32))


def _splits(native: Native, values: Tensor) -> bool:
    model, low = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    right = True
    for dtype in (torch.uint8, torch.int16, torch.float32):
        second = torch.zeros(values.numel(), dtype=dtype)
        native.update_remainder(values, model, low, second)
        read = native.read_remainder(model, low, second, torch.empty_like(values))
        right = right and torch.equal(read, values) and torch.equal(model, values.to(torch.bfloat16))
    return right
