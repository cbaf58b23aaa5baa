"""The inner optimizer in a Megatron of any generation: what takes the place of the host's own, and
Muon.

Muon updates the two-dimensional params of numbered layers; embeddings, output layers and all else
stay with Adam. A param group with a key `use_muon` says so itself.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import digits
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import MatrixCut, MatrixSpec, Placement
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.owners.muon_options import (
    MuonOptions,
    TorchMuonOptions,
    is_muons_group,
)
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, choose_muon, matrix_of

#: Classes that can be replaced by another implementation of the same formula, by package; a user's
#: own class of the same name is not meant.
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
    """Whether it is what a package exports, or calls so in one of its files; a class that inherits
    from it is not."""
    kind = type(optimizer)
    for module, names in classes.items():
        package = "torch.optim" if module == "torch.optim" else module.partition(".")[0]
        is_exported = any(kind is getattr(sys.modules.get(module), name, None) for name in names)
        if is_exported or (
            kind.__name__ in names and f"{kind.__module__}.".startswith(f"{package}.")
        ):
            return True
    return False


#: What torch's optimizers take from a param group; what else a host's own inner optimizer wrote
#: there is its own.
_HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum")
#: Those that a class of another name has in another form: `eps` of Adafactor is a pair. Where a
#: group has no value of its own, the class gets that of the config as far as it can take it.
_IN_OTHER_FORMS = ("betas", "eps", "momentum")
#: Options of a class that say how it computes, and not what.
_ABOUT_KERNELS = (
    "foreach",
    "fused",
    "capturable",
    "set_grad_none",
    "master_weights",
    "fp32_optimizer_states",
)


def groups_of(optimizer: Optimizer, *, is_for_other_class: bool = False) -> list[dict[str, Any]]:
    """A host's param groups without what its own inner optimizer added (its "fused" and "foreach"
    are not ours).

    `is_for_other_class`: for a class that a user named, and not for another implementation of the
    same.
    """
    added = set(optimizer.defaults) - set(_HYPERPARAMETERS)
    usual = {key: optimizer.defaults.get(key) for key in _IN_OTHER_FORMS if is_for_other_class}
    return [
        {
            key: value
            for key, value in group.items()
            if key not in added and not (key in usual and value == usual[key])
        }
        for group in optimizer.param_groups
    ]


def unserved_options(optimizer: Optimizer) -> dict[str, Any]:
    """Options of a host's own Adam or SGD that change its arithmetic and that our choice for it
    does not have, by name.

    These are values that differ from what its class has by default, as nesterov or amsgrad.
    """
    parameters = inspect.signature(type(optimizer)).parameters
    usual = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name in optimizer.defaults
    }
    for name in (*_HYPERPARAMETERS, *_ABOUT_KERNELS, "decoupled_weight_decay"):
        usual.pop(name, None)
    groups = [optimizer.defaults, *optimizer.param_groups]
    return {
        name: group[name]
        for group in groups
        for name in usual
        if group.get(name, usual[name]) != usual[name]
    }


#: What the option `optimizer` calls it.
MUON = "muon"

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
#: A key of a param group in which a host or its user says it itself.
_MARK = "use_muon"
#: Options of Adam, and not of Muon.
_NOT_MUONS = ("betas", "eps")


@dataclass(frozen=True)
class MuonRequest:
    """What a run wants of Muon."""

    options: MuonOptions  # with the formula; learning rate and decay come from param groups
    split: str  # "none", "qkv" or "all", see the option `muon_split`
    tp_mode: str  # see the option `muon_tp_mode`
    is_hosts: bool = False  # the host's own flags ask for it

    @classmethod
    def of(cls, config: DistOptConfig) -> MuonRequest:
        """torch's formula with the options of this package."""
        options = TorchMuonOptions(
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr,
        )
        return cls(options, config.muon_split, config.muon_tp_mode)


