"""The command line of `megatron-distopt plan`, its `--config` file, and the model and choices that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_distopt.cli.plan_fit import Candidates
from megatron_distopt.cli.plan_model import (
    AUTO,
    DTYPES,
    OPTIMIZERS,
    REDUCE_NBYTES,
    TP_MODES,
    Choice,
    GptSizes,
    ParallelSizes,
)
from megatron_distopt.cli.plan_times import Assumed, Machine
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import MAIN_NBYTES, MOMENT_NBYTES

DESCRIPTION = """Works out, before anything is started, what a choice of parallel sizes, dtypes
and buckets costs: bytes a rank by kind, buckets, what a step's collectives
send, how long they take, and how much of that backward and the next forward
can hide. Several values of a flag are compared in one table. With --memory
it says which forms and places of the optimizer state fit into a device.

The model is a Megatron GPT, from --config or from sizes; sizes override the
config. With --rank the layout, buffers and optimizer of that rank are built
without memory, by the code that training runs. docs/plan.md says what each
figure means."""

_MODEL = (
    ("--layers", "transformer layers, all stages together"),
    ("--hidden", "width"),
    ("--vocab", "tokens; padded to a multiple of 128 times tp, as Megatron does"),
    ("--heads", "attention heads; needed where keys have fewer"),
    ("--kv-heads", "heads of keys and values, where they have fewer"),
    ("--ffn", "width of the MLP; 4 times hidden, 8/3 times of a gated one"),
    ("--seq", "tokens of a sequence, and rows of learned positions; 2048"),
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
_GB, _GIB, _TERA = 1e9, 1 << 30, 1e12
#: Words for the defaults, which can then stand in a list of values to compare.
_ONE_BUCKET, _AS_THEY_ARE = "all", "none"


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
    _add_choices(command.add_argument_group("choices; each takes several values"), count)
    _add_machine(command.add_argument_group("machine"), count)
    _add_assumed(command.add_argument_group("time"), count)
    output = command.add_argument_group("output")
    output.add_argument("--rank", type=_rank, metavar="K", help="build this one of all ranks on meta tensors")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw the timeline of a step; needs matplotlib")


def _add_choices(group: argparse._ArgumentGroup, count: Callable[[str], int]) -> None:
    ranks = group.add_mutually_exclusive_group()
    ranks.add_argument("--dp", type=count, nargs="+", default=[1], metavar="N", help="data-parallel sizes")
    ranks.add_argument("--ranks", type=count, nargs="+", metavar="N", help="all ranks; dp is what tp and pp leave")
    for flag, text in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("ep", "expert-parallel")):
        group.add_argument(f"--{flag}", type=count, nargs="+", default=[1], metavar="N", help=f"{text} sizes")
    for flag, words, text in (
        ("--dtype", tuple(DTYPES), "dtype of the params; bf16"),
        ("--grad-dtype", ("fp32", "param"), "dtype of the grads; fp32"),
        ("--reduce-dtype", (_AS_THEY_ARE, *REDUCE_NBYTES), "dtype in which fp32 grads are communicated; none for fp32"),
    ):
        group.add_argument(flag, choices=words, nargs="+", default=[words[0]], help=text)
    for flag, words, text in (
        ("--main-params-dtype", tuple(MAIN_NBYTES), "form of the main params of 16-bit params; float32"),
        ("--exp-avg-dtype", tuple(MOMENT_NBYTES), "form of the first moment; float32"),
        ("--exp-avg-sq-dtype", tuple(MOMENT_NBYTES), "form of the second moment; float32"),
    ):
        group.add_argument(flag, choices=words, nargs="+", default=[], help=text)
    text = "what updates the params; muon is Muon for the matrices of layers and Adam for all else; adam"
    group.add_argument("--optimizer", type=_optimizer, nargs="+", default=["adam"], metavar="NAME", help=text)
    text = f"how tensor-parallel ranks share a matrix of Muon's; {TP_MODES[0]}"
    group.add_argument("--muon-tp-mode", choices=TP_MODES, nargs="+", default=[TP_MODES[0]], help=text)
    text = "part of the state of 16-bit params that is on the host, by whole buckets; 0"
    group.add_argument("--offload-fraction", type=_fraction, nargs="+", default=[], metavar="F", help=text)
    text = "elements of a bucket; auto for the size that runs with overlap choose, all for one bucket a buffer"
    bucket = partial(_bucket_size, count)
    group.add_argument("--bucket-size", type=bucket, nargs="+", default=[None], metavar="N", help=text)


def _add_machine(group: argparse._ArgumentGroup, count: Callable[[str], int]) -> None:
    usual = Machine()
    text = "memory of a device: lists what fits, for all forms and places of the state that are not given above"
    group.add_argument("--memory", type=_rate, metavar="GIB", help=text)
    text = "of it, for activations and everything else that is not planned; 0"
    group.add_argument("--reserve", type=_amount, default=0.0, metavar="GIB", help=text)
    group.add_argument("--host-memory", type=_rate, metavar="GIB", help="memory of the host of a node; not limited")
    text = f"ranks that share a host; {usual.ranks_per_node}"
    group.add_argument("--ranks-per-node", type=count, default=usual.ranks_per_node, metavar="N", help=text)
    for flag, rate, text in (
        ("device-bandwidth", usual.device_bytes_per_second, "bytes that a device reads and writes in its memory"),
        ("host-link", usual.link_bytes_per_second, "bytes between a device and its host, in each direction"),
        ("host-bandwidth", usual.host_bytes_per_second, "bytes that all ranks of a node read and write on its host"),
    ):
        default = rate / _GB
        group.add_argument(f"--{flag}", type=_rate, default=default, metavar="GB_S", help=f"{text}; {default:g}")
    default = usual.flops_per_second / _TERA
    text = f"floating-point operations of bf16 products on a device, in 10^12 a second, for Muon; {default:g}"
    group.add_argument("--matmul-tflops", type=_rate, default=default, metavar="TFLOP_S", help=text)


def _add_assumed(group: argparse._ArgumentGroup, count: Callable[[str], int]) -> None:
    text = "bandwidth of a rank in each direction; 100"
    group.add_argument("--bandwidth", type=_rate, default=100.0, metavar="GBIT_S", help=text)
    text = "time of a message in addition to its bytes; 0"
    group.add_argument("--latency-us", type=_amount, default=0.0, metavar="US", help=text)
    backward = group.add_mutually_exclusive_group()
    text = "backward time of a microbatch on a rank, the same for every choice"
    backward.add_argument("--backward-ms", type=_amount, metavar="MS", help=text)
    text = "throughput of one model replica, the same for every choice; two thirds of a microbatch's time are backward"
    backward.add_argument("--tokens-per-second", type=_rate, metavar="N", help=text)
    text = "sequences of a microbatch, for --tokens-per-second; 1"
    group.add_argument("--micro-batch", type=count, default=1, metavar="N", help=text)
    text = "time of statistics and update on the device; computed from --device-bandwidth"
    group.add_argument("--update-ms", type=_amount, metavar="MS", help=text)


def _optimizer(text: str) -> str:
    if text in OPTIMIZERS:
        return text
    rule, remedy = "be adam or muon: what another one keeps, its class alone knows", "Write --optimizer muon"
    raise argparse.ArgumentTypeError(refusal("optimizer", repr(text), rule, remedy))


def _bucket_size(count: Callable[[str], int], text: str) -> int | str | None:
    return AUTO if text == AUTO else None if text == _ONE_BUCKET else count(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= 0:
        return value
    rule = "be a finite number of at least 0"
    raise argparse.ArgumentTypeError(refusal("amount", repr(text), rule, "Write one such as 12.5"))


def _rate(text: str) -> float:
    if value := _amount(text):
        return value
    raise argparse.ArgumentTypeError(refusal("rate", repr(text), "be above 0", "Write one such as 12.5"))


def _fraction(text: str) -> float:
    """Which numbers are fractions, `Choice` says."""
    try:
        return float(text)
    except ValueError:
        rule, remedy = "be a number from 0 to 1", "Write one such as 0.5"
        raise argparse.ArgumentTypeError(refusal("fraction", repr(text), rule, remedy)) from None


def _rank(text: str) -> int:
    if text.isdecimal():
        return int(text)
    rule = "be a whole number of at least 0"
    raise argparse.ArgumentTypeError(refusal("rank", repr(text), rule, "Write --rank 0 for the first one"))


def sizes_of(parsed: argparse.Namespace) -> GptSizes:
    """Returns the sizes of the model that is planned.

    Raises:
        ConfigError: a size is missing.
    """
    given: dict[str, Any] = _sizes_in_file(parsed.config) if parsed.config else {}
    flags = {field.name: getattr(parsed, field.name, None) for field in dataclasses.fields(GptSizes)}
    if flags["vocab"] is not None:
        given.pop("vocab_multiple", None)
    given.update({name: value for name, value in flags.items() if value is not None})
    for name in ("layers", "hidden", "vocab"):
        if not given.get(name):
            rule, remedy = "have layers, hidden and vocab", f"Write --{name} N, or --config FILE with it"
            raise ConfigError(refusal("model", f"no {name}", rule, remedy))
    return GptSizes(**given)


def choices_of(parsed: argparse.Namespace) -> list[Choice]:
    """Returns every combination of the values that were given, in the order of the flags.

    Raises:
        ConfigError: `--ranks` is no multiple of tp times pp, or grads that are kept in 16 bits are to be rounded.
    """
    cuts = [
        ParallelSizes(dp, tp, pp, ep) if parsed.ranks is None else ParallelSizes(_left_of(dp, tp, pp), tp, pp, ep)
        for dp, tp, pp, ep in itertools.product(parsed.ranks or parsed.dp, parsed.tp, parsed.pp, parsed.ep)
    ]
    others = (parsed.dtype, parsed.grad_dtype, parsed.reduce_dtype, parsed.bucket_size)
    forms = (parsed.main_params_dtype, parsed.exp_avg_dtype, parsed.exp_avg_sq_dtype)
    modes_of = {"adam": TP_MODES[:1], "muon": parsed.muon_tp_mode}
    updates = [(name, mode) for name in parsed.optimizer for mode in modes_of[name]]
    kept = itertools.product(*(each or ["float32"] for each in forms), parsed.offload_fraction or [0.0])
    states = [(*state, *update) for state, update in itertools.product(kept, updates)]
    return [
        Choice(
            cut, dtype, grads == "fp32" or dtype == "fp32", bucket, None if reduce == _AS_THEY_ARE else reduce, *state
        )
        for cut, dtype, grads, reduce, bucket, state in itertools.product(cuts, *others, states)
    ]


def tried_of(parsed: argparse.Namespace) -> Candidates | None:
    """Returns the forms and places to fit into `--memory`; None without."""
    if parsed.memory is None:
        return None
    return Candidates(parsed.main_params_dtype, parsed.exp_avg_dtype, parsed.exp_avg_sq_dtype, parsed.offload_fraction)


def _left_of(ranks: int, tp: int, pp: int) -> int:
    if ranks % (tp * pp):
        rule = f"be a multiple of tp {tp} times pp {pp}"
        raise ConfigError(refusal("--ranks", ranks, rule, "Write another number, or --dp N in its place"))
    return ranks // (tp * pp)


def assumed_of(parsed: argparse.Namespace, gpt: GptSizes) -> Assumed:
    """Returns the machine, its links, and the times of a step that are given.

    Raises:
        ConfigError: a reserve of a memory that is not given, or that is not larger.
    """
    backward = None if parsed.backward_ms is None else parsed.backward_ms / 1e3
    if parsed.tokens_per_second is not None:
        backward = parsed.micro_batch * gpt.seq / parsed.tokens_per_second * 2 / 3
    update = None if parsed.update_ms is None else parsed.update_ms / 1e3
    return Assumed(parsed.bandwidth * _GB / 8, parsed.latency_us / 1e6, backward, update, _machine_of(parsed))


def _machine_of(parsed: argparse.Namespace) -> Machine:
    if parsed.reserve and parsed.reserve >= (parsed.memory or 0.0):
        got = f"{parsed.reserve:g} GiB of {parsed.memory or 'no'} GiB"
        raise ConfigError(
            refusal("--reserve", got, "be less than --memory", "Write --memory GIB, or a smaller reserve")
        )
    return Machine(
        memory_nbytes=None if parsed.memory is None else round(parsed.memory * _GIB),
        reserve_nbytes=round(parsed.reserve * _GIB),
        host_nbytes=None if parsed.host_memory is None else round(parsed.host_memory * _GIB),
        ranks_per_node=parsed.ranks_per_node,
        device_bytes_per_second=parsed.device_bandwidth * _GB,
        link_bytes_per_second=parsed.host_link * _GB,
        host_bytes_per_second=parsed.host_bandwidth * _GB,
        flops_per_second=parsed.matmul_tflops * _TERA,
    )


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
    # Not the positions: a model that has learned 131,072 of them is seldom trained on as many tokens at once.
    "seq": ("seq", "seq_length"),
    "positions": ("positions", "max_position_embeddings", "n_positions"),
    "experts": ("experts", "num_moe_experts", "num_experts", "num_local_experts"),
    "expert_ffn": ("expert_ffn", "moe_ffn_hidden_size", "moe_intermediate_size"),
    "top_k": ("top_k", "moe_router_topk", "num_experts_per_tok"),
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
    for name, keys in _CONFIG_NUMBERS.items():
        key = next((key for key in keys if given.get(key) is not None), None)
        if key is not None:
            found[name] = _whole_number(key, given[key])
    for name, keys in _CONFIG_SWITCHES.items():
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
