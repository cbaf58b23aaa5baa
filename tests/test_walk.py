"""How far one gradient travels until its param is updated: few files and few calls, so that it can
be followed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import megatron_distopt
from megatron_distopt.optimizer import step
from tests.support.cases import Case
from tests.support.mini_fork import MiniFork
from tests.support.spawn import run_ranks

PACKAGE = Path(megatron_distopt.__file__).parent
#: From the hook of the gradient until the main param is updated and rounded, in plain torch: eager,
#: one microbatch, one rank, one param.
MOST_FILES, MOST_CALLS = 16, 60
#: What the calls that a Megatron makes of our optimizer in one step go through, for a whole model
#: on one rank. How often a function is called depends on the number of params, so functions are
#: counted. They may only fall.
MOST_IN_MEGATRON = {"2023": (19, 63), "core": (17, 60)}  # files, functions

#: Functions of ours that are open at once, from `optimizer.step()` of plain torch on two ranks of a
#: CPU down to the memory that they share.
MOST_DEEP = 12

_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def _is_followed(code: CodeType) -> bool:
    return code.co_filename.startswith(str(PACKAGE)) and code.co_name not in _COMPREHENSIONS


def _name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


class Walk:
    """The functions of the package that are called while it is open; comprehensions count as their
    functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._is_over = False

    def end(self) -> None:
        """Counts no further calls."""
        self._is_over = True

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set(self.calls)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and _is_followed(code) and not self._is_over:
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.calls.append((file, _name_of(code)))


class Descent:
    """The longest chain of functions of the package that call each other while it is open."""

    def __init__(self) -> None:
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_followed(frame.f_code):
            return
        chain, caller = list[str](), frame
        while caller is not None:
            if _is_followed(caller.f_code):
                chain.append(_name_of(caller.f_code))
            caller = caller.f_back
        self.deepest = max(self.deepest, chain[::-1], key=len)


@contextmanager
def walking() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def ends_at(walk: Walk, function: Callable[..., None]) -> Callable[..., None]:
    def last(*args: Any) -> None:
        function(*args)
        walk.end()

    return last


@pytest.mark.usefixtures("one_rank")
def test_gradient_when_it_is_followed_to_its_param_then_the_way_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(8, 8, bias=False).bfloat16()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = megatron_distopt.distribute(model, adamw, clip_grad=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
        before = model.weight.detach().clone()
        with walking() as walk:
            monkeypatch.setattr(step, "write_model", ends_at(walk, step.write_model))
            loss.backward()
            optimizer.step()
    assert not torch.equal(before, model.weight)
    assert walk.calls[0][0] == "hosts/torch/grads.py" and walk.calls[-1][1] in (
        "write_model",
        "profiled",
    )
    assert len(walk.files) <= MOST_FILES, sorted(walk.files)
    assert len(walk.calls) <= MOST_CALLS, "\n".join(map(str, walk.calls))


def _steps_of_two_ranks(rank: int, size: int) -> list[str]:
    model, descent = torch.nn.Linear(8, 8), Descent()
    optimizer = megatron_distopt.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(3):
        model(torch.ones(2, 8)).square().mean().backward()
        sys.setprofile(descent)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    return descent.deepest


def test_step_when_two_ranks_share_memory_then_no_chain_of_calls_is_long() -> None:
    for chain in run_ranks(_steps_of_two_ranks, 2):
        assert "reduce_scatter" in chain, chain  # it is that of the gradient
        assert len(chain) <= MOST_DEEP, chain


def _step_in_core(rank: int, size: int) -> Walk:
    from tests.support import gpt

    with contextlib.closing(gpt.Training(Case("distopt", precision="bf16"))) as training:
        for _ in range(3):
            training.forward_backward()
            with walking() as walk:
                training.optimizer.step()
    return walk


def _step_in_2023(rank: int, size: int) -> Walk:
    fork, walks = MiniFork.imported(file_layout="gathered"), list[Walk]()
    train_step = fork.training.train_step

    def walked(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
        walks.append(Walk())
        with pytest.MonkeyPatch.context() as patch:
            for name in ("reduce_model_grads", "step", "gather_model_params"):
                patch.setattr(optimizer, name, _followed(walks[-1], getattr(optimizer, name)))
            return train_step(forward_step, iterator, model, optimizer, scheduler)

    fork.training.train_step = walked
    fork.train("--bf16", "--use-distributed-optimizer", "--clip-grad", "1.0", "--train-iters", "3")
    return walks[-1]


def _followed(walk: Walk, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(walk)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(None)

    return call


@pytest.mark.parametrize(("host", "make_step"), [("2023", _step_in_2023), ("core", _step_in_core)])
def test_step_when_it_is_followed_in_a_megatron_then_the_way_is_no_longer_than_it_was(
    host: str, make_step: Callable[[int, int], Walk]
) -> None:
    (walk,) = run_ranks(make_step, 1, seconds=120.0)
    files, functions = MOST_IN_MEGATRON[host]
    assert len(walk.files) <= files, sorted(walk.files)
    assert len(walk.functions) <= functions, sorted(walk.functions)
