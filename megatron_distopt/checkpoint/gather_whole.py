"""A tensor of which each rank has some boxes, whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.comm import Group
from megatron_distopt.comm.messages import Message, begin_travel
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
    carried = torch.device("cpu") if "gloo" in group.backend else device
    mine = torch.cat([part.reshape(-1) for part in parts]).to(carried) if parts else None
    if group.rank != 0:
        if mine is not None:
            begin_travel([Message(0, mine)], [], 0, group).wait()
        return None
    known = [held for held in by_rank if held is not None]
    whole = torch.zeros(known[0].shape, dtype=known[0].dtype)
    for rank, held in enumerate(
        by_rank
    ):  # one rank after the other, so that one value is in flight
        if held is None:
            continue
        flat = mine
        if rank != 0 or flat is None:
            flat = torch.empty(sum(held.numels), dtype=whole.dtype, device=carried)
            begin_travel([], [Message(rank, flat)], 0, group).wait()
        for box, part in zip(held.boxes, torch.split(flat.cpu(), held.numels), strict=True):
            whole[box.as_slices()] = part.view(box.sizes)
    return whole
