"""A user of a Megatron of 2023 does something unusual: the effect is that of the fork's own optimizer, or ours refuses.

Each program is trained twice on two ranks, with the fork's own distributed optimizer and with ours, on the same Adam
kernel and without clipping, where both agree to the last bit otherwise. docs/hosts.md has the table.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tests.support.mini_fork import MiniFork, TrainingRun, core_folder
from tests.support.spawn import run_ranks

STEPS = 5
DISTRIBUTED = "--use-distributed-optimizer"
BF16 = ("--bf16",)
FP16 = ("--fp16", "--initial-loss-scale", "4096")
#: The fork's norm is fp32 and ours float64, so that clipping would differ in the last place.
EXACT = ("--clip-grad", "1e9", "--weight-decay", "0.1", "--micro-batch-size", "1")
POSITIONS = "language_model.embedding.position_embeddings"


@dataclass
class User:
    """What a program may touch.

    Args:
        fork: the fork.
        chunk: the model in its wrappers.
        optimizer: the fork's or ours.
        noted: what the program has found; compared by the tests.
    """

    fork: MiniFork
    chunk: Any
    optimizer: Any
    noted: dict[str, Any]

    @property
    def bare(self) -> Any:
        bare = self.chunk
        while hasattr(bare, "module"):
            bare = bare.module
        return bare

    @property
    def params(self) -> dict[str, Parameter]:
        return dict(self.bare.named_parameters())

    @property
    def positions(self) -> Any:
        return self.bare.get_submodule(POSITIONS)


Act = Callable[[User], None]


@dataclass(frozen=True)
class Program:
    """What a user does in a training of `STEPS` steps.

    Args:
        before: the third step, or before the first one where `at` is 0.
        within: the third step, between backward and the reduction of gradients.
        build: what happens to the bare model before the fork wraps it.
        wrapped: what happens to the model after that, before the optimizer is built.
        words: of the command line.
    """

    before: Act | None = None
    at: int = 2
    within: Act | None = None
    build: Callable[[Any], None] | None = None
    wrapped: Callable[[Any], None] | None = None
    words: tuple[str, ...] = BF16
    base: type[torch.optim.Optimizer] = torch.optim.AdamW


@dataclass(frozen=True)
class Outcome:
    """Of one training: copies of the params, or what it raised; and what the program has noted."""

    params: Mapping[str, Tensor]
    error: str
    noted: dict[str, Any] = field(default_factory=dict)


# --- weights


@torch.no_grad()
def halve(user: User) -> None:
    for param in user.params.values():
        param.mul_(0.5)


def halve_and_reload(user: User) -> None:
    halve(user)
    user.optimizer.reload_model_params()


def move(user: User) -> None:
    for param in user.params.values():
        param.data = param.detach() * 0.5


def move_and_reload(user: User) -> None:
    move(user)
    user.optimizer.reload_model_params()


def convert_there_and_back(user: User) -> None:
    user.bare.bfloat16().float()


def convert(user: User) -> None:
    user.bare.float()


def convert_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        user.bare.float()


def tie(user: User) -> None:
    first, second = (user.params[f"language_model.encoder.layers.{each}.mlp.dense_h_to_4h.bias"] for each in (0, 1))
    second.data = first.data


def tie_before(model: Any) -> None:
    names = dict(model.named_parameters())
    first, second = (next(p for n, p in names.items() if n.endswith(f"layers.{each}.mlp.dense_h_to_4h.bias")) for each in (0, 1))
    second.data = first.data


def replace(user: User) -> None:
    user.positions.weight = Parameter(user.positions.weight.detach().clone())


def freeze(user: User) -> None:
    user.bare.get_submodule("language_model.encoder").requires_grad_(False)


def unfreeze(user: User) -> None:
    user.positions.requires_grad_(True)


# --- gradients


def clear_as_in_torch(user: User) -> None:
    user.chunk.zero_grad()
    for param in user.params.values():
        param.grad = None


def keep_grads(user: User) -> None:
    user.chunk.zero_grad_buffer = lambda: None


def keep_grads_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        keep_grads(user)


def leave_grads_behind(user: User) -> None:
    for param in user.params.values():
        param.grad = torch.ones_like(param)


def clip_as_in_torch(user: User) -> None:
    user.noted["norm"] = float(torch.nn.utils.clip_grad_norm_(user.chunk.parameters(), 1e-3))


def write_grads(user: User) -> None:
    for param in user.params.values():
        param.grad = torch.ones_like(param)


def scale_main_grads(user: User) -> None:
    for name, param in user.params.items():
        if "mlp" in name:
            param.main_grad.mul_(0.25)


def zero_in_place(user: User) -> None:
    write_grads(user)
    user.optimizer.zero_grad(set_to_none=False)
    user.noted["zeroed"] = all(float(p.grad.abs().max()) == 0 for p in user.params.values())
    user.optimizer.zero_grad()
    user.noted["dropped"] = all(p.grad is None for p in user.params.values())


def add_unused(model: Any) -> None:
    model.unused = Parameter(torch.ones(4, 4))


def forget_the_scale(user: User) -> None:
    user.optimizer.scale_loss = lambda loss: loss


# --- at the start


def start_apart(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25 * dist.get_rank())


def add_statistics(model: Any) -> None:
    model.register_buffer("statistics", torch.full((3,), float(dist.get_rank())))


# --- the optimizer as an object


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"
    return "nothing"


def copy_it(user: User) -> None:
    user.noted["deepcopy"] = _raised(lambda: copy.deepcopy(user.optimizer))
    user.noted["pickle"] = _raised(lambda: pickle.dumps(user.optimizer))


def step_with_closure(user: User) -> None:
    user.noted["step"] = _raised(lambda: user.optimizer.step(lambda: None))


def hook_the_inner_one(user: User) -> None:
    user.noted["calls"] = calls = []
    inner = user.optimizer.optimizer
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))


def scale_as_in_torch(user: User) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    user.noted["scaler"] = _raised(lambda: scaler.step(user.optimizer)).partition(":")[0]


def add_a_group(user: User) -> None:
    added = {"params": [Parameter(torch.ones(3))]}
    user.noted["wrapper"] = _raised(lambda: user.optimizer.add_param_group(added)).partition(":")[0]
    user.optimizer.optimizer.add_param_group(added)


def take_a_param_out(user: User) -> None:
    for group in user.optimizer.param_groups:
        del group["params"][:1]


def take_a_param_out_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        take_a_param_out(user)


def edit_the_groups(user: User) -> None:
    for group in user.optimizer.param_groups:
        group["eps"], group["betas"] = 1e-2, (0.5, 0.7)


def schedule_as_in_torch(user: User) -> None:
    _raised(lambda: torch.optim.lr_scheduler.LambdaLR(user.optimizer, lambda _: 0.5))
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(user.optimizer.optimizer, lambda _: 0.5)
    schedule.step()
    user.noted["lr"] = [group["lr"] for group in user.optimizer.param_groups]


def save_a_param(user: User) -> None:
    file = io.BytesIO()
    torch.save(user.positions.weight, file)
    twin = copy.deepcopy(user.positions)
    with torch.no_grad():
        twin.weight.zero_()
    user.noted["nbytes"] = file.tell()
    user.noted["is apart"] = float(user.positions.weight.abs().max()) > 0


class Amsgrad(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, amsgrad=True)


class Maximizing(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, maximize=True)


class AdamW(torch.optim.Optimizer):
    """Of the fork's own, with another formula than the class of that name in torch."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


