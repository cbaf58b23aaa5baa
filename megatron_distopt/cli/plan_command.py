"""`megatron-distopt plan`: what parallel sizes, dtypes, buckets and state cost, before anything is
started.

Imports no torch. The model and what is chosen for it are in `plan_model`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

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
from megatron_distopt.cli.show import Answer, plural, ranges, rows, size_text, titled
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

DESCRIPTION = """Works out, before anything is started, what a choice of parallel sizes, dtypes
and buckets costs: bytes a rank by kind, buckets, and what a step's collectives
send. Several values of a flag are compared in one table. With --memory the
table has only the choices that fit into a device.

The model is a Megatron GPT. docs/plan.md says what each figure means."""

_SIZES = (
    ("--layers", "transformer layers, all stages together"),
    ("--hidden", "width"),
    ("--vocab", "tokens; padded to a multiple of 128 times tp, as Megatron does"),
    ("--heads", "attention heads; needed where keys have fewer"),
    ("--kv-heads", "heads of keys and values, where they have fewer"),
    ("--head-dim", "width of a head; hidden / heads"),
    ("--ffn", "width of the MLP; 4 times hidden, 8/3 times of a gated one"),
    ("--seq", "tokens of a sequence, which is to say rows of learned positions; 2048"),
    ("--experts", "experts in the MLP of each layer"),
    ("--expert-ffn", "width of an expert; as --ffn"),
)
LLAMA = {"is_gated": True, "is_rms": True, "is_rotary": True, "has_bias": False, "is_tied": False}
#: Switches, and the fields that they set.
_SWITCHES = (
    ("--gated", {"is_gated": True}, "the MLP has a gate (SwiGLU)"),
    ("--rms", {"is_rms": True}, "RMSNorm"),
    ("--rotary", {"is_rotary": True}, "no learned positions"),
    ("--no-bias", {"has_bias": False}, "linear layers without a bias"),
    ("--qkv-bias", {"has_qkv_bias": True}, "but with one for queries, keys and values"),
    (
        "--untied",
        {"is_tied": False},
        "the output layer has a weight of its own, and not the word embedding's",
    ),
    ("--tied", {"is_tied": True}, "the output layer is the word embedding; the default"),
    ("--llama", LLAMA, "--gated --rms --rotary --no-bias --untied"),
)
_GIB = 1 << 30


def add_arguments(command: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Declares the flags of `plan`; `count` reads a whole number of at least 1."""
    model = command.add_argument_group("model")
    for flag, text in _SIZES:
        model.add_argument(flag, type=count, metavar="N", help=text)
    for flag, switch, text in _SWITCHES:
        model.add_argument(
            flag, dest="switches", action="append_const", const=switch, default=[], help=text
        )
    group = command.add_argument_group("choices; each takes several values")
    ranks = group.add_mutually_exclusive_group()
    ranks.add_argument(
        "--dp", type=count, nargs="+", default=[1], metavar="N", help="data-parallel sizes"
    )
    ranks.add_argument(
        "--ranks", type=count, nargs="+", metavar="N", help="all ranks; dp is what tp and pp leave"
    )
    for flag, text in (
        ("tp", "tensor-parallel"),
        ("pp", "pipeline-parallel"),
        ("ep", "expert-parallel"),
    ):
        group.add_argument(
            f"--{flag}", type=count, nargs="+", default=[1], metavar="N", help=f"{text} sizes"
        )
    for flag, words, default, text in (
        ("--dtype", DTYPES, ["bf16"], "dtype of the params; bf16"),
        ("--grad-dtype", ("fp32", "param"), ["fp32"], "dtype of the grads; fp32"),
        (
            "--reduce-dtype",
            ("none", *REDUCE_NBYTES),
            ["none"],
            "dtype in which fp32 grads are communicated; none",
        ),
        (
            "--main-params-dtype",
            MAIN_NBYTES,
            ["float32"],
            "form of the main params of 16-bit params; float32",
        ),
        ("--exp-avg-dtype", MOMENT_NBYTES, ["float32"], "form of the first moment; float32"),
        ("--exp-avg-sq-dtype", MOMENT_NBYTES, ["float32"], "form of the second moment; float32"),
    ):
        group.add_argument(flag, choices=tuple(words), nargs="+", default=default, help=text)
    text = "part of the state of 16-bit params that is on the host, by whole buckets and in fp32; 0"
    group.add_argument(
        "--offload-fraction", type=_number, nargs="+", default=[0.0], metavar="F", help=text
    )
    text = "averages of the main params in fp32, with any decay such as 0.999; none"
    group.add_argument("--ema-decay", type=_number, metavar="D", help=text)
    text = (
        "elements of a bucket; auto for the size that runs with overlap choose, all for one bucket "
        "a buffer"
    )
    bucket = partial(_bucket_size, count)
    group.add_argument(
        "--bucket-size", type=bucket, nargs="+", default=[None], metavar="N", help=text
    )
    text = "memory of a device: lists the choices that fit into it"
    command.add_argument("--memory", type=_number, metavar="GIB", help=text)


