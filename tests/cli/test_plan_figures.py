"""`plan` against what real runs allocate, send and register.

Exercises layout/estimate.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.cli.plan_command import layout_of, plan_choice, plan_stage
from megatron_distopt.cli.plan_model import (
    AUTO,
    DTYPES,
    Choice,
    GptSizes,
    ParallelSizes,
    stage_params,
)
from megatron_distopt.comm import shared_memory
from megatron_distopt.hosts.torch.step import CENSUS_NUMEL
from megatron_distopt.optimizer.sharded import Memory
from tests.support.cases import Case
from tests.support.facts import Facts, facts_of
from tests.support.plan_command import BUCKET, GPT, module_of
from tests.support.waits import num_calls_of

CUT = ParallelSizes(dp=2)
#: Real runs on 2 ranks.
RUNS = {
    "bf16 with bf16 grads": Choice(CUT, grad_dtype="bf16", bucket_size=BUCKET),
    "fp32 with grads sent as fp16": Choice(CUT, "fp32", reduce_dtype="float16", bucket_size=BUCKET),
    "remainder, bf16 moments": Choice(
        CUT,
        "bf16",
        main_params_dtype="remainder",
        exp_avg_dtype="bfloat16",
        exp_avg_sq_dtype="bfloat16",
        bucket_size=BUCKET,
    ),
    "no main, 8-bit moments": Choice(
        CUT, main_params_dtype="bfloat16", exp_avg_dtype="int8", exp_avg_sq_dtype="int8"
    ),
    "fp32, small buckets": Choice(CUT, "fp32", bucket_size=10_000),
}
#: Real models on 2 ranks: their sizes and how they are cut.
SHAPES = {
    "pp 2, tied": (GPT, ParallelSizes(dp=1, pp=2)),
    "as llama": (
        replace(
            GPT,
            kv_heads=2,
            is_gated=True,
            is_rms=True,
            has_bias=False,
            is_tied=False,
            is_rotary=True,
        ),
        ParallelSizes(dp=1, tp=2),
    ),
    "as qwen": (
        replace(GPT, is_gated=True, is_rms=True, has_bias=False, has_qkv_bias=True, is_rotary=True),
        ParallelSizes(dp=2),
    ),
    "experts, ep 2": (
        replace(GPT, experts=4, expert_ffn=48, is_gated=True, has_bias=False),
        ParallelSizes(dp=2, ep=2),
    ),
}


@dataclass(frozen=True)
class Used:
    """What a real step held and sent on one rank."""

    memory: Memory
    sent: dict[str, int]
    counts: dict[str, int]


class WireCounter(TorchDispatchMode):
    """Counts what each rank sends: every operation of torch.distributed passes through the
    dispatcher."""

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
        # any other one is not expected
        whole = {"c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 0}[name]
        return nbytes_of(args[whole]) * share // self.size


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def real_model(gpt: GptSizes, cut: ParallelSizes) -> torch.nn.Module:
    """Of megatron-core, on this rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from tests.support import gpt as training

    training.enter_layout(
        Case("distopt", tp=cut.tp, pp=cut.pp, dp=dist.get_world_size() // (cut.tp * cut.pp))
    )
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
        transformer_layer_spec=get_gpt_layer_local_spec(
            gpt.experts or None, normalization=normalization
        ),
        vocab_size=gpt.padded_vocab(cut.tp),
        max_sequence_length=gpt.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=gpt.is_tied,
        position_embedding_type="rope" if gpt.is_rotary else "learned_absolute",
    )


