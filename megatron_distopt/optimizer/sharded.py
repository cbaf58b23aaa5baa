"""One rank's part of a sharded optimizer: flat main params, the inner optimizer with its state, and
their bytes.

step.py has the functions that make its steps.

[Note: bytes of a step] Bytes for an element of a bf16 param with an fp32 grad, on its owner::

    gradient statistics      read grad                        4
    fused Adam               read grad                        4
                             read and write main param        8
                             read and write two moments      16
                             write back the divided grad      4   only if the divisor is not 1
    cast                     read main param                  4
                             write model param                2
                                                             --
                                                             42 (38 if the divisor is 1)

The minimum is 30: read grad 4, main 8, moments 16, model param 2. The other 12 have reasons. The
norm of the whole gradient must be known before its first element is used (4). torch's fused kernel
writes the divided gradient back (4), even for a divisor of 1 if that is a tensor, as with a
deferred check and clipping. No kernel of torch's writes the rounded param in the same pass (4).
tests/optimizer/test_bytes.py counts these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig, NonFinitePolicy
from megatron_distopt.device import CPU
from megatron_distopt.errors import AccessError, ConfigError
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.averages import Averages
from megatron_distopt.optimizer.deferred import DeferredCheck
from megatron_distopt.optimizer.inner import Groups, InnerChoice, InParts, build_in_parts
from megatron_distopt.optimizer.inner_options import for_kernels
from megatron_distopt.optimizer.inner_state import (
    counts_in_groups,
    moments_of,
    split_state,
    state_of,
)
from megatron_distopt.optimizer.inner_step import skips_by_itself
from megatron_distopt.optimizer.loss_scale import ConstantLossScale, LossScale
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    Precision,
    memory_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import PlainValues
from megatron_distopt.optimizer.main_params import (
    FlatParam,
    FlatParamKey,
    MainGrads,
    ParamGroup,
    build_flat_params,
    by_group,
    main_grads,
    split_flat_param,
)
from megatron_distopt.optimizer.offload import HostUpdates, buckets_on_host
from megatron_distopt.optimizer.owners.whole_params import owned_params


@dataclass(frozen=True)
class StepPlan:
    """A host's decisions about the step."""

    # the same groups in the same order on every rank; a group may have no param on this rank. A
    # param that is in no group is not updated.
    groups: Sequence[ParamGroup]
    choice: InnerChoice  # the inner optimizer, see `choose_inner`
    config: DistOptConfig  # clipping, zero count and `nonfinite`
    loss_scale: LossScale
    # returns the ranks over which the gradient statistics are summed: all that hold a part of the
    # model. Called at every step, because a host may know it only after the optimizer is built.
    stats_group: Callable[[], Group]
    # over how many ranks the gradients in the grad buffers are summed; 1 if the host averages
    average_over: int = 1
    # takes a param name, see [Note: excluded from the norm] in grad_norm.py
    excluded_from_norm: Callable[[str], bool] = lambda name: False
    # whether the CPU reads the non-finite check one step later, if possible, see [Note: deferred
    # check] in deferred.py. None: yes, unless the device is the CPU.
    deferred_check: bool | None = None
    # whether every param shard is a flat param, because users of the host expect one main param for
    # each model param
    are_apart: bool = False


