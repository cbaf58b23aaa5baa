"""`distribute` with optimizers that update whole params: equal to them undistributed to the bit, or refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.cli.main import main as run_command
from megatron_distopt.errors import AccessError, ConfigError, DistOptError, LayoutError
from megatron_distopt.formats.conversion import convert
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.whole_params import WholeParams
from megatron_distopt.optimizer.step import clip_divisor
from tests.support.spawn import run_ranks
from tests.support.whole_classes import tried_once

SIZES, STEPS = (1, 2, 3), 5
SHAPES = {
    "embedding": (13, 8),
    "wide": (12, 40),
    "norm": (9,),
    "tall": (33, 6),
    "conv": (4, 3, 2, 2),
    "square": (16, 16),
}
BF16, FP16 = torch.bfloat16, torch.float16
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}

Params = Any
#: By name; each as published.
CLASSES: dict[str, Callable[[Params], Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.125),
    "Lamb": lambda params: pytorch_optimizer.Lamb(params, lr=0.125, weight_decay=0.1),
    "SOAP": lambda params: pytorch_optimizer.SOAP(params, lr=0.125, precondition_frequency=2),
    "Shampoo": lambda params: pytorch_optimizer.Shampoo(params, lr=0.125, preconditioning_compute_steps=2),
    "AdamP": lambda params: pytorch_optimizer.AdamP(params, lr=0.125),
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        optimizer: of `CLASSES`.
        options: of `distribute`.
        dtype: of the params.
        absent: by step, params without a gradient.
        bad: the step in which a gradient is not finite.
        frozen: a param that begins to train in the third step.
        scheduled: whether the rate is halved after each step.
    """

    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    absent: Mapping[int, Collection[str]] = field(default_factory=dict)
    bad: int | None = None
    frozen: str | None = None
    scheduled: bool = False

    def grads(self, step: int, rank: int) -> dict[str, Tensor]:
        """Multiples of 12 / 256: the average over 2 or 3 ranks is exact."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        absent = {*self.absent.get(step, ()), *([self.frozen] if step < 2 else [])}
        drawn = {name: torch.randint(-3, 4, shape, generator=generator) * (12 / 256) for name, shape in SHAPES.items()}
        if step == self.bad and rank == 0:
            drawn["tall"].view(-1)[0] = torch.inf
        return {name: grad for name, grad in drawn.items() if name not in absent}


CASES = {
    **{name: Case(name) for name in ("SOAP", "Shampoo")},
    **{f"{name}, bf16, overlapped, clipped": Case(name, {"clip_grad": 0.5, **OVERLAP}, BF16) for name in CLASSES},
    "some without a gradient": Case("Lamb", OVERLAP, BF16, absent={1: ("wide", "norm"), 2: ("square", "tall")}),
    "none with a gradient": Case("SOAP", absent={2: tuple(SHAPES)}),
    "grads in bf16": Case("Adafactor", {"grads_in_fp32": False}, BF16),
    "overflow": Case("SOAP", {"loss_scale": "dynamic", "initial_loss_scale": 2.0**8}, FP16, bad=1),
    "inf skipped": Case("Lamb", {"nonfinite": "skip"}, bad=2),
    "one begins to train": Case("Adafactor", OVERLAP, BF16, frozen="tall"),
    "scheduled": Case("Lamb", scheduled=True),
}


#: On three ranks all of them. On two those with something that ranks have in parts; alone, two kinds of state.
SOME = {
    1: ("SOAP",),
    2: ("SOAP, bf16, overlapped, clipped", "some without a gradient", "overflow", "inf skipped"),
}
TRAINED = [(name, size) for size in SIZES for name in SOME.get(size, CASES)]


class Held(nn.Module):
    """Params and nothing else."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss whose gradient is exactly `grads`."""
        terms = [(getattr(self, name).float() * grad).sum() for name, grad in grads.items()]
        return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True) * 1.0


