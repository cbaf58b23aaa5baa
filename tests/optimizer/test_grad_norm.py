"""Gradient statistics of sharded models against those of the whole model in one process, for each
kind of duplicate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.layout import FlatParamPlan, ParamShard, Span
from megatron_distopt.optimizer import grad_norm
from megatron_distopt.optimizer.grad_norm import (
    GradStats,
    local_numbers,
    local_stats,
    nonfinite_params,
)
from megatron_distopt.optimizer.main_params import FlatParam, FlatParamKey
from tests.support.models import stepped
from tests.support.spawn import run_ranks


@dataclass(frozen=True)
class Piece:
    """A param on one model-parallel rank."""

    whole: str  # name of the tensor of the whole model
    # of it that this rank holds, first and last exclusive; all where None
    rows: tuple[int, int] | None = None
    excluded: bool = False  # from the norm, by this rank

    @property
    def tensor(self) -> Tensor:
        """Its part of the whole model's."""
        return WHOLE[self.whole] if self.rows is None else WHOLE[self.whole][slice(*self.rows)]


#: The whole model's gradient; small integers over 2**8 with some zeros, so that every sum below is
#: exact.
WHOLE = {
    name: torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float() / 256
    for seed, (name, shape) in enumerate(
        {"embedding": (16, 5), "linear": (8, 9), "norm": (9,), "head": (6, 5)}.items()
    )
}

#: By kind: the params of model-parallel rank 0 and 1.
MODELS = {
    "tensor parallel with a duplicated norm": [
        {"weight": Piece("linear", (0, 4)), "norm": Piece("norm")},
        {"weight": Piece("linear", (4, 8)), "norm": Piece("norm", excluded=True)},
    ],
    "pipeline with a shared embedding": [
        {"embedding": Piece("embedding"), "linear": Piece("linear")},
        {"head": Piece("head"), "embedding": Piece("embedding", excluded=True)},
    ],
    "sequence parallel norms on both ranks": [
        {"norm": Piece("norm"), "weight": Piece("linear", (0, 4)), "norm2": Piece("embedding")},
        {
            "norm": Piece("norm", excluded=True),
            "weight": Piece("linear", (4, 8)),
            "norm2": Piece("embedding", excluded=True),
        },
    ],
}


class Part(Module):
    """The params of one model-parallel rank."""

    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__()
        self.held = ParameterDict(
            {name: Parameter(piece.tensor.clone()) for name, piece in pieces.items()}
        )

    def forward(self, pieces: dict[str, Piece]) -> Tensor:
        """A loss whose gradient is the whole model's."""
        return torch.stack(
            [(self.held[name] * piece.tensor).sum() for name, piece in pieces.items()]
        ).sum()


def measure(rank: int, size: int) -> dict[str, tuple[float | None, int | None]]:
    """2 model-parallel × 2 data-parallel ranks: ranks 0, 2 are one data-parallel group and 1, 3 the
    other."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return {kind: _measure(parts[rank % 2], groups[rank % 2]) for kind, parts in MODELS.items()}


def _measure(pieces: dict[str, Piece], group: dist.ProcessGroup) -> tuple[float | None, int | None]:
    model = Part(pieces)
    optimizer = distribute(
        model,
        DistOptConfig(accelerator="torch", count_zeros=True, bucket_size=40),
        process_group=group,
        stats_process_group=dist.group.WORLD,
        excluded_from_norm=lambda name: pieces[name.removeprefix("held.")].excluded,
    )
    model(pieces).backward()
    result = stepped(optimizer)
    return result.grad_norm, result.num_zeros


def test_stats_when_params_are_duplicated_then_each_element_counts_once() -> None:
    measured = run_ranks(measure, 4)
    # or twice would be as once
    assert all(WHOLE[name].abs().sum() > 0 for name in ("norm", "embedding", "linear"))
    for kind, parts in MODELS.items():
        pieces = [piece for part in parts for piece in part.values()]
        included = torch.cat([piece.tensor.flatten() for piece in pieces if not piece.excluded])
        wanted = (float(included.double().norm()), int((included == 0).sum()))
        for rank in range(4):
            # All sums are exact; one square root in float64 is left on either side.
            assert measured[rank][kind] == pytest.approx(wanted, rel=1e-15, abs=0.0), kind


@pytest.mark.parametrize(
    ("change", "finite", "norm"),
    [
        (lambda grad: grad.fill_(0.5), True, 0.5 * 3000**0.5),
        # Above the 1.8e19 at which a sum of squares overflows in fp32.
        (lambda grad: grad.fill_(3e19), True, 3e19 * 3000**0.5),
        (
            lambda grad: grad.zero_().index_fill_(0, torch.tensor([7]), float("inf")),
            False,
            float("inf"),
        ),
        (lambda grad: grad.zero_().index_fill_(0, torch.tensor([2999]), float("nan")), False, None),
    ],
    ids=["ordinary", "huge", "inf", "nan"],
)
def test_local_stats_when_values_are_extreme_then_tells_large_from_infinite(
    change: Callable[[Tensor], Tensor], finite: bool, norm: float | None
) -> None:
    grad = torch.empty(3000)
    change(grad)
    run = _flat_param(grad)
    stats = _stats_of([run])
    assert stats.is_finite == finite
    if norm is not None:
        # fp32 squares in pieces: 1e-7 each, and their sum in float64.
        assert stats.norm(1.0) == pytest.approx(norm, rel=1e-6)


@pytest.fixture(params=["sum of squares", "its root", "neither"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU stands for a device at whose numbers nobody looks, with the kernels of newer and of
    older releases."""
    monkeypatch.setattr(grad_norm, "CPU", "no device")
    if request.param != "sum of squares":
        monkeypatch.setattr(grad_norm, "_POWSUM", None)
    monkeypatch.setattr(grad_norm, "_HAS_WIDE_NORM", request.param != "neither")
    return str(request.param)


