"""Which inner optimizer is chosen and why, what it computes, and the step with a divisor.

Exercises optimizer/adam.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner
from megatron_distopt.optimizer.inner_step import step_divided
from tests.support.refusals import assert_mentions

#: amp_C is where apex has its CUDA kernels.
PACKAGES = ("transformer_engine", "apex", "amp_C", "deepspeed")

FAKE_ADAM = """
class FusedAdam:
    def __init__(self, groups, **options):
        self.groups, self.options = groups, options

DeepSpeedCPUAdam = FusedAdam
"""
#: By package, its files: just enough to be found by a probe.
FAKES = {
    "transformer_engine": {
        "__init__.py": "",
        "pytorch/__init__.py": "",
        "pytorch/optimizers.py": FAKE_ADAM,
    },
    "apex": {"__init__.py": "", "optimizers/__init__.py": FAKE_ADAM},
    "amp_C": {"__init__.py": ""},
    "deepspeed": {
        "__init__.py": "",
        "git_version_info.py": "installed_ops = {'fused_adam': True, 'cpu_adam': False}",
        "ops/__init__.py": "",
        "ops/adam.py": FAKE_ADAM,
        "accelerator.py": "class Named:\n    device_name = lambda self: 'xpu'\nget_accelerator = "
        "Named\n",
    },
}

Offer = Callable[..., None]


def forget_packages() -> dict[str, Any]:
    """Unloads the packages; returns what was loaded."""
    loaded = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES
    }
    for name in loaded:
        del sys.modules[name]
    return loaded


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Makes exactly the given packages importable, as fakes; the real ones are back afterwards.

    Args of what it returns: names of packages; `files` to change some of theirs, by path.
    """
    loaded = forget_packages()

    def offer_these(*names: str, files: dict[str, str] | None = None) -> None:
        for name in set(PACKAGES) - set(names):
            # an import of it fails as if it were not installed
            sys.modules[name] = None  # type: ignore[assignment]
        texts = {f"{name}/{path}": text for name in names for path, text in FAKES[name].items()}
        for path, text in {**texts, **(files or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield offer_these
    forget_packages()
    sys.modules.update(loaded)


def config(**options: Any) -> DistOptConfig:
    return DistOptConfig(
        **{"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.125, **options}
    )


def refused(device_type: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        choose_inner(config(**options), device_type)
    return str(error.value)


#: By device, what is offered, and what is chosen with a part of each reason for what was passed
#: over.
CHOSEN: dict[str, list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = {
    "cuda": [(PACKAGES, "torch_fused", ()), ((), "torch_fused", ())],
    "cpu": [(PACKAGES, "torch_fused", ())],
    "xpu": [
        (("deepspeed",), "deepspeed", ()),
        ((), "torch_fused", ("not deepspeed: not installed",)),
    ],
    "npu": [((), "torch_foreach", ("not deepspeed: not installed", "not torch_fused: torch"))],
}


@pytest.mark.parametrize(
    ("device_type", "case"), [(name, case) for name, cases in CHOSEN.items() for case in cases]
)
def test_choose_inner_when_nothing_is_named_then_the_best_that_is_there_and_why(
    device_type: str, case: tuple[tuple[str, ...], str, tuple[str, ...]], offer: Offer
) -> None:
    offered, name, reasons = case
    offer(*offered)
    choice = choose_inner(config(), device_type)
    assert choice.name == name
    assert all(text.startswith(reason) for text, reason in zip(choice.why, reasons, strict=True))
    assert device_type != "cpu" or not set(PACKAGES) & set(sys.modules)  # none is even looked at


def test_choose_inner_when_deepspeed_is_not_prebuilt_then_compiled_only_when_named(
    offer: Offer,
) -> None:
    offer(
        "deepspeed",
        files={"deepspeed/git_version_info.py": "installed_ops = {'fused_adam': False}"},
    )
    choice = choose_inner(config(), "xpu")
    assert choice.name == "torch_fused" and "deepspeed" in choice.why[-1]
    choice = choose_inner(config(adam="deepspeed"), "xpu")
    assert choice.name == "deepspeed"
    assert "deepspeed.ops" not in sys.modules
    built: Any = choice.build([])
    assert type(built) is sys.modules["deepspeed.ops.adam"].FusedAdam


#: Named source, device, packages offered, files of theirs, and a word of the reason.
ABSENT: list[tuple[str, str, tuple[str, ...], dict[str, str], str]] = [
    ("transformer_engine", "cuda", (), {}, "not installed"),
    ("apex", "xpu", (), {}, "xpu"),
    ("apex", "cuda", ("apex",), {}, "amp_C"),
    ("deepspeed", "cuda", (), {}, "not installed"),
    ("deepspeed", "cpu", ("deepspeed",), {}, "adam='deepspeed_cpu'"),
    ("torch_fused", "npu", (), {}, "npu"),
    ("apex", "cuda", ("apex",), {"apex/optimizers/__init__.py": ""}, "FusedAdam"),
    (
        "apex",
        "cuda",
        ("apex",),
        {"apex/optimizers/__init__.py": "raise OSError('no libcudart')"},
        "no libcudart",
    ),
]


@pytest.mark.parametrize(("adam", "device_type", "offered", "files", "reason"), ABSENT)
def test_choose_inner_when_a_named_source_cannot_be_used_then_refused_and_said_why(
    adam: str,
    device_type: str,
    offered: tuple[str, ...],
    files: dict[str, str],
    reason: str,
    offer: Offer,
) -> None:
    offer(*offered, files=files)
    assert_mentions(refused(device_type, adam=adam), f"adam is {adam!r}", reason, "adam='auto'")


def test_choose_inner_when_the_unrelated_apex_is_asked_for_then_refused(
    offer: Offer, tmp_path: Path
) -> None:
    offer("apex", files={"apex/views.py": ""})
    (tmp_path / "apex" / "optimizers" / "__init__.py").unlink()
    (tmp_path / "apex" / "optimizers").rmdir()
    assert_mentions(refused("cuda", adam="apex"), "apex.optimizers", "pip uninstall apex")


#: Sources that are not torch's: device, and the option that says how weight decay is meant.
OTHERS = {
    "transformer_engine": ("cuda", "adam_w_mode"),
    "apex": ("cuda", "adam_w_mode"),
    "deepspeed": ("xpu", "adam_w_mode"),
    "deepspeed_cpu": ("cpu", "adamw_mode"),
}


@pytest.mark.parametrize("adam", OTHERS)
def test_build_when_the_source_is_not_torch_then_it_refuses_what_it_ignores(
    adam: str, offer: Offer
) -> None:
    offer(*PACKAGES)
    device_type, mode = OTHERS[adam]
    for decoupled in (True, False):
        choice = choose_inner(
            config(adam=adam, decay="decoupled" if decoupled else "l2"), device_type
        )
        groups: list[dict[str, Any]] = [{"params": [], "amsgrad": False}]
        built: Any = choice.build(groups)
        assert choice.name == adam and built.groups is groups
        assert built.options == {
            "lr": 0.25,
            "betas": (0.5, 0.75),
            "eps": 1e-3,
            "weight_decay": 0.125,
            mode: decoupled,
        }
    for option in ("amsgrad", "maximize", "differentiable"):
        with pytest.raises(ConfigError) as error:
            choice.build([{"params": []}, {"params": [], option: True}])
        assert_mentions(error.value, "Param group 1", f"{option}=True", adam)


def param_with(values: list[float]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def build_over(param: Tensor, options: DistOptConfig) -> Optimizer:
    return choose_inner(options, "cpu").build([{"params": [param]}])


@pytest.mark.parametrize("adam", ["torch_fused", "torch_foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_build_when_the_source_is_torch_then_the_class_and_the_options_are_these(
    adam: str, decoupled: bool
) -> None:
    inner = build_over(
        param_with([1.0]), config(adam=adam, decay="decoupled" if decoupled else "l2")
    )
    assert isinstance(inner, (Adam, AdamW))
    assert isinstance(inner, AdamW) == decoupled
    (group,) = inner.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-3)
    assert group["weight_decay"] == 0.125
    assert (bool(group["fused"]), bool(group["foreach"])) == (
        adam == "torch_fused",
        adam == "torch_foreach",
    )


#: An older torch does not know the option, so it is not passed where the device has no fused
#: kernels.
@pytest.mark.parametrize(
    ("device_type", "fused"), [("cpu", True), ("npu", SGD([torch.zeros(1)]).defaults["fused"])]
)
def test_choose_inner_when_sgd_then_torchs_with_momentum_and_a_fused_kernel_where_there_is_one(
    device_type: str, fused: bool | None
) -> None:
    choice = choose_inner(config(optimizer="sgd", momentum=0.75), device_type)
    inner = choice.build([{"params": [param_with([1.0])]}])
    (group,) = inner.param_groups
    assert (choice.name, type(inner)) == ("torch_sgd", SGD)
    assert (group["lr"], group["momentum"], group["weight_decay"], group["fused"]) == (
        0.25,
        0.75,
        0.125,
        fused,
    )


#: By name of a class, a word of the refusal.
UNUSABLE = {
    "torch.optim:Nope": "Nope",
    "no_such_module:Adam": "PYTHONPATH",
    "torch.nn:Linear": "torch.optim:Adagrad",
}


@pytest.mark.parametrize("optimizer", UNUSABLE)
def test_choose_inner_when_a_class_cannot_be_used_then_refused(optimizer: str) -> None:
    assert_mentions(refused("cpu", optimizer=optimizer), repr(optimizer), UNUSABLE[optimizer])


def test_adopt_instance_when_new_then_one_like_it_has_main_params_in_its_groups() -> None:
    param = param_with([1.0])
    instance: Any = Adam([param], lr=0.5, betas=(0.25, 0.5))
    instance.note = "the user's"
    main = param_with([2.0, 3.0])
    choice = adopt_instance(instance)
    inner = choice.build([{"params": [main], "weight_decay": 0.125}, {"params": []}])
    assert choice.name == "Adam"
    assert (type(inner), vars(inner)["note"], inner.defaults) == (
        Adam,
        "the user's",
        instance.defaults,
    )
    assert [[id(param) for param in group["params"]] for group in inner.param_groups] == [
        [id(main)],
        [],
    ]
    # The user's groups stay those of model params.
    assert [[id(param) for param in group["params"]] for group in instance.param_groups] == [
        [id(param)]
    ]
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["betas"]) == (0.5, (0.25, 0.5))
    assert [group["weight_decay"] for group in inner.param_groups] == [0.125, 0]


def test_adopt_instance_when_methods_were_replaced_and_hooked_then_its_copy_has_neither() -> None:
    instance, main, called = SGD([param_with([1.0])], lr=0.5), param_with([2.0]), list[str]()
    instance.register_step_pre_hook(lambda *_: called.append("hook"))
    instance.step = lambda closure=None: called.append("replaced")  # type: ignore[method-assign]
    inner = adopt_instance(instance).build([{"params": [main]}])
    main.grad = torch.ones(1)
    inner.step()
    assert (main.tolist(), called) == ([1.5], [])


def test_adopt_instance_when_it_was_stepped_or_loaded_then_refused() -> None:
    stepped, param = adam_of(1.0)
    param.grad = torch.ones(1)
    stepped.step()
    loaded, _ = adam_of(1.0)
    loaded.load_state_dict(stepped.state_dict())
    for instance in (stepped, loaded):
        with pytest.raises(ConfigError) as error:
            adopt_instance(instance)
        assert_mentions(error.value, "state", "before the first step or load_state_dict")


class BeginsWithState(SGD):
    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        for param in self.param_groups[0]["params"]:
            self.state[param]["mask"] = torch.ones_like(param)


class OfOneParam(BeginsWithState):
    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params)


def test_adopt_instance_when_its_constructor_makes_the_state_then_refused_with_what_to_name() -> (
    None
):
    for instance in (BeginsWithState([param_with([1.0])]), OfOneParam([param_with([1.0])], 2.0)):
        with pytest.raises(ConfigError) as error:
            adopt_instance(instance)
        assert_mentions(error.value, f"constructor of {type(instance).__name__}", "DistOptConfig(")


def adam_of(value: float) -> tuple[Adam, Tensor]:
    param = param_with([value])
    return Adam([param]), param


class NoDivision(SGD):
    """An optimizer that knows nothing of divisors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, momentum=0.5, foreach=True)


#: By name, how an optimizer over one param is built; the first two divide while they update, the
#: others cannot.
INNER: dict[str, Callable[[Tensor], Optimizer]] = {
    "fused Adam": lambda param: build_over(param, config(adam="torch_fused")),
    "fused SGD": lambda param: build_over(param, config(optimizer="sgd")),
    "foreach Adam": lambda param: build_over(param, config(adam="torch_foreach")),
    "a class of the user's": lambda param: NoDivision([param]),
}


def three_steps(name: str, divisor: float, *, divide_by_hand: bool) -> Tensor:
    """The param after three steps with the gradients of an undivided loss."""
    param = param_with([1.0, -0.3, 0.7, 1e-3, 5.0])
    inner = INNER[name](param)
    for step in range(3):
        grad = torch.tensor([0.1, -7.3, 3e-4, 1.0, 0.0]) * (step + 1) * divisor
        param.grad = grad / divisor if divide_by_hand else grad
        step_divided(inner, [param.grad], 1.0 if divide_by_hand else divisor)
    return param.detach()


@pytest.mark.parametrize("name", INNER)
def test_step_divided_when_by_any_number_then_as_by_hand_and_the_grads_hold_the_quotient(
    name: str,
) -> None:
    for divisor in (0.25, 1.0, 65536.0):  # bit for bit, as they are powers of two
        divided = three_steps(name, divisor, divide_by_hand=False)
        assert torch.equal(divided, three_steps(name, divisor, divide_by_hand=True))
    divided = three_steps(name, 3.7, divide_by_hand=False)
    # A kernel may multiply with 1/3.7 instead: two roundings more, 2^-23 each, of a gradient up to
    # 22, three times.
    torch.testing.assert_close(
        divided, three_steps(name, 3.7, divide_by_hand=True), rtol=1e-5, atol=1e-5
    )
    param = param_with([1.0, 2.0])
    inner = INNER[name](param)
    param.grad = torch.tensor([8.0, -4.0])
    step_divided(inner, [param.grad], 8.0)
    assert param.grad.tolist() == [1.0, -0.5]
    assert not hasattr(inner, "grad_scale")


def test_step_divided_when_the_step_fails_then_the_divisor_is_gone_all_the_same() -> None:
    param = param_with([1.0])
    inner = INNER["fused Adam"](param)
    param.grad = torch.ones(1)

    def fail(*args: Any) -> None:
        assert inner.grad_scale.item() == 8.0  # type: ignore[attr-defined]
        raise RuntimeError("the kernel failed")

    inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^the kernel failed$"):
        step_divided(inner, [param.grad], 8.0)
    assert not hasattr(inner, "grad_scale")


class ForeignDivision(SGD):
    """Sets torch's flag for it, and means a keyword of `step` that it multiplies by."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, lr=lr, foreach=True)
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            group["fused"] = True

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scale: float = 1.0) -> None:  # type: ignore[override]
        assert not hasattr(self, "grad_scale")
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                param.sub_(param.grad * grad_scale, alpha=group["lr"])


def test_step_divided_when_a_foreign_class_sets_torchs_flag_then_it_is_divided_by_hand() -> None:
    param = param_with([1.0, 2.0])
    said = config(updates="elements")
    inner = adopt_instance(ForeignDivision([param]), config=said).build([{"params": [param]}])
    assert type(inner) is ForeignDivision
    param.grad = torch.tensor([8.0, -16.0])
    step_divided(inner, [param.grad], 8.0)
    assert param.grad.tolist() == [1.0, -2.0]
    assert param.tolist() == [0.875, 2.25]
    assert not hasattr(inner, "grad_scale")


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_choose_inner_when_the_class_is_not_elementwise_then_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        adopt_instance(getattr(torch.optim, name)([torch.zeros(2, 2, requires_grad=True)]))
    assert_mentions(error.value, name, "AdamW")
    assert name in refused("cpu", optimizer=f"torch.optim:{name}")


class TakesAnything(SGD):
    """Its options are keywords that its signature does not name."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.given = options
        super().__init__(params, lr=options["lr"], weight_decay=options["weight_decay"])


class TakesNoMore(SGD):
    """It cannot be built from param groups alone."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, lr=rank)


def test_choose_inner_when_the_class_takes_any_keyword_then_it_gets_all_options() -> None:
    choice = choose_inner(
        config(optimizer=f"{__name__}:TakesAnything", momentum=0.75, updates="elements"), "cpu"
    )
    inner: Any = choice.build([{"params": [param_with([1.0])]}])
    assert inner.given == {
        "lr": 0.25,
        "betas": (0.5, 0.75),
        "eps": 1e-3,
        "weight_decay": 0.125,
        "momentum": 0.75,
    }
    assert inner.param_groups[0]["lr"] == 0.25
    instance = TakesAnything([torch.zeros(2)], lr=0.5, weight_decay=0.25)
    said = config(updates="elements")
    built = adopt_instance(instance, config=said).build([{"params": [torch.zeros(3)]}])
    assert [(group["lr"], group["weight_decay"]) for group in built.param_groups] == [(0.5, 0.25)]


def test_choose_inner_when_the_class_needs_more_than_groups_then_refused_at_first() -> None:
    name = f"{__name__}:TakesNoMore"
    assert_mentions(refused("cpu", optimizer=name, updates="elements"), name, "'rank'")
    with pytest.raises(ConfigError, match=r"TakesNoMore.*'rank'"):
        adopt_instance(TakesNoMore([param_with([1.0])], rank=1), config=config(updates="elements"))


def test_adopt_instance_when_its_class_fills_state_then_it_is_of_the_main_params() -> None:
    main = param_with([2.0, 3.0])
    instance = Adagrad([param_with([1.0])], lr=0.5, initial_accumulator_value=0.25)
    inner = adopt_instance(instance).build([{"params": [main]}])
    assert list(inner.state) == [main]
    assert inner.state[main]["sum"].tolist() == [0.25, 0.25]


def test_choose_inner_when_codes_are_asked_for_and_the_device_has_no_fp16_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_distopt.optimizer.adam.has_dtype", lambda device, dtype: False)
    with pytest.raises(ConfigError, match=r"exp_avg_sq_dtype is 'int8'.* cpu"):
        choose_inner(DistOptConfig(exp_avg_sq_dtype="int8"), "cpu")
    assert choose_inner(DistOptConfig(exp_avg_sq_dtype="bfloat16"), "cpu").name == "low_precision"
