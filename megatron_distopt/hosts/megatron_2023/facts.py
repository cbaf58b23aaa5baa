"""What the forks of 2023 look like: Megatron-LM 23.04 to 23.08, Megatron-DeepSpeed and their
children. Data only.

They share one contract and differ in where the optimizer state is kept: in *per-rank files*
(Megatron-LM 23.04), from the `state_dict()` of every rank, or in a *gathered file* (23.06, 23.08,
Megatron-DeepSpeed), which the first data-parallel rank gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.errors import ConfigError
from megatron_distopt.patch_points import PatchPoint

#: The factory that the training module imports by value.
PATCH_POINT = PatchPoint(
    "megatron.optimizer",
    "get_megatron_optimizer",
    ("model", "no_weight_decay_cond", "scale_lr_cond", "lr_mult"),
)
#: The parser, through which our flags enter and conflicts are found before anything is built.
PARSER = PatchPoint("megatron.arguments", "parse_args", ("extra_args_provider",))
#: What protecting.py and averaging.py in hosts/megatron/ replace: imported by value in the training
#: module, or defined in it.
LOAD_POINT = PatchPoint(
    "megatron.checkpointing", "load_checkpoint", ("model", "optimizer", "opt_param_scheduler")
)
STEP_POINT = PatchPoint(
    "megatron.training",
    "train_step",
    ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
)
EVALUATE_POINT = PatchPoint(
    "megatron.training", "evaluate", ("forward_step_func", "data_iterator", "model")
)

#: The script of a protected run.
SCRIPT = LOAD_POINT, STEP_POINT

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
#: Names that a branch of the factory uses and some forks forgot to import (Megatron-DeepSpeed:
#: --cpu-torch-adam).
MISSING_IMPORTS = ("torch",)

#: The flag, as `args` and the parser spell it; one child has underscores on the command line.
FLAG = "use_distributed_optimizer"


@dataclass(frozen=True)
class Conflict:
    """An option of the fork that cannot be combined with the flag."""

    option: str  # its name in `args`
    value: object  # the value that conflicts; True also stands for anything truthy
    text: str  # what is wrong, and what to type instead

    def applies_to(self, options: object) -> bool:
        found = getattr(options, self.option, None)
        return bool(found) if self.value is True else found is not None and found == self.value


_LOCAL = (
    "The run has --DDP-impl {}, and the buffers of the local one are sharded. Write --DDP-impl "
    "local."
)
_OFF = (
    "{0} cannot be combined with --use-distributed-optimizer. Drop {0}, or "
    "--use-distributed-optimizer."
)
NOT_CONTIGUOUS = Conflict(
    "use_contiguous_buffers_in_local_ddp",
    False,
    "The flag --no-contiguous-buffers-in-local-ddp is given, and the contiguous buffers are "
    "sharded. Drop --no-contiguous-buffers-in-local-ddp.",
)
CONFLICTS = (
    Conflict(
        "deepspeed",
        True,
        "--deepspeed cannot be combined with --use-distributed-optimizer, because the DeepSpeed "
        "engine owns gradients "
        "and optimizer. Drop --deepspeed to train with this optimizer, or drop "
        "--use-distributed-optimizer and write "
        '"zero_optimization": {"stage": 1} in the DeepSpeed config.',
    ),
    Conflict("DDP_impl", "torch", _LOCAL.format("torch")),
    Conflict("DDP_impl", "FSDP", _LOCAL.format("FSDP")),
    NOT_CONTIGUOUS,
    Conflict("use_fsdp", True, _OFF.format("--use-fsdp")),
    Conflict("use_torch_fsdp2", True, _OFF.format("--use-torch-fsdp2")),
)


def check_flags(args: object) -> None:
    """Refuses options that cannot be combined with the flag, where the parsed `args` have the
    flag."""
    for conflict in CONFLICTS:
        if getattr(args, FLAG, False) and conflict.applies_to(args):
            raise ConfigError(conflict.text)


def has_gates(args: object) -> bool:
    """Whether parsed arguments ask for MLPs whose first layer holds a gate as well."""
    return any(getattr(args, option, None) for option in ("swiglu", "glu_activation"))
