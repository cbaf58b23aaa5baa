"""The optimizer of the forks of 2023, and how it gets into the fork's `get_megatron_optimizer`.

The fork's own function runs: its param groups, its base optimizer, its grad scaler. Only the class
that it builds is ours, and only while it runs. That class is a subclass of the fork's own, whose
reductions over tensor- and pipeline-parallel groups it uses, and does not run its constructor,
which knows CUDA tensors by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import torch
from megatron import get_args
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from megatron.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.optim import Optimizer

from megatron_distopt.comm import Field, Group, compare, exchange, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import AccessError, HostError, HostMismatchError
from megatron_distopt.hosts.averaging import average_evaluation
from megatron_distopt.hosts.base import begin_communication, clear_grads, is_used
from megatron_distopt.hosts.megatron_2023.built import ForkModel
from megatron_distopt.hosts.megatron_2023.checkpoint import ForkCheckpoints
from megatron_distopt.hosts.megatron_2023.decisions import Start, plan_start
from megatron_distopt.hosts.megatron_2023.forks import (
    CLASS,
    CLASS_PARAMETERS,
    EVALUATE_POINT,
    FLAG,
    MISSING_IMPORTS,
    PATCH_POINT,
    SCRIPT,
    check_flags,
)
from megatron_distopt.hosts.megatron_2023.grad_buffers import main_grads
from megatron_distopt.hosts.megatron_2023.step import ForkStep, add_up_over_model_ranks, phases
from megatron_distopt.hosts.patch_points import Replacement, Undo, leave_script, substituted
from megatron_distopt.hosts.protecting import protect_script
from megatron_distopt.hosts.watch import Watch
from megatron_distopt.optimizer.inner import is_torchs
from megatron_distopt.optimizer.step import StepAction, run_step
from megatron_distopt.session import Session, SessionCalls
from megatron_distopt.session.on_all_ranks import on_all_ranks


class DistributedOptimizer(SessionCalls, HostDistributedOptimizer):
    """Collective: an object of the fork's class that holds the sharded step instead of the fork's
    own state.

    Args:
        optimizer: the fork's base optimizer over model params; only its class, hyperparameters and
            groups are taken.
        clip_grad: largest gradient norm; 0 for no clipping.
        log_num_zeros_in_grad: count zeros at every step.
        params_have_main_grad: kept for the fork; always so with contiguous buffers.
        use_contiguous_buffers_in_local_ddp: must be set.
        fp16, bf16, params_dtype: kept for the fork; every param keeps its own dtype.
        grad_scaler: the fork's, or None.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        options: ours; None for what the fork's arguments and MEGATRON_DISTOPT_* variables say.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before anything is
            moved or trained.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        use_contiguous_buffers_in_local_ddp: bool,
        fp16: bool,
        bf16: bool,
        params_dtype: torch.dtype,
        grad_scaler: Any,
        models: Sequence[Module],
        *,
        options: DistOptConfig | None = None,
    ) -> None:
        self.stats_group = everyone = Group.of()
        decided = raise_together(
            lambda: plan_start(
                optimizer, clip_grad, log_num_zeros_in_grad, grad_scaler, models, options
            ),
            everyone,
        )
        # Ranks try collectives with these options; the rest of what is compared is not known yet.
        compare([Field("options", decided.plan.config.described())], everyone)
        groups = [decided.data, *(buffer.group for buffer in decided.buffers)]
        dtypes = {
            *(buffer.dtype for buffer in decided.buffers),
            *(param.dtype for param in decided.named.values()),
        }
        begin_communication(
            decided.plan.config, decided.how, decided.device, everyone, groups, dtypes
        )
        start = raise_together(decided.overlapping, everyone)
        MegatronOptimizer.__init__(
            self,
            optimizer,
            clip_grad,
            log_num_zeros_in_grad,
            params_have_main_grad,
            use_contiguous_buffers_in_local_ddp,
            models,
        )
        start = start.in_buckets(self._params_changed_after_backward(start))
        self.fork = ForkModel(start, models, grad_scaler, host_is_torchs=is_torchs(optimizer))
        self.sharded = self.fork.sharded
        self.optimizer = self.sharded.inner
        self.grad_scaler, self.fp16, self.bf16 = grad_scaler, fp16, bf16
        self.params_dtype = params_dtype
        self.session = Session(self.fork)
        self._checkpoints = ForkCheckpoints(self.fork, self.session)
        average_evaluation([self], EVALUATE_POINT)

    def _params_changed_after_backward(self, start: Start) -> frozenset[str]:
        """Collective: to whose gradients the fork adds after backward, tried on zeros where any
        rank has buckets."""
        if not any(exchange(start.overlap.bucket_size is not None, self.stats_group)):
            return frozenset()
        found: set[str] = set()
        grads = {
            name: grad for plan in start.buffers for name, grad in main_grads(plan.params).items()
        }
        with Watch(grads, found.add):
            add_up_over_model_ranks(self, get_args(), None)
        return frozenset().union(*exchange(found, start.data))

    # --- the fork's calls that make a step

    @_disable_dynamo
    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is
        averaged in `step`."""
        self.fork.used_grads.look()
        with self.fork.communication.watch:
            add_up_over_model_ranks(self, args, timers)
        with phases(args, timers)("grads-reduce-scatter"):
            self.fork.communication.reduce()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, args: Any = None, timers: Any = None) -> tuple[bool, float | None, int | None]:
        """Collective: measures, decides, updates and rounds into this rank's shards; after
        `reduce_model_grads`.

        Returns:
            (True, gradient norm, zeros or None); the norm is None without clipping. (False, None,
            None) where the step was skipped.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is
                "raise"; one step later where the check is deferred, see
                `ShardedOptimizer.defers_check`. Norm and zeros are then 0-D tensors.
            LayoutError, RanksDisagreeError: on all ranks, where params, grads or groups are not as
                they have to be on one of them; deferred as well.
            HostError: it was given a closure.
        """
        if callable(args):
            raise HostError(
                "step was given a closure, and takes the fork's arguments and timers. Compute the "
                "loss before it, and call step(args, timers)."
            )
        step = ForkStep(
            fork=self.fork,
            protection=self.session.protection,
            optimizers=[self.sharded],
            everyone=self.stats_group,
            hooks=self.session.hooks,
            shows_inner=True,
            timer=phases(args, timers),
        )
        (decision,) = run_step(step)
        if decision.action is StepAction.SKIP:
            return False, None, None
        # Both were done while the gradient was measured.
        with step.timer("optimizer-clip-main-grad"), step.timer("optimizer-count-zeros"):
            norm, num_zeros = decision.norm_to_log, decision.zeros_to_log
        return True, norm if self.clip_grad > 0 else None, num_zeros

    @_disable_dynamo
    @torch.no_grad()
    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Collective: every rank gets the new params."""
        with phases(args, timers)("params-all-gather"):
            self.fork.communication.gather()
        self.fork.used_grads.mark()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops `param.grad`, or zeroes it. The fork zeroes its own grad buffers; the others are
        zeroed here.

        Collective where the reduce-scatter overlaps with backward, backward ran and no step
        followed.
        """
        clear_grads(self.fork.start.named.values(), set_to_none=set_to_none)
        self.fork.communication.drop()

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""
        return self.sharded.loss_scale.scale

    def get_model_parallel_group(self) -> None:
        """None: statistics are added up over all ranks."""

    def clip_grad_norm(self, *_: Any) -> NoReturn:
        """Refused, as are other parts of the fork's own step, which no fork calls by themselves."""
        raise AccessError(
            "A part of the fork's own step was called (clip_grad_norm, count_zeros, "
            "get_main_grads_for_grad_norm or get_model_param_range_map), whose tensors this "
            "optimizer does not have. Call step(args, timers), which clips by --clip-grad and "
            "returns the gradient norm, and with --log-num-zeros-in-grad the zeros."
        )

    count_zeros = get_main_grads_for_grad_norm = get_model_param_range_map = clip_grad_norm

    # --- its calls about params and state

    def finish_param_gather(self) -> None:
        """With --distopt-overlap-param-gather: until all params are there; until no snapshot reads
        the state.

        To be called before code outside of a forward pass reads or changes them. The model's
        `state_dict()` and the calls of this optimizer do it by themselves.
        """
        self.session.wait_for_snapshot()
        self.fork.communication.params.finish()

    def reload_model_params(self) -> None:
        """Refreshes the main params after the model params were changed.

        One child calls it after every resume; main params that still round to the model's are more
        precise and stay.
        """
        self.sharded.check_has_params("reload_model_params")
        self.finish_param_gather()
        self.fork.reload_main_params()

    def state_dict(self) -> dict[str, Any]:
        """What a gathered file lacks; with per-rank files all of this rank's state."""
        self.finish_param_gather()
        return self._checkpoints.state_dict()

    @on_all_ranks
    def load_state_dict(self, state_dict: Mapping[str, Any], *unused: Any) -> None:
        """Collective: takes `state_dict()`, also of the fork's own optimizers, back; one child
        gives the iteration too.

        With a gathered file `load_parameter_state` has to follow.

        Raises:
            CheckpointError: on a rank that cannot take its state; nothing is changed on any rank
                then.
            RanksDisagreeError: on the others, with that rank's text.
        """
        self._checkpoints.load_state_dict(state_dict)

    @on_all_ranks
    def save_parameter_state(self, filename: str) -> None:
        """Collective: writes the tensors; nothing where the fork was told --no-save-optim.

        Every tensor- and pipeline-parallel rank has a folder of its own for its file.

        Raises:
            CheckpointError, OSError: on a rank that cannot write; the others raise
                RanksDisagreeError.
        """
        if not getattr(get_args(), "no_save_optim", False):
            self.finish_param_gather()
            self._checkpoints.save(filename)

    @on_all_ranks
    def load_parameter_state(self, filename: str) -> None:
        """Collective: reads what is there, ours or the fork's, at any data-parallel size; after
        `load_state_dict`."""
        self._checkpoints.load(filename)


