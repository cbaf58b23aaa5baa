"""Names of params in the whole model, the same in every run, by which checkpoints find them.

A pipeline stage numbers its layers from 0, and so does an expert-parallel rank its experts. The
last stage has a copy of a tied embedding under another name. Here each param gets the name that it
has when one rank holds the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import digits
from typing import Any

from torch.nn import Module, Parameter

from megatron_distopt.hosts.start import named_params
from megatron_distopt.layout import Placement

#: How a user of a Megatron starts from the model's weights without a checkpoint of the optimizer.
FROM_WEIGHTS = "start from its weights with --no-load-optim"
#: Modules whose children are experts, numbered from 0 on each rank.
_EXPERT_LISTS = ("local_experts", "deepspeed_experts")
#: Weights whose rows stand for tokens: padded to a multiple that depends on the tensor-parallel
#: size.
_VOCABULARY = (
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "lm_head.weight",
    "lm_head.bias",
)
#: The first layer of an MLP, which holds gate and up projection if the model has gates.
_GATED = ("dense_h_to_4h.weight", "dense_h_to_4h.bias", "linear_fc1.weight", "linear_fc1.bias")
#: Weights of several matrices that are cut one by one; a param does not say their sizes.
_FUSED = ("in_proj",)


@dataclass(frozen=True)
class ModelRanks:
    """This rank in the groups over which the model itself is cut."""

    tensor: tuple[int, int] = (0, 1)  # (rank, size) in the tensor-parallel group
    expert_tensor: tuple[int, int] = (0, 1)  # the same for experts
    expert: tuple[int, int] = (0, 1)  # (rank, size) in the expert-parallel group
    is_gated: bool = False  # whether MLPs hold a gate in addition to the up projection
    embedding: str = ""  # name of the tied embedding on the first stage


def global_names(chunks: Sequence[Module], ranks: ModelRanks) -> dict[Parameter, str]:
    """Returns the name in the whole model of every param of this rank, frozen ones included."""
    names: dict[Parameter, str] = {}
    for chunk in chunks:
        modules = dict(chunk.named_modules())
        for name, param in chunk.named_parameters():
            is_copy = ranks.embedding and getattr(param, "shared", False)
            names.setdefault(
                param, ranks.embedding if is_copy else ".".join(_parts(name, modules, ranks.expert))
            )
    return names


def _parts(name: str, modules: Mapping[str, Module], expert: tuple[int, int]) -> Iterator[str]:
    """The parts of a name, without the wrappers' "module." and with numbers of the whole model."""
    path, has_begun, parent = "", False, ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if part != "module" or has_begun:
            has_begun = True
            yield _number(part, parent, modules, path, expert) if part.isdigit() else part
        parent = part


def _number(
    part: str, parent: str, modules: Mapping[str, Module], path: str, expert: tuple[int, int]
) -> str:
    if parent in _EXPERT_LISTS:
        experts = modules[path.removesuffix(f".{part}")]
        return str(int(part) + expert[0] * len(list(experts.children())))
    layer_number = getattr(modules.get(path), "layer_number", None)
    return str(layer_number - 1) if isinstance(layer_number, int) else part


def placement_of(name: str, param: Any, ranks: ModelRanks, *, is_expert: bool) -> Placement:
    """Where this rank's part of a param lies in the whole param, from the attributes that
    Megatron's layers set on it.

    `name` is the name in the whole model. Experts differ between ranks of one data-parallel group.
    """
    shape, (rank, size) = tuple(param.shape), ranks.expert_tensor if is_expert else ranks.tensor
    is_numbered = any(f".{experts}." in name for experts in _EXPERT_LISTS)
    if is_expert and ranks.expert[1] > 1 and not is_numbered:
        name = f"{name}@expert{ranks.expert[0]}of{ranks.expert[1]}"
    if not getattr(param, "tensor_model_parallel", False):
        return Placement(name, shape, is_padded=name.endswith(_VOCABULARY))
    dim = getattr(param, "partition_dim", -1)
    if size > 1 and (dim < 0 or any(part in _FUSED for part in name.split("."))):
        # How the parts lie in the whole is unknown. Each is saved under a name of its own, which
        # loads only at this size.
        return Placement(f"{name}@tensor{rank}of{size}", shape)
    # weights of grouped experts end in a number
    is_gated = ranks.is_gated and name.rstrip(digits).endswith(_GATED)
    stride = max(getattr(param, "partition_stride", 1), 2 if is_gated else 1)
    return Placement(
        name, shape, max(dim, 0), rank, size, stride, name.endswith(_VOCABULARY) and dim <= 0
    )


#: Names of the same params in the forks of 2023 and in megatron-core. Each pair is a pattern and
#: the name that replaces it.
_SAME = (
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.(encoder|transformer)\.", "decoder."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
)


def canonical(name: str) -> str:
    """Returns the name that a param has on every host.

    >>> canonical("language_model.encoder.layers.3.mlp.dense_h_to_4h.bias")
    'decoder.layers.3.mlp.linear_fc1.bias'
    """
    for pattern, replacement in _SAME:
        name = re.sub(pattern, replacement, name)
    return name


def names_by_param(chunks: Sequence[Module]) -> dict[Parameter, str]:
    """Names of all params, frozen ones included, without the wrappers' "module."."""
    found = named_params(chunks)
    return {
        param: re.sub(r"^(chunk\d+\.)?(module\.)+", r"\1", name) for name, param in found.items()
    }
