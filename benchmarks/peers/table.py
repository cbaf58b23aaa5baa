"""All contestants of the benchmark of checkpoints, in the order in which a round runs them."""

from __future__ import annotations

from peers.contestant import Entry
from peers.deepspeed_zero import ZERO_1
from peers.gathered import GATHERED
from peers.megatron_core import DP_RESHARDABLE, FULLY_RESHARDABLE
from peers.ours import ASYNC, SYNC
from peers.undistributed import UNDISTRIBUTED

ENTRIES: tuple[Entry, ...] = (SYNC, GATHERED, ASYNC, UNDISTRIBUTED, DP_RESHARDABLE, FULLY_RESHARDABLE, ZERO_1)
