"""The model files of one iteration, one for each tensor- and pipeline-parallel rank, and the grad
buffers of the run.

::

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt     or model_rng.pt with per-rank files
    {"args": Namespace, "iteration", "rng_state",
     "model" or "model0", "model1" ...: state dicts of the chunks, ...}

A running fork knows the order of its params, their names in the whole model and how they are cut
from its modules. A file has nothing but the names of a state dict, so all of that follows from
these names here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.pickles import load_file
from megatron_distopt.layout import BufferLayout, ParamSpec, Placement, lay_out

MODEL, MODEL_PER_RANK = "model_optim_rng.pt", "model_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")
_UNKNOWN = "Convert a checkpoint of a model without it; this one loads only in its own fork."
#: The param of which the last of several pipeline stages holds a copy, and what files call that
#: copy.
_EMBEDDING = "language_model.embedding.word_embeddings.weight"
_COPIES = ("word_embeddings.weight", "word_embeddings_for_head.weight")
#: Children of the language model in the order in which it registers them. Its state dict has the
#: decoder last.
_CHILDREN = ("embedding", "encoder", "transformer", "decoder", "pooler", "output_layer")
#: Tensors of a state dict that are no params.
_NO_PARAMS = ("_extra_state", "inv_freq")
_LAYER = re.compile(r"(?P<before>.*?\blayers\.)(?P<number>\d+)(?P<after>\..*)")

_VOCABULARY = (
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    ".lm_head",
    "lm_head.bias",
)
_GATED = ("dense_h_to_4h.weight", "dense_h_to_4h.bias")
#: Params of column- and of row-parallel layers, by the ends of their names; all others are the same
#: on all ranks.
_COLUMNS = tuple(
    f".{layer}.{kind}"
    for layer in ("query_key_value", "query", "inter_attention.key_value", "dense_h_to_4h")
    for kind in ("weight", "bias")
)
_ROWS = ("attention.dense.weight", ".dense_4h_to_h.weight")


@dataclass(frozen=True, eq=False)
class FileParam:
    """A param as one file has it."""

    placement: Placement  # in the whole model; has the name
    chunk: int  # of the file's model chunks
    model: Tensor  # its values, in the dtype in which the model computes
    is_copy: bool  # whether another stage holds the same param, and its values count

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
    """One model file, opened."""

    path: Path
    state: Mapping[str, Any]  # what it holds
    tensor: tuple[int, int]  # (rank, size) in the tensor-parallel group
    stage: tuple[int, int]  # (rank, size) in the pipeline
    params: tuple[FileParam, ...]  # in the order in which the fork registers them

    @property
    def folder(self) -> Path:
        """The folder of this tensor- and pipeline-parallel rank."""
        return self.path.parent

    def option(self, name: str, default: Any = None) -> Any:
        return getattr(self.state.get("args"), name, default)

    def number(self, name: str, default: int = 0) -> int:
        """The same for a whole number; the default for anything else."""
        value = self.option(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default


def open_model_files(iteration: Path) -> tuple[ModelFile, ...]:
    """All model files of an iteration folder, by stage and then by tensor-parallel rank."""
    paths: dict[tuple[int, int], Path] = {}
    for folder in iteration.iterdir() if iteration.is_dir() else ():
        match = _FOLDER.fullmatch(folder.name)
        path = next(
            (folder / name for name in (MODEL, MODEL_PER_RANK) if (folder / name).is_file()), None
        )
        if match and path:
            paths[int(match[2] or 0), int(match[1])] = path
    if not paths:
        return ()
    states = {place: load_file(path) for place, path in sorted(paths.items())}
    for place, state in states.items():
        if not isinstance(state, Mapping) or not chunks_of(state):
            raise CheckpointError(
                f"File {paths[place]} holds no state dict of a model. Give an iteration folder "
                "that a Megatron wrote."
            )
    first = next(iter(states))
    any_file = ModelFile(paths[first], states[first], (0, 1), (0, 1), ())
    # Sizes that the run was started with; as many files must be there.
    stages = any_file.number("pipeline_model_parallel_size", max(stage for stage, _ in paths) + 1)
    size = any_file.number("tensor_model_parallel_size", max(rank for _, rank in paths) + 1)
    expected = [(stage, rank) for stage in range(stages) for rank in range(size)]
    if paths.keys() != set(expected):
        raise CheckpointError(
            f"Checkpoint {iteration} has {len(paths)} model files, and must have one for each of "
            f"{size} tensor-parallel ranks and {stages} pipeline stages. Copy the whole iteration "
            "folder, from all machines of the run."
        )
    return tuple(
        _with_params(
            ModelFile(paths[stage, rank], states[stage, rank], (rank, size), (stage, stages), ())
        )
        for stage, rank in expected
    )


def chunks_of(state: Mapping[Any, Any]) -> dict[int, Mapping[str, object]]:
    """State dicts of the chunks in a model file, by number, in order."""
    matches = {
        _CHUNK.fullmatch(str(key)): value
        for key, value in state.items()
        if isinstance(value, Mapping)
    }
    chunks = {int(match[1] or 0): value for match, value in matches.items() if match}
    return {number: chunks[number] for number in sorted(chunks)}


def _with_params(file: ModelFile) -> ModelFile:
    chunks = chunks_of(file.state)
    is_gated = bool(file.option("swiglu") or file.option("glu_activation"))
    params = []
    for chunk, model in chunks.items():
        named = registered(model)
        _check_no_experts(file, named)
        first_layer = _first_layer(file, chunk, named, len(chunks))
        for local, tensor in named:
            name = _global_name(local, first_layer)
            is_copy = name == _EMBEDDING and local != _EMBEDDING
            placement = placement_of(name, tuple(tensor.shape), file.tensor, is_gated=is_gated)
            params.append(FileParam(placement, chunk, tensor, is_copy))
    return replace(file, params=tuple(params))


def _check_no_experts(file: ModelFile, named: list[tuple[str, Tensor]]) -> None:
    """Refuses a model with experts: those on other ranks are in no file, or in files of their
    own."""
    options = ("moe_expert_parallel_size", "expert_model_parallel_size", "expert_parallel")
    experts = [f"--{name.replace('_', '-')}" for name in options if file.number(name) > 1]
    experts += ["--expert-parallel"] if file.option("expert_parallel") is True else []
    experts += (
        ["experts of DeepSpeed"] if any(".deepspeed_moe." in name for name, _ in named) else []
    )
    if experts:
        raise CheckpointError(
            f"Checkpoint {file.path} is of a model with {experts[0]}, whose data-parallel ranks "
            f"hold different params. {_UNKNOWN}"
        )


def _first_layer(file: ModelFile, chunk: int, named: list[tuple[str, Tensor]], chunks: int) -> int:
    """Number in the whole model of the layer that this chunk calls 0."""
    stage, stages = file.stage
    if stages * chunks == 1:
        return 0
    in_chunk = len(
        {match["number"] for match in (_LAYER.fullmatch(name) for name, _ in named) if match}
    )
    in_model = file.number("encoder_num_layers") or file.number("num_layers")
    is_uneven = file.option("standalone_embedding_stage") or file.option(
        "pipeline_model_parallel_split_rank"
    )
    if is_uneven or in_model != in_chunk * stages * chunks:
        raise CheckpointError(
            f"In {file.path}, stage {stage} has {in_chunk} of {in_model} layers, but each of "
            f"{stages} stages must have an equal part. {_UNKNOWN}"
        )
    return chunk * (in_model // chunks) + stage * in_chunk


def registered(model: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The params of a chunk with their local names, in the order in which it registers them; tied
    ones once.

    Its state dict is flat, or has a dict for each module.
    """
    found: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in _flat(model, ""):
        is_param = torch.is_floating_point(tensor) and not name.endswith(_NO_PARAMS)
        if is_param and tensor.numel() > 0:
            found.setdefault(
                (tensor.data_ptr(), tensor.shape), (name.removeprefix("module."), tensor)
            )
    return list(found.values())


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in sorted(tree.items(), key=lambda item: _order(prefix, *item)):
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def _order(prefix: str, key: str, value: object) -> int:
    """The position of a param in the order of registration. Modules with a dict each may be saved
    in another order."""
    if not isinstance(value, Mapping):
        return -1  # a module's own params come before those of its children
    if not prefix:
        return 0 if key == "language_model" else 1 if f"{key}.weight" in _COPIES else 2
    return (
        _CHILDREN.index(key) if prefix == "language_model." and key in _CHILDREN else len(_CHILDREN)
    )


