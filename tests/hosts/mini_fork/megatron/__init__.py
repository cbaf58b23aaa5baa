"""A small Megatron fork of 2023: its own training code around the real megatron-core 0.2.0, which lies elsewhere."""

import os

if "MINI_FORK_CORE" not in os.environ:
    raise ImportError(
        "Set MINI_FORK_CORE to a folder made by: pip install --no-deps --target FOLDER megatron-core==0.2.0"
    )
__path__.append(os.path.join(os.environ["MINI_FORK_CORE"], "megatron"))

# ruff: noqa: E402
from . import groups
from .global_vars import (
    get_args,
    get_current_global_batch_size,
    get_num_microbatches,
    get_tensorboard_writer,
    get_timers,
    update_num_microbatches,
)
from .initialize import initialize_megatron
from .utils import is_last_rank, is_rank_0, print_rank_0, print_rank_last

__all__ = [
    "get_args",
    "get_current_global_batch_size",
    "get_num_microbatches",
    "get_tensorboard_writer",
    "get_timers",
    "groups",
    "initialize_megatron",
    "is_last_rank",
    "is_rank_0",
    "print_rank_0",
    "print_rank_last",
    "update_num_microbatches",
]
