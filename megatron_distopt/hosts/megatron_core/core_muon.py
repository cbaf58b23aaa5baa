"""Muon in megatron-core: by its own flags or by ours, and of what the weights of its layers consist.

[Note: two ways to Muon] `--optimizer muon` (or dist_muon) and the host's `--muon-*` ask for the host's formula and its
choice of params: all of two dimensions but embeddings and output layers. `--distopt-optimizer muon` with
`--optimizer adam` asks for torch's formula with our options, also where the host has no Muon, for matrices of layers.

The host's factory has another path for Muon, which builds no distributed optimizer. So it is called as for Adam, and
the param groups that it makes are cut in two.

Source of the fused layouts: `SelfAttention`, `CrossAttention`, `MLP` and `GroupedMLP` of megatron-core 0.9 to 0.19; of
what the host's Muon does, `_get_megatron_emerging_optimizer` and `TensorParallelMuon` of 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.inner import groups_of
from megatron_distopt.hosts.megatron_core.buffers import groups_by_name
from megatron_distopt.hosts.megatron_core.capabilities import with_values
from megatron_distopt.hosts.megatron_core.facts import LAYER_WISE
from megatron_distopt.hosts.megatron_core.whole import is_expert, ranks_of, tensor_group_of
from megatron_distopt.hosts.megatron_muon import (
    MUON,
    FusedWeights,
    MuonRequest,
    check_is_adam,
    config_for_adam,
    is_matrix_of_layer,
    matrices_of,
    muon_and_adam,
    muon_params,
    unsupported_base,
    with_muon_groups,
)
from megatron_distopt.hosts.naming import placement_of
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.owners.muon_options import MegatronMuonOptions
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, matrix_of

#: Names of the host for its own.
_HOSTS = (MUON, f"dist_{MUON}")
#: Weights of all experts of a rank in one param, which the host's layer views as one matrix for each.
_GROUPED = ("experts.weight1", "experts.weight2")


def is_hosts_muon(config: Any) -> bool:
    """Whether the host's own flags ask for Muon."""
    return getattr(config, "optimizer", None) in _HOSTS


def check_layer_wise(config: Any) -> None:
    """Checks that the host's layer-wise optimizer, whose place is taken, is asked for with Muon.

    Raises:
        ConfigError
    """
    if getattr(config, LAYER_WISE, False) and not is_hosts_muon(config):
        raise ConfigError(
            f"Invalid {LAYER_WISE}: set without Muon, and this distributed optimizer takes its place. Drop "
            "--use-layer-wise-distributed-optimizer."
        )


def is_layer_wise_muon(config: Any, chunks: Sequence[Any]) -> bool:
    """Whether the host would build its layer-wise distributed optimizer for Muon, over buffers that are sharded.

    megatron.training sets that option in place of `use_distributed_optimizer` since 0.18.

    Args:
        config: the host's OptimizerConfig.
        chunks: wrapped by the host's DistributedDataParallel.
    """
    is_sharded = all(getattr(getattr(each, "ddp_config", None), "use_distributed_optimizer", False) for each in chunks)
    return is_hosts_muon(config) and getattr(config, LAYER_WISE, False) and is_sharded


def request_from(config: DistOptConfig, host: Any) -> MuonRequest | None:
    """What a run wants of Muon; None where it wants another optimizer.

    Args:
        config: merged.
        host: the OptimizerConfig.

    Raises:
        ConfigError: flags of the host that cannot be served with Muon, or options of ours beside the host's own.
    """
    if config.optimizer != MUON:
        return None
    if not is_hosts_muon(host):
        if host.optimizer != "adam":
            raise unsupported_base(host.optimizer)
        return MuonRequest.of(config)
    _check_hosts(config, host)
    options = MegatronMuonOptions(
        momentum=host.muon_momentum,
        nesterov=getattr(host, "muon_nesterov", getattr(host, "muon_use_nesterov", False)),
        ns_steps=host.muon_num_ns_steps,
        coefficient_type=getattr(host, "muon_coefficient_type", "quintic"),
        scale_mode=host.muon_scale_mode,
        extra_scale_factor=host.muon_extra_scale_factor,
        matmul_precision=host.muon_fp32_matmul_prec,
    )
    return MuonRequest(options, "qkv" if host.muon_split_qkv else "none", host.muon_tp_mode, is_hosts=True)


def _check_hosts(config: DistOptConfig, host: Any) -> None:
    check_compatible(config, {Feature.HOSTS_MUON: "megatron-core's own Muon"})
    for name, served, remedy in (
        ("muon_scalar_optimizer", "adam", "Drop --muon-scalar-optimizer"),
        ("decoupled_weight_decay", True, "Drop --no-weight-decay-decoupled, or use --optimizer adam"),
    ):
        value = getattr(host, name, served)
        if value != served:
            raise ConfigError(f"Invalid {name}: {value!r}. It must be {served!r} with this Muon. {remedy}.")


