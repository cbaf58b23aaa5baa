"""A tensor of which each rank has some boxes, whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.comm import Group, gather_to_first
from megatron_distopt.layout import Box


@dataclass(frozen=True)
class Held:
    """What a rank has of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def numels(self) -> list[int]:
        return [box.numel for box in self.boxes]


def gather_whole(
    parts: Sequence[Tensor], by_rank: Sequence[Held | None], group: Group, device: torch.device
) -> Tensor | None:
    """Collective: returns the whole tensor on the CPU of the first rank, None on the others.

    Args:
        parts: that this rank has, in the order of its boxes.
        by_rank: what each rank has, None where that is nothing; one of them has something.
        device: that the group's backend carries, unless it carries the CPU.
    """
    known = [held for held in by_rank if held is not None]
    whole = torch.zeros(known[0].shape, dtype=known[0].dtype)
    most = max(sum(held.numels) for held in known)
    carried = torch.device("cpu") if "gloo" in group.backend else device
    sent = torch.zeros(most, dtype=whole.dtype, device=carried)
    if parts:
        values = torch.cat([part.reshape(-1) for part in parts])
        sent[: values.numel()] = values.to(carried)
    gathered = gather_to_first(sent, group)
    if gathered is None:
        return None
    for held, of_rank in zip(by_rank, torch.split(gathered.cpu(), most), strict=True):
        if held is None:
            continue
        parts_of_rank = torch.split(of_rank[: sum(held.numels)], held.numels)
        for box, part in zip(held.boxes, parts_of_rank, strict=True):
            whole[box.as_slices()] = part.view(box.sizes)
    return whole
