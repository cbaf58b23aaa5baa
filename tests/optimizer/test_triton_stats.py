"""Gradient statistics by the Triton kernel; test_triton_interpreted.py runs these tests where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.comm import Group
from megatron_distopt.layout import FlatParamPlan, ParamShard, Span
from megatron_distopt.optimizer import triton_stats, triton_table
from megatron_distopt.optimizer.grad_norm import local_numbers, local_stats, reduce_stats
from megatron_distopt.optimizer.main_params import FlatParam, FlatParamKey

HAS_GPU = torch.cuda.is_available()
RUNS = find_spec("triton") is not None and (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not RUNS, reason="needs triton, and a GPU or TRITON_INTERPRET=1")
DEVICE = torch.device("cuda" if HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")

#: (first, stop, elements that are padding, whether it is excluded) of gradients in one buffer.
PARTS = ((0, 3, 0, False), (3, 1030, 7, True), (1030, 1031, 0, False), (1031, 5200, 5, False), (5202, 5212, 0, True))


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "compensated fp32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(triton_stats, "stats_dtype", lambda device: request.param)
    monkeypatch.setattr(triton_stats, "_TABLES", triton_table.Tables())
    if request.param is torch.float32:  # the interpreter adds up compensated lanes one by one
        monkeypatch.setattr(triton_stats, "STATS_BLOCK", 32)
        monkeypatch.setattr(triton_table, "STATS_BLOCK", 32)
        monkeypatch.setattr(triton_table, "_MOST_STATS_PROGRAMS", 8)
    return request.param


def _flat(grad: Tensor, padding: int = 0, *, excluded: bool = False) -> FlatParam:
    span, held = Span(0, grad.numel()), Span(0, grad.numel() - padding)
    shard = ParamShard("p", 0, 0, held, held, held, held)
    main = torch.zeros_like(grad)
    flat = FlatParam(FlatParamPlan(FlatParamKey(0, excluded), 0, span, (shard,)), main, main, grad)
    flat.main.grad = grad
    return flat


def _grads(buffer: Tensor) -> list[FlatParam]:
    parts = [(buffer[first:stop], padding, excluded) for first, stop, padding, excluded in PARTS]
    return [_flat(part.detach(), padding, excluded=excluded) for part, padding, excluded in parts]


def _buffer() -> Tensor:
    buffer = torch.randn(6000, generator=torch.Generator().manual_seed(0))
    buffer[::7] = 0
    return buffer.to(DEVICE)


def test_local_numbers_when_flat_params_lie_anywhere_then_they_are_those_of_float64(dtype: torch.dtype) -> None:
    buffer = _buffer()
    flats = _grads(buffer)
    numbers, flags = local_numbers(flats, DEVICE, count_zeros=True)
    included = [flat for flat in flats if not flat.plan.key.excluded_from_norm]
    squares = sum(float(flat.grad.double().square().sum()) for flat in included)
    zeros = sum(int((flat.grad == 0).sum()) - flat.plan.padding_numel for flat in included)
    # Exact sums, rounded once to the dtype of the result; float64 rounds in each of some thousand additions.
    assert numbers.tolist() == [pytest.approx(squares, rel=1e-13 if dtype is torch.float64 else 2**-24), zeros, 0.0]
    assert numbers.dtype == flags.dtype == dtype
    assert flags.tolist() == [0.0] * len(flats)
    again = local_stats(flats, DEVICE, count_zeros=False)
    assert again.tolist() == [float(numbers[0]), 0.0, 0.0]


def _extreme(number: int, value: float) -> tuple[list[float], Tensor]:
    """Flags and statistics where one element of a gradient is extreme."""
    buffer = _buffer()
    flats = _grads(buffer)
    buffer[PARTS[number][1] - 1] = value
    numbers, flags = local_numbers(flats, DEVICE, count_zeros=False)
    return flags.tolist(), numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e19])
def test_local_numbers_when_one_element_is_extreme_then_its_flat_param_is_told_and_large_from_infinite(
    value: float,
) -> None:
    is_finite = value == 3e19
    for number, (*_, is_excluded) in enumerate(PARTS):
        flags, numbers = _extreme(number, value)
        assert flags == [float(each == number and not is_finite) for each in range(len(PARTS))]
        stats = reduce_stats(numbers.clone(), Group(None, 0, 1), count_zeros=False)
        assert stats.is_finite is is_finite
        if is_finite and not is_excluded:
            assert stats.norm(1.0) == pytest.approx(3e19, rel=1e-6)


def test_local_numbers_when_the_device_has_no_float64_then_large_counts_as_infinite(
    dtype: torch.dtype,
) -> None:
    flags, numbers = _extreme(3, 3e19)
    expected = float(dtype is torch.float32)
    assert (flags, float(numbers[2])) == ([0.0, 0.0, 0.0, expected, 0.0], expected)


def test_local_stats_when_there_are_many_programs_then_the_sum_is_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flats = _grads(_buffer())
    found = [local_stats(flats, DEVICE, count_zeros=True).tolist() for _ in range(2)]
    assert found[0] == found[1]
    # Cut into other programs, which add up in another order.
    monkeypatch.setattr(triton_table, "_MOST_STATS_PROGRAMS", 3)
    monkeypatch.setattr(triton_stats, "_TABLES", triton_table.Tables())
    other = local_stats(flats, DEVICE, count_zeros=True).tolist()
    assert other == [pytest.approx(found[0][0], rel=1e-13), *found[0][1:]]


def test_local_stats_when_there_are_many_flat_params_then_one_launch_measures_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []

    def counted(name: str, *args: Any, **constants: Any) -> None:
        launched.append(name)
        triton_table.launch(name, *args, **constants)

    assert triton_stats.has_kernel(DEVICE)
    monkeypatch.setattr(triton_stats, "launch", counted)
    local_stats([_flat(torch.ones(5, device=DEVICE)) for _ in range(40)], DEVICE, count_zeros=False)
    assert launched == ["statistics"]


def test_has_kernel_when_triton_cannot_compile_then_torchs_statistics_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **constants: Any) -> None:
        raise RuntimeError("no C compiler")

    triton_stats.has_kernel.cache_clear()
    monkeypatch.setattr(triton_stats, "launch", fails)
    numbers, flags = local_numbers([_flat(torch.full((4,), 2.0, device=DEVICE))], DEVICE, count_zeros=False)
    assert (numbers.tolist(), flags.tolist()) == ([16.0, 0.0, 0.0], [0.0])
    assert "no C compiler" in caplog.text
    triton_stats.has_kernel.cache_clear()
