"""The model files of one iteration: one for each tensor- and pipeline-parallel rank, and the grad buffers of the run.

::

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt     or model_rng.pt with per-rank files
    {"args": Namespace, "iteration", "model" or "model0", "model1" ...: state dicts of the chunks, "rng_state", ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.names import (
    EMBEDDING,
    ModelCut,
    global_name,
    layer_number,
    placement_of,
    registered,
)
from megatron_distopt.formats.safe import load_safely
from megatron_distopt.layout import BufferLayout, ParamSpec, Placement, lay_out

__all__ = ["MODEL", "MODEL_PER_RANK", "FileParam", "ModelFile", "buffers_of", "grads_in_fp32", "open_model_files"]

MODEL, MODEL_PER_RANK = "model_optim_rng.pt", "model_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")
_UNKNOWN = "Convert a checkpoint of a model without it; this one loads in its own fork alone"


@dataclass(frozen=True, eq=False)
class FileParam:
    """A param as one file has it.

    Args:
        placement: in the whole model; has the name.
        chunk: of the file's model chunks.
        model: its values, in the dtype in which the model computes.
        is_copy: another stage holds the same param and speaks for it.
    """

    placement: Placement
    chunk: int
    model: Tensor
    is_copy: bool

    @property
    def name(self) -> str:
        """The name in the whole model."""
        return self.placement.name

    @property
    def has_main(self) -> bool:
        """Whether the fork keeps a main param for it: one of fp32 is its own."""
        return self.model.dtype is not torch.float32


@dataclass(frozen=True, eq=False)
class ModelFile:
    """One model file, opened.

    Args:
        path: of it.
        state: what it holds.
        tensor: (rank, size) in the tensor-parallel group.
        stage: (rank, size) in the pipeline.
        params: in the order in which the fork registers them.
    """

    path: Path
    state: Mapping[str, Any]
    tensor: tuple[int, int]
    stage: tuple[int, int]
    params: tuple[FileParam, ...]

    @property
    def folder(self) -> Path:
        """The folder of this tensor- and pipeline-parallel rank."""
        return self.path.parent

    def option(self, name: str, default: Any = None) -> Any:
        """One of the arguments of the run."""
        return getattr(self.state.get("args"), name, default)

    def number(self, name: str, default: int = 0) -> int:
        """The same for a whole number; the default for anything else."""
        found = self.option(name)
        return found if isinstance(found, int) and not isinstance(found, bool) else default


def open_model_files(iteration: Path) -> tuple[ModelFile, ...]:
    """All model files, by stage and then by tensor-parallel rank.

    Args:
        iteration: folder of it, such as iter_0000010.

    Raises:
        CheckpointError: one is missing, or damaged, or the model is cut in a way that its files do not say.
    """
    found = dict(sorted(_places(iteration)))
    states = {place: load_safely(path) for place, path in found.items()}
    for place, state in states.items():
        if not isinstance(state, Mapping) or not _chunks(state):
            got, remedy = "no state dict of a model", "Give an iteration folder that a Megatron wrote"
            raise CheckpointError(refusal(f"file {found[place]}", got, "hold a model", remedy))
    if not found:
        return ()
    tensor_size, stages = _sizes(next(iter(states.values())), iteration, found)
    return tuple(
        _opened(found[stage, rank], states[stage, rank], (rank, tensor_size), (stage, stages))
        for stage in range(stages)
        for rank in range(tensor_size)
    )


def _places(iteration: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """(stage, tensor-parallel rank) and path."""
    for folder in iteration.iterdir() if iteration.is_dir() else ():
        match = _FOLDER.fullmatch(folder.name)
        path = next((folder / name for name in (MODEL, MODEL_PER_RANK) if (folder / name).is_file()), None)
        if match and path:
            yield (int(match[2] or 0), int(match[1])), path


def _sizes(state: Mapping[str, Any], iteration: Path, found: Mapping[tuple[int, int], Path]) -> tuple[int, int]:
    """Tensor-parallel size and number of stages, as the run was told; as many files must be there."""
    any_file = ModelFile(next(iter(found.values())), state, (0, 1), (0, 1), ())
    stages = any_file.number("pipeline_model_parallel_size", max(stage for stage, _ in found) + 1)
    size = any_file.number("tensor_model_parallel_size", max(rank for _, rank in found) + 1)
    if len(found) != stages * size or found.keys() != {
        (stage, rank) for stage in range(stages) for rank in range(size)
    }:
        got = f"{len(found)} model files"
        rule = f"hold one for each of {size} tensor-parallel ranks and {stages} pipeline stages"
        remedy = "Copy the whole iteration folder, from all machines of the run"
        raise CheckpointError(refusal(f"checkpoint {iteration}", got, rule, remedy))
    return size, stages


def _chunks(state: Mapping[str, Any]) -> dict[int, Mapping[str, object]]:
    """State dicts of the chunks, by number."""
    matches = {_CHUNK.fullmatch(str(key)): value for key, value in state.items() if isinstance(value, Mapping)}
    return {int(match[1] or 0): value for match, value in matches.items() if match}


def _opened(path: Path, state: Mapping[str, Any], tensor: tuple[int, int], stage: tuple[int, int]) -> ModelFile:
    bare = ModelFile(path, state, tensor, stage, ())
    chunks = _chunks(state)
    params = tuple(
        param for chunk in sorted(chunks) for param in _params_of(bare, chunk, registered(chunks[chunk]), len(chunks))
    )
    return ModelFile(path, state, tensor, stage, params)


def _params_of(file: ModelFile, chunk: int, named: list[tuple[str, Tensor]], chunks: int) -> Iterator[FileParam]:
    _check_known(file, named)
    is_gated = bool(file.option("swiglu") or file.option("glu_activation"))
    cut = ModelCut(file.tensor, _first_layer(file, chunk, named, chunks), is_gated)
    for local, tensor in named:
        name = global_name(local, cut.first_layer)
        is_copy = name == EMBEDDING and local != EMBEDDING
        yield FileParam(placement_of(name, tuple(tensor.shape), cut), chunk, tensor, is_copy)


def _check_known(file: ModelFile, named: list[tuple[str, Tensor]]) -> None:
    """Experts on other ranks are in no file, or in files of their own."""
    options = ("moe_expert_parallel_size", "expert_model_parallel_size", "expert_parallel")
    told = [f"--{name.replace('_', '-')}" for name in options if file.number(name) > 1]
    told += ["--expert-parallel"] if file.option("expert_parallel") is True else []
    told += ["experts of DeepSpeed"] if any(".deepspeed_moe." in name for name, _ in named) else []
    told += sorted(each.name for each in file.folder.glob("distrib_optim_experts_*.pt"))
    if told:
        rule = "be of a model whose data-parallel ranks hold the same params"
        raise CheckpointError(refusal(f"checkpoint {file.path}", f"with {told[0]}", rule, _UNKNOWN))


def _first_layer(file: ModelFile, chunk: int, named: list[tuple[str, Tensor]], chunks: int) -> int:
    """Number in the whole model of the layer that this chunk calls 0."""
    (stage, stages), here = file.stage, _layers_in(named)
    if stages * chunks == 1:
        return 0
    told = file.number("encoder_num_layers") or file.number("num_layers")
    is_uneven = file.option("standalone_embedding_stage") or file.option("pipeline_model_parallel_split_rank")
    if is_uneven or told != here * stages * chunks:
        got, rule = f"{here} of {told} layers", f"hold an equal part of them on each of {stages} stages"
        raise CheckpointError(refusal(f"stage {stage} in {file.path}", got, rule, _UNKNOWN))
    return chunk * (told // chunks) + stage * here


def _layers_in(named: list[tuple[str, Tensor]]) -> int:
    return len({number for number in (layer_number(name) for name, _ in named) if number is not None})


def grads_in_fp32(file: ModelFile) -> bool:
    """Whether the fork adds gradients up in fp32, whatever the param: as it was told, or always for bf16."""
    has_bf16 = any(param.model.dtype is torch.bfloat16 for param in file.params)
    return bool(file.option("accumulate_allreduce_grads_in_fp32", has_bf16))


def buffers_of(
    file: ModelFile, numbers: Sequence[int], ranks: int, *, in_fp32: bool
) -> dict[tuple[int, torch.dtype], BufferLayout]:
    """Grad buffers, by (chunk, grad dtype), in the order that optimizer files have.

    The name of a slot is the number of its param. The param that was registered first lies last, and only the end of a
    buffer is padded.

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
