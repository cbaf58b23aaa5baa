"""What the forks of 2023 look like: Megatron-LM 23.04 to 23.08, Megatron-DeepSpeed and their
children. Data only.

They have the same interface and differ in where they save the optimizer state. Megatron-LM 23.04
writes *per-rank files* from the `state_dict()` of every rank. Megatron-LM 23.06 and 23.08 and
Megatron-DeepSpeed write a *gathered file*, which the first data-parallel rank gathers.
"""

from __future__ import annotations

from megatron_distopt.hosts.megatron.refused import Refused, check_refused
from megatron_distopt.patch_points import PatchPoint

#: The factory that the training module imports by value.
PATCH_POINT = PatchPoint(
    "megatron.optimizer",
    "get_megatron_optimizer",
    ("model", "no_weight_decay_cond", "scale_lr_cond", "lr_mult"),
)
#: The parser, to which our flags are added. Conflicts are found here, before anything is built.
PARSER = PatchPoint("megatron.arguments", "parse_args", ("extra_args_provider",))
#: Functions that protecting.py and averaging.py in hosts/megatron/ replace. The training module
#: imports them by value or defines them.
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

#: The name of the class that the factory builds, and the arguments that it gives to it.
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
#: A method that the class has only in forks with a gathered file.
GATHERS_STATE = "save_parameter_state"
#: Modules that the factory uses and some forks forgot to import (Megatron-DeepSpeed with
#: --cpu-torch-adam).
MISSING_IMPORTS = ("torch",)

#: The flag as `args` and the parser spell it. One fork has underscores on the command line.
FLAG = "use_distributed_optimizer"


_WITHOUT = "or --use-distributed-optimizer"
#: Arguments of the fork that are refused.
REFUSED = (
    Refused(
        "deepspeed",
        "The DeepSpeed engine has an optimizer of its own. Drop --deepspeed to train with this "
        "optimizer, or drop --use-distributed-optimizer and write "
        '"zero_optimization": {"stage": 1} in the DeepSpeed config',
    ),
    Refused("DDP_impl", "Write --DDP-impl local", ("torch", "FSDP")),
    Refused(
        "use_contiguous_buffers_in_local_ddp", "Drop --no-contiguous-buffers-in-local-ddp", (False,)
    ),
    Refused("use_fsdp", f"Drop --use-fsdp, {_WITHOUT}"),
    Refused("use_torch_fsdp2", f"Drop --use-torch-fsdp2, {_WITHOUT}"),
)


def check_flags(args: object) -> None:
    """If the parsed `args` have the flag, refuses options that cannot be combined with it."""
    if getattr(args, FLAG, False):
        check_refused(args, REFUSED)


def has_gates(args: object) -> bool:
    """Whether parsed arguments ask for MLPs whose first layer also holds a gate."""
    return any(getattr(args, option, None) for option in ("swiglu", "glu_activation"))
