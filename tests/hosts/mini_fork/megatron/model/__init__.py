"""The model and its wrappers."""

from .distributed import DistributedDataParallel
from .gpt_model import GPTModel
from .module import Float16Module, MegatronModule, param_is_not_shared

__all__ = [
    "DistributedDataParallel",
    "Float16Module",
    "GPTModel",
    "MegatronModule",
    "param_is_not_shared",
]