class ShardedOptimizer:
    """The main params and the optimizer state that this rank owns.

    Attributes:
        config, loss_scale: those of the plan.
        device: the device of the params, even if this rank owns none.
        flat_params: in buffer order.
        inner: the inner optimizer, which updates them.
        host_updates: updates flat params whose state is in CPU memory; None if there are none. See
            offload.py.
        averages: updates averages of main params; None without averages.
        stats_dtype: the dtype of gradient statistics on the device.
        defers_check: whether the CPU reads the check of a step only in the next one; the same on
            all ranks.
        deferred_check: the check of the last step, until the next step reads it; see [Note:
            deferred check] in deferred.py.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], plan: StepPlan) -> None:
        self.buffers = tuple(buffers)
        self.plan, self.config, self.loss_scale = plan, plan.config, plan.loss_scale
        self.device = plan.loss_scale.scale.device
        self._num_skipped = 0
        self.deferred_check: DeferredCheck | None = None
        self.flat_params, groups = _flatten(buffers, plan.groups, plan)
        # torch refuses an empty list of groups, but a rank without params still takes part in the
        # statistics.
        self.inner = _build(plan.choice, groups or [{"params": []}])
        self.host_updates = _host_updates(plan, self.flat_params, self.inner, self.device)
        self.averages = None if self.config.ema_decay is None else Averages(self.config.ema_decay)
        self.show_flat_params()

    def show_flat_params(self) -> None:
        """Gives the main params to inner optimizers that have to know them, and decides whether the
        check can be deferred."""
        self.stats_dtype = stats_dtype(self.device)
        wanted = (
            self.device.type != CPU
            if self.plan.deferred_check is None
            else self.plan.deferred_check
        )
        is_exact = self.stats_dtype is torch.float64
        is_constant = isinstance(self.loss_scale, ConstantLossScale)
        self.defers_check = wanted and is_exact and is_constant and skips_by_itself(self.inner)
        if isinstance(self.inner, InParts):
            self.inner.hold(self.buffers, self.flat_params, self.plan.groups)
        if isinstance(self.inner, LowPrecisionAdam):
            on_device = [
                flat for flat in self.flat_params if flat.owns_memory and flat.on_host is None
            ]
            starts = {
                name: place
                for buffer in self.buffers
                for name, place in buffer.layout.places.items()
            }
            firsts = ((flat.main, flat.plan.shards[0]) for flat in self.flat_params)
            places = {main: starts[shard.name] + shard.in_param.start for main, shard in firsts}
            self.inner.round_into({flat.main: flat.model for flat in on_device}, places)

    def separate(self, key_of: Callable[[str], Hashable]) -> None:
        """Cuts flat params between neighbours with different keys, so that each part has its own
        count of updates. State stays in the same memory."""
        if isinstance(self.inner, LowPrecisionAdam):
            for flat in self.flat_params:
                self.inner.take_moments(flat.main)
        parts = {flat: split_flat_param(flat, key_of) for flat in self.flat_params}
        for flat, into in parts.items():
            if len(into) > 1:
                start = flat.plan.in_buffer.start
                cuts = {part.plan.in_buffer.relative_to(start): part.main for part in into}
                split_state(
                    self.inner, self.inner.param_groups[flat.plan.key.group], flat.main, cuts
                )
        if any(len(into) > 1 for into in parts.values()):
            self.flat_params = tuple(part for into in parts.values() for part in into)
            self.show_flat_params()

    def check_has_params(self, call: str) -> None:
        """Refuses a call, on all ranks, while the model has averages in place of its params."""
        if self.averages is not None and self.averages.are_shown:
            raise AccessError(
                f"{call} was called within averaged_params(), where the model has averages in "
                "place of its params. Move the call after the with block."
            )

    @property
    def divisor(self) -> float:
        """The sums in the grad buffers have to be divided by this: the loss scale times the number
        of ranks in the sum."""
        return self.loss_scale.value * self.plan.average_over

    @property
    def num_skipped(self) -> int:
        """The number of steps that changed nothing because a gradient was not finite. Waits for an
        open deferred check."""
        check = self.deferred_check
        is_skipped = (
            check is not None
            and self.config.policy is NonFinitePolicy.SKIP
            and not check.stats.is_finite
        )
        return self._num_skipped + is_skipped

    @num_skipped.setter
    def num_skipped(self, value: int) -> None:
        """Sets the count, as a load does. Drops an open check, which belongs to the replaced
        state."""
        self.forget_deferred_check()
        self._num_skipped = value

    def take_deferred_check(self) -> DeferredCheck | None:
        """Returns and drops the check of the last step if it is open. Counts the step if it was
        skipped."""
        check, self._num_skipped = self.deferred_check, self.num_skipped
        self.forget_deferred_check()
        return check

    def forget_deferred_check(self) -> None:
        """Drops an open check, before a load replaces its state."""
        if self.deferred_check is not None:
            self.deferred_check.close()
        self.deferred_check = None

    def leave_out(self, names: Collection[str]) -> MainGrads:
        """Excludes params from this step: they are not updated and keep their state.

        Returns:
            The main grads; None for flat params that are excluded. They replace those found before,
            because flat params may have been cut.
        """
        self.separate(lambda name: name in names)
        if isinstance(self.inner, InParts):
            self.inner.left_out = frozenset(names)
        grads = main_grads(
            [flat for flat in self.flat_params if flat.plan.shards[0].name not in names]
        )
        rest = iter(grads)
        return [
            None if flat.plan.shards[0].name in names else next(rest) for flat in self.flat_params
        ]

    @torch.no_grad()
    def reset_state(
        self, names: Collection[str] | None = None, scale: Mapping[str, float] | None = None
    ) -> None:
        """Resets the state of params, or of all params if `names` is None. Called between two
        steps.

        Main params, averages, and what a user's class writes into its param groups stay. `scale`
        has a factor for each moment, by the inner optimizer's name of it. With it, these moments
        are multiplied and nothing is reset.

        Raises:
            ConfigError: if an Adam counts updates by param group, or if no param has a moment that
                `scale` names.
        """
        trained = {name for group in self.plan.groups for name in group.names}
        chosen = trained if names is None else trained.intersection(names)
        if scale is not None:
            self._scale_moments(chosen, scale)
            return
        if self.plan.choice.is_adam and counts_in_groups(self.plan.choice, self.inner):
            raise ConfigError(
                "reset_state needs an Adam that counts the updates of each param, but "
                f"{self.plan.choice.name} counts them by param group. Write adam='torch_fused'."
            )
        self.separate(chosen.__contains__)
        mains = {flat.main for flat in self.flat_params if flat.plan.shards[0].name in chosen}
        for main in mains:
            self.inner.state.pop(main, None)
        for name, owned, options in owned_params(self.inner):
            if name in chosen:
                owned.begin(options)
        if not isinstance(self.inner, InParts):
            groups = [
                {**group, "params": list(filter(mains.__contains__, group["params"]))}
                for group in self.inner.param_groups
            ]
            # Built again, because some classes fill their state in the constructor.
            self.inner.state.update(self.plan.choice.build(groups).state)

    def _scale_moments(self, names: Collection[str], factors: Mapping[str, float]) -> None:
        known = {kind for flat in self.flat_params for kind in moments_of(self.inner, flat.main)}
        if not known.issuperset(factors) and (known or self.plan.choice.updates_whole_params):
            raise ConfigError(
                f"The scale of reset_state is {dict(factors)}, but the moments of this optimizer "
                f"are {', '.join(sorted(known)) or 'kept by the owners of params'}. Leave scale "
                "out to reset the whole state."
            )
        for flat in self.flat_params:
            for kind, moment in moments_of(self.inner, flat.main).items():
                for shard in flat.plan.shards if kind in factors else ():
                    if shard.name in names:
                        flat.cut(moment, shard).mul_(factors[kind])

    def extend(self, buffers: Sequence[ShardedBuffer], groups: Sequence[ParamGroup]) -> None:
        """Takes over further params, between two steps.

        Args:
            buffers: the buffers of the further params.
            groups: all param groups, each with the names of its further params; known groups come
                first.
        """
        flat_params, added = _flatten(buffers, groups, self.plan)
        # Built again, because some classes fill their state in the constructor.
        fresh = _build(self.plan.choice, [dict(group) for group in added])
        # dict.update, because the state of WholeParams refuses its own methods
        dict.update(self.inner.state, dict.items(fresh.state))
        for index, group in enumerate(fresh.param_groups):
            if index < len(self.inner.param_groups):
                self.inner.param_groups[index]["params"] += group["params"]
            else:
                self.inner.param_groups.append(group)
        self.buffers += tuple(buffers)
        self.flat_params += flat_params
        if self.host_updates is None:
            self.host_updates = _host_updates(self.plan, flat_params, self.inner, self.device)
        pairs = zip_longest(self.plan.groups, groups)
        joined = (
            ParamGroup((old or new).options, (*(old.names if old else ()), *new.names))
            for old, new in pairs
        )
        self.plan = replace(self.plan, groups=tuple(joined))
        self.show_flat_params()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copies the model params into the main params, after the model params were changed."""
        for buffer in self.buffers:
            buffer.collect()
        for flat in self.flat_params:
            flat.read_model()

    @torch.no_grad()
    def follow_model(self) -> None:
        """Does what `reload_model_params` does, but only for flat params that no longer round to
        their model params.

        The other flat params keep the bits below the model's precision. It takes a pass over the
        main params. So it is only called in the first step after start-up or a load, in hosts that
        do not say when they changed the model.
        """
        for buffer in self.buffers:
            buffer.collect()
        for flat in self.flat_params:
            if not flat.can_tell_changes or flat.differs_from_model():
                flat.read_model()


