"""`megatron-distopt plan`: what parallel sizes, dtypes, buckets and state cost, before anything is
started.

Imports no torch. The model and what is chosen for it are in `plan_model`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from megatron_distopt.cli.plan_model import (
    AUTO,
    DTYPES,
    REDUCE_NBYTES,
    Choice,
    GptSizes,
    ParallelSizes,
    StageParam,
    check_cut,
    stage_params,
)
from megatron_distopt.cli.show import Answer, ranges, rows, size_text, titled
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import BufferLayout, choose_buckets, default_bucket_size, lay_out
from megatron_distopt.layout.buckets import alignment_for
from megatron_distopt.layout.estimate import (
    MAIN_NBYTES,
    MOMENT_NBYTES,
    Footprint,
    Sent,
    footprint_of,
    sent_for,
    sent_for_statistics,
)

DESCRIPTION = """Works out what a choice of parallel sizes, dtypes and buckets costs, before
anything is started: bytes of a rank by kind, buckets, and bytes that the
collectives of a step send. With --memory it also says whether that fits into
a device, and how many ranks are needed.

The model is a Megatron GPT. docs/plan.md says what each figure means."""

_SIZES = (
    ("--layers", "transformer layers, all stages together"),
    ("--hidden", "width of the model"),
    ("--vocab", "tokens, padded to a multiple of 128 times tp as in Megatron"),
    ("--heads", "attention heads; needed if there are fewer heads of keys"),
    ("--kv-heads", "heads of keys and values, if there are fewer"),
    ("--head-dim", "width of a head; default hidden / heads"),
    ("--ffn", "width of the MLP; default 4 times hidden, 8/3 times with a gate"),
    ("--seq", "tokens of a sequence, which are the rows of learned positions; default 2048"),
    ("--experts", "experts in the MLP of each layer"),
    ("--expert-ffn", "width of an expert; default as --ffn"),
)
LLAMA = {"is_gated": True, "is_rms": True, "is_rotary": True, "has_bias": False, "is_tied": False}
#: Switches, and the fields that they set.
_SWITCHES = (
    ("--gated", {"is_gated": True}, "the MLP has a gate (SwiGLU)"),
    ("--rms", {"is_rms": True}, "RMSNorm"),
    ("--rotary", {"is_rotary": True}, "no learned positions"),
    ("--no-bias", {"has_bias": False}, "linear layers without a bias"),
    (
        "--qkv-bias",
        {"has_qkv_bias": True},
        "queries, keys and values have a bias even with --no-bias",
    ),
    ("--untied", {"is_tied": False}, "the output layer has a weight of its own"),
    (
        "--tied",
        {"is_tied": True},
        "the output layer shares the word embedding's weight; the default",
    ),
    ("--llama", LLAMA, "--gated --rms --rotary --no-bias --untied"),
)
#: Kinds of state: words to choose from, the default, and what is meant.
_FORMS = (
    ("--dtype", DTYPES, "bf16", "dtype of the params"),
    ("--grad-dtype", ("fp32", "param"), "fp32", "dtype of the grads"),
    ("--reduce-dtype", REDUCE_NBYTES, None, "dtype in which fp32 grads are sent"),
    ("--main-params-dtype", MAIN_NBYTES, "float32", "form of the main params of 16-bit params"),
    ("--exp-avg-dtype", MOMENT_NBYTES, "float32", "form of the first moment"),
    ("--exp-avg-sq-dtype", MOMENT_NBYTES, "float32", "form of the second moment"),
)
_GIB = 1 << 30
#: Data-parallel sizes that are tried with `--memory`: doublings of the expert-parallel size.
_NUM_DOUBLINGS = 14


def add_arguments(command: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Declares the flags of `plan`; `count` reads a whole number of at least 1."""
    model = command.add_argument_group("model")
    for flag, text in _SIZES:
        model.add_argument(flag, type=count, metavar="N", help=text)
    for flag, switch, text in _SWITCHES:
        model.add_argument(
            flag, dest="switches", action="append_const", const=switch, default=[], help=text
        )
    group = command.add_argument_group("choice")
    for name in ("data", "tensor", "pipeline", "expert"):
        flag, text = f"--{name[0]}p", f"{name}-parallel size; default 1"
        group.add_argument(flag, type=count, default=1, metavar="N", help=text)
    for flag, words, default, text in _FORMS:
        group.add_argument(
            flag, choices=tuple(words), default=default, help=f"{text}; default {default}"
        )
    text = (
        "fraction of the state of 16-bit params that is kept on the host, by whole buckets and "
        "in fp32; default 0"
    )
    group.add_argument("--offload-fraction", type=float, default=0.0, metavar="F", help=text)
    text = "keep averages of the main params in fp32, with any decay such as 0.999; default none"
    group.add_argument("--ema-decay", type=float, metavar="D", help=text)
    text = (
        "elements of a bucket, or auto for what runs with overlap choose; default one bucket a "
        "buffer"
    )
    bucket = partial(_bucket_size, count)
    group.add_argument("--bucket-size", type=bucket, metavar="N", help=text)
    text = "memory of a device: say whether the choice fits, and with how many ranks it would"
    command.add_argument("--memory", type=count, metavar="GIB", help=text)


