"""Which parts of which params are in a rank's file of per-rank files, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan
from megatron_distopt.hosts.megatron_2023.state_per_rank_facts import Kind, kinds
from megatron_distopt.layout import ParamShard, owned_shards

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["FilePosition", "flat", "positions_by_group", "positions_in"]


@dataclass(frozen=True)
class FilePosition:
    """A param of which this rank's file has a part.

    Args:
        kind: see `Kind`.
        shard: in the split of the files.
    """

    kind: Kind
    shard: ParamShard

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def group(self) -> int:
        return self.kind[0]

    @property
    def has_main(self) -> bool:
        return self.kind[1]


def positions_in(plan: BufferPlan, kind_of: Mapping[str, Kind]) -> Iterator[FilePosition]:
    """Of one buffer, in its order.

    Args:
        plan: of the run.
        kind_of: `kinds` of the optimizer.
    """
    for shard in owned_shards(plan.file_layout, plan.group.rank):
        if shard.name in plan.params and shard.name in kind_of:
            yield FilePosition(kind_of[shard.name], shard)


def positions_by_group(optimizer: DistributedOptimizer) -> dict[int, list[FilePosition]]:
    """By group, without empty groups, in the order of the layout."""
    kind_of = kinds(optimizer)
    here = (each for buffer in optimizer.grad_buffers for each in positions_in(buffer.plan, kind_of))
    in_file = {each.name: each for each in here}
    by_group: dict[int, list[FilePosition]] = {}
    for name in optimizer.names_as_registered():
        if name in in_file:
            by_group.setdefault(in_file[name].group, []).append(in_file[name])
    return {group: sorted(by_group[group], key=lambda each: each.has_main) for group in sorted(by_group)}


def flat(by_group: Mapping[int, list[FilePosition]]) -> list[FilePosition]:
    """In the order of their numbers."""
    return [position for positions in by_group.values() for position in positions]
