"""`megatron-distopt plan`: what parallel sizes, dtypes and buckets cost, before anything is started.

Imports no torch, but where a rank is to be built. Its command line is in `plan_arguments`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from megatron_distopt.cli.plan_arguments import assumed_of, choices_of, sizes_of, tried_of
from megatron_distopt.cli.plan_choice import ChoicePlan, PlannedBuffer, StagePlan, plan_choice, plan_stage
from megatron_distopt.cli.plan_fit import Fit, check_host_memory, fits_of
from megatron_distopt.cli.plan_model import AUTO, Choice, GptSizes
from megatron_distopt.cli.plan_plot import check_drawable, draw
from megatron_distopt.cli.plan_table import PlanRow, bucket_text, described_fits, table_of_choices
from megatron_distopt.cli.plan_times import Assumed, Machine, TimelineLane, Times, UpdateTimes, times_of
from megatron_distopt.cli.show import Answer, counted, number_text, ranges, rows, size_text, time_text, titled
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import Footprint, Kind

if TYPE_CHECKING:
    from megatron_distopt.cli.plan_build import Built


def answer(parsed: argparse.Namespace) -> Answer:
    """Plans every choice; needs torch only where a rank is to be built.

    Raises:
        ConfigError: sizes that do not fit together, or a plot that cannot be drawn.
    """
    gpt = sizes_of(parsed)
    assumed, tried = assumed_of(parsed, gpt), tried_of(parsed)
    plans = [plan_choice(gpt, choice) for choice in choices_of(parsed)]
    chosen = [PlanRow(plan, times_of(plan.fullest, assumed)) for plan in plans]
    fits = [] if tried is None else fits_of(plans, tried, assumed)
    for plan in plans if tried is None else ():  # what does not fit is listed otherwise
        check_host_memory(plan, assumed.machine)
    if parsed.plot:
        _plot(chosen, parsed.plot)
    built = [] if parsed.rank is None else [_build(gpt, plan.choice, parsed.rank) for plan in plans]
    document = {
        "model": {**asdict(gpt), "ffn_width": gpt.ffn_width},
        "assumed": asdict(assumed),
        "choices": [_choice_document(row.plan, row.times) for row in chosen],
        "fits": [*map(_fit_document, fits)],
        "built": [
            {"rank": parsed.rank, "planned": asdict(plan.footprint), "built": asdict(each)} for plan, each in built
        ],
    }
    has_host = any(each.choice.offload_fraction for each in (*plans, *(fit.plan for fit in fits)))
    parts = [*_described(gpt, assumed, chosen, has_host=has_host)]
    if fits:
        parts.append(titled(_title_of_fits(fits, assumed.machine), *described_fits(fits)))
    parts += [_builder().described(parsed.rank, plan, each) for plan, each in built]
    return Answer(document, parts)


def _described(
    gpt: GptSizes, assumed: Assumed, chosen: Sequence[PlanRow], *, has_host: bool
) -> Iterator[RenderableType]:
    """Yields what is known of every choice, for people; of a single one in detail."""
    yield titled("model", rows(_model(gpt)))
    yield titled("assumed", rows([*_assumed(assumed), *(_assumed_host(assumed.machine) if has_host else ())]))
    yield titled("choices; bytes of a rank of the fullest stage, between two steps", table_of_choices(chosen))
    if len(chosen) == 1:
        [row] = chosen
        yield titled("pipeline stages", rows(_stage_row(row.plan, stage) for stage in row.plan.stages))
        yield titled("one step of the fullest stage", rows(_step(row, assumed.machine)))


def _plot(chosen: Sequence[PlanRow], path: Path) -> None:
    check_drawable([row.times for row in chosen])
    drawn = [(_title(row.plan, row.times), row.times.timeline) for row in chosen]
    draw([(title, timeline) for title, timeline in drawn if timeline], path)


def _title(plan: ChoicePlan, times: Times) -> str:
    """Describes a choice and its times in one line."""
    choice = plan.choice
    sizes = [f"dp {choice.cut.dp}", f"tp {choice.cut.tp}", f"pp {choice.cut.pp}"]
    sizes += [f"ep {choice.cut.ep}"] * (choice.cut.ep > 1)
    sent = "" if choice.reduce_dtype is None else f" sent as {choice.reduce_dtype}"
    bucket = {"all": "one bucket", AUTO: "buckets as runs choose them"}
    sizes += [f"{choice.dtype} with {choice.grad_dtype} grads{sent}"]
    sizes += ["Muon"] * choice.has_muon
    sizes += [choice.state] * bool(choice.state)
    sizes += [f"{choice.offload_fraction:g} of the state on the host"] * bool(choice.offload_fraction)
    sizes += [bucket.get(bucket_text(choice), f"buckets of {bucket_text(choice)}")]
    exposed = time_text(times.exposed_seconds or 0.0)
    return f"{', '.join(sizes)}: {exposed} of {time_text(times.seconds)} of communication exposed"


def _build(gpt: GptSizes, choice: Choice, rank: int) -> tuple[StagePlan, Built]:
    """Returns the plan of one rank, and the measurements of what was built."""
    cut = choice.cut
    if rank >= cut.num_ranks:
        rule = f"be below the {cut.num_ranks} ranks of dp {cut.dp}, tp {cut.tp} and pp {cut.pp}"
        raise ConfigError(refusal("--rank", rank, rule, "Write --rank 0 for the first one"))
    if choice.offload_fraction:  # which would allocate real memory: the host has no meta device
        got, rule = f"{rank} with --offload-fraction {choice.offload_fraction:g}", "have all state on the device"
        raise ConfigError(refusal("--rank", got, rule, "Leave one of the two out"))
    plan = plan_stage(gpt, choice, *cut.place_of(rank))
    return plan, _builder().build(plan, rank)


def _builder() -> ModuleType:
    """Imports what needs torch."""
    return import_module("megatron_distopt.cli.plan_build")


def _choice_document(plan: ChoicePlan, times: Times) -> dict[str, Any]:
    choice = plan.choice
    return {
        **asdict(choice.cut),
        "ranks": choice.cut.num_ranks,
        "dtype": choice.dtype,
        "grad_dtype": choice.grad_dtype,
        "reduce_dtype": choice.reduce_dtype,
        "main_params_dtype": choice.main_params_dtype,
        "exp_avg_dtype": choice.exp_avg_dtype,
        "exp_avg_sq_dtype": choice.exp_avg_sq_dtype,
        "offload_fraction": choice.offload_fraction,
        "optimizer": choice.optimizer,
        "muon_tp_mode": choice.muon_tp_mode,
        "bucket_size": choice.bucket_size,
        "stages": [_stage_document(plan, stage) for stage in plan.stages],
        "fullest_stage": plan.fullest.stage,
        "seconds": {
            "reduce_scatter": times.scatter_seconds,
            "all_gather": times.gather_seconds,
            "all_reduce": times.stats_seconds,
            "exposed": times.exposed_seconds,
            "update": times.update.seconds,
        },
        "timeline": None if times.timeline is None else asdict(times.timeline),
    }


def _stage_document(plan: ChoicePlan, stage: StagePlan) -> dict[str, Any]:
    sent = {kind: stage.sent_by(kind) for kind in Kind}
    return {
        "stages": list(plan.stage_numbers(stage)),
        "params": len(stage.params),
        "numel": stage.numel,
        "buckets": stage.num_buckets,
        "bytes": {**asdict(stage.footprint), "lasting_nbytes": stage.footprint.lasting_nbytes},
        "collectives": {kind.value: {"count": len(each), "sent_nbytes": sum(each)} for kind, each in sent.items()},
        "sent_nbytes": stage.sent_nbytes,
        "update": _update_document(stage),
        "matrices": [
            {**asdict(part.work), **asdict(part.balance), "rounds": part.owners.num_rounds}
            for part in stage.with_matrices
        ],
    }


def _update_document(stage: StagePlan) -> dict[str, int]:
    device, host = (stage.updated_at(is_on_host=is_on_host) for is_on_host in (False, True))
    return {
        "device_nbytes": sum(share.update_nbytes for share in device),
        "host_nbytes": sum(share.update_nbytes for share in host),
        "down_nbytes": sum(share.down_nbytes for share in host),
        "up_nbytes": sum(share.up_nbytes for share in host),
        "host_numel": sum(share.numel for share in host),
    }


def _fit_document(fit: Fit) -> dict[str, Any]:
    return {
        **asdict(fit.plan.choice),
        "changes": fit.change.value,
        "fits": not fit.lacking_nbytes,
        "options": fit.options,
        "device_peak_nbytes": fit.plan.peak_nbytes,
        "device_left_nbytes": fit.left_nbytes,
        "host_of_node_nbytes": fit.host_nbytes,
        "host_left_nbytes": None if fit.machine.host_nbytes is None else fit.host_left_nbytes,
        "update": _update_document(fit.slowest),
        "update_seconds": fit.update.seconds,
    }


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
    yield "link", f"{gigabits} Gbit/s a rank, and {time_text(assumed.hop_seconds)} a message"
    if assumed.backward_seconds is None:
        yield "backward", "unknown: --backward-ms or --tokens-per-second says what can be hidden"
    else:
        times = time_text(assumed.backward_seconds), time_text(assumed.forward_seconds)
        yield "backward", f"{times[0]} a microbatch, forward {times[1]}"
    if assumed.update_seconds is None:
        rate = _rate_text(assumed.machine.device_bytes_per_second)
        yield "update", f"a device reads and writes {rate}; no byte is moved twice, so times are lower bounds"
    else:
        yield "update", f"{time_text(assumed.update_seconds)} on the device"


def _assumed_host(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "host link", f"{_rate_text(machine.link_bytes_per_second)} down and as much up, for each rank"
    shared = f"{_rate_text(machine.host_bytes_per_second)} shared by the {counted(machine.ranks_per_node, 'rank')}"
    limit = "not limited" if machine.host_nbytes is None else size_text(machine.host_nbytes)
    yield "host", f"its memory reads and writes {shared} of a node; its size is {limit}"


def _rate_text(bytes_per_second: float) -> str:
    return f"{number_text(bytes_per_second / 1e9)} GB/s"


def _title_of_fits(fits: Sequence[Fit], machine: Machine) -> str:
    """What the table of combinations that fit is about."""
    reserve = f" with {size_text(machine.reserve_nbytes)} in reserve" if machine.reserve_nbytes else ""
    where = f"{size_text(machine.memory_nbytes or 0)}{reserve}"
    if all(fit.lacking_nbytes for fit in fits):
        return f"nothing fits into {where}"
    return f"fits into {where}; what changes least about the training is first"


def _stage_row(plan: ChoicePlan, stage: StagePlan) -> tuple[str, str]:
    held = stage.footprint
    said = [
        counted(len(stage.params), "tensor"),
        counted(stage.numel, "element"),
        f"params {size_text(held.param_nbytes)}",
        f"grads {size_text(held.grad_nbytes)}",
        f"main {size_text(held.main_nbytes)}",
        f"moments {size_text(held.moment_nbytes)}",
        *_host_cells(held),
        f"all {size_text(held.lasting_nbytes)}",
        counted(stage.num_buckets, "bucket"),
        f"sent {size_text(stage.sent_nbytes)}",
    ]
    return ranges(plan.stage_numbers(stage)), ", ".join(said)


def _host_cells(held: Footprint) -> list[str]:
    """Describes what of the state is not on the device, if any."""
    if not held.host_nbytes:
        return []
    return [f"of these on the host {size_text(held.host_nbytes)} and {size_text(held.staging_nbytes)} pinned"]


def _step(row: PlanRow, machine: Machine) -> Iterator[tuple[str, str]]:
    stage, times = row.fullest, row.times
    yield from _communication(stage, times)
    held = stage.footprint
    yield "for a moment", f"{size_text(held.backward_nbytes)} in backward: the largest gradient, before it is added up"
    if held.step_nbytes:
        yield "for a step", f"{size_text(held.step_nbytes)}: fp32 copies of the gradients that the rank owns"
    yield "updated", f"{counted(held.num_flat_params, 'flat param')} by the inner optimizer"
    yield from _update(stage, times.update)
    if held.host_nbytes:
        pinned = f"{size_text(held.rounded_staging_nbytes)} of it pinned, in powers of two"
        ranks = min(machine.ranks_per_node, row.plan.choice.cut.num_ranks)
        total = size_text(row.plan.host_nbytes(machine.ranks_per_node))
        yield "host of a node", f"{total} for {counted(ranks, 'rank')}; of one rank {pinned}"


def _update(stage: StagePlan, update: UpdateTimes) -> Iterator[tuple[str, str]]:
    """Yields what the update moves where."""
    moved = _update_document(stage)
    for label, key, lane, what in (
        ("device", "device_nbytes", TimelineLane.COMPUTE, "read and written in"),
        ("copies down", "down_nbytes", TimelineLane.DOWN, "of gradients in"),
        ("host", "host_nbytes", TimelineLane.HOST, "read and written, while the copies use its memory too, in"),
        ("copies up", "up_nbytes", TimelineLane.UP, "of params in"),
    ):
        if moved[key]:
            busy = update.busy_seconds(lane, "update" if lane is TimelineLane.COMPUTE else "")
            yield label, f"{size_text(moved[key])} {what} {time_text(busy)}"
    yield from _matrices(stage, update)
    yield "update", f"{time_text(update.seconds)}, from the statistics until the last param is there"


def _matrices(stage: StagePlan, update: UpdateTimes) -> Iterator[tuple[str, str]]:
    """Yields what Muon does with whole matrices, by buffer."""
    for part in stage.with_matrices:
        yield from _owners(part)
    if stage.with_matrices:
        busy = update.busy_seconds(TimelineLane.COMPUTE, "orthogonalize"), update.busy_seconds(TimelineLane.SEND)
        yield "orthogonalize", f"{time_text(busy[0])}, while matrices are sent in {time_text(busy[1])}"
        held = size_text(stage.footprint.matrices_nbytes)
        yield "for the update", f"{held} of directions, matrices on their way, and products"


def _owners(part: PlannedBuffer) -> Iterator[tuple[str, str]]:
    work, balance, rounds = part.work, part.balance, part.owners.num_rounds
    said = f"{balance.num_travelling:,} of {counted(balance.num_blocks, 'block')} travel in {counted(rounds, 'round')}"
    most, extra = size_text(balance.most_travel_nbytes), f"{100 * balance.extra_wire:.2f}% more on the wire"
    yield "matrices", f"{said}; this rank sends {size_text(work.sent_nbytes)}, no rank more than {most}; {extra}"
    if work.gathered_nbytes:
        yield "gathered", f"{size_text(work.gathered_nbytes)} are sent to tensor-parallel ranks, which share matrices"
    share = f"{balance.cost_imbalance:.2f} times the average of all ranks; no plan is below"
    yield "busiest rank", f"{balance.most_cost / 1e12:.4g} TFLOP, {share} {balance.least_cost_imbalance:.2f}"


def _communication(stage: StagePlan, times: Times) -> Iterator[tuple[str, str]]:
    shown = times.timeline
    scattered = None if shown is None else shown.exposed_scatter_seconds
    gathered = None if shown is None else shown.exposed_gather_seconds
    for kind, took, exposed, by in (
        (Kind.REDUCE_SCATTER, times.scatter_seconds, scattered, "backward"),
        (Kind.ALL_GATHER, times.gather_seconds, gathered, "the next forward"),
        (Kind.ALL_REDUCE, times.stats_seconds, None, "nothing"),
    ):
        yield kind.value, _collectives_text(stage.sent_by(kind), took, exposed, by)


def _collectives_text(sent: Sequence[int], seconds: float, exposed: float | None, by: str) -> str:
    if not sent:
        return "none"
    text = f"{len(sent):,} that send {size_text(sum(sent))} in {time_text(seconds)}"
    if exposed is None:
        return text
    hidden = max(seconds - exposed, 0.0)
    return f"{text}; {by} can hide {time_text(hidden)} ({100 * hidden / seconds:.0f}%)"
