"""What a training program has to do: gradients averaged over ranks, then torch's own optimizer. No
line of ours.

All ranks are threads of one process that take turns: a rank computes until it needs values of the
others. So the reference is deterministic, and a program in which ranks wait for different things
ends at once instead of hanging.

Rules that go beyond plain torch, in the order of a step:

- a param without a gradient on all ranks has none; where some ranks have one the others count as
  zero;
- a non-finite gradient skips the step where the program asks for that, and halves a dynamic loss
  scale;
- 16-bit params are updated in fp32 copies, which follow a weight that was changed, element by
  element;
- module buffers are rank 0's after each step.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MustBeRefusedError(Exception):
    """The program has no right outcome in plain torch either, so an error is the only one
    allowed."""


class Turns:
    """Lets one thread run at a time and hands values round when all have come to the same place.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = 0
        self._changed = threading.Condition()
        self._given: dict[int, tuple[str, Any]] = {}
        self._taken: list[Any] = []
        self._ended: set[int] = set()
        self._failure: str | None = None

    def begin(self, rank: int) -> None:
        """Waits for the first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def meet(self, rank: int, place: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Raises `MustBeRefusedError` where a rank never comes to
        this place."""
        with self._changed:
            self._given[rank] = (place, value)
            self._next(rank)
            self._changed.wait_for(lambda: self._turn == rank)
            if self._failure is not None:
                raise MustBeRefusedError(self._failure)
            return self._taken

    def end(self, rank: int) -> None:
        """The rank comes to no place any more."""
        with self._changed:
            self._ended.add(rank)
            self._next(rank)

    def _next(self, rank: int) -> None:
        running = [each for each in range(self.size) if each not in self._ended]
        later = [each for each in running if each > rank]
        if not later:
            self._hand_round()
        self._turn = (later or running or [0])[0]
        self._changed.notify_all()

    def _hand_round(self) -> None:
        places = {place for place, _ in self._given.values()}
        if self._given and (self._ended or len(places) > 1):
            self._failure = (
                f"ranks {sorted(self._given)} wait at {sorted(places)}; ranks "
                f"{sorted(self._ended)} ended"
            )
        self._taken = [value for _, (_, value) in sorted(self._given.items())]
        self._given = {}


@dataclass
class ReferenceWorld:
    """One rank of the reference, as a program sees it."""

    rank: int  # of this rank
    size: int
    turns: Turns  # shared by all ranks
    folder: Path  # for checkpoints; the next phase of the program finds them there
    seen: list[tuple[str, Any]] = field(default_factory=list)  # what the program recorded, in order
    optimizer: AveragingOptimizer | None = None

    def see(self, label: str, value: Any) -> None:
        """Records a value that has to be the same with us."""
        self.seen.append((label, plain(value)))

    def all_ranks(self, place: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        return self.turns.meet(self.rank, place, value)

    def average_now(self) -> None:
        """The program is going to use `p.grad` by itself: it has to be the average, as after DDP's
        backward."""
        if self.optimizer is not None:
            self.optimizer.average_grads()

    def through_torch(self, model: nn.Module, optimizer: Optimizer, way: int) -> None:
        """Nothing: the state is the same afterwards."""

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, **options: Any
    ) -> AveragingOptimizer:
        """Starts all ranks from rank 0's weights and module buffers."""
        if any(nn.parameter.is_lazy(param) for param in model.parameters()):
            raise MustBeRefusedError("a param has no shape yet")
        tensors = model.state_dict()
        per_rank = self.all_ranks("start", plain(tensors))
        layouts = [
            {name: (value.shape, value.dtype) for name, value in theirs.items()}
            for theirs in per_rank
        ]
        if any(layout != layouts[0] for layout in layouts):
            raise MustBeRefusedError("ranks have other params or module buffers")
        for name, mine in tensors.items():
            mine.copy_(per_rank[0][name])
        self.optimizer = AveragingOptimizer(self, model, optimizer, Options(**options))
        return self.optimizer


