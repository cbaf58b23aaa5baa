"""A model on this rank: its params, grads and optimizer state, and how further params are taken over.

[Note: module buffers] Module buffers that training changes (the running statistics of a batch norm) follow the first
rank. torch's DistributedDataParallel broadcasts all of them before each forward pass. Here those that change are
broadcast after each step, so that every forward pass begins with the same values as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase

from megatron_distopt.buffers import GradSlot, LocalGrad, ShardedBuffer, allocate_grads, dtype_name, move_into_buffer
from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.checkpoint.whole_model import Share, WholeModel, without_wrappers
from megatron_distopt.comm import (
    CommLog,
    Communicator,
    Field,
    Group,
    compare,
    exchange,
    raise_together,
    share_initial,
    sum_over,
)
from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.base import named_params, spec_of
from megatron_distopt.hosts.torch.gather import ParamGather
from megatron_distopt.hosts.torch.grads import Grads
from megatron_distopt.hosts.torch.params import Params
from megatron_distopt.hosts.torch.plan import ParamSet, Plan, check_trained, group_names, plan_sets
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.inner import IMPLEMENTATION
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan


@dataclass(frozen=True)
class Ranks:
    """The groups of ranks that take part."""

    data: Group  # ranks that hold the same params
    stats: Group  # all ranks that hold a part of the model; gradient statistics are added up over them


def compare_models(named: Mapping[str, Parameter], chunks: Sequence[Module], data: Group) -> None:
    """Collective: checks that all ranks have the same params, frozen ones too, and the same module buffers.

    Raises:
        RanksDisagreeError: on all ranks.
    """

    def described(name: str, tensor: Tensor) -> str:
        return f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"

    kinds = {name: "trained" if param.requires_grad else "frozen" for name, param in named.items()}
    params = tuple(f"{described(name, param)}, {kinds[name]}" for name, param in named.items())
    buffers = tuple(described(name, buffer) for chunk in chunks for name, buffer in chunk.named_buffers())
    compare([Field("params of the model", params), Field("module buffers", buffers)], data)


class ShardedModel:
    """The params, grads and optimizer state of a model on this rank.

    Args:
        plan: of the params and their buffers.
        step_plan: of the step.
        ranks: see `Ranks`; all of them agree on the plan.
        placement: from a name and its param to the place of this rank's part in the whole model.
        broadcast_buffers: whether module buffers that training changes follow the first rank.
    """

    def __init__(
        self,
        plan: Plan,
        step_plan: StepPlan,
        ranks: Ranks,
        *,
        placement: Callable[[str, Parameter], Placement],
        broadcast_buffers: bool,
    ) -> None:
        chunks = plan.chunks
        self.config, self.device, self.chunks, self.ranks = plan.config, plan.device, chunks, ranks
        self._torch_groups, self._placement, self._plan = plan.torch_groups, placement, plan
        self.placements: dict[str, Placement] = {}
        self.communicator = Communicator(
            ranks.data,
            plan.how,
            overlap_grads=bool(plan.config.overlap_grad_reduce) and ranks.data.size > 1,
            overlap_params=plan.config.overlap_param_gather,
        )
        needs_scaling = plan.config.loss_scale not in (None, 1, 1.0)
        self.grads = Grads(
            self.communicator,
            step_plan.loss_scale,
            needs_scaling=needs_scaling,
            is_deterministic=plan.config.deterministic,
        )
        self.learn_members()
        self.params = Params(chunks)
        self.gather = ParamGather(self.communicator, chunks)
        buffers, slots = self._allocate(plan.sets)
        trained = {slot.param for slot in slots}
        outside = [param.data for param in plan.named.values() if param not in trained]
        outside += [buffer for chunk in chunks for buffer in chunk.buffers()]
        share_initial([*(buffer.param for buffer in buffers), *outside], ranks.data, plan.device)
        self.sharded = ShardedOptimizer(buffers, step_plan)
        self._take_over(plan.sets, buffers, slots)
        module_buffers = ModuleBuffers(chunks, ranks.data, plan.device) if broadcast_buffers else None
        self.module_buffers = module_buffers if module_buffers and module_buffers.has_any else None
        every = plan.config.log_communication
        self.comm_log = CommLog(every) if every is not None and ranks.stats.rank == 0 else None
        #: Called around each step and after a load.
        self.hooks: Sequence[DigestLog] = ()

    def _allocate(self, sets: Iterable[ParamSet]) -> tuple[list[ShardedBuffer], list[GradSlot]]:
        buffers, slots = [], list[GradSlot]()
        for each in sets:
            param = move_into_buffer(each.named, each.layout)
            grad, of_set = allocate_grads(each.named, each.layout, each.grad_dtype, self._shown)
            buffers.append(ShardedBuffer(each.layout, self.ranks.data.rank, grad, param))
            slots += of_set
        return buffers, slots

    def _shown(self, name: str, view: Tensor) -> Tensor:
        """What `param.grad` will be, on one rank the gradient itself: [Note: param.grad] in buffers/grad_buffer.py."""
        return view.detach() if self.ranks.data.size == 1 else LocalGrad.of(view, name, self.grads.zeroing)

    def _take_over(self, sets: Sequence[ParamSet], buffers: Sequence[ShardedBuffer], slots: Sequence[GradSlot]) -> None:
        for each, buffer in zip(sets, buffers, strict=True):
            self.params.add(each.named, buffer.param)
            self.placements |= {name: self._placement(name, param) for name, param in each.named.items()}
        self.communicator.add(buffers, buffers)
        self.grads.add(buffers, slots)
        self.gather.add({name: param for each in sets for name, param in each.named.items()})
        self._count_waiting()

    def check_members(self) -> None:
        """Checks that the groups have the params that they had.

        Raises:
            LayoutError
        """
        if [list(map(id, group["params"])) for group in self._torch_groups] != self._members:
            raise LayoutError(
                "The param_groups have other params than they were given. Call optimizer.add_param_group(...) for "
                "more, and param.requires_grad_(False) for fewer."
            )

    def take_options(self) -> None:
        """Copies the options that the user has written into the param groups to the inner optimizer.

        Raises:
            LayoutError: the groups have other params.
        """
        self.check_members()
        for ours, theirs in zip(self.sharded.inner.param_groups, self._torch_groups, strict=True):
            for key, value in theirs.items():
                if key != "params" and key not in IMPLEMENTATION:
                    ours[key] = value

    def learn_members(self) -> None:
        """Notes that the groups have the right params now."""
        self._members = [list(map(id, group["params"])) for group in self._torch_groups]
        self._count_waiting()

    def _count_waiting(self) -> None:
        #: Whether a group has params that do not train yet; the same on all ranks.
        self.may_grow = sum(map(len, self._members)) > len(self.grads.slots)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of params of the model that are not trained."""
        return frozenset(named_params(self.chunks)) - self.placements.keys()

    def resting(self) -> dict[int, tuple[str, ...]]:
        """Names of params in a group that have no state, by the number of the group."""
        name_of = {param: name for name, param in self._named(self._waiting()).items()}
        members = {number: group["params"] for number, group in enumerate(self._torch_groups)}
        found = {number: [param for param in params if param in name_of] for number, params in members.items()}
        return {number: tuple(name_of[param] for param in params) for number, params in found.items() if params}

    def share(self) -> Share:
        """What this rank holds, for checkpoints."""
        plan = self.sharded.plan
        return Share(self.sharded, self.placements, lambda name: not plan.excluded_from_norm(name), self.resting())

    def whole(self) -> WholeModel:
        """The model as all ranks together have it."""
        about: dict[str, str | int] = {
            "host": "any torch module",
            "ranks": self.ranks.stats.size,
            "data_parallel": self.ranks.data.size,
        }
        return WholeModel([self.share()], frozen=self.frozen, about=about)

    def newcomers(self) -> dict[str, Parameter]:
        """Params in a group that have no state and a gradient: they were frozen or empty before."""
        return self._named({param for param in self._waiting() if param.grad is not None})

    def _waiting(self) -> set[Parameter]:
        """Params in a group that have no state."""
        known = {slot.param for slot in self.grads.slots}
        return {param for group in self._torch_groups for param in group["params"]} - known

    def _named(self, params: Set[Parameter]) -> dict[str, Parameter]:
        """Params by name, in the order of the model, which is walked only if there are any: every step asks this."""
        return {name: param for name, param in named_params(self.chunks).items() if param in params} if params else {}

    def admit(self) -> None:
        """Collective: takes over the newcomers of any rank, which train from now on."""
        if not self.may_grow:
            return
        number = torch.tensor([float(len(self.newcomers()))], device=self.device)
        sum_over(number, self.ranks.stats)
        if number.item():
            self.grow(self.newcomers())

    def grow_to(self, saved: Iterable[str]) -> None:
        """Collective: gives frozen params a state that is about to be loaded, for when they are unfrozen."""
        names = {without_wrappers(name) for name in saved}
        waiting = self._named(self._waiting())
        self.grow({name: p for name, p in waiting.items() if without_wrappers(name) in names and p.numel()})

    def grow(self, named: Mapping[str, Parameter]) -> None:
        """Collective: trains further params from now on, wherever one rank has named them.

        Raises:
            ConfigError, LayoutError, RanksDisagreeError: on all ranks; nothing is changed then.
        """
        data = self.ranks.data
        wanted = {name for names in exchange(list(named), data) for name in names}
        added = {name: param for name, param in reversed(named_params(self.chunks).items()) if name in wanted}
        raise_together(lambda: check_trained(added, self.config) if added else None, self.ranks.stats)
        sets = plan_sets(added, self.config, data.size)
        specs = tuple(str(spec_of(name, param)) for name, param in added.items())
        raise_together(lambda: compare([Field("params that begin to train", specs)], data), self.ranks.stats)
        buffers, slots = self._allocate(sets)
        share_initial([buffer.param for buffer in buffers], data, self.device)
        groups = tuple(group_names(group, added) for group in self._torch_groups)
        self.sharded.extend(buffers, groups)
        self._take_over(sets, buffers, slots)

    def check_can_follow(self, changed: frozenset[str]) -> None:
        """Checks that main params know how their model params were changed.

        Raises:
            LayoutError
        """
        if lost := self._lost(changed):
            raise LayoutError(
                f"Param {lost[0]!r} with main_params_dtype='remainder' was written to, or its .data read, between two "
                "steps. Call optimizer.reload_model_params() after you have changed weights, and read them by "
                "detach(); or write main_params_dtype='float32'."
            )

    def _lost(self, changed: frozenset[str]) -> list[str]:
        """Names of changed params of which a main param cannot know how, in the order of the main params."""
        unknowing = [flat for flat in self.sharded.flat_params if not flat.can_tell_changes] if changed else []
        return [shard.name for flat in unknowing for shard in flat.plan.shards if shard.name in changed]

    def follow(self, changed: frozenset[str]) -> None:
        """Updates main params from model params that the user has changed, where they know how.

        Changes that main params know nothing about are found again by the next `collect`.
        """
        for flat in self.sharded.flat_params:
            for shard in flat.plan.shards if flat.can_tell_changes else ():
                if shard.name in changed:
                    flat.follow_model(shard)
        self.forget_changes()

    def forget_changes(self) -> None:
        """Takes model params as they are now for known, but for changes that main params know nothing about."""
        self.params.forget(self._lost(self.params.changed))

    def release(self) -> None:
        """Ends this: the params are torch's again."""
        self.gather.release()
        self.grads.release()
        self.params.release()


