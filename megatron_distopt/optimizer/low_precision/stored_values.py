"""How the state of a flat param is stored: plainly, in block codes, or as what a bf16 param lacks
of its main param.

[Note: remainder] An fp32 number is the bf16 number that it rounds to and a difference that 16 bits
hold, counted in units of its last place: exact fp32 without a second copy of the upper half. One
case does not fit: halfway between two bf16 numbers the difference is +2**15 or -2**15, by whichever
of them is even, and both have the same 16 bits. The second moment is never negative, so its sign
bit stores which of the two it is. (tests/hosts/test_state_precision.py)

Source: `store_param_remainders` of apex's DistributedFusedAdam and of TransformerEngine's
FusedAdam, which round such a half up instead, so that their params differ from rounded fp32 ones.
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
    SIGN,
    decode,
    encode,
    random_bits,
    root_of,
    round_to_bf16,
)

_LOWER, _HALF = 1 << 16, 1 << 15


class StoredValues(ABC):
    """fp32 values, 1-D, in the form in which they are stored."""

    # whether `read` returns a view, so that nothing needs to be written back
    is_read_in_place = False
    is_rounded_at_random = False  # by an update; see [Note: stochastic rounding] in block_codes.py

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """What is in memory for these values alone; the first one has an element for each value."""

    @property
    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Some of the values, fp32 [stop - start]: a view where they are stored so, and else a
        copy."""

    @abstractmethod
    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Rounds fp32 values [stop - start], which may be overwritten, to the form.

        `noise` is int32 of the same shape, random and at least 0, to round at random; None to round
        to nearest.
        """

    def update(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        """As `write`, at the end of a step, in which the model param may be written as well."""
        if not self.is_read_in_place:
            self.write(start, stop, values, noise if self.is_rounded_at_random else None)

    @abstractmethod
    def part(self, start: int, stop: int) -> StoredValues:
        """Some of the values, to be stored by themselves from now on; the whole is not to be used
        any more."""

    @abstractmethod
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces every part of the memory by what a function makes of it; tensors that show the
        values follow."""

    def end_of_stretch(self, start: int, numel: int) -> int:
        """Where a stretch of about `numel` values from `start` should end, so that no block is
        cut."""
        return min(start + numel, self.numel)


@dataclass(eq=False)
class PlainValues(StoredValues):
    """One number for each value, of any dtype."""

    tensor: Tensor  # 1-D
    # the signs are not those of the values, which are at least 0; see [Note: remainder]
    has_ties: bool = False

    def __post_init__(self) -> None:
        self.is_read_in_place = self.tensor.dtype == torch.float32 and not self.has_ties
        self.is_rounded_at_random = self.tensor.dtype == torch.bfloat16

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def read(self, start: int, stop: int) -> Tensor:
        stored = self.tensor[start:stop]
        if self.has_ties:
            stored = stored.abs()
        return stored.to(torch.float32)

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        stored = self.tensor[start:stop]
        if noise is not None and stored.dtype == torch.bfloat16:
            lower = noise.bitwise_and(_LOWER - 1)
            values = round_to_bf16(values, lower)
        if self.has_ties:
            values = values.to(stored.dtype).copysign_(stored)
        stored.copy_(values)

    def part(self, start: int, stop: int) -> PlainValues:
        return PlainValues(self.tensor[start:stop], self.has_ties)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.tensor = move(self.tensor)

    def ties(self, start: int, stop: int) -> Tensor:
        """bool [stop - start]: the sign bits."""
        return self.tensor[start:stop].signbit()

    def set_ties(self, start: int, stop: int, ties: Tensor) -> None:
        stored = self.tensor[start:stop]
        stored.abs_()
        signed = torch.where(ties, -stored, stored)
        stored.copy_(signed)


