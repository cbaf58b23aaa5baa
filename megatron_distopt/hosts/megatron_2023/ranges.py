"""What a rank owns of a param, in the form in which the fork's tools ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_distopt.hosts.megatron_2023.state import shards_of
from megatron_distopt.layout import Span
from megatron_distopt.optimizer import ShardedOptimizer

__all__ = ["HostRange", "ranges_of"]


@dataclass(frozen=True)
class HostRange:
    """A span with the fork's attribute names."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.end - self.start

    def __len__(self) -> int:
        return self.size


def ranges_of(sharded: ShardedOptimizer, name: str) -> Mapping[str, HostRange]:
    """The fork's three index spaces: the whole buffer, this rank's shard of the param's bucket, and the param.

    Raises:
        KeyError: this rank owns nothing of the param.
    """
    _, shard = shards_of(sharded)[name]
    spans = {"gbuf_world": shard.in_buffer, "gbuf_local": shard.in_shard, "param": shard.in_param}
    return {key: _as_host(span) for key, span in spans.items()}


def _as_host(span: Span) -> HostRange:
    return HostRange(span.start, span.stop)
