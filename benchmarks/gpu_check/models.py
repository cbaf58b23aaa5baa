"""Models and data of the checks of correctness: small, the same on all ranks, and the same at every
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import GELU, LayerNorm, Linear, Module, Parameter, ParameterDict, Sequential

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
#: Elements: several buckets in the models below.
BUCKET_SIZE = 20_000
#: Odd ones among them, so that params begin at every alignment.
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding": (61, 67),
    "bias": (131,),
    "weight": (129, 256),
    "scalar": (1,),
    "deep": (5, 7, 11),
    "last": (64, 512),
    "odd": (4099,),
}
#: Kept in fp32 in a model of 16 bits.
_WIDE = "bias"
_WIDTH, _BATCH = 96, 16


class Given(Module):
    """Its gradients are what it is given.

    Args:
        dtype: of all params but one, which is fp32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        values = {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}
        wide = {name: torch.float32 if name == _WIDE else dtype for name in _SHAPES}
        self.held = ParameterDict(
            {name: Parameter(value.to(wide[name])) for name, value in values.items()}
        )

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss whose gradient with respect to each param is the given one."""
        parts = [
            (self.held[name] * grad.to(self.held[name])).float().sum()
            for name, grad in grads.items()
        ]
        return torch.stack(parts).sum()


def grads_of(step: int, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Multiples of 1/256 that bf16 and fp16 hold: any sum of them is exact, in whatever order it is
    added up."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: (torch.randint(-8, 9, shape, generator=generator) / 256).to(device)
        for name, shape in _SHAPES.items()
    }


def mean_grads(step: int, size: int, device: torch.device) -> dict[str, Tensor]:
    """Of all ranks; exact where their number is a power of two."""
    everyones = [grads_of(step, rank, device) for rank in range(size)]
    return {
        name: sum((grads[name] for grads in everyones[1:]), everyones[0][name]) / size
        for name in _SHAPES
    }


def groups_of(params: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    """Params of one dimension have no weight decay."""
    flat = [param for name, param in params.items() if len(_SHAPES[name]) == 1]
    return [
        {"params": [param for name, param in params.items() if len(_SHAPES[name]) > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]


class Net(Sequential):
    """A perceptron with norms, which computes the same bits from the same input."""

    def __init__(self, dtype: torch.dtype, layers: int = 4) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            parts: list[Module] = []
            for _ in range(layers):
                parts += [
                    Linear(_WIDTH, 2 * _WIDTH),
                    GELU(),
                    Linear(2 * _WIDTH, _WIDTH),
                    LayerNorm(_WIDTH),
                ]
            super().__init__(*parts)
        self.to(dtype)

    def loss(self, sample: Tensor) -> Tensor:
        """fp32: how far the output is from the input with its elements in reverse order."""
        output: Tensor = self(sample.to(next(self.parameters()).dtype))
        return (output.float() - sample.flip(-1)).square().mean()


def samples(step: int, rank: int, device: torch.device, count: int = 1) -> list[Tensor]:
    """Microbatches [16, 96] of one rank, fp32."""
    generator = torch.Generator().manual_seed(100_000 + 1000 * step + rank)
    return [torch.randn(_BATCH, _WIDTH, generator=generator).to(device) for _ in range(count)]


def relative_change(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor]
) -> float:
    """How far two results are apart, over how far the second went from the start; root of the sums
    of squares."""
    apart = sum(_square(one, other) for one, other in zip(ours, theirs, strict=True))
    went = sum(_square(one, other) for one, other in zip(theirs, start, strict=True))
    return float((apart / went) ** 0.5)


def _square(one: Tensor, other: Tensor) -> float:
    return float(
        (one.detach().float().cpu().double() - other.detach().float().cpu().double()).square().sum()
    )
