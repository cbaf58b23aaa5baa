"""The sizes of a GPT, from flags or a JSON file, and how they are cut over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_distopt.errors import ConfigError, refusal

__all__ = ["GptSizes", "ParallelSizes", "check_cut", "sizes_in_file", "sizes_in_mapping"]

#: Megatron makes the width of a gated MLP a multiple of this.
_GATED_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class GptSizes:
    """The sizes that decide the shapes of the params.

    Args:
        layers, hidden: number and width.
        vocab: tokens.
        vocab_multiple: `vocab` is padded to a multiple of this times the tensor-parallel size; 0 for one that is
            padded already.
        seq: tokens of a sequence.
        positions: rows of the learned position embedding, `seq` where None, 0 for rotary or no positions.
        heads: of attention; None where it does not matter.
        kv_heads: heads that keys and values have; `heads` where None.
        head_dim: `hidden / heads` where None.
        ffn: width of the MLP; 4 times `hidden` where None, 8/3 times of a gated one.
        experts: in the MLP of each layer; 0 for an MLP without.
        expert_ffn: width of an expert; `ffn` where None.
        top_k: experts that a token goes to.
        is_gated: the MLP has a gate in addition to its up projection.
        is_tied: the output layer is the word embedding.
        has_bias: linear layers have one.
        has_qkv_bias: the projection to queries, keys and values has one, whatever `has_bias` says.
        is_rms: norms have a weight and no bias.
    """

    layers: int
    hidden: int
    vocab: int
    vocab_multiple: int = 128
    seq: int = 2048
    positions: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    experts: int = 0
    expert_ffn: int | None = None
    top_k: int = 2
    is_gated: bool = False
    is_tied: bool = True
    has_bias: bool = True
    has_qkv_bias: bool = False
    is_rms: bool = False

    @property
    def ffn_width(self) -> int:
        """Width of the MLP, without the gate."""
        if self.ffn is not None:
            return self.ffn
        return self.hidden * 8 // 3 // _GATED_MULTIPLE * _GATED_MULTIPLE if self.is_gated else 4 * self.hidden

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.hidden if self.heads is None else self.heads * self._head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.query_width if self.kv_heads is None else self.kv_heads * self._head_dim

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        return self.seq if self.positions is None else self.positions

    def padded_vocab(self, tp: int) -> int:
        """Rows of the word embedding of all tensor-parallel ranks.

        >>> GptSizes(layers=1, hidden=8, vocab=50257).padded_vocab(2)
        50432
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple if multiple else self.vocab

    @property
    def _head_dim(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if self.heads is None or self.hidden % self.heads:
            got, rule = f"{self.hidden} over {self.heads} heads", "divide evenly"
            raise ConfigError(refusal("hidden size", got, rule, "Write --heads N, or give kv_channels in the config"))
        return self.hidden // self.heads


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the groups that a model is cut over.

    Args:
        dp: data-parallel ranks, which hold the same params.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, which are data-parallel ranks of all other params.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups together."""
        return self.dp * self.tp * self.pp

    def place_of(self, rank: int) -> tuple[int, int]:
        """Stage and data-parallel rank, in Megatron's order: tensor-parallel ranks are neighbours, stages far apart.

        >>> ParallelSizes(dp=4, tp=2, pp=3).place_of(13)
        (1, 2)
        """
        return rank // (self.tp * self.dp), rank // self.tp % self.dp

    def data_ranks(self, rank: int) -> range:
        """The data-parallel group of a rank.

        >>> list(ParallelSizes(dp=4, tp=2, pp=3).data_ranks(13))
        [9, 11, 13, 15]
        """
        first = rank - self.place_of(rank)[1] * self.tp
        return range(first, first + self.dp * self.tp, self.tp)

    def expert_ranks(self, rank: int) -> range:
        """The ranks of its data-parallel group that hold the same experts.

        >>> list(ParallelSizes(dp=4, tp=2, pp=3, ep=2).expert_ranks(13))
        [9, 13]
        """
        return self.data_ranks(rank)[self.place_of(rank)[1] % self.ep :: self.ep]


def check_cut(gpt: GptSizes, cut: ParallelSizes) -> None:
    """Refuses sizes that Megatron would refuse.

    Raises:
        ConfigError: something does not divide evenly, or experts are asked for that are not there.
    """
    if cut.ep > 1 and not gpt.experts:
        rule, remedy = "be 1 for a model without experts", "Write --experts N, or leave --ep out"
        raise ConfigError(refusal("--ep", cut.ep, rule, remedy))
    for what, number, flag, size in (
        ("layers", gpt.layers, "--pp", cut.pp),
        ("hidden elements", gpt.hidden, "--tp", cut.tp if gpt.heads is None else 1),
        ("heads", gpt.heads or 0, "--tp", cut.tp),
        ("key and value heads", gpt.kv_heads or 0, "--tp", cut.tp),
        ("MLP width", gpt.ffn_width, "--tp", cut.tp),
        ("expert width", gpt.expert_ffn or gpt.ffn_width, "--tp", cut.tp),
        ("vocabulary", gpt.padded_vocab(cut.tp), "--tp", cut.tp),
        ("experts", gpt.experts, "--ep", cut.ep),
        ("data-parallel ranks", cut.dp, "--ep", cut.ep),
    ):
        if number % size:
            rule, remedy = f"be divisible by {flag} {size}", f"Write a {flag} that divides {number}"
            raise ConfigError(refusal(f"number of {what}", number, rule, remedy))


#: The keys that mean a field of `GptSizes`. The first one that is present and not null counts.
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
#: The same for fields that are true or false; a key after "not " means the opposite.
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
#: Keys that add params which are not counted here, unless they have one of these values.
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
    """Reads sizes from a JSON file, by field of `GptSizes`.

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
    """Reads sizes from names and values; names that decide no shape are ignored.

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
    """Settles what several keys decide together."""
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
        rule, remedy = "be a whole number of at least 0", "Correct it, or give the flag in addition to --config"
        raise ConfigError(refusal(f"key {key!r} of the config", repr(value), rule, remedy))
    return value
