"""What users of a Megatron do besides training, as programs that the host's own optimizer and ours
run alike.

Each program is trained with ours, and with the host's own distributed optimizer where its effect is
what is expected, on the same Adam kernel and without clipping, where both agree to the last bit
otherwise (the host's norm is fp32 and ours float64). user_actions.py names the programs by the keys
that they have in test_promise_2023.py and test_promise_core.py.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.support.forked import in_fork
from tests.support.refusals import raised
from tests.support.values import same

#: Of each training; a program acts before the second one unless it says otherwise.
STEPS, SECOND = 3, 1


class User(Protocol):
    """What a program may touch."""

    noted: dict[str, Any]  # what the program has found

    @property
    def chunk(self) -> Any: ...  # the model in its wrappers
    @property
    def part(self) -> Any: ...  # a module with a weight, whose params are frozen in some programs
    @property
    def optimizer(self) -> Any: ...  # the host's or ours
    @property
    def inner(self) -> Any: ...  # the torch optimizer in it
    @property
    def params(self) -> dict[str, Any]: ...  # of the model, by name
    @property
    def biases(self) -> tuple[str, str]: ...  # names of two params of one shape


Act = Callable[[Any], None]


@dataclass(frozen=True)
class Equal:
    """It has the effect that it has with the host's own optimizer, and that effect is not none."""


@dataclass(frozen=True)
class NoEffect:
    """The training is the one without it, as far as the host's promises go."""


@dataclass(frozen=True)
class Refused:
    """All ranks raise."""

    kinds: tuple[str, str]  # class on rank 0 and on rank 1
    words: tuple[str, ...]  # which the text has to have: what was found, and what to do


@dataclass(frozen=True)
class Program:
    """What a user does in a training of `STEPS` steps."""

    before: Act | None = None  # a step, see `at`
    expect: Equal | NoEffect | Refused = field(default_factory=Equal)  # what comes of it with ours
    at: int = SECOND  # which step, counted from 0
    within: Act | None = None  # the same step, after backward
    build: Act | None = None  # what happens to the bare model before the host wraps it
    wrapped: Act | None = None  # what happens to the model before the optimizer is built
    setting: Any = None  # of the training; the first program of each setting does nothing
    # the host's inner optimizer, where the user can choose it
    base: type[torch.optim.Optimizer] = torch.optim.AdamW
    # what `noted` has to be with ours; of a text, its beginning
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Of one training: copies of the params, or what it raised; and what the program has noted."""

    params: Mapping[str, Tensor]
    error: str
    noted: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """Of a program on one rank."""

    equal: bool  # ours and the host's have the same params at the end, to the last bit
    as_usual: bool  # ours has those of the training without it
    # the host's has others than without it; False where the host's was not trained with it
    matters: bool
    error: str  # of ours
    noted: Mapping[str, Any]  # of ours


def run_programs(
    programs: Mapping[str, Program], train: Callable[[Program, bool], Outcome]
) -> dict[str, Result]:
    """Collective: runs all of them, those of the host first; `train` runs one, with ours where it
    is given True."""
    results: dict[str, Result] = {}
    first: dict[Any, Program] = {}  # the trainings in which nothing is done
    for program in programs.values():
        first.setdefault(program.setting, program)
    usual = {setting: train(program, False) for setting, program in first.items()}
    compared = {
        name: train(program, False)
        for name, program in programs.items()
        if isinstance(program.expect, Equal)
    }
    for name, program in programs.items():
        nothing, ours = usual[program.setting], train(program, True)
        theirs = compared.get(name, nothing)
        parts = _same(ours, theirs), _same(ours, nothing), not _same(theirs, nothing)
        results[name] = Result(*parts, ours.error, ours.noted)
    return results


def _same(one: Outcome, other: Outcome) -> bool:
    return bool(one.params) and same(one.params, other.params)


def check(program: Program, by_rank: list[Result]) -> None:
    """Whether every rank has what the program expects."""
    for rank, result in enumerate(by_rank):
        if isinstance(program.expect, Refused):
            assert result.error.startswith(program.expect.kinds[rank] + ": ")
            assert [words for words in program.expect.words if words not in result.error] == []
        else:
            assert result.error == ""
            assert result.equal if isinstance(program.expect, Equal) else result.as_usual
            assert result.matters or not isinstance(program.expect, Equal), (
                "the host did nothing with it"
            )
        for key, value in program.notes.items():
            found = result.noted[key]
            assert found.startswith(value) if isinstance(value, str) else found == value


# --- weights


@torch.no_grad()
def halve(user: User) -> None:
    for param in user.params.values():
        param.mul_(0.5)


def clear_state(user: User) -> None:
    user.inner.state.clear()


def replace_state(user: User) -> None:
    user.inner.state = defaultdict(dict)


def reset_state(user: User) -> None:
    """The host's own optimizer has no call for it."""
    getattr(user.optimizer, "reset_state", user.inner.state.clear)()


