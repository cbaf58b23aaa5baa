"""One rank of overlap.py: a process that is given orders and answers with readings.

    python -m peers.overlap_rank PLACE     PLACE is JSON: rank, size, interface, store, ours, model

[Note: without communication] Where the store is a file, the rank is in torch's fake process group: every collective
returns at once (overlap_mute.py), whatever it would have brought. What such a step takes is what the same contestant
needs for forward, backward, packing and update alone; its losses mean nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import peers.environment  # noqa: F401 - for the path; its variables are inherited
from peers.crew import answer, orders
from peers.overlap_contestants import FORWARD, overlap_entries
from peers.overlap_mute import mute, muted
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import Pace, read
from peers.transformer import TrainSetting

#: Of a collective: a peer that fails on one rank alone leaves the other one waiting.
TIME_LIMIT = timedelta(minutes=3)
_WARM_UP = Pace(1, 1, 1)


def main() -> None:
    place = json.loads(sys.argv[1])
    rank, size, is_mute = place["rank"], place["size"], not place["store"].startswith("tcp:")
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in ranks.items()}, GLOO_SOCKET_IFNAME=place["interface"])
    torch.set_num_threads(1)
    if is_mute:
        # A file and not torch's fake store: megatron-core makes gloo groups beside, for its checkpoints.
        store = dist.FileStore(place["store"], size)
        mute()
        dist.init_process_group("fake", store=store, rank=rank, world_size=size, timeout=TIME_LIMIT)
    else:
        dist.init_process_group("gloo", init_method=place["store"], rank=rank, world_size=size, timeout=TIME_LIMIT)
    entries = {entry.name: entry for entry in (FORWARD, FORWARD_BACKWARD, *overlap_entries(place["ours"]))}
    setting = TrainSetting(**place["model"], rank=rank, size=size)
    for order in orders():
        entry, number = entries[order["contestant"]], order["number"]
        entry = muted(entry) if is_mute else entry
        if number < 0:
            reading = read(entry, replace(setting, layers=1, hidden=128), _WARM_UP, number)
        else:
            reading = read(entry, setting, Pace(*order["pace"]), number)
        answer(dataclasses.asdict(reading))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
