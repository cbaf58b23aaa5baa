"""Muon in megatron-core, by the host's flags or by ours, and the matrices in the weights of its
layers.

[Note: two ways to Muon] `--optimizer muon` (or dist_muon) and the host's `--muon-*` ask for the
host's formula. It updates all params of two dimensions, except embeddings and output layers.
`--distopt-optimizer muon` with `--optimizer adam` asks for torch's formula with our options. It
updates the matrices of layers, and works where the host has no Muon.

For Muon the host's factory builds no distributed optimizer. So it is called as for Adam, and its
param groups are split between Muon and Adam.

Source of the fused layouts: `SelfAttention`, `CrossAttention` and `MLP` of megatron-core 0.9 to
0.19. Source of the host's Muon: `_get_megatron_emerging_optimizer` and `TensorParallelMuon` of
0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron.muon_groups import (
    MUON,
    FusedWeights,
    MuonRequest,
    check_is_adam,
    is_matrix_of_layer,
    matrices_of,
    with_muon_groups,
)
from megatron_distopt.hosts.megatron.naming import placement_of
from megatron_distopt.hosts.megatron_core.buffers import groups_by_name
from megatron_distopt.hosts.megatron_core.facts import LAYER_WISE
from megatron_distopt.hosts.megatron_core.model_parallel import is_expert, ranks_of, tensor_group_of
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.owners.muon_options import MegatronMuonOptions
from megatron_distopt.optimizer.owners.sharded_muon import Matrices

#: Params of older versions' grouped layer, each of which holds the weights of all experts of a
#: rank.
_GROUPED = ("experts.weight1", "experts.weight2")


def is_hosts_muon(config: Any) -> bool:
    return getattr(config, "optimizer", None) in (MUON, f"dist_{MUON}")


def check_layer_wise(config: Any) -> None:
    """Refuses the host's layer-wise optimizer without Muon, because this optimizer replaces it."""
    if getattr(config, LAYER_WISE, False) and not is_hosts_muon(config):
        raise ConfigError(
            f"{LAYER_WISE} is set without Muon, but this package replaces that optimizer only with "
            "Muon. Drop --use-layer-wise-distributed-optimizer."
        )


def is_layer_wise_muon(config: Any, chunks: Sequence[Any]) -> bool:
    """Whether the host would build its layer-wise distributed optimizer for Muon, over buffers that
    are sharded.

    megatron.training sets that option in place of `use_distributed_optimizer` since 0.18.
    """
    ddp_configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    is_sharded = all(
        getattr(ddp_config, "use_distributed_optimizer", False) for ddp_config in ddp_configs
    )
    return is_hosts_muon(config) and getattr(config, LAYER_WISE, False) and is_sharded


def request_from(config: DistOptConfig, host: Any) -> MuonRequest | None:
    """The Muon that a run asks for; None if it asks for another optimizer.

    Refuses flags of the host that this Muon does not support, and our Muon options together with
    the host's.
    """
    if config.optimizer != MUON:
        return None
    if not is_hosts_muon(host):
        check_is_adam(host.optimizer, is_adam=host.optimizer == "adam")
        return MuonRequest.of(config)
    check_compatible(config, {Feature.HOSTS_MUON: "megatron-core's own Muon"})
    for name, served, remedy in (
        ("muon_scalar_optimizer", "adam", "Drop --muon-scalar-optimizer"),
        (
            "decoupled_weight_decay",
            True,
            "Drop --no-weight-decay-decoupled, or use --optimizer adam",
        ),
    ):
        value = getattr(host, name, served)
        if value != served:
            raise ConfigError(
                f"{name} is {value!r}, but this Muon supports only {served!r}. {remedy}."
            )
    options = MegatronMuonOptions(
        momentum=host.muon_momentum,
        nesterov=getattr(host, "muon_nesterov", getattr(host, "muon_use_nesterov", False)),
        ns_steps=host.muon_num_ns_steps,
        coefficient_type=getattr(host, "muon_coefficient_type", "quintic"),
        scale_mode=host.muon_scale_mode,
        extra_scale_factor=host.muon_extra_scale_factor,
        matmul_precision=host.muon_fp32_matmul_prec,
    )
    return MuonRequest(
        options, "qkv" if host.muon_split_qkv else "none", host.muon_tp_mode, is_hosts=True
    )


def check_matrices(
    named: Mapping[str, Parameter],
    request: MuonRequest,
    config: DistOptConfig,
    chunks: Sequence[Any],
) -> None:
    """Checks the params for which `muon_matrices` will make matrices, if their groups do not decide
    it."""
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    for name, param in named.items():
        if param.requires_grad and _is_for_muon(name, param, request):
            _matrices_of(name, param, request, chunks)


def muon_matrices(
    optimizer: Optimizer | None,
    request: MuonRequest,
    named: Mapping[str, Parameter],
    buffers: Sequence[Any],
    chunks: Sequence[Any],
) -> tuple[Matrices, Sequence[Mapping[str, Any]]]:
    """The matrices that Muon updates, and the param groups of Muon and of its Adam.

    Refuses an optimizer of the host other than Adam, and weights whose shapes do not fit Muon or
    the config.
    """
    groups, names = list[dict[str, Any]](), list[str]()
    if optimizer is not None:
        is_for_muon = partial(_is_for_muon, request=request)
        groups, names = with_muon_groups(optimizer, named, is_for_muon, request.options)
    specs = {name: _matrices_of(name, named[name], request, chunks) for name in names}

    def tensor_group(name: str) -> Group:
        return Group.of(tensor_group_of(name, named[name], chunks))

    return Matrices(specs, groups_by_name(named, buffers), tensor_group), groups


def _is_for_muon(name: str, param: Parameter, request: MuonRequest) -> bool:
    if not request.is_hosts:
        return is_matrix_of_layer(name, param)
    return param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def _matrices_of(
    name: str, param: Parameter, request: MuonRequest, chunks: Sequence[Any]
) -> MatrixSpec:
    placement = placement_of(name, param, ranks_of(chunks), is_expert=is_expert(name, param))
    if name.endswith(_GROUPED) and not request.is_hosts:
        raise ConfigError(
            f"Weight {name!r} holds the weights of all experts, which Muon cannot split. Drop "
            "--moe-use-legacy-grouped-gemm or --moe-grouped-gemm, or use --optimizer adam."
        )
    if (
        placement.dim is None
        and getattr(param, "tensor_model_parallel", False)
        and request.tp_mode != "blockwise"
    ):
        raise ConfigError(
            f"Weight {name!r} holds several matrices and is cut over tensor-parallel ranks in a "
            "way that Muon cannot put together. Write --distopt-muon-tp-mode blockwise, or "
            "--muon-tp-mode blockwise with the host's Muon."
        )
    return matrices_of(name, param, placement, request, _fused_weights(chunks[0].config))


def _fused_weights(model: Any) -> FusedWeights:
    # rows of a head
    width = getattr(model, "kv_channels", None) or model.hidden_size // model.num_attention_heads
    queries = (
        model.num_attention_heads // (model.num_query_groups or model.num_attention_heads) * width
    )
    gate = (queries,) if getattr(model, "attention_output_gate", False) else ()
    return FusedWeights(
        qkv="linear_qkv.weight",
        qkv_rows=(queries, *gate, width, width),
        kv="linear_kv.weight",
        kv_rows=(width, width),
        gated="linear_fc1.weight",
        is_gated=model.gated_linear_unit,
    )
