"""How far one gradient travels until its param is updated: few files and few calls, so that it can be followed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import megatron_distopt
from megatron_distopt.optimizer import step

PACKAGE = Path(megatron_distopt.__file__).parent
#: From the hook of the gradient until the main param is updated and rounded, in plain torch: eager, one microbatch, one
#: rank, one param.
MOST_FILES, MOST_CALLS = 16, 60

_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Walk:
    """The functions of the package that are called while it is open; comprehensions count as their functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._is_over = False

    def end(self) -> None:
        """Counts no further calls."""
        self._is_over = True

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(str(PACKAGE)) and code.co_name not in _COMPREHENSIONS
        if event == "call" and is_ours and not self._is_over:
            self.calls.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))


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
def test_gradient_when_it_is_followed_to_its_param_then_the_way_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert walk.calls[0][0] == "hosts/torch/grads.py" and walk.calls[-1][1] in ("write_model", "rounds_itself")
    assert len(walk.files) <= MOST_FILES, sorted(walk.files)
    assert len(walk.calls) <= MOST_CALLS, walk.calls
