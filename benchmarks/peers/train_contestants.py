"""All contestants of train.py and memory.py, in the order in which a round runs them."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from functools import partial

from peers.adam import torch_adam
from peers.other_trainers import Core, DeepSpeedZero
from peers.torch_trainers import FullyShard, ZeroRedundancy
from peers.trainers import ForkTrainer, ForwardBackward, Ours, TrainEntry

#: This package as it exchanges between machines, also where its ranks could share memory.
MESSAGES = "ours, messages"

FORWARD_BACKWARD = TrainEntry("forward and backward alone", ForwardBackward, trains=False)

ENTRIES: tuple[TrainEntry, ...] = (
    TrainEntry("ours", Ours),
    TrainEntry("ours, overlap", partial(Ours, overlap_grad_reduce=True)),
    TrainEntry(MESSAGES, partial(Ours, shared_memory=False)),
    TrainEntry("fork of 2023", partial(ForkTrainer, adam=torch_adam(foreach=False))),
    TrainEntry("fork of 2023, fused Adam", partial(ForkTrainer, adam=torch_adam(fused=True))),
    TrainEntry("megatron-core", Core),
    TrainEntry("megatron-core, fused Adam", partial(Core, is_fused=True)),
    TrainEntry("DeepSpeed ZeRO-1", partial(DeepSpeedZero, stage=1)),
    TrainEntry("DeepSpeed ZeRO-2", partial(DeepSpeedZero, stage=2)),
    TrainEntry("DeepSpeed ZeRO-2, bf16 wire", partial(DeepSpeedZero, stage=2, wire="bf16")),
    TrainEntry("torch DDP + ZeroRedundancy", ZeroRedundancy),
    TrainEntry("torch FSDP2", FullyShard),
)


def train_entries(ours: Sequence[str]) -> tuple[TrainEntry, ...]:
    """All contestants, and this package once more with other options.

    Args:
        ours: "name=value" of `DistOptConfig`, values as in Python; none for no further contestant.
    """
    options = {name: literal_eval(value) for name, _, value in (word.partition("=") for word in ours)}
    more = (TrainEntry("ours, " + " ".join(ours), partial(Ours, **options)),) if ours else ()
    return (ENTRIES[0], *more, *ENTRIES[1:])