def test_statistics_when_nobody_may_look_at_them_then_large_is_told_from_infinite_where_torch_can(
    elsewhere: str,
) -> None:
    values = {"ordinary": 0.5, "huge": 3e19, "inf": math.inf, "nan": math.nan}
    device, found = torch.device("cpu"), {}
    for name, value in values.items():
        run = _flat_param(torch.full((3000,), value))
        stats = _stats_of([run])
        numbers, flags = local_numbers([run], [run.grad], device, count_zeros=False)
        assert numbers.tolist() == pytest.approx(
            [stats.sum_of_squares, 0.0, float(not stats.is_finite)], nan_ok=True
        )
        found[name] = stats.is_finite, flags.tolist() == [0.0]
    is_told = elsewhere != "neither"
    assert found == {
        "ordinary": (True, True),
        "huge": (is_told, is_told),
        "inf": (False, False),
        "nan": (False, False),
    }
    assert local_numbers([], [], device, count_zeros=False)[0].tolist() == [0.0, 0.0, 0.0]


def test_statistics_when_nobody_may_look_at_them_then_the_norm_is_that_of_float64(
    elsewhere: str,
) -> None:
    grad = torch.randn(100_000, generator=torch.Generator().manual_seed(5))
    run = _flat_param(grad)
    stats = _stats_of([run])
    # fp32 sums are some 1e-6 off in pieces of 2**26; float64 rounds at 1e-16 in each of some
    # thousand partial sums.
    bound = 1e-5 if elsewhere == "neither" else 1e-13
    assert stats.norm(1.0) == pytest.approx(float(grad.double().norm()), rel=bound)


def test_nonfinite_params_when_only_squares_overflow_then_the_large_ones_are_named() -> None:
    large, small = _flat_param(torch.full((4,), 3e19)), _flat_param(torch.ones(4))
    assert nonfinite_params([small, large]) == ["p (finite, but above 1.8e19)"]
    infinite = _flat_param(torch.full((4,), math.inf))
    assert nonfinite_params([small, large, infinite]) == ["p"]


def test_local_stats_when_an_excluded_param_is_infinite_then_is_not_finite() -> None:
    runs = [_flat_param(torch.ones(4)), _flat_param(torch.full((4,), float("inf")), excluded=True)]
    stats = _stats_of(runs)
    assert (stats.num_nonfinite_ranks, stats.sum_of_squares, stats.num_zeros) == (1, 4.0, None)


def _flat_param(grad: Tensor, *, excluded: bool = False) -> FlatParam:
    span = Span(0, grad.numel())
    shard = ParamShard("p", 0, 0, span, span, span, span)
    main = torch.zeros_like(grad)
    return FlatParam(FlatParamPlan(FlatParamKey(0, excluded), 0, span, (shard,)), main, main, grad)


def _stats_of(flat_params: list[FlatParam]) -> GradStats:
    grads = [flat.grad for flat in flat_params]
    total, _, nonfinite = local_stats(
        flat_params, grads, grads[0].device, count_zeros=False
    ).tolist()
    return GradStats(total, None, int(nonfinite))