def _bucket_size(count: Callable[[str], int], text: str) -> int | str:
    return AUTO if text == AUTO else count(text)


def _sizes_of(parsed: argparse.Namespace) -> GptSizes:
    flags = {field.name: getattr(parsed, field.name, None) for field in fields(GptSizes)}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for switch in parsed.switches:
        given |= switch
    for name in ("layers", "hidden", "vocab"):
        if name not in given:
            raise ConfigError(f"--{name} is missing, and the model needs it. Write --{name} N.")
    return GptSizes(**given)


def _choice_of(parsed: argparse.Namespace) -> Choice:
    names = [field.name for field in fields(Choice) if field.name != "cut"]
    given: dict[str, Any] = {name: getattr(parsed, name) for name in names}
    given["cut"] = ParallelSizes(parsed.dp, parsed.tp, parsed.pp, parsed.ep)
    given["grad_dtype"] = parsed.dtype if parsed.grad_dtype == "param" else "fp32"
    return Choice(**given)


@dataclass(frozen=True)
class StagePlan:
    """The plan of a rank of one pipeline stage."""

    choice: Choice
    stage: int  # from 0
    params: tuple[StageParam, ...]  # in the order of registration
    num_buckets: int  # of all buffers
    footprint: Footprint
    sent: dict[str, Sent]  # by the rank in one step, by kind of collective

    @property
    def numel(self) -> int:
        return sum(param.spec.numel for param in self.params)

    @property
    def stages(self) -> range:
        """The stages that this one stands for."""
        last = self.choice.cut.pp - 1
        return range(1, last) if 0 < self.stage < last else range(self.stage, self.stage + 1)

    @property
    def nbytes(self) -> dict[str, int]:
        """By part, as docs/plan.md says."""
        held = self.footprint
        largest_grad = max(param.spec.numel for param in self.params) * self.choice.widths.param
        return {
            "params": held.param_nbytes,
            "grads": held.grad_nbytes,
            "main": held.main_nbytes,
            "moments": held.moment_nbytes,
            "averages": held.average_nbytes,
            "on host": held.host_nbytes + held.staging_nbytes,
            "all": held.lasting_nbytes,
            "peak": held.lasting_nbytes + max(largest_grad, held.step_nbytes),
            **{f"{kind} sends": part.nbytes for kind, part in self.sent.items()},
        }


def plan_choice(gpt: GptSizes, choice: Choice) -> list[StagePlan]:
    """Works out every stage for the first data-parallel rank, on which no padding of a bucket's end
    lies.

    Those between the first and the last are alike, and are in the list once.
    """
    numbers = sorted({0, min(1, choice.cut.pp - 1), choice.cut.pp - 1})
    return [plan_stage(gpt, choice, stage) for stage in numbers]


def _peak_nbytes(stages: Sequence[StagePlan]) -> int:
    return max(stage.nbytes["peak"] for stage in stages)


