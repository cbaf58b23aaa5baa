"""How the state of a flat param is stored: as plain numbers, in block codes, or as the difference
of a main param to its bf16 param.

[Note: remainder] An fp32 number is the bf16 number to which it rounds plus a difference in units of
its last place, which fits into 16 bits. So the main param is exact fp32 without a second copy of
its upper half. One case does not fit: halfway between two bf16 numbers the difference is +2**15 or
-2**15, depending on which of them is even, and both have the same 16 bits. The second moment is
never negative, so its sign bit stores which of the two it is. (tests/hosts/test_state_precision.py)

Source: `store_param_remainders` of apex's DistributedFusedAdam and of TransformerEngine's
FusedAdam. They round such a tie up instead, so their params differ from rounded fp32 ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.layout.buckets import BLOCK_NUMEL, VECTOR_NUMEL
from megatron_distopt.optimizer.low_precision.block_codes import (
    MAGNITUDE,
    decode,
    encode,
    encode_roots,
    round_to_bf16,
)

_LOWER, _HALF = 1 << 16, 1 << 15
#: By the bytes of a number, the integer type with the same bits and the same sign bit.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class StoredValues(ABC):
    """fp32 values, 1-D, in the form in which they are stored."""

    # whether the values are at least 0, so that sign bits store rounding ties; see [Note:
    # remainder]
    is_unsigned = False

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that store only these values. The first one has an element for each value."""

    @property
    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def is_rounded_at_random(self) -> bool:
        """Whether an update rounds the values at random, if they are a second moment or main param;
        see [Note: stochastic rounding] in block_codes.py."""
        return self.parts[0].dtype in (torch.bfloat16, torch.uint8)

    @abstractmethod
    def read(self, stretch: slice) -> Tensor:
        """Some of the values, fp32 1-D: a view if they are stored as fp32, else a copy."""

    @abstractmethod
    def update(self, stretch: slice, values: Tensor, noise: Tensor | None = None) -> None:
        """Rounds fp32 values of whole blocks, which may be overwritten, and stores them.

        `noise` is int32 of the same shape, random and at least 0, to round at random; None to round
        to nearest. Sign bits that store ties are lost: the update of the main param writes them.
        """

    def write(self, stretch: slice, values: Tensor) -> None:
        """Rounds any fp32 values to nearest and stores them, for writes between steps."""
        around = self.around(stretch)
        whole = self.read(around)
        whole.narrow(0, stretch.start - around.start, values.numel()).copy_(values)
        stored = self.parts[0][around]
        signs = signs_of(stored)
        self.update(around, whole)
        if self.is_unsigned:
            set_signs(stored, signs)

    def around(self, stretch: slice) -> slice:
        """The stretch extended to whole blocks. `stretch` may end after the last value."""
        return slice(stretch.start, min(stretch.stop, self.numel))

    @abstractmethod
    def part(self, stretch: slice) -> StoredValues:
        """Some of the values, which are from now on stored separately. This object must not be used
        any more."""

    @abstractmethod
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor of `parts` with what `move` returns for it. Tensors that show the
        values follow."""


@dataclass(eq=False)
class PlainValues(StoredValues):
    """One number for each value, fp32 or bf16."""

    tensor: Tensor  # 1-D
    is_unsigned: bool = False

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def read(self, stretch: slice) -> Tensor:
        stored = self.tensor[stretch]
        if self.is_unsigned:
            stored = stored.abs()
        return stored.to(torch.float32)

    def update(self, stretch: slice, values: Tensor, noise: Tensor | None = None) -> None:
        stored = self.tensor[stretch]
        if values.data_ptr() == stored.data_ptr():
            return  # `read` returned a view
        if noise is not None and stored.dtype == torch.bfloat16:
            lower = noise & (_LOWER - 1)
            values = round_to_bf16(values, lower)
        stored.copy_(values)

    def part(self, stretch: slice) -> PlainValues:
        return PlainValues(self.tensor[stretch], self.is_unsigned)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.tensor = move(self.tensor)


@dataclass(eq=False)
class BlockValues(StoredValues):
    """A code for each value and a scale for each block; see [Note: block codes] in
    block_codes.py."""

    codes: Tensor  # uint8 1-D
    exponents: Tensor  # uint8 1-D, by block
    phase: int = 0  # number of values in the first block before the first code
    is_unsigned: bool = False  # whether codes are roots, see [Note: roots] in block_codes.py

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents

    def read(self, stretch: slice) -> Tensor:
        codes = self.codes[stretch]
        if self.is_unsigned:
            codes = codes & MAGNITUDE
        head = self._head(stretch)
        decoded = decode(_in_blocks(codes, head), self.exponents[self._blocks(stretch)])
        values = decoded.view(-1).narrow(0, head, codes.numel())
        return values.square_() if self.is_unsigned else values

    def update(self, stretch: slice, values: Tensor, noise: Tensor | None = None) -> None:
        head = self._head(stretch)
        blocks = _in_blocks(values, head)
        if noise is not None:
            noise = _in_blocks(noise.to(torch.int16), head)
        rounded = encode_roots if self.is_unsigned else encode
        codes, exponents = rounded(blocks, noise)
        self.codes[stretch] = codes.view(-1).narrow(0, head, values.numel())
        self.exponents[self._blocks(stretch)] = exponents

    def part(self, stretch: slice) -> BlockValues:
        codes = self.codes[stretch]
        exponents = self.exponents[self._blocks(stretch)].clone()
        return BlockValues(codes, exponents, self._head(stretch), self.is_unsigned)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.codes = move(self.codes)
        self.exponents = move(self.exponents)

    def around(self, stretch: slice) -> slice:
        first = stretch.start - self._head(stretch)
        end_of_block = _num_blocks(stretch.stop + self.phase) * BLOCK_NUMEL
        return slice(max(first, 0), min(end_of_block - self.phase, self.numel))

    def _head(self, stretch: slice) -> int:
        """The number of values in a stretch's first block before the stretch."""
        return int(stretch.start + self.phase) % BLOCK_NUMEL

    def _blocks(self, stretch: slice) -> slice:
        """The blocks that hold values of a stretch."""
        first = (stretch.start + self.phase) // BLOCK_NUMEL
        return slice(first, _num_blocks(stretch.stop + self.phase))


