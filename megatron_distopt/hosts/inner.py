"""The inner optimizer that a host built: whether ours can take its place, and its param groups."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

#: Classes that can be replaced by another implementation of the same formula, by package; a user's own class of the
#: same name is not meant.
_ADAMS = {
    "torch.optim": ("Adam", "AdamW"),
    "apex.optimizers": ("FusedAdam",),
    "deepspeed.ops.adam": ("FusedAdam", "DeepSpeedCPUAdam"),
    "transformer_engine.pytorch.optimizers": ("FusedAdam",),
}
_SGDS = {"torch.optim": ("SGD",), "apex.optimizers": ("FusedSGD",)}


def is_adam(optimizer: Optimizer) -> bool:
    """Whether an implementation of Adam can take its place."""
    return _is_of(optimizer, _ADAMS)


def is_sgd(optimizer: Optimizer) -> bool:
    """Whether torch's SGD can take its place."""
    return _is_of(optimizer, _SGDS)


def _is_of(optimizer: Optimizer, classes: Mapping[str, Sequence[str]]) -> bool:
    """Whether it is of one of these classes: what a package exports, or calls so in one of its files.

    One that inherits from them is another.
    """
    kind = type(optimizer)
    for module, names in classes.items():
        package = "torch.optim" if module == "torch.optim" else module.partition(".")[0]
        is_exported = any(kind is getattr(sys.modules.get(module), name, None) for name in names)
        if is_exported or (kind.__name__ in names and f"{kind.__module__}.".startswith(f"{package}.")):
            return True
    return False


#: What torch's optimizers take from a param group; what else a host's own inner optimizer wrote there is its own.
_HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum")


#: Those that a class of another name has in another form: `eps` of Adafactor is a pair. Where a group has no value of
#: its own, the class gets that of the config as far as it can take it.
_IN_OTHER_FORMS = ("betas", "eps", "momentum")


def groups_of(optimizer: Optimizer, *, is_for_other_class: bool = False) -> list[dict[str, Any]]:
    """A host's param groups without what its own inner optimizer added (its "fused" and "foreach" are not ours).

    Args:
        optimizer: of the host.
        is_for_other_class: whether the groups are for a class that a user named, and not for another implementation.
    """
    added = set(optimizer.defaults) - set(_HYPERPARAMETERS)
    usual = {key: optimizer.defaults.get(key) for key in _IN_OTHER_FORMS if is_for_other_class}
    return [
        {key: value for key, value in group.items() if key not in added and not (key in usual and value == usual[key])}
        for group in optimizer.param_groups
    ]


#: Options of a class that say how it computes, and not what.
_ABOUT_KERNELS = ("foreach", "fused", "capturable", "set_grad_none", "master_weights", "fp32_optimizer_states")


def unserved_options(optimizer: Optimizer) -> dict[str, Any]:
    """Options of a host's own inner optimizer that change its arithmetic, and that our choice for it does not have.

    Args:
        optimizer: of torch, apex, DeepSpeed or TransformerEngine.

    Returns:
        By name: values that differ from what its class has by default, as nesterov or amsgrad.
    """
    parameters = inspect.signature(type(optimizer)).parameters
    usual = {name: each.default for name, each in parameters.items() if name in optimizer.defaults}
    for name in (*_HYPERPARAMETERS, *_ABOUT_KERNELS, "decoupled_weight_decay"):
        usual.pop(name, None)
    groups = [optimizer.defaults, *optimizer.param_groups]
    return {name: group[name] for group in groups for name in usual if group.get(name, usual[name]) != usual[name]}