def expected(case: Case, size: int) -> dict[str, Tensor]:
    """What the class itself leaves of fp32 copies of all params, in the dtype of the model."""
    start = dict(Held(case.dtype).named_parameters())
    mains = {name: nn.Parameter(param.detach().float()) for name, param in start.items()}
    optimizer = CLASSES[case.optimizer](mains.values())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for step in (step for step in range(STEPS) if step != case.bad):
        drawn = [case.grads(step, rank) for rank in range(size)]
        sums = {name: torch.stack([grads[name] for grads in drawn]).sum(0) for name in drawn[0]}
        squares = [(each / size).double().square().sum() for each in sums.values()]
        norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
        divisor = size * clip_divisor(norm, case.options.get("clip_grad", 0.0))
        for name, main in mains.items():
            main.grad = sums[name] / divisor if name in sums else None
        optimizer.step()
        if case.scheduled:
            scheduler.step()
    return {name: main.detach().to(start[name].dtype) for name, main in mains.items()}


class Run:
    """A training on some ranks."""

    def __init__(self, case: Case, group: Any) -> None:
        self.case, self.model = case, Held(case.dtype)
        if case.frozen is not None:
            getattr(self.model, case.frozen).requires_grad_(False)
        given = CLASSES[case.optimizer](self.model.parameters())
        self.optimizer = distribute(self.model, given, process_group=group, accelerator="torch", **case.options)
        self.scheduler = StepLR(given, step_size=1, gamma=0.5) if case.scheduled else None

    def step(self, step: int, num_drawn: int = 0) -> None:
        """One step; with the mean of the gradients of some ranks where `num_drawn` is given."""
        if step == 2 and self.case.frozen is not None:
            getattr(self.model, self.case.frozen).requires_grad_(True)
        drawn = [self.case.grads(step, rank) for rank in range(num_drawn)] or [self.case.grads(step, dist.get_rank())]
        self.optimizer.zero_grad()
        loss = self.model({name: sum(each[name] for each in drawn) / len(drawn) for name in drawn[0]})
        self.optimizer.scale_loss(loss).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        self.optimizer.finish_param_gather()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


@tried_once()
def train_all(rank: int, size: int) -> dict[tuple[str, int], dict[str, Tensor]]:
    groups = {each: dist.new_group(range(each)) for each in SIZES}
    found = {}
    for name, each in ((name, each) for name, each in TRAINED if rank < each):
        run = Run(CASES[name], groups[each])
        assert isinstance(run.optimizer.sharded.inner, WholeParams), f"{name} is not updated whole"
        for step in range(STEPS):
            run.step(step)
        found[name, each] = run.params()
        run.optimizer.release()
    return found


@pytest.mark.parametrize(("name", "size"), TRAINED)
def test_whole_params_when_distributed_then_equal_to_the_class_itself_to_the_bit(
    name: str, size: int, trained: list[dict[tuple[str, int], dict[str, Tensor]]]
) -> None:
    wanted = expected(CASES[name], size)
    start = Held(CASES[name].dtype).state_dict()
    assert all(not torch.equal(wanted[each], start[each]) for each in wanted), "it has changed every param"
    for rank in range(size):
        found = trained[rank][name, size]
        assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(wanted, True)


# --- checkpoints: what one number of ranks has saved, another one goes on with


def _folder() -> Path:
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except DistOptError as error:
        return str(error)
    return "nothing"


#: Rows and columns; lists of matrices, and a count in the param group.
RESUMED = ("Adafactor", "SOAP")


@tried_once()
def resume_all(rank: int, size: int) -> dict[str, Any]:
    """Trained by two ranks for three steps, then by one, two and three ranks for two more."""
    groups = {each: dist.new_group(range(each)) for each in SIZES}
    folder, found = _folder(), {}
    for name in RESUMED:
        case = Case(name, {"clip_grad": 1.0}, BF16)
        if rank < 2:
            run = Run(case, groups[2])
            for step in range(3):
                run.step(step)
            run.optimizer.save(folder / name)
            found[name, "on"] = _continued(run)
        dist.barrier()
        for each in (each for each in SIZES if rank < each):
            run = Run(case, groups[each])
            run.optimizer.load(folder / name)
            found[name, str(each)] = _continued(run)
    verified = {name: run_command(["verify", str(folder / name)]) for name in RESUMED} if rank == 0 else {}
    converted = {
        to: _raised(lambda t=to: convert(folder / "SOAP", folder / f"{t}{rank}", t)) for to in ("torch", "distopt")
    }  # type: ignore[misc]
    others = _others(folder, groups[3])
    return {"found": found, "verified": verified, "converted": converted, "others": others}


