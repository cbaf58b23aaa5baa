"""`distribute` with optimizers that need params whole: equal to them undistributed to the bit, or
refused.

torch's Muon with AdamW for the params that are no matrices, and classes that update any param
whole.

Exercises hosts/torch/translate.py, checkpoint/load_plan.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import DistOptConfig, MatrixSpec, Muon, TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import kind_of, name_of
from megatron_distopt.cli.main import main as run_command
from megatron_distopt.errors import (
    AccessError,
    ConfigError,
    DistOptError,
    LayoutError,
    RanksDisagreeError,
)
from megatron_distopt.formats.conversion import TARGETS, convert
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.whole_params import WholeParams
from megatron_distopt.optimizer.step import clip_divisor
from tests.support.facts import Facts, facts_of
from tests.support.published import pytorch_optimizer
from tests.support.spawn import run_ranks
from tests.support.values import from_first

#: Steps of a training; when it is saved, and how many it has with those of the resumed one.
STEPS, SAVED_AT, RESUMED_TO = 4, 2, 4
HAS_MUON = hasattr(torch.optim, "Muon")
MATRICES = {"wide": (12, 40), "tall": (33, 6), "square": (16, 16)}
#: Of the optimizers that are given for Muon, and of one for everything.
OF_MUON = {
    "embedding": (13, 8),
    "wide": (12, 40),
    "norm": (9,),
    "tall": (33, 6),
    "scale": (1,),
    "square": (16, 16),
}
OF_CLASS = {name: (4, 3, 2, 2) if name == "scale" else shape for name, shape in OF_MUON.items()}
BF16, FP16 = torch.bfloat16, torch.float16
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}

Params = Any
#: Classes by name; each as published.
CLASSES: dict[str, Callable[[Params], Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.125),
    "Lamb": lambda params: pytorch_optimizer.Lamb(params, lr=0.125, weight_decay=0.1),
    "SOAP": lambda params: pytorch_optimizer.SOAP(params, lr=0.125, precondition_frequency=2),
    "Shampoo": lambda params: pytorch_optimizer.Shampoo(
        params, lr=0.125, preconditioning_compute_steps=2
    ),
    "AdamP": lambda params: pytorch_optimizer.AdamP(params, lr=0.125),
}


def said_of(name: str) -> dict[str, Any]:
    """What a user says of a class of the table above that is not torch's."""
    return {"updates": "params"} if name in CLASSES and name != "Adafactor" else {}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    # of `CLASSES`; "Muon"; "fused Muon" where params are several matrices, which our own class
    # knows
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of `distribute`
    dtype: torch.dtype = torch.float32  # of the params
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of some of them
    only_matrices: bool = False  # there is nothing else
    # by step, params without a gradient
    absent: Mapping[int, Collection[str]] = field(default_factory=dict)
    bad: int | None = None  # the step in which a gradient is not finite
    frozen: str | None = None  # a param that begins to train in the third step
    scheduled: bool = False  # the rate of the first optimizer is halved after each step

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = OF_CLASS if self.optimizer in CLASSES else OF_MUON
        chosen = {
            name: shape
            for name, shape in shapes.items()
            if name in MATRICES or not self.only_matrices
        }
        # a stack of three
        return {**chosen, "tall": (3, 11, 6)} if self.optimizer == "fused Muon" else chosen

    def grads(self, step: int, rank: int) -> dict[str, Tensor]:
        """Multiples of 12 / 256: the average over 2 or 3 ranks is exact."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        absent = {*self.absent.get(step, ()), *([self.frozen] if step < 2 else [])}
        drawn = {
            name: torch.randint(-3, 4, shape, generator=generator) * (12 / 256)
            for name, shape in self.shapes.items()
        }
        if step == self.bad and rank == 0:
            drawn["tall"].view(-1)[0] = torch.inf
        return {name: grad for name, grad in drawn.items() if name not in absent}

    def optimizers(self, params: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        """Muon with two groups, and AdamW where there is something for it; or one of a class."""
        if self.optimizer in CLASSES:
            return [CLASSES[self.optimizer](params.values())]
        groups: list[dict[str, Any]] = [
            {"params": [params["tall"]], "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
            {"params": [params[name] for name in ("wide", "square")], "weight_decay": 0.0},
        ]
        if self.optimizer == "fused Muon":
            # Queries, keys and values of two groups of heads in one param, gate and up in another;
            # compared with torch's Muon in tests/optimizer/test_muon.py.
            qkv, gates = (
                MatrixSpec(16, 16, sizes=(4, 2, 2), repeats=2),
                MatrixSpec(12, 40, sizes=(6, 6)),
            )
            muon: Optimizer = Muon(groups, {params["square"]: qkv, params["wide"]: gates}, lr=0.25)
        else:
            muon = torch.optim.Muon(groups, lr=0.25)
        others = [param for name, param in params.items() if name not in MATRICES]
        # torch's for-each kernels are the same to the bit wherever a tensor ends, and Muon's parts
        # are, too.
        return [muon, AdamW(others, lr=0.01, foreach=True)] if others else [muon]


CLIPPED = {"clip_grad": 0.5, **OVERLAP}
LOST = {1: ("wide", "norm"), 2: ("square", "tall")}
SCALED = {"loss_scale": "dynamic", "initial_loss_scale": 2.0**8}
MUON_CASES = {
    "fp32, clipped, scheduled": Case("Muon", {"clip_grad": 1.0}, scheduled=True),
    "bf16, overlapped, clipped": Case("Muon", CLIPPED, BF16),
    "some without a gradient": Case("Muon", OVERLAP, absent=LOST),
    "overflow": Case("Muon", SCALED, FP16, bad=1),
    "a matrix begins to train": Case("Muon", OVERLAP, BF16, frozen="tall"),
    "fused": Case("fused Muon", {**OVERLAP, "clip_grad": 1.0}, BF16),
}
CLASS_CASES = {
    **{
        f"{name}, bf16, overlapped, clipped": Case(name, CLIPPED, BF16)
        for name in CLASSES
        if name != "Lamb"
    },
    "Lamb, clipped, some without a gradient": Case("Lamb", CLIPPED, BF16, absent=LOST),
    "Lamb, inf skipped": Case("Lamb", {"nonfinite": "skip"}, bad=2),
    "Adafactor, a param begins to train": Case("Adafactor", OVERLAP, BF16, frozen="tall"),
}
CASES = {**(MUON_CASES if HAS_MUON else {}), **CLASS_CASES}
#: Further classes, which are long.
LONG = tuple(name for name in CASES if name.startswith(("Shampoo", "AdamP")))
#: Each on three ranks, and alone one of each kind.
ALONE = ("overflow", "Lamb, inf skipped")
TRAINED = [
    (name, size) for size in (1, 3) for name in (CASES if size == 3 else ALONE) if name in CASES
]
TRAINED = [each for each in TRAINED if each[0] not in LONG]


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


def expected(case: Case, size: int, steps: int = STEPS) -> dict[str, Tensor]:
    """What the optimizers themselves leave of fp32 copies of all params, in the dtype of the
    model."""
    start = dict(Held(case).named_parameters())
    mains = {name: nn.Parameter(param.detach().float()) for name, param in start.items()}
    optimizers = case.optimizers(mains)
    scheduler = StepLR(optimizers[0], step_size=1, gamma=0.5)
    for step in (step for step in range(steps) if step != case.bad):
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
    """A training on some ranks; released in the end."""

    def __init__(self, case: Case, group: Any = None) -> None:
        self.case, self.model = case, Held(case)
        params = dict(self.model.named_parameters())
        if case.frozen is not None:
            params[case.frozen].requires_grad_(False)
        given = case.optimizers(params)
        self.optimizer: TorchDistributedOptimizer = distribute(
            self.model,
            given if len(given) > 1 else given[0],
            process_group=group,
            accelerator="torch",
            **said_of(case.optimizer),
            **case.options,
        )
        self.scheduler = StepLR(given[0], step_size=1, gamma=0.5) if case.scheduled else None

    def step(self, step: int, num_drawn: int = 0) -> None:
        """One step; with the mean of the gradients of some ranks where `num_drawn` is given."""
        if step == 2 and self.case.frozen is not None:
            getattr(self.model, self.case.frozen).requires_grad_(True)
        drawn = [self.case.grads(step, rank) for rank in range(num_drawn)] or [
            self.case.grads(step, dist.get_rank())
        ]
        self.optimizer.zero_grad()
        loss = self.model(
            {name: sum(each[name] for each in drawn) / len(drawn) for name in drawn[0]}
        )
        self.optimizer.scale_loss(loss).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        self.optimizer.finish_param_gather()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def end(self) -> dict[str, Tensor]:
        found = self.params()
        self.optimizer.release()
        return found


Trained = dict[tuple[str, int], dict[str, Tensor]]


def train_all(
    rank: int, groups: Mapping[int, Any], trained: Collection[tuple[str, int]] = TRAINED
) -> Trained:
    found = {}
    for name, size in ((name, size) for name, size in trained if rank < size):
        run = Run(CASES[name], groups[size])
        is_whole = isinstance(run.optimizer.sharded.inner, WholeParams)
        assert is_whole == (CASES[name].optimizer in CLASSES), f"{name} is updated as it should be"
        for step in range(STEPS):
            run.step(step)
        found[name, size] = run.end()
    return found


# --- checkpoints: what one number of ranks has saved, another one goes on with

#: Rows and columns; lists of matrices, and a count in the param group.
RESUMED = {
    **(
        {"Muon": Case("Muon", {"clip_grad": 1.0}, BF16, {"tall": torch.float32})}
        if HAS_MUON
        else {}
    ),
    **{name: Case(name, {"clip_grad": 1.0}, BF16) for name in ("Adafactor", "SOAP")},
}
#: Numbers of ranks that go on with what two have saved. On three the norm adds up in another order,
#: which SOAP shows.
RESUMED_AT = {"Muon": (1, 3), "Adafactor": (3,), "SOAP": (1,)}


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def resume_all(rank: int, groups: Mapping[int, Any]) -> dict[str, Any]:
    """Trained by two ranks for two steps, then by other numbers for two more, in each way to carry
    state."""
    folder, found = Path(from_first(tempfile.mkdtemp())), {}
    for name, case in RESUMED.items():
        full, weights = None, None
        if rank < 2:
            run = Run(case, groups[2])
            for step in range(SAVED_AT):
                run.step(step)
            run.optimizer.save(folder / name)
            weights = run.params()
            if name == "Muon":
                full = run.optimizer.full_state_dict()
            found[name, "on", 2] = _continued(run)
        full, weights = from_first(full), from_first(weights)
        for size in (size for size in RESUMED_AT[name] if rank < size):
            run = Run(case, groups[size])
            run.optimizer.load(folder / name)
            found[name, "folder", size] = _continued(run)
            if full is not None and size == 3:
                run = Run(case, groups[size])
                run.model.load_state_dict(weights)
                run.optimizer.load_state_dict(full)
                found[name, "state dict", size] = _continued(run)
    converted = {
        name: {
            to: _raised(partial(convert, folder / name, folder / f"{name}_{to}", to))
            for to in TARGETS
        }
        for name in (RESUMED if rank == 0 else ())
    }
    return {
        "found": found,
        "kinds": _kinds_in(folder / "Muon") if HAS_MUON else {},
        "verified": {name: run_command(["verify", str(folder / name)]) for name in RESUMED}
        if rank == 0
        else {},
        "converted": converted,
        "others": _others(folder),
    }


def _continued(run: Run) -> dict[str, Tensor]:
    for step in range(SAVED_AT, RESUMED_TO):
        run.step(step, num_drawn=2)
    return run.end()


def _kinds_in(folder: Path) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for key in sorted(read_manifest(folder).tensors):
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    return kinds


def _others(folder: Path) -> dict[str, tuple[str, bool]]:
    """What optimizers do with the state of others, and whether the params are those saved and state
    begins anew."""
    found = {}
    builds: dict[str, Callable[[Any], Optimizer]] = {
        "AdamW": lambda params: AdamW(params, lr=0.01),
        "SOAP": CLASSES["SOAP"],
        **({"Muon": lambda params: torch.optim.Muon(params, lr=0.01)} if HAS_MUON else {}),
    }
    case, folder, saved = Case("Muon", only_matrices=True), folder / "others", {}

    def stepped(name: str) -> TorchDistributedOptimizer:
        model = Held(case)
        given = builds[name](model.parameters())
        optimizer = distribute(model, given, accelerator="torch", **said_of(name))
        model(case.grads(0, dist.get_rank())).backward()
        optimizer.step()
        return optimizer

    states = {}
    for name in builds:
        optimizer = stepped(name)
        optimizer.save(folder / name)
        saved[name] = _params(optimizer)
        states[name] = from_first(optimizer.full_state_dict()) if name != "SOAP" else {}
    for name, loads in (
        pair for pair in product(builds, builds) if {"Muon", "SOAP"}.intersection(pair)
    ):
        optimizer = stepped(loads)
        optimizer.param_groups[0]["lr"] = 0.125
        raised = _raised(partial(optimizer.load, folder / name))
        inner = optimizer.sharded.inner
        owned = getattr(inner, "owned", None)
        has_state = any(
            inner.state.values() if owned is None else (each.has_state for each in owned.values())
        )
        is_anew = not has_state and optimizer.param_groups[0]["lr"] == 0.125
        is_taken = all(map(torch.equal, saved[name], _params(optimizer)))
        found[f"{name} to {loads}"] = raised, is_taken and is_anew == (name != loads)
        if "SOAP" not in (name, loads) and name != loads:
            optimizer = stepped(loads)
            found[f"{name} to {loads}, state dict"] = (
                _raised(partial(optimizer.load_state_dict, states[name])),
                True,
            )
    return found


def _params(optimizer: TorchDistributedOptimizer) -> list[Tensor]:
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


# --- what is refused


def _model() -> Held:
    return Held(Case("Muon"))


def _pair(model: nn.Module, **options: Any) -> TorchDistributedOptimizer:
    """With Muon and AdamW."""
    given = Case("Muon").optimizers(dict(model.named_parameters()))
    return distribute(model, given, accelerator="torch", **options)


def _given(*builds: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Each optimizer gets some of the matrices."""
    model = _model()
    params = [getattr(model, name) for name in MATRICES]
    distribute(
        model,
        [build([param]) for build, param in zip(builds, params, strict=False)],
        accelerator="torch",
    )


