"""From the state dict of a fork's model to its params: in which order, by which global name, cut along which dimension.

What a running fork knows from its modules has to be known here from names, because a file has nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.layout import Placement

__all__ = ["EMBEDDING", "ModelCut", "decays", "global_name", "layer_number", "placement_of", "registered"]

#: The param of which the last of several pipeline stages holds a copy, and what files call that copy.
EMBEDDING = "language_model.embedding.word_embeddings.weight"
_COPIES = ("word_embeddings.weight", "word_embeddings_for_head.weight")
#: Children of the language model in the order in which it registers them. Its state dict has the decoder last.
_CHILDREN = ("embedding", "encoder", "transformer", "decoder", "pooler", "output_layer")
#: Tensors of a state dict that are no params.
_NO_PARAMS = ("_extra_state", "inv_freq")
_LAYER = re.compile(r"(?P<before>.*?\blayers\.)(?P<number>\d+)(?P<after>\..*)")

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias", ".lm_head", "lm_head.bias")
_GATED = ("dense_h_to_4h.weight", "dense_h_to_4h.bias")
#: Params of column- and of row-parallel layers, by the ends of their names; all others are the same on all ranks.
_COLUMNS = tuple(
    f".{layer}.{kind}"
    for layer in ("query_key_value", "query", "inter_attention.key_value", "dense_h_to_4h")
    for kind in ("weight", "bias")
)
_ROWS = ("attention.dense.weight", ".dense_4h_to_h.weight")


@dataclass(frozen=True)
class ModelCut:
    """How the model was cut, and which part of it a file holds.

    Args:
        tensor: (rank, size) in the tensor-parallel group.
        first_layer: number in the whole model of this part's layer 0.
        is_gated: whether MLPs hold a gate as well as the up projection.
    """

    tensor: tuple[int, int]
    first_layer: int
    is_gated: bool


def registered(model: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The params of a chunk with their local names, in the order in which it registers them; tied ones once.

    Args:
        model: its state dict, flat or with a dict for each module.
    """
    found: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in _flat(model, ""):
        is_param = torch.is_floating_point(tensor) and not name.endswith(_NO_PARAMS)
        if is_param and tensor.numel() > 0:
            found.setdefault((tensor.data_ptr(), tensor.shape), (name.removeprefix("module."), tensor))
    return list(found.values())


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in sorted(tree.items(), key=lambda item: _place(prefix, *item)):
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def _place(prefix: str, key: str, value: object) -> int:
    """Where modules have a dict each, some are saved in another order than they are registered in."""
    if not isinstance(value, Mapping):
        return -1  # a module's own params come before those of its children
    if not prefix:
        return 0 if key == "language_model" else 1 if f"{key}.weight" in _COPIES else 2
    return _CHILDREN.index(key) if prefix == "language_model." and key in _CHILDREN else len(_CHILDREN)


def layer_number(name: str) -> int | None:
    """Of a param in a layer, counted as its name does."""
    match = _LAYER.fullmatch(name)
    return int(match["number"]) if match else None


def global_name(name: str, first_layer: int) -> str:
    """In the whole model.

    >>> global_name("language_model.encoder.layers.1.mlp.dense_h_to_4h.bias", 4)
    'language_model.encoder.layers.5.mlp.dense_h_to_4h.bias'
    """
    if name in _COPIES:
        return EMBEDDING
    match = _LAYER.fullmatch(name)
    return f"{match['before']}{int(match['number']) + first_layer}{match['after']}" if match else name


def placement_of(name: str, shape: tuple[int, ...], cut: ModelCut) -> Placement:
    """Where a file's part of a param lies in it.

    Args:
        name: in the whole model.
        shape: in the file.
        cut: of the model.
    """
    rank, size = cut.tensor
    if name.endswith(_VOCABULARY):
        return Placement(name, shape, 0, rank, size, is_padded=True)
    if name.endswith(_COLUMNS):
        stride = 2 if cut.is_gated and name.endswith(_GATED) else 1
        return Placement(name, shape, 0, rank, size, stride)
    if name.endswith(_ROWS):
        return Placement(name, shape, 1, rank, size)
    return Placement(name, shape)


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Megatron's rule for weight decay."""
    return not name.endswith(".bias") and len(shape) != 1