def _continued(run: Run) -> dict[str, Tensor]:
    for step in (3, 4):
        run.step(step, num_drawn=2)
    found = run.params()
    run.optimizer.release()
    return found


def _others(folder: Path, group: Any) -> dict[str, bool]:
    """Whether another optimizer takes the params and begins anew with a rate of its own."""
    found = {}
    kinds = {name: CLASSES[name] for name in ("Adafactor", "SOAP")}
    for loads, build in {"AdamW": lambda params: AdamW(params, lr=0.5), **kinds}.items():
        model = Held(BF16)
        optimizer = distribute(model, build(model.parameters()), process_group=group, accelerator="torch")
        optimizer.param_groups[0]["lr"] = 0.25
        if loads == "AdamW":
            optimizer.save(folder / "AdamW")
        for saved in ("SOAP", "AdamW"):
            if saved != loads and (folder / saved).exists():
                optimizer.load(folder / saved)
                inner = optimizer.sharded.inner
                has_state = any(inner.state.values()) or any(
                    each.has_state for each in getattr(inner, "owned", {}).values()
                )
                found[f"{saved} to {loads}"] = not has_state and optimizer.param_groups[0]["lr"] == 0.25
        optimizer.release()
    return found


def run_all(rank: int, size: int) -> tuple[dict[tuple[str, int], dict[str, Tensor]], dict[str, Any]]:
    return train_all(rank, size), resume_all(rank, size)


Ran = list[tuple[dict[tuple[str, int], dict[str, Tensor]], dict[str, Any]]]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return run_ranks(run_all, max(SIZES))


@pytest.fixture(scope="module")
def trained(ran: Ran) -> list[dict[tuple[str, int], dict[str, Tensor]]]:
    return [trained for trained, _ in ran]


@pytest.fixture(scope="module")
def resumed(ran: Ran) -> list[dict[str, Any]]:
    return [resumed for _, resumed in ran]


@pytest.mark.parametrize("name", RESUMED)
def test_whole_params_when_resumed_at_another_size_then_it_goes_on_to_the_bit(
    name: str, resumed: list[dict[str, Any]]
) -> None:
    wanted = resumed[0]["found"][name, "on"]
    for rank, each in enumerate(resumed):
        ways = {way: params for (of, way), params in each["found"].items() if of == name}
        assert len(ways) == {0: 4, 1: 3, 2: 1}[rank]
        for way, params in ways.items():
            assert all(torch.equal(params[key], wanted[key]) for key in wanted), way


def test_whole_params_when_saved_then_verify_finds_no_fault(resumed: list[dict[str, Any]]) -> None:
    assert resumed[0]["verified"] == dict.fromkeys(RESUMED, 0)


def test_whole_params_when_converted_then_only_to_a_format_that_has_a_place_for_them(
    resumed: list[dict[str, Any]],
) -> None:
    converted = resumed[0]["converted"]
    assert "Convert to distopt" in converted["torch"]
    assert converted["distopt"] == "nothing"


def test_whole_params_when_the_state_is_of_another_class_then_it_begins_anew(resumed: list[dict[str, Any]]) -> None:
    found = resumed[0]["others"]
    assert found == dict.fromkeys(found, True)
    assert set(found) == {"SOAP to AdamW", "SOAP to Adafactor", "AdamW to Adafactor", "AdamW to SOAP"}


# --- what is refused, and what it says