def _changed(change: Callable[[Held, list[Optimizer]], object]) -> None:
    """With Muon and AdamW, to which something is done before."""
    model = _model()
    given = Case("Muon").optimizers(dict(model.named_parameters()))
    change(model, given)
    distribute(model, given, accelerator="torch")


def _stepped_before(model: Held, given: list[Optimizer]) -> None:
    model(Case("Muon").grads(0, 0)).backward()
    given[0].step()


def _cut(name: str, param: nn.Parameter) -> Placement:
    return Placement(name, tuple(param.shape), dim=0, rank=0, size=2)


def _added() -> None:
    model = _model()
    model.late = nn.Parameter(torch.ones(3, 3))
    _pair(model).add_param_group({"params": [model.late]})


def _call(name: str, number: int) -> None:
    model = _model()
    given = Case("Muon").optimizers(dict(model.named_parameters()))
    distribute(model, given, accelerator="torch")
    getattr(given[number], name)()


def _of_matrix(muon: Callable[[Held], Optimizer], *others: str) -> None:
    model = _model()
    adamw = [AdamW([getattr(model, name) for name in others] or model.parameters())]
    distribute(model, [muon(model), *adamw], accelerator="torch")


def _not_a_matrix() -> None:
    model = _model()
    muon = torch.optim.Muon([model.wide])
    muon.add_param_group({"params": [model.norm]})
    distribute(model, muon, accelerator="torch")


