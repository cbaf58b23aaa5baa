"""A training program as a value: what is drawn, made smaller, compared and printed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tests.differential.idioms import IDIOMS, Place, Refusable

__all__ = ["Action", "Iteration", "Microbatch", "Phase", "Program", "allowed"]


class _Short:
    """Its repr has only what differs from the default: programs have to be read."""

    def __repr__(self) -> str:
        named = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        given = ", ".join(f"{name}={got!r}" for name, got, default in named if got != default)
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, repr=False)
class Action(_Short):
    """One use of an idiom."""

    name: str  # in `IDIOMS`
    n: int = 0  # which param, rank or value


@dataclass(frozen=True, repr=False)
class Microbatch(_Short):
    """One forward and backward."""

    entry: str = "model"  # "model", "forward" or "loss": the call of the model
    idle: int | None = None  # the rank that has no data; None for none
    infinite: int | None = None  # the rank whose loss is infinite; None for none
    is_scaled: bool = True  # False for a script that forgets `scale_loss`


@dataclass(frozen=True, repr=False)
class Iteration(_Short):
    """From the first forward pass to the cleared gradients."""

    # what is done before the forward passes, between backward and step, and after the step
    weights: tuple[Action, ...] = ()
    microbatches: tuple[Microbatch, ...] = (Microbatch(),)  # of this iteration
    no_sync: bool = True  # whether all microbatches but the last stand in `no_sync()`
    grads: tuple[Action, ...] = ()
    step: str = "plain"  # "plain", "closure", "twice", "none", or "not on one rank"
    after: tuple[Action, ...] = ()
    zero: str = "optimizer"  # how gradients are cleared: a key of `scripts.ZERO`


@dataclass(frozen=True, repr=False)
class Phase(_Short):
    """Ends with a checkpoint, which the next phase loads with its own number of ranks."""

    ranks: int = 1
    iterations: tuple[Iteration, ...] = (Iteration(),)


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A training script."""

    kind: str = "Perceptron"  # of the model, a class of models.py
    dtype: str = "float32"  # of its params: "float32", "bfloat16", "float16" or "mixed"
    optimizer: str = "AdamW"  # a key of `scripts.OPTIMIZERS`
    groups: str = "one"  # a key of `scripts.GROUPS`
    scheduler: str | None = None  # a key of `scripts.SCHEDULERS`; None for none
    # whether it is built over the optimizer that `distribute` is given
    scheduler_before: bool = False
    options: tuple[tuple[str, Any], ...] = ()  # of `distribute`, by name
    compiled: str | None = None  # "before" or "after" `distribute`, or "method"; None for not
    recompute: str | None = None  # None, "reentrant" or "not reentrant"
    grad_scaler: bool = False  # whether the loss is scaled by torch.amp.GradScaler
    other_seeds: bool = False  # whether ranks start from different weights
    start: tuple[Action, ...] = ()  # what is done before and after `distribute`
    ready: tuple[Action, ...] = ()
    phases: tuple[Phase, ...] = (Phase(),)  # at least one

    def shares_processes_of(self, ranks: int) -> bool:
        """Whether it may run in processes with others; compilers keep too much."""
        return len(self.phases) == 1 and self.phases[0].ranks == ranks and self.compiled is None

    @property
    def option(self) -> dict[str, Any]:
        """`options` by name."""
        return dict(self.options)

    @property
    def precision(self) -> str:
        """The dtype that results are as fine as: gradients that travel in 16 bits are no finer."""
        return (
            "bfloat16"
            if self.option.get("reduce_dtype") and self.dtype == "float32"
            else self.dtype
        )

    @property
    def iterations(self) -> list[Iteration]:
        """Of all phases."""
        return [iteration for phase in self.phases for iteration in phase.iterations]

    @property
    def actions(self) -> list[Action]:
        """All, in order."""
        inside = [(*each.weights, *each.grads, *each.after) for each in self.iterations]
        return [*self.start, *self.ready, *(action for actions in inside for action in actions)]

    @property
    def may_refuse(self) -> bool:
        """Whether there is anything in it that an error of ours may answer."""
        micros = [micro for each in self.iterations for micro in each.microbatches]
        return (
            any(_refusable(action, self) for action in self.actions)
            or self.grad_scaler
            or self.option.get("main_params_dtype") == "remainder"
            or (
                bool(self.option.get("loss_scale")) and any(not micro.is_scaled for micro in micros)
            )
            or any(each.step == "not on one rank" for each in self.iterations)
            or any(_drops_without_data(each) for each in self.iterations)
            or (
                self._ranks > 1
                and "grad_dropped_on_one_rank" in self._names
                and self._keeps_gradients
            )
            or any(_goes_on_after_clipping(each.grads) for each in self.iterations)
            or (bool(self.option.get("overlap_grad_reduce")) and self._reduces_twice)
            or (bool(self.option.get("loss_scale")) and self._keeps_gradients)
        )

    @property
    def _names(self) -> set[str]:
        return {action.name for action in self.actions}

    @property
    def _ranks(self) -> int:
        return max(phase.ranks for phase in self.phases)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients of one step are there in the next one, by when the loss scale may be
        another.

        Zeros that were not written by the optimizer's own call cannot be told from gradients.
        """
        unknown = ("kept", "zero_ of each", "model, not to None")
        return any(each.zero in unknown or each.step == "twice" for each in self.iterations)

    @property
    def _reduces_twice(self) -> bool:
        """With overlap, whether a backward outside of `no_sync` is not the last of its step."""
        return any(
            (len(each.microbatches) > 1 and not each.no_sync) or each.step == "none"
            for each in self.iterations
        )


def _goes_on_after_clipping(grads: tuple[Action, ...]) -> bool:
    """Whether there is a backward, or a gradient is written, after the gradient was averaged."""
    names = [action.name for action in grads]
    written = [name for name in names if name.startswith("grad_") and name != "grad_is_none"]
    return names[:1] in (["clip_grad_norm"], ["full_grad"]) and bool(written)


def _drops_without_data(iteration: Iteration) -> bool:
    """Whether gradients are cleared without a step where a rank may have none: it looks as if it
    left out a step."""
    return iteration.step == "none" and any(
        micro.idle is not None for micro in iteration.microbatches
    )


def _refusable(action: Action, program: Program) -> bool:
    return {
        Refusable.NEVER: False,
        Refusable.ALWAYS: True,
        Refusable.SEVERAL_RANKS: program._ranks > 1,
        Refusable.OVERLAP: bool(program.option.get("overlap_grad_reduce")),
    }[IDIOMS[action.name].refusable]


def allowed(name: str, program: Program, place: Place) -> bool:
    """Whether the idiom means something at that place of that program, whose actions are not asked
    for."""
    idiom = IDIOMS[name]
    met = {
        "one phase": len(program.phases) == 1,
        "only trained": program.groups == "trained",
        "betas": program.optimizer in ("AdamW", "Adam", "Adam amsgrad", "NAdam", "RAdam", "Adamax"),
        "takes fractions": program.optimizer
        in ("AdamW", "Adam", "Adam amsgrad", "NAdam", "Adamax", "Adagrad", "ASGD"),
        "not fused": "fused" not in program.optimizer,
        "no loss scale": not program.option.get("loss_scale") and not program.grad_scaler,
        "no overlap": not program.option.get("overlap_grad_reduce"),
        "not compiled": program.compiled is None,
        "not reentrant": program.recompute != "reentrant",
        "no scheduler": program.scheduler is None,
        "stepped": True,
        "not drawn": False,
    }
    return (
        place in idiom.places
        and (not idiom.kinds or program.kind in idiom.kinds)
        and (not idiom.dtypes or program.dtype in idiom.dtypes)
        and all(met[need] for need in idiom.needs)
    )