@dataclass(eq=False)
class BlockValues(StoredValues):
    """A code for each value and a scale for each block; see [Note: block codes] in
    block_codes.py."""

    codes: Tensor  # uint8 1-D
    exponents: Tensor  # uint8 1-D, by block
    phase: int = 0  # values of the first block that belong to others, and are not in `codes`
    is_root: bool = False  # codes are of the root; see [Note: roots] in block_codes.py
    has_ties: bool = False  # see `PlainValues`

    def __post_init__(self) -> None:
        self.is_rounded_at_random = self.is_root

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents

    def read(self, start: int, stop: int) -> Tensor:
        blocks, head = self._blocks(start, stop)
        codes = self.codes[start:stop]
        if self.is_root:
            codes = codes & MAGNITUDE
        padded = _padded(codes, head, len(blocks))
        exponents = self.exponents[blocks.start : blocks.stop]
        decoded = decode(padded, exponents).view(-1)
        values = decoded[head : head + stop - start]
        if self.is_root:
            values.square_()
        return values

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        first, last = self._whole(start, stop)
        # the scale of a block that is cut may become another one
        if (first, last) != (start, stop):
            around = self.read(first, last)
            around[start - first : stop - first] = values
            self.write(first, last, around)
            return
        blocks, head = self._blocks(start, stop)
        short = None
        if noise is not None:
            short = _padded(noise.to(torch.int16), head, len(blocks))
        padded = _padded(values, head, len(blocks))
        padded = root_of(padded) if self.is_root else padded.clone()
        codes, exponents = encode(padded, short)
        if self.is_root:
            is_lost = (codes == 0) & (padded > 0)
            codes.add_(is_lost)  # the smallest code
        flat = codes.view(-1)
        codes = flat[head : head + stop - start]
        stored = self.codes[start:stop]
        if self.has_ties:
            codes = codes | (stored & SIGN)
        stored.copy_(codes)
        self.exponents[blocks.start : blocks.stop] = exponents

    def part(self, start: int, stop: int) -> BlockValues:
        blocks, head = self._blocks(start, stop)
        codes = self.codes[start:stop]
        exponents = self.exponents[blocks.start : blocks.stop].clone()
        return BlockValues(codes, exponents, head, self.is_root, self.has_ties)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.codes = move(self.codes)
        self.exponents = move(self.exponents)

    def ties(self, start: int, stop: int) -> Tensor:
        signs = self.codes[start:stop] & SIGN
        return signs != 0

    def set_ties(self, start: int, stop: int, ties: Tensor) -> None:
        signs = ties.to(torch.uint8) * SIGN
        codes = self.codes[start:stop]
        codes.bitwise_and_(MAGNITUDE)
        codes.bitwise_or_(signs)

    def end_of_stretch(self, start: int, numel: int) -> int:
        stop = min(start + numel, self.numel)
        _, end = self._whole(start, stop)
        return end

    def _blocks(self, start: int, stop: int) -> tuple[range, int]:
        """The blocks with some values, and how many values of the first one lie before."""
        first, head = divmod(start + self.phase, BLOCK_NUMEL)
        return range(first, _num_blocks(stop + self.phase)), head

    def _whole(self, start: int, stop: int) -> tuple[int, int]:
        """All values of the blocks with some values."""
        blocks, _ = self._blocks(start, stop)
        first = blocks.start * BLOCK_NUMEL - self.phase
        last = blocks.stop * BLOCK_NUMEL - self.phase
        return max(first, 0), min(last, self.numel)