def _muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params)


def _class(name: str, **options: Any) -> Any:
    model = Held(Case(name))
    given = CLASSES[name](model.parameters())
    return distribute(model, given, accelerator="torch", **{**said_of(name), **options})


def _object_kept_its_state() -> None:
    model = Held(Case("SOAP"))
    given = CLASSES["SOAP"](model.parameters())
    optimizer = distribute(model, given, accelerator="torch", updates="params")
    assert optimizer.last_step is None, "the optimizer lives as long as its object is used"
    given.state[model.tall]


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


def _elementwise(build: Callable[[Any], Optimizer], **options: Any) -> None:
    model = _model()
    distribute(model, build(model.parameters()), accelerator="torch", **options)


def _trained_class(name: str) -> Any:
    """As frameworks begin: Accelerate takes the state, which is empty, and loads it."""
    optimizer = _class(name)
    state = optimizer.state_dict()
    whole = optimizer.full_state_dict()  # of the first rank; empty on the others
    assert state["state"] == {} == whole.get("state", {}) and not len(optimizer.state)
    optimizer.load_state_dict(state)
    (optimizer.param_groups[0]["params"][0] * 2).sum().backward()
    optimizer.step()
    return optimizer


CALLS = (
    ("step", 0, "Muon"),
    ("step", 1, "AdamW"),
    ("state_dict", 0, "Muon"),
    ("add_param_group", 1, "AdamW"),
)
Refused = dict[str, tuple[Callable[[], Any], type[Exception], str]]
#: The error, and what it says.
MUON_REFUSED: Refused = {
    "no optimizers": (
        lambda: distribute(_model(), [], accelerator="torch"),
        ConfigError,
        "[torch.optim.Muon(",
    ),
    "an optimizer and something else": (
        lambda: distribute(_model(), [AdamW, 3], accelerator="torch"),  # type: ignore[list-item]
        ConfigError,
        "the class AdamW",
    ),
    "two without Muon": (lambda: _given(AdamW, AdamW), ConfigError, "[torch.optim.Muon("),
    "two of Muon": (lambda: _given(_muon, _muon), ConfigError, ""),
    "Muon and SGD": (lambda: _given(_muon, SGD), ConfigError, "SGD"),
    "hooks": (
        lambda: _changed(lambda model, given: given[1].register_step_post_hook(lambda *_: None)),
        ConfigError,
        "AdamW is one of several optimizers and has hooks",
    ),
    "Muon was stepped": (
        lambda: _changed(_stepped_before),
        ConfigError,
        "stepped or loaded before",
    ),
    "a param in both": (
        lambda: _of_matrix(lambda model: _muon([model.wide])),
        LayoutError,
        "'wide'",
    ),
    "no matrix": (_not_a_matrix, LayoutError, "'norm'"),
    "a matrix that is cut": (
        lambda: _pair(_model(), placement=_cut),
        LayoutError,
        "cut along dimension 0",
    ),
    "other rates on another rank": (
        lambda: _of_matrix(
            lambda model: torch.optim.Muon([model.wide], lr=0.1 + dist.get_rank()), "norm"
        ),
        RanksDisagreeError,
        "lr=",
    ),
    "state on the host": (
        lambda: _pair(_model(), offload_fraction=0.5),
        ConfigError,
        "offload_fraction",
    ),
    "state in low precision": (
        lambda: _pair(_model(), exp_avg_dtype="int8"),
        ConfigError,
        "exp_avg_dtype",
    ),
    "an option of a Megatron": (
        lambda: _pair(_model(), muon_ns_steps=3),
        ConfigError,
        "muon_ns_steps",
    ),
    "the option of a Megatron": (
        lambda: distribute(
            _model(), optimizer=None, config=DistOptConfig(optimizer="muon", accelerator="torch")
        ),
        ConfigError,
        "muon",
    ),
    "a group is added": (_added, ConfigError, "add_param_group()"),
    **{
        f"{name} of {kind}": (
            partial(_call, name, number),
            ConfigError,
            f"Call {name} of the optimizer that it returned",
        )
        for name, number, kind in CALLS
    },
}
CLASS_REFUSED: Refused = {
    "class that looks beyond a param": (
        lambda: _elementwise(Clipping, updates="params"),
        ConfigError,
        "with updates='params'",
    ),
    "class of which nothing is said": (
        lambda: _elementwise(Clipping),
        ConfigError,
        'updates="elements" if',
    ),
    "said to update params": (
        lambda: _elementwise(AdamW, updates="params"),
        ConfigError,
        "AdamW updates elements",
    ),
    "said of no class": (
        lambda: distribute(_model(), accelerator="torch", updates="params"),
        ConfigError,
        "Leave updates out",
    ),
    "object's own state": (_object_kept_its_state, AccessError, "given to distribute(...)"),
    "class with low precision": (
        lambda: _class("SOAP", exp_avg_dtype="bfloat16"),
        ConfigError,
        "SOAP",
    ),
    "class and a param that is cut": (
        lambda: _class("SOAP", placement=_cut),
        LayoutError,
        "SOAP needs it whole",
    ),
    "class, load_state_dict": (
        lambda: _class("SOAP").load_state_dict({"state": {0: {"step": 1}}, "param_groups": []}),
        ConfigError,
        "save(folder)",
    ),
    "class, state_dict once it has trained": (
        lambda: _trained_class("Adafactor").state_dict(),
        ConfigError,
        "docs/whole_params.md",
    ),
    "class, a group is added": (
        lambda: _class("SOAP").add_param_group({"params": []}),
        ConfigError,
        "all params before distribute",
    ),
}
REFUSED: Refused = {**(MUON_REFUSED if HAS_MUON else {}), **CLASS_REFUSED}


