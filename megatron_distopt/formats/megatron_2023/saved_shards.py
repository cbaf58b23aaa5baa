"""What files of a fork hold of a param: one shard of it for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Span


@dataclass(frozen=True)
class Origin:
    """Where a state comes from, for errors."""

    what: str  # the state and its file, if that is known, as a sentence begins with it
    remedy: str  # what to do if it does not fit


@dataclass(frozen=True, eq=False)
class SavedShard:
    """What a rank saved of one param."""

    in_param: Span  # elements of the flattened param
    tensors: Mapping[str, Tensor]  # by kind, 1-D; without "main" for a param of fp32

    @property
    def moments(self) -> dict[str, Tensor]:
        """What is kept beside the main param."""
        return {kind: tensor for kind, tensor in self.tensors.items() if kind != MAIN}

    def holds(self, span: Span) -> bool:
        return self.in_param.intersect(span) == span


def in_order(
    name: str, span: Span, parts: Iterable[SavedShard], origin: Origin
) -> list[SavedShard]:
    """The shards of these elements of a param in order, after checking that they are complete and
    hold the same kinds."""
    found = sorted(parts, key=lambda part: part.in_param.start)
    starts = [part.in_param.start for part in found]
    stops = [part.in_param.stop for part in found]
    if [*starts, span.stop] != [span.start, *stops]:
        held = ", ".join(f"{part.in_param.start} to {part.in_param.stop}" for part in found)
        raise CheckpointError(
            f"{origin.what} holds elements {held or 'none'} of {name!r}, and must hold each from "
            f"{span.start} to {span.stop} once, on one rank. {origin.remedy}."
        )
    kinds = {kind for part in found for kind in part.tensors}
    for part in found:
        # Nothing is kept for a param that was never updated.
        if part.tensors.keys() not in (kinds, kinds & {MAIN}):
            held = ", ".join(sorted(part.tensors))
            needed = ", ".join(sorted(kinds))
            raise CheckpointError(
                f"{origin.what} holds {held or 'nothing'} of {name!r} on one rank, but {needed} "
                f"on another. {origin.remedy}."
            )
    return found


def joined(parts: Sequence[SavedShard], kind: str) -> Tensor:
    """The values of parts in order; zeros where nothing is kept."""
    values = [part.tensors.get(kind, torch.zeros(part.in_param.numel)) for part in parts]
    return values[0] if len(values) == 1 else torch.cat(values)
