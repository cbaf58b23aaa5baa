"""`distribute` with Muon and with optimizers of whole params: equal to them undistributed to the bit, or refused."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import DistOptConfig, MatrixSpec, Muon, TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import kind_of, name_of
from megatron_distopt.cli.main import main as run_command
from megatron_distopt.errors import AccessError, ConfigError, DistOptError, LayoutError, RanksDisagreeError
from megatron_distopt.formats.conversion import TARGETS, convert
from megatron_distopt.hosts.report import describe
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.whole_params import WholeParams
from megatron_distopt.optimizer.step import clip_divisor
from tests.support.spawn import run_ranks
from tests.support.whole_classes import tried_once

SIZES = (1, 2, 3)
HAS_MUON = hasattr(torch.optim, "Muon")
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
MATRICES = {"wide": (12, 40), "tall": (33, 6), "square": (16, 16)}
#: Of Muon, and of classes of whole params.
WITH_MUON = {"embedding": (13, 8), "wide": (12, 40), "norm": (9,), "tall": (33, 6), "scale": (1,), "square": (16, 16)}
WHOLE = {
    "embedding": (13, 8),
    "wide": (12, 40),
    "norm": (9,),
    "tall": (33, 6),
    "conv": (4, 3, 2, 2),
    "square": (16, 16),
}
BF16, FP16 = torch.bfloat16, torch.float16
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}
CLIPPED = {"clip_grad": 0.5, **OVERLAP}
#: torch's for-each kernels are the same to the bit wherever a tensor ends, and Muon's parts are, too.
ADAMW: dict[str, Any] = {"lr": 0.01, "foreach": True}

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
    """One way to train."""

    optimizer: str = "Muon"  # "Muon" with AdamW for what is no matrix, or one of `CLASSES`
    options: Mapping[str, Any] = field(default_factory=dict)  # of `distribute`
    dtype: torch.dtype = torch.float32  # of the params
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of some of them
    only_matrices: bool = False  # there is nothing else
    absent: Mapping[int, Collection[str]] = field(default_factory=dict)  # by step, params without a gradient
    bad: int | None = None  # the step in which a gradient is not finite
    frozen: str | None = None  # a param that begins to train in the third step
    scheduled: bool = False  # the rate of the first optimizer is halved after each step
    fused: bool = False  # params are several matrices, which our own class of Muon knows

    @property
    def steps(self) -> int:
        return 4 if self.optimizer == "Muon" else 5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Where params are several matrices one of them is a stack of three."""
        shapes: dict[str, tuple[int, ...]] = dict(WITH_MUON if self.optimizer == "Muon" else WHOLE)
        if self.fused:
            shapes["tall"] = (3, 11, 6)
        return {name: shape for name, shape in shapes.items() if name in MATRICES or not self.only_matrices}

    def grads(self, step: int, rank: int) -> dict[str, Tensor]:
        """Multiples of 12 / 256: the average over 2 or 3 ranks is exact."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        absent = {*self.absent.get(step, ()), *([self.frozen] if step < 2 else [])}
        drawn = {
            name: torch.randint(-3, 4, shape, generator=generator) * (12 / 256) for name, shape in self.shapes.items()
        }
        if step == self.bad and rank == 0:
            drawn["tall"].view(-1)[0] = torch.inf
        return {name: grad for name, grad in drawn.items() if name not in absent}

    def optimizers_of(self, params: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        """Muon with two groups, and AdamW where there is something for it; or one of a class."""
        if self.optimizer != "Muon":
            return [CLASSES[self.optimizer](params.values())]
        groups = [
            {"params": [params["tall"]], "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
            {"params": [params[name] for name in ("wide", "square")], "weight_decay": 0.0},
        ]
        others = [param for name, param in params.items() if name not in MATRICES]
        muon = _fused_muon(params, groups) if self.fused else torch.optim.Muon(groups, lr=0.25)
        return [muon, AdamW(others, **ADAMW)] if others else [muon]


def _fused_muon(params: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]) -> Optimizer:
    """Queries, keys and values of two groups of heads in one param, gate and up in another; compared with torch's Muon
    in tests/optimizer/test_muon.py."""
    qkv, gates = MatrixSpec(16, 16, sizes=(4, 2, 2), repeats=2), MatrixSpec(12, 40, sizes=(6, 6))
    return Muon(groups, {params["square"]: qkv, params["wide"]: gates}, lr=0.25)


CASES = {
    "only matrices": Case(only_matrices=True),
    "fp32": Case(),
    "fp32, clipped": Case(options={"clip_grad": 1.0}),
    "bf16, overlapped": Case(options=OVERLAP, dtype=BF16),
    "bf16, overlapped, clipped": Case(options=CLIPPED, dtype=BF16),
    "some in fp32": Case(
        options={"bucket_size": 700}, dtype=BF16, dtypes={"tall": torch.float32, "norm": torch.float32}
    ),
    "grads in bf16": Case(options={"grads_in_fp32": False}, dtype=BF16),
    "some without a gradient": Case(options=OVERLAP, absent={1: ("wide", "norm"), 2: ("square", "tall")}),
    "no matrix has a gradient": Case(absent={1: tuple(MATRICES)}),
    "overflow": Case(options={"loss_scale": "dynamic", "initial_loss_scale": 2.0**8}, dtype=FP16, bad=1),
    "inf skipped": Case(options={"nonfinite": "skip"}, bad=2),
    "a matrix begins to train": Case(options=OVERLAP, dtype=BF16, frozen="tall"),
    "another param begins to train": Case(frozen="embedding"),
    "scheduled": Case(scheduled=True),
    "fused": Case(options={**OVERLAP, "clip_grad": 1.0}, dtype=BF16, fused=True),
    **{name: Case(name) for name in ("SOAP", "Shampoo")},
    **{f"{name}, bf16, overlapped, clipped": Case(name, CLIPPED, BF16) for name in CLASSES},
    "Lamb, some without a gradient": Case("Lamb", OVERLAP, BF16, absent={1: ("wide", "norm"), 2: ("square", "tall")}),
    "SOAP, none with a gradient": Case("SOAP", absent={2: tuple(WHOLE)}),
    "Adafactor, grads in bf16": Case("Adafactor", {"grads_in_fp32": False}, BF16),
    "SOAP, overflow": Case("SOAP", {"loss_scale": "dynamic", "initial_loss_scale": 2.0**8}, FP16, bad=1),
    "Lamb, inf skipped": Case("Lamb", {"nonfinite": "skip"}, bad=2),
    "Adafactor, one begins to train": Case("Adafactor", OVERLAP, BF16, frozen="tall"),
    "Lamb, scheduled": Case("Lamb", scheduled=True),
}
CASES = {name: case for name, case in CASES.items() if HAS_MUON or case.optimizer != "Muon"}
#: On three ranks all of them. On two those with something that ranks have in parts; alone, one of each kind of buckets
#: and of state.
SOME = {
    1: ("fp32, clipped", "bf16, overlapped", "overflow", "SOAP"),
    2: (
        "only matrices",
        "bf16, overlapped, clipped",
        "some in fp32",
        "some without a gradient",
        "overflow",
        "inf skipped",
        "fused",
        "SOAP, bf16, overlapped, clipped",
        "Lamb, some without a gradient",
        "SOAP, overflow",
        "Lamb, inf skipped",
    ),
}
TRAINED = [(name, size) for size in SIZES for name in SOME.get(size, CASES) if name in CASES]


class Held(nn.Module):
    """Params and nothing else."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in case.shapes.items():
            value = torch.randn(shape, generator=generator).to(case.dtypes.get(name, case.dtype))
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss whose gradient is exactly `grads`."""
        terms = [(getattr(self, name).float() * grad).sum() for name, grad in grads.items()]
        return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True) * 1.0


def expected(case: Case, size: int) -> dict[str, Tensor]:
    """What the optimizers themselves leave of fp32 copies of all params, in the dtype of the model."""
    start = dict(Held(case).named_parameters())
    mains = {name: nn.Parameter(param.detach().float()) for name, param in start.items()}
    optimizers = case.optimizers_of(mains)
    scheduler = StepLR(optimizers[0], step_size=1, gamma=0.5)
    for step in (step for step in range(case.steps) if step != case.bad):
        drawn = [case.grads(step, rank) for rank in range(size)]
        sums = {name: torch.stack([grads[name] for grads in drawn]).sum(0) for name in drawn[0]}
        squares = [(each / size).double().square().sum() for each in sums.values()]
        norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
        divisor = size * clip_divisor(norm, case.options.get("clip_grad", 0.0))
        for name, main in mains.items():
            main.grad = sums[name] / divisor if name in sums else None
        for optimizer in optimizers:
            optimizer.step()
        if case.scheduled:
            scheduler.step()
    return {name: main.detach().to(start[name].dtype) for name, main in mains.items()}


class Run:
    """A training on some ranks."""

    def __init__(self, case: Case, group: Any) -> None:
        self.case, self.model = case, Held(case)
        params = dict(self.model.named_parameters())
        if case.frozen is not None:
            params[case.frozen].requires_grad_(False)
        given = case.optimizers_of(params)
        self.optimizer: TorchDistributedOptimizer = distribute(
            self.model, given if len(given) > 1 else given[0], process_group=group, accelerator="torch", **case.options
        )
        self.scheduler = StepLR(given[0], step_size=1, gamma=0.5) if case.scheduled else None

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

    def continued(self) -> dict[str, Tensor]:
        """After two more steps with the mean over two ranks, whatever the number of ranks is."""
        for step in range(self.case.steps - 2, self.case.steps):
            self.step(step, num_drawn=2)
        found = self.params()
        self.optimizer.release()
        return found


Found = dict[tuple[str, int], dict[str, Tensor]]


@tried_once()
def run_all(rank: int, size: int) -> dict[str, Any]:
    """In a rank: everything that takes more than one of them, in one spawn."""
    groups = {each: dist.new_group(range(each)) for each in SIZES}
    trained: Found = {}
    for name, each in ((name, each) for name, each in TRAINED if rank < each):
        run = Run(CASES[name], groups[each])
        is_whole = isinstance(run.optimizer.sharded.inner, WholeParams)
        assert is_whole == (run.case.optimizer != "Muon"), f"{name} is updated in another way"
        for step in range(run.case.steps):
            run.step(step)
        trained[name, each] = run.params()
        run.optimizer.release()
    found = {"trained": trained, "whole": resume_whole(rank, groups)}
    return found | ({"muon": resume_muon(rank, groups)} if HAS_MUON else {})


@pytest.fixture(scope="module")
def ran() -> list[dict[str, Any]]:
    return run_ranks(run_all, max(SIZES), seconds=300)


@pytest.mark.parametrize(("name", "size"), TRAINED)
def test_training_when_distributed_then_equal_to_the_optimizers_themselves_to_the_bit(
    name: str, size: int, ran: list[dict[str, Any]]
) -> None:
    wanted, start = expected(CASES[name], size), Held(CASES[name]).state_dict()
    assert all(not torch.equal(wanted[each], start[each]) for each in wanted), "it has changed every param"
    for rank in range(size):
        found = ran[rank]["trained"][name, size]
        assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(wanted, True)


# --- checkpoints: what one number of ranks has saved, another one goes on with


def _folder() -> Path:
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


def _raised(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except DistOptError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


#: Rows and columns; lists of matrices, and a count in the param group.
RESUMED = ("Adafactor", "SOAP")


def resume_whole(rank: int, groups: Mapping[int, Any]) -> dict[str, Any]:
    """Trained by two ranks for three steps, then by one, two and three ranks for two more."""
    folder, found = _folder(), {}
    for name in RESUMED:
        case = Case(name, {"clip_grad": 1.0}, BF16)
        if rank < 2:
            run = Run(case, groups[2])
            for step in range(3):
                run.step(step)
            run.optimizer.save(folder / name)
            found[name, "on"] = run.continued()
        dist.barrier()
        for each in (each for each in SIZES if rank < each):
            run = Run(case, groups[each])
            run.optimizer.load(folder / name)
            found[name, str(each)] = run.continued()
    verified = {name: run_command(["verify", str(folder / name)]) for name in RESUMED} if rank == 0 else {}
    converted = {
        to: _raised(partial(convert, folder / "SOAP", folder / f"{to}{rank}", to))[1] for to in ("torch", "distopt")
    }
    others = _others(folder, groups[3])
    return {"found": found, "verified": verified, "converted": converted, "others": others}


def _others(folder: Path, group: Any) -> dict[str, bool]:
    """Whether another optimizer takes the params and begins anew with a rate of its own."""
    found = {}
    kinds = {name: CLASSES[name] for name in ("Adafactor", "SOAP")}
    for loads, build in {"AdamW": lambda params: AdamW(params, lr=0.5), **kinds}.items():
        model = Held(Case("SOAP", dtype=BF16))
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


@pytest.mark.parametrize("name", RESUMED)
def test_whole_params_when_resumed_at_another_size_then_it_goes_on_to_the_bit(
    name: str, ran: list[dict[str, Any]]
) -> None:
    wanted = ran[0]["whole"]["found"][name, "on"]
    for rank, each in enumerate(of_rank["whole"] for of_rank in ran):
        ways = {way: params for (of, way), params in each["found"].items() if of == name}
        assert len(ways) == {0: 4, 1: 3, 2: 1}[rank]
        for way, params in ways.items():
            assert all(torch.equal(params[key], wanted[key]) for key in wanted), way


def test_whole_params_when_saved_then_verify_finds_no_fault(ran: list[dict[str, Any]]) -> None:
    assert ran[0]["whole"]["verified"] == dict.fromkeys(RESUMED, 0)


def test_whole_params_when_converted_then_only_to_a_format_that_has_a_place_for_them(
    ran: list[dict[str, Any]],
) -> None:
    converted = ran[0]["whole"]["converted"]
    assert "Convert to distopt" in converted["torch"]
    assert converted["distopt"] == ""


def test_whole_params_when_the_state_is_of_another_class_then_it_begins_anew(ran: list[dict[str, Any]]) -> None:
    found = ran[0]["whole"]["others"]
    assert found == dict.fromkeys(found, True)
    assert set(found) == {"SOAP to AdamW", "SOAP to Adafactor", "AdamW to Adafactor", "AdamW to SOAP"}


MUONS = Case(options={"clip_grad": 1.0}, dtype=BF16, dtypes={"tall": torch.float32})


def resume_muon(rank: int, groups: Mapping[int, Any]) -> dict[str, Any]:
    """Trained by two ranks for two steps, then by one, two and three ranks for two more, in each way to carry state."""
    folder, full, found = _folder(), [None], {}
    if rank < 2:
        run = Run(MUONS, groups[2])
        run.step(0)
        run.step(1)
        run.optimizer.save(folder / "two")
        full[0] = run.optimizer.full_state_dict()
        whole = {name: param.detach().clone() for name, param in run.params().items()}
    dist.broadcast_object_list(full)
    weights = [whole if rank == 0 else None]
    dist.broadcast_object_list(weights)
    said = {}
    for each in (each for each in SIZES if rank < each):
        run = Run(MUONS, groups[each])
        sharded = run.optimizer.sharded
        block = describe("", (), [sharded], sharded.device).splitlines()
        said[each] = [line.strip() for line in block if line.startswith("  owners ")]
        run.optimizer.load(folder / "two")
        found["folder", each] = run.continued()
        run = Run(MUONS, groups[each])
        run.model.load_state_dict(weights[0])
        run.optimizer.load_state_dict(full[0])
        found["state dict", each] = run.continued()
    manifest = read_manifest(folder / "two")
    kinds: dict[str, list[str]] = {}
    for key in sorted(manifest.tensors):
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    refused = _foreign(folder)
    converted = {to: _raised(partial(convert, folder / "Muon", folder / f"{to}_{rank}", to))[0] for to in TARGETS}
    return {"found": found, "kinds": kinds, "refused": refused, "converted": converted, "said": said}


def _foreign(folder: Path) -> dict[str, tuple[str, bool]]:
    """What Muon does with the state of other optimizers, and others with its state; and whether params changed.

    Of what it takes: whether the params are those that were saved, and whether moments begin anew.
    """
    found = {}
    kinds: dict[str, Callable[[Any], Optimizer]] = {
        "AdamW": lambda params: AdamW(params, lr=0.01),
        "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "Muon": lambda params: torch.optim.Muon(params, lr=0.01),
    }
    case = CASES["only matrices"]
    wanted = {}
    for name, build in kinds.items():
        stepped = _stepped(case, build)
        stepped.save(folder / name)
        wanted[name] = _params(stepped)
    new, _ = _built(case, kinds["AdamW"])
    new.save(folder / "a new AdamW")
    wanted["a new AdamW"] = _params(new)
    for saved, loads in (pair for pair in product((*kinds, "a new AdamW"), kinds) if "Muon" in pair):
        optimizer = _stepped(case, kinds[loads])
        optimizer.param_groups[0]["lr"] = 0.125
        raised = _raised(partial(optimizer.load, folder / saved))[0]
        is_anew = not any(optimizer.sharded.inner.state.values()) and optimizer.param_groups[0]["lr"] == 0.125
        is_taken = all(map(torch.equal, wanted[saved], _params(optimizer)))
        found[f"{saved} to {loads}"] = raised, is_taken and is_anew == (saved != loads)
    states = {name: _stepped(case, build).full_state_dict() for name, build in kinds.items()}
    for saved, loads in (("SGD", "Muon"), ("Muon", "SGD"), ("AdamW", "Muon")):
        said = [states[saved]]
        dist.broadcast_object_list(said)
        optimizer = _stepped(case, kinds[loads])
        found[f"{saved} to {loads}, state dict"] = (
            _raised(partial(optimizer.load_state_dict, said[0]))[0],
            True,
        )
    return found


def _params(optimizer: TorchDistributedOptimizer) -> list[Tensor]:
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


def _stepped(case: Case, build: Callable[[Any], Optimizer]) -> TorchDistributedOptimizer:
    optimizer, model = _built(case, build)
    model(case.grads(0, dist.get_rank())).backward()
    optimizer.step()
    return optimizer


def _built(case: Case, build: Callable[[Any], Optimizer]) -> tuple[TorchDistributedOptimizer, Held]:
    model = Held(case)
    return distribute(model, build(model.parameters()), accelerator="torch"), model


@needs_muon
def test_start_when_shards_cut_matrices_then_it_says_how_many_and_what_that_costs(
    ran: list[dict[str, Any]],
) -> None:
    said = ran[0]["muon"]["said"]
    assert said[1] == []
    # tall is fp32 in a buffer of its own, which the border between two shards cuts; wide and square are in the other.
    assert [line.split(";")[0] for line in said[2]] == [
        "owners     1 of 2 matrices are cut by shards and go to one rank each",
        "owners     1 of 1 matrices are cut by shards and go to one rank each",
    ]
    assert all(re.search(r"; the busiest rank has \d\.\d\d times", line) for line in said[2])


@needs_muon
@pytest.mark.parametrize(("way", "size"), [(way, size) for way in ("folder", "state dict") for size in SIZES])
def test_muon_when_resumed_then_equal_to_torchs_to_the_bit(way: str, size: int, ran: list[dict[str, Any]]) -> None:
    wanted = expected(MUONS, 2)
    for rank in range(size):
        found = ran[rank]["muon"]["found"][way, size]
        assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(wanted, True)


@needs_muon
def test_checkpoint_when_of_muon_and_adamw_then_each_param_has_the_moments_of_its_own(
    ran: list[dict[str, Any]],
) -> None:
    wanted = {name: ["main", "momentum_buffer"] for name in MATRICES}
    wanted |= {name: ["exp_avg", "exp_avg_sq", "main"] for name in WITH_MUON.keys() - MATRICES.keys()}
    assert ran[0]["muon"]["kinds"] == wanted


@needs_muon
def test_load_when_the_checkpoint_is_of_another_optimizer_then_params_are_taken_and_state_begins_anew(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in (of_rank["muon"] for of_rank in ran):
        for name, (raised, is_right) in of_rank["refused"].items():
            wanted = "nothing" if "state dict" not in name else raised
            assert (raised, is_right) == (wanted, True), name
            assert "state dict" not in name or raised in ("CheckpointError", "RanksDisagreeError"), name


@needs_muon
def test_convert_when_the_momentum_is_muons_then_no_file_of_a_fork_is_made_of_it(ran: list[dict[str, Any]]) -> None:
    wanted = {to: "nothing" if to in ("distopt", "torch") else "CheckpointError" for to in TARGETS}
    assert [of_rank["muon"]["converted"] for of_rank in ran] == [wanted] * len(ran)


# --- what is refused of whole params


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
    model = Held(Case("SOAP"))
    with pytest.raises(ConfigError, match="Clipping cannot be distributed"):
        distribute(model, Clipping(model.parameters()), accelerator="torch")


def test_updates_when_it_is_said_then_the_trial_has_to_agree(one_rank: None) -> None:
    model = Held(Case("SOAP"))
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
    model = Held(Case("SOAP"))
    given = CLASSES["SOAP"](model.parameters())
    optimizer = distribute(model, given, accelerator="torch")
    with pytest.raises(AccessError, match="after it was given to distribute"):
        given.state[model.tall]
    optimizer.release()


@pytest.mark.parametrize("options", [{"log_digests": 1}, {"exp_avg_dtype": "bfloat16"}], ids=str)
def test_whole_params_when_an_option_is_not_served_then_refused(options: dict[str, Any], one_rank: None) -> None:
    model = Held(Case("SOAP", dtype=BF16))
    with pytest.raises(ConfigError, match="SOAP"):
        distribute(model, CLASSES["SOAP"](model.parameters()), DistOptConfig(accelerator="torch", **options))


def test_whole_params_when_a_param_is_cut_over_ranks_then_refused(one_rank: None) -> None:
    model = Held(Case("SOAP", dtype=BF16))

    def placement(name: str, param: nn.Parameter) -> Placement:
        return Placement(name, tuple(param.shape), dim=0, size=2)

    with pytest.raises(LayoutError, match="where SOAP updates it"):
        distribute(model, CLASSES["SOAP"](model.parameters()), accelerator="torch", placement=placement)


def test_whole_params_when_torchs_format_is_asked_for_then_refused(one_rank: None) -> None:
    model = Held(Case("SOAP", dtype=BF16))
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
    model = Held(Case("SOAP"))
    optimizer = distribute(
        model, optimizer=None, config=DistOptConfig(optimizer="pytorch_optimizer:SOAP", accelerator="torch")
    )
    assert isinstance(optimizer.sharded.inner, WholeParams)
    optimizer.release()


# --- and of Muon


def _pair(model: nn.Module, **options: Any) -> TorchDistributedOptimizer:
    given = CASES["fp32"].optimizers_of(dict(model.named_parameters()))
    return distribute(model, given, accelerator="torch", **options)


def _plain() -> Held:
    return Held(CASES["fp32"])


def _given(*builds: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Each optimizer gets some of the matrices."""
    model = _plain()
    params = [getattr(model, name) for name in MATRICES]
    distribute(model, [build([param]) for build, param in zip(builds, params, strict=False)], accelerator="torch")


