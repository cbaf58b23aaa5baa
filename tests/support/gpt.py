"""Trains a tiny GPT of megatron-core on a CPU, with the host's optimizers or with ours, the same in
everything else.

`Training` is one model with its optimizer, `train(case)` gives the `Curve` of some steps. To be
imported inside a rank (see `tests.support.spawn`): it imports the host and maps its CUDA calls for
the life of the process.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.core.optimizer as host_optimizer
import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

import megatron_distopt
from tests.support.cases import Case, Curve, Step
from tests.support.spawn import forget_groups

megatron_on_cpu.install()

#: What the tests ask for that older versions of the host have no name for, with the value that
#: those versions mean. None where it does not matter to them.
_IMPLIED = {
    "decoupled_weight_decay": True,
    "vp_stage": None,
    "overlap_param_gather": None,
    "param_sync": None,
}
_IMPLIED |= {
    "expert_tensor_parallel_size": None,
    "num_distributed_optimizer_instances": 1,
    "mtp_block_spec": None,
}

# 40 is no multiple of the 64 elements to which the host aligns a param: its buffers have gaps, as
# real ones do.
HIDDEN = 40
HEADS = 4
VOCABULARY = 128
SEQUENCE = 16
MICRO_BATCH = 2
DISTINCT_BATCHES = 4  # the steps go around them, so that there is something to learn
SEED = 1234

#: Where models and batches are.
DEVICE = torch.device("cpu")
#: The groups of the layout that was entered last.
_entered: list[tuple[int | None, ...]] = []
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def known_to(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """The keyword arguments that this version of the host has; one that it lacks must be what it
    does anyway."""
    names = inspect.signature(function).parameters
    for name in values.keys() - names.keys():
        if name not in _IMPLIED or _IMPLIED[name] not in (None, values[name]):
            raise TypeError(f"{function} of this megatron-core has no {name}={values[name]!r}")
    return {name: value for name, value in values.items() if name in names}


def train(case: Case) -> Curve:
    """Collective: trains a fresh model for `case.steps` steps."""
    with contextlib.closing(Training(case)) as training:
        steps: list[Step] = []
        first_params: dict[str, Tensor] = {}
        for _ in range(case.steps):
            steps.append(training.step())
            if steps[-1].success and not first_params:
                first_params = training.params()
        return Curve(tuple(steps), first_params, training.params())


class Training:
    """One GPT on this rank, its data, and an optimizer made by the host's `get_megatron_optimizer`.

    The host's own optimizers compare type strings with CUDA's; that one mapping of the support
    module is active while they are made and while they step, and at no time when the optimizer is
    ours.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.steps_taken = 0
        enter_layout(case)
        self.chunks = build_chunks(case)
        factory = host_optimizer.get_megatron_optimizer
        if case.optimizer == "distopt":  # without installing it, which looks through all modules
            factory = megatron_distopt.get_megatron_optimizer
        with self.type_strings():
            self.optimizer = factory(optimizer_config(case), self.chunks)
        self._connect_schedule()

    def close(self) -> None:
        """Lets the optimizer go: a test that has closed the training cannot use it by mistake."""
        del self.optimizer

    def type_strings(self) -> contextlib.AbstractContextManager[object]:
        """The mappings that the host's own optimizers cannot do without; nothing for ours."""
        return contextlib.nullcontext() if self.case.optimizer == "distopt" else hosts_own_runs()

    def step(self) -> Step:
        """Collective: one iteration in the order of the host's training loop."""
        loss = self.forward_backward()
        loss_scale = float(self.optimizer.get_loss_scale().item())
        with self.type_strings():
            success, grad_norm, num_zeros = self.optimizer.step()
        self.finish_step()
        return Step(loss, success, grad_norm, num_zeros, loss_scale)

    def forward_backward(self) -> float:
        """Collective: zeroes gradients, runs the schedule with `finalize_model_grads`; returns the
        global loss."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [microbatches(self.case, self.steps_taken) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.case.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        return global_loss(self.case, losses)

    def finish_step(self) -> None:
        """The host's loop enables the forward pre-hooks only after its first iteration."""
        if self.case.overlap_param_gather and self.steps_taken == 0:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        self.steps_taken += 1

    def params(self) -> dict[str, Tensor]:
        """Collective with overlap_param_gather: copies of the model params, up to date."""
        if self.case.overlap_param_gather and self.steps_taken > 0:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        return {name: param.detach().clone() for name, param in self.named_params()}

    def named_params(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model params by chunk and name, wrappers left out of the name."""
        for index, chunk in enumerate(self.chunks):
            for name, param in chunk.named_parameters():
                yield f"{index}.{name.removeprefix('module.').removeprefix('module.')}", param

    def _connect_schedule(self) -> None:
        """What the host's training loop writes into the model's config before the first
        iteration."""
        config = self.chunks[0].config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.case.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if self.case.overlap_param_gather:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(
                    **known_to(chunk.disable_forward_pre_hook, param_sync=False)
                )


@contextlib.contextmanager
def hosts_own_runs() -> Iterator[None]:
    """Lets the host's own optimizers run on a CPU without its kernels.

    Its distributed one asks for apex or TransformerEngine in 0.9, and in 0.12 calls
    TransformerEngine for 0 fp8 params.
    """
    with megatron_on_cpu.map_type_strings(), pytest.MonkeyPatch.context() as patch:
        if "instance" not in str(inspect.signature(distrib_optimizer.DistributedOptimizer)):
            patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "quantize_param_shard", _quantize_nothing, raising=False)
        yield


def _quantize_nothing(model_params: list[Tensor], *args: Any, **kwargs: Any) -> None:
    if model_params:
        raise TypeError("no test has fp8 params")


def parts_of(optimizer: Any) -> list[Any]:
    """The distributed optimizers of a chain; before 0.12 the host puts no chain around one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def enter_layout(case: Case) -> None:
    """Collective: the host's process groups for the case; kept while consecutive cases have the
    same layout."""
    if case.ranks != dist.get_world_size():
        raise ValueError(f"{case} needs {case.ranks} ranks and has {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        if _entered == [case.groups]:
            return
        parallel_state.destroy_model_parallel()
        forget_groups()
    _entered[:] = [case.groups]
    more = {"context_parallel_size": case.cp, "expert_model_parallel_size": case.ep}
    more |= {
        "expert_tensor_parallel_size": case.etp,
        "num_distributed_optimizer_instances": case.instances,
    }
    virtual = case.vp if case.vp > 1 else None
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, virtual, **known_to(parallel_state.initialize_model_parallel, **more)
    )
    if "get_position_embedding_group())" in inspect.getsource(
        inspect.getmodule(finalize_model_grads)
    ):
        _complete_position_groups()


def _complete_position_groups() -> None:
    """Collective: megatron-core 0.12 asks for this group also on the ranks that are in none, and
    fails."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    if parallel_state._POSITION_EMBEDDING_GROUP is None:
        parallel_state._POSITION_EMBEDDING_GROUP = alone


_histc = torch.histc


def _counts_of_integers(tensor: Tensor, **bins: Any) -> Tensor:
    """A histogram of integers, which torch has on CUDA only."""
    return _histc(tensor.float(), **bins)


def _complete_router() -> None:
    """What routers of experts need that a CPU, or a machine without TransformerEngine, does not
    have.

    megatron-core 0.10, and 0.15 to 0.17, ask for parts of TransformerEngine whether or not that is
    there.
    """
    from megatron.core.transformer.moe import moe_utils

    if "te_general_gemm" in inspect.getsource(moe_utils) and not hasattr(
        moe_utils, "te_general_gemm"
    ):
        moe_utils.te_general_gemm = None
    linear = {
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
    }
    grouped = dict.fromkeys(("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"))
    for module in (
        inspect.getmodule(get_gpt_layer_local_spec),
        sys.modules.get("megatron.core.models.gpt.moe_module_specs"),
    ):
        for name, value in {**linear, **grouped}.items() if module is not None else ():
            vars(module).setdefault(name, value)
    if torch.histc is _histc:
        torch.histc = _counts_of_integers


def build_chunks(case: Case) -> list[DistributedDataParallel]:
    """Collective: the model chunks of this rank inside the host's DDP, from the same seed every
    time."""
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    config = transformer_config(case)
    if case.num_experts:
        _complete_router()
    with _torchs_norms(case):
        return [build_chunk(case, config, stage) for stage in range(case.vp)]


def build_chunk(case: Case, config: TransformerConfig, stage: int) -> DistributedDataParallel:
    vp_stage = stage if case.vp > 1 else None
    if vp_stage is not None:  # before 0.13 a stage that is built finds its number here
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    spec = get_gpt_layer_local_spec(
        **({"num_experts": case.num_experts} if case.num_experts else {})
    )
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=first(**known_to(first, ignore_virtual=False, vp_stage=vp_stage)),
        post_process=last(**known_to(last, ignore_virtual=False, vp_stage=vp_stage)),
        share_embeddings_and_output_weights=case.tied,
        **known_to(GPTModel, vp_stage=vp_stage, mtp_block_spec=_mtp_spec(case, config, spec)),
    )
    if case.precision != "fp32":
        model = Float16Module(config, model)
    prepare_params(case, model)
    model.to(DEVICE)
    # as the host's training loop has it
    disable_bucketing = stage > 0 or case.overlap_param_gather_with_step
    return DistributedDataParallel(
        config, ddp_config(case), model, disable_bucketing=disable_bucketing
    )


def _mtp_spec(case: Case, config: TransformerConfig, spec: Any) -> Any:
    if not case.mtp:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)


def _parts_of_today(case: Case) -> dict[str, Any]:
    """Experts and multi-token prediction, in the host's config."""
    parts: dict[str, Any] = {}
    if case.num_experts:
        parts |= {
            "num_moe_experts": case.num_experts,
            "moe_router_topk": 2,
            "expert_model_parallel_size": case.ep,
        }
        parts |= {
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
            "moe_router_load_balancing_type": "none",
        }
        parts |= {"moe_shared_expert_intermediate_size": 2 * HIDDEN} if case.shared_experts else {}
        parts |= {"sequence_parallel": case.tp > 1}
        parts |= {} if case.etp is None else {"expert_tensor_parallel_size": case.etp}
    if case.mtp:
        parts |= {"mtp_num_layers": case.mtp, "mtp_loss_scaling_factor": 0.3}
    if case.gated:
        parts |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return parts


@contextlib.contextmanager
def _torchs_norms(case: Case) -> Iterator[None]:
    """Lets the host build torch's norms under sequence parallelism, which it demands where experts
    meet TP.

    It refuses because it does not mark their params, whose gradients it then would not add up.
    """
    with pytest.MonkeyPatch.context() as patch:
        if case.num_experts and case.tp > 1:
            from megatron.core.transformer import torch_norm

            make = torch_norm.WrappedTorchNorm.__new__
            patch.setattr(torch_norm.WrappedTorchNorm, "__new__", partial(_marked_norm, make))
        yield


def _marked_norm(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm: torch.nn.Module = make(cls, plain, *args, **kwargs)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def prepare_params(case: Case, model: torch.nn.Module) -> None:
    """Freezes params, and widens the norms with values that 16 bits cannot hold."""
    for name, param in model.named_parameters():
        if any(part in name for part in case.frozen):
            param.requires_grad_(False)
        if case.fp32_norms and "layernorm" in name:
            param.data = param.data.float() + 1e-4


def transformer_config(case: Case) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=case.query_groups,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
        pipeline_dtype=DTYPES[case.precision],
        params_dtype=DTYPES[case.precision],
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_parts_of_today(case),
    )


def ddp_config(case: Case) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grad_reduce_in_fp32,
        overlap_grad_reduce=case.overlap_grad_reduce,
        overlap_param_gather=case.overlap_param_gather,
        use_distributed_optimizer=case.distributed,
        average_in_collective=case.average_in_collective,
        bucket_size=case.bucket_size,
        **(
            {"param_name_patterns_for_fp32_local_accumulation": case.fp32_accumulation}
            if case.fp32_accumulation
            else {}
        ),
        **known_to(
            DistributedDataParallelConfig, num_distributed_optimizer_instances=case.instances
        ),
    )


