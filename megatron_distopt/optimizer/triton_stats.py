"""Gradient statistics of all flat params by one launch of a Triton kernel, which reads every gradient once.

They are added up in float64, or in fp32 with what every addition loses, always in the same order. `grad_norm` takes
them where they can be had; [Note: large and infinite] there holds for both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_distopt.device import current
from megatron_distopt.optimizer.accelerator import CUDA, stats_dtype
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.triton_table import STATS_BLOCK, StatsRow, StatsTable, Tables, launch, place_grads

__all__ = ["has_kernel", "measure"]

_log = logging.getLogger("megatron_distopt")

#: Of all models of this process.
_TABLES: Tables[StatsTable] = Tables(most=32)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device; it is tried once.

    Triton compiles when a kernel is first launched, for which it needs a C compiler on the machine.
    """
    if find_spec("triton") is None or (device.type != CUDA and os.environ.get("TRITON_INTERPRET") != "1"):
        return False
    grad = torch.ones(8, device=device)
    try:
        _launch([grad], [(0, False)], device, count_zeros=False)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, torch's kernels remain
        _log.warning("gradient statistics are torch's, because Triton cannot compile for %s: %s", device, error)
        return False
    return True


def measure(flat_params: Sequence[FlatParam], device: torch.device, *, count_zeros: bool) -> Tensor:
    """What `grad_norm.local_numbers` returns, one after the other in one tensor; the host looks at none of it.

    Args:
        flat_params: with their gradients attached; at least one.
        device: of the gradients.
        count_zeros: zeros are 0 where they are not asked for.
    """
    traits = [(flat.plan.padding_numel if count_zeros else 0, flat.plan.key.excluded_from_norm) for flat in flat_params]
    return _launch([flat.main_grad for flat in flat_params], traits, device, count_zeros=count_zeros)


def _launch(
    grads: Sequence[Tensor], traits: Sequence[tuple[int, bool]], device: torch.device, *, count_zeros: bool
) -> Tensor:
    sources, places = place_grads(grads)
    rows = tuple(
        StatsRow(place, grad.numel(), *trait) for place, grad, trait in zip(places, grads, traits, strict=True)
    )
    dtype = stats_dtype(device)
    with current(device):
        table = _TABLES.get((rows, device), device, lambda: StatsTable.of(rows, dtype, device))
        out = torch.empty(3 + len(rows), dtype=dtype, device=device)
        launch(
            "statistics",
            table.num_programs,
            table.columns.tensor,
            table.owners.tensor,
            table.sums,
            table.zeros,
            table.counter,
            out,
            len(rows),
            table.num_programs,
            table.blocks,
            table.padding_numel,
            int(count_zeros),
            *sources,
            WIDE=dtype is torch.float64,
            BLOCK=STATS_BLOCK,
        )
    return out