def as_adam(host: Any, request: MuonRequest | None) -> AbstractContextManager[None]:
    """In the block the host builds what it builds for Adam with a distributed optimizer, where Muon is wanted.

    Args:
        host: the OptimizerConfig.
        request: what is wanted of Muon.
    """
    wanted = {"optimizer": "adam", "use_distributed_optimizer": True, LAYER_WISE: False}
    return with_values(host, {} if request is None else wanted)


def check_matrices(
    named: Mapping[str, Parameter], request: MuonRequest, config: DistOptConfig, chunks: Sequence[Any]
) -> None:
    """Checks what `muon_for` is to build, of params in groups that do not say themselves whose they are.

    Raises:
        ConfigError, LayoutError
    """
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    for name, param in named.items():
        if param.requires_grad and _is_for_muon(name, param, request):
            _matrices_of(name, param, request, chunks)


def muon_for(
    optimizer: Optimizer | None,
    request: MuonRequest,
    config: DistOptConfig,
    named: Mapping[str, Parameter],
    buffers: Sequence[Any],
    chunks: Sequence[Any],
    device_type: str,
) -> tuple[InnerChoice, Sequence[Mapping[str, Any]]]:
    """Muon with an Adam beside it, and the param groups of both.

    Args:
        optimizer: which the host built; None where the rank has no params.
        request: what is wanted of Muon.
        config: merged.
        named: params that are updated, by name.
        buffers: of the host, with those params.
        chunks: of the model.
        device_type: of the params.

    Raises:
        ConfigError: the host's own optimizer is no Adam, options that Muon does not serve, or a fused weight of another
            shape than the host's config says.
        LayoutError: a param that a group marked has not two dimensions.
    """
    name_of = {param: name for name, param in named.items()}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        check_is_adam(optimizer)
        groups = with_muon_groups(
            groups_of(optimizer), lambda param: _is_for_muon(name_of[param], param, request), request.options
        )
    specs = {name_of[param]: _matrices_of(name_of[param], param, request, chunks) for param in muon_params(groups)}
    matrices = Matrices(
        specs,
        groups_by_name(named, buffers),
        lambda name: Group.of(tensor_group_of(name, named[name], chunks)),
    )
    rest = choose_inner(config_for_adam(config), device_type)
    return muon_and_adam(rest, matrices, config, request), groups


def _is_for_muon(name: str, param: Parameter, request: MuonRequest) -> bool:
    if not request.is_hosts:
        return is_matrix_of_layer(name, param)
    return param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def _matrices_of(name: str, param: Parameter, request: MuonRequest, chunks: Sequence[Any]) -> MatrixSpec:
    place = placement_of(name, param, ranks_of(chunks), is_expert=is_expert(name, param))
    if name.endswith(_GROUPED) and not request.is_hosts:
        return _experts_of(name, matrix_of(name, param), place.size, request, chunks)
    if place.dim is None and getattr(param, "tensor_model_parallel", False) and request.tp_mode != "blockwise":
        raise _cannot_join(name)
    return matrices_of(name, param, place, request, _fused_weights(chunks[0].config))


def _fused_weights(model: Any) -> FusedWeights:
    width = getattr(model, "kv_channels", None) or model.hidden_size // model.num_attention_heads  # of a head
    queries = model.num_attention_heads // (model.num_query_groups or model.num_attention_heads) * width
    gate = (queries,) if getattr(model, "attention_output_gate", False) else ()
    return FusedWeights(
        qkv="linear_qkv.weight",
        qkv_rows=(queries, *gate, width, width),
        kv="linear_kv.weight",
        kv_rows=(width, width),
        gated="linear_fc1.weight",
        is_gated=model.gated_linear_unit,
    )


def _experts_of(name: str, spec: MatrixSpec, num_cut: int, request: MuonRequest, chunks: Sequence[Any]) -> MatrixSpec:
    """One matrix an expert. The first weight has the shape [hidden, all experts], and [experts, hidden, ...] inside."""
    model, count = chunks[0].config, chunks[0].config.num_moe_experts // ranks_of(chunks).expert[1]
    if num_cut > 1 and request.tp_mode != "blockwise":
        raise _cannot_join(name)
    if request.split == "all" and model.gated_linear_unit:
        raise ConfigError(
            f"Invalid muon_split: 'all' where experts are grouped in one weight, as in {name!r}, whose gates cannot be "
            f"taken apart. Write muon_split=qkv."
        )
    rows = model.hidden_size if name.endswith(_GROUPED[0]) else spec.rows // count
    return MatrixSpec(rows * count, spec.numel // (rows * count), 0, (rows,) * count)


def _cannot_join(name: str) -> ConfigError:
    return ConfigError(
        f"Invalid weight {name!r}: it is several matrices in one that tensor-parallel ranks share, and they cannot put "
        "their parts together. Write --distopt-muon-tp-mode blockwise (--muon-tp-mode blockwise with the host's Muon)."
    )
