"""Whom this package is compared with: the peers of the other benchmarks, and
DistributedDataParallel."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from peers import adam, steppers
from peers.steppers import StepEntry, step_entries
from peers.train_contestants import MESSAGES, DataParallel, train_entries
from peers.trainers import TrainEntry

from gpu_check.checks import Place
from gpu_check.machine import CPU

#: Far slower than the others, and not what anybody compares with.
_SLOW = ("fork of 2023", "torch for-loop", "megatron-core")
_ON_CPU_ONLY = ("DeepSpeed CPUAdam", MESSAGES)
#: Whose memory is compared.
_FOR_MEMORY = (
    "ours",
    "ours, overlap",
    "ours, both overlaps",
    "megatron-core, fused Adam",
    "DeepSpeed ZeRO-1",
)


def is_compiled(op: str) -> bool:
    """Whether an op of DeepSpeed's was built when it was installed, or compiled earlier; compiling
    takes minutes."""
    try:
        if import_module("deepspeed.git_version_info").installed_ops.get(op):
            return True
        adam.check_compiled(op, may_compile=False)
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def step_peers(place: Place) -> list[StepEntry]:
    """For a step on one rank; "ours" comes first. DeepSpeed's ops are not compiled for it: that
    takes minutes."""
    first, *others = step_entries(may_compile=False)
    if place.device.type != CPU:
        others.insert(0, StepEntry("ours, torch fused", partial(steppers.Ours, adam="torch_fused")))
    return [first, *(entry for entry in others if _is_wanted(entry.name, place))]


def train_peers(place: Place) -> list[TrainEntry]:
    """For a training on all ranks; "ours" comes first."""
    entries = [entry for entry in train_entries([]) if _is_wanted(entry.name, place)]
    ddp = "torch DDP + fused AdamW"
    entries += [TrainEntry(ddp, DataParallel)] if ddp not in place.without else []
    return entries


def memory_peers(place: Place) -> list[TrainEntry]:
    """Whose bytes are counted."""
    return [
        entry for entry in train_peers(place) if entry.name in _FOR_MEMORY or "FSDP2" in entry.name
    ]


def _is_wanted(name: str, place: Place) -> bool:
    is_here = place.device.type == CPU or name not in _ON_CPU_ONLY
    return is_here and name not in _SLOW and name not in place.without
