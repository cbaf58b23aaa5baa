"""Who wrote to params and gradients: every alias of a param that torch can give, every operator
that touches memory."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.optim import SGD

from megatron_distopt import distribute
from megatron_distopt.hosts.megatron_2023.watch import Watch
from megatron_distopt.hosts.watches.version_census import VersionCensus
from megatron_distopt.hosts.watches.watched_params import Writes, _DataWatch, data_watch


@pytest.fixture
def watched() -> Iterator[Writes]:
    writes = Writes("weight", Parameter(torch.ones(4)))
    data_watch.add([writes])
    yield writes
    data_watch.remove([writes])


def _read_often(param: Parameter) -> None:
    for _ in range(50):
        param.data.sum()


def _write_and_read_often(param: Parameter) -> None:
    param.data.add_(1)
    _read_often(param)


@pytest.mark.parametrize(
    ("act", "is_written"),
    [
        (lambda param: None, False),
        (lambda param: param.detach() * 2, False),
        (_read_often, False),
        (lambda param: torch.no_grad()(param.mul_)(2), True),
        (lambda param: param.detach().mul_(2), True),
        (lambda param: param.data.mul_(2), True),
        (lambda param: param.data.view(2, 2)[0].zero_(), True),
        (_write_and_read_often, True),
    ],
)
def test_param_when_it_is_written_to_then_that_is_known_until_it_is_forgotten(
    watched: Writes, act: Callable[[Parameter], object], is_written: bool
) -> None:
    act(watched.param)
    assert watched.is_written == is_written
    watched.forget()
    assert not watched.is_written


@pytest.mark.parametrize("take", [lambda data: data, lambda data: data.view(2, 2)[0]])
def test_alias_when_it_is_held_over_several_steps_then_later_writes_are_seen(
    watched: Writes, take: Callable[[Tensor], Tensor]
) -> None:
    alias = take(watched.param.data)
    for _ in range(3):
        watched.forget()
        assert not watched.is_written
        alias[1:].zero_()
        assert watched.is_written


def test_data_when_nobody_watches_any_more_then_it_is_torchs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "data" in vars(Parameter):  # another test has left somebody who watches
        monkeypatch.delattr(Parameter, "data")
    watch, writes = _DataWatch(), Writes("weight", Parameter(torch.ones(4)))
    watch.add([writes])
    assert "data" in vars(Parameter)
    param = writes.param
    del writes
    gc.collect()
    assert param.data.sum() == 4
    assert "data" not in vars(Parameter)


@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (lambda tensors: tensors["a"].sum(), []),
        (lambda tensors: tensors["a"].add_(1), ["a"]),
        (lambda tensors: tensors.update(a=torch.zeros(2)), ["a"]),
        (lambda tensors: tensors.update(c=torch.zeros(2)), ["c"]),
        (lambda tensors: tensors.pop("b"), ["b"]),
    ],
)
def test_census_when_tensors_change_then_they_are_named(
    act: Callable[[dict[str, Tensor]], object], changed: list[str]
) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    census = VersionCensus(tensors)
    tensors = dict(tensors)
    act(tensors)
    assert census.changed(tensors) == changed


#: "a" and "b" lie in one buffer with a gap between them, "c" apart.
BUFFER, APART = torch.zeros(40), torch.zeros(6, dtype=torch.bfloat16)
TENSORS = {"a": BUFFER[:10].view(2, 5), "b": BUFFER[20:40], "c": APART}


@pytest.mark.parametrize(
    ("act", "written"),
    [
        (lambda: TENSORS["a"] + 1, ""),
        (lambda: TENSORS["a"].add_(1), "a"),
        (lambda: TENSORS["a"].data.add_(1), "a"),
        (TENSORS["a"].detach().view(-1)[3:4].zero_, "a"),
        (BUFFER.zero_, "ab"),
        (BUFFER[10:20].zero_, ""),
        (BUFFER[9:21].zero_, "ab"),
        (BUFFER[::15].zero_, "ab"),  # as far as it reaches
        (lambda: APART.view(torch.int16).bitwise_not_(), "c"),
        (lambda: torch.cat([TENSORS["a"].flatten(), TENSORS["b"]]), ""),
        (lambda: torch._foreach_mul_([TENSORS["a"], APART], 2.0), "ac"),
        (lambda: torch.add(TENSORS["a"], 1, out=BUFFER[20:30].view(2, 5)), "b"),
        (lambda: torch.zeros(3, device="meta").add_(1), ""),
    ],
)
def test_watch_when_an_operation_writes_then_it_names_whose_memory(
    act: Callable[[], Tensor], written: str
) -> None:
    seen: set[str] = set()
    with Watch(TENSORS, seen.add):
        act()
    BUFFER.zero_()  # not seen any more
    assert seen == set(written)


def test_watch_when_the_answer_is_an_error_then_the_operation_does_not_run() -> None:
    def refuse(name: str) -> None:
        raise RuntimeError(name)

    APART.zero_()
    with pytest.raises(RuntimeError, match="c"), Watch(TENSORS, refuse):
        APART.fill_(7)
    assert not APART.any()


def _in_a_cycle(model: Linear) -> None:
    cycle = [model.weight.data]
    cycle.append(cycle)  # type: ignore[arg-type]


def _loaded(model: Linear) -> object:
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    return model.load_state_dict(kept), kept


def _released(model: Linear) -> object:
    optimizer = distribute(model, SGD(model.parameters()), accelerator="torch")
    optimizer.release()
    return optimizer


@pytest.mark.parametrize(
    ("take", "told"),
    [
        (lambda model: model.state_dict(), "'bias', 'weight'"),
        (lambda model: model.weight.data, "'weight'"),
        (lambda model: model.weight.detach().numpy(), "'weight'"),
        (lambda model: model.weight.detach()[1], "'weight'"),
        (lambda model: model.register_buffer("first", model.weight.detach()[:1]), "'weight'"),
        (lambda model: copy.deepcopy(model).state_dict(), ""),
        (lambda model: dict(model.named_parameters()), ""),
        (lambda model: Linear.__new__(Linear).__dict__.update(model.__dict__), ""),
        (_in_a_cycle, ""),
        (_loaded, ""),
        (_released, ""),
    ],
)
def test_alias_when_it_was_taken_before_the_optimizer_then_the_param_is_named(
    one_rank: None, caplog: pytest.LogCaptureFixture, take: Callable[[Linear], object], told: str
) -> None:
    model = Linear(2, 2)
    taken = take(model)
    with caplog.at_level(logging.WARNING, "megatron_distopt"):
        distribute(model, SGD(model.parameters()), accelerator="torch")
    assert [f"param {told} had" in message for message in caplog.messages] == [True] * bool(told)
    del taken