def _flatten(
    buffers: Sequence[ShardedBuffer], groups: Sequence[ParamGroup], plan: StepPlan
) -> tuple[tuple[FlatParam, ...], Groups]:
    """The flat params of buffers, and param groups of `torch.optim` with their main params."""
    group_of = {name: index for index, group in enumerate(groups) for name in group.names}

    def key_of(name: str) -> FlatParamKey | None:
        if name not in group_of:
            return None
        return FlatParamKey(
            group_of[name], plan.excluded_from_norm(name), name if plan.are_apart else ""
        )

    layouts = [(buffer.layout, buffer.param.dtype) for buffer in buffers]
    on_host = buckets_on_host(layouts, plan.config.offload_fraction, plan.loss_scale.scale.device)
    flat_params = build_flat_params(buffers, key_of, Precision.of(plan.config), on_host)
    if plan.config.ema_decay is not None:
        flat_params = tuple(
            replace(flat, average=flat.zeros(torch.float32).copy_(flat.main))
            for flat in flat_params
        )
    members = by_group(flat_params)
    return flat_params, [
        {**for_kernels(group.options), "params": [flat.main for flat in members[number]]}
        for number, group in enumerate(groups)
    ]


def _build(choice: InnerChoice, groups: Groups) -> Optimizer:
    """Builds the inner optimizer. A class that may keep its params elsewhere, too, is built at
    once, and not in parts."""
    return build_in_parts(choice.build, groups) if choice.moments else choice.build(groups)