def replacement(original: Callable[..., Any], options: DistOptConfig) -> Replacement:
    """What takes the place of the fork's function when the package is installed."""
    return Replacement(original, partial(build, original, options))


def build(original: Callable[..., Any], options: DistOptConfig, *args: Any, **kwargs: Any) -> Any:
    """Collective: `original`, with our class in place of the fork's where its arguments ask for a
    distributed one.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    host_args = get_args()
    if not is_used(bool(getattr(host_args, FLAG, False))):
        return original(*args, **kwargs)

    def check() -> None:
        check_flags(host_args)
        _check_class(original)

    raise_together(check, Group.of())
    names: dict[str, Any] = {CLASS: partial(_construct, original.__globals__[CLASS], options)}
    # A branch of the fork's function uses modules without importing them.
    names |= {
        name: import_module(name) for name in MISSING_IMPORTS if name not in original.__globals__
    }
    with substituted(original, names):
        optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, DistributedOptimizer):
        raise HostError(
            f"{PATCH_POINT} built {type(optimizer).__name__}. It has to build its {CLASS} where "
            f"{FLAG} is set. Use a fork that docs/hosts.md lists."
        )
    protect_script(optimizer, SCRIPT, host_args, optimizer.sharded.device)
    return optimizer


def take_over(options: DistOptConfig) -> Undo:
    """Replaces nothing; returns the undo of what a run may replace in the fork's script."""
    return leave_script


