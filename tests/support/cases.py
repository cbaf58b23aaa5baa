"""What to train (`Case`) and what came of it (`Curve`), free of the host, so that the test process
never imports it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train: layout, precision, optimizer, and how the host's DDP communicates."""

    optimizer: Literal["host-plain", "host-distributed", "distopt"]
    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer_name: Literal["adam", "sgd", "muon", "dist_muon"] = "adam"
    steps: int = 20
    num_microbatches: int = 2
    lr: float = 3e-3
    weight_decay: float = 0.1
    decoupled_weight_decay: bool = True
    clip_grad: float = 1.0
    log_num_zeros: bool = False
    skip_threshold: float | None = None  # grad_norm_skip_threshold of the host, from 0.18 on
    # names of params with fp32 grads of their own, from 0.17 on
    fp32_accumulation: tuple[str, ...] = ()
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**12
    loss_scale_window: int = 1000
    hysteresis: int = 2
    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    # the host then chains two optimizers, one for the first chunk
    overlap_param_gather_with_step: bool = False
    average_in_collective: bool = False
    # elements; the host makes several buckets with overlap_grad_reduce only
    bucket_size: int | None = None
    tied: bool = True
    fp32_norms: bool = False  # the norms' weights stay fp32 in a 16-bit model
    frozen: tuple[str, ...] = ()  # parts of names of params that do not train
    num_experts: int = 0  # of each layer; each token goes to two
    shared_experts: bool = False
    ep: int = 1
    etp: int | None = None  # tensor parallelism of experts; that of the model where None
    cp: int = 1  # each rank has its part of the sequence and attends to that alone
    instances: int = 1  # of the distributed optimizer
    query_groups: int | None = None  # of heads that share keys and values
    gated: bool = False  # whether MLPs hold a gate beside the up projection
    mtp: int = 0  # layers that predict further tokens
    fields: tuple[
        tuple[str, Any], ...
    ] = ()  # of the host's OptimizerConfig, set behind its check for TransformerEngine

    @property
    def distributed(self) -> bool:
        return self.optimizer != "host-plain"

    @property
    def layers(self) -> int:
        """Two, or one for each virtual stage."""
        return max(2, self.pp * self.vp)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def groups(self) -> tuple[int | None, ...]:
        """What the host's process groups depend on."""
        return (self.tp, self.pp, self.vp, self.cp, self.ep, self.etp, self.instances)

    def of(self, **changes: Any) -> Case:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step returned. The loss is the mean over the global batch, the same number on every
    rank."""

    loss: float
    success: bool
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class Curve:
    """The steps of one training, and copies of this rank's model params, by chunk and name."""

    steps: tuple[Step, ...]
    first_params: dict[str, Tensor]  # after the first step that was not skipped
    params: dict[str, Tensor]  # after the last

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float | None]:
        return [step.grad_norm for step in self.steps]

    @property
    def num_zeros(self) -> list[float | None]:
        return [step.num_zeros for step in self.steps]

    @property
    def successes(self) -> list[bool]:
        return [step.success for step in self.steps]

    @property
    def loss_scales(self) -> list[float]:
        return [step.loss_scale for step in self.steps]


def train_all(rank: int, size: int, cases: dict[str, Case]) -> dict[str, Curve]:
    """Collective: trains the cases one after the other; what `run_ranks` is given. Equal layouts
    are best together."""
    from tests.support.gpt import train  # in the rank only: it imports the host and maps torch.cuda

    return {name: train(case) for name, case in cases.items()}