def _host_updates(
    plan: StepPlan, flat_params: Sequence[FlatParam], inner: Optimizer, device: torch.device
) -> HostUpdates | None:
    if all(flat.on_host is None for flat in flat_params):
        return None
    if plan.choice.on_host is None:
        raise ConfigError(
            f"The inner optimizer {plan.choice.name} has no kernel for state in CPU memory. Write "
            "adam='torch_fused', or offload_fraction=0.0."
        )
    return HostUpdates(inner, partial(build_in_parts, plan.choice.on_host), device)


@dataclass(frozen=True)
class Memory:
    """Bytes of the optimizer and its buffers on this rank."""

    param_nbytes: int  # param buffers, padding included
    grad_nbytes: int  # grad buffers, padding included
    main_nbytes: int  # main params that are not the model params themselves
    moment_nbytes: int  # state of the inner optimizer; 0 before the first step
    average_nbytes: int  # averages of main params
    # the main params, moments and averages in CPU memory, if the params are on another device
    host_nbytes: int
    # pinned CPU memory, to copy gradients to the CPU and params back
    staging_nbytes: int

    @property
    def state_nbytes(self) -> int:
        """Optimizer state: main params, moments and averages."""
        return self.main_nbytes + self.moment_nbytes + self.average_nbytes


def measure_memory(optimizer: ShardedOptimizer) -> Memory:
    elsewhere = optimizer.inner.nbytes_elsewhere() if isinstance(optimizer.inner, InParts) else 0
    moments = {flat: _moments(optimizer, flat) for flat in optimizer.flat_params}
    moment_nbytes = {flat: sum(map(_nbytes, of_one)) for flat, of_one in moments.items()}
    main_nbytes = {flat: _main_nbytes(flat) for flat in optimizer.flat_params if flat.owns_memory}
    average_nbytes = {
        flat: 0 if flat.average is None else flat.average.nbytes for flat in optimizer.flat_params
    }
    on_host = [(flat, flat.on_host) for flat in main_nbytes if flat.on_host is not None]
    return Memory(
        param_nbytes=sum(_nbytes(buffer.param) for buffer in optimizer.buffers),
        grad_nbytes=sum(
            map(
                _nbytes,
                {buffer.grad.data_ptr(): buffer.grad for buffer in optimizer.buffers}.values(),
            )
        ),
        main_nbytes=sum(main_nbytes.values()),
        moment_nbytes=elsewhere + sum(moment_nbytes.values()),
        average_nbytes=sum(average_nbytes.values()),
        host_nbytes=sum(
            main_nbytes[flat] + moment_nbytes[flat] + average_nbytes[flat] for flat, _ in on_host
        ),
        staging_nbytes=sum(_nbytes(host.model) + _nbytes(host.arrived) for _, host in on_host),
    )


def _main_nbytes(flat: FlatParam) -> int:
    is_model = isinstance(flat.main, LowPrecisionTensor) and isinstance(
        flat.main.stored, PlainValues
    )
    return 0 if is_model else _nbytes(flat.main)


def _moments(optimizer: ShardedOptimizer, flat: FlatParam) -> list[Tensor]:
    return [
        value for value in state_of(optimizer.inner, flat.main).values() if torch.is_tensor(value)
    ]


def _nbytes(tensor: Tensor) -> int:
    return sum(each.nbytes for each in memory_of(tensor))
