"""Puts averages into the model in place of its params."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_distopt.optimizer.sharded import ShardedOptimizer


@contextmanager
def averages_shown(
    optimizers: Sequence[ShardedOptimizer], gather: Callable[[], None]
) -> Iterator[None]:
    """Collective: within it the model has the rounded averages, and afterwards its params again.

    Meanwhile each rank keeps a copy of its shards of the model params, because they may be main
    params themselves or hold bits of them. `gather` is collective and gathers the shards of the
    param buffers on all ranks.
    """
    for buffer in (buffer for optimizer in optimizers for buffer in optimizer.buffers):
        buffer.collect()
    averages = [each.averages for each in optimizers if each.averages is not None]
    begun = [
        flat
        for each in optimizers
        if each.averages and each.averages.has_begun
        for flat in each.flat_params
    ]
    pairs = [(flat.model, flat.average) for flat in begun if flat.average is not None]
    kept = [model.clone() for model, _ in pairs]

    @torch.no_grad()
    def put(values: Sequence[Tensor], *, are_shown: bool) -> None:
        for (model, _), value in zip(pairs, values, strict=True):
            model.copy_(value)
        for each in averages:
            each.are_shown = are_shown
        gather()

    try:
        put([average for _, average in pairs], are_shown=True)
        yield
    finally:
        put(kept, are_shown=False)
