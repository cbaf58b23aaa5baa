"""The Triton kernels, each of which is launched once for all flat params of a step.

[Note: full vectors] A GPU moves 128 bits at a time only where the compiler knows that an address is divisible by 16 and
that 8 neighbours are inside or outside together. Addresses come out of a table, so the compiler knows nothing of them.
Each flat param is therefore cut on the host (triton_table.py): its *body* begins at an element that is aligned in all
tensors and has a multiple of 8 elements, which the kernel states with `tl.multiple_of` and a mask of that granularity.
What lies before and behind it, its *rest*, is less than 8 elements on either side and is left to programs of its own.
tests/optimizer/test_compiled_kernels.py reads the widths in the machine code.

This module imports Triton; others import it only where a kernel runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Triton is not installed everywhere, and mypy reads no types of it.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

#: Columns of the table of `sweep`; addresses are in bytes, BODY in units of 8 elements.
_MAIN, _FIRST_MOMENT, _SECOND_MOMENT, _MODEL, _GRAD = (tl.constexpr(column) for column in range(5))
_SOURCE, _KIND, _HEAD, _BODY, _NUMEL = (tl.constexpr(column) for column in range(5, 10))
_FIRST_PROGRAM, _FIRST_REST, _STEP, _GROUP = (tl.constexpr(column) for column in range(10, 14))
#: Columns of the table of `statistics`; BODY is in units of 4 elements, which are 128 bits of a gradient.
_S_GRAD, _S_SOURCE, _S_HEAD, _S_BODY, _S_NUMEL, _S_FIRST_PROGRAM, _S_EXCLUDED = (
    tl.constexpr(column) for column in range(7)
)
#: What `sweep` rounds into: nothing, bf16, or (2) fp16.
_NO_MODEL, _BF16 = tl.constexpr(0), tl.constexpr(1)
#: fp32 numbers that `prepare` leaves for each flat param.
_SCALARS = tl.constexpr(8)
#: Lanes for the at most 3 + 3 elements that `statistics` finds around a body.
_REST_LANES = tl.constexpr(8)
#: Programs whose sums the last program of `statistics` adds at a time.
_LAST_BLOCK = tl.constexpr(256)
#: More than the bits of an update count, which fp32 holds exactly up to 2**24.
_COUNT_BITS = tl.constexpr(25)


@triton.jit
def _cell(table, column: tl.constexpr, num, row):
    return tl.load(table + num * column + row)


@triton.jit
def _pointer(address, dtype: tl.constexpr, IS_ALIGNED: tl.constexpr):
    if IS_ALIGNED:
        return tl.multiple_of(tl.multiple_of(address, 16).to(tl.pointer_type(dtype)), 16)
    else:
        return address.to(tl.pointer_type(dtype))


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
def _rounded(x, kind):
    """The bits of x in bf16 or fp16, as int16."""
    return tl.where(kind == _BF16, _nearest_bf16(x).to(tl.int16), x.to(tl.float16).to(tl.int16, bitcast=True))


@triton.jit
def _adam(x, g, m, v, scalars, divisor, DECOUPLED: tl.constexpr):
    """What becomes of a main param and both moments.

    Args:
        x, g, m, v: fp32: main param, gradient, moments.
        scalars: fp32 [8] of the flat param, from `prepare`.
        divisor: fp32, of the gradient.
    """
    shrink, step_size, root, eps = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    beta2, kept1, kept2 = tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6)
    g = tl.div_rn(g, tl.load(divisor))
    if DECOUPLED:
        x = x * shrink
    else:
        g = g + x * tl.load(scalars + 7)
    m = m + kept1 * (g - m)
    v = beta2 * v + kept2 * g * g
    return x - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps), m, v


@triton.jit
def _update(
    table,
    scalars,
    divisor,
    num,
    row,
    at,
    is_here,
    source,
    DECOUPLED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Some elements of one flat param; `at` counts from its body where that is aligned, else from its first element."""
    skipped = _cell(table, _HEAD, num, row) if IS_ALIGNED else 0
    main = _pointer(_cell(table, _MAIN, num, row) + skipped * 4, tl.float32, IS_ALIGNED)
    first = _pointer(_cell(table, _FIRST_MOMENT, num, row) + skipped * 4, tl.float32, IS_ALIGNED)
    second = _pointer(_cell(table, _SECOND_MOMENT, num, row) + skipped * 4, tl.float32, IS_ALIGNED)
    grad = _pointer(source + _cell(table, _GRAD, num, row) + skipped * 4, tl.float32, IS_ALIGNED)
    x = tl.load(main + at, mask=is_here, other=0.0)
    g = tl.load(grad + at, mask=is_here, other=0.0)
    m = tl.load(first + at, mask=is_here, other=0.0)
    v = tl.load(second + at, mask=is_here, other=0.0)
    x, m, v = _adam(x, g, m, v, scalars + row * _SCALARS, divisor, DECOUPLED)
    tl.store(first + at, m, mask=is_here)
    tl.store(second + at, v, mask=is_here)
    tl.store(main + at, x, mask=is_here)
    kind = _cell(table, _KIND, num, row)
    if kind != _NO_MODEL:
        model = _pointer(_cell(table, _MODEL, num, row) + skipped * 2, tl.int16, IS_ALIGNED)
        tl.store(model + at, _rounded(x, kind), mask=is_here)


