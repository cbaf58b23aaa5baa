"""`megatron-distopt plan`: what parallel sizes, dtypes and buckets cost, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import Kind
from megatron_distopt.plugin.commands.answer import Answer
from megatron_distopt.plugin.commands.plan_arguments import assumed_of, choices_of, sizes_of
from megatron_distopt.plugin.commands.plan_choice import ChoicePlan, StagePlan, plan_choice, plan_stage
from megatron_distopt.plugin.commands.plan_model import GptSizes
from megatron_distopt.plugin.commands.plan_timeline import Assumed, Timeline, Times, times_of

if TYPE_CHECKING:
    from megatron_distopt.plugin.commands.plan_build import Built

__all__ = ["BuiltRank", "Planned", "Row", "answer"]


@dataclass(frozen=True)
class Row:
    """One choice.

    Args:
        plan: all its stages.
        times: of the stage whose ranks hold most.
    """

    plan: ChoicePlan
    times: Times


@dataclass(frozen=True)
class BuiltRank:
    """A rank that was built.

    Args:
        rank: of all ranks.
        plan: what was expected of it.
        built: what it is.
    """

    rank: int
    plan: StagePlan
    built: Built


@dataclass(frozen=True)
class Planned:
    """All that is told.

    Args:
        gpt: the model.
        assumed: what the times are worked out with.
        rows: the choices.
        built: one rank of each choice, where that was asked for.
    """

    gpt: GptSizes
    assumed: Assumed
    rows: Sequence[Row]
    built: Sequence[BuiltRank] = ()


def answer(parsed: argparse.Namespace) -> Answer:
    """Needs no torch, unless a rank is to be built.

    Raises:
        ConfigError: sizes that do not fit together, or a plot that cannot be drawn.
    """
    gpt = sizes_of(parsed)
    assumed = assumed_of(parsed, gpt)
    plans = [plan_choice(gpt, choice) for choice in choices_of(parsed)]
    rows = [Row(plan, times_of(plan.fullest, assumed)) for plan in plans]
    if parsed.plot:
        _check_drawable(rows)
    built = [] if parsed.rank is None else [_build(gpt, plan, parsed.rank) for plan in plans]
    planned = Planned(gpt, assumed, rows, built)
    if parsed.plot:
        _beside("plan_plot").draw(planned, parsed.plot)
    return Answer(_document(planned), lambda width: _beside("plan_text").lines(planned, width))


def _check_drawable(rows: Sequence[Row]) -> None:
    timelines = [row.times.timeline for row in rows if row.times.timeline is not None]
    if not timelines:
        rule, remedy = "have the length of backward", "Write --backward-ms MS or --tokens-per-second N beside it"
        raise ConfigError(refusal("--plot", "no time of backward", rule, remedy))
    if not any(timeline.intervals for timeline in timelines):
        rule, remedy = "have something to draw", "Write a --backward-ms above 0"
        raise ConfigError(refusal("--plot", "a step that takes no time", rule, remedy))


def _beside(name: str) -> Any:
    """A module that is imported when it is used: one needs torch, one matplotlib, one this."""
    return import_module(f"megatron_distopt.plugin.commands.{name}")


def _build(gpt: GptSizes, plan: ChoicePlan, rank: int) -> BuiltRank:
    cut = plan.choice.cut
    if rank >= cut.num_ranks:
        rule = f"be below the {cut.num_ranks} ranks of dp {cut.dp}, tp {cut.tp} and pp {cut.pp}"
        raise ConfigError(refusal("--rank", rank, rule, "Write --rank 0 for the first one"))
    stage, data_rank = cut.place_of(rank)
    planned = plan_stage(gpt, plan.choice, stage, data_rank)
    return BuiltRank(rank, planned, _beside("plan_build").build(planned, rank))


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


def _row_document(row: Row) -> dict[str, Any]:
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
