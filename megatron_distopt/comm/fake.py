"""torch's fake process group: this process as one of thousands of ranks, of which no other one exists.

Groups have ranks and sizes as in a real run, and their collectives return at once without having sent anything. So a
rank can be built here, and what it computes means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import torch.distributed as dist

from megatron_distopt.comm.groups import Group, is_initialized
from megatron_distopt.errors import ConfigError, refusal

__all__ = ["fake_group", "fake_world"]

#: Registers the backend when it is imported.
_MODULE = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[Group]:
    """Makes this process one rank of many, and ends that afterwards.

    Args:
        rank: that this process takes.
        size: number of ranks.

    Yields:
        All ranks.

    Raises:
        ConfigError: torch.distributed is initialised already.

    >>> with fake_world(1234, 4096) as everybody:
    ...     everybody.rank, everybody.size, fake_group(range(1232, 1240, 2)).rank
    (1234, 4096, 1)
    """
    if is_initialized():
        rule = "be absent: torch has one for all ranks, and a real one must not be replaced"
        remedy = "Run it in a process of its own, or call torch.distributed.destroy_process_group first"
        raise ConfigError(refusal("process group", f"{dist.get_backend()} of {dist.get_world_size()}", rule, remedy))
    dist.init_process_group("fake", rank=rank, world_size=size, store=import_module(_MODULE).FakeStore())
    try:
        yield Group.of()
    finally:
        dist.destroy_process_group()


def fake_group(ranks: Sequence[int]) -> Group:
    """Some ranks of a fake world, among them this one. The others, which do not exist, need not be asked.

    Args:
        ranks: what the launcher would call them, ascending.
    """
    return Group.of(dist.new_group(list(ranks)))
