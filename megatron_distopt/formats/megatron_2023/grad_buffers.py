"""The grad buffers of a fork of 2023, from its model file: the order and the shards that its optimizer files have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_distopt.formats.megatron_2023.model_file import ModelFile
from megatron_distopt.layout import BufferLayout, ParamSpec, lay_out

__all__ = ["buffers_of", "grads_in_fp32"]


def grads_in_fp32(file: ModelFile) -> bool:
    """Whether the fork adds gradients up in fp32, whatever the param: as it was told, or always for bf16."""
    has_bf16 = any(param.model.dtype is torch.bfloat16 for param in file.params)
    return bool(file.option("accumulate_allreduce_grads_in_fp32", has_bf16))


def buffers_of(
    file: ModelFile, numbers: Sequence[int], ranks: int, *, in_fp32: bool
) -> dict[tuple[int, torch.dtype], BufferLayout]:
    """One for each grad dtype of a chunk, by (chunk, grad dtype); the name of a slot is the number of its param.

    The param that was registered first lies last, and only the end of a buffer is padded.

    Args:
        file: of the model.
        numbers: of the params that are trained, in the order in which the fork registers them.
        ranks: data-parallel.
        in_fp32: see `grads_in_fp32`.
    """
    specs: dict[tuple[int, torch.dtype], list[ParamSpec]] = {}
    for number in numbers:
        param = file.params[number]
        dtype = torch.float32 if in_fp32 else param.model.dtype
        specs.setdefault((param.chunk, dtype), []).append(ParamSpec(str(number), param.model.numel()))
    return {place: lay_out(each[::-1], num_shards=ranks, alignment_numel=1) for place, each in specs.items()}