# --- see [Note: module buffers]


class ModuleBuffers:
    """The buffers of a model's modules on this rank."""

    def __init__(self, chunks: Sequence[Module], data: Group, device: torch.device) -> None:
        self._data, self._device = data, device
        self._modules = {
            f"{number}.{name}": module
            for number, chunk in enumerate(chunks if data.size > 1 else ())
            for name, module in chunk.named_modules()
            if module._buffers
        }
        #: Of those whose buffers change, by name and the same on all ranks, how the buffers look.
        self._changing: dict[str, tuple[str, ...]] = {}
        self._seen = {name: _seen_in(module) for name, module in self._modules.items()}
        # The kernels of torch's norms change running statistics without counting a version.
        norms = {name: module for name, module in self._modules.items() if isinstance(module, _NormBase)}
        self.learn([name for name, module in norms.items() if module.track_running_stats])

    @property
    def has_any(self) -> bool:
        """Whether there is a buffer that could have to follow another rank."""
        return bool(self._modules)

    def begun(self) -> list[str]:
        """Modules whose buffers have changed for the first time, or have another shape now; the ranks may differ."""
        return [
            name
            for name, module in self._modules.items()
            if (
                self._changing[name] != _described(module)
                if name in self._changing
                else self._seen[name] != _seen_in(module)
            )
        ]

    def learn(self, begun: Sequence[str]) -> None:
        """Collective: from now on these modules' buffers are broadcast, whichever rank has named them.

        Raises:
            RanksDisagreeError: on all ranks, where they have other shapes or dtypes.
        """
        if not self._modules:
            return
        named = {name for names in exchange(list(begun), self._data) for name in names}
        self._changing |= {name: _described(self._modules[name]) for name in sorted(named)}
        looks = tuple(f"{name}: {look}" for name in sorted(self._changing) for look in self._changing[name])
        compare([Field("module buffers that training changes", looks)], self._data)

    @torch.no_grad()
    def sync(self) -> None:
        """Collective: every rank has the values of the first one."""
        tensors = [tensor for name in sorted(self._changing) for tensor in _tensors_of(self._modules[name])]
        share_initial(tensors, self._data, self._device)


def _described(module: Module) -> tuple[str, ...]:
    return tuple(f"{tensor.dtype}{list(tensor.shape)}" for tensor in _tensors_of(module))


def _tensors_of(module: Module) -> list[Tensor]:
    return [buffer for _, buffer in sorted(module._buffers.items()) if buffer is not None]


def _seen_in(module: Module) -> tuple[tuple[int, int], ...]:
    """By buffer its identity and version: what changes one is a new tensor, or an operation in place."""
    return tuple((id(buffer), buffer._version) for buffer in _tensors_of(module))
