"""Formats that are read and not written: megatron-core's own and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_distopt.checkpoint.exchange.core_native import open_core_native
from megatron_distopt.checkpoint.exchange.core_native import recognises as is_core_native
from megatron_distopt.checkpoint.exchange.deepspeed_universal import open_deepspeed_universal
from megatron_distopt.checkpoint.exchange.deepspeed_universal import recognises as is_deepspeed_universal
from megatron_distopt.checkpoint.exchange.deepspeed_zero import open_deepspeed_zero
from megatron_distopt.checkpoint.exchange.deepspeed_zero import recognises as is_deepspeed_zero
from megatron_distopt.checkpoint.exchange.torch_dist import open_torch_dist
from megatron_distopt.checkpoint.exchange.torch_dist import recognises as is_torch_dist
from megatron_distopt.checkpoint.source import Source

__all__ = ["open_foreign"]

#: Name, whether a folder is of it, and its reader; the first that knows the folder reads it.
_FORMATS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path], Source]], ...] = (
    ("megatron-core distrib_optim.pt", is_core_native, open_core_native),
    ("megatron-core torch_dist", is_torch_dist, open_torch_dist),
    ("deepspeed universal", is_deepspeed_universal, open_deepspeed_universal),
    ("deepspeed zero", is_deepspeed_zero, open_deepspeed_zero),
)


def open_foreign(path: Path) -> tuple[str, Source] | None:
    """The name of the format and the state in it; None where no format knows the folder.

    Raises:
        CheckpointError: a format knows it and cannot read it.
    """
    for name, is_so, read in _FORMATS if path.is_dir() else ():
        if is_so(path):
            return name, read(path)
    return None
