"""benchmarks/peers/fork_step.py against the optimizer that it re-implements, bit for bit.

The fork is not part of this repository; the test needs

    MEGATRON_FORK=/path/to/Megatron-DeepSpeed     a checkout of main, 4efb479d
    MEGATRON_FORK_RUN=/path/to/mds_on_cpu         with the shim.py that helps the fork's own
    optimizer onto a CPU

and is skipped where one is unset.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.adam import torch_adam
from peers.fork_step import ForkStep
from peers.state import groups_of

_UNSET = [name for name in ("MEGATRON_FORK", "MEGATRON_FORK_RUN") if not os.environ.get(name)]

STEPS = 3
CLIP_GRAD = 1.0
#: With 3 ranks the buffer is padded, and a param lies on two of them.
SHAPES = ((7, 5), (5,), (11,), (4, 9))
#: A step that is clipped is followed by one that is not.
SIZES = (4.0, 0.01, 1.0)
LOSS_SCALES = (None, 128.0)


def _model() -> Module:
    generator = torch.Generator().manual_seed(1)
    return ParameterList(
        [Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    )


def _gradients(rank: int, step: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [SIZES[step] * scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def _train(
    model: Module, rank: int, scale: float, zero: Callable[[], None], act: Callable[[], Any]
) -> list[Any]:
    """The params after every step, and the norm."""
    seen = []
    for step in range(STEPS):
        zero()
        for param, gradient in zip(model.parameters(), _gradients(rank, step, scale), strict=True):
            param.main_grad.add_(gradient)
        norm = act()
        seen.append((torch.cat([param.detach().flatten() for param in model.parameters()]), norm))
    return seen


def _re_implemented(rank: int, size: int, loss_scale: float | None) -> list[Any]:
    model = _model()
    adam = torch_adam(foreach=False)
    fork = ForkStep(model, adam, rank=rank, size=size, clip_grad=CLIP_GRAD, loss_scale=loss_scale)

    def act() -> float | None:
        fork.reduce()
        norm = fork.step()
        fork.gather()
        return norm

    return _train(model, rank, loss_scale or 1.0, fork.zero_grad, act)


def _with_the_fork(rank: int, loss_scale: float | None) -> list[Any]:
    from megatron.model.distributed import DistributedDataParallel
    from megatron.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.optimizer.grad_scaler import ConstantGradScaler

    model = _model()
    wrapped = DistributedDataParallel(model, True, True)
    adam = torch_adam(foreach=False)(groups_of(model))
    scaler = None if loss_scale is None else ConstantGradScaler(loss_scale)
    optimizer = DistributedOptimizer(
        adam, CLIP_GRAD, False, True, True, False, True, torch.bfloat16, scaler, [wrapped]
    )
    args = SimpleNamespace(barrier_with_L1_time=False, sequence_parallel=False)

    def zero() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()

    def act() -> float | None:
        optimizer.reduce_model_grads(args, _timers)
        norm: float | None = optimizer.step(args, _timers)[1]
        optimizer.gather_model_params(args, _timers)
        return norm

    return _train(model, rank, loss_scale or 1.0, zero, act)


def _timers(*name: object, **options: object) -> Any:
    return SimpleNamespace(start=lambda **kwargs: None, stop=lambda **kwargs: None)


def both(rank: int, size: int) -> dict[float | None, tuple[list[Any], list[Any]]]:
    sys.path[:0] = [os.environ["MEGATRON_FORK"], os.environ["MEGATRON_FORK_RUN"]]
    os.environ.update(MEGA_SHIM="mds,native,-curves", DS_ACCELERATOR="cpu")
    __import__("shim")
    from megatron.core import mpu

    mpu.initialize_model_parallel(use_distributed_optimizer=True)
    return {
        scale: (_re_implemented(rank, size, scale), _with_the_fork(rank, scale))
        for scale in LOSS_SCALES
    }


@pytest.mark.skipif(bool(_UNSET), reason=f"needs the real fork: {', '.join(_UNSET)} unset")
@pytest.mark.parametrize("size", (1, 3))
def test_fork_step_when_beside_the_fork_then_params_and_norms_are_bit_for_bit_equal(
    size: int,
) -> None:
    for found in run_ranks(both, size):
        for ours, theirs in found.values():
            for (params, norm), (other_params, other_norm) in zip(ours, theirs, strict=True):
                assert norm == other_norm and torch.equal(params, other_params)
