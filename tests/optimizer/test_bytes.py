"""Counts the bytes that a step reads and writes, for [Note: bytes of a step] in optimizer/sharded.py."""

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
    """Adds up what each operation reads and writes of tensors with at least `least_numel` elements."""

    def __init__(self, least_numel: int) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}
        self._least_numel = least_numel

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE:
            self.nbytes[name] = self.nbytes.get(name, 0) + self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        total = 0
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        for argument in func._schema.arguments:
            size = sum(self._size(leaf) for leaf in tree_leaves(given.get(argument.name)))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (func.overloadpacket.__name__ == "copy_" and argument.name == "self")
            if argument.name == "grads" and given.get("grad_scale") is None:
                writes = False  # the kernel stores gradients only where it divided them
            total += size * (writes + reads)
        inputs = {leaf.data_ptr() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.data_ptr() not in inputs]
        return total + sum(self._size(leaf) for leaf in fresh)

    def _size(self, leaf: object) -> int:
        if not isinstance(leaf, Tensor) or leaf.numel() < self._least_numel:
            return 0
        return leaf.numel() * leaf.element_size()


def _bytes_an_element(config: DistOptConfig, *, dtype: torch.dtype, deferred: bool | None = None) -> dict[str, float]:
    model = Linear(WIDTH, WIDTH, bias=False).to(dtype)
    optimizer = distribute(model, config)
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    optimizer.sharded._show_flat_params()
    for step in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(model(torch.ones(2, WIDTH, dtype=dtype)).float().square().sum()).backward()
        if step == 0:
            optimizer.step()  # allocates the moments
    with ByteCounter(least_numel=WIDTH) as counter:
        optimizer.step()
    return {name: nbytes / (WIDTH * WIDTH) for name, nbytes in counter.nbytes.items() if nbytes}


@pytest.mark.usefixtures("one_rank")
def test_step_when_divided_then_moves_42_bytes_an_element() -> None:
    config = DistOptConfig(accelerator="torch", clip_grad=1e-3)
    moved = _bytes_an_element(config, dtype=torch.bfloat16)
    # Statistics read the grad; Adam reads grad, main and moments and writes all four; the cast reads 4 and writes 2.
    assert moved == {"dot": 2 * 4, "_fused_adamw_": 32, "copy_": 6}
    # `dot(grad, grad)` names the grad twice and reads it once.
    assert sum(moved.values()) - 4 == 42


@pytest.mark.usefixtures("one_rank")
def test_step_when_divisor_is_one_then_moves_38_bytes_an_element() -> None:
    moved = _bytes_an_element(DistOptConfig(accelerator="torch"), dtype=torch.bfloat16)
    assert moved == {"dot": 2 * 4, "_fused_adamw_": 28, "copy_": 6}
    assert sum(moved.values()) - 4 == 38


@pytest.mark.usefixtures("one_rank")
def test_step_when_params_are_fp32_then_nothing_is_copied() -> None:
    moved = _bytes_an_element(DistOptConfig(accelerator="torch"), dtype=torch.float32)
    assert moved == {"dot": 2 * 4, "_fused_adamw_": 28}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("clip_grad", "adam"), [(0.0, 28), (1e9, 32)])
def test_step_when_the_check_is_deferred_then_divides_wherever_it_may_clip(clip_grad: float, adam: int) -> None:
    config = DistOptConfig(accelerator="torch", clip_grad=clip_grad)
    moved = _bytes_an_element(config, dtype=torch.bfloat16, deferred=True)
    assert moved == {"dot": 2 * 4, "_fused_adamw_": adam, "copy_": 6}
