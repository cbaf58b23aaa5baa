"""One rank of a subject of quality.py: the quickstart's model in plain torch, on ranks each of
which is a node.

    torchrun --nproc-per-node 2 benchmarks/peers/reduced_training.py --optimizer Adam
        --iterations 8 --output FOLDER --reductions fp32 bf16

Model, text and learning rates are those of the quickstart, but windows are short, batches small,
and params and Muon's products fp32, so that nothing but gradients is rounded and processors without
instructions for bf16 can be used. megatron-core's optimizer communicates by itself; `distribute`
takes its place.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_on_cpu
import torch
import torch.distributed as dist
from byte_gpt.data import Text, load, training_batches, validation_batches
from byte_gpt.model import token_losses, transformer_config
from byte_gpt.settings import Precision, Settings
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import AdamW, Muon, Optimizer

from megatron_distopt import distribute
from megatron_distopt.optimizer.owners.muon_options import TorchMuonOptions

#: Windows of text of a rank and iteration, and bytes of each.
_BATCH, _LENGTH = 2, 128


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    megatron_on_cpu.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    settings = Settings(
        iterations=args.iterations,
        seed=args.seed,
        precision=Precision.FP32,
        micro_batch_size=_BATCH,
        seq_length=_LENGTH,
        validation_windows=128,
    )
    text = load(None, seq_length=settings.seq_length)
    for reduction in args.reductions:
        found = json.dumps(training(args.optimizer, reduction, text, settings))
        if dist.get_rank() == 0:
            with (args.output / "trainings.jsonl").open("a") as file:
                file.write(found + "\n")
    dist.destroy_process_group()


def training(optimizer_name: str, reduction: str, text: Text, settings: Settings) -> dict[str, Any]:
    """Collective: what quality.py keeps of a training."""
    model = model_of(settings)
    optimizer = distribute(
        model,
        optimizers_of(optimizer_name, model, settings),
        clip_grad=settings.clip_grad,
        shared_memory=False,
        reduce_dtype={"fp32": "float32", "bf16": "bfloat16"}[reduction],
    )
    losses = [each.item() for each in train(model, optimizer, text, settings)]
    found = {
        "validation": validation(model, text, settings),
        "state_nbytes": _state_nbytes(optimizer),
        "losses": losses,
    }
    optimizer.release()
    return found


def model_of(settings: Settings) -> Module:
    """The quickstart's, without megatron-core's buffers."""
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed, force_reset_rng=True)
    torch.manual_seed(settings.seed)
    model: Module = GPTModel(
        config=transformer_config(settings),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=settings.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    return model


def optimizers_of(name: str, model: Module, settings: Settings) -> list[Optimizer]:
    """AdamW over everything, or Muon over the matrices of the layers; only matrices are decayed."""
    matrices = dict[str, Parameter](
        (name, param) for name, param in model.named_parameters() if param.dim() > 1
    )
    whole = (
        [param for name, param in matrices.items() if name.startswith("decoder.")]
        if name == "Muon"
        else []
    )
    small = [param for param in model.parameters() if param.dim() < 2]
    rest = [param for param in matrices.values() if not any(param is other for other in whole)]
    groups = [
        {"params": rest, "weight_decay": settings.weight_decay},
        {"params": small, "weight_decay": 0.0},
    ]
    adam = AdamW(groups, lr=settings.max_lr, betas=(0.9, 0.95), fused=True)
    if not whole:
        return [adam]
    decay, TorchMuonOptions.travel_dtype = settings.weight_decay, torch.float32
    return [
        Muon(whole, lr=settings.max_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        adam,
    ]


def train(model: Module, optimizer: Optimizer, text: Text, settings: Settings) -> Iterator[Tensor]:
    """Collective: yields the loss of every iteration, the mean of the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = training_batches(text, seed=settings.seed, rank=rank, shape=settings.batch_shape)
    for iteration in range(settings.iterations):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(iteration, settings)
        optimizer.zero_grad()
        loss = token_losses(model, next(batches)).mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        yield mean


def _learning_rate(iteration: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine."""
    warm_up, end = settings.warmup_iterations, settings.iterations
    if iteration < warm_up:
        return settings.max_lr * iteration / warm_up
    part = (iteration - warm_up) / (end - warm_up)
    return (
        settings.min_lr + (settings.max_lr - settings.min_lr) * (1 + math.cos(math.pi * part)) / 2
    )


@torch.no_grad()
def validation(model: Module, text: Text, settings: Settings) -> float:
    """Collective: bits a byte of text that was not trained on."""
    total = torch.zeros(2, dtype=torch.float64)  # nats, bytes
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), settings.batch_shape
    for batch in validation_batches(
        text, windows=settings.validation_windows, rank=rank, ranks=ranks, shape=shape
    ):
        losses = token_losses(model, batch)
        total += torch.tensor([losses.double().sum().item(), losses.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1]) / math.log(2)


def _state_nbytes(optimizer: Any) -> int:
    return int(optimizer.memory.main_nbytes + optimizer.memory.moment_nbytes)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("Adam", "Muon"), default="Adam")
    parser.add_argument("--reductions", nargs="+", default=["fp32"])
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
