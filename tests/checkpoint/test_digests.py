"""Digests: the same however a param lies on ranks, and another one whenever a bit of it is
another."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint.digests import GRADS, DigestKey, digest_of, local_digests
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    Precision,
    as_plain,
)
from tests.checkpoint.test_reshard import LAYOUTS, MODEL
from tests.support.simulated import KINDS, World

MODULUS = 1 << 64
VALUES = torch.randn(5, 6, generator=torch.Generator().manual_seed(7))


def _digest(values: Tensor) -> int:
    return int(digest_of(values, (0,) * values.dim())) % MODULUS


def _summed(world: World, *, of_grads: bool) -> dict[DigestKey, int]:
    parts = [local_digests(rank.model, of_grads=of_grads) for rank in world.ranks]
    keys = {key for part in parts for key in part}
    return {key: sum(int(part.get(key, 0)) for part in parts) % MODULUS for key in keys}


def _of_world(world: World) -> tuple[dict[DigestKey, int], dict[DigestKey, int]]:
    """Digests of the state and of gradients that are equal to the main params."""
    for rank in world.ranks:
        for flat in rank.optimizer.flat_params:
            flat.grad.copy_(flat.main)
    return _summed(world, of_grads=False), _summed(world, of_grads=True)


ALONE = World.of(MODEL)


@pytest.mark.parametrize("name", ["dp3 tp2 in buckets", "dp2 tp2 pp2", "dp2 fp32 model"])
def test_digest_when_the_layout_is_another_then_it_is_the_same(name: str) -> None:
    expected, _ = _of_world(ALONE)
    state, grads = _of_world(World.of(MODEL, **LAYOUTS[name]))
    assert state == expected
    assert set(state) == {(kind, param.name) for kind in KINDS for param in MODEL}
    assert grads == {
        (GRADS, name): value for (kind, name), value in expected.items() if kind == "main"
    }


def _weight(dim: int, index: int) -> int:
    """The weight of an index below 2**16, by splitmix64 as it is published."""
    number = (index + (dim << 40) + 1) * 0x9E3779B97F4A7C15 % MODULUS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    number = (number ^ number >> 27) * 0x94D049BB133111EB % MODULUS
    return (number ^ number >> 31) | 1


def test_digest_when_computed_in_plain_python_then_it_is_the_same() -> None:
    total = 0
    for row, values in enumerate(VALUES.tolist()):
        for column, value in enumerate(values):
            (bits,) = struct.unpack("<i", struct.pack("<f", value))
            total += bits * _weight(0, row) * _weight(1, column)
    assert _digest(VALUES) == total % MODULUS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_digest_when_a_tensor_is_cut_then_the_parts_add_up(dtype: torch.dtype) -> None:
    values = (torch.randn(300, 7, 40) * 10).to(dtype)
    parts = digest_of(values[:100], (0, 0, 0)) + digest_of(values[100:, :, :9], (100, 0, 0))
    parts += digest_of(values[100:, :, 9:], (100, 0, 9))
    assert int(parts) % MODULUS == _digest(values)
    for shape in ((84_000,), (84_000, 1), (1, 84_000)):  # larger than what is summed at once
        long = values.reshape(shape)
        cut = shape.index(84_000)
        both = [long.narrow(cut, 0, 70_001), long.narrow(cut, 70_001, 13_999)]
        offsets = [(0,) * long.dim(), tuple(70_001 * (dim == cut) for dim in range(long.dim()))]
        parts = sum(
            (digest_of(part, at) for part, at in zip(both, offsets, strict=True)), torch.tensor(0)
        )
        assert int(parts) % MODULUS == _digest(long)


def _with_bits(at: int, bits: int) -> Tensor:
    """VALUES with some bits of one element inverted."""
    changed = VALUES.clone()
    changed.view(-1).view(torch.int32)[at] ^= bits - (1 << 32) if bits >> 31 else bits
    return changed


def _with(values: dict[int, float]) -> Tensor:
    changed = VALUES.clone()
    for at, value in values.items():
        changed.view(-1)[at] = value
    return changed


def _nan(payload: int) -> Tensor:
    changed = VALUES.clone()
    changed.view(-1).view(torch.int32)[3] = 0x7FC00000 | payload
    return changed


CHANGED = {
    **{f"bit {bit}": _with_bits(17, 1 << bit) for bit in range(32)},
    "two signs": _with({4: -float(VALUES.view(-1)[4]), 5: -float(VALUES.view(-1)[5])}),
    "all signs": -VALUES,
    "two elements swapped": _with({4: float(VALUES.view(-1)[5]), 5: float(VALUES.view(-1)[4])}),
    "rows swapped": VALUES[[1, 0, 2, 3, 4]],
    "columns swapped": VALUES[:, [1, 0, 2, 3, 4, 5]],
    "zero": _with({0: 0.0}),
    "negative zero": _with({0: -0.0}),
    "inf": _with({0: math.inf}),
    "nan": _nan(0),
    "another nan": _nan(1),
}


def test_digest_when_any_bit_or_place_differs_then_it_differs() -> None:
    digests = {name: _digest(values) for name, values in CHANGED.items()} | {
        "as it was": _digest(VALUES)
    }
    assert len({*digests.values()}) == len(digests)
    square = VALUES[:, :5]
    assert _digest(square) != _digest(square.T)


@pytest.mark.parametrize("dtype", ["remainder", "bfloat16"])
def test_digest_when_main_params_are_coded_then_it_is_that_of_their_values(dtype: str) -> None:
    main = Precision(dtype).main(torch.randn(300).bfloat16())
    assert isinstance(main, LowPrecisionTensor)
    cut = [main[:130].view(13, 10), main[130:].view(17, 10)]
    parts = digest_of(as_plain(cut[0]), (0, 0)) + digest_of(as_plain(cut[1]), (13, 0))
    assert int(parts) % MODULUS == _digest(main.clone().view(30, 10))
