"""A user of a Megatron of 2023 does something unusual: it is as with the fork's own optimizer, or
ours refuses."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from tests.hosts import promises
from tests.hosts.promises import (
    COMMON,
    OTHER,
    STEPS,
    Act,
    NoEffect,
    Outcome,
    Program,
    Refused,
    Result,
)
from tests.support.facts import Facts, facts_of
from tests.support.fork_worlds import slow_gathers
from tests.support.mini_fork import InstalledFork, MiniFork, core_folder
from tests.support.spawn import run_ranks

BF16: tuple[str, ...] = ("--bf16",)
FP32: tuple[str, ...] = ()
FP16: tuple[str, ...] = ("--fp16", "--initial-loss-scale", "4096")
#: With the flags that the fork's own optimizer has not.
OVERLAPPED = (*BF16, "overlapped")
OURS_ALONE = (
    *("--distopt-overlap-grad-reduce", "yes", "--distopt-overlap-param-gather"),
    *("--distopt-bucket-size", "700"),
)
FROZEN = (*BF16, "--frozen-param")
ALWAYS = (
    "--use-distributed-optimizer",
    "--clip-grad",
    "1e9",
    "--weight-decay",
    "0.1",
    "--micro-batch-size",
    "1",
)
LAYER = "language_model.encoder.layers.{}.mlp.dense_h_to_4h.bias"


@dataclass
class User:
    """See `promises.User`."""

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
    def part(self) -> Any:
        return self.bare.get_submodule("language_model.embedding.position_embeddings")

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer

    @property
    def params(self) -> dict[str, Parameter]:
        return dict(self.bare.named_parameters())

    @property
    def biases(self) -> tuple[str, str]:
        return LAYER.format(0), LAYER.format(1)


def convert_there_and_back(user: User) -> None:
    user.bare.bfloat16().float()


def convert(user: User) -> None:
    user.bare.float()


def convert_on_one_rank(user: User) -> None:
    if dist.get_rank() == 1:
        convert(user)


def tie_before(chunk: Any) -> None:
    promises.tie(User(chunk, None, {}))


def forget_the_scale(user: User) -> None:
    user.optimizer.scale_loss = lambda loss: loss


def read(user: User) -> None:
    """What an average of the weights would read between two steps."""
    values = {name: param.detach().clone() for name, param in user.params.items()}
    getattr(user.optimizer, "finish_param_gather", bool)()
    user.noted["current"] = all(
        torch.equal(param, values[name]) for name, param in user.params.items()
    )


def call_methods(user: User) -> None:
    """`module.forward(...)` in place of `module(...)`, for all modules."""
    for module in user.bare.modules():
        module._call_impl = module.forward


def compile_it(user: User) -> None:
    encoder = user.bare.get_submodule("language_model.encoder")
    encoder.forward = torch.compile(encoder.forward, backend="eager")


class Amsgrad(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad=True)


class AdamW(torch.optim.Optimizer):
    """Of the fork's own, with another formula than the class of that name in torch."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ):
            param.sub_(param.grad.sign(), alpha=self.param_groups[0]["lr"])


def _refused(*words: str, first: str = "LayoutError") -> Refused:
    return Refused((first, "LayoutError"), words)


CONVERTED = (
    "float32[64, 16]",
    "bfloat16[64, 16]",
    "before distribute(...) or get_megatron_optimizer(...)",
)
TIED = (LAYER.format(0), LAYER.format(1), "b.weight = a.weight")
SHARED = ("share_memory()", "copy.deepcopy(model)")
USED = ("zero_grad_buffer()", "optimizer.zero_grad()")