PROGRAMS: dict[str, Program] = {
    "nothing": Program(),
    "nothing in fp32": Program(words=()),
    "nothing in fp16": Program(words=FP16),
    "halve": Program(halve),
    "halve in fp32": Program(halve, words=()),
    "halve and reload": Program(halve_and_reload),
    "move": Program(move),
    "move in fp32": Program(move, words=()),
    "move and reload": Program(move_and_reload),
    "move and reload in fp32": Program(move_and_reload, words=()),
    "convert there and back": Program(convert_there_and_back, words=()),
    "convert": Program(convert),
    "convert on one rank": Program(convert_on_one_rank),
    "tie": Program(tie),
    "tie before": Program(wrapped=tie_before),
    "replace": Program(replace),
    "freeze": Program(freeze),
    "nothing frozen": Program(words=(*BF16, "--frozen-param")),
    "unfreeze": Program(unfreeze, words=(*BF16, "--frozen-param")),
    "clear as in torch": Program(within=clear_as_in_torch),
    "keep grads": Program(keep_grads),
    "keep grads on one rank": Program(keep_grads_on_one_rank),
    "keep grads in fp16": Program(keep_grads, words=FP16),
    "leave grads behind": Program(leave_grads_behind, at=0),
    "clip as in torch": Program(within=clip_as_in_torch),
    "write grads": Program(within=write_grads),
    "scale main grads": Program(within=scale_main_grads),
    "zero in place": Program(within=zero_in_place),
    "unused": Program(build=add_unused),
    "forget the scale": Program(forget_the_scale, at=0, words=FP16),
    "start apart": Program(build=start_apart),
    "statistics": Program(build=add_statistics),
    "copy": Program(copy_it),
    "closure": Program(step_with_closure),
    "hooks": Program(hook_the_inner_one),
    "torch's scaler": Program(scale_as_in_torch),
    "add a group": Program(add_a_group),
    "take out": Program(take_a_param_out),
    "take out on one rank": Program(take_a_param_out_on_one_rank),
    "edit groups": Program(edit_the_groups),
    "torch's schedule": Program(schedule_as_in_torch),
    "save a param": Program(save_a_param),
    "amsgrad": Program(base=Amsgrad),
    "maximize": Program(base=Maximizing),
    "own AdamW": Program(base=AdamW),
}


