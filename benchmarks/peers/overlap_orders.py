"""What a rank of overlap.py is told: its place when it is started, then one order for each reading."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

__all__ = ["LOOPBACK", "STORE_PORT", "TIME_LIMIT", "Order", "Place"]

LOOPBACK = "lo"
STORE_PORT = 29500
#: Of a collective: a peer that fails on one rank alone leaves the other one waiting.
TIME_LIMIT = timedelta(minutes=3)


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what it trains.

    Args:
        rank, size: of it and of the group.
        interface: that gloo uses.
        store: where the ranks meet: "tcp://address:port", or a file of a mute pair.
        reply: descriptor of the pipe for answers; libraries print to standard output.
        ours: see `train_entries`.
        model: `TrainSetting` without rank and size.
    """

    rank: int
    size: int
    interface: str
    store: str
    reply: int
    ours: tuple[str, ...]
    model: dict[str, int]

    @property
    def is_mute(self) -> bool:
        """See [Note: without communication] in overlap_rank.py."""
        return not self.store.startswith("tcp:")


@dataclass(frozen=True)
class Order:
    """One reading.

    Args:
        contestant: its name.
        number: of the round; below 0 for a warm-up of a small model.
        warm_up, blocks, steps: see `Pace`.
    """

    contestant: str
    number: int
    warm_up: int
    blocks: int
    steps: int
