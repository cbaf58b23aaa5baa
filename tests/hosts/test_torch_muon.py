"""`distribute` with torch's Muon: equal to torch's own optimizers on whole params to the bit, or refused."""

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
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import DistOptConfig, MatrixSpec, Muon, TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import kind_of, name_of
from megatron_distopt.errors import ConfigError, DistOptError, LayoutError, RanksDisagreeError
from megatron_distopt.formats.conversion import TARGETS, convert
from megatron_distopt.hosts.report import describe
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.step import clip_divisor
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

SIZES, STEPS = (1, 2, 3), 4
MATRICES = {"wide": (12, 40), "tall": (33, 6), "square": (16, 16)}
OTHERS = {"embedding": (13, 8), "norm": (9,), "scale": (1,)}
SHAPES = {"embedding": (13, 8), "wide": (12, 40), "norm": (9,), "tall": (33, 6), "scale": (1,), "square": (16, 16)}
#: torch's for-each kernels are the same to the bit wherever a tensor ends, and Muon's parts are, too.
ADAMW: dict[str, Any] = {"lr": 0.01, "foreach": True}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        options: of `distribute`.
        dtype: of the params.
        dtypes: of some of them.
        only_matrices: whether there is nothing else.
        absent: by step, params without a gradient.
        bad: the step in which a gradient is not finite.
        frozen: a param that begins to train in the third step.
        scheduled: whether the rate of Muon is halved after each step.
        fused: whether params are several matrices, which our own class of Muon knows.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    only_matrices: bool = False
    absent: Mapping[int, Collection[str]] = field(default_factory=dict)
    bad: int | None = None
    frozen: str | None = None
    scheduled: bool = False
    fused: bool = False

    def shape(self, name: str) -> tuple[int, ...]:
        """Where params are several matrices one of them is a stack of three."""
        return (3, 11, 6) if self.fused and name == "tall" else SHAPES[name]

    @property
    def names(self) -> list[str]:
        return [name for name in SHAPES if name in MATRICES or not self.only_matrices]

    def grads(self, step: int, rank: int) -> dict[str, Tensor]:
        """Multiples of 12 / 256: the average over 2 or 3 ranks is exact."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        absent = {*self.absent.get(step, ()), *([self.frozen] if step < 2 else [])}
        drawn = {name: torch.randint(-3, 4, self.shape(name), generator=generator) * (12 / 256) for name in self.names}
        if step == self.bad and rank == 0:
            drawn["tall"].view(-1)[0] = torch.inf
        return {name: grad for name, grad in drawn.items() if name not in absent}


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}
BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "only matrices": Case(only_matrices=True),
    "fp32": Case(),
    "fp32, clipped": Case({"clip_grad": 1.0}),
    "bf16, overlapped": Case(OVERLAP, BF16),
    "bf16, overlapped, clipped": Case({"clip_grad": 0.5, **OVERLAP}, BF16),
    "some in fp32": Case({"bucket_size": 700}, BF16, {"tall": torch.float32, "norm": torch.float32}),
    "grads in bf16": Case({"grads_in_fp32": False}, BF16),
    "some without a gradient": Case(OVERLAP, absent={1: ("wide", "norm"), 2: ("square", "tall")}),
    "no matrix has a gradient": Case(absent={1: tuple(MATRICES)}),
    "overflow": Case({"loss_scale": "dynamic", "initial_loss_scale": 2.0**8}, FP16, bad=1),
    "inf skipped": Case({"nonfinite": "skip"}, bad=2),
    "a matrix begins to train": Case(OVERLAP, BF16, frozen="tall"),
    "another param begins to train": Case(frozen="embedding"),
    "scheduled": Case(scheduled=True),
    "fused": Case({**OVERLAP, "clip_grad": 1.0}, BF16, fused=True),
}


#: On three ranks all of them. On two those with something that ranks have in parts; alone, one of each kind of buckets.
SOME = {
    1: ("fp32, clipped", "bf16, overlapped", "overflow"),
    2: (
        "only matrices",
        "bf16, overlapped, clipped",
        "some in fp32",
        "some without a gradient",
        "overflow",
        "inf skipped",
        "fused",
    ),
}
TRAINED = [(name, size) for size in SIZES for name in SOME.get(size, CASES)]


class Held(nn.Module):
    """Params and nothing else."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name in case.names:
            value = torch.randn(case.shape(name), generator=generator).to(case.dtypes.get(name, case.dtype))
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss whose gradient is exactly `grads`."""
        return torch.stack([(getattr(self, name).float() * grad).sum() for name, grad in grads.items()]).sum()


def optimizers_of(params: Mapping[str, nn.Parameter], *, fused: bool = False) -> list[Optimizer]:
    """Muon with two groups, and AdamW where there is something for it."""
    groups = [
        {"params": [params["tall"]], "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        {"params": [params[name] for name in ("wide", "square")], "weight_decay": 0.0},
    ]
    others = [param for name, param in params.items() if name in OTHERS]
    muon = _fused_muon(params, groups) if fused else torch.optim.Muon(groups, lr=0.25)
    return [muon, AdamW(others, **ADAMW)] if others else [muon]


def _fused_muon(params: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]) -> Optimizer:
    """Queries, keys and values of two groups of heads in one param, gate and up in another; compared with torch's Muon
    in tests/optimizer/test_muon.py."""
    qkv, gates = MatrixSpec(16, 16, sizes=(4, 2, 2), repeats=2), MatrixSpec(12, 40, sizes=(6, 6))
    return Muon(groups, {params["square"]: qkv, params["wide"]: gates}, lr=0.25)


def expected(case: Case, size: int, steps: int = STEPS) -> dict[str, Tensor]:
    """What torch's own optimizers leave of fp32 copies, in the dtype of the model."""
    start = dict(Held(case).named_parameters())
    mains = {name: nn.Parameter(param.detach().float()) for name, param in start.items()}
    optimizers = optimizers_of(mains, fused=case.fused)
    scheduler = StepLR(optimizers[0], step_size=1, gamma=0.5)
    for step in (step for step in range(steps) if step != case.bad):
        drawn = [case.grads(step, rank) for rank in range(size)]
        sums = {name: torch.stack([grads[name] for grads in drawn]).sum(0) for name in drawn[0]}
        norm = float(torch.stack([(each / size).double().square().sum() for each in sums.values()]).sum().sqrt())
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
        given = optimizers_of(params, fused=case.fused)
        self.optimizer: TorchDistributedOptimizer = distribute(
            self.model, given if len(given) > 1 else given[0], process_group=group, accelerator="torch", **case.options
        )
        self.scheduler = StepLR(given[0], step_size=1, gamma=0.5) if case.scheduled else None

    def step(self, step: int) -> None:
        if step == 2 and self.case.frozen is not None:
            getattr(self.model, self.case.frozen).requires_grad_(True)
        self.optimizer.zero_grad()
        loss = self.model(self.case.grads(step, dist.get_rank()))
        self.optimizer.scale_loss(loss).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        self.optimizer.finish_param_gather()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def train_all(rank: int, size: int) -> dict[tuple[str, int], dict[str, Tensor]]:
    groups = {each: dist.new_group(range(each)) for each in SIZES}
    found = {}
    for name, each in ((name, each) for name, each in TRAINED if rank < each):
        run = Run(CASES[name], groups[each])
        for step in range(STEPS):
            run.step(step)
        found[name, each] = run.params()
        run.optimizer.release()
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[tuple[str, int], dict[str, Tensor]]]:
    return run_ranks(train_all, max(SIZES))


