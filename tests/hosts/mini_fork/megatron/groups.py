"""What this fork does to megatron-core: runs its communication on a CPU, and adds and removes
getters of groups."""

import types

import torch

from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import layers, mappings

from .switches import DEVICE, FILE_LAYOUT


class _TorchOnCpu(types.ModuleType):
    """The torch of those modules only: `torch.cuda` of the process stays as it is, so nobody else
    is helped."""

    cuda = types.SimpleNamespace(current_device=lambda: DEVICE, synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(torch, name)


for _module in (core_utils, p2p_communication, layers, mappings):
    _module.torch = _TorchOnCpu("torch")
if FILE_LAYOUT == "per_rank":
    del mpu.get_data_parallel_group_gloo


def _add_getters(name, group):
    """mpu.get_NAME_group(), _rank() and _world_size()."""
    setattr(mpu, f"get_{name}_group", lambda: group)
    setattr(mpu, f"get_{name}_rank", lambda: torch.distributed.get_rank(group=group))
    setattr(mpu, f"get_{name}_world_size", lambda: torch.distributed.get_world_size(group=group))


def _data_parallel_groups():
    """Global ranks of every data-parallel group, in an order that all ranks agree on."""
    mine = list(mpu._DATA_PARALLEL_GLOBAL_RANKS)
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    return sorted({tuple(ranks) for ranks in everyones})


def _split(groups, size):
    """The group of this rank among blocks of `size` neighbours, and the one among the ranks `size`
    apart."""
    mine = []
    for blocks in (True, False):
        for ranks in groups:
            assert len(ranks) % size == 0, (
                f"{len(ranks)} data-parallel ranks cannot be split by {size}"
            )
            count = len(ranks) // size if blocks else size
            for i in range(count):
                members = list(ranks[i * size : (i + 1) * size] if blocks else ranks[i::size])
                group = torch.distributed.new_group(members)
                if torch.distributed.get_rank() in members:
                    mine.append((group, members))
    return mine


def add_sequence_parallel_groups(size):
    """As Megatron-DeepSpeed's: what was the data-parallel group becomes the sequence-data one and
    is split."""
    _add_getters("sequence_data_parallel", mpu.get_data_parallel_group())
    (sequence, _), (data, ranks) = _split(_data_parallel_groups(), size)
    _add_getters("sequence_parallel", sequence)
    mpu._DATA_PARALLEL_GROUP = mpu._DATA_PARALLEL_GROUP_GLOO = data
    mpu._DATA_PARALLEL_GLOBAL_RANKS = ranks


def add_expert_parallel_groups(size):
    """Neighbours in the data-parallel group hold different experts; ranks `size` apart hold the
    same."""
    (expert, _), (expert_data, _) = _split(_data_parallel_groups(), size)
    _add_getters("expert_model_parallel", expert)
    _add_getters("expert_data_parallel", expert_data)
