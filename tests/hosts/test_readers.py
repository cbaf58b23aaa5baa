"""Readers of params and gradients that do not ask Python: TorchScript, functorch, DLPack, C++ code
of torch, torch.compile.

Params that are being gathered are waited for: every gather is made slow, so that whoever does not
wait has old values. Gradients are those of one rank, so that reading them is refused.

Exercises buffers/grad_buffer.py, hosts/torch/cpp_calls.py.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, functional
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_distopt import distribute
from megatron_distopt.comm import pairwise
from megatron_distopt.errors import (
    AccessError,
    DistOptError,
    LayoutError,
    NonFiniteGradError,
    RanksDisagreeError,
)
from tests.support.facts import Facts, facts_of

RANKS, STEPS, WIDTH = 2, 2, 8
#: Seconds: longer than what a reader needs to get there.
SLOW = 0.01
#: A bucket a layer.
BUCKET = WIDTH * WIDTH + WIDTH
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class _Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.middle(hidden))
        out: Tensor = self.last(hidden)
        return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def _sum_of(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for each in tensors:
        total = total + each.sum()
    return total


# --- params

#: What evaluates a model, made from it before `distribute` or at the first evaluation.
Reader = Callable[[Any], Callable[[], Tensor]]


def _scripted(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model)
    return lambda: scripted(X)


def _traced(model: Any) -> Callable[[], Tensor]:
    traced = torch.jit.trace(model, X)
    return lambda: traced(X)


def _part_scripted(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model.last)
    return lambda: scripted(X)


def _given_to_a_function(model: Any) -> Callable[[], Tensor]:
    function = torch.jit.script(_linear)
    return lambda: function(X, model.last.weight, bias=model.last.bias)


def _given_as_a_list(model: Any) -> Callable[[], Tensor]:
    function = torch.jit.script(_sum_of)
    return lambda: function(list(model.parameters()))


def _script_saved(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model)

    def saved() -> Tensor:
        torch.jit.save(scripted, file := io.BytesIO())
        file.seek(0)
        out: Tensor = torch.jit.load(file)(X)
        return out

    return saved


def _script_copied(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model)
    return lambda: copy.deepcopy(scripted)(X)


def _script_frozen(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model).eval()
    return lambda: torch.jit.freeze(scripted)(X)


def _script_compiled(model: Any) -> Callable[[], Tensor]:
    scripted = torch.jit.script(model)
    compiled = torch.compile(lambda x: scripted(x) + 1, backend="eager")
    return lambda: compiled(X)


def _compiled(model: Any) -> Callable[[], Tensor]:
    return torch.compile(lambda: model(X) + model.last.weight.sum(), backend="eager")


def _of_weight(read: Callable[[Tensor], Tensor]) -> Reader:
    return lambda model: lambda: read(model.last.weight)


def _close(one: Tensor, other: Tensor) -> bool:
    """TorchScript rounds otherwise after it has run a few times; old params are 0.01 apart."""
    return torch.allclose(one, other, rtol=0, atol=1e-5)


READERS: dict[str, Reader] = {
    "scripted": _scripted,
    "traced": _traced,
    "a part scripted": _part_scripted,
    "given to a scripted function": _given_to_a_function,
    "given to a scripted function as a list": _given_as_a_list,
    "scripted and saved": _script_saved,
    "scripted and copied": _script_copied,
    "scripted and frozen": _script_frozen,
    "scripted and compiled": _script_compiled,
    "compiled": _compiled,
    "vmap": _of_weight(torch.vmap(lambda row: row.sum())),
    "func.grad": _of_weight(torch.func.grad(lambda weight: weight.square().sum())),
    "functionalize": _of_weight(torch.func.functionalize(lambda weight: weight.square().sum())),
    "DLPack": _of_weight(lambda w: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w)).clone()),
    "address": _of_weight(lambda weight: _at(weight.data_ptr(), weight.numel())),
}


def _at(address: int, numel: int) -> Tensor:
    """What foreign code reads that is given an address."""
    import ctypes

    return torch.tensor(list((ctypes.c_float * numel).from_address(address)))


#: Those that are made from a module, which may be before `distribute` as well.
FROM_MODULES = ("scripted", "traced", "a part scripted", "scripted and compiled", "compiled")
_gather = pairwise.all_gather


def _slowly(*args: Any) -> None:
    time.sleep(SLOW)
    _gather(*args)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _evaluated(reader: Reader, rank: int, *, is_before: bool, overlap: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, seen = _Net(), list[Tensor]()
    read = reader(model) if is_before else None
    if read is not None:
        read()
    optimizer = distribute(
        model, AdamW(model.parameters(), lr=0.05), bucket_size=BUCKET, overlap_param_gather=overlap
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(step, rank)).square().mean().backward()
        optimizer.step()
        read = read or reader(model)
        seen.append(read().detach().clone())
    return [*seen, *(param.detach().clone() for param in model.parameters())]


def _reads(rank: int) -> dict[str, bool]:
    found = {}
    for name, reader in READERS.items():
        for is_before in (True, False) if name in FROM_MODULES else (False,):
            without = _evaluated(reader, rank, is_before=is_before, overlap=False)
            with mock.patch.object(pairwise, "all_gather", _slowly):
                with_it = _evaluated(reader, rank, is_before=is_before, overlap=True)
            is_equal = all(map(_close, with_it, without))
            found[f"{name}, before" if is_before else name] = is_equal
    return found


# --- script modules that train


def _with_script_part() -> Module:
    model = _Net()
    model.middle = torch.jit.script(model.middle)
    return model


def _with_traced_part() -> Module:
    model = _Net()
    model.middle = torch.jit.trace(model.middle, X)
    return model


def _loaded() -> Any:
    torch.jit.save(torch.jit.script(_Net()), file := io.BytesIO())
    file.seek(0)
    return torch.jit.load(file)


TRAINED: dict[str, Callable[[], Any]] = {
    "a part": _with_script_part,
    "a part that was traced": _with_traced_part,
    "all of it": lambda: torch.jit.script(_Net()),
}


def _trained(build: Callable[[], Any], rank: int, overlap: bool | None) -> list[Tensor]:
    """The params after some steps, and what the model computes with them; torch's where `overlap`
    is None."""
    torch.manual_seed(0)
    model = build()
    optimizer: Any = AdamW(model.parameters(), lr=0.05, foreach=True)
    if overlap is not None:
        optimizer = distribute(
            model, optimizer, bucket_size=BUCKET, overlap_param_gather=overlap, clip_grad=0.0
        )
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(step, rank)).square().mean().backward()
        for param in model.parameters() if overlap is None else ():
            dist.all_reduce(param.grad)
            param.grad /= RANKS
        optimizer.step()
        seen.append(model(X).detach())
    return [*seen, *(param.detach().clone() for param in model.parameters())]


def _trainings(rank: int) -> dict[str, bool]:
    found = {}
    for name, build in TRAINED.items():
        of_torch = _trained(build, rank, None)
        for overlap in (False, True):
            with mock.patch.object(pairwise, "all_gather", _slowly):
                ours = _trained(build, rank, overlap)
            found[f"{name}, overlap {overlap}"] = all(map(_close, ours, of_torch))
    return found


# --- gradients


def _capsule(grad: Tensor) -> object:
    """torch's function is looked up now, after it was watched."""
    return torch.utils.dlpack.to_dlpack(grad)


