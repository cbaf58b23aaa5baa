"""`plan` against what real runs allocate, send and register; its arithmetic, its texts and its refusals."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.cli import main as cli
from megatron_distopt.cli import plan_build
from megatron_distopt.cli.plan_choice import (
    AUTO,
    Choice,
    PlannedBuffer,
    StagePlan,
    plan_choice,
    plan_stage,
    stage_params,
)
from megatron_distopt.cli.plan_model import GptSizes, ParallelSizes, sizes_in_mapping
from megatron_distopt.cli.plan_timeline import Assumed, TimelineLane, times_of
from megatron_distopt.comm import Group, fake_world, shared_memory
from megatron_distopt.hosts.torch.census import HEAD_NUMEL
from megatron_distopt.hosts.torch.plan import UserRequest, decide
from megatron_distopt.layout import default_bucket_size
from megatron_distopt.layout.estimate import Collective, Kind, stats_collective
from tests.support.cases import Case
from tests.support.refusals import Said
from tests.support.spawn import run_ranks

Output = pytest.CaptureFixture[str]

#: The model of the real runs, as a config of Megatron names it.
CONFIG = {
    "num_layers": 4,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "padded_vocab_size": 128,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 160,
}
GPT = GptSizes(**sizes_in_mapping(CONFIG))
BUCKET = 30_000
IN_BUCKETS = DistOptConfig(accelerator="torch", bucket_size=BUCKET)
#: Real runs on 2 ranks: flags of `plan`, dtype of the params, and the options that the flags stand for.
RUNS: dict[str, tuple[list[str], torch.dtype, DistOptConfig]] = {
    "bf16": (["--bucket-size", str(BUCKET)], torch.bfloat16, IN_BUCKETS),
    "bf16 with bf16 grads": (
        ["--bucket-size", str(BUCKET), "--grad-dtype", "param"],
        torch.bfloat16,
        replace(IN_BUCKETS, grads_in_fp32=False),
    ),
    "fp32": (["--bucket-size", str(BUCKET), "--dtype", "fp32"], torch.float32, IN_BUCKETS),
    "one bucket": ([], torch.bfloat16, replace(IN_BUCKETS, bucket_size=None)),
    "bf16 with grads sent as bf16": (
        ["--bucket-size", str(BUCKET), "--reduce-dtype", "bfloat16"],
        torch.bfloat16,
        replace(IN_BUCKETS, reduce_dtype="bfloat16"),
    ),
    "fp32 with grads sent as fp16": (
        ["--bucket-size", str(BUCKET), "--dtype", "fp32", "--reduce-dtype", "float16"],
        torch.float32,
        replace(IN_BUCKETS, reduce_dtype="float16"),
    ),
}
#: Real models on 2 ranks: their sizes and how they are cut.
SHAPES = {
    "tp 2": (GPT, ParallelSizes(dp=1, tp=2)),
    "pp 2, tied": (GPT, ParallelSizes(dp=1, pp=2)),
    "pp 2, untied": (replace(GPT, is_tied=False), ParallelSizes(dp=1, pp=2)),
    "as llama": (
        replace(GPT, kv_heads=2, is_gated=True, is_rms=True, has_bias=False, is_tied=False, positions=0),
        ParallelSizes(dp=1, tp=2),
    ),
    "as qwen": (
        replace(GPT, is_gated=True, is_rms=True, has_bias=False, has_qkv_bias=True, positions=0),
        ParallelSizes(dp=2),
    ),
    "experts": (replace(GPT, experts=4, expert_ffn=48), ParallelSizes(dp=2)),
    "experts, tp 2": (replace(GPT, experts=4, has_bias=False), ParallelSizes(dp=1, tp=2)),
    "experts, ep 2": (replace(GPT, experts=4, expert_ffn=48, is_gated=True, has_bias=False), ParallelSizes(dp=2, ep=2)),
}


@dataclass(frozen=True)
class Used:
    """What a real step held and sent on one rank, in bytes."""

    param_nbytes: int
    grad_nbytes: int
    main_nbytes: int
    moment_nbytes: int
    sent: Mapping[str, int]
    counts: Mapping[str, int]


class WireCounter(TorchDispatchMode):
    """Counts what each rank sends: every operation of torch.distributed passes through the dispatcher."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.sent: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.sent[name] += self._sent_by(name, args)
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def _sent_by(self, name: str, args: Sequence[Any]) -> int:
        share = self.size - 1
        if name == "c10d::send":
            return sum(map(nbytes_of, args[0]))
        if name == "c10d::recv_":
            return 0
        if name == "c10d::allreduce_":
            return 2 * sum(map(nbytes_of, args[0])) * share // self.size
        whole = {"c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 0}[name]  # any other one is not expected
        return nbytes_of(args[whole]) * share // self.size


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def held_by(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind them, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def real_model(gpt: GptSizes, cut: ParallelSizes) -> torch.nn.Module:
    """Of megatron-core, on this rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from tests.support import gpt as training

    training.enter_layout(Case("distopt", tp=cut.tp, pp=cut.pp, dp=dist.get_world_size() // (cut.tp * cut.pp)))
    if cut.ep > 1:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=cut.ep)
    tensor_parallel.model_parallel_cuda_manual_seed(training.SEED)
    normalization = "RMSNorm" if gpt.is_rms else "LayerNorm"
    config = TransformerConfig(
        num_layers=gpt.layers,
        hidden_size=gpt.hidden,
        ffn_hidden_size=gpt.ffn_width,
        num_attention_heads=gpt.heads,
        num_query_groups=gpt.kv_heads,
        tensor_model_parallel_size=cut.tp,
        pipeline_model_parallel_size=cut.pp,
        pipeline_dtype=torch.float32,
        gated_linear_unit=gpt.is_gated,
        add_bias_linear=gpt.has_bias,
        add_qkv_bias=gpt.has_qkv_bias,
        normalization=normalization,
        num_moe_experts=gpt.experts or None,
        moe_ffn_hidden_size=gpt.expert_ffn,
        expert_model_parallel_size=cut.ep,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(gpt.experts or None, normalization=normalization),
        vocab_size=gpt.padded_vocab(cut.tp),
        max_sequence_length=gpt.num_positions or gpt.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=gpt.is_tied,
        position_embedding_type="learned_absolute" if gpt.num_positions else "rope",
    )


def used_by(dtype: torch.dtype, config: DistOptConfig, size: int) -> Used:
    """Collective: a real optimizer of a real model takes two steps."""
    model = real_model(GPT, ParallelSizes(dp=size)).to(dtype)
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = distribute(model, config, param_groups=groups)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([param.float().sum() for param in params]).sum().backward()
        with WireCounter(size) as wire:
            optimizer.step()
    # Which params have a gradient is told in the all-reduce of the statistics; no Megatron has to ask.
    wire.sent["c10d::allreduce_"] -= 2 * (HEAD_NUMEL + len(params)) * torch.float64.itemsize * (size - 1) // size
    mains = [main for group in optimizer.sharded.inner.param_groups for main in group["params"]]
    states = optimizer.sharded.inner.state.values()
    moments = [each for state in states for each in state.values() if torch.is_tensor(each)]
    buffers = optimizer.sharded.buffers
    grads, is_fp32 = [buffer.grad for buffer in buffers], dtype is torch.float32
    return Used(
        held_by([buffer.param for buffer in buffers]),
        held_by(grads),
        0 if is_fp32 else held_by(mains),
        held_by(moments),
        wire.sent,
        wire.counts,
    )


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    """What ranks of one machine hand each other through memory nobody can count; messages carry the same."""
    shared_memory.may_share_memory = lambda: False
    found: dict[str, Any] = {}
    for name, (_, dtype, config) in RUNS.items():
        found[name] = used_by(dtype, config, size)
    for name, (gpt, cut) in SHAPES.items():
        named = real_model(gpt, cut).named_parameters()
        found[name] = [
            (param_name, tuple(param.shape), not getattr(param, "allreduce", True)) for param_name, param in named
        ]
    return found


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, seconds=400.0)


def run(capsys: Output, *words: object) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    status = cli.main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def document(capsys: Output, *words: object) -> dict[str, Any]:
    status, lines, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads("\n".join(lines))
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", RUNS)
def test_plan_when_compared_with_a_real_run_then_its_bytes_are_those(
    name: str, real: list[dict[str, Any]], config: Path, capsys: Output
) -> None:
    """The goal is 2 %; what is counted is counted exactly, so the difference is zero."""
    (choice,) = document(capsys, "--config", config, "--dp", 2, *RUNS[name][0])["choices"]
    (stage,) = choice["stages"]
    used: Used = real[0][name]
    for kind in ("param_nbytes", "grad_nbytes", "main_nbytes", "moment_nbytes"):
        assert stage["bytes"][kind] == getattr(used, kind), kind
    assert stage["sent_nbytes"] == sum(used.sent.values())
    assert (used.param_nbytes > 0, used.moment_nbytes > 0, sum(used.sent.values()) > 0) == (True, True, True)


@pytest.mark.parametrize("name", RUNS)
def test_plan_when_compared_with_a_real_run_then_its_collectives_are_those(
    name: str, real: list[dict[str, Any]], config: Path, capsys: Output
) -> None:
    (choice,) = document(capsys, "--config", config, "--dp", 2, *RUNS[name][0])["choices"]
    planned = choice["stages"][0]["collectives"]
    used: Used = real[0][name]
    assert used.counts["c10d::allreduce_"] == planned["all-reduce"]["count"] == 1
    assert used.sent["c10d::allreduce_"] == planned["all-reduce"]["sent_nbytes"]
    # Either collectives of torch's or messages, which carry the same: one each where a bucket fits into one message.
    others = sum(number for op, number in used.counts.items() if op not in ("c10d::allreduce_", "c10d::recv_"))
    assert others == planned["reduce-scatter"]["count"] + planned["all-gather"]["count"]
    assert choice["stages"][0]["buckets"] == planned["all-gather"]["count"] == (1 if name == "one bucket" else 3)


@pytest.mark.parametrize("name", SHAPES)
def test_stage_when_compared_with_megatron_core_then_names_shapes_and_order_are_its(
    name: str, real: list[dict[str, Any]]
) -> None:
    gpt, cut = SHAPES[name]
    for rank in range(2):
        params = stage_params(gpt, cut, cut.place_of(rank)[0], "float32")
        assert [(param.spec.name, param.spec.shape, param.is_expert) for param in params] == real[rank][name]


#: By which building may raise the peak of the process: 5 MiB were measured, all of it Python's objects. Any kind of
#: bytes of the trillion elements alone, were it not on `meta`, would be 980 MB and more.
MOST_PROCESS_NBYTES = 64 << 20
TRILLION = GptSizes(layers=128, hidden=25600, heads=160, vocab=50257)
MIXTURE = replace(GPT, experts=8, layers=4)


@pytest.mark.parametrize(
    ("gpt", "choice", "rank"),
    [
        (GPT, Choice(ParallelSizes(dp=2)), 0),
        (GPT, Choice(ParallelSizes(dp=3, tp=2, pp=2), "fp16", has_fp32_grads=False, bucket_size=BUCKET), 11),
        (GPT, Choice(ParallelSizes(dp=5), "fp32", bucket_size=BUCKET), 4),
        (MIXTURE, Choice(ParallelSizes(dp=8, tp=2, ep=4), bucket_size=BUCKET), 13),
        (TRILLION, Choice(ParallelSizes(dp=4096), bucket_size=40_000_000), 4095),
        (TRILLION, Choice(ParallelSizes(dp=32, tp=8, pp=16)), 1234),
    ],
)
def test_build_when_a_rank_is_built_then_it_holds_what_was_planned(gpt: GptSizes, choice: Choice, rank: int) -> None:
    stage, data_rank = choice.cut.place_of(rank)
    plan = plan_stage(gpt, choice, stage, data_rank)
    built = plan_build.build(plan, rank)
    for kind in ("param_nbytes", "grad_nbytes", "main_nbytes", "moment_nbytes", "num_flat_params"):
        assert getattr(built, kind) == getattr(plan.footprint, kind), kind
    assert built.numel == plan.numel
    assert built.process_nbytes < MOST_PROCESS_NBYTES


def test_build_when_all_ranks_are_built_then_together_they_own_everything_once() -> None:
    size, choice = 7, Choice(ParallelSizes(dp=7), bucket_size=BUCKET)
    plans = [plan_stage(GPT, choice, 0, rank) for rank in range(size)]
    owned = sum(plan.footprint.main_nbytes for plan in plans) // 4
    assert plans[0].numel <= owned <= plans[0].parts[0].layout.numel


def groups_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Backend, rank, size and first global ranks of each group for which an optimizer is built; filled meanwhile."""
    seen: list[tuple[Any, ...]] = []
    planned = plan_build._step_plan

    def step_plan(part: PlannedBuffer, data: Group, everybody: Group) -> Any:
        first = [data.global_rank(rank) for rank in range(min(data.size, 3))]
        seen.append((data.backend, data.rank, data.size, first, everybody.rank, everybody.size))
        return planned(part, data, everybody)

    monkeypatch.setattr(plan_build, "_step_plan", step_plan)
    return seen


def test_build_when_4096_ranks_are_asked_for_then_the_groups_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = groups_seen(monkeypatch)
    built = plan_build.build(plan_stage(TRILLION, Choice(ParallelSizes(dp=4096)), 0, 1234), 1234)
    assert seen[-1] == ("fake", 1234, 4096, [0, 1, 2], 1234, 4096)
    assert built.numel > 10**12
    assert not dist.is_initialized()


def test_build_when_experts_are_spread_then_each_buffer_has_the_group_that_shards_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, choice = groups_seen(monkeypatch), Choice(ParallelSizes(dp=8, tp=2, ep=4))
    plan = plan_stage(MIXTURE, choice, *choice.cut.place_of(13))
    plan_build.build(plan, 13)
    assert [(part.rank, part.layout.num_shards) for part in plan.parts] == [(6, 8), (1, 2)]
    assert seen[-2:] == [("fake", 6, 8, [1, 3, 5], 13, 16), ("fake", 1, 2, [5, 13], 13, 16)]


def test_cut_when_all_ranks_are_asked_then_their_groups_are_whole_and_apart() -> None:
    cut = ParallelSizes(dp=6, tp=2, pp=2, ep=3)
    for groups, size in ((cut.data_ranks, 6), (cut.expert_ranks, 2)):
        found = [groups(rank) for rank in range(cut.num_ranks)]
        assert all(rank in ranks and len(ranks) == size for rank, ranks in enumerate(found))
        assert len(set(found)) * size == cut.num_ranks
    places = [cut.place_of(rank) for rank in cut.data_ranks(13)]
    assert places == [(1, data_rank) for data_rank in range(6)]


def test_fake_world_when_it_ends_then_torch_has_no_group_even_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), fake_world(3, 8) as everybody:
        assert (everybody.rank, everybody.size, everybody.backend) == (3, 8, "fake")
        raise ValueError("inside")
    assert not dist.is_initialized()


def test_plan_when_there_is_a_group_already_then_a_rank_is_refused_and_the_group_stays(capsys: Output) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        text = refused(capsys, *SIZES, "--rank", 0)
        assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    finally:
        dist.destroy_process_group()
    assert text == Said(
        "Invalid process group: gloo of 1",
        "Run it in a process of its own, or call torch.distributed.destroy_process_group first.",
    )


def calls_of(gpt: GptSizes, dp: int) -> int:
    """Python and C functions that planning calls: a measure of work that no other process disturbs."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    choice = Choice(ParallelSizes(dp=dp), bucket_size=10**6)
    sys.setprofile(count)
    try:
        times_of(plan_choice(gpt, choice).fullest, Assumed(1e9, backward_seconds=1.0))
    finally:
        sys.setprofile(None)
    return calls


def test_plan_when_there_are_more_ranks_then_it_costs_no_more() -> None:
    gpt = GptSizes(layers=24, hidden=1024, vocab=50257)
    assert calls_of(gpt, 8192) <= calls_of(gpt, 2)


def test_plan_when_there_are_more_params_then_the_cost_grows_as_they_do() -> None:
    few, many = (calls_of(GptSizes(layers=layers, hidden=1024, vocab=50257), 64) for layers in (24, 96))
    assert 3 < many / few < 4.2  # four times the layers; the embedding is there once


def small_plan(dp: int = 4, bucket_size: int | None = BUCKET, **sizes: Any) -> StagePlan:
    return plan_choice(replace(GPT, **sizes), Choice(ParallelSizes(dp=dp), bucket_size=bucket_size)).fullest


def test_times_when_there_is_one_bucket_then_nothing_is_hidden() -> None:
    times = times_of(small_plan(bucket_size=None), Assumed(1e6, backward_seconds=10.0))
    assert times.timeline is not None
    assert times.timeline.exposed_scatter_seconds == pytest.approx(times.scatter_seconds)
    assert times.timeline.exposed_gather_seconds == pytest.approx(times.gather_seconds)
    assert times.exposed_seconds == pytest.approx(times.seconds)


def test_times_when_backward_takes_no_time_then_nothing_is_hidden() -> None:
    times = times_of(small_plan(), Assumed(1e6, backward_seconds=0.0))
    assert times.exposed_seconds == pytest.approx(times.seconds)


def test_times_when_backward_is_long_then_one_bucket_at_each_end_is_left() -> None:
    """Untied, so that a bucket that backward finishes early is first, and no bucket waits for a tied embedding."""
    plan = small_plan(is_tied=False)
    assumed = Assumed(1e6, backward_seconds=1e3)
    seconds = [assumed.seconds_of(each) for _, each in plan.collectives if each.kind is Kind.REDUCE_SCATTER]
    gathers = [assumed.seconds_of(each) for _, each in plan.collectives if each.kind is Kind.ALL_GATHER]
    times = times_of(plan, assumed)
    assert times.timeline is not None
    assert len(seconds) > 2
    assert times.timeline.exposed_scatter_seconds == pytest.approx(seconds[-1])
    assert times.timeline.exposed_gather_seconds == pytest.approx(gathers[-1])


def test_times_when_nobody_says_how_long_backward_is_then_no_timeline() -> None:
    times = times_of(small_plan(), Assumed(1e6))
    assert (times.timeline, times.exposed_seconds) == (None, None)
    assert times.seconds == pytest.approx(sum(each.sent_nbytes for _, each in small_plan().collectives) / 1e6)


@pytest.mark.parametrize("backward", [0.01, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("sizes", [{}, {"is_tied": False}, {"experts": 4, "layers": 8}])
def test_timeline_when_drawn_then_no_lane_is_busy_twice_and_the_waits_are_those_told(
    backward: float, sizes: dict[str, Any]
) -> None:
    assumed = Assumed(1e6, hop_seconds=1e-4, backward_seconds=backward, update_seconds=0.01)
    times = times_of(small_plan(**sizes), assumed)
    assert times.timeline is not None
    ends = {}
    for lane in TimelineLane:
        spans = sorted((each.start, each.stop) for each in times.timeline.intervals if each.lane is lane)
        assert all(left[1] <= right[0] + 1e-12 for left, right in itertools.pairwise(spans))
        ends[lane] = spans[-1][1]
    computing = backward * 1.5 + assumed.update_seconds
    assert ends[TimelineLane.COMPUTE] == pytest.approx(computing + (times.exposed_seconds or 0.0))
    assert max(times.seconds - backward * 1.5, 0.0) <= (times.exposed_seconds or 0.0) + 1e-9
    assert (times.exposed_seconds or 0.0) <= times.seconds + 1e-9


@pytest.mark.parametrize("is_tied", [True, False])
def test_timeline_when_the_output_layer_is_on_a_stage_of_its_own_then_a_tied_one_cannot_be_hidden(
    is_tied: bool,
) -> None:
    """Its gradient waits for the sum with the first stage's, after backward; an untied one's is the first of all."""
    choice = Choice(
        ParallelSizes(dp=4, pp=2), bucket_size=128 * 40
    )  # the output layer fills a bucket, the first in the buffer
    plan = plan_choice(replace(GPT, is_tied=is_tied, positions=0), choice).fullest
    layout = plan.parts[0].layout
    assert (plan.stage, layout.slots[0].name, layout.slots[1].bucket) == (1, "output_layer.weight", 1)
    times = times_of(plan, Assumed(1e9, backward_seconds=10.0))
    assert times.timeline is not None
    starts = {each.label: each.start for each in times.timeline.intervals if each.lane is TimelineLane.SEND}
    scatters = [start for label, start in starts.items() if label.startswith("reduce-scatter")]
    assert (starts["reduce-scatter 0"] >= 10.0, starts["reduce-scatter 0"] == min(scatters)) == (is_tied, not is_tied)
    assert starts["all-gather 0"] == max(starts.values())  # forward needs it last either way


def test_collective_when_ranks_are_many_then_hops_and_bytes_are_those_of_a_ring() -> None:
    ring = Collective(Kind.REDUCE_SCATTER, 4096 * 100, 4096)
    assert (ring.sent_nbytes, ring.num_hops) == (4095 * 100, 4095)
    (stats,) = stats_collective(4096)
    assert (stats.nbytes, stats.num_hops) == (24, 24)
    assert list(stats_collective(1)) == []
    assert Assumed(1e6, 1e-6).seconds_of(ring) == pytest.approx(0.4095 + 0.004095)


def test_plan_when_one_choice_is_asked_for_then_everything_in_one_look(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_width", lambda: 110)
    words = ("--dp", 2, "--bucket-size", BUCKET, "--bandwidth", 0.01, "--backward-ms", 500, "--update-ms", 2)
    status, lines, err = run(capsys, "--config", config, *words)
    assert (status, err) == (0, "")
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 110
    (choice,) = choices_shown(lines)
    wanted = {"dp": "2", "dtype": "bf16", "bucket": "30,000", "params": "167.0 KiB", "all": "999.8 KiB"}
    assert wanted.items() <= choice.items()
    assert (choice["sent"], choice["exposed"]) == ("250.5 KiB", "46.1 ms")
    for said in (
        "4 layers, hidden 40, 4 heads",
        "128; tied",
        "16 learned positions, biases, LayerNorm",
        "0.01 Gbit/s a rank, and 0 a message",
        "500 ms a microbatch, forward 250 ms, update 2 ms",
        "52 tensors, 84,720 elements, params 167.0 KiB, grads 334.0 KiB",
        "3 that send 167.0 KiB in 137 ms; backward can hide 106 ms (78%)",
        "3 that send 83.5 KiB in 68.4 ms; the next forward can hide 53 ms (78%)",
        "1 that send 24 B in 19.2 us",
        "12.5 KiB in backward",
        "18 flat params",
    ):
        assert said in text


def test_plan_when_the_terminal_is_narrow_then_no_line_is_wider(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_width", lambda: 80)
    for sizes in ((2,), (2, 64)):
        words = ("--dp", *sizes, "--bucket-size", BUCKET, "--backward-ms", 500, "--rank", 0)
        _, lines, _ = run(capsys, "--config", config, *words)
        assert max(map(len, lines)) <= 80
        assert "exposed" in "\n".join(lines)


def test_plan_when_flags_have_several_values_then_all_combinations(config: Path, capsys: Output) -> None:
    found = document(capsys, "--config", config, "--ranks", 16, 32, "--tp", 1, 2, "--dtype", "bf16", "fp32")
    rows = [(each["ranks"], each["dp"], each["tp"], each["dtype"]) for each in found["choices"]]
    assert rows == [
        (ranks, ranks // tp, tp, dtype) for ranks in (16, 32) for tp in (1, 2) for dtype in ("bf16", "fp32")
    ]


def sent_by(choice: Mapping[str, Any], kind: str) -> int:
    (stage,) = choice["stages"]
    return int(stage["collectives"][kind]["sent_nbytes"])


def test_plan_when_grads_are_rounded_on_their_way_then_an_element_sends_4_bytes_and_not_6(
    config: Path, capsys: Output
) -> None:
    words = ("--dp", 4, "--bucket-size", BUCKET, "--reduce-dtype", "none", "bfloat16", "float16")
    plain, *rounded = document(capsys, "--config", config, *words)["choices"]
    (stage,) = plain["stages"]
    shares = stage["bytes"]["param_nbytes"] // 2 * 3 // 4  # bf16 params; three ranks get a quarter each
    assert (plain["reduce_dtype"], sent_by(plain, "reduce-scatter")) == (None, 4 * shares)
    assert sent_by(plain, "all-gather") == 2 * shares
    for each, dtype in zip(rounded, ("bfloat16", "float16"), strict=True):
        assert (each["reduce_dtype"], sent_by(each, "reduce-scatter")) == (dtype, 2 * shares)
        assert sent_by(each, "all-gather") == 2 * shares
        assert each["stages"][0]["bytes"] == stage["bytes"]
        assert each["seconds"]["reduce_scatter"] == pytest.approx(plain["seconds"]["reduce_scatter"] / 2)


def module_of(plan: StagePlan) -> Module:
    """The params of a rank, on the CPU."""
    model = Module()
    for number, param in enumerate(plan.params):
        dtype: torch.dtype = getattr(torch, param.spec.dtype)
        model.register_parameter(f"param{number}", Parameter(torch.empty(param.spec.shape, dtype=dtype)))
    return model


@pytest.mark.parametrize(("size", "num_buckets"), [(3, 7), (16, 4), (64, 1)])  # more ranks, larger buckets
def test_plan_when_buckets_are_automatic_then_they_are_those_that_distribute_takes(size: int, num_buckets: int) -> None:
    gpt = GptSizes(layers=8, hidden=256, vocab=1024, seq=64)
    plan = plan_stage(gpt, Choice(ParallelSizes(dp=size), bucket_size=AUTO), 0)
    config = DistOptConfig(adam="torch_foreach", accelerator="torch", overlap_grad_reduce=True)
    with fake_world(0, size) as everybody:
        decided = decide(UserRequest([module_of(plan)], config, None, None), everybody)
    (real,), (planned,) = decided.sets, plan.parts
    assert planned.layout.buckets == real.layout.buckets
    assert [slot.in_buffer for slot in planned.layout.slots] == [slot.in_buffer for slot in real.layout.slots]
    assert plan.num_buckets == num_buckets


def test_plan_when_sizes_of_buckets_are_words_then_they_are_compared_with_numbers(config: Path, capsys: Output) -> None:
    words = ("--hidden", 400, "--dp", 2, "--bucket-size", "all", "auto", BUCKET)
    found = document(capsys, "--config", config, *words)["choices"]
    assert [each["bucket_size"] for each in found] == [None, "auto", BUCKET]
    numel = found[0]["stages"][0]["numel"]
    one, automatic, many = (each["stages"][0]["buckets"] for each in found)
    assert 1 == one < automatic <= -(-numel // default_bucket_size(numel, 2)) < many
    _, lines, _ = run(capsys, "--config", config, *words)
    assert [row["bucket"] for row in choices_shown(lines)] == ["all", "auto", f"{BUCKET:,}"]


def choices_shown(lines: Sequence[str]) -> list[dict[str, str]]:
    """The table of choices, by title."""
    first = next(number for number, line in enumerate(lines) if line.startswith("choices")) + 1
    titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in itertools.takewhile(str.strip, lines[first:]))
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("words", "title", "shown"),
    [
        (("--rotary", "--pp", 2), "stage", ["1"]),  # the final norm
        (("--rotary", "--pp", 1, 2), "stage", ["0", "1"]),
        (("--pp", 1, 2), "stage", None),
        (("--bucket-size", 1), "bucket", ["1"]),
        (("--bucket-size", "all"), "bucket", None),
        (("--experts", 4, "--dp", 2, "--ep", 1, 2), "ep", ["1", "2"]),
        (("--experts", 4, "--dp", 2, "--ep", 1), "ep", None),
        (("--reduce-dtype", "none", "float16"), "reduce dtype", ["none", "float16"]),
        (("--reduce-dtype", "float16"), "reduce dtype", ["float16"]),
        (("--reduce-dtype", "none"), "reduce dtype", None),
    ],
)
def test_plan_when_a_column_says_more_than_what_is_usual_then_it_is_shown(
    words: tuple[object, ...], title: str, shown: list[str] | None, config: Path, capsys: Output
) -> None:
    rows = choices_shown(run(capsys, "--config", config, *words)[1])
    assert ([row[title] for row in rows] if title in rows[0] else None) == shown


def test_plan_when_sizes_are_given_then_they_override_the_config(config: Path, capsys: Output) -> None:
    found = document(capsys, "--config", config, "--hidden", 80, "--vocab", 1000, "--gated", "--rotary")
    model = found["model"]
    assert (model["hidden"], model["vocab"], model["vocab_multiple"]) == (80, 1000, 128)
    assert (model["is_gated"], model["positions"], model["layers"]) == (True, 0, 4)


def test_plan_when_stages_differ_then_each_kind_is_told_once(config: Path, capsys: Output) -> None:
    (choice,) = document(capsys, "--config", config, "--pp", 4)["choices"]
    assert [stage["stages"] for stage in choice["stages"]] == [[0], [1, 2], [3]]
    embedding, layer = 128 * 40, stage_params(GPT, ParallelSizes(dp=1, pp=4), 1, "float32")
    numels = [stage["numel"] for stage in choice["stages"]]
    middle = sum(param.spec.numel for param in layer)
    assert numels == [middle + embedding + 16 * 40, middle, middle + 2 * 40 + embedding]


def test_plan_when_tokens_per_second_are_given_then_two_thirds_are_backward(config: Path, capsys: Output) -> None:
    words = ("--tokens-per-second", 1000, "--seq", 300, "--micro-batch", 2)
    assert document(capsys, "--config", config, *words)["assumed"]["backward_seconds"] == pytest.approx(0.4)


def test_plan_when_a_rank_is_built_then_it_says_where_and_that_all_is_as_planned(config: Path, capsys: Output) -> None:
    words = ("--config", config, "--dp", 4, "--tp", 2, "--pp", 2, "--rank", 13)
    _, lines, _ = run(capsys, *words)
    assert "built without memory: rank 13 of 16 (stage 1, data-parallel rank 2 of 4)" in lines
    assert sum(line.endswith(": as planned") for line in lines) == 4
    assert "  groups        torch's fake process group of 16 ranks, data-parallel ones of 4" in lines
    (built,) = document(capsys, *words)["built"]
    assert built["built"]["main_nbytes"] == built["planned"]["main_nbytes"] > 0


def test_plan_when_it_builds_nothing_then_torch_is_not_imported() -> None:
    probe = (
        "import sys; from megatron_distopt.cli.main import main; "
        "assert main(['plan', '--layers', '2', '--hidden', '64', '--vocab', '128']) == 0; "
        "sys.exit(str([name for name in ('torch', 'matplotlib') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == "[]\n"


def test_plot_when_asked_for_then_a_picture_of_every_choice(config: Path, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    sizes = []
    for number, choices in enumerate(((2,), (2, 4, 8))):
        file = tmp_path / f"{number}.png"
        words = ("--dp", *choices, "--bucket-size", BUCKET, "--bandwidth", 0.1, "--backward-ms", 20, "--plot", file)
        assert run(capsys, "--config", config, *words)[0] == 0
        data = file.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(int.from_bytes(data[20:24], "big"))  # height in pixels
    assert sizes[1] > sizes[0]


def test_plot_when_one_choice_takes_no_time_then_the_others_are_drawn(
    config: Path, tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("matplotlib")
    words = ("--dp", 1, 2, "--reduce-dtype", "bfloat16", "--bucket-size", "auto", "--backward-ms", 0)
    assert run(capsys, "--config", config, *words, "--plot", tmp_path / "x.svg")[0] == 0
    assert "</svg>" in (tmp_path / "x.svg").read_text(encoding="utf-8")


def refused(capsys: Output, *words: object) -> str:
    status, lines, err = run(capsys, *words)
    assert (status, lines) == (1, [])
    return err.removeprefix("megatron-distopt: ").rstrip("\n")


SIZES = ("--layers", 4, "--hidden", 64, "--vocab", 128)
REFUSALS: list[tuple[tuple[object, ...], str]] = [
    (
        ("--layers", 4, "--vocab", 128),
        Said("Invalid model: no hidden", "Write --hidden N, or --config FILE with it."),
    ),
    (
        (*SIZES, "--pp", 3),
        Said("Invalid number of layers: 4", "Write a --pp that divides 4."),
    ),
    (
        (*SIZES, "--heads", 4, "--tp", 8),
        Said("Invalid number of heads: 4", "Write a --tp that divides 4."),
    ),
    (
        (*SIZES, "--heads", 3, "--kv-heads", 1),
        Said("Invalid hidden size: 64 over 3 heads", "Write --heads N, or give kv_channels in the config."),
    ),
    (
        (*SIZES, "--ep", 2, "--dp", 2),
        Said("Invalid --ep: 2", "Write --experts N, or leave --ep out."),
    ),
    (
        (*SIZES, "--ranks", 12, "--tp", 8),
        Said("Invalid --ranks: 12", "Write another number, or --dp N in its place."),
    ),
    (
        (*SIZES, "--dp", 64, "--bucket-size", 63),
        Said("Invalid bucket size: 63 elements", "Write --bucket-size 40000000."),
    ),
    (
        (*SIZES, "--dp", 4, "--rank", 4),
        Said("Invalid --rank: 4", "Write --rank 0 for the first one."),
    ),
    (
        (*SIZES, "--plot", "x.png"),
        Said("Invalid --plot: no time of backward", "Write --backward-ms MS or --tokens-per-second N as well."),
    ),
    (
        (*SIZES, "--backward-ms", 0, "--plot", "x.png"),
        Said("Invalid --plot: a step that takes no time", "Write a --backward-ms above 0."),
    ),
    (
        (*SIZES, "--grad-dtype", "fp32", "param", "--reduce-dtype", "bfloat16"),
        Said(
            "Invalid reduce_dtype: bfloat16 for grads kept in bfloat16",
            "Write --grad-dtype fp32, or --reduce-dtype none.",
        ),
    ),
    (
        ("--config", "/nowhere/config.json"),
        Said(
            "Invalid config: /nowhere/config.json ([Errno 2] No such file or directory: '/nowhere/config.json')",
            "Give a JSON file such as a HuggingFace config.json.",
        ),
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSALS)
def test_plan_when_something_does_not_fit_then_one_line_says_what_to_write(
    words: tuple[object, ...], text: Said, capsys: Output
) -> None:
    assert refused(capsys, *words) == text


def test_plot_when_matplotlib_is_missing_then_says_what_to_install(
    config: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("megatron_distopt.cli.plan_timeline.find_spec", lambda name: None)
    text = refused(capsys, "--config", config, "--backward-ms", 1, "--plot", tmp_path / "x.png")
    assert text == Said("Invalid --plot: matplotlib is not installed", "Run pip install matplotlib.")
    assert not (tmp_path / "x.png").exists()


def test_plot_when_the_format_is_unknown_then_refused(config: Path, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    text = refused(capsys, "--config", config, "--backward-ms", 1, "--plot", tmp_path / "x.nonsense")
    assert text.startswith(f"Invalid --plot: {tmp_path / 'x.nonsense'} (Format 'nonsense' is not supported")
    assert text.endswith("Must be a file that can be written, of a known format. Write --plot plan.png.")


@pytest.mark.parametrize(
    "words",
    [
        ("--bucket-size", "0"),
        ("--bucket-size", "-5"),
        ("--bucket-size", "some"),
        ("--bandwidth", "0"),
        ("--rank", "-1"),
        ("--latency-us", "nan"),
    ],
)
def test_plan_when_a_number_cannot_be_then_status_2(words: tuple[str, str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *map(str, SIZES), *words])
    assert stop.value.code == 2
    assert f"{words[0]}: Invalid " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (
            "[1]",
            "Invalid config: FILE with a list",
            "Give a JSON file such as a HuggingFace config.json.",
        ),
        (
            '{"num_layers": 2.5}',
            "Invalid key 'num_layers' of the config: 2.5",
            "Correct it, or give the flag in addition to --config.",
        ),
        (
            '{"num_layers": 2, "kv_lora_rank": 512}',
            "Invalid key 'kv_lora_rank' of the config: 512",
            "Take the key out to plan the rest of the model.",
        ),
    ],
)
def test_config_when_it_cannot_be_used_then_says_why(
    content: str, found: str, remedy: str, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8")
    assert refused(capsys, "--config", file) == Said(found.replace("FILE", str(file)), remedy)


def test_sizes_when_experts_are_spread_then_a_rank_has_its_share() -> None:
    whole, spread = (stage_params(MIXTURE, ParallelSizes(dp=8, ep=ep), 0, "float32") for ep in (1, 4))
    of_experts = [param for param in spread if param.is_expert]
    assert not any(param.is_expert for param in whole)
    assert sum(param.spec.numel for param in of_experts) * 4 == sum(
        param.spec.numel for param in whole if ".experts." in param.spec.name
    )
    assert math.isclose(sum(param.work for param in whole), sum(param.work for param in spread))
