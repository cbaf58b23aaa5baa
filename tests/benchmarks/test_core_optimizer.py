"""megatron-core's optimizer as the benchmarks run it: with the Adam that it chooses, and with torch's fused one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.step_contestants import Core
from peers.steppers import StepSetting, set_grads

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTING = StepSetting(1, 64, 0, 1)
STEPS = 3
FUSED = "aten::_fused_adamw_"


def _trained(is_fused: bool) -> tuple[list[Tensor], int]:
    """Params after some steps, and how often torch's fused kernel was called."""
    core = Core(SETTING, is_fused=is_fused)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                set_grads(core, norm=4.0)
                core.step()
        return [param.detach().clone() for param in core.params], sum(event.name == FUSED for event in seen.events())
    finally:
        core.close()


def both(rank: int, size: int) -> dict[bool, tuple[list[Tensor], int]]:
    sys.path.append(str(EXAMPLES))
    return {is_fused: _trained(is_fused) for is_fused in (False, True)}


@pytest.mark.long
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_core_when_its_adam_is_fused_then_runs_the_kernel_at_every_step_and_params_are_the_same() -> None:
    ((plain, calls), (fused, fused_calls)) = run_ranks(both, 1)[0].values()
    # One call for the params that decay, one for those that do not.
    assert (calls, fused_calls) == (0, 2 * STEPS)
    for one, other in zip(plain, fused, strict=True):
        # They round in another order, so a value at the edge between two bf16 numbers may be the next of those.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
