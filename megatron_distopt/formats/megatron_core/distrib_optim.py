"""megatron-core's own optimizer files since 0.7 ("--ckpt-format torch").

::

    iter_0000010/mp_rank_TT[_PPP]/distrib_optim.pt    flat buffers without names, see `coalesced`
                                  model_optim_rng.pt  the model, and the param groups without params

Names, shapes and order are those of the model files; see [Note: found by value] in flat_slots.py for the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.located import Located, source_of
from megatron_distopt.formats.megatron_core.flat import coalesced, locate, whole_of
from megatron_distopt.formats.megatron_core.head import head_of
from megatron_distopt.formats.megatron_core.model_files import CoreModel, open_core_models
from megatron_distopt.formats.pickles import load_file, understood

_OPTIMIZER, _COALESCED = "distrib_optim.pt", "buckets_coalesced"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def recognises(path: Path) -> bool:
    """Whether a folder is an iteration with such files; those of older generations have no whole buffers."""
    first = next(iter(sorted(path.glob(f"mp_rank_*/{_OPTIMIZER}"))), None)
    try:
        return first is not None and any(map(_is_coalesced, _states_in(first)))
    except CheckpointError:  # opening it says what is wrong with it
        return False


def _states_in(path: Path) -> list[Mapping[Any, Any]]:
    """States of the optimizers of a chain that this rank had."""
    found = load_file(path)
    return [state for state in (found if isinstance(found, list) else [found]) if isinstance(state, Mapping)]


def _is_coalesced(state: Mapping[Any, Any]) -> bool:
    return bool(state.get(_COALESCED))


def open_distrib_optim(path: Path) -> Source:
    """Opens a checkpoint.

    Args:
        path: folder of an iteration.

    Raises:
        CheckpointError: a file is missing or damaged, or params cannot be found.
    """
    with understood(path, "be an iteration with optimizer state of megatron-core 0.7 or later"):
        return _opened(path)


def _opened(path: Path) -> Source:
    models = open_core_models(path)
    firsts = {model.tensor[0]: model for model in models if model.stage == 0}
    by_rank: dict[int, dict[str, list[Located]]] = {}
    for model in models:
        homes = by_rank.setdefault(model.tensor[0], {})
        here: dict[str, list[Located]] = {}
        for each in _located(model, firsts[model.tensor[0]]):
            here.setdefault(each.placement.name, []).append(each)
        by_rank[model.tensor[0]] = {**here, **homes}  # what two stages hold is taken from the first
    found = [[each for parts in homes.values() for each in parts] for _, homes in sorted(by_rank.items())]
    states, iteration = _saved_states(models[0]), models[0].state.get("iteration")
    return source_of(whole_of(found), str(path), lambda infos: head_of(infos, states, _OPTIMIZER, iteration, str(path)))


def _located(model: CoreModel, first: CoreModel) -> Iterator[Located]:
    path = model.folder / _OPTIMIZER
    if not path.is_file():
        remedy = "Copy the whole iteration folder, from all machines of the run"
        raise CheckpointError(refusal(f"file {path}", "no such file", "be there beside the model", remedy))
    buffers = [each for state in _states_in(path) for each in coalesced(state, str(path))]
    families = [chunk for chunk, count in enumerate(model.chunks) for _ in range(count)]
    order = {number: number for number in range(len(model.params))}
    for each in locate(buffers, model.params, [order], str(path), families):
        if not _is_copy(each.placement.name, model, first):
            yield each


def _is_copy(name: str, model: CoreModel, first: CoreModel) -> bool:
    """The last stage has a tied embedding too, under the name of the layer that uses it."""
    if name != _OUTPUT or model.stage == 0:
        return False
    values = {param.placement.name: param for param in (*first.params, *model.params)}
    return _EMBEDDING in values and torch.equal(values[_EMBEDDING].bits(), values[_OUTPUT].bits())


def _saved_states(model: CoreModel) -> list[Mapping[str, Any]]:
    """States of all optimizers of a chain, without what is kept for each element."""
    entry = model.state.get("optimizer")
    states = [each for each in (entry if isinstance(entry, list) else [entry]) if isinstance(each, Mapping)]
    if not states or any("optimizer" not in state for state in states):
        remedy = "Save it without --no-save-optim"
        rule = "hold the param groups with the model"
        raise CheckpointError(refusal(f"file in {model.folder}", "no entry 'optimizer'", rule, remedy))
    return states
