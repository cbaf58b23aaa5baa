"""A GPTModel of megatron-core over bytes, its DistributedDataParallel, and one forward step."""

from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from byte_gpt.data import VOCAB_SIZE
from byte_gpt.settings import Precision, Settings

Loss = tuple[Tensor, dict[str, Tensor]]


def build_model(settings: Settings, device: torch.device) -> DistributedDataParallel:
    """Collective: the model in the grad and param buffers that its optimizer works on, equal on all
    ranks."""
    config = transformer_config(settings)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=settings.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).to(device)
    module = model if settings.precision is Precision.FP32 else Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.use_distributed_optimizer
    )
    ddp = DistributedDataParallel(config, ddp_config, module)
    ddp.broadcast_params()
    return ddp


def transformer_config(settings: Settings) -> TransformerConfig:
    """Every fusion stays off, as it is by default: they need apex, TransformerEngine or a
    compiler."""
    return TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        attention_softmax_in_fp32=False,  # torch's softmax of 16-bit tensors adds up in fp32 anyway
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=settings.precision.value,
        bf16=settings.precision is Precision.BF16,
        fp16=settings.precision is Precision.FP16,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def forward_step(
    batches: Iterator[Tensor], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Loss]]:
    """What megatron-core's schedules call once a microbatch."""
    return token_losses(model, next(batches)), mean_loss


def token_losses(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """The cross entropy of each byte given those before it, in nats; windows are [batch, length +
    1]."""
    windows = windows.to(next(model.parameters()).device)
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    # [batch, length]; a local layer masks causally
    losses: Tensor = model(tokens, positions, None, labels=labels)
    return losses.float()


def mean_loss(losses: Tensor) -> Loss:
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}  # a copy: the schedule divides the loss in place