def used_by(choice: Choice) -> Used:
    """Collective: a real optimizer of a real model takes two steps."""
    model = real_model(GPT, choice.cut).to(getattr(torch, DTYPES[choice.dtype][0]))
    groups = [
        {"params": [param for param in model.parameters() if param.ndim > 1]},
        {"params": [param for param in model.parameters() if param.ndim <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups)
    config = DistOptConfig(
        accelerator="torch",
        bucket_size=choice.bucket_size,  # type: ignore[arg-type] # a number in all runs
        grads_in_fp32=choice.grad_dtype == "fp32",
        reduce_dtype=choice.reduce_dtype,
        main_params_dtype=choice.main_params_dtype,
        exp_avg_dtype=choice.exp_avg_dtype,
        exp_avg_sq_dtype=choice.exp_avg_sq_dtype,
    )
    optimizer = distribute(model, adam, config)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(param.float() ** 2).sum() for param in model.parameters()]).sum().backward()
        with WireCounter(choice.cut.dp) as wire:
            optimizer.step()
    # Which params have a gradient is told in the all-reduce of the statistics; no Megatron has to
    # ask.
    told = (CENSUS_NUMEL + len([*model.parameters()])) * torch.float64.itemsize
    wire.sent["c10d::allreduce_"] -= 2 * told * (choice.cut.dp - 1) // choice.cut.dp
    return Used(optimizer.memory, dict(wire.sent), dict(wire.counts))


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    """What ranks of one machine hand each other through memory nobody can count; messages carry the
    same."""
    shared_memory.may_share_memory = lambda: False
    found: dict[str, Any] = {name: used_by(choice) for name, choice in RUNS.items()}
    for name, (gpt, cut) in SHAPES.items():
        model = real_model(gpt, cut)
        params = [
            (param_name, tuple(param.shape), not getattr(param, "allreduce", True))
            for param_name, param in model.named_parameters()
        ]
        found[name] = params
    return found


facts = facts_of(collect_facts, 2, seconds=400.0, core=True)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("rank", [0, 1])
def test_plan_when_compared_with_a_real_run_then_every_byte_is_there_and_on_the_wire(
    name: str, rank: int, facts: Facts
) -> None:
    plan, used = plan_stage(GPT, RUNS[name], 0, rank), facts[name][rank]
    held = plan.footprint
    assert (held.param_nbytes, held.grad_nbytes) == (
        used.memory.param_nbytes,
        used.memory.grad_nbytes,
    )
    assert (held.main_nbytes, held.moment_nbytes) == (
        used.memory.main_nbytes,
        used.memory.moment_nbytes,
    )
    sent_nbytes = sum(part.nbytes for part in plan.sent.values())
    assert sent_nbytes == sum(used.sent.values()) > 0
    assert plan.sent["all-reduce"].nbytes == used.sent["c10d::allreduce_"]
    assert plan.sent["all-reduce"].count == used.counts["c10d::allreduce_"] == 1
    # Collectives of torch's, or messages, which carry the same: one each where a bucket fits into
    # one message.
    others = sum(
        number
        for op, number in used.counts.items()
        if op not in ("c10d::allreduce_", "c10d::recv_")
    )
    assert (
        others
        == plan.sent["reduce-scatter"].count + plan.sent["all-gather"].count
        == 2 * plan.num_buckets
    )


@pytest.mark.parametrize("name", SHAPES)
def test_stage_when_compared_with_megatron_core_then_names_shapes_and_order_are_its(
    name: str, facts: Facts
) -> None:
    gpt, cut = SHAPES[name]
    for rank in range(2):
        planned = stage_params(gpt, cut, rank if cut.pp > 1 else 0, "float32")
        assert [(param.spec.name, param.spec.shape, param.is_expert) for param in planned] == facts[
            name
        ][rank]


def test_plan_when_there_are_more_ranks_then_it_costs_no_more() -> None:
    gpt = GptSizes(layers=24, hidden=1024, vocab=50257)
    few, many = (Choice(ParallelSizes(dp=dp), bucket_size=10**6) for dp in (2, 8192))
    costs = [num_calls_of(lambda choice=each: plan_choice(gpt, choice)) for each in (few, many)]
    assert costs[1] <= costs[0]


def test_plan_when_buckets_are_automatic_then_they_are_those_that_distribute_takes(
    one_rank: None,
) -> None:
    gpt, choice = (
        GptSizes(layers=8, hidden=256, vocab=1024, seq=64),
        Choice(ParallelSizes(dp=1), bucket_size=AUTO),
    )
    plan = plan_stage(gpt, choice, 0)
    model = module_of(plan)
    adam = torch.optim.AdamW(model.parameters())
    optimizer = distribute(model, adam, accelerator="torch", overlap_grad_reduce=True)
    [layout] = [buffer.layout for buffer in optimizer.sharded.buffers]
    optimizer.release()
    planned = layout_of(plan.params, choice, 1)
    assert planned.buckets == layout.buckets
    assert [slot.in_buffer for slot in planned.slots] == [slot.in_buffer for slot in layout.slots]
    assert plan.num_buckets > 4
