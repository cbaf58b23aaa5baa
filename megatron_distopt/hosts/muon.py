"""Muon in a Megatron of any generation: its param groups, its options and the matrices of a param.

Muon updates the two-dimensional params of numbered layers; embeddings, output layers and all else stay with Adam. A
param group with a key `use_muon` says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.inner import is_adam
from megatron_distopt.layout import MatrixCut, MatrixSpec, Placement
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.owners.muon_options import MuonOptions, TorchMuonOptions, is_muons_group
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, choose_muon

#: What the option `optimizer` calls it.
MUON = "muon"

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
#: A key of a param group in which a host or its user says it itself.
_MARK = "use_muon"
_OPTIONS = {
    "momentum": "muon_momentum",
    "nesterov": "muon_nesterov",
    "ns_steps": "muon_ns_steps",
    "adjust_lr_fn": "muon_adjust_lr",
}
#: Of Adam, and not of Muon.
_NOT_MUONS = ("betas", "eps")


def options_from(config: DistOptConfig) -> MuonOptions:
    """torch's formula with the options of this package; learning rate and decay come from param groups."""
    return TorchMuonOptions(**{ours: getattr(config, name) for ours, name in _OPTIONS.items()})


def is_matrix_of_layer(name: str, param: Tensor) -> bool:
    """Whether Muon updates a param of that name where nobody says otherwise.

    >>> import torch
    >>> is_matrix_of_layer("decoder.layers.0.mlp.linear_fc1.weight", torch.ones(2, 2))
    True
    """
    return _IN_LAYER.search(name) is not None and param.dim() == 2


def with_muon_groups(
    groups: Iterable[Mapping[str, Any]], is_for_muon: Callable[[Parameter], bool], options: MuonOptions
) -> list[dict[str, Any]]:
    """A host's param groups, each cut into one for Muon and one for Adam where it has params of both kinds.

    Args:
        groups: of the host.
        is_for_muon: of params in groups that do not say it themselves.
        options: of the groups that are Muon's, beside those that a group has.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        kept = {key: value for key, value in group.items() if key != "params"}
        for_muon, rest = list[Parameter](), list[Parameter]()
        for param in group["params"]:
            (for_muon if group.get(_MARK, is_for_muon(param)) else rest).append(param)
        if rest or not for_muon:
            found.append({"params": rest, **kept})
        if for_muon:
            kept = {key: value for key, value in kept.items() if key not in _NOT_MUONS}
            found.append({"params": for_muon, **vars(options), **kept})
    return found


def muon_params(groups: Iterable[Mapping[str, Any]]) -> frozenset[Parameter]:
    """Those of Muon's groups."""
    return frozenset(param for group in groups if is_muons_group(group) for param in group["params"])


def check_is_adam(base: Optimizer) -> None:
    """Checks that a host's own optimizer is one whose place Muon and an Adam can take.

    Raises:
        ConfigError
    """
    if not is_adam(base):
        raise unsupported_base(type(base).__name__)


def unsupported_base(name: str) -> ConfigError:
    """The error for another optimizer of the host's beside Muon."""
    remedy = "Write --optimizer adam, whose place is taken, or drop --distopt-optimizer muon"
    return ConfigError(refusal("optimizer", f"muon beside the host's {name}", "have an Adam", remedy))


def config_for_adam(config: DistOptConfig) -> DistOptConfig:
    """The options of the optimizer that updates what is not Muon's."""
    return replace(config, optimizer="adam")


def muon_and_adam(rest: InnerChoice, matrices: Matrices, config: DistOptConfig, options: MuonOptions) -> InnerChoice:
    """Muon for its param groups, and an Adam for the others.

    Args:
        rest: the Adam.
        matrices: of this rank.
        config: merged.
        options: of Muon's groups.

    Raises:
        ConfigError: options of the config that Muon does not serve.
    """
    why = (f"{len(matrices.specs)} matrices of this rank are Muon's",)
    return choose_muon(rest, matrices, config, why, source=options.source)


def matrices_of(name: str, spec: MatrixSpec, sizes: Sequence[int], cut: MatrixCut | None) -> MatrixSpec:
    """The matrices of a param of Muon's.

    Args:
        name: of the param.
        spec: of the param as one matrix.
        sizes: rows of the parts of a fused weight, of one group of heads; none where it is one matrix.
        cut: see `cut_of`.

    Raises:
        ConfigError: a fused weight of another shape than its parts have.
    """
    if sizes and spec.rows % sum(sizes):
        got, rule = f"{spec.rows} rows", f"be a multiple of {sum(sizes)}, which its parts {tuple(sizes)} have together"
        raise ConfigError(refusal(f"fused weight {name!r}", got, rule, "Write muon_split=none"))
    return MatrixSpec(spec.rows, spec.cols, 0, tuple(sizes), spec.rows // sum(sizes) if sizes else 1, cut)


def cut_of(place: Placement, tp_mode: str, *, is_split: bool) -> MatrixCut | None:
    """How tensor-parallel ranks share a weight; None where each has a matrix of its own.

    Args:
        place: of the weight.
        tp_mode: "duplicated", "distributed" or "blockwise".
        is_split: whether it is a fused weight in parts. Every part is cut by itself then, in one piece.
    """
    if place.dim is None or place.size == 1 or tp_mode == "blockwise":
        return None
    return MatrixCut(place.dim, place.size, 1 if is_split else place.stride, tp_mode == "duplicated")