PROGRAMS: dict[str, Program] = {
    "nothing": Program(expect=NoEffect(), setting=BF16),
    "nothing in fp32": Program(expect=NoEffect(), setting=FP32),
    "nothing in fp16": Program(expect=NoEffect(), setting=FP16),
    "nothing with a frozen param": Program(expect=NoEffect(), setting=FROZEN),
    **{name: replace(program, setting=BF16) for name, program in COMMON.items()},
    "data_replaced": Program(promises.move, setting=BF16),
    "data_replaced_in_fp32": Program(promises.move, setting=FP32),
    "data_replaced_and_reloaded": Program(promises.move_and_reload, setting=BF16),
    "converted_there_and_back": Program(convert_there_and_back, setting=FP32),
    "converted_on_one_rank": Program(
        convert_on_one_rank, _refused(*CONVERTED, first=OTHER), setting=BF16
    ),
    "tied_by_data": Program(promises.tie, _refused(*TIED), setting=BF16),
    "tied_by_data_before": Program(expect=_refused(*TIED), wrapped=tie_before, setting=BF16),
    "aliases_before": Program(
        promises.note_aliases,
        NoEffect(),
        wrapped=promises.take_aliases,
        setting=BF16,
        notes={"are current": False, "told": "Something still uses the memory that param"},
    ),
    "memory_shared": Program(promises.share, _refused(*SHARED), setting=BF16),
    "memory_shared_before": Program(
        expect=_refused(*SHARED), wrapped=promises.share_before, setting=BF16
    ),
    "unfrozen": Program(promises.unfreeze, NoEffect(), setting=FROZEN),
    "grads_kept_on_one_rank": Program(
        promises.keep_grads_on_one_rank, _refused(*USED, first=OTHER), setting=BF16
    ),
    "loss_not_scaled": Program(forget_the_scale, at=0, setting=FP16),
    "nothing overlapped": Program(expect=NoEffect(), setting=OVERLAPPED),
    "weights_read_overlapped": Program(
        read, NoEffect(), setting=OVERLAPPED, notes={"current": True}
    ),
    "weights_changed_overlapped": Program(promises.halve, setting=OVERLAPPED),
    "read_in_a_fork": Program(
        promises.read_in_a_fork, NoEffect(), setting=OVERLAPPED, notes={"same": True}
    ),
    "methods_called_overlapped": Program(call_methods, NoEffect(), setting=OVERLAPPED),
    "compiled_overlapped": Program(compile_it, NoEffect(), setting=OVERLAPPED),
    "closure": Program(
        promises.step_with_closure,
        NoEffect(),
        setting=BF16,
        notes={"step": "HostError: step was called with a closure"},
    ),
    "param_saved": Program(promises.save_a_param, NoEffect(), setting=BF16),
    "amsgrad": Program(base=Amsgrad, setting=BF16),
    "own_class_named_as_torchs": Program(base=AdamW, setting=BF16),
}


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
        mock.patch.object(optimizer, "Adam", program.base),
        mock.patch.object(distrib_optimizer, "Adam", program.base),
        mock.patch.object(fork.script, "model_provider", provided),
        mock.patch.object(fork.training, "get_model", wrapped),
    ):
        yield


def _train(fork: MiniFork, program: Program, ours: bool) -> Outcome:
    noted: dict[str, Any] = {}

    def loop(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any
    ) -> list[Any]:
        user = User(model[0], optimizer, noted)
        for number in range(STEPS):
            if program.before is not None and number == program.at:
                program.before(user)
            with _hooked(user, program.within if number == program.at else None):
                fork.training.train_step(forward_step, iterator, model, optimizer, scheduler)
        return []

    words = (*(word for word in program.setting if word != "overlapped"), *ALWAYS)
    if ours and "overlapped" in program.setting:
        words = (*words, *OURS_ALONE)
    if ours and program.base is torch.optim.AdamW:
        words = (*words, "--distopt-adam", "torch_foreach")
    elif ours and program.base.__module__.startswith("tests."):  # a class of the user's own
        words = (*words, "--distopt-updates", "elements")
    try:
        replaced = mock.patch.object(fork.training, "train", loop)
        with _prepared(fork, program), replaced, contextlib.redirect_stdout(io.StringIO()):
            return Outcome(fork.train(*words, ours=ours).params, "", noted)
    except Exception as error:  # noqa: BLE001 - it is the result
        return Outcome({}, f"{type(error).__name__}: {error}", noted)


def _hooked(user: User, within: Act | None) -> contextlib.AbstractContextManager[object]:
    reduce = user.optimizer.reduce_model_grads

    def reduce_after(*args: Any) -> None:
        (within or bool)(user)
        reduce(*args)

    return mock.patch.object(user.optimizer, "reduce_model_grads", reduce_after)


#: torch.compile takes as long as many trainings; test_torch_ddp.py has it in plain torch.
LONG = ("compiled_overlapped",)
SHORT = tuple(name for name in PROGRAMS if name not in LONG)


def collect_facts(rank: int, size: int, names: tuple[str, ...]) -> dict[str, Result]:
    programs = {name: PROGRAMS[name] for name in names}
    fork = InstalledFork.imported(file_layout="gathered", adam="torch")
    with slow_gathers():
        return promises.run_programs(programs, lambda program, ours: _train(fork, program, ours))


facts = facts_of(collect_facts, 2, SHORT, seconds=400, before=core_folder)


@pytest.mark.parametrize("name", SHORT)
def test_user_when_doing_something_unusual_then_it_is_as_in_the_fork_or_refused(
    facts: Facts, name: str
) -> None:
    promises.check(PROGRAMS[name], facts[name])


@pytest.mark.long
def test_user_when_a_part_of_the_model_is_compiled_then_it_is_as_in_the_fork() -> None:
    core_folder()
    by_rank = run_ranks(collect_facts, 2, ("nothing overlapped", *LONG), seconds=400)
    for name in LONG:
        promises.check(PROGRAMS[name], [results[name] for results in by_rank])


def test_param_when_saved_alone_then_nothing_but_it_is_written(facts: Facts) -> None:
    # 256 bytes of values and about 1,200 of zip; the whole buffer has 15,488.
    assert all(results.noted["nbytes"] < 2500 for results in facts["param_saved"])