@contextlib.contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _prepared(fork: MiniFork, program: Program) -> Iterator[None]:
    """The fork with the program's base optimizer and model."""
    from megatron import optimizer
    from megatron.optimizer import distrib_optimizer

    provide, get_model = fork.script.model_provider, fork.training.get_model

    def provided(*args: Any, **kwargs: Any) -> Any:
        model = provide(*args, **kwargs)
        (program.build or bool)(model)
        return model

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model = get_model(*args, **kwargs)
        (program.wrapped or bool)(model[0])
        return model

    with (
        _set(optimizer, Adam=program.base),
        _set(distrib_optimizer, Adam=program.base),
        _set(fork.script, model_provider=provided),
        _set(fork.training, get_model=wrapped),
    ):
        yield


def _outcome(fork: MiniFork, program: Program, *, ours: bool) -> Outcome:
    noted: dict[str, Any] = {}

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        user = User(fork, model[0], optimizer, noted)
        for number in range(STEPS):
            if program.before is not None and number == program.at:
                program.before(user)
            with _hooked(user, program.within if number == program.at else None):
                fork.training.train_step(forward_step, iterator, model, optimizer, scheduler)
        return []

    words = (*program.words, DISTRIBUTED, *EXACT)
    if ours and program.base is torch.optim.AdamW:
        words = (*words, "--distopt-adam", "torch_foreach")
    try:
        with _prepared(fork, program), _set(fork.training, train=loop), contextlib.redirect_stdout(io.StringIO()):
            run: TrainingRun = fork.train(*words, ours=ours)
    except Exception as error:  # noqa: BLE001 - it is the result
        return Outcome({}, f"{type(error).__name__}: {error}", noted)
    return Outcome(run.params, "", noted)


@contextlib.contextmanager
def _hooked(user: User, within: Act | None) -> Iterator[None]:
    if within is None:
        yield
        return
    reduce = user.optimizer.reduce_model_grads

    def reduce_after(*args: Any) -> None:
        within(user)
        reduce(*args)

    user.optimizer.reduce_model_grads = reduce_after
    try:
        yield
    finally:
        del user.optimizer.reduce_model_grads


def _same(one: Outcome, other: Outcome) -> bool:
    if not one.params or one.params.keys() != other.params.keys():
        return False
    return all(torch.equal(param, other.params[name]) for name, param in one.params.items())


def _collect(rank: int, size: int) -> dict[str, dict[str, Any]]:
    fork = MiniFork.imported(era="a2", adam="torch")
    facts: dict[str, dict[str, Any]] = {}
    usual: dict[tuple[str, ...], Outcome] = {}
    for name, program in PROGRAMS.items():
        theirs, ours = (_outcome(fork, program, ours=ours) for ours in (False, True))
        usual.setdefault(program.words, theirs)  # the first program with these words does nothing
        facts[name] = {
            "equal": _same(ours, theirs),
            "matters": not _same(theirs, usual[program.words]),
            "ours": ours.error,
            "host": theirs.error,
            "noted by ours": ours.noted,
            "noted by host": theirs.noted,
        }
    return facts


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, Any]]]:
    core_folder()
    return run_ranks(_collect, 2, seconds=400)


def test_x(by_rank):
    for name in PROGRAMS:
        for each in by_rank:
            print(name, {k: v for k, v in each[name].items()})
