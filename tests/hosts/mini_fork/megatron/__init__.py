"""A small Megatron fork of 2023: its own training code around the real megatron-core 0.2.0, which
lies elsewhere."""

import os

if "MINI_FORK_CORE" not in os.environ:
    raise ImportError(
        "Set MINI_FORK_CORE to a folder made by: pip install --no-deps --target FOLDER "
        "megatron-core==0.2.0"
    )
__path__.append(os.path.join(os.environ["MINI_FORK_CORE"], "megatron"))

# ruff: noqa: E402
from . import groups
from .global_vars import get_args, get_num_microbatches, get_timers
from .initialize import initialize_megatron
from .utils import print_rank_0, print_rank_last

__all__ = [
    "get_args",
    "get_num_microbatches",
    "get_timers",
    "groups",
    "initialize_megatron",
    "print_rank_0",
    "print_rank_last",
]