def refuse_all() -> dict[str, tuple[type[BaseException] | None, str]]:
    found: dict[str, tuple[type[BaseException] | None, str]] = {}
    for name, (call, _, _) in REFUSED.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the tests say which
            found[name] = type(error), str(error)
        else:
            found[name] = None, ""
    return found


# --- tests


@dataclass
class Ran:
    """What a rank has found."""

    trained: Trained
    resumed: dict[str, Any]
    refused: dict[str, tuple[type[BaseException] | None, str]]


def collect_facts(rank: int, size: int) -> Ran:
    groups = {each: dist.new_group(range(each)) for each in (1, 2, 3)}
    return Ran(train_all(rank, groups), resume_all(rank, groups), refuse_all())


def train_one(rank: int, size: int, name: str) -> Trained:
    return train_all(rank, {size: dist.group.WORLD}, [(name, size)])


facts = facts_of(collect_facts, 3, seconds=240.0)


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(
        wanted, True
    )


@pytest.mark.parametrize(("name", "size"), TRAINED)
def test_owners_when_distributed_then_equal_to_whole_params_to_the_bit(
    name: str, size: int, facts: Facts
) -> None:
    check_trained(name, size, [of_rank.trained for of_rank in facts.by_rank])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_owners_when_of_a_further_class_then_equal_to_whole_params_to_the_bit(name: str) -> None:
    check_trained(name, 3, run_ranks(train_one, 3, name))