@pytest.mark.parametrize(("name", "size"), TRAINED)
def test_muon_when_distributed_then_equal_to_torchs_to_the_bit(
    name: str, size: int, trained: list[dict[tuple[str, int], dict[str, Tensor]]]
) -> None:
    wanted = expected(CASES[name], size)
    for rank in range(size):
        found = trained[rank][name, size]
        assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(wanted, True)


# --- checkpoints: what one number of ranks has saved, another one goes on with

RESUMED = Case({"clip_grad": 1.0}, BF16, {"tall": torch.float32})


def _folder() -> Path:
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except DistOptError as error:
        return type(error).__name__
    return "nothing"


def resume_all(rank: int, size: int) -> dict[str, Any]:
    """Trained by two ranks for two steps, then by one, two and three ranks for two more, in each way to carry state."""
    groups = {each: dist.new_group(range(each)) for each in SIZES}
    folder, full, found = _folder(), [None], {}
    if rank < 2:
        run = Run(RESUMED, groups[2])
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
        run = Run(RESUMED, groups[each])
        sharded = run.optimizer.sharded
        block = describe("", (), [sharded], sharded.device).splitlines()
        said[each] = [line.strip() for line in block if line.startswith("  owners ")]
        run.optimizer.load(folder / "two")
        found["folder", each] = _continued(run)
        run = Run(RESUMED, groups[each])
        run.model.load_state_dict(weights[0])
        run.optimizer.load_state_dict(full[0])
        found["state dict", each] = _continued(run)
    manifest = read_manifest(folder / "two")
    kinds: dict[str, list[str]] = {}
    for key in sorted(manifest.tensors):
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    refused = _foreign(folder)
    converted = {to: _raised(partial(convert, folder / "Muon", folder / f"{to}_{rank}", to)) for to in TARGETS}
    return {"found": found, "kinds": kinds, "refused": refused, "converted": converted, "said": said}


