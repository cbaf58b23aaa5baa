"""What the forks of 2023 look like: Megatron-LM 23.04 to 23.08, Megatron-DeepSpeed and their children. Data only.

They share one contract and differ in where the optimizer state is kept: in *per-rank files* (Megatron-LM 23.04), from
the `state_dict()` of every rank, or in a *gathered file* (23.06, 23.08, Megatron-DeepSpeed), which the first
data-parallel rank gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.patch_points import PatchPoint

#: The factory that the training module imports by value.
PATCH_POINT = PatchPoint(
    "megatron.optimizer", "get_megatron_optimizer", ("model", "no_weight_decay_cond", "scale_lr_cond", "lr_mult")
)
#: The parser, through which our flags enter and conflicts are found before anything is built.
PARSER = PatchPoint("megatron.arguments", "parse_args", ("extra_args_provider",))

#: What the factory calls the class that it builds, and what it gives to the constructor.
CLASS = "DistributedOptimizer"
CLASS_PARAMETERS = (
    "optimizer",
    "clip_grad",
    "log_num_zeros_in_grad",
    "params_have_main_grad",
    "use_contiguous_buffers_in_local_ddp",
    "fp16",
    "bf16",
    "params_dtype",
    "grad_scaler",
    "models",
)
#: The class has this method with a gathered file and not with per-rank files.
GATHERS_STATE = "save_parameter_state"
#: Names that a branch of the factory uses and some forks forgot to import (Megatron-DeepSpeed: --cpu-torch-adam).
MISSING_IMPORTS = ("torch",)

#: The flag, as `args` and the parser spell it; one child has underscores on the command line.
FLAG = "use_distributed_optimizer"


@dataclass(frozen=True)
class Conflict:
    """An option that cannot be combined with the flag."""

    option: str  # its name in `args`
    value: object  # the value that conflicts; True also stands for anything truthy
    got: str  # how the user wrote it
    rule: str  # what must be
    remedy: str  # what to type instead

    def applies_to(self, options: object) -> bool:
        """Whether parsed arguments have it."""
        found = getattr(options, self.option, None)
        return bool(found) if self.value is True else found is not None and found == self.value

    def refusal(self) -> str:
        """What is said where it applies."""
        return refusal("arguments", self.got, self.rule, self.remedy)


CONFLICTS = (
    Conflict(
        "deepspeed",
        True,
        "--deepspeed together with --use-distributed-optimizer",
        "be one of the two, because the DeepSpeed engine owns gradients and optimizer",
        "Drop --deepspeed to train with this optimizer, or drop --use-distributed-optimizer and write "
        '"zero_optimization": {"stage": 1} in the DeepSpeed config',
    ),
    Conflict("DDP_impl", "torch", "--DDP-impl torch", "be local, whose buffers are sharded", "Write --DDP-impl local"),
    Conflict("DDP_impl", "FSDP", "--DDP-impl FSDP", "be local, whose buffers are sharded", "Write --DDP-impl local"),
    Conflict(
        "use_contiguous_buffers_in_local_ddp",
        False,
        "--no-contiguous-buffers-in-local-ddp",
        "be left out, because the contiguous buffers are sharded",
        "Drop --no-contiguous-buffers-in-local-ddp",
    ),
    Conflict("use_fsdp", True, "--use-fsdp", "be off", "Drop --use-fsdp, or --use-distributed-optimizer"),
    Conflict(
        "use_torch_fsdp2", True, "--use-torch-fsdp2", "be off", "Drop --use-torch-fsdp2, or --use-distributed-optimizer"
    ),
)


def check_flags(args: object) -> None:
    """Refuses options that cannot be combined with the flag, where the flag is set.

    Args:
        args: parsed.

    Raises:
        ConfigError
    """
    for conflict in CONFLICTS:
        if getattr(args, FLAG, False) and conflict.applies_to(args):
            raise ConfigError(conflict.refusal())


#: Options under which the first layer of an MLP holds a gate as well.
_GATES = ("swiglu", "glu_activation")


def has_gates(args: object) -> bool:
    """Whether parsed arguments ask for MLPs with a gate."""
    return any(getattr(args, option, None) for option in _GATES)


@dataclass(frozen=True)
class StepTimers:
    """The names under which the fork's log expects the phases of a step."""

    layernorm: str = "layernorm-grads-all-reduce"
    embedding: str = "embedding-grads-all-reduce"
    reduce_scatter: str = "grads-reduce-scatter"
    attach: str = "optimizer-copy-to-main-grad"
    measure: str = "optimizer-unscale-and-check-inf"
    clip: str = "optimizer-clip-main-grad"
    zeros: str = "optimizer-count-zeros"
    inner: str = "optimizer-inner-step"
    write: str = "optimizer-copy-main-to-model-params"
    gather: str = "params-all-gather"


@dataclass(frozen=True)
class HostRange:
    """A span with the attribute names that the fork's tools ask for."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.end - self.start

    def __len__(self) -> int:
        return self.size
