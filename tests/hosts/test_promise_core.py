"""A user of megatron-core does something unusual: it is as with the host's own optimizer, or ours
refuses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts import promises
from tests.hosts.promises import (
    COMMON,
    OTHER,
    STEPS,
    Equal,
    NoEffect,
    Outcome,
    Program,
    Refused,
    Result,
)
from tests.support.cases import Case
from tests.support.facts import Facts, facts_of

if TYPE_CHECKING:
    from tests.support.gpt import Training

BF16 = Case("distopt", dp=2, precision="bf16", clip_grad=1e9, num_microbatches=1)
FP32 = BF16.of(precision="fp32")
FP16 = BF16.of(precision="fp16")
OVERLAPPED = BF16.of(overlap_grad_reduce=True, overlap_param_gather=True)
FROZEN = BF16.of(frozen=("final_layernorm",))
BIAS = "0.decoder.layers.{}.mlp.linear_fc1.bias"


@dataclass
class User:
    """See `promises.User`."""

    training: Training
    noted: dict[str, Any]

    @property
    def optimizer(self) -> Any:
        return self.training.optimizer

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer

    @property
    def chunk(self) -> Any:
        return self.training.chunks[0]

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.training.named_params())

    @property
    def part(self) -> Any:
        return next(
            module
            for name, module in self.chunk.named_modules()
            if name.endswith("final_layernorm")
        )

    @property
    def biases(self) -> tuple[str, str]:
        return BIAS.format(0), BIAS.format(1)


def forget_the_scale(user: User) -> None:
    user.chunk.config.grad_scale_func = None


def convert_there_and_back(user: User) -> None:
    user.chunk.bfloat16().float()


def convert(user: User) -> None:
    """After backward, because megatron-core's own layers refuse mixed dtypes before."""
    user.part.bfloat16()


MOVED = ("embedding.word_embeddings.weight", "param.data.copy_(...)")
BOTH = ("LayoutError", "LayoutError")

PROGRAMS: dict[str, Program] = {
    "nothing": Program(expect=NoEffect(), setting=BF16),
    "nothing in fp32": Program(expect=NoEffect(), setting=FP32),
    "nothing in fp16": Program(expect=NoEffect(), setting=FP16),
    "nothing with a frozen param": Program(expect=NoEffect(), setting=FROZEN),
    **{name: replace(program, setting=BF16) for name, program in COMMON.items()},
    "weights_changed_at_first": Program(promises.halve, at=0, setting=BF16),
    "weights_changed_in_fp32": Program(promises.halve, setting=FP32),
    "nothing overlapped": Program(expect=NoEffect(), setting=OVERLAPPED),
    "weights_changed_overlapped": Program(promises.halve, setting=OVERLAPPED),
    "data_replaced": Program(promises.move, Refused(BOTH, MOVED), setting=BF16),
    "data_replaced_on_one_rank": Program(
        promises.move_on_one_rank, Refused((OTHER, "LayoutError"), MOVED), setting=BF16
    ),
    "data_replaced_before": Program(
        expect=Refused(BOTH, MOVED), wrapped=promises.move_before, setting=BF16
    ),
    "data_replaced_and_reloaded": Program(
        promises.move_and_reload, Refused(BOTH, MOVED), setting=BF16
    ),
    "converted_there_and_back": Program(convert_there_and_back, Refused(BOTH, MOVED), setting=FP32),
    "converted": Program(
        within=convert, expect=Refused(BOTH, ("final_layernorm.weight", MOVED[1])), setting=FP32
    ),
    "tied_by_data": Program(
        promises.tie, Refused(BOTH, (BIAS.format(1).removeprefix("0."), *MOVED[1:])), setting=BF16
    ),
    "aliases_before": Program(
        promises.note_aliases,
        NoEffect(),
        wrapped=promises.take_aliases,
        setting=BF16,
        notes={"are current": True},
    ),
    "memory_shared": Program(promises.share, NoEffect(), setting=BF16),
    "memory_shared_before": Program(expect=NoEffect(), wrapped=promises.share_before, setting=BF16),
    "unfrozen": Program(promises.unfreeze, NoEffect(), setting=FROZEN),
    "grads_kept": Program(promises.keep_grads, Equal(), setting=BF16),
    "loss_not_scaled": Program(forget_the_scale, at=0, setting=FP16),
    "closure": Program(
        promises.step_with_closure, NoEffect(), setting=BF16, notes={"step": "TypeError"}
    ),
    "read_in_a_fork": Program(
        promises.read_in_a_fork, NoEffect(), setting=BF16, notes={"same": True}
    ),
    "param_saved": Program(promises.save_a_param, NoEffect(), setting=BF16),
}


@contextlib.contextmanager
def _prepared(program: Program) -> Iterator[None]:
    """The model of the next training, before and after it is wrapped."""
    from tests.support import gpt

    chunks_of, prepare = gpt.build_chunks, gpt.prepare_params

    def built(case: Case) -> Any:
        chunks = chunks_of(case)
        (program.wrapped or bool)(chunks[0])
        return chunks

    def prepared(case: Case, model: Any) -> None:
        (program.build or bool)(model)
        prepare(case, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "build_chunks", built)
        patch.setattr(gpt, "prepare_params", prepared)
        yield


def _train(program: Program, ours: bool) -> Outcome:
    from tests.support.gpt import Training

    noted: dict[str, Any] = {}
    case = program.setting.of(optimizer="distopt" if ours else "host-distributed")
    try:
        with _prepared(program), contextlib.closing(Training(case)) as training:
            _take_steps(program, User(training, noted))
            return Outcome(training.params(), "", noted)
    except Exception as error:  # noqa: BLE001 - it is the result
        return Outcome({}, f"{type(error).__name__}: {error}", noted)


def _take_steps(program: Program, user: User) -> None:
    for number in range(STEPS):
        if program.before is not None and number == program.at:
            program.before(user)
        user.training.forward_backward()
        if program.within is not None and number == program.at:
            program.within(user)
        with user.training.type_strings():
            user.optimizer.step()
        user.training.finish_step()


def collect_facts(rank: int, size: int) -> dict[str, Result]:
    os.environ["MEGATRON_DISTOPT_ADAM"] = "torch_foreach"
    return promises.run_programs(PROGRAMS, _train)


facts = facts_of(collect_facts, 2, seconds=400, core=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_user_when_doing_something_unusual_then_it_is_as_in_the_host_or_refused(
    facts: Facts, name: str
) -> None:
    promises.check(PROGRAMS[name], facts[name])
