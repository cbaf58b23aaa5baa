"""Small source trees that look like forks to somebody who reads them; those of 2023 can be
imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core

FACTORY_OF_2023 = """\
from .distrib_optimizer import DistributedOptimizer


def get_megatron_optimizer(model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    return DistributedOptimizer(model)
"""
_CORE_FACTORY = """\
from .distrib_optimizer import DistributedOptimizer


class ChainedOptimizer:
    pass


def get_megatron_optimizer(config, model_chunks, use_gloo_process_groups=True):
    return DistributedOptimizer(config)


AFTER = get_megatron_optimizer
"""
_OPTIMIZER = "class MegatronOptimizer:\n    pass\n"
_NOT_SHARED = "def param_is_not_shared(param):\n    return True\n"
_PARSER = """\
def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    return parser


def _add_distributed_args(parser):
    group = parser.add_argument_group()
    group.add_argument('--use-distributed-optimizer', action='store_true')
    group.add_argument('--DDP-impl', default='local')
    group.add_argument('--no-contiguous-buffers-in-local-ddp', action='store_false',
                       dest='use_contiguous_buffers_in_local_ddp')
"""
_GROUPS = "def get_data_parallel_group():\n    return None\n"
_TRAINING = (
    "from megatron.optimizer import get_megatron_optimizer\n\n\ndef train():\n    "
    "get_megatron_optimizer([])\n"
)


def write_tree(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return folder


def _class(parameters: tuple[str, ...], methods: str = "") -> str:
    return (
        f"class DistributedOptimizer:\n    def __init__(self, {', '.join(parameters)}):\n        "
        f"pass\n{methods}"
    )


def per_rank_2023(folder: Path) -> Path:
    return write_tree(
        folder,
        {
            "megatron/__init__.py": "def get_args():\n    return None\n",
            "megatron/optimizer/__init__.py": FACTORY_OF_2023,
            "megatron/optimizer/optimizer.py": _OPTIMIZER,
            "megatron/model/__init__.py": "",
            "megatron/model/module.py": _NOT_SHARED,
            "megatron/core/__init__.py": "from . import parallel_state as mpu\n",
            "megatron/core/tensor_parallel.py": "",
            "megatron/optimizer/distrib_optimizer.py": _class(megatron_2023.CLASS_PARAMETERS),
            "megatron/arguments.py": _PARSER,
            "megatron/initialize.py": "from .arguments import (validate_args,\n    parse_args)\n",
            "megatron/training.py": _TRAINING,
            "megatron/core/parallel_state.py": _GROUPS,
            "pretrain_gpt.py": "import torch\n",
        },
    )


def gathered_2023(folder: Path) -> Path:
    method = "\n    def save_parameter_state(self, filename):\n        pass\n"
    text = _class(megatron_2023.CLASS_PARAMETERS, method)
    groups = _GROUPS + "\n\ndef get_data_parallel_group_gloo():\n    return None\n"
    return write_tree(
        per_rank_2023(folder),
        {
            "megatron/optimizer/distrib_optimizer.py": text,
            "megatron/core/parallel_state.py": groups,
        },
    )


def core(folder: Path) -> Path:
    """Without megatron/__init__.py, as the package from PyPI."""
    return write_tree(
        folder,
        {
            "megatron/core/__init__.py": "",
            "megatron/core/optimizer/__init__.py": _CORE_FACTORY,
            "megatron/core/optimizer/distrib_optimizer.py": _class(megatron_core.CLASS_PARAMETERS),
        },
    )


def early_core(folder: Path) -> Path:
    return write_tree(gathered_2023(folder), {"megatron/core/distributed/__init__.py": ""})


def pre_distopt(folder: Path) -> Path:
    return write_tree(
        folder,
        {
            "megatron/__init__.py": "",
            "megatron/optimizer/__init__.py": "def get_megatron_optimizer(model):\n    pass\n",
            "megatron/mpu/__init__.py": "",
        },
    )


def neox(folder: Path) -> Path:
    return write_tree(
        folder, {"megatron/__init__.py": "", "megatron/neox_arguments/__init__.py": ""}
    )