def _hooked() -> None:
    model = _plain()
    given = CASES["fp32"].optimizers_of(dict(model.named_parameters()))
    given[1].register_step_post_hook(lambda *_: None)
    distribute(model, given, accelerator="torch")


def _stepped_before() -> None:
    model = _plain()
    given = CASES["fp32"].optimizers_of(dict(model.named_parameters()))
    model(CASES["fp32"].grads(0, 0)).backward()
    given[0].step()
    distribute(model, given, accelerator="torch")


def _in_both() -> None:
    model = _plain()
    given = [torch.optim.Muon([model.wide]), AdamW(model.parameters())]
    distribute(model, given, accelerator="torch")


def _not_a_matrix() -> None:
    model = _plain()
    muon = torch.optim.Muon([model.wide])
    muon.add_param_group({"params": [model.norm]})
    distribute(model, muon, accelerator="torch")


def _cut() -> None:
    def placement(name: str, param: nn.Parameter) -> Placement:
        return Placement(name, tuple(param.shape), dim=0, rank=0, size=2)

    _pair(_plain(), placement=placement)


def _added() -> None:
    model = _plain()
    model.late = nn.Parameter(torch.ones(3, 3))
    _pair(model).add_param_group({"params": [model.late]})


def _call(name: str, number: int) -> None:
    model = _plain()
    given = CASES["fp32"].optimizers_of(dict(model.named_parameters()))
    distribute(model, given, accelerator="torch")
    getattr(given[number], name)()