@dataclass(frozen=True)
class FusedWeights:
    """Which weights of a model are several matrices: the ends of their names, and rows of one group
    of heads."""

    qkv: str
    qkv_rows: tuple[int, ...]
    kv: str
    kv_rows: tuple[int, ...]
    gated: str
    is_gated: bool  # the model has gates, and gate and up projection are halves of this weight

    def rows_of(self, name: str, rows: int, request: MuonRequest) -> tuple[int, ...]:
        """Rows of the parts of a weight; none where it is one matrix."""
        if request.split != "none" and name.endswith(self.qkv):
            # A host takes another shape for one matrix.
            return () if request.is_hosts and rows % sum(self.qkv_rows) else self.qkv_rows
        if request.split != "none" and name.endswith(self.kv) and not request.is_hosts:
            return self.kv_rows
        if request.split == "all" and name.rstrip(digits).endswith(self.gated) and self.is_gated:
            return (rows // 2, rows // 2)
        return ()


def matrices_of(
    name: str, param: Tensor, placement: Placement, request: MuonRequest, fused: FusedWeights
) -> MatrixSpec:
    """The matrices of a param of Muon's, of which this rank may have a part."""
    spec = matrix_of(name, param)
    sizes = fused.rows_of(name, spec.rows, request)
    if sizes and spec.rows % sum(sizes):
        raise ConfigError(
            f"Fused weight {name!r} has {spec.rows} rows, which is no multiple of the {sum(sizes)} "
            f"that its parts {sizes} have together. Write muon_split=none."
        )
    cut = None
    if placement.dim is not None and placement.size > 1 and request.tp_mode != "blockwise":
        # Every part of a fused weight is cut by itself, in one piece.
        stride = 1 if sizes else placement.stride
        cut = MatrixCut(placement.dim, placement.size, stride, request.tp_mode == "duplicated")
    return MatrixSpec(spec.rows, spec.cols, 0, sizes, spec.rows // sum(sizes) if sizes else 1, cut)


def is_matrix_of_layer(name: str, param: Tensor) -> bool:
    """Whether Muon updates a param of that name where nobody says otherwise."""
    return _IN_LAYER.search(name) is not None and param.dim() == 2


def with_muon_groups(
    groups: Iterable[Mapping[str, Any]],
    is_for_muon: Callable[[Parameter], bool],
    options: MuonOptions,
) -> list[dict[str, Any]]:
    """A host's param groups, each cut into one for Muon and one for Adam where it has params of
    both kinds.

    `is_for_muon` is asked about params in groups that do not say it themselves.
    """
    cut: list[dict[str, Any]] = []
    for group in groups:
        kept = {key: value for key, value in group.items() if key != "params"}
        for_muon, rest = list[Parameter](), list[Parameter]()
        for param in group["params"]:
            (for_muon if group.get(_MARK, is_for_muon(param)) else rest).append(param)
        if rest or not for_muon:
            cut.append({"params": rest, **kept})
        if for_muon:
            kept = {key: value for key, value in kept.items() if key not in _NOT_MUONS}
            cut.append({"params": for_muon, **vars(options), **kept})
    return cut


def muon_params(groups: Iterable[Mapping[str, Any]]) -> frozenset[Parameter]:
    return frozenset(
        param for group in groups if is_muons_group(group) for param in group["params"]
    )


def check_is_adam(base: Optimizer) -> None:
    """Refuses a host's own optimizer whose place Muon and an Adam cannot take."""
    if not is_adam(base):
        raise unsupported_base(type(base).__name__)


def unsupported_base(name: str) -> ConfigError:
    return ConfigError(
        f"optimizer is muon, and the host's is {name}. Muon leaves other params to an Adam. Write "
        "--optimizer adam, whose place is taken, or drop --distopt-optimizer muon."
    )


def config_for_adam(config: DistOptConfig) -> DistOptConfig:
    """The options of the optimizer that updates what is not Muon's."""
    return replace(config, optimizer="adam")


def muon_and_adam(
    rest: InnerChoice, matrices: Matrices, config: DistOptConfig, request: MuonRequest
) -> InnerChoice:
    """Muon for its param groups, and the Adam `rest` for the others."""
    why = (f"{len(matrices.specs)} matrices of this rank are Muon's",)
    return choose_muon(rest, matrices, config, why, source=request.options.source)
