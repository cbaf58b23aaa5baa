"""Let the trained model write."""

import torch
from torch import Tensor

from byte_gpt.trainer import Trainer

PROMPT = "def "
# bytes that it reads to write the next: half of what it was trained on, at half the time
CONTEXT = 128


@torch.no_grad()
def write(trainer: Trainer, *, temperature: float = 0.8) -> str:
    """What follows `PROMPT`, byte by byte, each drawn from what the model expects. Every rank can
    write alone."""
    # without DistributedDataParallel, whose forward may wait for other ranks
    module = trainer.model.module
    generator = torch.Generator().manual_seed(trainer.settings.seed)
    written = list(PROMPT.encode())
    for _ in range(trainer.settings.sample_nbytes):
        logits = _next_byte_logits(module, torch.tensor([written[-CONTEXT:]]))
        shares = torch.softmax(logits / temperature, dim=-1)
        written.append(int(torch.multinomial(shares, 1, generator=generator)))
    return _printable(bytes(written).decode(errors="replace"))


def _printable(text: str) -> str:
    """An untrained model writes any byte, and some of them command a terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )


def _next_byte_logits(module: torch.nn.Module, tokens: Tensor) -> Tensor:
    device = next(module.parameters()).device
    positions = torch.arange(tokens.size(1), device=device).unsqueeze(0)
    logits: Tensor = module(tokens.to(device), positions, None)  # [1, length, 256]
    return logits[0, -1].float().cpu()