def _other_rates() -> None:
    model = _plain()
    muon = torch.optim.Muon([model.wide], lr=0.1 + dist.get_rank())
    distribute(model, [muon, AdamW([model.norm])], accelerator="torch")


def _muon(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon(params)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "no optimizers": (lambda: distribute(_plain(), [], accelerator="torch"), ConfigError),
    "an optimizer and something else": (lambda: distribute(_plain(), [AdamW, 3], accelerator="torch"), ConfigError),  # type: ignore[list-item]
    "two without Muon": (lambda: _given(AdamW, AdamW), ConfigError),
    "two of Muon": (lambda: _given(_muon, _muon), ConfigError),
    "Muon and SGD": (lambda: _given(_muon, torch.optim.SGD), ConfigError),
    "Muon and two others": (lambda: _given(_muon, AdamW, AdamW), ConfigError),
    "hooks": (_hooked, ConfigError),
    "Muon was stepped": (_stepped_before, ConfigError),
    "a param in both": (_in_both, LayoutError),
    "no matrix": (_not_a_matrix, LayoutError),
    "a matrix that is cut": (_cut, LayoutError),
    "other rates on another rank": (_other_rates, RanksDisagreeError),
    "deterministic": (lambda: _pair(_plain(), deterministic=True), ConfigError),
    "digests": (lambda: _pair(_plain(), log_digests=1), ConfigError),
    "state on the host": (lambda: _pair(_plain(), offload_fraction=0.5), ConfigError),
    "state in low precision": (lambda: _pair(_plain(), exp_avg_dtype="int8"), ConfigError),
    "an option of a Megatron": (lambda: _pair(_plain(), muon_ns_steps=3), ConfigError),
    "the option of a Megatron": (
        lambda: distribute(_plain(), optimizer=None, config=DistOptConfig(optimizer="muon")),
        ConfigError,
    ),
    "a group is added": (_added, ConfigError),
    **{
        f"{name} of {kind}": (lambda name=name, number=number: _call(name, number), ConfigError)
        for name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "register_step_pre_hook")
        for number, kind in enumerate(("Muon", "AdamW"))
    },
}


def refuse_all(rank: int, size: int) -> dict[str, tuple[type[BaseException] | None, str]]:
    found: dict[str, tuple[type[BaseException] | None, str]] = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the tests say which
            found[name] = type(error), str(error)
        else:
            found[name] = None, ""
    return found


@pytest.fixture(scope="module")
def refused() -> list[dict[str, tuple[type[BaseException] | None, str]]]:
    return run_ranks(refuse_all, 2)


@needs_muon
@pytest.mark.parametrize("name", REFUSED)
def test_muon_when_something_is_not_served_then_an_error_on_all_ranks(
    name: str, refused: list[dict[str, tuple[type[BaseException] | None, str]]]
) -> None:
    assert [of_rank[name][0] for of_rank in refused] == [REFUSED[name][1]] * 2, refused[0][name]


@needs_muon
def test_message_when_optimizers_cannot_be_joined_then_it_says_what_to_write(
    refused: list[dict[str, tuple[type[BaseException] | None, str]]],
) -> None:
    assert "[torch.optim.Muon(" in refused[0]["two without Muon"][1]
    assert "distribute(...) returned" in refused[0]["step of AdamW"][1]
