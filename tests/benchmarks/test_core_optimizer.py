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

from peers.steppers import Core, StepSetting, set_grads

STEPS = 3


def trained(rank: int, size: int) -> list[tuple[list[Tensor], int]]:
    """Params after some steps, and how often torch's fused kernel was called: with the Adam it chooses, and fused."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    found = []
    for is_fused in (False, True):
        core = Core(StepSetting(1, 64, 0, 1), is_fused=is_fused)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                set_grads(core, norm=4.0)
                core.step()
        calls = sum(event.name == "aten::_fused_adamw_" for event in seen.events())
        found.append(([param.detach().clone() for param in core.params], calls))
        core.close()
    return found


@pytest.mark.long
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_core_when_its_adam_is_fused_then_runs_the_kernel_at_every_step_and_params_are_the_same() -> None:
    (plain, calls), (fused, fused_calls) = run_ranks(trained, 1)[0]
    # One call for the params that decay, one for those that do not.
    assert (calls, fused_calls) == (0, 2 * STEPS)
    for one, other in zip(plain, fused, strict=True):
        # They round in another order, so a value at the edge between two bf16 numbers may be the next of those.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
