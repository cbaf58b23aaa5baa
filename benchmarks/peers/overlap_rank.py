"""One rank of overlap.py: a process that reads orders from its standard input and answers with readings.

    python -m peers.overlap_rank PLACE     PLACE is JSON, see overlap_orders.py

[Note: without communication] The ranks of a mute pair are in torch's fake process group: every collective returns at
once (overlap_mute.py), whatever it would have brought. What such a step takes is what the same contestant needs for
forward, backward, packing and update alone; its losses mean nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import peers.environment  # noqa: F401 - for the path; its variables are inherited
from peers.overlap_contestants import FORWARD, overlap_entries
from peers.overlap_mute import mute, muted
from peers.overlap_orders import TIME_LIMIT, Order, Place
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import Pace, TrainReading, read
from peers.transformer import TrainSetting

__all__ = ["main"]

_WARM_UP = Pace(1, 1, 1)


def main() -> None:
    place = Place(**json.loads(sys.argv[1]))
    _meet(place)
    with os.fdopen(place.reply, "w") as reply:
        for line in sys.stdin:
            reading = _carry_out(place, Order(**json.loads(line)))
            reply.write(json.dumps(dataclasses.asdict(reading)) + "\n")
            reply.flush()
    dist.destroy_process_group()


def _meet(place: Place) -> None:
    rank, size = place.rank, place.size
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in ranks.items()}, GLOO_SOCKET_IFNAME=place.interface)
    torch.set_num_threads(1)
    if place.is_mute:
        # A file and not torch's fake store: megatron-core makes gloo groups beside, for its checkpoints.
        store = dist.FileStore(place.store, size)
        mute()
        dist.init_process_group("fake", store=store, rank=rank, world_size=size, timeout=TIME_LIMIT)
    else:
        dist.init_process_group("gloo", init_method=place.store, rank=rank, world_size=size, timeout=TIME_LIMIT)


def _carry_out(place: Place, order: Order) -> TrainReading:
    entries = (FORWARD, FORWARD_BACKWARD, *overlap_entries(place.ours))
    entry = next(entry for entry in entries if entry.name == order.contestant)
    entry = muted(entry) if place.is_mute else entry
    setting = TrainSetting(**place.model, rank=place.rank, size=place.size)
    if order.number < 0:
        return read(entry, replace(setting, layers=1, hidden=128), _WARM_UP, order.number)
    return read(entry, setting, Pace(order.warm_up, order.blocks, order.steps), order.number)


if __name__ == "__main__":
    main()