def optimizer_config(case: Case) -> OptimizerConfig:
    config = OptimizerConfig(
        optimizer=case.optimizer_name,
        lr=case.lr,
        min_lr=case.lr / 10,
        weight_decay=case.weight_decay,
        clip_grad=case.clip_grad,
        params_dtype=DTYPES[case.precision],
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        loss_scale=case.loss_scale,
        initial_loss_scale=case.initial_loss_scale,
        loss_scale_window=case.loss_scale_window,
        hysteresis=case.hysteresis,
        log_num_zeros_in_grad=case.log_num_zeros,
        use_distributed_optimizer=case.distributed,
        overlap_param_gather_with_optimizer_step=case.overlap_param_gather_with_step,
        **(
            {} if case.skip_threshold is None else {"grad_norm_skip_threshold": case.skip_threshold}
        ),
        **known_to(
            OptimizerConfig,
            decoupled_weight_decay=case.decoupled_weight_decay,
            overlap_param_gather=case.overlap_param_gather,
        ),
    )
    for name, value in case.fields:
        setattr(config, name, value)
    return config


def microbatches(case: Case, step: int) -> Iterator[Tensor]:
    """This data-parallel rank's part of the step's global batch: [MICRO_BATCH, SEQUENCE + 1] tokens
    each."""
    generator = torch.Generator().manual_seed(SEED + step % DISTINCT_BATCHES)
    shape = (case.num_microbatches, case.dp, MICRO_BATCH, SEQUENCE + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return iter(tokens[:, parallel_state.get_data_parallel_rank()].to(DEVICE))


def forward_step(
    iterator: Iterator[Tensor], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    """What the host's schedules call for each microbatch."""
    tokens = next(iterator)
    parts, part = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    length = SEQUENCE // parts
    seen, labels = (
        each.chunk(parts, dim=1)[part].contiguous() for each in (tokens[:, :-1], tokens[:, 1:])
    )
    positions = torch.arange(part * length, (part + 1) * length, device=DEVICE).expand(
        MICRO_BATCH, -1
    )
    # True: may not be seen
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=DEVICE).triu(1)
    output = model(seen, positions, mask, labels=labels)
    return output, partial(mean_loss)


def mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def global_loss(case: Case, losses: list[dict[str, Tensor]]) -> float:
    """Collective: the mean over microbatches and data-parallel ranks; only the last pipeline stage
    has any."""
    total = torch.tensor([sum(float(entry["loss"]) for entry in losses)], dtype=torch.float64)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total) / (case.num_microbatches * case.dp * case.cp)
