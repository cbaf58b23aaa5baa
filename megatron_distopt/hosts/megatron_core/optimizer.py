"""The sharded optimizer with the methods of megatron-core's own DistributedOptimizer, and the chain
over several.

Both are subclasses of the host's, because the host's training loop asks `isinstance`. They do not
run the host's constructor, which allocates on CUDA by name.

[Note: aligned lists] Frameworks use the parts of the host's own optimizer: they save and swap
`optimizer.state` by main param, clip gradients of some params, move main params away, and write
them into the model. They rely on one main param for each model param, the same object in
`optimizer.param_groups`, as a key of `optimizer.state`, in the host's lists and in
`param.main_param`. So each flat param is one param shard here, and the inner optimizer updates
exactly these; no second view could differ. Methods of the host that use these lists work unchanged.
tests/hosts/core_contract.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import ChainedOptimizer as HostChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer as HostDistributedOptimizer,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.megatron.grad_scaler import loss_scale_of
from megatron_distopt.hosts.megatron.inner_optimizers import (
    groups_of,
    inner_for,
    is_adam,
    plan_groups,
)
from megatron_distopt.hosts.megatron.muon_groups import muon_and_adam
from megatron_distopt.hosts.megatron.naming import names_by_param
from megatron_distopt.hosts.megatron_core.buffers import (
    adopt_buffer,
    follow_buffers,
    groups_by_name,
)
from megatron_distopt.hosts.megatron_core.checkpoint import head_of
from megatron_distopt.hosts.megatron_core.core_calls import CoreCalls
from megatron_distopt.hosts.megatron_core.core_muon import muon_matrices
from megatron_distopt.hosts.megatron_core.group_counts import GroupCounts
from megatron_distopt.hosts.megatron_core.model_parallel import PreparedStep, expert_tensor_group
from megatron_distopt.hosts.megatron_core.state_between_phases import OffloadedState
from megatron_distopt.hosts.megatron_core.translate import TranslatedConfig
from megatron_distopt.hosts.start import clear_grads
from megatron_distopt.hosts.watches.watched_params import GroupMembers, RemainderWatch
from megatron_distopt.optimizer.accelerator import find_accelerator
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.inner_state import is_torchs, moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.owners.whole_params import TrainedParams
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan


class DistributedOptimizer(CoreCalls, HostDistributedOptimizer):
    """A subclass of the host's class that makes our sharded step."""

    def __init__(
        self,
        # the host's inner optimizer; None if the rank has no params
        optimizer: Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: Sequence[Module],
        # by chunk, of dense or of expert params
        per_model_buffers: Mapping[int, Sequence[Any]] | None,
        data_parallel_group: Any,
        data_parallel_group_gloo: Any,
        data_parallel_group_idx: int,
        # number of this copy; megatron-core 0.9 has only one
        distributed_optimizer_instance_id: int = 0,
        *,
        merged: TranslatedConfig,
    ) -> None:
        self.is_stub_optimizer = optimizer is None
        self.model_chunks: list[Any] = list(model_chunks)
        self.ddp_config: Any = self.model_chunks[0].ddp_config
        self.grad_scaler = grad_scaler
        self.per_model_buffers = dict(per_model_buffers or {})
        self.buffers = list(chain.from_iterable(self.per_model_buffers.values()))
        self.data_parallel_group = data_parallel_group
        self.data_parallel_group_gloo = data_parallel_group_gloo
        self.data_parallel_group_idx = data_parallel_group_idx
        self.distributed_optimizer_instance_id = distributed_optimizer_instance_id
        names = names_by_param(self.model_chunks)
        in_buffers = [param for buffer in self.buffers for param in buffer.params]
        # A param that was frozen after it was wrapped keeps its place in the buffer and is not
        # updated.
        self.named = {names[param]: param for param in in_buffers if param.requires_grad}
        self.sharded = self._build(names, optimizer, merged)
        follow_buffers(
            self.buffers, self.sharded.buffers, self.sharded.flat_params, self.model_chunks
        )
        # Without the config, so that the host's function does not ask for TransformerEngine's state
        # in low precision.
        begin_state = init_state_fn and (lambda inner, config=None: init_state_fn(inner))
        inner = self.sharded.inner
        # On a rank that trains nothing the host has no inner optimizer.
        MegatronOptimizer.__init__(
            self, None if self.is_stub_optimizer else inner, config, begin_state
        )
        counts_in_groups = optimizer is not None and is_adam(optimizer) and not is_torchs(optimizer)
        self.counts = GroupCounts(inner) if counts_in_groups and is_torchs(inner) else None
        self.prepared: PreparedStep | None = None
        self._publish()
        self.offloaded = OffloadedState(self.sharded)
        self.members = GroupMembers(inner.param_groups)
        self.written = RemainderWatch(self.sharded, self.named)

    def _build(
        self, names: Mapping[Parameter, str], optimizer: Optimizer | None, merged: TranslatedConfig
    ) -> ShardedOptimizer:
        config = merged.options
        # For a rank without any param: the device on which statistics are summed.
        default = torch.device(find_accelerator(config.accelerator).device_type)
        device = next((param.device for param in self.named.values()), default)
        if merged.muon is None:
            params = TrainedParams.of(self.named, groups_by_name(self.named, self.buffers))
            choice, groups = _inner_for(optimizer, config, device.type, params)
        else:
            matrices, groups = muon_matrices(
                optimizer, merged.muon, self.named, self.buffers, self.model_chunks
            )
            adam = choose_inner(replace(config, optimizer="adam"), device.type)
            choice = muon_and_adam(adam, matrices, config, merged.muon)
        plan = StepPlan(
            groups=plan_groups(self.named, groups, choice),
            choice=choice,
            config=config,
            loss_scale=loss_scale_of(self.grad_scaler, device),
            stats_group=lambda: self.stats_group,
            are_apart=True,
            excluded_from_norm=self.is_duplicate,
        )
        return ShardedOptimizer([adopt_buffer(buffer, names) for buffer in self.buffers], plan)

    def _publish(self) -> None:
        """Sets the attributes of the host's own optimizer that frameworks use, see [Note: aligned
        lists]."""
        trained = frozenset(self.named.values())
        self.gbuf_ranges: list[Any] = [
            self._build_gbuf_range_map(buffer) for buffer in self.buffers
        ]
        for buckets in chain.from_iterable(of_buffer.values() for of_buffer in self.gbuf_ranges):
            for bucket in buckets:
                owned = bucket["param_map"].items()
                bucket["param_map"] = {param: where for param, where in owned if param in trained}
        self.per_bucket_numel, self.per_bucket_numel_unpadded = (
            [
                {(each.param_dtype, each.grad_dtype): [*map(numel_of, each.buckets)]}
                for each in self.buffers
            ]
            for numel_of in (
                lambda bucket: bucket.grad_data.numel(),
                lambda bucket: bucket.numel_unpadded,
            )
        )
        self.model_param_gbuf_map = self._build_model_param_gbuf_map(self.gbuf_ranges)
        for param in trained:
            if param.dtype != torch.float32:
                param.main_param, param.main_param_sharded = None, True
        groups = self.sharded.inner.param_groups
        self.opt_group_ranges: list[Any] = [
            {"params": [], "orig_group": group, "orig_group_idx": group} for group in groups
        ]
        self.model_param_group_index_map: dict[Parameter, tuple[int, int]] = {}
        lists: list[list[list[Any]]] = [[[] for _ in groups] for _ in range(5)]
        self.model_float16_groups, self.model_fp32_groups, self.shard_float16_groups, *of_shards = (
            lists
        )
        self.shard_fp32_groups, self.shard_fp32_from_float16_groups = of_shards
        for flat in self.sharded.flat_params:
            group, param = flat.plan.key.group, self.named[flat.plan.key.param]
            in_group = self.opt_group_ranges[group]["params"]
            self.model_param_group_index_map[param] = group, len(in_group)
            in_group.append(param)
            _mark(flat.main, param)
            if not flat.owns_memory:
                self.model_fp32_groups[group].append(param)
                self.shard_fp32_groups[group].append(flat.main)
                continue
            _mark(flat.model, param)
            param.main_param = flat.main
            self.model_float16_groups[group].append(param)
            self.shard_float16_groups[group].append(flat.model)
            self.shard_fp32_from_float16_groups[group].append(flat.main)

    def is_duplicate(self, name: str) -> bool:
        """Whether another rank counts a param in its statistics, by the host's own attributes and
        rules."""
        is_original = tensor_parallel.param_is_not_tensor_parallel_duplicate
        param, groups = self.named[name], dict[str, Any]()
        takes = inspect.signature(is_original).parameters
        if "tp_group" in takes:  # from 0.16 on
            groups["tp_group"] = getattr(self.model_chunks[0], "tp_group", None)
        if "expert_tp_group" in takes:  # from 0.19 on
            groups["expert_tp_group"] = expert_tensor_group()
        return not (param_is_not_shared(param) and is_original(param, **groups))

    def _get_main_param_and_optimizer_states(self, model_param: Parameter) -> dict[str, Tensor]:
        """The state of a param in the host's own formats."""
        group, number = self.model_param_group_index_map[model_param]
        main = self.sharded.inner.param_groups[group]["params"][number]
        found = {"param": main, **moments_of(self.sharded.inner, main)}
        return {kind: as_plain(tensor.detach()) for kind, tensor in found.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops `grad` of all params, or zeroes it, also of params of which this rank owns
        nothing."""
        mains = [flat.main for flat in self.sharded.flat_params]
        clear_grads([*self.named.values(), *mains], set_to_none=set_to_none)

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""
        return self.sharded.loss_scale.scale

    @torch.no_grad()
    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Copies the model params, or the more precise tensors of a checkpoint, into the main
        params.

        Args:
            state_dict: the host's model state dict; None for the model params as they are.
        """
        self.sharded.check_has_params("reload_model_params")
        if self.session is not None:
            self.session.wait_for_snapshot()
        self.offloaded.check_is_there()
        self.written.forget()
        if state_dict is None:
            self.sharded.reload_model_params()
            return
        tensor_of = self._build_model_param_to_state_dict_param_map(state_dict)
        for flat in self.sharded.flat_params:
            (shard,) = flat.plan.shards
            flat.main.copy_(
                tensor_of[self.named[shard.name]].reshape(-1)[shard.in_param.as_slice()]
            )

    def state_dict(self) -> dict[str, Any]:
        """The param groups and the grad scaler, as the host's own returns. `save` or
        `save_parameter_state` save the tensors."""
        return head_of(self)


class ChainedOptimizer(CoreCalls, HostChainedOptimizer):
    """The host's chain over our optimizers: one measurement and one all-gather for all of them."""

    chained_optimizers: list[DistributedOptimizer]


def _inner_for(
    optimizer: Optimizer | None, config: DistOptConfig, device_type: str, params: TrainedParams
) -> tuple[InnerChoice, Sequence[Mapping[str, Any]]]:
    """The inner optimizer and its param groups."""
    if optimizer is None:
        return choose_inner(config, device_type, params), []
    if _is_hosts_offloading(optimizer):
        return choose_inner(config, device_type), groups_of(optimizer)
    return inner_for(optimizer, config, device_type, params, always_replaced=True)


def _is_hosts_offloading(optimizer: Optimizer) -> bool:
    """Whether a framework's copy of the factory built the host's optimizer for offloading with
    torch's Adam or SGD, which we replace."""
    kind = type(optimizer)
    is_hosts = kind.__name__ == "HybridDeviceOptimizer" and kind.__module__.startswith(
        "megatron.core."
    )
    return is_hosts and optimizer.defaults["cpu_optimizer_cls"] in (
        torch.optim.AdamW,
        torch.optim.SGD,
    )


def _mark(shard: Tensor, param: Parameter) -> None:
    """Copies the attributes that the host's layers set on a param to this rank's shard of it."""
    copy_tensor_model_parallel_attributes(shard, param)
    for name in ("shared", "allreduce"):
        if hasattr(param, name):
            setattr(shard, name, getattr(param, name))
