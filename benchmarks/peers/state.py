"""The model and the optimizer state that every contestant keeps: names, shapes and values are the
same for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

#: What Adam keeps in fp32 for each element; 12 bytes.
KINDS = ("main", "exp_avg", "exp_avg_sq")
#: A state of zeros would be cheap for a disk that notices; this many values are drawn and repeated.
_BLOCK_NUMEL = 1 << 20


@dataclass(frozen=True)
class Setting:
    """One size of state on one number of ranks."""

    layers: int  # of the model
    hidden: int  # its width
    rank: int  # of this process
    size: int  # data-parallel ranks

    @property
    def numel(self) -> int:
        """Elements of the model."""
        return sum(prod(shape) for shape in named_shapes(self).values())


def named_shapes(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Layers of a transformer with biases and norms: 12 params of which 8 are small."""
    h = setting.hidden
    layer = {
        "norm1_weight": (h,),
        "norm1_bias": (h,),
        "qkv_weight": (3 * h, h),
        "qkv_bias": (3 * h,),
        "proj_weight": (h, h),
        "proj_bias": (h,),
        "norm2_weight": (h,),
        "norm2_bias": (h,),
        "fc1_weight": (4 * h, h),
        "fc1_bias": (4 * h,),
        "fc2_weight": (h, 4 * h),
        "fc2_bias": (h,),
    }
    return {
        f"layer{k}_{name}": shape for k in range(setting.layers) for name, shape in layer.items()
    }


class Weights(Module):
    """bf16 params of zeros: nothing is computed with them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        for name, shape in named_shapes(setting).items():
            self.register_parameter(name, Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def groups_of(module: Module) -> list[dict[str, object]]:
    """Weight decay for matrices only, as everybody has it."""
    params = list(module.parameters())
    small = [param for param in params if param.ndim == 1]
    return [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": small, "weight_decay": 0.0},
    ]


#: By device.
_blocks: dict[torch.device, Tensor] = {}


def fill(tensor: Tensor) -> Tensor:
    """Values that do not compress, at the speed of memory; returns the tensor."""
    block = _blocks.get(tensor.device)
    if block is None:
        drawn = torch.randn(_BLOCK_NUMEL, generator=torch.Generator().manual_seed(1))
        block = _blocks[tensor.device] = drawn.to(tensor.device)
    flat = tensor.detach().view(-1)
    for start in range(0, flat.numel(), _BLOCK_NUMEL):
        piece = flat[start : start + _BLOCK_NUMEL]
        piece.copy_(block[: piece.numel()])
    return tensor


@contextmanager
def untouched_zeros() -> Iterator[None]:
    """Large zeros are memory that the system gives when it is first written, as `calloc` has it.

    `torch.zeros` writes its zeros. Grad buffers are 4 bytes an element on every rank and take no
    part in a save, so the memory that they do not take is there for more of the state.
    """
    import numpy as np

    plain = torch.zeros

    def zeros(*shape: Any, **options: Any) -> Tensor:
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        dtype = options.get("dtype") or torch.float32
        if prod(shape) < _BLOCK_NUMEL or options.get("device") not in (
            None,
            "cpu",
            torch.device("cpu"),
        ):
            return plain(*shape, **options)
        return (
            torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8))
            .view(dtype)
            .view(shape)
        )

    torch.zeros = zeros
    try:
        yield
    finally:
        torch.zeros = plain


@torch.no_grad()
def fill_adam(adam: torch.optim.Optimizer) -> None:
    """Values that do not compress, as after ten updates, in a peer's Adam over its main params."""
    for main in _mains_of(adam):
        adam.state[main] = {
            "step": torch.tensor(10.0),
            **{kind: fill(torch.empty_like(main)) for kind in KINDS[1:]},
        }
        fill(main)


def tensors_of_adam(adam: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Main params and moments, live."""
    for main in _mains_of(adam):
        yield main
        yield from (adam.state[main][kind] for kind in KINDS[1:])


def _mains_of(adam: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (main for group in adam.param_groups for main in group["params"])


def checksum(tensors: Iterable[Tensor]) -> list[float]:
    """One number a tensor, by which a load is recognised as done."""
    return [float(_sum(tensor)) for tensor in tensors]


def _sum(tensor: Tensor) -> Tensor:
    """In pieces, so that the double precision copy stays small."""
    pieces = tensor.detach().view(-1).split(_BLOCK_NUMEL)
    return torch.stack([piece.double().sum() for piece in pieces]).sum()
