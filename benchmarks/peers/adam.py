"""The same AdamW for all: its numbers, and who implements it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

#: Decoupled weight decay in all of them; params of one dimension have none.
ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
#: Largest norm of the gradient.
CLIP_GRAD = 1.0

#: From param groups of fp32 main params.
AdamBuilder = Callable[[list[dict[str, Any]]], Optimizer]


def torch_adam(**implementation: bool) -> AdamBuilder:
    """torch's AdamW, for-loop, `foreach=True` or `fused=True`."""
    return partial(torch.optim.AdamW, **ADAM, **implementation)


def foreign_adam(module: str, name: str, op: str = "", *, may_compile: bool = True) -> AdamBuilder:
    """Another package's class; `op` is what DeepSpeed compiles for it."""

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        cls = getattr(import_module(module), name)
        if op:
            check_compiled(op, may_compile)
        optimizer: Optimizer = cls(groups, **ADAM)
        return optimizer

    return build


def check_compiled(op: str, may_compile: bool) -> None:
    """Compiling one op takes longer than all of a quick run.

    Raises:
        RuntimeError: it would have to be compiled, or compiled again for another torch or
            DeepSpeed, and may not.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(op, verbose=False))
    if not may_compile and not (
        (folder / f"{op}.so").exists() and _is_of_these(folder / "build.ninja")
    ):
        raise RuntimeError(
            f"DeepSpeed's op {op} is not compiled yet, and compiling it takes minutes"
        )


def _is_of_these(recipe: Path) -> bool:
    """Whether an op was compiled with the torch and the DeepSpeed that are imported here."""
    import deepspeed

    text = recipe.read_text() if recipe.exists() else ""
    return all(str(Path(str(module.__file__)).parent) in text for module in (torch, deepspeed))