def _continued(run: Run) -> dict[str, Tensor]:
    # Gradients of the sum over two ranks, whatever the number of ranks is.
    for step in (2, 3):
        drawn = [run.case.grads(step, rank) for rank in range(2)]
        run.optimizer.zero_grad()
        run.model({name: (drawn[0][name] + drawn[1][name]) / 2 for name in drawn[0]}).backward()
        run.optimizer.step()
    found = run.params()
    run.optimizer.release()
    return found


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
        raised = _raised(lambda o=optimizer, s=saved: o.load(folder / s))  # type: ignore[misc]
        is_anew = not any(optimizer.sharded.inner.state.values()) and optimizer.param_groups[0]["lr"] == 0.125
        is_taken = all(map(torch.equal, wanted[saved], _params(optimizer)))
        found[f"{saved} to {loads}"] = raised, is_taken and is_anew == (saved != loads)
    states = {name: _stepped(case, build).full_state_dict() for name, build in kinds.items()}
    for saved, loads in (("SGD", "Muon"), ("Muon", "SGD"), ("AdamW", "Muon")):
        said = [states[saved]]
        dist.broadcast_object_list(said)
        optimizer = _stepped(case, kinds[loads])
        found[f"{saved} to {loads}, state dict"] = (
            _raised(lambda o=optimizer, s=said[0]: o.load_state_dict(s)),  # type: ignore[misc]
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


@pytest.fixture(scope="module")
def resumed() -> list[dict[str, Any]]:
    return run_ranks(resume_all, max(SIZES))


def test_start_when_shards_cut_matrices_then_it_says_how_many_and_what_that_costs(
    resumed: list[dict[str, Any]],
) -> None:
    said = resumed[0]["said"]
    assert said[1] == []
    # tall is fp32 in a buffer of its own, which the border between two shards cuts; wide and square are in the other.
    assert [line.split(";")[0] for line in said[2]] == [
        "owners     1 of 2 matrices are cut by shards and go to one rank each",
        "owners     1 of 1 matrices are cut by shards and go to one rank each",
    ]
    assert all(re.search(r"; the busiest rank has \d\.\d\d times", line) for line in said[2])


@pytest.mark.parametrize(("way", "size"), [(way, size) for way in ("folder", "state dict") for size in SIZES])
def test_muon_when_resumed_then_equal_to_torchs_to_the_bit(way: str, size: int, resumed: list[dict[str, Any]]) -> None:
    wanted = expected(RESUMED, 2)
    for rank in range(size):
        found = resumed[rank]["found"][way, size]
        assert {each: torch.equal(found[each], wanted[each]) for each in wanted} == dict.fromkeys(wanted, True)


def test_checkpoint_when_of_muon_and_adamw_then_each_param_has_the_moments_of_its_own(
    resumed: list[dict[str, Any]],
) -> None:
    wanted = {name: ["main", "momentum_buffer"] for name in MATRICES}
    wanted |= {name: ["exp_avg", "exp_avg_sq", "main"] for name in OTHERS}
    assert resumed[0]["kinds"] == wanted


def test_load_when_the_checkpoint_is_of_another_optimizer_then_params_are_taken_and_state_begins_anew(
    resumed: list[dict[str, Any]],
) -> None:
    for of_rank in resumed:
        for name, (raised, is_right) in of_rank["refused"].items():
            wanted = "nothing" if "state dict" not in name else raised
            assert (raised, is_right) == (wanted, True), name
            assert "state dict" not in name or raised in ("CheckpointError", "RanksDisagreeError"), name


def test_convert_when_the_momentum_is_muons_then_no_file_of_a_fork_is_made_of_it(resumed: list[dict[str, Any]]) -> None:
    wanted = {to: "nothing" if to in ("distopt", "torch") else "CheckpointError" for to in TARGETS}
    assert [of_rank["converted"] for of_rank in resumed] == [wanted] * len(resumed)


# --- refused


def _pair(model: nn.Module, **options: Any) -> TorchDistributedOptimizer:
    return distribute(model, optimizers_of(dict(model.named_parameters())), accelerator="torch", **options)


def _plain() -> Held:
    return Held(CASES["fp32"])


def _given(*builds: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Each optimizer gets some of the matrices."""
    model = _plain()
    params = [getattr(model, name) for name in MATRICES]
    distribute(model, [build([param]) for build, param in zip(builds, params, strict=False)], accelerator="torch")


def _hooked() -> None:
    model = _plain()
    given = optimizers_of(dict(model.named_parameters()))
    given[1].register_step_post_hook(lambda *_: None)
    distribute(model, given, accelerator="torch")


def _stepped_before() -> None:
    model = _plain()
    given = optimizers_of(dict(model.named_parameters()))
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
    given = optimizers_of(dict(model.named_parameters()))
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


@pytest.mark.parametrize("name", REFUSED)
def test_muon_when_something_is_not_served_then_an_error_on_all_ranks(
    name: str, refused: list[dict[str, tuple[type[BaseException] | None, str]]]
) -> None:
    assert [of_rank[name][0] for of_rank in refused] == [REFUSED[name][1]] * 2, refused[0][name]


def test_message_when_optimizers_cannot_be_joined_then_it_says_what_to_write(
    refused: list[dict[str, tuple[type[BaseException] | None, str]]],
) -> None:
    assert "[torch.optim.Muon(" in refused[0]["two without Muon"][1]
    assert "distribute(...) returned" in refused[0]["step of AdamW"][1]
