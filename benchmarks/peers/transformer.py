"""A small transformer and its data: the same for all contestants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

_HEAD_WIDTH = 64


@dataclass(frozen=True)
class TrainSetting:
    """A model, its data, and a rank."""

    layers: int  # of the model
    hidden: int
    vocabulary: int
    sequence: int  # tokens of one sequence, and sequences of one rank's microbatch
    sequences: int
    bucket_size: int  # elements of a bucket, for those that take it
    rank: int  # of the data-parallel group, which is all ranks
    size: int
    device: str = "cpu"  # of this rank
    # whatever its params have, as processors without instructions for bf16 need it
    computes_in_fp32: bool = False

    @property
    def numel(self) -> int:
        """Elements of the model."""
        h = self.hidden
        return (
            self.layers * (12 * h * h + 13 * h)
            + 2 * self.vocabulary * h
            + self.vocabulary
            + self.sequence * h
            + 2 * h
        )


class Block(Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(hidden), LayerNorm(hidden)
        self.qkv, self.proj = Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.fc1, self.fc2 = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [sequences, sequence, hidden]
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, _HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class Transformer(Module):
    """Predicts the next token; nothing in it is tied."""

    def __init__(self, setting: TrainSetting) -> None:
        super().__init__()
        self.embedding = Embedding(setting.vocabulary, setting.hidden)
        self.position = Embedding(setting.sequence, setting.hidden)
        self.blocks = ModuleList(Block(setting.hidden) for _ in range(setting.layers))
        self.norm = LayerNorm(setting.hidden)
        self.head = Linear(setting.hidden, setting.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, fp32.

        Args:
            tokens: [sequences, sequence + 1]
        """
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(given) + self.position(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), wanted.flatten())


class InFp32(Module):
    """A module that computes with fp32 copies of its params."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        copies = {name: param.float() for name, param in self.module.named_parameters()}
        result: Tensor = functional_call(self.module, copies, (tokens,))
        return result


def transformer(setting: TrainSetting, dtype: torch.dtype = torch.bfloat16) -> Module:
    """The same values on all ranks and for all contestants: those of bf16, whatever the dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Transformer(setting)
        for embedding in (model.embedding, model.position):
            torch.nn.init.normal_(embedding.weight, std=0.02)
    model = model.bfloat16().to(dtype).to(setting.device)
    return InFp32(model) if setting.computes_in_fp32 else model


def batch(setting: TrainSetting, step: int) -> Tensor:
    """Tokens [sequences, sequence + 1] of this rank: sequences that count on in steps of one to
    four.

    There is something to learn in them, so the losses of a wrong update depart from those of a
    right one.
    """
    generator = torch.Generator().manual_seed(step * setting.size + setting.rank)
    start = torch.randint(setting.vocabulary, (setting.sequences, 1), generator=generator)
    stride = torch.randint(1, 5, (setting.sequences, 1), generator=generator)
    tokens = (start + stride * torch.arange(setting.sequence + 1)) % setting.vocabulary
    return tokens.to(setting.device)