def plan_stage(gpt: GptSizes, choice: Choice, stage: int, rank: int = 0) -> StagePlan:
    """Works out one rank of a data-parallel group; its experts' group has every `ep`-th of its
    ranks."""
    cut = choice.cut
    check_cut(gpt, cut)
    params = stage_params(gpt, cut, stage, DTYPES[choice.dtype][0])
    footprint, sent, num_buckets = Footprint(), dict[str, Sent](), 0
    # Experts have a buffer of their own where expert-parallel ranks differ in them.
    for num_copies, is_expert in ((1, False), (cut.ep, True)):
        in_buffer = [param for param in params if param.is_expert == is_expert]
        if not in_buffer:
            continue
        layout, group_rank = layout_of(in_buffer, choice, cut.dp // num_copies), rank // num_copies
        key_of = {param.spec.name: param.decays for param in in_buffer}
        [on_host] = choose_buckets([layout], choice.offload_fraction)
        held = footprint_of(layout, group_rank, choice.widths, key_of.__getitem__, on_host)
        parts = sent_for(layout, choice.widths)
        footprint, num_buckets = footprint.plus(held), num_buckets + len(layout.buckets)
        sent = {kind: part.plus(sent.get(kind)) for kind, part in parts.items()}
    sent["all-reduce"] = sent_for_statistics(cut.num_ranks)
    return StagePlan(choice, stage, params, num_buckets, footprint, sent)


def layout_of(params: Sequence[StageParam], choice: Choice, num_shards: int) -> BufferLayout:
    """Lays out a buffer in the reverse order of registration, as `distribute` does."""
    specs, bucket_size = [param.spec for param in reversed(params)], choice.bucket_size
    if bucket_size == AUTO:
        bucket_size = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    elif bucket_size is not None and bucket_size < num_shards:
        raise ConfigError(
            f"A bucket of {bucket_size} elements has fewer than one for each of {num_shards} "
            "ranks. Write --bucket-size 40000000."
        )
    alignment = alignment_for(
        choice.main_params_dtype, choice.exp_avg_dtype, choice.exp_avg_sq_dtype
    )
    return lay_out(specs, num_shards=num_shards, bucket_size=bucket_size, alignment_numel=alignment)


def ranks_needed(gpt: GptSizes, choice: Choice, memory_nbytes: int) -> int | None:
    """The fewest ranks with which this choice fits, at its tp, pp and ep; None where no number of
    data-parallel ranks makes it fit."""
    for exponent in range(_NUM_DOUBLINGS):
        cut = replace(choice.cut, dp=choice.cut.ep << exponent)
        if isinstance(choice.bucket_size, int) and choice.bucket_size < cut.dp:
            break
        if _peak_nbytes(plan_choice(gpt, replace(choice, cut=cut))) <= memory_nbytes:
            return cut.num_ranks
    return None


def answer(parsed: argparse.Namespace) -> Answer:
    """Plans every pipeline stage; with `--memory` also what fits."""
    gpt, choice = _sizes_of(parsed), _choice_of(parsed)
    stages = plan_choice(gpt, choice)
    peak_nbytes = _peak_nbytes(stages)
    model = asdict(gpt)
    shown = [f"{name} {value}" for name, value in model.items() if value not in (None, False)]
    cells = [("stage", *stages[0].nbytes, "buckets", "flat params")]
    for stage in stages:
        sizes = map(size_text, stage.nbytes.values())
        counts = str(stage.num_buckets), str(stage.footprint.num_flat_params)
        cells.append((ranges(stage.stages), *sizes, *counts))
    parts = [titled("model", rows([(", ".join(shown),)])), titled("bytes of a rank", rows(cells))]
    document = {
        "model": {**model, "ffn_width": gpt.ffn_width},
        "choice": {**asdict(choice), "ranks": choice.cut.num_ranks},
        "peak_nbytes": peak_nbytes,
        "stages": [
            {
                "stages": list(stage.stages),
                "params": len(stage.params),
                "numel": stage.numel,
                "buckets": stage.num_buckets,
                "flat_params": stage.footprint.num_flat_params,
                "nbytes": stage.nbytes,
            }
            for stage in stages
        ],
    }
    if parsed.memory is not None:
        memory_nbytes = parsed.memory * _GIB
        needed = ranks_needed(gpt, choice, memory_nbytes)
        fits = peak_nbytes <= memory_nbytes
        document |= {"memory_nbytes": memory_nbytes, "fits": fits, "ranks_needed": needed}
        title = f"{size_text(memory_nbytes)} of memory"
        parts.append(titled(title, rows(_fits(memory_nbytes - peak_nbytes, needed, choice))))
    return Answer(document, parts)


def _fits(left_nbytes: int, needed: int | None, choice: Choice) -> Iterator[tuple[str, str]]:
    if left_nbytes >= 0:
        text = (
            f"{size_text(left_nbytes)} are left for activations and everything else that is not "
            "planned"
        )
        yield "fits", text
    else:
        yield "does not fit", f"{size_text(-left_nbytes)} are missing"
    if needed is None:
        yield (
            "ranks needed",
            "no number of data-parallel ranks is enough; use a larger --tp or --pp, "
            "--main-params-dtype remainder, --grad-dtype param, or --offload-fraction 0.5",
        )
    else:
        cut = choice.cut
        dp = needed // (cut.tp * cut.pp)
        yield "ranks needed", f"{needed:,}: dp {dp:,}, tp {cut.tp}, pp {cut.pp}"
