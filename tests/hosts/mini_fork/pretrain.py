"""A user's script: tiny GPT, made-up sentences."""

from functools import partial

import torch
from megatron import get_args, get_num_microbatches
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.model import GPTModel
from megatron.switches import DEVICE
from megatron.training import pretrain


def model_provider(pre_process=True, post_process=True):
    return GPTModel(pre_process=pre_process, post_process=post_process)


def sample(index):
    """Sentence `index` of the corpus, [sequence + 1]: a token, then always the same step on; some
    tokens are noise."""
    args = get_args()
    generator = torch.Generator().manual_seed(1_000_003 * args.seed + index)
    first, step = torch.randint(args.vocab_size, (2,), generator=generator)
    tokens = first + (step % 5) * torch.arange(args.seq_length + 1)
    noise = torch.randint(args.vocab_size, tokens.shape, generator=generator)
    return torch.where(
        torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens % args.vocab_size
    )


def train_data(iteration):
    """Microbatches of this rank from after that iteration on; the global batch does not depend on
    the ranks."""
    args = get_args()
    of_microbatch = args.micro_batch_size * args.data_parallel_size
    first = (
        iteration * args.global_batch_size + mpu.get_data_parallel_rank() * args.micro_batch_size
    )
    while True:
        for microbatch in range(get_num_microbatches()):
            begin = first + microbatch * of_microbatch
            yield torch.stack([sample(begin + i) for i in range(args.micro_batch_size)])
        first += args.global_batch_size


def get_batch(data_iterator):
    """Tokens, positions and labels, [batch, sequence] each; a sequence-parallel rank has its part
    of the sequence."""
    whole = next(data_iterator).to(DEVICE)
    tokens, labels = whole[:, :-1], whole[:, 1:]
    positions = torch.arange(tokens.shape[1], device=DEVICE).expand_as(tokens)
    if hasattr(mpu, "get_sequence_parallel_rank"):
        ranks, rank = mpu.get_sequence_parallel_world_size(), mpu.get_sequence_parallel_rank()
        return (part.chunk(ranks, dim=1)[rank].contiguous() for part in (tokens, positions, labels))
    return tokens.contiguous(), positions, labels.contiguous()


def loss_func(losses):
    loss = losses.float().mean()
    averaged = loss.detach().clone()
    group = getattr(mpu, "get_sequence_data_parallel_group", mpu.get_data_parallel_group)()
    torch.distributed.all_reduce(averaged, group=group)
    return loss, {"lm loss": averaged / torch.distributed.get_world_size(group=group)}


def forward_step(data_iterator, model):
    return model(*get_batch(data_iterator)), partial(loss_func)


if __name__ == "__main__":
    pretrain(train_data, model_provider, ModelType.encoder_or_decoder, forward_step)
    # Or a thread of gloo that asks for the interpreter while it goes down takes the process with it
    # (SIGABRT).
    torch.distributed.destroy_process_group()