@dataclass(eq=False)
class RemainderValues(StoredValues):
    """A bf16 param and the difference of its fp32 main param to it; see [Note: remainder].

    Only a step may write the param. Values that other code writes to the main param, as a load
    does, are held in fp32 until the next step. Until then they can be compared with the param, like
    every main param."""

    model: Tensor  # bf16 1-D, in the param buffer
    low: Tensor  # int16 1-D
    second: PlainValues | BlockValues  # the second moment, whose sign bits store ties
    held: Tensor | None = None  # fp32 1-D, values that were written since the last step

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.low,) if self.held is None else (self.low, self.held)

    def read(self, stretch: slice) -> Tensor:
        if self.held is not None:
            return self.held[stretch]
        # `low` may have been moved to another device between two steps
        model = self.model[stretch].to(self.low.device)
        ties = signs_of(self.second.parts[0][stretch])
        bits = _upper(model)
        bits.add_(self.low[stretch])
        bits.add_(ties, alpha=_LOWER)
        return bits.view(torch.float32)

    def update(self, stretch: slice, values: Tensor, noise: Tensor | None = None) -> None:
        model = self.model[stretch]
        model.copy_(values)
        bits = values.view(torch.int32)
        differences = bits - _upper(model)
        # NaN may round to another NaN, so the difference means nothing.
        differences.masked_fill_(values.isnan(), 0)
        self.low[stretch] = differences
        is_tie = differences == _HALF
        set_signs(self.second.parts[0][stretch], is_tie)

    def write(self, stretch: slice, values: Tensor) -> None:
        if self.held is None:
            self.held = self.read(slice(0, self.numel))
        self.held[stretch] = values

    def flush(self) -> None:
        """Writes held values into param and remainder, before a step."""
        if self.held is not None:
            values = self.held
            self.held = None
            self.update(slice(0, self.numel), values)

    def part(self, stretch: slice) -> RemainderValues:
        model = self.model[stretch]
        low = self.low[stretch]
        held = None if self.held is None else self.held[stretch]
        return RemainderValues(model, low, self.second.part(stretch), held)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.low = move(self.low)
        if self.held is not None:
            self.held = move(self.held)
        self.second.move(move)  # it holds bits of these values


def _upper(model: Tensor) -> Tensor:
    """The bits of bf16 numbers as the upper halves of int32."""
    bits = model.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16)


def signs_of(stored: Tensor) -> Tensor:
    """The sign bits of numbers or codes, as bool of the same shape."""
    return stored.view(_INTEGERS[stored.element_size()]) < 0


def set_signs(stored: Tensor, signs: Tensor) -> None:
    """Writes the sign bits of numbers or codes in place."""
    bits = stored.view(_INTEGERS[stored.element_size()])
    limits = torch.iinfo(bits.dtype)
    bits.bitwise_and_(limits.max)
    signed = signs.to(bits.dtype)
    signed.mul_(limits.min)
    bits.bitwise_or_(signed)


def _num_blocks(numel: int) -> int:
    """The number of blocks for this many values; the last one may be partly used."""
    return -(-numel // BLOCK_NUMEL)


def _in_blocks(values: Tensor, head: int) -> Tensor:
    """Whole blocks, padded with `head` zeros before the values and with zeros after them; [blocks,
    128]."""
    numel = _num_blocks(head + values.numel()) * BLOCK_NUMEL
    if values.numel() != numel:
        whole = values.new_zeros(numel)
        whole.narrow(0, head, values.numel()).copy_(values)
        values = whole
    return values.view(-1, BLOCK_NUMEL)


def phase_of(stored: StoredValues) -> int:
    """How many values after an aligned address the tensors for these values begin.

    See [Note: in phase] in main_params.py. Blocks are aligned in the same way, so that a vector
    lies in one block. The phase depends only on the layout and not on addresses, because it decides
    which values share a scale."""
    in_blocks, of_each_value = stored, stored.parts[0]
    if isinstance(stored, RemainderValues):
        in_blocks, of_each_value = stored.second, stored.model
    if isinstance(in_blocks, BlockValues):
        return in_blocks.phase
    return int(of_each_value.storage_offset()) % VECTOR_NUMEL


def zeros_in_phase(numel: int, phase: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D zeros that begin at a phase, see `phase_of`."""
    return torch.zeros(phase + numel, dtype=dtype, device=device)[phase:]


def stored_zeros(
    main: StoredValues, form: str, *, is_second: bool = False, has_ties: bool = False
) -> PlainValues | BlockValues:
    """Zeros for each value of a main param; `form` is "float32", "bfloat16" or "int8"."""
    phase = phase_of(main)
    dtype = torch.uint8 if form == "int8" else getattr(torch, form)
    zeros = zeros_in_phase(main.numel, phase, dtype, main.device)
    if form != "int8":
        return PlainValues(zeros, has_ties)
    num_blocks = _num_blocks(phase + main.numel)
    exponents = torch.zeros(num_blocks, dtype=torch.uint8, device=main.device)
    return BlockValues(zeros, exponents, phase, is_second)
