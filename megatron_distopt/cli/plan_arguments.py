"""The command line of `megatron-distopt plan`, and the model and choices that it describes. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_distopt.cli.plan_choice import AUTO, DTYPES, REDUCE_NBYTES, Choice
from megatron_distopt.cli.plan_model import GptSizes, ParallelSizes, sizes_in_file
from megatron_distopt.cli.plan_timeline import Assumed
from megatron_distopt.errors import ConfigError, refusal

__all__ = ["DESCRIPTION", "add_arguments", "assumed_of", "choices_of", "sizes_of"]

DESCRIPTION = """Works out, before anything is started, what a choice of parallel sizes, dtypes
and buckets costs: bytes a rank by kind, buckets, what a step's collectives
send, how long they take, and how much of that backward and the next forward
can hide. Several values of a flag are compared in one table.

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
    text = "elements of a bucket; auto for the size that runs with overlap choose, all for one bucket a buffer"
    bucket = partial(_bucket_size, count)
    group.add_argument("--bucket-size", type=bucket, nargs="+", default=[None], metavar="N", help=text)


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
    group.add_argument("--update-ms", type=_amount, default=0.0, metavar="MS", help="time of statistics and update; 0")


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
    given: dict[str, Any] = sizes_in_file(parsed.config) if parsed.config else {}
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
    return [
        Choice(cut, dtype, grads == "fp32" or dtype == "fp32", bucket, None if reduce == _AS_THEY_ARE else reduce)
        for cut, dtype, grads, reduce, bucket in itertools.product(cuts, *others)
    ]


def _left_of(ranks: int, tp: int, pp: int) -> int:
    if ranks % (tp * pp):
        rule = f"be a multiple of tp {tp} times pp {pp}"
        raise ConfigError(refusal("--ranks", ranks, rule, "Write another number, or --dp N in its place"))
    return ranks // (tp * pp)


def assumed_of(parsed: argparse.Namespace, gpt: GptSizes) -> Assumed:
    """Returns the link and step times that are given."""
    backward = None if parsed.backward_ms is None else parsed.backward_ms / 1e3
    if parsed.tokens_per_second is not None:
        backward = parsed.micro_batch * gpt.seq / parsed.tokens_per_second * 2 / 3
    return Assumed(parsed.bandwidth * 1e9 / 8, parsed.latency_us / 1e6, backward, parsed.update_ms / 1e3)
