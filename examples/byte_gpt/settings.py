"""What is trained, and for how long. choose.py chooses precision, iterations and batch where nobody
gave them."""

from dataclasses import dataclass
from enum import Enum

import torch


class Precision(Enum):
    """The dtype of the model params. Main params and moments are fp32 in every case."""

    FP32 = torch.float32
    BF16 = torch.bfloat16
    # its loss scale grows and backs off: fp16's small gradients would vanish without one
    FP16 = torch.float16

    @classmethod
    def parse(cls, name: str) -> "Precision":
        return cls[name.upper()]


class Source(Enum):
    """Whose distributed optimizer trains."""

    OURS = "megatron_distopt"
    HOST = "megatron-core"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Lengths are in bytes of text, which are the model's tokens."""

    iterations: int = 480
    precision: Precision = Precision.BF16
    use_distributed_optimizer: bool = True
    seed: int = 1234
    num_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    seq_length: int = 256
    micro_batch_size: int = 8
    num_microbatches: int = 1
    max_lr: float = 2e-3
    min_lr: float = 1e-4
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    validation_windows: int = 256
    sample_nbytes: int = 400  # what the trained model writes at the end

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(
                f"Invalid iterations: {self.iterations}. Must be at least 1. Write --iterations "
                "480."
            )

    @property
    def warmup_iterations(self) -> int:
        """A tenth of the run at most: the scheduler refuses a warm-up that is as long as the
        whole."""
        return min(40, self.iterations // 10)

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.micro_batch_size, self.seq_length

    @property
    def tokens_per_rank(self) -> int:
        """What one rank reads in one iteration."""
        return self.num_microbatches * self.micro_batch_size * self.seq_length