@dataclass(eq=False)
class RemainderValues(StoredValues):
    """A bf16 param and what it lacks of its fp32 main param; see [Note: remainder].

    Only a step may write the param. What others write to the main param, as by loading it, is held
    in fp32 until the next step, so that it can be compared with the param until then, as every main
    param is.
    """

    model: Tensor  # bf16 1-D, in the param buffer
    low: Tensor  # int16 1-D
    second: PlainValues | BlockValues  # the second moment, whose sign bits are used
    held: Tensor | None = None  # fp32 1-D, what others have written since the last step

    @property
    def parts(self) -> tuple[Tensor, ...]:
        if self.held is None:
            return (self.low,)
        return self.low, self.held

    def read(self, start: int, stop: int) -> Tensor:
        if self.held is not None:
            return self.held[start:stop]
        # which may have moved away between two steps
        model = self.model[start:stop].to(self.low.device)
        bits = _upper(model)
        bits.add_(self.low[start:stop])
        ties = self.second.ties(start, stop)
        bits.add_(ties, alpha=_LOWER)
        return bits.view(torch.float32)

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        if self.held is None:
            self.held = self.read(0, self.numel)
        self.held[start:stop].copy_(values)

    def settle(self) -> None:
        """Before a step: puts what is held into param and remainder."""
        if self.held is not None:
            values = self.held
            self.held = None
            self.update(0, self.numel, values)

    def update(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        model = self.model[start:stop]
        model.copy_(values)
        bits = values.view(torch.int32)
        differences = bits - _upper(model)
        # NaN rounds to another NaN; there is nothing to add.
        differences.masked_fill_(values.isnan(), 0)
        self.low[start:stop] = differences
        is_tie = differences == _HALF
        self.second.set_ties(start, stop, is_tie)

    def part(self, start: int, stop: int) -> RemainderValues:
        model = self.model[start:stop]
        low = self.low[start:stop]
        second = self.second.part(start, stop)
        held = None if self.held is None else self.held[start:stop]
        return RemainderValues(model, low, second, held)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.low = move(self.low)
        if self.held is not None:
            self.held = move(self.held)
        self.second.move(move)  # it holds bits of these values

    def end_of_stretch(self, start: int, numel: int) -> int:
        return self.second.end_of_stretch(start, numel)


@dataclass(frozen=True, eq=False)
class ParamUpdate:
    """A flat param that is updated in this step, with its state as it is stored."""

    place: int  # of the first value in its buffer, for random bits
    group: int  # index of its param group
    main: StoredValues
    first: StoredValues  # moment
    second: StoredValues  # moment
    grad: Tensor  # fp32 1-D
    step: Tensor  # count of updates
    model: Tensor | None  # what the main param is rounded into, if it does not write it by itself

    @property
    def state(self) -> tuple[StoredValues, StoredValues, StoredValues]:
        return self.main, self.first, self.second

    def write(self, start: int, stop: int, main: Tensor, first: Tensor, second: Tensor) -> None:
        """Rounds fp32 values [stop - start] into the stored state, and those of the main param into
        the model param."""
        noise = None
        if self.main.is_rounded_at_random or self.second.is_rounded_at_random:
            count = self.step.to(self.grad.device)
            noise = random_bits(self.place + start, stop - start, count)
        self.first.update(start, stop, first)
        self.second.update(start, stop, second, noise)
        if noise is not None and self.main.is_rounded_at_random:
            noise = noise >> 15  # other bits than those of the second moment
        # the last one: it may write the sign bits of the second moment
        self.main.update(start, stop, main, noise)
        if self.model is not None:
            # What is stored is rounded, not what was computed, so that a checkpoint gives the same
            # model param.
            self.model[start:stop] = self.main.read(start, stop)


def _upper(model: Tensor) -> Tensor:
    """bf16 as the upper halves of int32."""
    upper = model.view(torch.int16)
    bits = upper.to(torch.int32)
    return bits.bitwise_left_shift_(16)


def _num_blocks(numel: int) -> int:
    """Blocks that hold so many values, the last one perhaps in part."""
    return -(-numel // BLOCK_NUMEL)


def _padded(values: Tensor, head: int, num_blocks: int) -> Tensor:
    """Whole blocks, with zeros around the values; [num_blocks, 128]."""
    numel = num_blocks * BLOCK_NUMEL
    if values.numel() != numel:
        whole = values.new_zeros(numel)
        whole[head : head + values.numel()] = values
        values = whole
    return values.view(num_blocks, BLOCK_NUMEL)


def phase_of(stored: StoredValues) -> int:
    """What is allocated for every value begins so many values behind an address that is aligned.

    See [Note: in phase] in main_params.py. Scales of blocks begin there as well, so that a vector
    is in one block. It follows from the layout alone, not from addresses, because it decides which
    values have one scale.
    """
    in_blocks, of_each_value = stored, stored.parts[0]
    if isinstance(stored, RemainderValues):
        in_blocks, of_each_value = stored.second, stored.model
    if isinstance(in_blocks, BlockValues):
        return in_blocks.phase
    return int(of_each_value.storage_offset()) % VECTOR_NUMEL


def zeros_in_phase(numel: int, phase: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D, see `phase_of`."""
    whole = torch.zeros(phase + numel, dtype=dtype, device=device)
    return whole[phase:]


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
    return BlockValues(zeros, exponents, phase, is_root=is_second, has_ties=has_ties)