@triton.jit(do_not_specialize=["num", "num_bodies", "grads0", "grads1", "grads2", "grads3"])
def sweep(
    table,
    owners,
    scalars,
    divisor,
    found_inf,
    num,
    num_bodies,
    grads0: tl.int64,
    grads1: tl.int64,
    grads2: tl.int64,
    grads3: tl.int64,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """One block of one flat param: the first `num_bodies` programs update bodies, the others what lies around them.

    Args:
        table: int64 [columns, num], see `triton_table.SweepTable`.
        owners: int32 [programs], the flat param of each.
        scalars: fp32 [num, 8], from `prepare`.
        divisor, found_inf: fp32; where something is not finite nothing is read and nothing is written.
        num: of flat params.
        num_bodies: of programs.
        grads0, ...: addresses that the places of gradients count from, whose type is not to depend on the value.
        BLOCK, REST_BLOCK: elements of a program, inside bodies and around them, where addresses take more registers.
    """
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        row = tl.load(owners + program)
        source = _source(_cell(table, _SOURCE, num, row), grads0, grads1, grads2, grads3)
        body = _cell(table, _BODY, num, row) * 8
        if program < num_bodies:
            at = (program - _cell(table, _FIRST_PROGRAM, num, row)) * BLOCK + tl.arange(0, BLOCK)
            _update(table, scalars, divisor, num, row, at, at < body, source, DECOUPLED, True)
        else:
            place = (program - _cell(table, _FIRST_REST, num, row)) * REST_BLOCK + tl.arange(0, REST_BLOCK)
            is_rest = place < _cell(table, _NUMEL, num, row) - body
            place += tl.where(place < _cell(table, _HEAD, num, row), 0, body)
            _update(table, scalars, divisor, num, row, place, is_rest, source, DECOUPLED, False)


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
def prepare(table, rates, hyperparameters, found_inf, scalars, num, BLOCK: tl.constexpr, ROW_CELLS: tl.constexpr = 0):
    """Counts the updates of all flat params, and makes the scalars of each from float64.

    In fp32, 1 - beta2 ** count has few digits.

    Args:
        table, found_inf, num: see `sweep`.
        rates: float64 [groups, 2], lr and lr * weight_decay.
        hyperparameters: float64 [groups, 4], both betas, eps and weight_decay.
        scalars: fp32 [num, 8], written: 1 - lr * weight_decay, lr / bias correction 1, root of bias correction 2, eps,
            beta2, 1 - beta1, 1 - beta2, weight_decay.
        ROW_CELLS: of a table that lies in memory by row; 0 for one that lies there by column.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = row < num
    if ROW_CELLS > 0:
        steps, groups = table + row * ROW_CELLS + _STEP, table + row * ROW_CELLS + _GROUP
    else:
        steps, groups = table + num * _STEP + row, table + num * _GROUP + row
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
def _add(high, low, other_high, other_low):
    """The sum of two numbers that are sums themselves, high + low, with what the addition of the high parts loses.

    Source: Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.
    """
    total = high + other_high
    taken = total - high
    lost = (high - (total - taken)) + (other_high - taken)
    return total, low + other_low + lost


@triton.jit
def _add_square(high, low, g, WIDE: tl.constexpr):
    if WIDE:
        wide = g.to(tl.float64)
        return high + wide * wide, low
    else:
        square = g * g
        return _add(high, low, square, tl.fma(g, g, -square))


@triton.jit
def _total(high, low, WIDE: tl.constexpr):
    if WIDE:
        return tl.sum(high), tl.sum(low)
    else:
        return tl.reduce((high, low), 0, _add)


@triton.jit
def _is_bad(number):
    """Whether it is inf or nan."""
    return (number - number) != 0


@triton.jit
def _sum_up(
    table, owners, sums, zeros, out, num, num_programs, padding, counts_zeros, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """What the last program does: adds up what all programs found, always in the same order."""
    dtype: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    for start in range(0, num, BLOCK):
        tl.store(out + 3 + start + lane, tl.zeros([BLOCK], dtype), mask=start + lane < num)
    tl.debug_barrier()  # other threads of this program may write the same flags below
    included, included_low = tl.zeros([BLOCK], dtype), tl.zeros([BLOCK], dtype)
    excluded, excluded_low = tl.zeros([BLOCK], dtype), tl.zeros([BLOCK], dtype)
    num_zeros = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_programs, BLOCK):
        number = start + lane
        is_here = number < num_programs
        row = tl.load(owners + number, mask=is_here, other=0)
        is_excluded = tl.load(table + num * _S_EXCLUDED + row, mask=is_here, other=0) != 0
        high = tl.load(sums + number * 2, mask=is_here, other=0.0, cache_modifier=".cg")
        low = tl.load(sums + number * 2 + 1, mask=is_here, other=0.0, cache_modifier=".cg")
        found = tl.load(zeros + number, mask=is_here, other=0, cache_modifier=".cg")
        tl.store(out + 3 + row, tl.zeros([BLOCK], dtype) + 1, mask=is_here & _is_bad(high))
        included, included_low = _add(
            included, included_low, tl.where(is_excluded, 0.0, high), tl.where(is_excluded, 0.0, low)
        )
        excluded, excluded_low = _add(
            excluded, excluded_low, tl.where(is_excluded, high, 0.0), tl.where(is_excluded, low, 0.0)
        )
        num_zeros += tl.where(is_excluded, 0, found)
    sum_of_squares, low = _total(included, included_low, WIDE)
    others, _ = _total(excluded, excluded_low, WIDE)
    is_bad = _is_bad(sum_of_squares) | _is_bad(others)
    # Where the sum is infinite what the additions lost is not a number.
    tl.store(out, tl.where(is_bad, sum_of_squares, sum_of_squares + low))
    tl.store(out + 1, ((tl.sum(num_zeros) - padding) * counts_zeros).to(dtype))
    tl.store(out + 2, tl.where(is_bad, 1.0, 0.0).to(dtype))


@triton.jit(
    do_not_specialize=[
        "num",
        "num_programs",
        "blocks",
        "padding",
        "counts_zeros",
        "grads0",
        "grads1",
        "grads2",
        "grads3",
    ],
)
def statistics(
    table,
    owners,
    sums,
    zeros,
    counter,
    out,
    num,
    num_programs,
    blocks,
    padding,
    counts_zeros,
    grads0: tl.int64,
    grads1: tl.int64,
    grads2: tl.int64,
    grads3: tl.int64,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of squares, zeros and non-finite flat params; each program reads some blocks, the last one adds up.

    Args:
        table: int64 [columns, num], see `triton_table.StatsTable`.
        owners: int32 [num_programs], the flat param of each.
        sums: of the dtype of `out`, [num_programs, 2].
        zeros: int32 [num_programs].
        counter: int32, how many programs are done; 0 before and afterwards.
        out: float64 or fp32 [3 + num], written: sum of squares, zeros, 1 where something is not finite; then that for
            each flat param.
        num: of flat params.
        blocks: that one program reads.
        padding: zeros that are not counted.
        counts_zeros: 1, or 0 for no zeros.
        grads0, ...: see `sweep`.
        WIDE: whether it adds up in float64; otherwise in fp32, and keeps what every addition loses.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    row = tl.load(owners + program)
    source = _source(_cell(table, _S_SOURCE, num, row), grads0, grads1, grads2, grads3)
    address = source + _cell(table, _S_GRAD, num, row)
    head, body = _cell(table, _S_HEAD, num, row), _cell(table, _S_BODY, num, row) * 4
    mine = program - _cell(table, _S_FIRST_PROGRAM, num, row)
    grad = _pointer(address + head * 4, tl.float32, True)
    high, low, num_zeros = tl.zeros([BLOCK], dtype), tl.zeros([BLOCK], dtype), tl.zeros([BLOCK], tl.int32)
    for block in range(blocks):
        at = (mine * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        is_here = at < body
        g = tl.load(grad + at, mask=is_here, other=0.0)
        high, low = _add_square(high, low, g, WIDE)
        num_zeros += (is_here & (g == 0)).to(tl.int32)
    at = tl.arange(0, _REST_LANES)
    is_here = at < tl.where(mine == 0, _cell(table, _S_NUMEL, num, row) - body, 0)
    at += tl.where(at < head, 0, body)
    g = tl.load(_pointer(address, tl.float32, False) + at, mask=is_here, other=0.0)
    rest, rest_low = _add_square(tl.zeros([_REST_LANES], dtype), tl.zeros([_REST_LANES], dtype), g, WIDE)
    total, total_low = _total(high, low, WIDE)
    rest, rest_low = _total(rest, rest_low, WIDE)
    total, total_low = _add(total, total_low, rest, rest_low)
    tl.store(sums + program * 2, total)
    tl.store(sums + program * 2 + 1, total_low)
    tl.store(zeros + program, tl.sum(num_zeros) + tl.sum((is_here & (g == 0)).to(tl.int32)))
    # The thread that has written these three counts itself as done, so whoever finds all done can read them.
    if tl.atomic_add(counter, 1) == num_programs - 1:
        _sum_up(table, owners, sums, zeros, out, num, num_programs, padding, counts_zeros, WIDE, _LAST_BLOCK)
        tl.store(counter, 0)
