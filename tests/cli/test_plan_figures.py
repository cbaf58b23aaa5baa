"""`plan` against what real runs allocate, send and register, and its arithmetic."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.cli import plan_build
from megatron_distopt.cli.plan_choice import StagePlan, plan_choice, plan_stage
from megatron_distopt.cli.plan_model import AUTO, Choice, GptSizes, ParallelSizes, stage_params
from megatron_distopt.cli.plan_times import Assumed, times_of
from megatron_distopt.comm import fake_world, shared_memory
from megatron_distopt.hosts.torch.plan import UserRequest, decide
from megatron_distopt.hosts.torch.step import HEAD_NUMEL
from tests.support.cases import Case
from tests.support.plan_command import BUCKET, GPT, SIZES, Output, document, refused
from tests.support.refusals import Said
from tests.support.spawn import run_ranks

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
#: State in other forms than fp32.
REMAINDER_AND_BF16 = {
    "main_params_dtype": "remainder",
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
CODES = {"main_params_dtype": "float16", "exp_avg_dtype": "float8_e4m3fn", "exp_avg_sq_dtype": "float16"}
SMALLEST = {"main_params_dtype": "bfloat16", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "float8_e5m2"}


@pytest.mark.parametrize(
    ("gpt", "choice", "rank"),
    [
        (GPT, Choice(ParallelSizes(dp=2)), 0),
        (GPT, Choice(ParallelSizes(dp=3, tp=2, pp=2), "fp16", has_fp32_grads=False, bucket_size=BUCKET), 11),
        (GPT, Choice(ParallelSizes(dp=5), "fp32", bucket_size=BUCKET), 4),
        (MIXTURE, Choice(ParallelSizes(dp=8, tp=2, ep=4), bucket_size=BUCKET), 13),
        (TRILLION, Choice(ParallelSizes(dp=4096), bucket_size=40_000_000), 4095),
        (TRILLION, Choice(ParallelSizes(dp=32, tp=8, pp=16)), 1234),
        (GPT, Choice(ParallelSizes(dp=3), **REMAINDER_AND_BF16), 1),
        (GPT, Choice(ParallelSizes(dp=3), "fp16", **CODES), 2),
        (MIXTURE, Choice(ParallelSizes(dp=8, tp=2, ep=4), bucket_size=BUCKET, **SMALLEST), 13),
        (TRILLION, Choice(ParallelSizes(dp=4096), **CODES), 4095),
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


def test_build_when_it_ends_then_torch_has_no_group() -> None:
    built = plan_build.build(plan_stage(TRILLION, Choice(ParallelSizes(dp=4096)), 0, 1234), 1234)
    assert built.numel > 10**12
    assert not dist.is_initialized()


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
        decided = decide(UserRequest([module_of(plan)], config, None), everybody)
    (real,), (planned,) = decided.sets, plan.parts
    assert planned.layout.buckets == real.layout.buckets
    assert [slot.in_buffer for slot in planned.layout.slots] == [slot.in_buffer for slot in real.layout.slots]
    assert plan.num_buckets == num_buckets


def test_sizes_when_experts_are_spread_then_a_rank_has_its_share() -> None:
    whole, spread = (stage_params(MIXTURE, ParallelSizes(dp=8, ep=ep), 0, "float32") for ep in (1, 4))
    of_experts = [param for param in spread if param.is_expert]
    assert not any(param.is_expert for param in whole)
    assert sum(param.spec.numel for param in of_experts) * 4 == sum(
        param.spec.numel for param in whole if ".experts." in param.spec.name
    )
    assert math.isclose(sum(param.work for param in whole), sum(param.work for param in spread))
