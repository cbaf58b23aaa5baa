"""`megatron-distopt plan`: what parallel sizes, dtypes and buckets cost, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from megatron_distopt.cli.plan_arguments import assumed_of, choices_of, sizes_of
from megatron_distopt.cli.plan_choice import AUTO, Choice, ChoicePlan, StagePlan, plan_choice, plan_stage
from megatron_distopt.cli.plan_model import GptSizes
from megatron_distopt.cli.plan_timeline import Assumed, Timeline, Times, draw, times_of
from megatron_distopt.cli.show import (
    Answer,
    Column,
    FittingTable,
    counted,
    facts,
    number_text,
    ranges,
    size_text,
    titled,
)
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import Footprint, Kind

if TYPE_CHECKING:
    from megatron_distopt.cli.plan_build import Built

__all__ = ["BuiltRank", "Planned", "PlannedChoice", "answer"]

_KINDS = ("params", "grads", "main", "moments")
#: Values that need no column where all choices have them.
_USUAL = {"ep": "1", "reduce dtype": "none", "bucket": "all", "stage": "0"}
#: Bucket sizes that are words, as part of a sentence.
_BUCKETS = {_USUAL["bucket"]: "one bucket", AUTO: "buckets as runs choose them"}


@dataclass(frozen=True)
class PlannedChoice:
    """One choice with the times of its collectives.

    Args:
        plan: the plan of all its stages.
        times: times of the stage whose ranks hold most.
    """

    plan: ChoicePlan
    times: Times


@dataclass(frozen=True)
class BuiltRank:
    """A rank that was built.

    Args:
        rank: its number among all ranks.
        plan: what was planned.
        built: what was built.
    """

    rank: int
    plan: StagePlan
    built: Built


@dataclass(frozen=True)
class Planned:
    """Everything that the command reports.

    Args:
        gpt: the model.
        assumed: link and step times that are given.
        rows: the choices.
        built: one rank of each choice, where --rank is given.
    """

    gpt: GptSizes
    assumed: Assumed
    rows: Sequence[PlannedChoice]
    built: Sequence[BuiltRank] = ()


def answer(parsed: argparse.Namespace) -> Answer:
    """Plans every choice; needs torch only where a rank is to be built.

    Raises:
        ConfigError: sizes that do not fit together, or a plot that cannot be drawn.
    """
    gpt = sizes_of(parsed)
    assumed = assumed_of(parsed, gpt)
    plans = [plan_choice(gpt, choice) for choice in choices_of(parsed)]
    rows = [PlannedChoice(plan, times_of(plan.fullest, assumed)) for plan in plans]
    if parsed.plot:
        _check_drawable(rows)
    built = [] if parsed.rank is None else [_build(gpt, plan, parsed.rank) for plan in plans]
    planned = Planned(gpt, assumed, rows, built)
    if parsed.plot:
        draw([(_title(row), row.times.timeline) for row in rows if row.times.timeline is not None], parsed.plot)
    return Answer(_document(planned), [*_parts(planned)])


def _check_drawable(rows: Sequence[PlannedChoice]) -> None:
    timelines = [row.times.timeline for row in rows if row.times.timeline is not None]
    if not timelines:
        rule, remedy = "have the length of backward", "Write --backward-ms MS or --tokens-per-second N as well"
        raise ConfigError(refusal("--plot", "no time of backward", rule, remedy))
    if not any(timeline.intervals for timeline in timelines):
        rule, remedy = "have something to draw", "Write a --backward-ms above 0"
        raise ConfigError(refusal("--plot", "a step that takes no time", rule, remedy))


def _title(row: PlannedChoice) -> str:
    exposed = _time_text(row.times.exposed_seconds or 0.0)
    return f"{_name_of(row.plan)}: {exposed} of {_time_text(row.times.seconds)} of communication exposed"


def _build(gpt: GptSizes, plan: ChoicePlan, rank: int) -> BuiltRank:
    cut = plan.choice.cut
    if rank >= cut.num_ranks:
        rule = f"be below the {cut.num_ranks} ranks of dp {cut.dp}, tp {cut.tp} and pp {cut.pp}"
        raise ConfigError(refusal("--rank", rank, rule, "Write --rank 0 for the first one"))
    stage, data_rank = cut.place_of(rank)
    planned = plan_stage(gpt, plan.choice, stage, data_rank)
    module = import_module("megatron_distopt.cli.plan_build")  # needs torch
    return BuiltRank(rank, planned, module.build(planned, rank))


def _document(planned: Planned) -> dict[str, Any]:
    return {
        "model": {**asdict(planned.gpt), "ffn_width": planned.gpt.ffn_width},
        "assumed": asdict(planned.assumed),
        "choices": [_row_document(row) for row in planned.rows],
        "built": [
            {"rank": each.rank, "planned": asdict(each.plan.footprint), "built": asdict(each.built)}
            for each in planned.built
        ],
    }


def _row_document(row: PlannedChoice) -> dict[str, Any]:
    choice = row.plan.choice
    return {
        **asdict(choice.cut),
        "ranks": choice.cut.num_ranks,
        "dtype": choice.dtype,
        "grad_dtype": choice.grad_dtype,
        "reduce_dtype": choice.reduce_dtype,
        "bucket_size": choice.bucket_size,
        "stages": [_stage_document(row.plan, stage) for stage in row.plan.stages],
        "fullest_stage": row.plan.fullest.stage,
        "seconds": {
            "reduce_scatter": row.times.scatter_seconds,
            "all_gather": row.times.gather_seconds,
            "all_reduce": row.times.stats_seconds,
            "exposed": row.times.exposed_seconds,
        },
        "timeline": None if row.times.timeline is None else _timeline_document(row.times.timeline),
    }


def _stage_document(plan: ChoicePlan, stage: StagePlan) -> dict[str, Any]:
    sent = {kind: [each.sent_nbytes for _, each in stage.collectives if each.kind is kind] for kind in Kind}
    return {
        "stages": list(plan.stage_numbers(stage)),
        "params": len(stage.params),
        "numel": stage.numel,
        "buckets": stage.num_buckets,
        "bytes": {**asdict(stage.footprint), "lasting_nbytes": stage.footprint.lasting_nbytes},
        "collectives": {kind.value: {"count": len(each), "sent_nbytes": sum(each)} for kind, each in sent.items()},
        "sent_nbytes": stage.sent_nbytes,
    }


def _timeline_document(timeline: Timeline) -> dict[str, Any]:
    return {
        "exposed_scatter_seconds": timeline.exposed_scatter_seconds,
        "exposed_gather_seconds": timeline.exposed_gather_seconds,
        "intervals": [
            {"lane": each.lane.value, "label": each.label, "start": each.start, "stop": each.stop}
            for each in timeline.intervals
        ],
    }


def _parts(planned: Planned) -> Iterator[RenderableType]:
    yield titled("model", facts(_model(planned.gpt)))
    yield titled("assumed", facts(_assumed(planned.assumed)))
    yield titled("choices; bytes of a rank of the fullest stage, between two steps", _choices(planned.rows))
    if len(planned.rows) == 1:
        (row,) = planned.rows
        yield titled("pipeline stages", _stages(row.plan))
        yield titled("one step of the fullest stage", facts(_step(row.plan.fullest, row.times)))
    for each in planned.built:
        yield titled(_built_heading(each), facts(_built(each)))


def _time_text(seconds: float) -> str:
    """Writes a time with three digits and its unit.

    >>> _time_text(0), _time_text(0.0000125), _time_text(0.25), _time_text(12.345)
    ('0', '12.5 us', '250 ms', '12.3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds > 1e-10 else "0"


def _name_of(plan: ChoicePlan) -> str:
    """Describes a choice in one line."""
    choice = plan.choice
    sizes = [f"dp {choice.cut.dp}", f"tp {choice.cut.tp}", f"pp {choice.cut.pp}"]
    sizes += [f"ep {choice.cut.ep}"] * (choice.cut.ep > 1)
    sent = "" if choice.reduce_dtype is None else f" sent as {choice.reduce_dtype}"
    bucket = _BUCKETS.get(_bucket(choice), f"buckets of {_bucket(choice)}")
    return ", ".join([*sizes, f"{choice.dtype} with {choice.grad_dtype} grads{sent}", bucket])


def _bucket(choice: Choice) -> str:
    """Returns the bucket size as on the command line, with commas."""
    if choice.bucket_size is None:
        return _USUAL["bucket"]
    return choice.bucket_size if isinstance(choice.bucket_size, str) else f"{choice.bucket_size:,}"


def _model(gpt: GptSizes) -> Iterator[tuple[str, str]]:
    heads = "" if gpt.heads is None else f", {counted(gpt.heads, 'head')}"
    kv_heads = "" if gpt.kv_heads is None else f" with {gpt.kv_heads} of keys and values"
    yield "gpt", f"{counted(gpt.layers, 'layer')}, hidden {gpt.hidden:,}{heads}{kv_heads}"
    gated = "gated " if gpt.is_gated else ""
    experts = f"{counted(gpt.experts, 'expert')} of {gpt.expert_ffn or gpt.ffn_width:,}, {gpt.top_k} a token"
    yield "mlp", f"{gated}{experts if gpt.experts else f'{gpt.ffn_width:,}'}"
    padded = f", padded to a multiple of {gpt.vocab_multiple} times tp" if gpt.vocab_multiple else ""
    yield "vocabulary", f"{gpt.vocab:,}{padded}; {'tied' if gpt.is_tied else 'untied'}"
    positions = f"{gpt.num_positions:,} learned positions" if gpt.num_positions else "no learned positions"
    biases = "biases" if gpt.has_bias else "biases of queries, keys and values" if gpt.has_qkv_bias else "no biases"
    yield "the rest", f"{positions}, {biases}, {'RMSNorm' if gpt.is_rms else 'LayerNorm'}"


def _assumed(assumed: Assumed) -> Iterator[tuple[str, str]]:
    gigabits = number_text(assumed.bytes_per_second * 8 / 1e9)
    yield "link", f"{gigabits} Gbit/s a rank, and {_time_text(assumed.hop_seconds)} a message"
    if assumed.backward_seconds is None:
        yield "backward", "unknown: --backward-ms or --tokens-per-second says what can be hidden"
    else:
        times = _time_text(assumed.backward_seconds), _time_text(assumed.backward_seconds / 2)
        yield "backward", f"{times[0]} a microbatch, forward {times[1]}, update {_time_text(assumed.update_seconds)}"


def _choices(rows: Sequence[PlannedChoice]) -> RenderableType:
    titles = ("dp", "tp", "pp", "ep", "dtype", "grads", "reduce dtype", "bucket", "stage")
    columns = [Column(title) for title in titles]
    columns += [Column(title, is_optional=True) for title in _KINDS]
    columns += [Column("all"), Column("not sharded", is_optional=True), Column("buckets", is_optional=True)]
    columns += [Column("collectives", is_optional=True), Column("sent"), Column("takes", is_optional=True)]
    columns += [Column("hidden", is_optional=True), Column("exposed")]
    cells = [_choice_cells(row) for row in rows]
    for number, title in enumerate(titles):
        if all(row[number] == _USUAL.get(title) for row in cells):
            for row in cells:
                row[number] = ""
    return FittingTable(columns, cells)


def _choice_cells(row: PlannedChoice) -> list[str]:
    choice, stage, times = row.plan.choice, row.plan.fullest, row.times
    exposed, hidden = times.exposed_seconds, times.hidden_seconds
    return [
        *(str(size) for size in (choice.cut.dp, choice.cut.tp, choice.cut.pp, choice.cut.ep)),
        *(choice.dtype, choice.grad_dtype, choice.reduce_dtype or _USUAL["reduce dtype"], _bucket(choice)),
        ranges(row.plan.stage_numbers(stage)),
        *_bytes(stage.footprint),
        size_text(_unsharded_nbytes(stage.footprint)),
        *(str(stage.num_buckets), str(len(stage.collectives)), size_text(stage.sent_nbytes)),
        _time_text(times.seconds),
        "" if hidden is None else _time_text(hidden),
        "" if exposed is None else _time_text(exposed),
    ]


def _bytes(held: Footprint) -> list[str]:
    kinds = (held.param_nbytes, held.grad_nbytes, held.main_nbytes, held.moment_nbytes, held.lasting_nbytes)
    return [size_text(nbytes) for nbytes in kinds]


def _unsharded_nbytes(held: Footprint) -> int:
    """Returns the bytes of a rank that updates all its params itself."""
    return held.param_nbytes + held.grad_nbytes + held.undistributed_nbytes


def _stages(plan: ChoicePlan) -> RenderableType:
    columns = [Column("stages"), Column("tensors", is_optional=True), Column("elements", is_optional=True)]
    columns += [Column(title, is_optional=True) for title in _KINDS]
    columns += [Column("all"), Column("buckets"), Column("sent")]
    return FittingTable(columns, [_stage_cells(plan, stage) for stage in plan.stages])


def _stage_cells(plan: ChoicePlan, stage: StagePlan) -> list[str]:
    numbers = [ranges(plan.stage_numbers(stage)), f"{len(stage.params):,}", f"{stage.numel:,}"]
    return [*numbers, *_bytes(stage.footprint), str(stage.num_buckets), size_text(stage.sent_nbytes)]


def _step(stage: StagePlan, times: Times) -> Iterator[tuple[str, str]]:
    shown = times.timeline
    scattered = None if shown is None else shown.exposed_scatter_seconds
    gathered = None if shown is None else shown.exposed_gather_seconds
    for kind, took, exposed, by in (
        (Kind.REDUCE_SCATTER, times.scatter_seconds, scattered, "backward"),
        (Kind.ALL_GATHER, times.gather_seconds, gathered, "the next forward"),
        (Kind.ALL_REDUCE, times.stats_seconds, None, "nothing"),
    ):
        yield kind.value, _collectives_text(stage, kind, took, exposed, by)
    held = stage.footprint
    yield "for a moment", f"{size_text(held.backward_nbytes)} in backward: the largest gradient, before it is added up"
    if held.step_nbytes:
        yield "for a step", f"{size_text(held.step_nbytes)}: fp32 copies of the gradients that the rank owns"
    yield "updated", f"{counted(held.num_flat_params, 'flat param')} by the inner optimizer"


def _collectives_text(stage: StagePlan, kind: Kind, seconds: float, exposed: float | None, by: str) -> str:
    sent = [each.sent_nbytes for _, each in stage.collectives if each.kind is kind]
    if not sent:
        return "none"
    text = f"{len(sent):,} that send {size_text(sum(sent))} in {_time_text(seconds)}"
    if exposed is None:
        return text
    hidden = max(seconds - exposed, 0.0)
    return f"{text}; {by} can hide {_time_text(hidden)} ({100 * hidden / seconds:.0f}%)"


def _built_heading(each: BuiltRank) -> str:
    cut = each.plan.choice.cut
    stage, rank = cut.place_of(each.rank)
    where = f"stage {stage}, data-parallel rank {rank} of {cut.dp}"
    return f"built without memory: rank {each.rank} of {cut.num_ranks:,} ({where})"


def _built(each: BuiltRank) -> Iterator[tuple[str, str]]:
    built, held, cut = each.built, each.plan.footprint, each.plan.choice.cut
    yield "groups", f"torch's fake process group of {counted(cut.num_ranks, 'rank')}, data-parallel ones of {cut.dp:,}"
    updated = f"the inner optimizer updates {counted(built.num_flat_params, 'flat param')}"
    yield "tensors", f"{counted(built.num_params, 'param')} of {built.numel:,} elements; {updated}"
    for kind in ("param", "grad", "main", "moment"):
        found, planned = getattr(built, f"{kind}_nbytes"), getattr(held, f"{kind}_nbytes")
        said = "as planned" if found == planned else f"planned were {planned:,}"
        yield f"{kind} bytes", f"{found:,}: {said}"
    seconds = built.seconds
    steps = {"groups": seconds.groups, "params": seconds.params, "layout": seconds.layout}
    steps |= {"buffers and optimizer": seconds.optimizer, "first update": seconds.update}
    text = ", ".join(f"{name} {_time_text(each)}" for name, each in steps.items())
    yield "time", f"{_time_text(seconds.total)}: {text}"
    yield "memory", f"the peak of this process rose by {size_text(built.process_nbytes)}"
