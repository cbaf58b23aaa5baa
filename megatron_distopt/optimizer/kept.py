"""How the state of a flat param is kept: plainly, as block codes, or as what a bf16 param lacks of its main param.

[Note: remainder] An fp32 number is the bf16 number that it rounds to and a difference that 16 bits hold, counted in
units of its last place: exact fp32 without a second copy of the upper half. One case does not fit: halfway between two
bf16 numbers the difference is +2**15 or -2**15, by whichever of them is even, and both have the same 16 bits. The sign
of the second moment, which is never negative, says which it is.

Source: `store_param_remainders` of apex's DistributedFusedAdam and of TransformerEngine's FusedAdam, which round such a
half up instead, so that their params differ from rounded fp32 ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from megatron_distopt.layout.estimate import BLOCK_NUMEL
from megatron_distopt.optimizer.codes import CODES, Code, decode, encode, root_of, round_to_bf16
from megatron_distopt.optimizer.native import Native, Out, library, memory

_LOWER = 1 << 16
#: Elements of a vector of 16-bit params; see [Note: in phase] in main_params.py.
IN_PHASE = 8
_HALF = 1 << 15


class Kept(ABC):
    """fp32 values, 1-D, in the form in which they are kept."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """How many values."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """What is in memory for them alone."""

    @abstractmethod
    def read(self, start: int, stop: int, out: Out = memory) -> Tensor:
        """Some of the values, fp32 [stop - start]: a view where they are kept so, and else a copy.

        Args:
            start, stop: which.
            out: gives fp32 memory of a CPU, which a copy may use.
        """

    @abstractmethod
    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Rounds values to the form.

        Args:
            start, stop: which.
            values: fp32 [stop - start]; may be overwritten.
            noise: int32 of the same shape, random and at least 0, to round at random; to nearest where None.
        """

    def update(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        """As `write`, at the end of a step, in which the model param may be written as well."""
        self.write(start, stop, values, noise)

    @abstractmethod
    def part(self, start: int, stop: int) -> Kept:
        """Some of the values, to be kept by themselves from now on: whatever is held of the whole is not valid then."""

    @abstractmethod
    def map(self, move: Callable[[Tensor], Tensor]) -> Kept:
        """The same values, with every part of memory replaced by what a function makes of it."""

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """As `map`, but in this object, so that every tensor that shows its values follows."""
        moved = self.map(move)
        for each in fields(self):  # type: ignore[arg-type]  # every class of them is a dataclass
            object.__setattr__(self, each.name, getattr(moved, each.name))

    @property
    def is_read_in_place(self) -> bool:
        """Whether `read` returns a view, so that nothing needs to be written back."""
        return False

    @property
    def is_rounded_at_random(self) -> bool:
        """Whether an update rounds it so; see [Note: stochastic rounding] in codes.py."""
        return False

    def end_of_stretch(self, start: int, numel: int) -> int:
        """Where a stretch of about `numel` values from `start` should end, so that no block is cut."""
        return min(start + numel, self.numel)


@dataclass(frozen=True, eq=False)
class Plain(Kept):
    """One number for each value, of any dtype.

    Args:
        tensor: 1-D.
        has_ties: whether the signs are not those of the values, which are at least 0; see [Note: remainder].
    """

    tensor: Tensor
    has_ties: bool = False

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def is_read_in_place(self) -> bool:
        return self.tensor.dtype == torch.float32 and not self.has_ties

    @property
    def is_rounded_at_random(self) -> bool:
        return self.tensor.dtype == torch.bfloat16

    def read(self, start: int, stop: int, out: Out = memory) -> Tensor:
        kept = self.tensor[start:stop]
        if not self.is_read_in_place and (native := self._native()) is not None:
            return native.read_plain(kept, has_ties=self.has_ties, out=out(stop - start))
        return (kept.abs() if self.has_ties else kept).to(torch.float32)

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        kept = self.tensor[start:stop]
        if not self.is_read_in_place and (native := self._native(values, noise)) is not None:
            native.write_plain(values, noise, kept, has_ties=self.has_ties)
            return
        if noise is not None and kept.dtype == torch.bfloat16:
            values = round_to_bf16(values, noise.bitwise_and(_LOWER - 1))
        if self.has_ties:
            values = values.to(kept.dtype).copysign_(kept)
        kept.copy_(values)

    def _native(self, *others: Tensor | None) -> Native | None:
        """Functions that read and write it in one pass, where there are any."""
        is_known = self.tensor.dtype in (torch.float32, torch.bfloat16)
        return library(self.tensor, *others) if is_known else None

    def part(self, start: int, stop: int) -> Plain:
        return Plain(self.tensor[start:stop], self.has_ties)

    def map(self, move: Callable[[Tensor], Tensor]) -> Plain:
        return Plain(move(self.tensor), self.has_ties)

    def ties(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].signbit()

    def set_ties(self, start: int, stop: int, ties: Tensor) -> None:
        kept = self.tensor[start:stop].abs_()
        kept.copy_(torch.where(ties, -kept, kept))


@dataclass(frozen=True, eq=False)
class Blocks(Kept):
    """A code for each value and a scale for each block; see [Note: block codes] in codes.py.

    Args:
        codes: 1-D.
        exponents: uint8 1-D, by block.
        code: how values are rounded.
        phase: values of the first block that belong to others, and are not in `codes`.
        is_root: whether codes are of the root; see [Note: roots] in codes.py.
        has_ties: see `Plain`.
    """

    codes: Tensor
    exponents: Tensor
    code: Code
    phase: int = 0
    is_root: bool = False
    has_ties: bool = False

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents

    @property
    def is_rounded_at_random(self) -> bool:
        return self.is_root and self.code.shift > 0

    @property
    def _sign(self) -> int:
        """The bit of a code that is its sign."""
        return 0x80 if self.code.storage is torch.uint8 else -0x8000

    def read(self, start: int, stop: int, out: Out = memory) -> Tensor:
        codes = self.codes[start:stop]
        if (native := library(codes, self.exponents)) is not None:
            blocks, head = self._blocks(start, stop)
            exponents, values = self.exponents[blocks.start : blocks.stop], out(stop - start)
            return native.decode(codes, exponents, self.code, head=head, is_root=self.is_root, out=values)
        if self.is_root:
            codes = codes & ~self._sign & 0xFF if self.code.storage is torch.uint8 else codes & 0x7FFF
        blocks, head = self._blocks(start, stop)
        values = decode(_padded(codes, head, len(blocks)), self.exponents[blocks.start : blocks.stop], self.code)
        values = values.view(-1)[head : head + stop - start]
        return values.square_() if self.is_root else values

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        first, last = self._whole(start, stop)
        if (first, last) != (start, stop):
            around = self.read(first, last)
            around[start - first : stop - first] = values
            self.write(first, last, around)
            return
        blocks, head = self._blocks(start, stop)
        if (native := library(self.codes, self.exponents, values, noise)) is not None:
            kept = self.codes[start:stop], self.exponents[blocks.start : blocks.stop]
            native.encode(values, noise, *kept, self.code, head=head, is_root=self.is_root, has_ties=self.has_ties)
            return
        short = None if noise is None else _padded(noise.to(torch.int16), head, len(blocks))
        padded = _padded(values, head, len(blocks))
        padded = root_of(padded) if self.is_root else padded.clone()
        codes, exponents = encode(padded, self.code, short)
        if self.is_root:
            codes = codes.add_((codes == 0) & (padded > 0))
        codes = codes.view(-1)[head : head + stop - start]
        if self.has_ties:
            codes = codes | (self.codes[start:stop] & self._sign)
        self.codes[start:stop].copy_(codes)
        self.exponents[blocks.start : blocks.stop].copy_(exponents)

    def part(self, start: int, stop: int) -> Blocks:
        blocks, head = self._blocks(start, stop)
        exponents = self.exponents[blocks.start : blocks.stop].clone()
        return Blocks(self.codes[start:stop], exponents, self.code, head, self.is_root, self.has_ties)

    def map(self, move: Callable[[Tensor], Tensor]) -> Blocks:
        moved = move(self.codes), move(self.exponents)
        return Blocks(*moved, self.code, self.phase, self.is_root, self.has_ties)

    def ties(self, start: int, stop: int) -> Tensor:
        return (self.codes[start:stop] & self._sign) != 0

    def set_ties(self, start: int, stop: int, ties: Tensor) -> None:
        kept = self.codes[start:stop].bitwise_and_(~self._sign & 0xFF if self._sign > 0 else 0x7FFF)
        kept.bitwise_or_(ties.to(kept.dtype) * self._sign)

    def end_of_stretch(self, start: int, numel: int) -> int:
        return self._whole(start, min(start + numel, self.numel))[1]

    def _blocks(self, start: int, stop: int) -> tuple[range, int]:
        """The blocks with some values, and how many values of the first one lie before."""
        first, last = start + self.phase, stop + self.phase
        return range(first // BLOCK_NUMEL, -(-last // BLOCK_NUMEL)), first % BLOCK_NUMEL

    def _whole(self, start: int, stop: int) -> tuple[int, int]:
        """All values of the blocks with some values."""
        blocks, _ = self._blocks(start, stop)
        first, last = (BLOCK_NUMEL * each - self.phase for each in (blocks.start, blocks.stop))
        return max(first, 0), min(last, self.numel)


@dataclass(frozen=True, eq=False)
class Remainder(Kept):
    """A bf16 param and what it lacks of its fp32 main param; see [Note: remainder].

    Only a step may write the param. What others write to the main param, as by loading it, is held in fp32 until the
    next step, so that it can be compared with the param until then, as every main param is.

    Args:
        model: bf16 1-D, in the param buffer.
        low: int16 1-D.
        second: the second moment, which has the ties.
        held: nothing, or all values, fp32.
    """

    model: Tensor
    low: Tensor
    second: Plain | Blocks
    held: list[Tensor] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.low.numel()

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.low, *self.held

    def read(self, start: int, stop: int, out: Out = memory) -> Tensor:
        if self.held:
            return self.held[0][start:stop]
        if (native := library(*self._pieces(start, stop))) is not None:
            return native.read_remainder(*self._pieces(start, stop), out(stop - start))
        bits = _upper(self.model[start:stop]).add_(self.low[start:stop])
        return bits.add_(self.second.ties(start, stop), alpha=_LOWER).view(torch.float32)

    def write(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        if not self.held:
            self.held.append(self.read(0, self.numel))
        self.held[0][start:stop].copy_(values)

    def settle(self) -> None:
        """Before a step: puts what is held into param and remainder."""
        if self.held:
            self.update(0, self.numel, self.held.pop())

    def update(self, start: int, stop: int, values: Tensor, noise: Tensor | None = None) -> None:
        """See `Kept.update`."""
        if (native := library(values, *self._pieces(start, stop))) is not None:
            native.update_remainder(values, *self._pieces(start, stop))
            return
        model = self.model[start:stop].copy_(values)
        differences = values.view(torch.int32) - _upper(model)
        # NaN rounds to another NaN; there is nothing to add.
        differences.masked_fill_(values.isnan(), 0)
        self.low[start:stop].copy_(differences)
        self.second.set_ties(start, stop, differences == _HALF)

    def _pieces(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """What holds the bits of some values."""
        return self.model[start:stop], self.low[start:stop], self.second.parts[0][start:stop]

    def part(self, start: int, stop: int) -> Remainder:
        held = [each[start:stop] for each in self.held]
        return Remainder(self.model[start:stop], self.low[start:stop], self.second.part(start, stop), held)

    def map(self, move: Callable[[Tensor], Tensor]) -> Remainder:
        return Remainder(self.model, move(self.low), self.second, [move(each) for each in self.held])

    def end_of_stretch(self, start: int, numel: int) -> int:
        return self.second.end_of_stretch(start, numel)


def _upper(model: Tensor) -> Tensor:
    """bf16 as the upper halves of int32."""
    return model.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


def _padded(values: Tensor, head: int, num_blocks: int) -> Tensor:
    """Whole blocks, with zeros around the values; [num_blocks, 128]."""
    numel = num_blocks * BLOCK_NUMEL
    if values.numel() != numel:
        whole = values.new_zeros(numel)
        whole[head : head + values.numel()] = values
        values = whole
    return values.view(num_blocks, BLOCK_NUMEL)


def phase_of(kept: Kept) -> int:
    """What is allocated for every value begins so many values behind an address that is aligned.

    See [Note: in phase] in main_params.py. Scales of blocks begin there as well, so that a vector is in one block. It
    follows from the layout alone, not from addresses, because it decides which values have one scale.
    """
    if isinstance(kept, Remainder):
        return kept.second.phase if isinstance(kept.second, Blocks) else phase_of(Plain(kept.model))
    return kept.phase if isinstance(kept, Blocks) else int(kept.parts[0].storage_offset()) % IN_PHASE


def zeros_in_phase(numel: int, phase: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D, see `phase_of`."""
    return torch.zeros(phase + numel, dtype=dtype, device=device)[phase:]


def zeros_kept(
    numel: int, device: torch.device, dtype: str, *, is_second: bool, has_ties: bool, phase: int = 0
) -> Plain | Blocks:
    """Memory for one moment of a flat param.

    Args:
        numel, device: of the flat param.
        dtype: "float32", "bfloat16", or a name of `CODES`.
        is_second: whether it is the second moment.
        has_ties: see `Plain`.
        phase: see `phase_of`.
    """
    if dtype not in CODES:
        return Plain(zeros_in_phase(numel, phase, getattr(torch, dtype), device), has_ties)
    code, num_blocks = CODES[dtype], -(-(phase + numel) // BLOCK_NUMEL)
    codes = zeros_in_phase(numel, phase, code.storage, device)
    exponents = torch.zeros(num_blocks, dtype=torch.uint8, device=device)
    return Blocks(codes, exponents, code, phase, is_root=is_second, has_ties=has_ties)