def _bucket_size(count: Callable[[str], int], text: str) -> int | str | None:
    return AUTO if text == AUTO else None if text == "all" else count(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite. Write a number such as 0.5.")
    return value


def _sizes_of(parsed: argparse.Namespace) -> GptSizes:
    flags = {field.name: getattr(parsed, field.name, None) for field in fields(GptSizes)}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for switch in parsed.switches:
        given |= switch
    for name in ("layers", "hidden", "vocab"):
        if name not in given:
            raise ConfigError(f"The model has no {name}. Write --{name} N.")
    return GptSizes(**given)


def _choices_of(parsed: argparse.Namespace) -> Iterator[Choice]:
    """Yields every combination of the values that were given, in the order of the flags."""
    for number, tp, pp, ep in itertools.product(
        parsed.ranks or parsed.dp, parsed.tp, parsed.pp, parsed.ep
    ):
        if parsed.ranks and number % (tp * pp):
            raise ConfigError(
                f"--ranks {number} is not divisible by tp {tp} times pp {pp}. Write another "
                "number, or --dp N in its place."
            )
        cut = ParallelSizes(number // (tp * pp) if parsed.ranks else number, tp, pp, ep)
        buffers = itertools.product(
            parsed.dtype, parsed.grad_dtype, parsed.reduce_dtype, parsed.bucket_size
        )
        for dtype, grads, reduce, bucket in buffers:
            grad_dtype = dtype if grads == "param" else "fp32"
            reduce_dtype = None if reduce == "none" else reduce
            states = itertools.product(
                parsed.main_params_dtype,
                parsed.exp_avg_dtype,
                parsed.exp_avg_sq_dtype,
                parsed.offload_fraction,
            )
            for state in states:
                yield Choice(cut, dtype, grad_dtype, reduce_dtype, bucket, *state, parsed.ema_decay)


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
    def backward_nbytes(self) -> int:
        """For a moment in backward: the largest gradient, before it is added to the buffer."""
        return max(param.spec.numel for param in self.params) * DTYPES[self.choice.dtype][1]

    @property
    def peak_nbytes(self) -> int:
        """The most that is on the device at any time, activations not included."""
        return self.footprint.lasting_nbytes + max(self.backward_nbytes, self.footprint.step_nbytes)

    @property
    def sent_nbytes(self) -> int:
        return sum(part.nbytes for part in self.sent.values())


def plan_choice(gpt: GptSizes, choice: Choice) -> list[StagePlan]:
    """Works out every stage for the first data-parallel rank, on which no padding of a bucket's end
    lies.

    Those between the first and the last are alike, and are in the list once.
    """
    numbers = sorted({0, min(1, choice.cut.pp - 1), choice.cut.pp - 1})
    return [plan_stage(gpt, choice, stage) for stage in numbers]


def _fullest(stages: Sequence[StagePlan]) -> StagePlan:
    return max(stages, key=lambda stage: stage.footprint.lasting_nbytes)


def _peak_nbytes(stages: Sequence[StagePlan]) -> int:
    return max(stage.peak_nbytes for stage in stages)


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
            f"A bucket of {bucket_size} elements has less than one for each of {num_shards} ranks. "
            "Write --bucket-size 40000000."
        )
    alignment = alignment_for(
        choice.main_params_dtype, choice.exp_avg_dtype, choice.exp_avg_sq_dtype
    )
    return lay_out(specs, num_shards=num_shards, bucket_size=bucket_size, alignment_numel=alignment)


def answer(parsed: argparse.Namespace) -> Answer:
    """Plans every choice; with `--memory` those that fit are shown."""
    gpt = _sizes_of(parsed)
    plans = [plan_choice(gpt, choice) for choice in _choices_of(parsed)]
    memory_nbytes = None if parsed.memory is None else round(parsed.memory * _GIB)
    shown = plans
    if memory_nbytes is not None:
        shown = [stages for stages in plans if _peak_nbytes(stages) <= memory_nbytes]
    document = {
        "model": {**asdict(gpt), "ffn_width": gpt.ffn_width},
        "memory_nbytes": memory_nbytes,
        "choices": [_document(stages, memory_nbytes) for stages in plans],
    }
    model = {name: str(value) for name, value in asdict(gpt).items() if value not in (None, False)}
    parts = [
        titled("model", rows([(", ".join(f"{name} {value}" for name, value in model.items()),)]))
    ]
    # Of a single choice every stage is shown, of several the one whose ranks hold most.
    listed = [
        (stages, stage)
        for stages in shown
        for stage in (stages if len(plans) == 1 else [_fullest(stages)])
    ]
    if listed:
        title = (
            "choices"
            if memory_nbytes is None
            else f"choices that fit into {size_text(memory_nbytes)}"
        )
        parts.append(
            titled(f"{title}; bytes of a rank, between two steps", _table(listed, memory_nbytes))
        )
    if memory_nbytes is not None:
        parts.append(titled("what fits", rows(_fits(plans, shown, memory_nbytes))))
    elif len(plans) == 1:
        parts.append(titled("one step of the fullest stage", rows(_step(_fullest(plans[0])))))
    return Answer(document, parts)


def _document(stages: Sequence[StagePlan], memory_nbytes: int | None) -> dict[str, Any]:
    choice, peak_nbytes = stages[0].choice, _peak_nbytes(stages)
    return {
        **asdict(choice.cut),
        "ranks": choice.cut.num_ranks,
        **{name: value for name, value in asdict(choice).items() if name != "cut"},
        "options": choice.options,
        "peak_nbytes": peak_nbytes,
        "fits": None if memory_nbytes is None else peak_nbytes <= memory_nbytes,
        "fullest_stage": _fullest(stages).stage,
        "stages": [
            {
                "stages": list(stage.stages),
                "params": len(stage.params),
                "numel": stage.numel,
                "buckets": stage.num_buckets,
                "bytes": {
                    **asdict(stage.footprint),
                    "lasting_nbytes": stage.footprint.lasting_nbytes,
                    "backward_nbytes": stage.backward_nbytes,
                },
                "collectives": {kind: asdict(part) for kind, part in stage.sent.items()},
                "sent_nbytes": stage.sent_nbytes,
            }
            for stage in stages
        ],
    }


#: Columns of the table that are left out where all rows have this text.
_USUAL = {
    "ep": "1",
    "state": "float32",
    "on host": "0",
    "reduce dtype": "none",
    "bucket": "all",
    "stage": "0",
    "host": "0 B",
    "averages": "0 B",
    "peak": "",
    "left": "",
}


def _table(
    listed: Sequence[tuple[Sequence[StagePlan], StagePlan]], memory_nbytes: int | None
) -> RenderableType:
    found = [_cells(stage, _peak_nbytes(stages), memory_nbytes) for stages, stage in listed]
    titles = [
        title for title in found[0] if {cells[title] for cells in found} != {_USUAL.get(title)}
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for cells in found:
        table.add_row(*(cells[title] for title in titles))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _cells(stage: StagePlan, peak_nbytes: int, memory_nbytes: int | None) -> dict[str, str]:
    """The texts of a row, by title of the column; the peak is that of all stages."""
    choice, held, bucket = stage.choice, stage.footprint, stage.choice.bucket_size
    return {
        "dp": str(choice.cut.dp),
        "tp": str(choice.cut.tp),
        "pp": str(choice.cut.pp),
        "ep": str(choice.cut.ep),
        "dtype": choice.dtype,
        "grad dtype": choice.grad_dtype,
        "state": choice.state,
        "on host": f"{choice.offload_fraction:g}",
        "reduce dtype": choice.reduce_dtype or "none",
        "bucket": "all" if bucket is None else bucket if isinstance(bucket, str) else f"{bucket:,}",
        "stage": ranges(stage.stages),
        "params": size_text(held.param_nbytes),
        "grads": size_text(held.grad_nbytes),
        "main": size_text(held.main_nbytes),
        "moments": size_text(held.moment_nbytes),
        "averages": size_text(held.average_nbytes),
        "host": size_text(held.host_nbytes + held.staging_nbytes),
        "all": size_text(held.lasting_nbytes),
        "peak": "" if memory_nbytes is None else size_text(peak_nbytes),
        "left": "" if memory_nbytes is None else size_text(memory_nbytes - peak_nbytes),
        "buckets": str(stage.num_buckets),
        "sent": size_text(stage.sent_nbytes),
    }


def _fits(
    plans: Sequence[Sequence[StagePlan]], fitting: Sequence[Sequence[StagePlan]], nbytes: int
) -> Iterator[tuple[str, str]]:
    if fitting:
        yield "left", "for activations and everything else that is not planned"
        yield "first row", f"{fitting[0][0].choice.options or 'no option'} in a run"
    if others := [lack for stages in plans if (lack := _peak_nbytes(stages) - nbytes) > 0]:
        yield (
            "left out",
            f"{plural(len(others), 'choice')}, of which the nearest lacks {size_text(min(others))}",
        )
    if not fitting:
        yield (
            "to fit",
            "write a larger --dp, --tp or --pp, --main-params-dtype remainder, "
            "--grad-dtype param, or an --offload-fraction such as 0.5",
        )


def _step(stage: StagePlan) -> Iterator[tuple[str, str]]:
    for kind, part in stage.sent.items():
        yield kind, f"{part.count:,} that send {size_text(part.nbytes)}" if part.count else "none"
    held = stage.footprint
    yield (
        "for a moment",
        f"{size_text(stage.backward_nbytes)} in backward: the largest gradient, before it is added "
        "up",
    )
    if held.step_nbytes:
        yield (
            "for a step",
            f"{size_text(held.step_nbytes)}: fp32 copies of the gradients that the rank owns",
        )
    yield "updated", f"{plural(held.num_flat_params, 'flat param')} by the inner optimizer"
    if held.host_nbytes:
        pinned = f"{size_text(held.staging_nbytes)} of pinned memory"
        yield (
            "on the host",
            f"{size_text(held.host_nbytes)} of the state and {pinned}, for every rank",
        )
