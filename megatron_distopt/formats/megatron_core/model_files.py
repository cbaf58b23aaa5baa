"""The model files of megatron-core's own checkpoints: names, order and places of params, from state dicts alone.

::

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt    {"model" or "model0", "model1" ...: state dicts, ...}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.model_file import MODEL, chunks_of, model_paths, registered
from megatron_distopt.formats.megatron_core.flat_slots import Candidate
from megatron_distopt.formats.pickles import attribute, load_file
from megatron_distopt.layout import Placement

_LAYER = re.compile(r"(?P<before>(?:encoder|decoder)\.layers\.)(?P<number>\d+)(?P<after>\..+)")
#: Params of layers that are cut, by the ends of their names; column-parallel ones along the rows, others along columns.
_VOCABULARY = (".word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_COLUMNS = tuple(
    f".{layer}.{kind}"
    for layer in ("linear_qkv", "linear_q", "linear_kv", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1")
    for kind in ("weight", "bias")
)
_ROWS = (".linear_proj.weight", ".linear_fc2.weight")
#: The same on all ranks, for certain.
_COPIES = ("norm.weight", "norm.bias", "layer_norm_weight", "layer_norm_bias", "position_embeddings.weight")
_COPIED_BIASES = (".linear_proj.bias", ".linear_fc2.bias")


@dataclass(frozen=True, eq=False)
class CoreModel:
    """One model file, opened.

    Args:
        folder: that holds it.
        state: its content.
        tensor: (rank, size) in the tensor-parallel group.
        stage: in the pipeline.
        params: of all chunks, in the order in which the model registers them, by their names in the whole model.
        chunks: how many of the params are in each chunk.
    """

    folder: Path
    state: Mapping[str, Any]
    tensor: tuple[int, int]
    stage: int
    params: tuple[Candidate, ...]
    chunks: tuple[int, ...]


def open_core_models(iteration: Path) -> list[CoreModel]:
    """All model files, by stage and then by tensor-parallel rank.

    Raises:
        CheckpointError: one is missing or damaged, or has params that are cut in an unknown way.
    """
    paths = model_paths(iteration, (MODEL,))
    stages, size = 1 + max(stage for stage, _ in paths), 1 + max(rank for _, rank in paths)
    if len(paths) != stages * size:
        got, rule = f"{len(paths)} model files", f"hold those of {size} tensor-parallel ranks of {stages} stages"
        remedy = "Copy the whole iteration folder, from all machines of the run"
        raise CheckpointError(refusal(f"checkpoint {iteration}", got, rule, remedy))
    states = {place: load_file(path) for place, path in paths.items()}
    for place, state in states.items():
        _check(state, paths[place])
    first_layers = _first_layers(states)
    return [
        _opened(paths[place].parent, state, (place[1], size), place[0], first_layers) for place, state in states.items()
    ]


def _check(state: Any, path: Path) -> None:
    if not isinstance(state, Mapping) or not _chunks_of(state):
        remedy = "Give an iteration folder that Megatron wrote"
        raise CheckpointError(refusal(f"file {path}", "no state dict of a model", "hold a model", remedy))
    experts = int(attribute(state.get("args"), "expert_model_parallel_size") or 1)
    if experts > 1:
        rule = "be of a model whose data-parallel ranks hold the same params"
        remedy = "Load it with megatron-core, and save it again with --ckpt-format torch_dist"
        raise CheckpointError(refusal(f"file {path}", f"one of {experts} expert-parallel ranks", rule, remedy))


def _chunks_of(state: Mapping[Any, Any]) -> list[list[tuple[str, Tensor]]]:
    """Names and tensors of each chunk, in order."""
    return [registered(chunk) for chunk in chunks_of(state).values()]


#: (chunk, stage, what comes before the number): number in the whole model of the layer that is called 0 there.
_Firsts = dict[tuple[int, int, str], int]


def _first_layers(states: Mapping[tuple[int, int], Any]) -> _Firsts:
    """Numbers layers through the first chunks of all stages, then through the second ones."""
    chunks = {stage: _chunks_of(state) for (stage, rank), state in states.items() if rank == 0}
    found: _Firsts = {}
    before: Counter[str] = Counter()
    for chunk in range(max(map(len, chunks.values()))):
        for stage in sorted(chunks):
            matches = [_LAYER.match(name) for name, _ in chunks[stage][chunk]]
            layers = {(match["before"], match["number"]) for match in matches if match}
            for prefix, count in Counter(prefix for prefix, _ in layers).items():
                found[chunk, stage, prefix] = before[prefix]
                before[prefix] += count
    return found


def _opened(folder: Path, state: Any, tensor: tuple[int, int], stage: int, first_layers: _Firsts) -> CoreModel:
    bare = CoreModel(folder, state, tensor, stage, (), ())
    chunks = _chunks_of(state)
    params = tuple(
        param for number, named in enumerate(chunks) for param in _params_of(bare, named, number, first_layers)
    )
    return replace(bare, params=params, chunks=tuple(map(len, chunks)))


def _params_of(
    model: CoreModel, named: Sequence[tuple[str, Tensor]], chunk: int, first_layers: _Firsts
) -> Iterator[Candidate]:
    shapes = {name: tuple(tensor.shape) for name, tensor in named}
    for local, tensor in named:
        match, name = _LAYER.fullmatch(local), local
        if match:
            number = int(match["number"]) + first_layers[chunk, model.stage, match["before"]]
            name = f"{match['before']}{number}{match['after']}"
        placement = _placement_of(name, shapes[local], model, is_gated=_is_gated(local, shapes))
        yield Candidate(placement, tensor.dtype, lambda tensor=tensor: tensor)  # type: ignore[misc]


def _is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the first layer of an MLP holds a gate as well: it then has twice the rows that the second takes."""
    base, found, _ = name.rpartition(".linear_fc1.")
    first, second = shapes.get(f"{base}.linear_fc1.weight"), shapes.get(f"{base}.linear_fc2.weight")
    return bool(found and first and second) and first[0] == 2 * second[1]  # type: ignore[index]


def _placement_of(name: str, shape: tuple[int, ...], model: CoreModel, *, is_gated: bool) -> Placement:
    rank, size = model.tensor
    if size == 1 or name.endswith((*_COPIES, *_COPIED_BIASES)):
        return Placement(name, shape)
    if name.endswith(_VOCABULARY):
        return Placement(name, shape, 0, rank, size, is_padded=True)
    if name.endswith(_COLUMNS):
        return Placement(name, shape, 0, rank, size, 2 if is_gated else 1)
    if name.endswith(_ROWS):
        return Placement(name, shape, 1, rank, size)
    rule = "be of layers of which it is known how they are cut over tensor-parallel ranks"
    remedy = "Load it with megatron-core, and save it again with --ckpt-format torch_dist"
    raise CheckpointError(refusal(f"param {name!r} in {model.folder / MODEL}", f"cut {size} ways", rule, remedy))
