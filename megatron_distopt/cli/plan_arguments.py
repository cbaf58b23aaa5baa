"""The command line of `megatron-distopt plan`, its `--config` file, and the model and choices that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_distopt.cli.plan_model import AUTO, DTYPES, REDUCE_NBYTES, Choice, GptSizes, ParallelSizes
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout.estimate import MAIN_NBYTES, MOMENT_NBYTES

DESCRIPTION = """Works out, before anything is started, what a choice of parallel sizes, dtypes
and buckets costs: bytes a rank by kind, buckets, and what a step's collectives
send. Several values of a flag are compared in one table. With --memory the
table has all forms of the optimizer state that fit into a device, and what
changes least about the training is first.

The model is a Megatron GPT, from --config or from sizes; sizes override the
config. docs/plan.md says what each figure means."""

_MODEL = (
    ("--layers", "transformer layers, all stages together"),
    ("--hidden", "width"),
    ("--vocab", "tokens; padded to a multiple of 128 times tp, as Megatron does"),
    ("--heads", "attention heads; needed where keys have fewer"),
    ("--kv-heads", "heads of keys and values, where they have fewer"),
    ("--ffn", "width of the MLP; 4 times hidden, 8/3 times of a gated one"),
    ("--seq", "tokens of a sequence, which is to say rows of learned positions; 2048"),
    ("--experts", "experts in the MLP of each layer"),
    ("--expert-ffn", "width of an expert; as --ffn"),
)
#: A switch, the field that it sets, and what it sets it to.
_SWITCHES = (
    ("--gated", "is_gated", True, "the MLP has a gate (SwiGLU)"),
    ("--tied", "is_tied", True, "the output layer is the word embedding; the default"),
    ("--untied", "is_tied", False, "the output layer has a weight of its own"),
    ("--no-bias", "has_bias", False, "linear layers without a bias"),
    ("--rms", "is_rms", True, "RMSNorm"),
    ("--rotary", "positions", 0, "no learned positions"),
)
#: Words for the defaults, which can then stand in a list of values to compare.
_ONE_BUCKET, _AS_THEY_ARE = "all", "none"
#: With `--memory`, the forms of main params that are tried by dtype of the params, and those of both moments: one of
#: each number of bytes.
_MAINS = {"bf16": ("float32", "remainder", "bfloat16"), "fp16": ("float32", "float16"), "fp32": ("float32",)}
_MOMENTS = ("float32", "bfloat16", "int8")


def add_arguments(command: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Declares the flags of `plan`.

    Args:
        command: the parser that gets them.
        count: reads a whole number of at least 1.
    """
    model = command.add_argument_group("model")
    model.add_argument("--config", type=Path, metavar="FILE", help="JSON with Megatron's or HuggingFace's names")
    for flag, text in _MODEL:
        model.add_argument(flag, type=count, metavar="N", help=text)
    for flag, name, value, text in _SWITCHES:
        model.add_argument(flag, dest=name, action="store_const", const=value, help=text)
    group = command.add_argument_group("choices; each takes several values")
    ranks = group.add_mutually_exclusive_group()
    ranks.add_argument("--dp", type=count, nargs="+", default=[1], metavar="N", help="data-parallel sizes")
    ranks.add_argument("--ranks", type=count, nargs="+", metavar="N", help="all ranks; dp is what tp and pp leave")
    for flag, text in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("ep", "expert-parallel")):
        group.add_argument(f"--{flag}", type=count, nargs="+", default=[1], metavar="N", help=f"{text} sizes")
    for flag, words, text in (
        ("--dtype", tuple(DTYPES), "dtype of the params; bf16"),
        ("--grad-dtype", ("fp32", "param"), "dtype of the grads; fp32"),
        ("--reduce-dtype", (_AS_THEY_ARE, *REDUCE_NBYTES), "dtype in which fp32 grads are communicated; none for fp32"),
        ("--optimizer", ("adam", "muon"), "muon is Muon for the matrices of layers and Adam for all else; adam"),
    ):
        group.add_argument(flag, choices=words, nargs="+", default=[words[0]], help=text)
    for flag, words, text in (
        ("--main-params-dtype", tuple(MAIN_NBYTES), "form of the main params of 16-bit params; float32"),
        ("--exp-avg-dtype", tuple(MOMENT_NBYTES), "form of the first moment; float32"),
        ("--exp-avg-sq-dtype", tuple(MOMENT_NBYTES), "form of the second moment; float32"),
    ):
        group.add_argument(flag, choices=words, nargs="+", default=[], help=text)
    text = "part of the state of 16-bit params that is on the host, by whole buckets and in fp32; 0"
    group.add_argument("--offload-fraction", type=_number, nargs="+", default=[0.0], metavar="F", help=text)
    text = "elements of a bucket; auto for the size that runs with overlap choose, all for one bucket a buffer"
    bucket = partial(_bucket_size, count)
    group.add_argument("--bucket-size", type=bucket, nargs="+", default=[None], metavar="N", help=text)
    text = "memory of a device: lists what fits, with every form of the state that is not given above"
    command.add_argument("--memory", type=_number, metavar="GIB", help=text)