#: Ways to the values of a gradient that do not ask its class.
GRAD_READS: dict[str, Callable[[Any], object]] = {
    "scripted function": lambda grad: torch.jit.script(_sum_of)([grad]),
    "traced function": torch.jit.trace(lambda t: t.norm(), torch.ones(2, 2)),
    "vmap": torch.vmap(lambda row: row.sum()),
    "func.grad": torch.func.grad(lambda t: t.square().sum()),
    "functionalize": torch.func.functionalize(lambda t: t.norm()),
    "as_subclass": lambda grad: grad.as_subclass(Tensor),
    "_make_subclass": lambda grad: Tensor._make_subclass(Tensor, grad),
    "torch.tensor": torch.tensor,
    "set_": lambda grad: torch.empty(0).set_(grad),
    "untyped_storage": lambda grad: list(grad.untyped_storage()),
    "reductions": torch.multiprocessing.reductions.reduce_tensor,
    "data_ptr": lambda grad: grad.data_ptr(),
    "DLPack": torch.utils.dlpack.from_dlpack,
    "DLPack's capsule": _capsule,
    "copy": copy.deepcopy,
    "pickle": lambda grad: torch.save(grad, io.BytesIO()),
}


def _refusals(rank: int) -> dict[str, str]:
    model = Linear(WIDTH, WIDTH)
    optimizer = distribute(model, AdamW(model.parameters()))
    found = {}
    for name, read in GRAD_READS.items():
        optimizer.zero_grad()
        for _ in range(2):  # the second one is added by autograd in C++
            model(_batch(0, rank)).sum().backward()
        found[name] = _error_of(lambda read=read: read(model.weight.grad))  # type: ignore[misc]
        optimizer.step()
    return found


