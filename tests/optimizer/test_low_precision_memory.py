"""Bytes an element of the optimizer state in every precision, read off the live tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear

from megatron_distopt import distribute
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision

#: Enough that the count of updates and the last block do not show in three digits; one rank owns all of it.
NUMEL = 512 * 512


@pytest.mark.parametrize(
    ("precision", "state_nbytes"),
    [
        (Precision(), 12),
        (Precision("remainder"), 10),
        (Precision("remainder", "bfloat16", "bfloat16"), 6),
        (Precision("remainder", "int8", "int8"), 4 + 2 / 128),
        (Precision("remainder", "float8_e4m3fn", "float8_e5m2"), 4 + 2 / 128),
        (Precision("bfloat16", "int8", "int8"), 2 + 2 / 128),
        (Precision("float16", "float16", "float16"), 6 + 3 / 128),
        (Precision("float32", "float32", "int8"), 9 + 1 / 128),
    ],
)
@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_memory_when_state_is_kept_in_less_then_it_is_what_the_page_says(
    precision: Precision, state_nbytes: float, grads_in_fp32: bool, one_rank: None
) -> None:
    model = Linear(512, 512, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    ours = distribute(model, optimizer, grads_in_fp32=grads_in_fp32, **vars(precision))
    for _ in range(2):
        model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
        ours.step()
        ours.zero_grad()
    memory = ours.memory
    assert memory.param_nbytes == 2 * NUMEL
    assert memory.grad_nbytes == (4 if grads_in_fp32 else 2) * NUMEL
    assert memory.state_nbytes / NUMEL == pytest.approx(state_nbytes, abs=1e-3)
    assert memory.undistributed_state_nbytes / NUMEL == pytest.approx(state_nbytes, abs=1e-2)
