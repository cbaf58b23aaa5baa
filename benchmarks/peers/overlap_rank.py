"""One rank of overlap.py or slow_networks.py: a process that is given orders and answers with
readings.

    python -m peers.overlap_rank PLACE

PLACE is JSON: rank, size, interface, address, store, ours, model and, where a node has several
ranks, local_size.

[Note: without communication] Where the store is a file, the rank is in torch's fake process group:
every collective returns at once, whatever it would have brought. What such a step takes is what the
same contestant needs for forward, backward, packing and update alone; its losses mean nothing. The
fake group copies a rank's own part into the output. Where the output *is* that part, the copy would
be time that training does not need; `mute` takes it away. Where it is not (FSDP2's reduced
gradients), the copy has to stay.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch.futures import Future

import peers.environment  # noqa: F401 - for the path; its variables are inherited
from peers import fork_step
from peers.crew import answer, orders
from peers.train_contestants import (
    FORWARD,
    FORWARD_BACKWARD,
    REDUCING_ENTRIES,
    ZeroRedundancy,
    train_entries,
)
from peers.train_readings import WARM_UP, Pace, read
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting

_ALONE = (FORWARD, FORWARD_BACKWARD)
#: Of a collective: a peer that fails on one rank alone leaves the other one waiting.
TIME_LIMIT = timedelta(minutes=3)
_NAMES = (
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_gather_single",
    "all_gather_into_tensor",
)
#: What the module that is imported before calls them.
_OWN_NAMES = ("_reduce_scatter", "_all_gather")
#: Elements of a tensor of statistics, at most: gradients are longer.
_MOST_SUMMED = 1 << 14
_PROBE_PORT, _PIECE_NBYTES, _PROBE_TIME_LIMIT = 29400, 1 << 20, 20.0
#: The connection is faster or slower before it has settled.
_SKIPPED_SECONDS = 0.1


def main() -> None:
    place = json.loads(sys.argv[1])
    rank, size, is_mute = place["rank"], place["size"], not place["store"].startswith("tcp:")
    local_size = place.get("local_size", size)
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_size,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
    }
    os.environ.update(
        {name: str(value) for name, value in ranks.items()}, GLOO_SOCKET_IFNAME=place["interface"]
    )
    torch.set_num_threads(1)
    if is_mute:
        # A file and not torch's fake store: megatron-core makes gloo groups beside, for its
        # checkpoints.
        store = dist.FileStore(place["store"], size)
        mute()
        dist.init_process_group("fake", store=store, rank=rank, world_size=size, timeout=TIME_LIMIT)
    else:
        dist.init_process_group(
            "gloo", init_method=place["store"], rank=rank, world_size=size, timeout=TIME_LIMIT
        )
    entries = {
        entry.name: entry for entry in (*_ALONE, *train_entries(place["ours"]), *REDUCING_ENTRIES)
    }
    setting = TrainSetting(**place["model"], rank=rank, size=size)
    for order in orders():
        if "probe_seconds" in order:
            server = 1 if local_size == size else local_size
            answer({"gigabits": reached(rank, server, place["address"], order["probe_seconds"])})
            continue
        entry, number = entries[order["contestant"]], order["number"]
        entry = muted(entry) if is_mute else entry
        if number < 0:
            reading = read(entry, replace(setting, layers=1, hidden=128), WARM_UP, number)
        else:
            reading = read(entry, setting, Pace(*order["pace"]), number)
        answer(dataclasses.asdict(reading))
    dist.destroy_process_group()


# What the link reaches


def reached(rank: int, server: int, address: str, seconds: float) -> float:
    """Collective: payload of plain TCP from rank 0 to a server at its address, 10**9 bits a second;
    0 on others."""
    if rank != server:
        dist.barrier()
    if rank == 0:
        with socket.create_connection(
            (address, _PROBE_PORT), timeout=_PROBE_TIME_LIMIT
        ) as connection:
            piece, end = bytes(_PIECE_NBYTES), time.perf_counter() + seconds + _SKIPPED_SECONDS
            while time.perf_counter() < end:
                connection.sendall(piece)
    if rank != server:
        return 0.0
    with socket.create_server((address, _PROBE_PORT)) as server:
        server.settimeout(_PROBE_TIME_LIMIT)
        dist.barrier()
        connection, _ = server.accept()
    buffer, arrivals = bytearray(_PIECE_NBYTES), []
    with connection:
        connection.settimeout(_PROBE_TIME_LIMIT)
        while taken := connection.recv_into(buffer):
            arrivals.append((time.perf_counter(), taken))
    return rate_of(arrivals) * 8e-9


def rate_of(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes a second of what arrived when and in which number, the beginning left out."""
    first = arrivals[0][0] + _SKIPPED_SECONDS
    settled = [arrival for arrival in arrivals if arrival[0] >= first] or list(arrivals)
    seconds = settled[-1][0] - settled[0][0]
    return sum(taken for _, taken in settled[1:]) / seconds if seconds else 0.0


# Training without communication


def mute() -> None:
    """Before anything else asks torch for its collectives."""
    for module, names in ((dist, _NAMES), (fork_step, _OWN_NAMES)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _unless_in_place(getattr(module, name)))
    dist.all_reduce = _as_if_all_said_the_same(dist.all_reduce)


def _as_if_all_said_the_same(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Sums of small tensors become those of equal ranks, by which ours recognises that all are in
    the same step."""

    @wraps(all_reduce)
    def act(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        work = all_reduce(tensor, op, **kwargs)
        if op == dist.ReduceOp.SUM and tensor.numel() < _MOST_SUMMED:
            tensor.mul_(dist.get_world_size())
        return work

    return act


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


def _unless_in_place(collective: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective)
    def act(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
            return collective(*args, **kwargs)
        return _Done() if kwargs.get("async_op") else None

    return act


class _MuteZeroRedundancy(ZeroRedundancy):
    """DistributedDataParallel wants the reduced bucket back, which the fake group does not give."""

    def __init__(self, setting: TrainSetting) -> None:
        super().__init__(setting)
        # It looks at a function's annotations, and takes none that are text.
        self._model.register_comm_hook(None, lambda state, bucket: _divided(bucket))


def _divided(bucket: dist.GradBucket) -> Future[Tensor]:
    """As it would be before it is sent."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def muted(entry: TrainEntry) -> TrainEntry:
    """As it is built where nothing is communicated."""
    return replace(entry, build=_MuteZeroRedundancy) if entry.build is ZeroRedundancy else entry


if __name__ == "__main__":
    main()
