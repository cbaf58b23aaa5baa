"""A small module with gradients that are exact: their sums are the same in every order, so results
compare bit for bit.

A gradient is a small integer times 2**-8. Its mantissa fits into a bf16, and sums of some thousand
squares of it into an fp32, so neither the sum over ranks and microbatches nor the norm rounds
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict, Sequential

from megatron_distopt import TorchDistributedOptimizer
from megatron_distopt.optimizer.step import StepDecision

#: By name: larger than a shard at 4 ranks, smaller than any, cut by several shard borders, of one
#: element.
SHAPES = {
    "wide.weight": (31, 17),
    "wide.bias": (17,),
    "norm.weight": (5,),
    "deep.weight": (3, 7, 11),
    "scale": (1,),
}

#: Every gradient is a multiple of this over 2**8: so that an average over 2, 3 or 4 ranks is exact
#: as well.
_STEP = 12


class Params(Module):
    """Params and nothing else; `forward` weighs them with given gradients.

    Args:
        dtypes: by param name; fp32 for all others.
    """

    def __init__(
        self, dtypes: Mapping[str, torch.dtype] | None = None, default: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        dtypes = dtypes or {}
        self.held = ParameterDict(
            {
                name.replace(".", "_"): Parameter(
                    torch.randn(shape, generator=generator).to(dtypes.get(name, default))
                )
                for name, shape in SHAPES.items()
            }
        )

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss whose gradient is exactly `grads`."""
        return torch.stack(
            [(param.float() * grads[name]).sum() for name, param in self.named()]
        ).sum()

    def named(self) -> list[tuple[str, Parameter]]:
        """By the names of `SHAPES`, in that order."""
        return [(name, self.held[name.replace(".", "_")]) for name in SHAPES]

    def groups(self) -> list[dict[str, object]]:
        """Two param groups: with weight decay, and without for params of one dimension."""
        params = [param for _, param in self.named()]
        decayed = [param for param in params if param.ndim > 1]
        others = [param for param in params if param.ndim <= 1]
        return [
            {"params": decayed, "wd_mult": 1.0},
            {"params": others, "weight_decay": 0.0, "wd_mult": 0.0},
        ]


def exact_grads(step: int, microbatch: int, rank: int) -> dict[str, Tensor]:
    """Gradients of one microbatch of one rank, by the names of `SHAPES`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return {
        name: torch.randint(-3, 4, shape, generator=generator).float() * (_STEP / 256)
        for name, shape in SHAPES.items()
    }


def train_params(
    model: Params, optimizer: Any, steps: Iterable[int], ranks: Sequence[int] = (0,)
) -> None:
    """Trains on exact gradients, averaged over `ranks`: in a distributed run the own one alone, in
    one process all of them."""
    scale = getattr(optimizer, "scale_loss", lambda loss: loss)  # torch's own have no loss scale
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            scale(model(exact_grads(step, 0, rank)) / len(ranks)).backward()
        optimizer.step()


def summed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of gradients, by name."""
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in SHAPES}


def stepped(optimizer: TorchDistributedOptimizer) -> StepDecision:
    """Collective: makes a step and returns what it did."""
    optimizer.step()
    assert optimizer.last_step is not None
    return optimizer.last_step


def fitted(model: Sequential, optimizer: Any, seed: int, rows: int = 32) -> float:
    """A step towards random targets in bf16; the loss before it."""
    generator, widths = (
        torch.Generator().manual_seed(seed),
        (model[0].in_features, model[-1].out_features),
    )
    inputs, targets = (torch.randn(rows, width, generator=generator).bfloat16() for width in widths)
    loss = (model(inputs) - targets).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)
