"""The Triton kernels that update state in any precision: one pass over memory, whatever its forms are.

[Note: whole blocks] A program owns whole blocks of 128 values (block_codes.py), so their largest values are found among
the lanes of a warp, in registers, and nothing is read twice. A flat param may begin inside of a block: `phase` values
of its first block are not its own. All tensors are told by the address that value `-phase` would have, and a lane has 8
values, which are 128 bits of a 16-bit tensor, twice 128 of fp32 and 64 of 8-bit codes. A GPU moves 128 bits at a time
only where the compiler knows that an address is divisible by 16 and that 8 neighbours are inside or outside together.
Where the addresses are aligned, and where the values of a program begin and end at multiples of 8, the kernel states
this with `tl.multiple_of` and a mask of that granularity; the other programs, at most the first and the last one of a
flat param that lies in phase, move single values. tests/optimizer/test_compiled_kernels.py reads the widths in the
machine code.

Formulas and random bits are those of block_codes.py and stored_values.py: given equal fp32 values, equal bits are
stored. This module imports Triton; others import it only where a kernel runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Triton is not installed everywhere, and mypy reads no types of it.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

#: Cells of a row of the table (`one_pass.Row`); addresses are in bytes. It lies in memory by row, so that one address
#: leads to all of it: registers for scalars are few on AMD's GPUs.
_MAIN, _FIRST, _SECOND, _MODEL, _GRAD, _SOURCE = (tl.constexpr(column) for column in range(6))
_MAIN_SCALES, _FIRST_SCALES, _SECOND_SCALES = (tl.constexpr(column) for column in range(6, 9))
_NUMEL, _PHASE, _STEP, _GROUP = (tl.constexpr(column) for column in range(9, 13))
_PLACE, _IS_ALIGNED, _FIRST_PROGRAM = (tl.constexpr(column) for column in range(13, 16))
_CELLS = tl.constexpr(16)

#: See `one_pass.FORMS`. Other forms are codes, those of 8 bits at least 32.
_FP32, _BF16, _REMAINDER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Model params that are rounded into: none, or (1) bf16, or fp16.
_NO_MODEL, _BF16_MODEL = tl.constexpr(0), tl.constexpr(1)
#: Values with one scale, and values of one lane.
_BLOCK, _LANE = tl.constexpr(128), tl.constexpr(8)
#: See block_codes.py: smallest and largest exponents of scales.
_LEAST, _NAN = tl.constexpr(20), tl.constexpr(255)
#: fp32 numbers that `prepare` leaves for each flat param.
_SCALARS = tl.constexpr(8)
#: More than the bits of an update count, which fp32 holds exactly up to 2**24.
_COUNT_BITS = tl.constexpr(25)


@triton.jit
def _cell(table, column: tl.constexpr, row):
    return tl.load(table + row * _CELLS + column)


@triton.jit
def _power(base, count):
    """base ** count in float64, by squares; Triton has no power that its interpreter knows."""
    left, square, power = count.to(tl.int32), base, base * 0 + 1
    for _ in range(_COUNT_BITS):
        power = tl.where((left & 1) == 1, power * square, power)
        square = square * square
        left = left >> 1
    return power


@triton.jit(do_not_specialize=["num"])
def prepare(table, rates, hyperparameters, found_inf, scalars, num, BLOCK: tl.constexpr):
    """Counts the updates of all flat params, and makes the scalars of each from float64.

    In fp32, 1 - beta2 ** count has few digits.

    Args:
        table: int64 [num, 16], see `one_pass.Row`.
        rates: float64 [groups, 2], lr and lr * weight_decay.
        hyperparameters: float64 [groups, 4], both betas, eps and weight_decay.
        found_inf: fp32; nothing is counted where it is 1.
        scalars: fp32 [num, 8], written: 1 - lr * weight_decay, lr / bias correction 1, root of bias correction 2, eps,
            beta2, 1 - beta1, 1 - beta2, weight_decay.
        num: of flat params.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = row < num
    steps, groups = table + row * _CELLS + _STEP, table + row * _CELLS + _GROUP
    step = tl.load(steps, mask=is_here, other=0).to(tl.pointer_type(tl.float32))
    count = tl.load(step, mask=is_here, other=1.0) + 1 - tl.load(found_inf)
    tl.store(step, count, mask=is_here)
    group = tl.load(groups, mask=is_here, other=0)
    lr, shrinkage = tl.load(rates + group * 2), tl.load(rates + group * 2 + 1)
    hyperparameters += group * 4
    beta1, beta2 = tl.load(hyperparameters), tl.load(hyperparameters + 1)
    scalars += row * _SCALARS
    tl.store(scalars, (1 - shrinkage).to(tl.float32), mask=is_here)
    tl.store(scalars + 1, (lr / (1 - _power(beta1, count))).to(tl.float32), mask=is_here)
    tl.store(scalars + 2, tl.sqrt(1 - _power(beta2, count)).to(tl.float32), mask=is_here)
    tl.store(scalars + 3, tl.load(hyperparameters + 2).to(tl.float32), mask=is_here)
    tl.store(scalars + 4, beta2.to(tl.float32), mask=is_here)
    tl.store(scalars + 5, (1 - beta1).to(tl.float32), mask=is_here)
    tl.store(scalars + 6, (1 - beta2).to(tl.float32), mask=is_here)
    tl.store(scalars + 7, tl.load(hyperparameters + 3).to(tl.float32), mask=is_here)


