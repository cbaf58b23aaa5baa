"""The sizes of a model out of a JSON file: of Megatron's arguments, of a HuggingFace config, or of our own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_distopt.errors import ConfigError, refusal

__all__ = ["sizes_in_file", "sizes_in_mapping"]

#: By field of `GptSizes`: the keys that mean it. The first one that is there and not null counts.
_NUMBERS = {
    "layers": ("layers", "num_layers", "num_hidden_layers", "n_layer"),
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_query_groups", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "ffn": ("ffn", "ffn_hidden_size", "intermediate_size", "n_inner"),
    "vocab": ("padded_vocab_size", "vocab", "vocab_size"),
    "vocab_multiple": ("make_vocab_size_divisible_by",),
    # Not the positions: a model that has learned 131,072 of them is seldom trained on as many tokens at once.
    "seq": ("seq", "seq_length"),
    "positions": ("positions", "max_position_embeddings", "n_positions"),
    "experts": ("experts", "num_moe_experts", "num_experts", "num_local_experts"),
    "expert_ffn": ("expert_ffn", "moe_ffn_hidden_size", "moe_intermediate_size"),
    "top_k": ("top_k", "moe_router_topk", "num_experts_per_tok"),
}
#: The same for those that are true or false; a key after "not " means the opposite.
_SWITCHES = {
    "is_gated": ("gated", "swiglu", "gated_linear_unit"),
    # A HuggingFace config has the key wherever it is false and may leave it out where it is true, as Gemma's does.
    "is_tied": (
        "tied",
        "tie_word_embeddings",
        "share_embeddings_and_output_weights",
        "not untie_embeddings_and_output_weights",
    ),
    "has_bias": ("bias", "add_bias_linear"),
    "has_qkv_bias": ("qkv_bias", "add_qkv_bias", "attention_bias"),
    "is_rms": ("rms",),
}
#: What adds params that are not counted here, unless it has one of these values.
_NOT_COUNTED = {
    "multi_latent_attention": (False, None),
    "kv_lora_rank": (None, 0),
    "moe_shared_expert_intermediate_size": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
    "moe_layer_freq": (1, None),
    "mtp_num_layers": (None, 0),
    "num_nextn_predict_layers": (None, 0),
    "qk_layernorm": (False, None),
}
#: Positions that have no params.
_WITHOUT_PARAMS = ("rope", "rotary", "none", "alibi", "relative")


def sizes_in_file(path: Path) -> dict[str, Any]:
    """What a JSON file says, by field of `GptSizes`.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or says something that is not counted here.
    """
    remedy = "Give a JSON file such as a HuggingFace config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(refusal("config", f"{path} ({error})", "be a JSON file", remedy)) from None
    if not isinstance(given, dict):
        rule = "be a JSON object of names and values"
        raise ConfigError(refusal("config", f"{path} with a {type(given).__name__}", rule, remedy))
    return sizes_in_mapping(given)


def sizes_in_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of names and values; what decides no shape is left aside.

    >>> sizes_in_mapping({"num_layers": 2, "hidden_size": 64, "padded_vocab_size": 128, "lr": 0.1})
    {'layers': 2, 'hidden': 64, 'vocab': 128, 'vocab_multiple': 0}
    """
    _refuse_uncounted(given)
    found: dict[str, Any] = {}
    for name, keys in _NUMBERS.items():
        key = next((key for key in keys if given.get(key) is not None), None)
        if key is not None:
            found[name] = _whole_number(key, given[key])
    for name, keys in _SWITCHES.items():
        key = next((key for key in keys if given.get(key.removeprefix("not ")) is not None), None)
        if key is not None:
            found[name] = bool(given[key.removeprefix("not ")]) != key.startswith("not ")
    return _settled(found, given)


def _settled(found: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What one key says only beside another."""
    is_llama = "rms_norm_eps" in given
    if is_llama:  # what HuggingFace's classes with that key take for granted
        found = {"is_gated": True, "is_rms": True, "has_bias": False, **found}
    if given.get("normalization") is not None:
        found["is_rms"] = given["normalization"] == "RMSNorm"
    if given.get("padded_vocab_size") is not None:
        found["vocab_multiple"] = 0
    if given.get("group_query_attention") is False:
        found.pop("kv_heads", None)
    if _has_no_positions(given, is_llama=is_llama):
        found["positions"] = 0
    return found


def _has_no_positions(given: Mapping[str, Any], *, is_llama: bool) -> bool:
    kind = given.get("position_embedding_type")
    is_rotary = given.get("use_rotary_position_embeddings") or "rope_theta" in given or is_llama
    return kind in _WITHOUT_PARAMS or (kind is None and bool(is_rotary)) or given.get("add_position_embedding") is False


def _refuse_uncounted(given: Mapping[str, Any]) -> None:
    for key, harmless in _NOT_COUNTED.items():
        if key in given and given[key] not in harmless:
            rule, remedy = "leave out what is not counted here", "Take the key out to plan the rest of the model"
            raise ConfigError(refusal(f"key {key!r} of the config", given[key], rule, remedy))


def _whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        rule, remedy = "be a whole number of at least 0", "Correct it, or give the flag beside --config"
        raise ConfigError(refusal(f"key {key!r} of the config", repr(value), rule, remedy))
    return value