def _global_name(name: str, first_layer: int) -> str:
    """In the whole model.

    >>> _global_name("language_model.encoder.layers.1.mlp.dense_h_to_4h.bias", 4)
    'language_model.encoder.layers.5.mlp.dense_h_to_4h.bias'
    """
    if name in _COPIES:
        return _EMBEDDING
    match = _LAYER.fullmatch(name)
    return (
        f"{match['before']}{int(match['number']) + first_layer}{match['after']}" if match else name
    )


def placement_of(
    name: str, shape: tuple[int, ...], tensor: tuple[int, int], *, is_gated: bool
) -> Placement:
    """Where a file's part of a param lies in it; `name` in the whole model, `shape` in the file.

    `tensor` is (rank, size) in the tensor-parallel group; `is_gated`: MLPs hold a gate as well as
    the up projection.
    """
    rank, size = tensor
    if name.endswith(_VOCABULARY):
        return Placement(name, shape, 0, rank, size, is_padded=True)
    if name.endswith(_COLUMNS):
        stride = 2 if is_gated and name.endswith(_GATED) else 1
        return Placement(name, shape, 0, rank, size, stride)
    if name.endswith(_ROWS):
        return Placement(name, shape, 1, rank, size)
    return Placement(name, shape)


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Megatron's rule for weight decay."""
    return not name.endswith(".bias") and len(shape) != 1


def grads_in_fp32(file: ModelFile) -> bool:
    """Whether the fork adds gradients up in fp32, whatever the param: as it was told, or always for
    bf16."""
    has_bf16 = any(param.model.dtype is torch.bfloat16 for param in file.params)
    return bool(file.option("accumulate_allreduce_grads_in_fp32", has_bf16))


def buffers_of(
    file: ModelFile, numbers: Sequence[int], ranks: int, *, in_fp32: bool
) -> dict[tuple[int, torch.dtype], BufferLayout]:
    """Grad buffers, by (chunk, grad dtype), in the order that optimizer files have.

    The name of a slot is the number of its param; `numbers` are those of the trained params in the
    order in which the fork registers them. The param that was registered first lies last, and only
    the end of a buffer is padded.
    """
    specs: dict[tuple[int, torch.dtype], list[ParamSpec]] = {}
    for number in numbers:
        param = file.params[number]
        dtype = torch.float32 if in_fp32 else param.model.dtype
        specs.setdefault((param.chunk, dtype), []).append(
            ParamSpec(str(number), param.model.numel())
        )
    return {
        place: lay_out(each[::-1], num_shards=ranks, alignment_numel=1)
        for place, each in specs.items()
    }