def check_trained(name: str, size: int, trained: list[Trained]) -> None:
    wanted = expected(CASES[name], size)
    start = Held(CASES[name]).state_dict()
    assert all(not torch.equal(wanted[each], start[each]) for each in wanted), (
        "every param has changed"
    )
    for rank in range(size):
        assert_equal(trained[rank][name, size], wanted)


@pytest.mark.parametrize("name", RESUMED)
def test_owners_when_resumed_at_any_size_then_it_goes_on_to_the_bit(
    name: str, facts: Facts
) -> None:
    wanted = expected(RESUMED[name], 2, RESUMED_TO)
    for rank, each in enumerate(facts.by_rank):
        found = {key: params for key, params in each.resumed["found"].items() if key[0] == name}
        ways = [("folder", size) for size in RESUMED_AT[name]]
        ways += [("on", 2), *([("state dict", 3)] if name == "Muon" else [])]
        assert {*found} == {(name, way, size) for way, size in ways if rank < size}
        for params in found.values():
            assert_equal(params, wanted)


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_checkpoint_when_of_muon_and_adamw_then_each_param_has_the_moments_of_its_own(
    facts: Facts,
) -> None:
    adam, muon = ["exp_avg", "exp_avg_sq", "main"], ["main", "momentum_buffer"]
    assert facts.by_rank[0].resumed["kinds"] == {
        name: muon if name in MATRICES else adam for name in OF_MUON
    }


