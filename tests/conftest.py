"""What tests of several folders set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist  # not above: the process that hands out tests reads this file

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