def assign_moments(user: User) -> None:
    for state in user.inner.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def replace_groups(user: User) -> None:
    user.inner.param_groups = [{**group, "eps": 1e-2} for group in user.inner.param_groups]


def scale_moments(user: User) -> None:
    for state in user.inner.state.values():
        state["exp_avg"].mul_(0.5)


def halve_and_reload(user: User) -> None:
    halve(user)
    user.optimizer.reload_model_params()


def move(user: User) -> None:
    for param in user.params.values():
        param.data = param.detach() * 0.5


def move_and_reload(user: User) -> None:
    move(user)
    user.optimizer.reload_model_params()


def move_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        move(user)


def move_before(chunk: Any) -> None:
    for param in chunk.parameters():
        param.data = param.detach() * 0.5


def share(user: User) -> None:
    user.chunk.share_memory()


def share_before(chunk: Any) -> None:
    chunk.share_memory()


class _Told(logging.Handler):
    """Collects what the package says in warnings, until it is asked."""

    def __init__(self, aliases: list[Tensor]) -> None:
        super().__init__(logging.WARNING)
        self.aliases, self.texts = aliases, list[str]()
        logging.getLogger("megatron_distopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def take_aliases(chunk: Any) -> None:
    chunk.told = _Told([param.data for param in chunk.parameters()])


def note_aliases(user: User) -> None:
    told = user.chunk.told
    logging.getLogger("megatron_distopt").removeHandler(told)
    pairs = zip(told.aliases, user.chunk.parameters(), strict=True)
    user.noted["are current"] = all(torch.equal(alias, param) for alias, param in pairs)
    user.noted["told"] = "; ".join(told.texts)


def tie(user: User) -> None:
    first, second = user.biases
    user.params[second].data = user.params[first].data


def replace(user: User) -> None:
    user.part.weight = Parameter(user.part.weight.detach().clone())


def freeze(user: User) -> None:
    for name, param in user.params.items():
        param.requires_grad_(".layers.0" in name)


def unfreeze(user: User) -> None:
    user.part.requires_grad_(True)


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


def write_grads(user: User) -> None:
    for param in user.params.values():
        param.grad = torch.ones_like(param)


def clip_as_in_torch(user: User) -> None:
    user.noted["norm"] = float(torch.nn.utils.clip_grad_norm_(user.chunk.parameters(), 1e-3))


def scale_main_grads(user: User) -> None:
    for name, param in user.params.items():
        if "mlp" in name:
            param.main_grad.mul_(0.25)


def zero_in_place(user: User) -> None:
    write_grads(user)
    user.optimizer.zero_grad(set_to_none=False)
    grads = [param.grad for param in user.params.values()]
    user.noted["zeroed"] = all(grad is not None and float(grad.abs().max()) == 0 for grad in grads)
    user.optimizer.zero_grad()
    user.noted["dropped"] = all(param.grad is None for param in user.params.values())


def add_unused(model: Any) -> None:
    model.unused = Parameter(torch.ones(4, 4))


# --- at the start


def start_apart(chunk: Any) -> None:
    with torch.no_grad():
        for param in chunk.parameters():
            param.add_(0.25 * dist.get_rank())


def add_statistics(chunk: Any) -> None:
    chunk.register_buffer("statistics", torch.full((3,), float(dist.get_rank())))


def note_statistics(user: User) -> None:
    user.noted["own"] = user.chunk.get_buffer("statistics").tolist() == [dist.get_rank()] * 3


# --- the optimizer as an object


def told(call: Callable[[], object]) -> str:
    """Class and text of what a call raises."""
    return ": ".join(raised(call))


def copy_it(user: User) -> None:
    for each in (user.optimizer, *getattr(user.optimizer, "chained_optimizers", ())):
        user.noted["deepcopy"] = told(lambda each=each: copy.deepcopy(each))
        user.noted["pickle"] = told(lambda each=each: pickle.dumps(each))


def step_with_closure(user: User) -> None:
    user.noted["step"] = told(lambda: user.optimizer.step(lambda: None))


def hook_the_inner_one(user: User) -> None:
    user.noted["calls"] = calls = list[str]()
    user.inner.register_step_pre_hook(lambda *_: calls.append("before"))
    user.inner.register_step_post_hook(lambda *_: calls.append("after"))


def hook_all_optimizers(user: User) -> None:
    user.noted["calls"] = calls = list[str]()

    def note(when: str) -> Callable[..., None]:
        def called(optimizer: Any, *_: Any) -> None:
            # It is not removed, and later trainings are none of this program.
            if len(calls) < len(CALLS):
                calls.append(when if optimizer is user.inner else type(optimizer).__name__)

        return called

    register_optimizer_step_pre_hook(note("before"))
    register_optimizer_step_post_hook(note("after"))


def compile_the_step(user: User) -> None:
    user.optimizer.step = torch.compile(user.optimizer.step, backend="eager")


def scale_as_in_torch(user: User) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    user.noted["step"] = told(lambda: scaler.step(user.optimizer))


def add_a_group(user: User) -> None:
    added = {"params": [Parameter(torch.ones(3))]}
    user.noted["wrapper"] = told(lambda: user.optimizer.add_param_group(added))
    user.inner.add_param_group(added)


def take_a_param_out(user: User) -> None:
    for group in user.inner.param_groups:
        del group["params"][:1]


def take_a_param_out_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        take_a_param_out(user)


def edit_the_groups(user: User) -> None:
    for group in user.optimizer.param_groups:
        group["eps"], group["betas"] = 1e-2, (0.5, 0.7)


def write_values_of_other_kinds(user: Any) -> None:
    """A number of numpy, a switch for a number, and a tensor of the user's own; half the rate."""
    for group in user.inner.param_groups:
        group["lr"] = numpy.float32(group["lr"] / 2)
        group["weight_decay"] = False
        group["scales"] = torch.tensor([1.0, 2.0])


def schedule_as_in_torch(user: User) -> None:
    user.noted["wrapper"] = told(
        lambda: torch.optim.lr_scheduler.LambdaLR(user.optimizer, lambda _: 0.5)
    )
    before = user.optimizer.param_groups[0]["lr"]
    torch.optim.lr_scheduler.MultiplicativeLR(user.inner, lambda _: 0.5).step()
    user.noted["factor"] = user.optimizer.param_groups[0]["lr"] / before


def save_a_param(user: User) -> None:
    file = io.BytesIO()
    torch.save(user.part.weight.detach(), file)
    user.noted["nbytes"] = file.tell()


def make_other_calls(user: User) -> None:
    with mock.patch("megatron_distopt.comm.meeting.SECONDS_TO_LOOK", 0.2):
        if dist.get_rank() == 0:
            user.optimizer.save_parameter_state("never_written")
        else:
            user.optimizer.load_state_dict({})


def read_in_a_fork(user: User) -> None:
    def norms() -> float:
        return sum(float(param.detach().float().norm()) for param in user.params.values())

    user.noted["same"] = in_fork(norms) == norms()


#: The refusals that both hosts have.
KEPT_PARAMS = ("param_groups", "get_megatron_optimizer")
OTHER = "RanksDisagreeError"
NOT_COPIED = {
    "deepcopy": "AccessError: The optimizer cannot be copied",
    "pickle": "AccessError: The optimizer cannot be pickled",
}
#: The hooks of two steps.
CALLS = ["before", "after"] * 2

COMMON: dict[str, Program] = {
    "weights_changed": Program(halve),
    "state_cleared": Program(clear_state),
    "state_replaced": Program(replace_state),
    "state_reset": Program(reset_state),
    "moments_scaled": Program(scale_moments),
    "moments_assigned": Program(assign_moments),
    "groups_replaced": Program(replace_groups),
    "weights_changed_and_reloaded": Program(halve_and_reload),
    "param_replaced": Program(replace),
    "frozen": Program(freeze),
    "cleared_as_in_torch": Program(within=clear_as_in_torch, expect=NoEffect()),
    "grads_from_before": Program(write_grads, NoEffect(), at=0),
    "clipped_by_torch": Program(within=clip_as_in_torch, expect=NoEffect(), notes={"norm": 0.0}),
    "grads_written": Program(within=write_grads, expect=NoEffect()),
    "main_grads_scaled": Program(within=scale_main_grads),
    "grads_zeroed_in_place": Program(
        within=zero_in_place, expect=NoEffect(), notes={"zeroed": True, "dropped": True}
    ),
    "param_without_gradient": Program(build=add_unused),
    "ranks_start_apart": Program(wrapped=start_apart),
    "module_buffers_differ": Program(
        note_statistics, NoEffect(), wrapped=add_statistics, notes={"own": True}
    ),
    "optimizer_copied": Program(copy_it, NoEffect(), notes=NOT_COPIED),
    "hooks": Program(hook_the_inner_one, NoEffect(), notes={"calls": CALLS}),
    "hooks_on_all": Program(hook_all_optimizers, NoEffect(), notes={"calls": CALLS}),
    "step_compiled": Program(compile_the_step, NoEffect()),
    "torchs_scaler": Program(scale_as_in_torch, NoEffect(), notes={"step": "AssertionError"}),
    "group_added": Program(
        add_a_group,
        Refused(("LayoutError", "LayoutError"), KEPT_PARAMS),
        notes={"wrapper": "AttributeError"},
    ),
    "params_taken_out": Program(
        take_a_param_out, Refused(("LayoutError", "LayoutError"), KEPT_PARAMS)
    ),
    "params_taken_out_on_one_rank": Program(
        take_a_param_out_on_one_rank, Refused((OTHER, "LayoutError"), KEPT_PARAMS)
    ),
    "other_calls_on_ranks": Program(
        make_other_calls,
        Refused((OTHER, OTHER), ("save_parameter_state()", "load_state_dict()", "on all 2 ranks")),
    ),
    "options_edited": Program(edit_the_groups),
    "options_of_other_kinds": Program(write_values_of_other_kinds),
    "torchs_schedule": Program(schedule_as_in_torch, notes={"wrapper": "TypeError", "factor": 0.5}),
}
