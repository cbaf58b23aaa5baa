"""Pretrain a small GPT with megatron-core, and megatron_distopt as its distributed optimizer.

    torchrun --nproc-per-node 2 examples/pretrain_gpt_core.py --use-distributed-optimizer deepspeed
    --num_gpus 2 examples/pretrain_gpt_core.py --use-distributed-optimizer
    --tensor-model-parallel-size 2

Two lines of it are ours: `import megatron_distopt` and `megatron_distopt.install()`. Without the
flag, or with MEGATRON_DISTOPT=0 in the environment, megatron-core's own optimizer trains. What
`megatron_on_cpu` does is for machines without a GPU: leave it out on others."""
# ruff: noqa: E402 -- install() comes before the imports, as in every script that takes
# get_megatron_optimizer by value

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import megatron_on_cpu
import torch
from torch import Tensor

import megatron_distopt

installation = megatron_distopt.install()

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig


def main() -> None:
    args = parse_args()
    device = initialize(args)
    model = get_model(args, device)
    config = OptimizerConfig(
        lr=args.lr,
        min_lr=args.lr / 10,
        bf16=args.bf16,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])
    train(args, model, optimizer)
    torch.distributed.destroy_process_group()


def initialize(args: argparse.Namespace) -> torch.device:
    megatron_on_cpu.install()
    if not (args.use_distributed_optimizer and installation.is_active):
        # megatron-core's own optimizers ask for the names of CUDA's types
        megatron_on_cpu.map_type_strings()
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group("nccl" if has_cuda else "gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    return torch.device("cuda", args.local_rank) if has_cuda else torch.device("cpu")


def get_model(args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        bf16=args.bf16,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(device)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    ddp = DistributedDataParallel(
        config, ddp_config, Float16Module(config, model) if args.bf16 else model
    )
    ddp.broadcast_params()
    return ddp


def get_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """A linear warm-up, then a cosine; one step an iteration."""
    learning_rate = {
        "init_lr": 0.0,
        "max_lr": args.lr,
        "min_lr": args.lr / 10,
        "lr_decay_style": "cosine",
    }
    weight_decay = {
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": args.train_iters,
    }
    warmup, decay = args.train_iters // 10, args.train_iters
    return OptimizerParamScheduler(
        optimizer, lr_warmup_steps=warmup, lr_decay_steps=decay, **learning_rate, **weight_decay
    )


def get_batches(args: argparse.Namespace) -> Iterator[Tensor]:
    """Windows of the bytes of a file, others on each data-parallel rank."""
    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed + parallel_state.get_data_parallel_rank())
    while True:
        starts = torch.randint(
            text.numel() - args.seq_length, (args.micro_batch_size,), generator=generator
        )
        yield torch.stack([text[start : start + args.seq_length + 1] for start in starts]).long()


def forward_step(
    batches: Iterator[Tensor], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], object]]:
    windows = next(batches).to(next(model.parameters()).device)  # [micro batch, seq_length + 1]
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return model(tokens, positions, attention_mask=None, labels=labels), loss_func


def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # a copy: the schedule divides the loss in place


def train(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> None:
    scheduler = get_scheduler(args, optimizer)
    batches, forward_backward = get_batches(args), get_forward_backward_func()
    for iteration in range(1, args.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )
        success, grad_norm, _ = optimizer.step()
        if success:
            scheduler.step(increment=1)
        # the losses are on the last stage
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            loss = torch.stack([entry["loss"] for entry in losses]).mean()
            print(
                f"iteration {iteration:4} | loss {loss:.4f} | gradient norm {grad_norm:.4f}",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(__file__),
        help="a text to learn; this script's by default",
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    sizes = {
        "train-iters": 20,
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 64,
    }
    sizes |= {"micro-batch-size": 4, "num-microbatches": 2, "seed": 1234}
    sizes |= {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0"))
    )
    args = parser.parse_args()
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    return args


if __name__ == "__main__":
    main()
