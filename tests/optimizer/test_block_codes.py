"""Block codes: what they keep of values of every size, and that what they keep is stable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distopt.layout.buckets import BLOCK_NUMEL
from megatron_distopt.optimizer.low_precision.block_codes import (
    decode,
    encode,
    random_bits,
    root_of,
    round_to_bf16,
)

#: Largest relative error of a value near the largest of its block: half a step to nearest, a step
#: at random.
STEP = 2.0**-4
SCALES = {"ordinary": 1.0, "tiny": 1e-25, "huge": 1e30}


def _blocks(scale: float, spread: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values, exponents = torch.randn(2, 200, BLOCK_NUMEL, generator=generator)
    return values * torch.exp(spread * exponents) * scale


def _noise(values: Tensor) -> Tensor:
    return random_bits(0, values.numel(), torch.tensor(3.0)).view(values.shape).to(torch.int16)


def _kept(values: Tensor, noise: Tensor | None = None) -> Tensor:
    return decode(*encode(values.clone(), noise))


@pytest.mark.parametrize("scale", SCALES)
def test_code_when_values_are_of_any_size_then_the_error_is_below_a_step(scale: str) -> None:
    values = _blocks(SCALES[scale])
    large = values.abs() > values.abs().amax(1, keepdim=True) / 8
    for noise, bound in ((None, STEP / 2), (_noise(values), STEP)):
        kept = _kept(values, noise)
        # fp16 itself rounds once before.
        assert ((kept - values).abs() / values.abs())[large].max() <= bound + 2.0**-11


@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_code_when_what_was_read_is_rounded_again_then_it_is_the_same(spread: float) -> None:
    values = _blocks(1.0, spread)
    kept = _kept(values)
    for noise in (None, _noise(values)):
        assert torch.equal(_kept(kept, noise), kept)
    # without the largest values of the block
    smaller = kept * (kept.abs() < kept.abs().amax(1, keepdim=True) / 4)
    assert torch.equal(_kept(smaller), smaller)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_code_when_a_value_is_not_finite_then_its_block_alone_is_nan(bad: float) -> None:
    values = _blocks(1.0)
    values[3, 5] = bad
    kept = _kept(values)
    assert bool(kept[3].isnan().all())
    assert bool(torch.cat([kept[:3], kept[4:]]).isfinite().all())


def test_code_when_values_are_nearly_infinite_then_they_are_kept_or_nan() -> None:
    for exponent in range(112, 128):
        values = torch.full((1, BLOCK_NUMEL), 1.5 * 2.0**exponent)
        kept = _kept(values)
        assert torch.equal(kept, values) or (exponent >= 118 and bool(kept.isnan().all()))


def test_code_when_rounded_at_random_often_then_the_mean_is_the_value() -> None:
    values = _blocks(1.0)[:4]
    numel, rounds = values.numel(), 400
    noises = [
        random_bits(0, numel, torch.tensor(float(step))).view(values.shape)
        for step in range(rounds)
    ]
    mean = torch.stack([_kept(values, noise.to(torch.int16)) for noise in noises]).mean(0)
    # The deviation of a mean of 400 is a twentieth of a step's at most half; five of those, of 512
    # values.
    step = values.abs() * STEP * 2 + values.abs().amax(1, keepdim=True) * 2.0**-10
    assert bool(((mean - values).abs() <= step * 5 * 0.5 / rounds**0.5).all())


def test_code_when_values_are_what_they_were_in_the_first_release_then_so_are_the_codes() -> None:
    """Bits that no later version may change, because a run that resumes has to go on with them."""
    values = torch.tensor([1.0, -1.0, 0.75, 1.03, -0.01, 1e-3, 3e-4, 0.0, -0.0, 1.97])
    block = torch.zeros(1, BLOCK_NUMEL)
    block[0, : len(values)] = values
    codes, exponents = encode(block)
    assert codes[0, : len(values)].tolist() == [96, 224, 88, 96, 133, 1, 0, 0, 128, 112]
    assert exponents.tolist() == [128]


def test_bf16_when_rounded_at_random_then_it_is_a_neighbour_and_right_in_the_mean() -> None:
    value = torch.full((20_000,), 1.0 + 0.3 * 2.0**-7)
    rounded = round_to_bf16(
        value, random_bits(0, value.numel(), torch.tensor(1.0)) & 0xFFFF
    ).float()
    assert sorted(set(rounded.tolist())) == [1.0, 1.0 + 2.0**-7]
    # six deviations of the mean
    assert float((rounded - 1.0).mean() * 2**7) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 3.4e38, 1e-40])
def test_bf16_when_a_value_is_extreme_then_its_sign_and_kind_stay(value: float) -> None:
    values = torch.full((64,), value)
    rounded = round_to_bf16(values, torch.full((64,), 0xFFFF, dtype=torch.int32)).float()
    assert bool((rounded.signbit() == values.signbit()).all())
    assert bool((rounded.isnan() == values.isnan()).all())
    assert bool(
        round_to_bf16(torch.tensor([torch.nan]), torch.tensor([0xFFFF], dtype=torch.int32)).isnan()
    )


def test_random_bits_when_asked_for_in_parts_then_they_are_those_of_the_whole() -> None:
    count = torch.tensor(7.0)
    whole = random_bits(0, 1000, count)
    assert torch.equal(torch.cat([random_bits(0, 300, count), random_bits(300, 700, count)]), whole)
    for other in (random_bits(0, 1000, count + 1), random_bits(1000, 1000, count)):
        assert (other == whole).float().mean() < 0.01
    ones = torch.stack([(whole >> bit) & 1 for bit in range(31)]).float().mean(1)
    assert ones.min() > 0.42 and ones.max() < 0.58  # five deviations of a mean of 1,000 coins


def test_root_when_of_any_value_then_it_is_rounded_to_nearest() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1 << 17, generator=generator) * torch.exp2(
        torch.randint(-148, 120, (1 << 17,))
    )
    values[:4] = torch.tensor([0.0, 1e-45, torch.inf, float.fromhex("0x1.4bbb84p-29")])
    root = root_of(values)
    neighbours = [torch.nextafter(root, torch.full_like(root, end)) for end in (0.0, torch.inf)]
    exact = values.double().sqrt()
    for other in neighbours:
        assert bool(((root - exact).abs() <= (other - exact).abs())[values.isfinite()].all())
    assert root[3].item() == float.fromhex("0x1.9c2002p-15")  # which MKL's root of fp32 is not
