"""Training without communication, see [Note: without communication] in overlap_rank.py: what torch's fake group leaves.

The fake group copies a rank's own part into the output. Where the output *is* that part, the copy would be time that
training does not need; `mute` takes it away. Where it is not (FSDP2's reduced gradients), the copy has to stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from megatron_distopt.comm import collectives
from peers import fork_step
from peers.torch_trainers import ZeroRedundancy
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting

_NAMES = ("reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single", "all_gather_into_tensor")
#: Elements of a tensor of statistics, at most: gradients are longer.
_MOST_SUMMED = 1 << 14
#: What modules that are imported before call them.
_OWN_NAMES = ("_reduce_scatter", "_all_gather")


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


def mute() -> None:
    """Before anything else asks torch for its collectives."""
    for module, names in ((dist, _NAMES), (collectives, _OWN_NAMES), (fork_step, _OWN_NAMES)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _unless_in_place(getattr(module, name)))
    dist.all_reduce = _as_if_all_said_the_same(dist.all_reduce)


def _as_if_all_said_the_same(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Sums of small tensors become those of equal ranks, by which ours recognises that all are in the same step."""

    @wraps(all_reduce)
    def act(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        work = all_reduce(tensor, op, **kwargs)
        if op == dist.ReduceOp.SUM and tensor.numel() < _MOST_SUMMED:
            tensor.mul_(dist.get_world_size())
        return work

    return act


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
        self._model.register_comm_hook(None, lambda state, bucket: given_back(bucket))


def given_back(bucket: dist.GradBucket) -> Future[Tensor]:
    """Divided, as it would be before it is sent."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def muted(entry: TrainEntry) -> TrainEntry:
    """As it is built where nothing is communicated."""
    return dataclasses.replace(entry, build=_MuteZeroRedundancy) if entry.build is ZeroRedundancy else entry