@triton.jit
def _source(number, grads0, grads1, grads2, grads3):
    """The address that a gradient's place counts from; 0 where the place is an address."""
    first = tl.where(number == 0, grads0, grads1)
    second = tl.where(number == 2, grads2, grads3)
    return tl.where(number < 2, first, tl.where(number < 4, second, number * 0))


@triton.jit
def _nearest_bf16(x):
    """The bits of x in bf16, as int32."""
    # To nearest, ties to even, in integers: Triton's interpreter would cut the last bits off where compilers round.
    bits = x.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _adam(x, g, m, v, scalars, divisor, DECOUPLED: tl.constexpr):
    """What becomes of main param x and moments m and v with gradient g; `scalars` are those of `prepare`."""
    shrink, step_size, root, eps = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    beta2, weight1, weight2 = tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6)
    g = tl.div_rn(g, tl.load(divisor))
    if DECOUPLED:
        x = x * shrink
    else:
        g = g + x * tl.load(scalars + 7)
    m = m + weight1 * (g - m)
    v = beta2 * v + weight2 * g * g
    return x - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps), m, v


@triton.jit
def _pointer(address, skipped, dtype: tl.constexpr, NBYTES: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Where the first value of a program lies, or would lie."""
    address += skipped * NBYTES
    if IS_ALIGNED:
        VECTOR: tl.constexpr = 16 if NBYTES > 1 else 8
        return tl.multiple_of(tl.multiple_of(address, VECTOR).to(tl.pointer_type(dtype)), VECTOR)
    else:
        return address.to(tl.pointer_type(dtype))


@triton.jit
def _load(address, skipped, at, is_here, dtype: tl.constexpr, NBYTES: tl.constexpr, IS_ALIGNED: tl.constexpr):
    return tl.load(_pointer(address, skipped, dtype, NBYTES, IS_ALIGNED) + at, mask=is_here, other=0)


@triton.jit
def _store(address, skipped, at, is_here, values, dtype: tl.constexpr, NBYTES: tl.constexpr, IS_ALIGNED: tl.constexpr):
    tl.store(_pointer(address, skipped, dtype, NBYTES, IS_ALIGNED) + at, values.to(dtype), mask=is_here)


@triton.jit
def _scale(exponents):
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(codes, exponents, CODE: tl.constexpr):
    """fp32 values of int32 codes; see `block_codes.decode`."""
    SHIFT: tl.constexpr = CODE >> 5
    if SHIFT > 0:
        codes = ((codes & 0x80) << 8) | ((codes & 0x7F) << SHIFT)
    values = codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    scales = _scale(exponents + (15 - (CODE & 31)))
    return values * tl.where(exponents == _NAN, float("nan"), scales)


@triton.jit
def _exponents_of(values, is_here, CODE: tl.constexpr):
    """int32 [blocks, 1], the exponents of the scales of blocks; see `block_codes.encode`."""
    magnitudes = tl.where(is_here, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.minimum(tl.max(magnitudes, axis=1, keep_dims=True), 0x7F800000)
    SHIFT: tl.constexpr = CODE >> 5
    exponents = tl.maximum((largest + ((1 << (13 + SHIFT)) - 1)) >> 23, _LEAST)
    return tl.where(exponents > 238 + (CODE & 31), _NAN, tl.minimum(exponents, _NAN))


@triton.jit
def _encoded(values, exponents, noise, CODE: tl.constexpr, IS_RANDOM: tl.constexpr):
    """int32 codes of fp32 values; see `block_codes.encode`."""
    SHIFT: tl.constexpr = CODE >> 5
    scaled = values * _scale((CODE & 31) + 239 - tl.minimum(exponents, _NAN - 1))
    bits = scaled.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    if SHIFT > 0:
        LAST: tl.constexpr = 1 << SHIFT
        magnitudes = bits & 0x7FFF
        if IS_RANDOM:
            magnitudes += noise & (LAST - 1)
        else:
            magnitudes += LAST >> 1
        bits = ((magnitudes >> SHIFT) & 0x7F) | ((bits >> 8) & 0x80)
    return bits


@triton.jit
def _noise(at, count):
    """int32, 31 random bits for each value; see `block_codes.random_bits`."""
    bits = at.to(tl.uint32) * 0x9E3779B1 + count.to(tl.int32).to(tl.uint32) * 0xC2B2AE35
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _random_bf16(x, noise):
    """The bits of x in bf16, rounded up or down at random, as int32; see `block_codes.round_to_bf16`."""
    bits = x.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7FFFFFFF) < 0x7F800000
    return tl.where(is_finite, (bits + (noise & 0xFFFF)) >> 16, _nearest_bf16(x))


@triton.jit
def _read(
    address, scales, skipped, at, is_here, is_block,
    FORM: tl.constexpr, HAS_TIES: tl.constexpr, IS_ROOT: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """fp32 values, and int32 ties: 1 where the sign is set; see stored_values.py."""
    if FORM == _FP32:
        bits = _load(address, skipped, at, is_here, tl.int32, 4, IS_ALIGNED)
        ties = (bits >> 31) & 1
        if HAS_TIES:
            bits = bits & 0x7FFFFFFF
        return bits.to(tl.float32, bitcast=True), ties
    elif FORM == _BF16:
        bits = _load(address, skipped, at, is_here, tl.int16, 2, IS_ALIGNED).to(tl.int32)
        ties = (bits >> 15) & 1
        if HAS_TIES:
            bits = bits & 0x7FFF
        return (bits << 16).to(tl.float32, bitcast=True), ties
    else:
        exponents = tl.load(scales.to(tl.pointer_type(tl.uint8)), mask=is_block, other=0).to(tl.int32)
        if FORM >= 32:
            codes = _load(address, skipped, at, is_here, tl.uint8, 1, IS_ALIGNED).to(tl.int32)
        else:
            codes = _load(address, skipped, at, is_here, tl.int16, 2, IS_ALIGNED).to(tl.int32)
        SIGN: tl.constexpr = 7 if FORM >= 32 else 15
        ties = (codes >> SIGN) & 1
        if IS_ROOT:
            root = _decoded(codes & ((1 << SIGN) - 1), exponents, FORM)
            return root * root, ties
        else:
            return _decoded(codes, exponents, FORM), ties


@triton.jit
def _write(
    address, scales, skipped, at, is_here, is_block, values, ties, noise,
    FORM: tl.constexpr, HAS_TIES: tl.constexpr, IS_ROOT: tl.constexpr, IS_RANDOM: tl.constexpr, IS_ALIGNED: tl.constexpr
):  # fmt: skip
    """Rounds to a form, and returns what `_read` would read now."""
    if FORM == _FP32:
        bits = values.to(tl.int32, bitcast=True)
        if HAS_TIES:
            bits = (bits & 0x7FFFFFFF) | (ties << 31)
        _store(address, skipped, at, is_here, bits, tl.int32, 4, IS_ALIGNED)
        return values
    elif FORM == _BF16:
        bits = _random_bf16(values, noise) if IS_RANDOM else _nearest_bf16(values)
        if HAS_TIES:
            bits = (bits & 0x7FFF) | (ties << 15)
        _store(address, skipped, at, is_here, bits, tl.int16, 2, IS_ALIGNED)
        return values
    else:
        if IS_ROOT:
            values = tl.sqrt_rn(values)
        exponents = _exponents_of(values, is_here, FORM)
        tl.store(scales.to(tl.pointer_type(tl.uint8)), exponents.to(tl.uint8), mask=is_block)
        codes = _encoded(values, exponents, noise, FORM, IS_RANDOM and FORM >= 32)
        read = _decoded(codes, exponents, FORM)
        if IS_ROOT:
            codes = tl.where((codes == 0) & (values > 0), 1, codes)
        SIGN: tl.constexpr = 7 if FORM >= 32 else 15
        if HAS_TIES:
            codes = codes | (ties << SIGN)
        if FORM >= 32:
            _store(address, skipped, at, is_here, codes, tl.uint8, 1, IS_ALIGNED)
        else:
            _store(address, skipped, at, is_here, codes, tl.int16, 2, IS_ALIGNED)
        return read


@triton.jit
def _update(
    table, scalars, divisor, row, place, start, stop, source,
    MAIN: tl.constexpr, MODEL: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DECOUPLED: tl.constexpr, BLOCKS: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Updates the blocks of program number `place` of a flat param, of whose values `start` to `stop` belong to it."""
    if IS_ALIGNED:
        start, stop = start // _LANE * _LANE, stop // _LANE * _LANE
    block = tl.arange(0, BLOCKS)[:, None]
    at = block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_here, is_block = (at >= start) & (at < stop), block * _BLOCK < stop
    skipped = place * (BLOCKS * _BLOCK) - _cell(table, _PHASE, row)
    scales = place * BLOCKS + block
    main, model = _cell(table, _MAIN, row), _cell(table, _MODEL, row)
    first, second = _cell(table, _FIRST, row), _cell(table, _SECOND, row)
    main_scales = _cell(table, _MAIN_SCALES, row) + scales
    first_scales = _cell(table, _FIRST_SCALES, row) + scales
    second_scales = _cell(table, _SECOND_SCALES, row) + scales
    TIES: tl.constexpr = MAIN == _REMAINDER
    ROOT: tl.constexpr = SECOND > _REMAINDER
    grad = source + _cell(table, _GRAD, row)
    g = _load(grad, skipped, at, is_here, tl.float32, 4, IS_ALIGNED)
    m, _ = _read(first, first_scales, skipped, at, is_here, is_block, FIRST, False, False, IS_ALIGNED)
    v, ties = _read(second, second_scales, skipped, at, is_here, is_block, SECOND, TIES, ROOT, IS_ALIGNED)
    if MAIN == _REMAINDER:
        upper = _load(model, skipped, at, is_here, tl.int16, 2, IS_ALIGNED).to(tl.int32) << 16
        low = _load(main, skipped, at, is_here, tl.int16, 2, IS_ALIGNED).to(tl.int32)
        x = (upper + low + (ties << 16)).to(tl.float32, bitcast=True)
    else:
        x, _ = _read(main, main_scales, skipped, at, is_here, is_block, MAIN, False, False, IS_ALIGNED)
    x, m, v = _adam(x, g, m, v, scalars + row * _SCALARS, divisor, DECOUPLED)
    _write(first, first_scales, skipped, at, is_here, is_block, m, ties, at, FIRST, False, False, False, IS_ALIGNED)
    noise = at
    if MAIN == _BF16 or (SECOND == _BF16 or SECOND >= 32):
        count = tl.load(_cell(table, _STEP, row).to(tl.pointer_type(tl.float32)))
        noise = _noise(at + skipped + _cell(table, _PLACE, row).to(tl.int32), count)
    if MAIN == _REMAINDER:
        upper = _nearest_bf16(x)
        _store(model, skipped, at, is_here, upper, tl.int16, 2, IS_ALIGNED)
        # NaN rounds to another NaN; there is nothing to add.
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        low = tl.where(is_nan, 0, bits - (upper << 16))
        _store(main, skipped, at, is_here, low, tl.int16, 2, IS_ALIGNED)
        ties = (low == 0x8000).to(tl.int32)
    else:
        bits = noise >> 15
        x = _write(
            main, main_scales, skipped, at, is_here, is_block, x, ties, bits, MAIN, False, False, True, IS_ALIGNED
        )
        if MODEL == _BF16_MODEL:
            _store(model, skipped, at, is_here, _nearest_bf16(x), tl.int16, 2, IS_ALIGNED)
        elif MODEL != _NO_MODEL:
            _store(model, skipped, at, is_here, x.to(tl.float16).to(tl.int16, bitcast=True), tl.int16, 2, IS_ALIGNED)
    _write(second, second_scales, skipped, at, is_here, is_block, v, ties, noise, SECOND, TIES, ROOT, True, IS_ALIGNED)


@triton.jit(do_not_specialize=["first_program", "grads0", "grads1", "grads2", "grads3"])
def update(
    table, owners, scalars, divisor, found_inf, first_program,
    grads0: tl.int64, grads1: tl.int64, grads2: tl.int64, grads3: tl.int64,
    MAIN: tl.constexpr, MODEL: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DECOUPLED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Some blocks of one flat param; one launch updates all flat params of the same forms.

    Args:
        table: int64 [num, 16], see `one_pass.Row`.
        owners: int32, the flat param of each program of all launches.
        scalars: fp32 [num, 8], from `prepare`.
        divisor, found_inf: fp32; where something is not finite nothing is read and nothing is written.
        first_program: of this launch among `owners`.
        grads0, ...: addresses that the places of gradients count from, whose type is not to depend on the value.
        MAIN, FIRST, SECOND: forms of main param and moments, of `one_pass.FORMS`.
        MODEL: of `one_pass.MODELS`, what the main param is rounded into.
        BLOCKS: of a program.
    """
    if tl.load(found_inf) == 0:
        program = tl.program_id(0) + first_program
        row = tl.load(owners + program)
        source = _source(_cell(table, _SOURCE, row), grads0, grads1, grads2, grads3)
        place = program - _cell(table, _FIRST_PROGRAM, row)
        phase, before = _cell(table, _PHASE, row), place * (BLOCKS * _BLOCK)
        start = tl.maximum(phase - before, 0)
        stop = tl.minimum(phase + _cell(table, _NUMEL, row) - before, BLOCKS * _BLOCK)
        is_aligned = (_cell(table, _IS_ALIGNED, row) != 0) & (start % _LANE == 0) & (stop % _LANE == 0)
        for IS_ALIGNED in tl.static_range(2):
            if is_aligned.to(tl.int32) == IS_ALIGNED:
                _update(
                    table, scalars, divisor, row, place, start, stop, source,
                    MAIN, MODEL, FIRST, SECOND, DECOUPLED, BLOCKS, IS_ALIGNED,
                )  # fmt: skip