def test_checkpoint_when_of_owners_then_verify_finds_no_fault(facts: Facts) -> None:
    assert facts.by_rank[0].resumed["verified"] == dict.fromkeys(RESUMED, 0)


def test_load_when_the_checkpoint_is_of_another_optimizer_then_state_begins_anew(
    facts: Facts,
) -> None:
    for found in (each.resumed["others"] for each in facts.by_rank):
        for name, (raised, is_right) in found.items():
            wanted = (
                ("CheckpointError", "RanksDisagreeError") if "state dict" in name else ("nothing",)
            )
            assert raised.startswith(wanted) and is_right, (name, raised)


@pytest.mark.parametrize("name", RESUMED)
def test_convert_when_state_is_of_owners_then_only_to_a_format_that_has_a_place_for_it(
    name: str, facts: Facts
) -> None:
    taken = {"Muon": ("distopt", "torch")}.get(name, ("distopt",))
    converted = facts.by_rank[0].resumed["converted"][name]
    assert {to for to, raised in converted.items() if raised == "nothing"} == set(taken)
    assert all(
        text.startswith("CheckpointError") for to, text in converted.items() if to not in taken
    )
    assert "torch" in taken or "Convert to distopt" in converted["torch"]


@pytest.mark.parametrize("name", REFUSED)
def test_owners_when_something_is_not_served_then_an_error_on_all_ranks(
    name: str, facts: Facts
) -> None:
    _, error, words = REFUSED[name]
    for kind, text in (each.refused[name] for each in facts.by_rank):
        assert kind is error, text
        assert words in text, text


def test_updates_when_it_is_said_then_the_check_has_to_agree(one_rank: None) -> None:
    with pytest.raises(ConfigError, match="with updates='elements'"):
        _class("Lamb", updates="elements")
    model = _model()
    lion = distribute(
        model, pytorch_optimizer.Lion(model.parameters()), accelerator="torch", updates="params"
    )
    assert isinstance(lion.sharded.inner, WholeParams)


def test_whole_params_when_it_has_trained_then_memory_counts_what_owners_keep(
    one_rank: None,
) -> None:
    run = Run(Case("SOAP"))
    for step in range(2):
        run.step(step)
    numel = sum(param.numel() for param in run.model.parameters())
    # GG and Q of matrices at least
    squares = sum(8 * each * each for each in (13, 8, 12, 40, 33, 6, 16, 16))
    assert run.optimizer.memory.moment_nbytes >= 8 * numel + squares