class Clipping(Optimizer):
    """Clips the norm of all gradients together."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(params, 1.0)
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad)


def test_whole_params_when_a_class_looks_beyond_a_param_then_refused(one_rank: None) -> None:
    model = Held(torch.float32)
    with pytest.raises(ConfigError, match="Clipping cannot be distributed"):
        distribute(model, Clipping(model.parameters()), accelerator="torch")


def test_updates_when_it_is_said_then_the_trial_has_to_agree(one_rank: None) -> None:
    model = Held(torch.float32)
    refused: dict[str, Callable[[], object]] = {
        "not elements": lambda: CLASSES["Lamb"](model.parameters()),
        "AdamW updates elements": lambda: AdamW(model.parameters()),
    }
    for said, build in refused.items():
        updates = "params" if "AdamW" in said else "elements"
        with pytest.raises(ConfigError, match=said):
            distribute(model, build(), accelerator="torch", updates=updates)
    with pytest.raises(ConfigError, match="Leave updates out"):
        distribute(model, accelerator="torch", updates="params")
    lion = distribute(model, pytorch_optimizer.Lion(model.parameters()), accelerator="torch", updates="params")
    assert isinstance(lion.sharded.inner, WholeParams)
    lion.release()


def test_whole_params_when_an_object_was_given_then_it_keeps_no_state_of_its_own(one_rank: None) -> None:
    model = Held(torch.float32)
    given = CLASSES["SOAP"](model.parameters())
    optimizer = distribute(model, given, accelerator="torch")
    with pytest.raises(AccessError, match="after it was given to distribute"):
        given.state[model.tall]
    optimizer.release()


@pytest.mark.parametrize("options", [{"log_digests": 1}, {"exp_avg_dtype": "bfloat16"}], ids=str)
def test_whole_params_when_an_option_is_not_served_then_refused(options: dict[str, Any], one_rank: None) -> None:
    model = Held(BF16)
    with pytest.raises(ConfigError, match="SOAP"):
        distribute(model, CLASSES["SOAP"](model.parameters()), DistOptConfig(accelerator="torch", **options))


def test_whole_params_when_a_param_is_cut_over_ranks_then_refused(one_rank: None) -> None:
    model = Held(BF16)

    def placement(name: str, param: nn.Parameter) -> Placement:
        return Placement(name, tuple(param.shape), dim=0, size=2)

    with pytest.raises(LayoutError, match="where SOAP updates it"):
        distribute(model, CLASSES["SOAP"](model.parameters()), accelerator="torch", placement=placement)


def test_whole_params_when_torchs_format_is_asked_for_then_refused(one_rank: None) -> None:
    model = Held(BF16)
    optimizer = distribute(model, CLASSES["SOAP"](model.parameters()), accelerator="torch")
    calls: dict[str, Callable[[], object]] = {
        "state": lambda: optimizer.state,
        "state_dict": optimizer.state_dict,
        "full_state_dict": optimizer.full_state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=r"save\(folder\)"):
            call()
        assert name, "each is refused by its own name"
    with pytest.raises(ConfigError, match="all params before distribute"):
        optimizer.add_param_group({"params": []})
    optimizer.release()


def test_whole_params_when_it_has_trained_then_memory_counts_what_owners_keep(one_rank: None) -> None:
    run = Run(Case("SOAP"), None)
    for step in range(2):
        run.step(step)
    numel = sum(param.numel() for param in run.model.parameters())
    squares = sum(8 * each * each for each in (13, 8, 12, 40, 33, 6, 16, 16))  # GG and Q of matrices at least
    assert run.optimizer.memory.moment_nbytes >= 8 * numel + squares
    run.optimizer.release()


def test_class_by_name_when_it_updates_whole_params_then_it_is_found_by_trying(one_rank: None) -> None:
    model = Held(torch.float32)
    optimizer = distribute(
        model, optimizer=None, config=DistOptConfig(optimizer="pytorch_optimizer:SOAP", accelerator="torch")
    )
    assert isinstance(optimizer.sharded.inner, WholeParams)
    optimizer.release()
