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
from megatron_distopt.comm import Field, all_gather_objects, compare, meet_in_call, raise_together
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
    """Refuses a list of param groups that is assigned later, because it would not be used."""
    if getattr(optimizer, "_is_built", False):
        raise ConfigError(
            "optimizer.param_groups was assigned, but it must stay the list that the optimizer was "
            "built with. Write into its groups, as in optimizer.param_groups[0]['lr'] = 1e-4, or "
            "call optimizer.add_param_group(...)."
        )
    vars(optimizer)["param_groups"] = groups


class TorchDistributedOptimizer(SessionCalls, Optimizer):
    """A `torch.optim.Optimizer` whose state is sharded over the data-parallel ranks. Made by
    `distribute`.

    `param_groups` hold the params of the model. Options that are changed there take effect, as in
    torch. A param without a gradient on any rank is not changed. A param with a gradient on some
    ranks is updated with the average over all ranks.

    Attributes:
        last_step: what the last `step()` did: whether it updated, the norm of the gradient, and its
            number of zeros. None before the first step.
        sharded: updates what this rank owns.
        session: saves and protects the run.

    Example: see `megatron_distopt.distribute`.
    """

    #: False until torch's constructor is done: it assigns to attributes that are properties here.
    _is_built = False
    last_step: StepDecision | None = None
    #: On rank 0 the whole state that `state_dict()` returns until the next step or load, made by
    #: `consolidate_state_dict`.
    _consolidated: dict[int, Any] | None = None
    _num_loads_before = 0  # loads when `_consolidated` was made
    param_groups = property(lambda self: vars(self)["param_groups"], _set_groups)

    def __init__(
        self, model: ShardedModel, groups: list[dict[str, Any]], given: Sequence[Optimizer]
    ) -> None:
        self._model, self._given, self.stats_group = model, given, model.everyone
        self.session = Session(model)
        is_cut = model.data.size != model.everyone.size
        self._untrained = UntrainedTensors(model.chunks, is_cut=is_cut)
        # Several optimizers give none: torch would put their defaults into each other's groups.
        defaults = [each.defaults for each in given] or [model.sharded.inner.defaults]
        # Without the groups, which are checked already: for each param torch searches all groups.
        super().__init__([{"params": []}], dict(defaults[0]) if len(defaults) == 1 else {})
        self.param_groups = groups
        self._is_built = True
        for group in groups:
            group.update({**self.defaults, **group})
            group.pop(LOSS_SCALE, None)
        if isinstance(model.sharded.loss_scale, DynamicLossScale):
            # torch's flattened format saves what the groups hold
            groups[0][LOSS_SCALE] = model.sharded.loss_scale.state
        self._step = TorchStep(
            model=model,
            protection=self.session.protection,
            optimizers=[model.sharded],
            everyone=model.everyone,
            hooks=self.session.hooks,
        )
        self._end = finalize(self, _release, self.session, model)
        self._end.atexit = False  # other ranks may be gone by then
        for each in given:
            _redirect(each, self, is_alone=len(given) == 1)

    # --- what torch's class has

    @property
    def sharded(self) -> ShardedOptimizer:
        """Updates what this rank owns."""
        return self._model.sharded

    @_disable_dynamo  # torch.compile cannot trace collectives and changes of objects
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: reduce-scatter, update, all-gather.

        Args:
            closure: computes the loss again, with its backward, and returns it.

        Returns:
            What the closure returned; None without one. `last_step` says what was done.

        Raises:
            NonFiniteGradError: on all ranks, if a gradient is not finite and `nonfinite` is
                "raise".
            LayoutError, ConfigError, RanksDisagreeError: on all ranks, if params, groups or
                gradients of one rank cannot be used. The params are unchanged.
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
        """Drops the gradients, or zeroes them, as torch's `zero_grad` does.

        With `overlap_grad_reduce` it is collective after a backward that no step followed.
        """
        self._model.grads.clear(set_to_none=set_to_none)
        clear_grads(self._model.untrained.values(), set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: trains further params of the model, which were frozen, new, or in no group so
        far.

        Args:
            param_group: as for `torch.optim`.

        Raises:
            LayoutError: on all ranks, if a param is not in the model that was distributed.
            RanksDisagreeError: on all ranks, if they add different params.
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
        model.find_untrained()
        added = name_groups([group], model.untrained)[0].names
        model.begin_training_of(name for name in added if model.untrained[name].requires_grad)

    def _check_added(self, group: Mapping[str, Any]) -> Field:
        """Checks a further group; returns what must be equal on all ranks."""
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
        """Within it buckets are not reduced. With `overlap_grad_reduce`, use it for all but the
        last backward of a step."""
        return self._model.communicator.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale, on which to call `backward`. It is fp32, because a
        16-bit loss would overflow."""
        scaled = loss.float() * self.sharded.loss_scale.scale.squeeze()
        return self._model.grads.scaled_loss.mark(scaled)

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective: clips the gradient of the whole model, as `torch.nn.utils.clip_grad_norm_`
        does on one rank.

        Call it between the last backward and `step()`. `DistOptConfig(clip_grad=...)` does the same
        within the step.

        Args:
            max_norm: largest L2 norm of the averaged gradient.
            norm_type: 2.0; docs/torch.md shows how to clip by another norm.

        Returns:
            The norm before clipping, fp32 0-D.

        Raises:
            ConfigError: for another norm, or a `max_norm` that is not above 0.
            LayoutError: if gradients were cleared on some ranks only, or assigned after they were
                summed.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type is {norm_type}, but clip_grad_norm_ supports only 2.0. Leave it out, "
                "or compute another norm from optimizer.full_grad(param), as docs/torch.md shows."
            )
        if not float(max_norm) > 0:
            raise ConfigError(
                f"max_norm is {max_norm}, but it must be above 0. Write clip_grad_norm_(1.0)."
            )
        model = self._model
        model.begin_training_with_grads()
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

        Call it after the last backward of a step, or after the step.

        Args:
            param: a param that this optimizer updates.

        Returns:
            fp32, in the shape of the param; None if no rank has a gradient of it.

        Raises:
            LayoutError: if this optimizer does not update the param, or if gradients were cleared
                on some ranks only, or assigned after they were summed.
        """
        model = self._model
        model.begin_training_with_grads()
        slot = next((slot for slot in model.grads.slots if slot.param is param), None)
        if (
            slot is None
            and not param.numel()
            and param in names_of_grouped(self._model, self.param_groups)
        ):
            has_grad = any(all_gather_objects(param.grad is not None, model.data))
            return torch.zeros(param.shape, device=param.device) if has_grad else None
        if slot is None:
            raise LayoutError(
                "full_grad was called with a param that this optimizer does not update. Unfreeze "
                "the param and call optimizer.add_param_group({'params': [param]})."
            )
        self._step.reduce_ahead()
        return model.grads.averaged(slot)

    def finish_param_gather(self) -> None:
        """Waits until all params are gathered; only needed with `overlap_param_gather`.

        Call it before code that reads params without an operator of torch, such as another
        package's kernel. All other reads wait by themselves.
        """
        self._model.gather.finish()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copies all model params into their main params, also those whose main params still round
        to them."""
        self.sharded.check_has_params("reload_model_params")
        self.finish_param_gather()
        self._model.params.reload()

    # --- the state, also in torch's format

    @property
    def state(self) -> Any:
        """The state by param, computed on each read; see [Note: torch's format] in
        checkpoint/torch_state.py.

        On several ranks its values are shards, which torch.distributed.checkpoint can save.
        """
        if not self._is_built:
            return {}
        self._check_torchs_format("state")
        is_empty = self._model.sharded.plan.choice.updates_whole_params
        names = {} if is_empty else names_of_grouped(self._model, self.param_groups)
        return StateByParam(torch_params(self._model, self.param_groups), names, self.reset_state)

    @state.setter
    def state(self, value: Any) -> None:
        """An empty dict resets all state, and any other value is refused. torch's constructor
        assigns one, too."""
        if value:
            refuse_write()
        if self._is_built:
            self.reset_state()

    __setstate__ = refuse_write

    @torch.no_grad()
    def reset_state(
        self, params: Iterable[Parameter] | None = None, *, scale: Mapping[str, float] | None = None
    ) -> None:
        """Resets the optimizer state of params. Call it on all ranks alike, between two steps.

        It does what `optimizer.state.pop(param)` does in torch: moments become zero or absent, and
        the count of updates becomes 0. Params, main params and averages stay, and so does what an
        optimizer class of your own writes into its param groups. Ranks compare their resets in the
        next step.

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
            params: params of this optimizer; None for all of them.
            scale: multiplies moments instead of resetting them. `{"exp_avg": 0.1}` does what
                `state[param]["exp_avg"].mul_(0.1)` does in torch. Counts and other moments stay.

        Raises:
            LayoutError: if a param is in no param group.
            ConfigError: if the inner optimizer has no moment that `scale` names, or is an Adam that
                counts updates by param group.
        """
        name_of = names_of_grouped(self._model, self.param_groups)
        names = sorted(name_of.get(param, "") for param in (name_of if params is None else params))
        if "" in names:
            raise LayoutError(
                f"reset_state was called with {names.count('')} params that are in no param group. "
                "Give it params of this optimizer."
            )
        self.session.wait_for_snapshot()
        self.sharded.reset_state(names, scale)
        self._model.params.options.note_reset(names, scale)
        self._consolidated = None

    def _check_torchs_format(
        self, call: str, loaded: Mapping[Any, Any] = MappingProxyType({})
    ) -> None:
        """Refuses torch's format for optimizers that update whole params: the format is cut by
        element, but one rank owns the state of a param. Frameworks ask for the state before the
        first step; while there is none, nothing is refused."""
        choice = self._model.sharded.plan.choice
        if choice.updates_whole_params and (self.last_step or self._model.num_loads or loaded):
            features = {
                Feature.WHOLE_PARAMS: choice.name,
                Feature.TORCH_FORMAT: f"optimizer.{call}",
            }
            check_compatible(self._model.config, features)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's own format; not collective.

        On one rank `torch.save` writes it, and `torch.optim.AdamW` loads it. On several ranks its
        values are shards: `torch.distributed.checkpoint` saves them on all ranks, and `torch.save`
        refuses them. `save(folder)` and `full_state_dict()` work on any number of ranks.
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
        """Collective: loads a state in torch's format, from `state_dict()`, `full_state_dict()` or
        an optimizer of torch.

        Raises:
            CheckpointError: on all ranks, if one of them cannot take its state. Nothing is changed
                then.
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
        """Collective: returns the whole state in torch's format on rank 0, gathered param by param,
        and an empty dict on the other ranks."""
        self._check_torchs_format("full_state_dict()")
        self.session.bring_up_to_date()
        return full_state_dict(torch_params(self._model, self.param_groups))

    @on_all_ranks
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: until the next step or load, `state_dict()` on rank 0 returns what
        `full_state_dict()` returns, for `torch.save`.

        It serves frameworks that save only rank 0's `state_dict()`. Some of them call this method
        by themselves, as they do for `torch.distributed.optim.ZeroRedundancyOptimizer`.

        Args:
            to: must be 0, the rank of the data-parallel group that has the whole state.

        Raises:
            ConfigError: for any other rank.
        """
        if to != 0:
            raise ConfigError(
                f"consolidate_state_dict was called with to={to}, but only rank 0 can have the "
                "whole state. Leave to out, and call torch.save on rank 0."
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
        """Ends this optimizer. The params keep their values and may be given to another optimizer.

        Their gradients are torch's own again. On several ranks, gradients that were summed are
        dropped, because each rank has only a part of them.
        """
        self._end()


def _release(session: Session, model: ShardedModel) -> None:
    session.release()
    model.release()


#: What a user may call on an optimizer that was given.
_CALLS = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")


def _redirect(given: Optimizer, ours: TorchDistributedOptimizer, *, is_alone: bool) -> None:
    """Makes the methods of an optimizer that was given call ours, because a scheduler may still
    hold it.

    For one of several optimizers they raise instead: in torch they act on that optimizer's params
    only.
    """

    def refused(name: str, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name} of {type(given).__name__} was called, but this is one of several optimizers "
            f"that were given to distribute(...). Call {name} of the optimizer that it returned."
        )

    given.state.clear()
    kind, elsewhere = type(given), property(_refuse_state, _refuse_state)
    # Assignments to an object's attributes can only be refused by its class.
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
    """Refuses the state of an optimizer that was given: it is no longer used, so reading or
    changing it has no effect."""
    raise AccessError(
        "The state of an optimizer was read or assigned after the optimizer was given to "
        "distribute(...). Use the optimizer that distribute(...) returned; its "
        "reset_state(params) resets state."
    )
