"""Counts the bytes that a step reads and writes, for [Note: bytes of a step] in
optimizer/sharded.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_distopt import DistOptConfig, distribute

WIDTH = 512

#: They only describe memory, or allocate it.
_FREE = ("detach", "view", "slice", "split", "alias", "empty", "reshape")


class ByteCounter(TorchDispatchMode):
    """Adds up what each operation reads and writes of tensors with at least `least_numel`
    elements."""

    def __init__(self, least_numel: int) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}
        self._least_numel = least_numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE:
            self.nbytes[name] = self.nbytes.get(name, 0) + self._count(
                func, args, kwargs or {}, out
            )
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        total = 0
        given = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
        given.update(kwargs)
        for argument in func._schema.arguments:
            size = sum(self._size(leaf) for leaf in tree_leaves(given.get(argument.name)))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            is_copy = func.overloadpacket.__name__ in ("copy_", "_foreach_copy_")
            reads = not (is_copy and argument.name == "self")
            if argument.name == "grads" and given.get("grad_scale") is None:
                writes = False  # the kernel stores gradients only where it divided them
            total += size * (writes + reads)
        inputs = {leaf.data_ptr() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        fresh = [
            leaf
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor) and leaf.data_ptr() not in inputs
        ]
        return total + sum(self._size(leaf) for leaf in fresh)

    def _size(self, leaf: object) -> int:
        if not isinstance(leaf, Tensor) or leaf.numel() < self._least_numel:
            return 0
        return leaf.numel() * leaf.element_size()


def _bytes_an_element(
    config: DistOptConfig, *, dtype: torch.dtype, deferred: bool | None = None
) -> dict[str, float]:
    model = Linear(WIDTH, WIDTH, bias=False).to(dtype)
    optimizer = distribute(model, config)
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    optimizer.sharded.show_flat_params()
    for step in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(
            model(torch.ones(2, WIDTH, dtype=dtype)).float().square().sum()
        ).backward()
        if step == 0:
            optimizer.step()  # allocates the moments
    with ByteCounter(least_numel=WIDTH) as counter:
        optimizer.step()
    return {name: nbytes / (WIDTH * WIDTH) for name, nbytes in counter.nbytes.items() if nbytes}


#: Options, dtype of the params, whether the check is deferred, and what the update and the cast
#: into model params move.
MOVED: dict[str, tuple[dict[str, Any], torch.dtype, bool | None, dict[str, float]]] = {
    # Adam reads grad, main and moments and writes all four; the cast reads 4 and writes 2.
    "divided": (
        {"clip_grad": 1e-3},
        torch.bfloat16,
        None,
        {"_fused_adamw_": 32, "_foreach_copy_": 6},
    ),
    "divisor one": ({}, torch.bfloat16, None, {"_fused_adamw_": 28, "_foreach_copy_": 6}),
    "fp32 params are not copied": ({}, torch.float32, None, {"_fused_adamw_": 28}),
    "deferred": ({}, torch.bfloat16, True, {"_fused_adamw_": 28, "_foreach_copy_": 6}),
    "deferred, may clip": (
        {"clip_grad": 1e9},
        torch.bfloat16,
        True,
        {"_fused_adamw_": 32, "_foreach_copy_": 6},
    ),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MOVED)
def test_step_when_its_bytes_are_counted_then_at_most_42_an_element(name: str) -> None:
    options, dtype, deferred, expected = MOVED[name]
    moved = _bytes_an_element(
        DistOptConfig(accelerator="torch", **options), dtype=dtype, deferred=deferred
    )
    assert moved == {"dot": 2 * 4, **expected}
    # `dot(grad, grad)`, the statistics, names the grad twice and reads it once.
    assert sum(moved.values()) - 4 <= 42