def _error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _through_another_script(rank: int) -> bool:
    """TorchScript that the watched calls do not see; it does not hand on what an error says."""
    model = Linear(WIDTH, WIDTH)
    optimizer = distribute(model, AdamW(model.parameters()))
    model(_batch(0, rank)).sum().backward()
    grad = model.weight.grad
    with (
        mock.patch("megatron_distopt.hosts.torch.cpp_calls._checks", {}),
        pytest.raises(RuntimeError, match="TorchScript"),
    ):
        torch.jit.script(_sum_of)([grad])
    optimizer.step()
    return True


# --- hooks


class _Own(AdamW):
    """Calls a step of torch's from its own, each of which calls the hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Unknown(Optimizer):
    """A class of which the user says what it updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"]):
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


def _muon(model: Module) -> list[Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    return [Muon(matrices), AdamW([param for param in model.parameters() if param.ndim != 2])]


OPTIMIZERS: dict[str, Callable[[Module], Any]] = {
    "AdamW": lambda model: AdamW(model.parameters()),
    "AdamW without fused": lambda model: AdamW(model.parameters(), fused=False),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda model: Adafactor(model.parameters()),
    "Muon": _muon,
    "a class over torch's": lambda model: _Own(model.parameters()),
    "a class of one's own": lambda model: _Unknown(model.parameters()),
    "none": lambda model: None,
}


def _hooks(rank: int) -> dict[str, bool]:
    seen: list[tuple[str, Any]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(("pre", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("post", optimizer))),
    ]
    found = {}
    for name, build in OPTIMIZERS.items():
        model = Linear(WIDTH, WIDTH)
        given = build(model)
        said = {"updates": "elements"} if isinstance(given, (_Own, _Unknown)) else {}
        optimizer = distribute(model, given, **said)
        model(_batch(0, rank)).sum().backward()
        optimizer.step()
        found[name] = seen == [("pre", optimizer), ("post", optimizer)]
        seen.clear()
    for handle in handles:
        handle.remove()
    return found


# --- compiled steps


def _compiled_step(rank: int, build: Callable[[Module], Any], what: str, **options: Any) -> Any:
    """The params after training, with the step compiled and without, and how many graphs there
    are of it."""
    graphs: list[object] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def train(compiled: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = _Net()
        model.last.weight.requires_grad_(what != "unfrozen")
        optimizer = distribute(model, build(model), bucket_size=BUCKET, **options)
        step = compiled(optimizer.step)

        def whole(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()

        if what == "whole":
            whole = compiled(whole)
        for number in range(STEPS):
            x = _batch(number, rank)
            if what == "unfrozen" and number == 1:
                model.last.weight.requires_grad_(True)
            if what == "nan" and number == 1:
                x = x * float("nan")
            if what == "rates" and number == 1:
                optimizer.param_groups[0]["lr"] = 0.1 + rank
            if what == "whole":
                whole(x)
                continue
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            step(lambda loss=loss: loss) if what == "closure" else step()
        return [param.detach().clone() for param in model.parameters()]

    plain = train(lambda function: function) if what not in ("nan", "rates") else []
    torch._dynamo.reset()
    ours = train(lambda function: torch.compile(function, backend=backend))
    return all(map(torch.equal, ours, plain)), len(graphs)


COMPILED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AdamW": ("AdamW", "", {}),
    "Adafactor": ("Adafactor", "", {}),
    "Muon": ("Muon", "", {}),
    "both overlaps": ("AdamW", "", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "unfrozen params": ("AdamW", "unfrozen", {}),
    "closure": ("AdamW", "closure", {}),
}


def _compilations(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, what, options) in COMPILED.items():
        found[name] = _compiled_step(rank, OPTIMIZERS[kind], what, **options)
    found["whole"] = _compiled_step(rank, OPTIMIZERS["AdamW"], "whole")
    for what in ("nan", "rates"):
        run = lambda what=what: _compiled_step(rank, OPTIMIZERS["AdamW"], what)  # noqa: E731
        found[what] = _error_of(run)
    return found


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "refused": _refusals(rank),
        "another": _through_another_script(rank),
        "hooks": _hooks(rank),
        "trained": _trainings(rank),
        "loaded": _error_of(lambda: distribute(model := _loaded(), AdamW(model.parameters()))),
        "reads": _reads(rank),
        "compiled": _compilations(rank),
    }


facts = facts_of(collect_facts, RANKS)


@pytest.mark.parametrize("name", [*READERS, *(f"{name}, before" for name in FROM_MODULES)])
def test_params_when_read_by_code_that_does_not_ask_python_then_they_are_waited_for(
    facts: Facts, name: str
) -> None:
    assert [each[name] for each in facts["reads"]] == [True] * RANKS


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_script_module_when_its_params_train_then_equal_to_torch(
    facts: Facts, name: str, overlap: bool
) -> None:
    assert [each[f"{name}, overlap {overlap}"] for each in facts["trained"]] == [True] * RANKS


def test_script_module_when_it_was_loaded_then_refused_at_the_start(facts: Facts) -> None:
    for each in facts["loaded"]:
        assert each.startswith(LayoutError.__name__)
        assert "'last.bias'" in each and "written in Python" in each


@pytest.mark.parametrize("name", GRAD_READS)
def test_gradient_when_read_by_code_that_does_not_ask_python_then_refused(
    facts: Facts, name: str
) -> None:
    for each in facts["refused"]:
        assert each[name].startswith(f"{AccessError.__name__}: ")
        assert "'weight'" in each[name]
        assert "optimizer.clip_grad_norm_(max_norm)" in each[name]


def test_gradient_when_script_reads_it_unwatched_then_it_fails(facts: Facts) -> None:
    assert facts["another"] == [True] * RANKS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_for_all_optimizers_when_a_step_is_made_then_they_see_that_of_the_user_alone(
    facts: Facts, name: str
) -> None:
    assert [each[name] for each in facts["hooks"]] == [True] * RANKS


@pytest.mark.parametrize("name", COMPILED)
def test_step_when_it_is_compiled_then_it_is_as_without_and_no_graph(
    facts: Facts, name: str
) -> None:
    assert [each[name] for each in facts["compiled"]] == [(True, 0)] * RANKS


def test_training_step_when_it_is_compiled_as_a_whole_then_equal(facts: Facts) -> None:
    for each in facts["compiled"]:
        is_equal, num_graphs = each["whole"]
        assert is_equal and num_graphs > 0


@pytest.mark.parametrize(
    ("what", "kind"), [("nan", NonFiniteGradError), ("rates", RanksDisagreeError)]
)
def test_step_when_it_is_compiled_then_its_errors_are_ours(
    facts: Facts, what: str, kind: type[DistOptError]
) -> None:
    assert all(each[what].startswith(kind.__name__) for each in facts["compiled"])
