"""Gradient statistics of all flat params by one launch of a Triton kernel, which reads every gradient once.

They are added up in float64, or in fp32 with what every addition loses, always in the same order. `grad_norm` takes
them where they can be had; [Note: large and infinite] there holds for both.
"""

from __future__ import annotations

import logging
import math
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

_log = logging.getLogger("megatron_distopt")

#: Of all models of this process. Models that are alike share one, with its scratch memory: their steps run one after
#: the other on a device.
_TABLES: Tables[StatsTable] = Tables(most=32)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device and gives the right numbers there; it is tried once.

    Triton compiles when a kernel is first launched, for which it needs a C compiler on the machine.
    """
    if find_spec("triton") is None or (device.type != CUDA and os.environ.get("TRITON_INTERPRET") != "1"):
        return False
    try:
        found, wanted = _tried(device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, torch's kernels remain
        _log.warning("gradient statistics are torch's, because Triton cannot compile for %s: %s", device, error)
        return False
    # Whole numbers below 2**53 are exact in float64; compensated fp32 rounds the sum once.
    is_right = all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, wanted, strict=True))
    if not is_right:
        _log.warning("gradient statistics are torch's, because Triton's are %s on %s, not %s", found, device, wanted)
    return is_right


def _tried(device: torch.device) -> tuple[list[float], list[float]]:
    """Statistics of flat params that begin and end off a vector, of several programs, by the kernel and by hand."""
    whole = torch.arange(-2000.0, 40_000.0, device=device)
    spans = [(3, 4098), (4099, 5000), (5001, 41_997)]
    parts = [whole[first:stop] for first, stop in spans]
    numbers = _launch(parts, [(0, False), (0, True), (0, False)], device, count_zeros=True)
    included = (range(first - 2000, stop - 2000) for first, stop in (spans[0], spans[2]))
    total = float(sum(value * value for values in included for value in values))
    return numbers.tolist(), [total, 1.0, 0.0, 0.0, 0.0, 0.0]


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
