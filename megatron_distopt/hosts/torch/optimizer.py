"""The optimizer that `distribute` returns: the calls of `torch.optim.Optimizer` around the sharded
step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.checkpoint.param_groups import LOSS_SCALE, check_options
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.checkpoint.torch_state import (
    StateByParam,
    full_state_dict,
    refuse_write,
    torch_state_dict,
)
from megatron_distopt.comm import Field, compare, exchange, meet_in_call, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.errors import AccessError, ConfigError, LayoutError
from megatron_distopt.hosts.start import as_torch_groups, clear_grads, named_params
from megatron_distopt.hosts.torch.checkpoint import (
    UntrainedTensors,
    load_torch_state,
    names_of_grouped,
    torch_params,
)
from megatron_distopt.hosts.torch.ddp import NO_JOIN
from megatron_distopt.hosts.torch.model import ShardedModel
from megatron_distopt.hosts.torch.step import TorchStep
from megatron_distopt.hosts.torch.translate import check_groups, check_param, name_groups
from megatron_distopt.optimizer.inner import InParts
from megatron_distopt.optimizer.inner_options import option_text, option_values
from megatron_distopt.optimizer.loss_scale import DynamicLossScale
from megatron_distopt.optimizer.main_params import main_grads
from megatron_distopt.optimizer.sharded import Memory, ShardedOptimizer, measure_memory
from megatron_distopt.optimizer.step import StepDecision, clip_divisor, measure_now, run_step
from megatron_distopt.session import Session, SessionCalls
from megatron_distopt.session.on_all_ranks import on_all_ranks


def _set_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Refuses other param groups than those that it was built with, which would not be used."""
    if getattr(optimizer, "_is_built", False):
        raise ConfigError(
            "optimizer.param_groups was assigned, and stays the list that the optimizer was built "
            "with. Write into its groups, optimizer.param_groups[0]['lr'] = 1e-4, or call "
            "optimizer.add_param_group(...)."
        )
    vars(optimizer)["param_groups"] = groups