def plain(value: Any) -> Any:
    """A copy without graph, device or sharing: of tensors, numbers, and lists and dicts of them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


@dataclass(frozen=True)
class Options:
    """Those options of `DistOptConfig` that change results; the others only say how fast it
    goes."""

    clip_grad: float = 0.0
    grads_in_fp32: bool = True
    nonfinite: str = "raise"
    loss_scale: float | str | None = None
    initial_loss_scale: float = 2.0**16
    min_loss_scale: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    broadcast_buffers: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    shared_memory: bool = True
    async_save: bool = False
    reduce_dtype: str | None = None
    main_params_dtype: str = "float32"  # a remainder is exact


class LossScale:
    """Megatron's rules: `hysteresis` overflows until the scale is halved, `growth_interval` good
    steps to double it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_dynamic = options.loss_scale == "dynamic"
        self.value = (
            options.initial_loss_scale if self.is_dynamic else float(options.loss_scale or 1.0)
        )
        self.good_steps, self.tolerated = 0, options.hysteresis

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps, "tolerated": self.tolerated}

    def update(self, overflow: bool) -> None:
        if not self.is_dynamic:
            return
        if overflow:
            self.good_steps, self.tolerated = 0, self.tolerated - 1
            if self.tolerated <= 0:
                self.value = max(self.value / 2, self.options.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.options.growth_interval:
            self.good_steps, self.tolerated, self.value = 0, self.options.hysteresis, self.value * 2


class StateOfMains(MutableMapping[Tensor, Any]):
    """The state by model params of an optimizer over fp32 copies of some of them."""

    def __init__(self, state: Any, mains: dict[nn.Parameter, Tensor]) -> None:
        self.inner, self.mains = state, mains

    def __getitem__(self, param: Any) -> Any:
        return self.inner[self.mains.get(param, param)]

    def __setitem__(self, param: Any, value: Any) -> None:
        self.inner[self.mains.get(param, param)] = value

    def __delitem__(self, param: Any) -> None:
        del self.inner[self.mains.get(param, param)]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def values(self) -> Any:
        return self.inner.values()


class AveragingOptimizer(Optimizer):
    """The optimizer that the program built, fed with averaged gradients.

    Args:
        world: this rank.
        model: whose module buffers follow rank 0.
        given: over params of the model. Its param groups are this optimizer's.
        options: of the program.
    """

    def __init__(
        self, world: ReferenceWorld, model: nn.Module, given: Optimizer, options: Options
    ) -> None:
        super().__init__(given.param_groups, given.defaults)
        self.param_groups = given.param_groups
        self.world, self.model, self.options = world, model, options
        self.scale = LossScale(options)
        self.mains: dict[nn.Parameter, Tensor] = {}
        self.rounded: dict[nn.Parameter, Tensor] = {}
        self.inner = self._in_fp32(given)
        self.last_step: SimpleNamespace | None = None  # of no step yet

    def _in_fp32(self, given: Optimizer) -> Optimizer:
        """`given` itself where all params are fp32, else one of its class over fp32 copies of
        16-bit params."""
        for param in self._params():
            self._adopt(param)
        if not self.mains:
            return given
        inner = copy.copy(given)
        inner.state = defaultdict(dict)
        inner.param_groups = [self._mapped(group) for group in given.param_groups]
        return inner

    @property
    def state(self) -> StateOfMains:  # type: ignore[override]
        return StateOfMains(self.inner.state, self.mains)

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor sets one, before there is an inner optimizer; programs empty it."""
        if "inner" in vars(self):
            self.inner.state = value

    def __deepcopy__(self, memo: object) -> AveragingOptimizer:
        """A program that copies its optimizer goes on with the first one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("an optimizer",)

    def _adopt(self, param: nn.Parameter) -> None:
        if param.dtype != torch.float32:
            self.mains[param] = param.detach().float()
            self.rounded[param] = param.detach().clone()
            if self.options.grads_in_fp32:
                grad, param.grad = param.grad, None
                param.grad_dtype = torch.float32
                param.grad = None if grad is None else grad.float()

    def _mapped(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self.mains.get(param, param) for param in group["params"]]}

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "inner"):
            return super().add_param_group(param_group)
        shared = self.inner.param_groups is self.param_groups
        self.inner.add_param_group(param_group) if shared else super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            first = self.world.all_ranks("add_param_group", plain(param.data))[0]
            param.data.copy_(first)
            self._adopt(param)
        if not shared:
            self.inner.add_param_group(self._mapped(self.param_groups[-1]))
        return None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: ranks are averaged at the step."""
        return contextlib.nullcontext()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss.float() * self.scale.value

    def average_grads(self) -> None:
        """Collective: gives every param the average as its `grad`. A second time changes
        nothing."""
        params = self._params()
        per_rank = self.world.all_ranks("gradients", [plain(param.grad) for param in params])
        for param, grads in zip(params, zip(*per_rank, strict=True), strict=True):
            present = [grad for grad in grads if grad is not None]
            if present:
                total = torch.stack([grad.float() for grad in present]).sum(0) / self.world.size
                dtype = getattr(param, "grad_dtype", None) or present[0].dtype
                param.grad = torch.empty_like(param, dtype=dtype).copy_(total)  # in its strides

    def release(self) -> None:
        """Nothing: what the next optimizer is built over are the params as they are."""

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """Collective: the averaged gradient. This rank's own stays in `param.grad`; where it has
        none it gave zeros."""
        mine = self._params()
        kept = [each.grad for each in mine]
        self.average_grads()
        grad = None if param.grad is None else param.grad.float() / self.scale.value
        for each, before in zip(mine, kept, strict=True):
            if before is not None:
                # a conversion of the model has changed the old one
                each.grad = before.to(each.grad.dtype)
            elif each.grad is not None:
                each.grad.zero_()
        return grad

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Collective: the norm before clipping, in fp32 whatever the dtype of the gradients."""
        self.average_grads()
        grads = [param.grad for param in self._params() if param.grad is not None]
        norm = torch.linalg.vector_norm(
            torch.stack([grad.float().norm() for grad in grads] or [torch.zeros(())])
        )
        for grad in grads:
            grad.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
            self._share_module_buffers()
        return loss

    def _update(self) -> None:
        self.average_grads()
        self.follow_model()
        grads = {param: param.grad.float() for param in self._params() if param.grad is not None}
        overflow = not all(bool(torch.isfinite(grad).all()) for grad in grads.values())
        divisor = self.scale.value
        if overflow and not self.scale.is_dynamic and self.options.nonfinite == "raise":
            raise MustBeRefusedError("a gradient is not finite")
        self.scale.update(overflow)
        self.last_step = SimpleNamespace(updated=not overflow, grad_norm=0.0)
        if not overflow:
            self._feed({param: grad / divisor for param, grad in grads.items()})

    def _feed(self, grads: dict[nn.Parameter, Tensor]) -> None:
        norm = torch.linalg.vector_norm(
            torch.stack([grad.norm() for grad in grads.values()] or [torch.zeros(())])
        )
        factor = (
            min(1.0, self.options.clip_grad / (float(norm) + 1e-6))
            if self.options.clip_grad
            else 1.0
        )
        self.last_step.grad_norm = float(norm)
        if factor < 1.0:  # what stays is clipped, as after torch's clip_grad_norm_
            for param in grads:
                param.grad.mul_(factor)
        with self._in_place_of_grads({param: grad * factor for param, grad in grads.items()}):
            try:
                self.inner.step()
            except RuntimeError as error:  # the program asks for what torch cannot do either
                raise MustBeRefusedError(f"torch's own step raised {error}") from error
        for param, main in self.mains.items():
            param.data.copy_(main)
            self.rounded[param] = param.detach().clone()

    @contextlib.contextmanager
    def _in_place_of_grads(self, grads: dict[nn.Parameter, Tensor]) -> Iterator[None]:
        """The grads of the inner optimizer are `grads`."""
        self._follow_groups()
        kept = {param: param.grad for param in self._params()}
        for param in kept:
            into = self.mains.get(param, param)
            into.grad = grads[param].to(into.dtype) if param in grads else None
        yield
        for param, grad in kept.items():
            if param in self.mains:
                self.mains[param].grad = None
            param.grad = grad

    def _follow_groups(self) -> None:
        """The inner optimizer's groups say what the program's groups say."""
        if self.inner.param_groups is not self.param_groups:
            for theirs, group in zip(self.inner.param_groups, self.param_groups, strict=True):
                theirs.update({key: value for key, value in group.items() if key != "params"})

    def follow_model(self) -> None:
        """An element of a 16-bit param that was changed since it was rounded is its main param's
        new value."""
        for param, main in self.mains.items():
            changed = param.detach() != self.rounded[param]
            main.copy_(torch.where(changed, param.detach().float(), main))
            self.rounded[param] = param.detach().clone()

    def _share_module_buffers(self) -> None:
        buffers = list(self.model.buffers())
        if self.options.broadcast_buffers:
            for mine, first in zip(
                buffers, self.world.all_ranks("buffers", plain(buffers))[0], strict=True
            ):
                mine.copy_(first)

    def state_dict(self) -> dict[str, Any]:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        self._follow_groups()
        return {"inner": self.inner.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(copy.deepcopy(state_dict["inner"]))
        vars(self.scale).update(state_dict["scale"])
        for group, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})
        # torch's own load puts new group objects into the optimizer.
        if not self.mains:
            self.param_groups = self.inner.param_groups

    def save(self, folder: str | Path) -> None:
        self.follow_model()
        params = [plain(self.mains.get(param, param.data)) for param in self._params()]
        if self.world.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(
                {"params": params, "state": self._whole_state()}, Path(folder) / "reference.pt"
            )
        self.world.all_ranks("saved", None)

    def finish_saving(self) -> None:
        """Nothing: `save` has waited."""

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        self.world.all_ranks("load", None)
        saved = torch.load(Path(folder) / "reference.pt")
        for param, value in zip(self._params(), saved["params"], strict=True):
            param.data.copy_(value)
            if param in self.mains:
                self.mains[param].copy_(value)
                self.rounded[param] = param.detach().clone()
        self.load_state_dict(saved["state"])


def run_reference(phase: Callable[[Any], None], size: int, folder: Path) -> list[dict[str, Any]]:
    """Runs one phase of a program on `size` ranks that take turns.

    Returns:
        By rank: what it saw, and how it ended ("finished", or the traceback of what it raised).
    """
    turns = Turns(size)
    worlds = [ReferenceWorld(rank, size, turns, folder) for rank in range(size)]
    ends = ["" for _ in worlds]

    def rank_thread(world: ReferenceWorld) -> None:
        turns.begin(world.rank)
        try:
            phase(world)
            ends[world.rank] = "finished"
        except MustBeRefusedError as error:
            ends[world.rank] = f"must be refused: {error}"
        except BaseException:  # noqa: BLE001 - a fault of the program, which its caller reports
            ends[world.rank] = traceback.format_exc()
        turns.end(world.rank)

    _join([threading.Thread(target=rank_thread, args=(world,)) for world in worlds])
    return [{"seen": world.seen, "end": end} for world, end in zip(worlds, ends, strict=True)]


def _join(threads: Iterable[threading.Thread]) -> None:
    threads = list(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
