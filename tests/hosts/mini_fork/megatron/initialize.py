"""Arguments, process groups and seeds."""

import random

import numpy as np
import torch

from megatron.core import mpu

from .arguments import parse_args, validate_args
from .global_vars import get_args, set_global_variables
from .groups import add_expert_parallel_groups, add_sequence_parallel_groups
from .timers import Timers


def initialize_megatron(
    extra_args_provider=None, args_defaults=None, ignore_unknown_args=False, allow_no_cuda=False
):
    """Collective: sets the global variables and the process groups; `allow_no_cuda` is for the
    caller's comfort."""
    args = parse_args(extra_args_provider, ignore_unknown_args)
    validate_args(args, args_defaults or {})
    set_global_variables(args, Timers())
    _initialize_distributed()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def _initialize_distributed():
    args = get_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=args.rank, world_size=args.world_size)
    if mpu.model_parallel_is_initialized():
        return
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    if args.ds_sequence_parallel_size is not None:
        add_sequence_parallel_groups(args.ds_sequence_parallel_size)
    if args.experts:
        add_expert_parallel_groups(args.expert_model_parallel_size)