class TorchDistributedOptimizer(SessionCalls, Optimizer):
    """A `torch.optim.Optimizer` whose state is sharded over the data-parallel ranks. Made by
    `distribute`.

    `param_groups` hold the params of the model, and their options are live, as in torch. A param
    without a gradient on any rank is left alone; one with a gradient on some ranks is updated with
    the average over all of them.

    Attributes:
        last_step: what the last `step()` did: whether it updated, the norm of the gradient, its
            zeros. None before it.
        sharded: updates what this rank owns.
        session: what saves and protects the run.

    Example: see `megatron_distopt.distribute`.
    """

    #: False until torch's constructor is done, which sets attributes that are made when they are
    #: read here.
    _is_built = False
    last_step: StepDecision | None = None
    #: Whole state that `state_dict()` returns until the next step or load; on the rank that
    #: `consolidate_state_dict` named.
    _consolidated: dict[int, Any] | None = None
    _num_loads_before = 0  # when it was made
    param_groups = property(lambda self: vars(self)["param_groups"], _set_groups)

    def __init__(
        self, model: ShardedModel, groups: list[dict[str, Any]], given: Sequence[Optimizer]
    ) -> None:
        self._model, self._given, self.stats_group = model, given, model.everyone
        self.session = Session(model)
        is_cut = model.data.size != model.everyone.size
        self._untrained = UntrainedTensors(model.chunks, is_cut=is_cut)
        # Of several optimizers none, as torch would put them into the groups of the others.
        defaults = [each.defaults for each in given] or [model.sharded.inner.defaults]
        # Without the groups, which were checked: torch looks for every param in all groups before.
        super().__init__([{"params": []}], dict(defaults[0]) if len(defaults) == 1 else {})
        self.param_groups = groups
        self._is_built = True
        for group in groups:
            group.update({**self.defaults, **group})
            group.pop(LOSS_SCALE, None)
        if isinstance(model.sharded.loss_scale, DynamicLossScale):
            # torch's flattened format has what groups have
            groups[0][LOSS_SCALE] = model.sharded.loss_scale.state
        self._step = TorchStep(
            model=model,
            protection=self.session.protection,
            optimizers=[model.sharded],
            everyone=model.everyone,
            hooks=self.session.hooks,
        )
        self._end = finalize(self, _release, self.session, model)
        self._end.atexit = False  # peers may be gone by then
        for each in given:
            _redirect(each, self, is_alone=len(given) == 1)

    # --- what torch's class has

    @property
    def sharded(self) -> ShardedOptimizer:
        """Updates what this rank owns."""
        return self._model.sharded

    @_disable_dynamo  # collectives and changes of objects are no graph
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: reduce-scatter, update, all-gather.

        Args:
            closure: computes the loss anew, backward included, and returns it.

        Returns:
            What the closure returned; None without one. `last_step` says what was done.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is
                "raise".
            LayoutError, ConfigError, RanksDisagreeError: on all ranks, where params, groups or
                gradients are not as they have to be on one of them. The params are as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated = None
        (self.last_step,) = run_step(self._step)
        for each in self._given:
            vars(each)["_opt_called"] = True  # torch's schedulers look for it
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or zeroes them, as torch's.

        Collective with `overlap_grad_reduce`, where backward ran and no step followed.
        """
        self._model.grads.clear(set_to_none=set_to_none)
        clear_grads(self._model.waiting.values(), set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: trains further params of the model, which were frozen, new, or in no group so
        far.

        Args:
            param_group: as for `torch.optim`.

        Raises:
            LayoutError: on all ranks, where they are no params of the model that was distributed.
            RanksDisagreeError: on all ranks, where they add other params.
        """
        if not self._is_built:
            super().add_param_group(param_group)
            return
        if isinstance(self._model.sharded.inner, InParts):
            features = {
                Feature.WHOLE_PARAMS: self.sharded.plan.choice.name,
                Feature.ADDED_GROUP: "add_param_group()",
            }
            check_compatible(self._model.config, features)
        (group,) = as_torch_groups([param_group])
        self._consolidated = None
        model = self._model
        meet_in_call("add_param_group", model.everyone)
        described = raise_together(
            lambda: self._check_added(group), model.everyone, "add_param_group"
        )
        raise_together(lambda: compare([described], model.data), model.everyone, "add_param_group")
        super().add_param_group(group)
        model.find_waiting()
        added = name_groups([group], model.waiting)[0].names
        model.grow(name for name in added if model.waiting[name].requires_grad)

    def _check_added(self, group: Mapping[str, Any]) -> Field:
        """Checks a further group; returns what all ranks must add alike."""
        named = named_params(self._model.chunks)
        name_of = {param: name for name, param in named.items()}
        check_groups([group], named, self.param_groups)
        for param in group["params"]:
            check_param(name_of[param], param)
        given = option_values(group)
        check_options(len(self.param_groups), given, self._model.sharded.plan.choice)
        options = [f"{key}={option_text(value)}" for key, value in sorted(given.items())]
        names = [name_of[param] for param in group["params"]]
        return Field("param group that is added", (*options, *names))

    def join_hook(self, **_: Any) -> NoReturn:
        """Refuses torch's `Join` context, as does a model in DistributedDataParallel."""
        raise ConfigError(NO_JOIN)

    # --- what torch's class does not have

    @property
    def memory(self) -> Memory:
        """Bytes that this rank holds."""
        return measure_memory(self.sharded)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, buckets are not reduced: with `overlap_grad_reduce`, for all but the last
        backward of a step."""
        return self._model.communicator.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on, in fp32: a 16-bit loss would overflow when it is
        scaled."""
        scaled = loss.float() * self.sharded.loss_scale.scale.squeeze()
        return self._model.grads.scaled_loss.mark(scaled)

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective: clips the gradient of the whole model, as `torch.nn.utils.clip_grad_norm_`
        does undistributed.

        To be called between the last backward and `step()`. `DistOptConfig(clip_grad=...)` does the
        same within the step.

        Args:
            max_norm: largest L2 norm of the averaged gradient.
            norm_type: 2.0; docs/torch.md clips by another norm.

        Returns:
            The norm before clipping, fp32 0-D.

        Raises:
            ConfigError: another norm, or a `max_norm` that is not a positive number.
            LayoutError: gradients were cleared on some ranks and kept on others, or assigned after
                they were summed.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type is {norm_type}, and must be 2.0. Leave it out, or compute another norm "
                "from optimizer.full_grad(param): see docs/torch.md."
            )
        if not float(max_norm) > 0:
            raise ConfigError(
                f"max_norm is {max_norm}, and must be above 0. Write clip_grad_norm_(1.0)."
            )
        model = self._model
        model.admit()
        self._step.reduce_ahead()
        grads = main_grads(model.sharded.flat_params)
        norm = measure_now([model.sharded], [grads], model.everyone).norm(model.grads.divisor)
        model.grads.clip(clip_divisor(norm, float(max_norm)))
        return torch.tensor(norm, device=model.device)

    @_disable_dynamo
    @torch.no_grad()
    @on_all_ranks
    def full_grad(self, param: Parameter) -> Tensor | None:
        """Collective: the averaged gradient of a param, whole, on every rank.

        To be called after the last backward of a step, or after the step.

        Args:
            param: of the model.

        Returns:
            fp32, in the shape of the param; None where it has no gradient on any rank.

        Raises:
            LayoutError: it is no param of this optimizer, or as of `clip_grad_norm_`.
        """
        model = self._model
        model.admit()
        slot = next((slot for slot in model.grads.slots if slot.param is param), None)
        if (
            slot is None
            and not param.numel()
            and param in names_of_grouped(self._model, self.param_groups)
        ):
            has_grad = any(exchange(param.grad is not None, model.data))
            return torch.zeros(param.shape, device=param.device) if has_grad else None
        if slot is None:
            raise LayoutError(
                "The param is not one that this optimizer updates. Unfreeze it and call "
                "optimizer.add_param_group({'params': [param]})."
            )
        self._step.reduce_ahead()
        return model.grads.averaged(slot)

    def finish_param_gather(self) -> None:
        """Waits until all params are there; of use with `overlap_param_gather` alone.

        Only for code that reads params without an operator of torch's, such as another package's
        kernel; all other reads wait by themselves.
        """
        self._model.gather.finish()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Refreshes all main params from the model params, also where they still round to them."""
        self.sharded.check_has_params("reload_model_params")
        self.finish_param_gather()
        self._model.params.reload()

    # --- the state, also in torch's format

    @property
    def state(self) -> Any:
        """The state by param, made when it is read; see [Note: torch's format] in
        checkpoint/torch_state.py.

        On several ranks its values are shards, which torch.distributed.checkpoint saves.
        """
        if not self._is_built:
            return {}
        self._check_torchs_format("state")
        is_empty = self._model.sharded.plan.choice.updates_whole_params
        names = {} if is_empty else names_of_grouped(self._model, self.param_groups)
        return StateByParam(torch_params(self._model, self.param_groups), names, self.reset_state)

    @state.setter
    def state(self, value: Any) -> None:
        """Lets all state begin anew where it is empty; torch's constructor sets one, too."""
        if value:
            refuse_write()
        if self._is_built:
            self.reset_state()

    __setstate__ = refuse_write

    @torch.no_grad()
    def reset_state(
        self, params: Iterable[Parameter] | None = None, *, scale: Mapping[str, float] | None = None
    ) -> None:
        """Lets the optimizer state of params begin anew, on all ranks alike and between two steps.

        As `optimizer.state.pop(param)` in torch: moments are zero or absent, and the count of
        updates is 0. Values of params, their main params and averages stay, and so does what a
        class of your own writes into its param groups. Ranks compare their resets in the next step.

        Examples:
            >>> import torch, torch.distributed as dist, megatron_distopt
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            >>> model = torch.nn.Linear(4, 2)
            >>> adamw = torch.optim.AdamW(model.parameters())
            >>> optimizer = megatron_distopt.distribute(model, adamw)
            >>> model(torch.ones(3, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> optimizer.reset_state([model.weight])
            >>> [int(optimizer.state[param]["step"]) for param in model.parameters()]
            [0, 1]
            >>> dist.destroy_process_group()

        Args:
            params: that this optimizer has; all of them where None.
            scale: multiplies moments instead, as `state[param]["exp_avg"].mul_(0.1)` does:
                `{"exp_avg": 0.1}`. Counts and other moments stay.

        Raises:
            LayoutError: a param is in no param group.
            ConfigError: the inner optimizer keeps no moment that `scale` names, or is an Adam that
                counts the updates of a whole param group.
        """
        name_of = names_of_grouped(self._model, self.param_groups)
        names = sorted(name_of.get(param, "") for param in (name_of if params is None else params))
        if "" in names:
            raise LayoutError(
                f"{names.count('')} params of reset_state are in no param group. Give params of "
                "the optimizer."
            )
        self.session.wait_for_snapshot()
        self.sharded.reset_state(names, scale)
        self._model.params.options.note_reset(names, scale)
        self._consolidated = None

    def _check_torchs_format(
        self, call: str, loaded: Mapping[Any, Any] = MappingProxyType({})
    ) -> None:
        """Refuses torch's format, which is cut by element, where whole params are updated, whose
        state owners have; not while there is no state, which frameworks ask for at the start."""
        choice = self._model.sharded.plan.choice
        if choice.updates_whole_params and (self.last_step or self._model.num_loads or loaded):
            features = {
                Feature.WHOLE_PARAMS: choice.name,
                Feature.TORCH_FORMAT: f"optimizer.{call}",
            }
            check_compatible(self._model.config, features)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's own format; no collective.

        On one rank `torch.save` writes it, and `torch.optim.AdamW` loads it. On several ranks its
        values are shards: `torch.distributed.checkpoint` saves them, on all ranks, and `torch.save`
        refuses them. `save(folder)` and `full_state_dict()` are other ways.
        """
        self._check_torchs_format("state_dict()")
        self._model.gather.finish()
        self._model.params.follow()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = torch_state_dict(torch_params(self._model, self.param_groups))
        if self._consolidated is not None and self._num_loads_before == self._model.num_loads:
            state["state"] = self._consolidated
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    @torch.no_grad()
    @on_all_ranks
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective: takes a state in torch's format, of `state_dict()`, `full_state_dict()` or an
        optimizer of torch.

        Raises:
            CheckpointError: on all ranks, where one of them cannot take its state; nothing is
                changed then.
        """
        self._check_torchs_format("load_state_dict()", state_dict.get("state", {}))
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        self.session.begin_load()
        load_torch_state(self._model, self.param_groups, state_dict)
        self._consolidated = None
        self.session.note_loaded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.no_grad()
    @on_all_ranks
    def full_state_dict(self) -> dict[str, Any]:
        """Collective: the whole state in torch's format on rank 0, gathered param by param; empty
        on the others."""
        self._check_torchs_format("full_state_dict()")
        self.session.bring_up_to_date()
        return full_state_dict(torch_params(self._model, self.param_groups))

    @on_all_ranks
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: until the next step or load, `state_dict()` on rank 0 is `full_state_dict()`,
        for `torch.save`.

        For frameworks that save `state_dict()` of rank 0 alone. Some of them call this by
        themselves, as they do for `torch.distributed.optim.ZeroRedundancyOptimizer`.

        Args:
            to: 0; no other rank of the data-parallel group can have it.

        Raises:
            ConfigError: another rank.
        """
        if to != 0:
            raise ConfigError(
                f"to is {to}, and the whole state comes to rank 0. Leave it out, and call "
                "torch.save on rank 0."
            )
        whole = self.full_state_dict()
        self._consolidated = whole.get("state")
        self._num_loads_before = self._model.num_loads

    # --- snapshots

    def protect(self, step: int, state: Callable[[], Any] = lambda: None) -> None:
        super().protect(step, lambda: {"state": state(), "beside": self._untrained.changed()})

    def resume(self, newer_than: int = -1) -> Resumed | None:
        return self._untrained.take(super().resume(newer_than))

    def release(self) -> None:
        """Ends this optimizer: the params stay what they are and may be given to another one.

        Their gradients are torch's own again. On several ranks those that were summed are dropped,
        as each rank has a part of them.
        """
        self._end()


def _release(session: Session, model: ShardedModel) -> None:
    session.release()
    model.release()


#: What a user may call on an optimizer that was given.
_CALLS = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")


def _redirect(given: Optimizer, ours: TorchDistributedOptimizer, *, is_alone: bool) -> None:
    """Makes the methods of an optimizer that was given call ours: a scheduler may still hold it.

    Those of one of several are errors, as in torch they would act on the params of that one alone.
    """

    def refused(name: str, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name} of {type(given).__name__} was called on one of several optimizers. Call "
            f"{name} of what distribute(...) returned."
        )

    given.state.clear()
    kind, elsewhere = type(given), property(_refuse_state, _refuse_state)
    # Only a class sees what is assigned to the attributes of its objects.
    attributes = {"state": elsewhere, "param_groups": type(ours).param_groups, "_is_built": True}
    given.__class__ = type(kind.__name__, (kind,), {**attributes, "__setstate__": _refuse_state})
    if is_alone:
        calls = {name: partial(getattr(ours, name)) for name in _CALLS}
        ours._optimizer_step_pre_hooks = given._optimizer_step_pre_hooks
        ours._optimizer_step_post_hooks = given._optimizer_step_post_hooks
    else:
        hooks = [name for name in dir(Optimizer) if re.fullmatch("register_.*_hook", name)]
        calls = {name: partial(refused, name) for name in (*_CALLS, *hooks)}
    for name, call in calls.items():
        # torch's schedulers look for it
        call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        setattr(given, name, call)


def _refuse_state(*_: Any) -> NoReturn:
    """Refuses the state of an optimizer that was given: a method of its class that uses it would do
    nothing."""
    raise AccessError(
        "The state of an optimizer was used or assigned after it was given to distribute. Use the "
        "optimizer that distribute(...) returned: its reset_state(params) lets state begin anew."
    )