def _check_class(original: Callable[..., Any]) -> None:
    remedy = (
        "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it"
    )
    if CLASS not in original.__globals__:
        raise HostMismatchError(
            f"The module of {PATCH_POINT} has no {CLASS}, which it has to build. {remedy}."
        )
    found = inspect.signature(original.__globals__[CLASS].__init__).parameters
    needed = {
        name for name, each in list(found.items())[1:] if each.default is inspect.Parameter.empty
    }
    if not needed <= set(CLASS_PARAMETERS) <= found.keys():
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(list(found)[1:])}). It has to take "
            f"{', '.join(CLASS_PARAMETERS)}. {remedy}."
        )


def _construct(
    host_class: type, options: DistOptConfig, *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """The fork may give its arguments in any order that its own signature allows, and more than we
    know."""
    signature = inspect.signature(host_class.__init__)  # type: ignore[misc]
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()  # the fork may leave out what it has a default for
    given = dict(bound.arguments)
    known = {name: given.pop(name) for name in CLASS_PARAMETERS}
    given.pop(next(iter(signature.parameters)))  # self
    unlike = {
        name: value for name, value in given.items() if value != signature.parameters[name].default
    }
    if unlike:
        names = ", ".join(f"{name}={value!r}" for name, value in unlike.items())
        raise HostMismatchError(
            f"Unknown arguments of {CLASS}: {names}. It takes {', '.join(CLASS_PARAMETERS)} alone. "
            "Leave the fork's option behind it off."
        )
    return DistributedOptimizer(**known, options=options)