def _bucket_size(count: Callable[[str], int], text: str) -> int | str | None:
    return AUTO if text == AUTO else None if text == _ONE_BUCKET else count(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite. Write a number such as 0.5.")
    return value


def sizes_of(parsed: argparse.Namespace) -> GptSizes:
    """Returns the sizes of the model that is planned.

    Raises:
        ConfigError: a size is missing, or the config cannot be used.
    """
    given: dict[str, Any] = _sizes_in_file(parsed.config) if parsed.config else {}
    flags = {field.name: getattr(parsed, field.name, None) for field in dataclasses.fields(GptSizes)}
    if flags["vocab"] is not None:
        given.pop("vocab_multiple", None)
    given.update({name: value for name, value in flags.items() if value is not None})
    for name in ("layers", "hidden", "vocab"):
        if not given.get(name):
            raise ConfigError(f"The model has no {name}. Write --{name} N, or --config FILE with it.")
    return GptSizes(**given)


def choices_of(parsed: argparse.Namespace) -> list[Choice]:
    """Returns every combination of the values that were given, in the order of the flags.

    Raises:
        ConfigError: `--ranks` is no multiple of tp times pp, or training refuses a combination.
    """
    buffers = itertools.product(
        _cuts_of(parsed), parsed.dtype, parsed.grad_dtype, parsed.reduce_dtype, parsed.bucket_size
    )
    return [
        Choice(
            cut,
            dtype,
            dtype if grads == "param" else "fp32",
            None if reduce == _AS_THEY_ARE else reduce,
            bucket,
            *state,
        )
        for cut, dtype, grads, reduce, bucket in buffers
        for state in _states_of(parsed, dtype)
    ]


def _cuts_of(parsed: argparse.Namespace) -> Iterator[ParallelSizes]:
    for number, tp, pp, ep in itertools.product(parsed.ranks or parsed.dp, parsed.tp, parsed.pp, parsed.ep):
        if parsed.ranks and number % (tp * pp):
            raise ConfigError(
                f"--ranks {number} is not divisible by tp {tp} times pp {pp}. Write another number, or --dp N "
                "in its place."
            )
        yield ParallelSizes(number // (tp * pp) if parsed.ranks else number, tp, pp, ep)


def _states_of(parsed: argparse.Namespace, dtype: str) -> Iterator[tuple[str, str, str, float, str]]:
    """Forms of main params and moments, fraction on the host, and optimizer; with --memory also forms not asked for."""
    mains, firsts, seconds = parsed.main_params_dtype, parsed.exp_avg_dtype, parsed.exp_avg_sq_dtype
    for optimizer in parsed.optimizer:
        tries_forms = parsed.memory is not None and optimizer == "adam"  # the state of Muon has one form
        tried_mains, tried_moments = (_MAINS[dtype], _MOMENTS) if tries_forms else (("float32",), ("float32",))
        moments = [*itertools.product(firsts or tried_moments, seconds or tried_moments)]
        if not firsts and not seconds:
            moments = [(form, form) for form in tried_moments]
        for state in itertools.product(mains or tried_mains, moments, parsed.offload_fraction):
            main, (first, second), fraction = state
            yield main, first, second, fraction, optimizer


#: The keys that mean a field of `GptSizes`. The first one that is present and not null counts.
_CONFIG_NUMBERS = {
    "layers": ("layers", "num_layers", "num_hidden_layers", "n_layer"),
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_query_groups", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "ffn": ("ffn", "ffn_hidden_size", "intermediate_size", "n_inner"),
    "vocab": ("padded_vocab_size", "vocab", "vocab_size"),
    "vocab_multiple": ("make_vocab_size_divisible_by",),
    "seq": ("seq", "seq_length"),
    "positions": ("positions", "max_position_embeddings", "n_positions"),
    "experts": ("experts", "num_moe_experts", "num_experts", "num_local_experts"),
    "expert_ffn": ("expert_ffn", "moe_ffn_hidden_size", "moe_intermediate_size"),
}
#: The same for fields that are true or false; a key after "not " means the opposite.
_CONFIG_SWITCHES = {
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


def _sizes_in_file(path: Path) -> dict[str, Any]:
    """Reads sizes from a JSON file, by field of `GptSizes`.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or says something that is not counted here.
    """
    remedy = "Give a JSON file such as a HuggingFace config.json."
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config {path} cannot be read: {error}. {remedy}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"The config {path} is a {type(given).__name__}, not an object of names and values. {remedy}")
    return sizes_in_mapping(given)


def sizes_in_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """Reads sizes from names and values; names that decide no shape are ignored.

    >>> sizes_in_mapping({"num_layers": 2, "hidden_size": 64, "padded_vocab_size": 128, "lr": 0.1})
    {'layers': 2, 'hidden': 64, 'vocab': 128, 'vocab_multiple': 0}
    """
    for key, harmless in _NOT_COUNTED.items():
        if key in given and given[key] not in harmless:
            raise ConfigError(
                f"The config has {key!r}: {given[key]}, whose params are not counted here. Take the key out to plan "
                "the rest of the model."
            )
    is_llama = "rms_norm_eps" in given
    # What HuggingFace's classes with that key take for granted.
    found: dict[str, Any] = {"is_gated": True, "is_rms": True, "has_bias": False} if is_llama else {}
    for name, keys in _CONFIG_NUMBERS.items():
        for key in [key for key in keys if given.get(key) is not None][:1]:
            found[name] = _whole_number(key, given[key])
    for name, keys in _CONFIG_SWITCHES.items():
        for key in [key for key in keys if given.get(key.removeprefix("not ")) is not None][:1]:
            found[name] = bool(given[key.removeprefix("not ")]) != key.startswith("not ")
    if given.get("normalization") is not None:
        found["is_rms"] = given["normalization"] == "RMSNorm"
    if given.get("padded_vocab_size") is not None:
        found["vocab_multiple"] = 0
    if given.get("group_query_attention") is False:
        found.pop("kv_heads", None)
    kind = given.get("position_embedding_type")
    is_rotary = bool(given.get("use_rotary_position_embeddings")) or "rope_theta" in given or is_llama
    if kind in _WITHOUT_PARAMS or (kind is None and is_rotary) or given.get("add_position_embedding") is False:
        found["positions"] = 0
    return found


def _whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"The config has {key!r}: {value!r}, which is no whole number of at least 0. Correct it, or give the flag "
            "in addition to --config."
        )
    return value
