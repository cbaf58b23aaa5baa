"""Which weights of a Megatron Muon updates, and with which options.

Muon updates the two-dimensional params of numbered layers. Adam updates embeddings, output layers
and everything else. A param group with a key `use_muon` decides for its own params.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import digits
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron.inner_optimizers import groups_of, is_adam
from megatron_distopt.layout import MatrixCut, MatrixSpec, Placement
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.owners.muon_options import MuonOptions, TorchMuonOptions
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, choose_muon, matrix_of

#: What the option `optimizer` calls it.
MUON = "muon"
_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
#: With this key in a param group, a host or its user decides whether Muon updates its params.
_MARK = "use_muon"
#: Options of Adam that Muon does not have.
_NOT_MUONS = ("betas", "eps")


@dataclass(frozen=True)
class MuonRequest:
    """How a run uses Muon."""

    options: MuonOptions  # formula and options; learning rate and decay come from param groups
    split: str  # "none", "qkv" or "all", see the option `muon_split`
    tp_mode: str  # see the option `muon_tp_mode`
    is_hosts: bool = False  # whether the host's own flags ask for Muon

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
    """Which weights of a model are several matrices: the ends of their names, and the rows of one
    group of heads."""

    qkv: str
    qkv_rows: tuple[int, ...]
    kv: str
    kv_rows: tuple[int, ...]
    gated: str
    is_gated: bool  # the model has gates, and gate and up projection are halves of this weight

    def rows_of(self, name: str, rows: int, request: MuonRequest) -> tuple[int, ...]:
        """The rows of each part of a weight; empty if it is one matrix."""
        if request.split == "none":
            return ()
        if name.endswith(self.qkv):
            # The host's Muon treats a weight of any other shape as one matrix.
            is_one = request.is_hosts and rows % sum(self.qkv_rows)
            return () if is_one else self.qkv_rows
        if name.endswith(self.kv) and not request.is_hosts:
            return self.kv_rows
        is_gated = self.is_gated and name.rstrip(digits).endswith(self.gated)
        return (rows // 2, rows // 2) if is_gated and request.split == "all" else ()


def matrices_of(
    name: str, param: Tensor, placement: Placement, request: MuonRequest, fused: FusedWeights
) -> MatrixSpec:
    """The matrices of a param that Muon updates; this rank may have only a part of them."""
    spec = matrix_of(name, param)
    sizes = fused.rows_of(name, spec.rows, request)
    if sizes and spec.rows % sum(sizes):
        raise ConfigError(
            f"Fused weight {name!r} has {spec.rows} rows, which cannot be split into parts of "
            f"{sizes} rows, {sum(sizes)} together. Write muon_split=none."
        )
    cut = None
    if placement.dim is not None and placement.size > 1 and request.tp_mode != "blockwise":
        # Tensor parallelism cuts every part of a fused weight by itself, in one piece.
        stride = 1 if sizes else placement.stride
        cut = MatrixCut(placement.dim, placement.size, stride, request.tp_mode == "duplicated")
    return MatrixSpec(spec.rows, spec.cols, 0, sizes, spec.rows // sum(sizes) if sizes else 1, cut)


def is_matrix_of_layer(name: str, param: Tensor) -> bool:
    """Whether Muon updates a param, if its param group does not decide."""
    return _IN_LAYER.search(name) is not None and param.dim() == 2


def check_is_adam(name: str, *, is_adam: bool) -> None:
    """Refuses an optimizer of the host that is not an Adam: Muon and an Adam cannot replace it."""
    if not is_adam:
        raise ConfigError(
            f"The option optimizer is 'muon', but the host's optimizer is {name}. An Adam has to "
            "update the params that Muon does not. Write --optimizer adam, or drop "
            "--distopt-optimizer muon."
        )


def with_muon_groups(
    base: Optimizer,
    named: Mapping[str, Parameter],
    is_for_muon: Callable[[str, Parameter], bool],
    options: MuonOptions,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Splits each param group of a host's Adam that has params for both into one for Muon and one
    for Adam. Returns the groups and the names of the params that Muon updates.

    `is_for_muon` decides for params in groups without a key `use_muon`.
    """
    check_is_adam(type(base).__name__, is_adam=is_adam(base))
    name_of = {param: name for name, param in named.items()}
    cut, names = list[dict[str, Any]](), list[str]()
    for group in groups_of(base):
        kept = {key: value for key, value in group.items() if key != "params"}
        for_muon, rest = list[Parameter](), list[Parameter]()
        for param in group["params"]:
            is_muons = group.get(_MARK, is_for_muon(name_of.get(param, ""), param))
            (for_muon if is_muons else rest).append(param)
        if rest or not for_muon:
            cut.append({"params": rest, **kept})
        if for_muon:
            kept = {key: value for key, value in kept.items() if key not in _NOT_MUONS}
            cut.append({"params": for_muon, **vars(options), **kept})
            names += [name_of[param] for param in for_muon if param in name_of]
    return cut, names


def muon_and_adam(
    rest: InnerChoice, matrices: Matrices, config: DistOptConfig, request: MuonRequest
) -> InnerChoice:
    """Muon for its param groups, and the Adam `rest` for the other groups."""
    why = (f"Muon updates {len(matrices.specs)} matrices of this rank",)
    return choose_muon(rest, matrices, config, why, source=request.options.source)
