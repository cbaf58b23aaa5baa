"""Which inner optimizer is chosen and why, what it computes, and the step with a divisor."""

from __future__ import annotations

import math
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
from megatron_distopt.optimizer.inner import InnerChoice, step_divided
from tests.support.refusals import assert_mentions, assert_says

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
    "transformer_engine": {"__init__.py": "", "pytorch/__init__.py": "", "pytorch/optimizers.py": FAKE_ADAM},
    "apex": {"__init__.py": "", "optimizers/__init__.py": FAKE_ADAM},
    "amp_C": {"__init__.py": ""},
    "deepspeed": {
        "__init__.py": "",
        "git_version_info.py": "installed_ops = {'fused_adam': True, 'cpu_adam': False}",
        "ops/__init__.py": "",
        "ops/adam.py": FAKE_ADAM,
        "accelerator.py": "class Named:\n    device_name = lambda self: 'xpu'\nget_accelerator = Named\n",
    },
}

NO_TE = "not installed (No module named 'transformer_engine.pytorch'; 'transformer_engine' is not a package)"
NO_APEX = "not installed (No module named 'apex.optimizers'; 'apex' is not a package)"
NO_KERNELS = "built without its CUDA extensions (no amp_C)"
NO_DEEPSPEED = "not installed"
NOT_BUILT = "its fused_adam op was not built at install time"
IMPOSTOR = (
    "the installed 'apex' is not NVIDIA's but an unrelated project of that name from PyPI; "
    "pip uninstall apex, then build NVIDIA apex from its sources"
)

Offer = Callable[..., None]


def forget_packages() -> dict[str, Any]:
    """Unloads the packages; returns what was loaded."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}
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
            sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails as if it were not installed
        texts = {f"{name}/{path}": text for name in names for path, text in FAKES[name].items()}
        for path, text in {**texts, **(files or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield offer_these
    forget_packages()
    sys.modules.update(loaded)


def config(**options: Any) -> DistOptConfig:
    return DistOptConfig(**{"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.125, **options})


def refused(device_type: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        choose_inner(config(**options), device_type)
    return str(error.value)


@pytest.mark.parametrize("offered", [PACKAGES, ("apex", "amp_C"), ("deepspeed",), ()])
def test_choose_inner_when_on_cuda_then_torchs_fused_which_never_waits_whatever_is_installed(
    offered: tuple[str, ...], offer: Offer
) -> None:
    offer(*offered)
    choice = choose_inner(config(), "cuda")
    assert (choice.name, choice.why) == ("torch_fused", ())


@pytest.mark.parametrize("adam", ["transformer_engine", "apex", "deepspeed"])
def test_choose_inner_when_another_is_named_on_cuda_then_it_is_taken(adam: str, offer: Offer) -> None:
    accelerator = FAKES["deepspeed"]["accelerator.py"].replace("xpu", "cuda")
    offer(*PACKAGES, files={"deepspeed/accelerator.py": accelerator})
    assert choose_inner(config(adam=adam), "cuda").name == adam


#: What DeepSpeed says of ops that were not built at install time.
NOT_PREBUILT = ("installed_ops = {'fused_adam': False}", "installed_ops = {}")


@pytest.mark.parametrize("installed_ops", NOT_PREBUILT)
def test_choose_inner_when_deepspeed_is_not_prebuilt_then_nothing_is_compiled_and_torch_is_chosen(
    installed_ops: str, offer: Offer
) -> None:
    offer("deepspeed", files={"deepspeed/git_version_info.py": installed_ops})
    choice = choose_inner(config(), "xpu")
    assert choice.name == "torch_fused"
    assert choice.why[-1] == f"not deepspeed: {NOT_BUILT}"
    assert "deepspeed.ops" not in sys.modules


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_choose_inner_when_a_package_lacks_the_symbol_then_the_reason_names_both(name: str, offer: Offer) -> None:
    files = {"transformer_engine/pytorch/optimizers.py": "", "apex/optimizers/__init__.py": ""}
    offer("transformer_engine", "apex", files=files)
    module = {"transformer_engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}[name]
    assert f"{module} has no FusedAdam" in refused("cuda", adam=name)


#: By source, the file of it that is made to fail.
IMPORTED = {
    "transformer_engine": "transformer_engine/pytorch/__init__.py",
    "apex": "apex/optimizers/__init__.py",
}


@pytest.mark.parametrize("kind", ["OSError", "RuntimeError", "AttributeError"])
@pytest.mark.parametrize("name", IMPORTED)
def test_choose_inner_when_the_import_of_a_named_package_fails_then_refused_and_said(
    name: str, kind: str, offer: Offer
) -> None:
    files = {IMPORTED[name]: f"raise {kind}('libcudart.so.12: cannot open shared object file')"}
    offer(name, "amp_C", files=files)
    reason = "installed, but its import fails (libcudart.so.12: cannot open shared object file)"
    assert_says(
        refused("cuda", adam=name),
        f"Invalid adam {name!r}: {reason}. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    )


@pytest.mark.parametrize(
    ("device_type", "better"),
    [
        ("cuda", ()),
        ("xpu", (f"not deepspeed: {NO_DEEPSPEED}",)),
        ("cpu", ()),
    ],
)
def test_choose_inner_when_nothing_better_is_there_then_foreach_on_every_device(
    device_type: str, better: tuple[str, ...], offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer()
    monkeypatch.setattr("megatron_distopt.optimizer.adam.has_torch_fused", lambda device_type: False)
    choice = choose_inner(config(), device_type)
    reason = f"torch {torch.__version__} has no fused AdamW for {device_type}"
    assert (choice.name, choice.why) == ("torch_foreach", (*better, f"not torch_fused: {reason}"))


def test_choose_inner_when_torch_has_no_fused_kernels_then_foreach(offer: Offer) -> None:
    offer()
    choice = choose_inner(config(), "npu")
    reason = f"torch {torch.__version__} has no fused AdamW for npu"
    assert (choice.name, choice.why) == (
        "torch_foreach",
        (f"not deepspeed: {NO_DEEPSPEED}", f"not torch_fused: {reason}"),
    )


@pytest.mark.parametrize(("offered", "name"), [(("deepspeed",), "deepspeed"), ((), "torch_fused")])
def test_choose_inner_when_on_another_accelerator_then_deepspeed_before_torch(
    offered: tuple[str, ...], name: str, offer: Offer
) -> None:
    offer(*offered)
    assert choose_inner(config(), "xpu").name == name


def test_choose_inner_when_on_a_cpu_then_torch_fused_and_no_other_is_looked_at(offer: Offer) -> None:
    offer(*PACKAGES)
    choice = choose_inner(config(), "cpu")
    assert (choice.name, choice.why) == ("torch_fused", ())
    assert not set(PACKAGES) & set(sys.modules)


IMPOSTOR_FILES = {"apex/__init__.py": "raise RuntimeError('a stranger was imported')", "apex/views.py": ""}


@pytest.fixture
def impostor(offer: Offer, tmp_path: Path) -> None:
    """A folder `apex` on the path that is not NVIDIA's."""
    offer("apex", files=IMPOSTOR_FILES)
    (tmp_path / "apex" / "optimizers" / "__init__.py").unlink()
    (tmp_path / "apex" / "optimizers").rmdir()


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_choose_inner_when_the_unrelated_apex_is_asked_for_then_refused(device_type: str, impostor: None) -> None:
    assert_says(
        refused(device_type, adam="apex"),
        f"Invalid adam 'apex': {IMPOSTOR}. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    )


@pytest.mark.parametrize(
    ("adam", "device_type", "reason"),
    [
        ("transformer_engine", "cuda", NO_TE),
        ("transformer_engine", "cpu", "has no kernels for cpu"),
        ("apex", "cuda", NO_APEX),
        ("apex", "xpu", "has no kernels for xpu"),
        ("deepspeed", "cuda", NO_DEEPSPEED),
        ("deepspeed", "cpu", NO_DEEPSPEED),
        ("deepspeed_cpu", "cpu", NO_DEEPSPEED),
        ("deepspeed_cpu", "cuda", "runs on cpu, not on cuda"),
        ("torch_fused", "npu", f"torch {torch.__version__} has no fused AdamW for npu"),
    ],
)
def test_choose_inner_when_a_named_source_is_absent_then_refused(
    adam: str, device_type: str, reason: str, offer: Offer
) -> None:
    offer()
    assert_says(
        refused(device_type, adam=adam),
        f"Invalid adam {adam!r}: {reason}. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    )


@pytest.mark.parametrize("device_type", ["cpu", "xpu"])
@pytest.mark.parametrize("named", ["cpu", "xpu"])
def test_choose_inner_when_deepspeed_is_named_then_its_accelerator_has_to_be_the_device_of_the_params(
    named: str, device_type: str, offer: Offer
) -> None:
    accelerator = FAKES["deepspeed"]["accelerator.py"].replace("xpu", named)
    offer("deepspeed", files={"deepspeed/accelerator.py": accelerator})
    if named == device_type:
        assert choose_inner(config(adam="deepspeed"), device_type).name == "deepspeed"
        return
    reason = f"has kernels for its accelerator {named}, and the params are on {device_type}"
    assert reason in refused(device_type, adam="deepspeed")


def test_choose_inner_when_named_apex_has_no_kernels_then_refused(offer: Offer) -> None:
    offer("apex")
    assert_says(
        refused("cuda", adam="apex"),
        f"Invalid adam 'apex': {NO_KERNELS}. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    )


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
@pytest.mark.parametrize("installed_ops", NOT_PREBUILT)
def test_choose_inner_when_named_deepspeed_is_not_prebuilt_then_it_is_taken_and_compiles_when_it_is_built(
    installed_ops: str, device_type: str, offer: Offer
) -> None:
    accelerator = FAKES["deepspeed"]["accelerator.py"].replace("xpu", device_type)
    offer("deepspeed", files={"deepspeed/git_version_info.py": installed_ops, "deepspeed/accelerator.py": accelerator})
    choice = choose_inner(config(adam="deepspeed"), device_type)
    assert (choice.name, choice.why) == ("deepspeed", ("asked for by name",))
    assert "deepspeed.ops" not in sys.modules
    built: Any = choice.build([])
    assert type(built) is sys.modules["deepspeed.ops.adam"].FusedAdam


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("adam", "device_type", "mode"),
    [
        ("transformer_engine", "cuda", "adam_w_mode"),
        ("apex", "cuda", "adam_w_mode"),
        ("deepspeed", "xpu", "adam_w_mode"),
        ("deepspeed_cpu", "cpu", "adamw_mode"),
    ],
)
def test_build_when_the_source_is_not_torch_then_it_gets_the_options_and_the_kind_of_decay(
    adam: str, device_type: str, mode: str, decoupled: bool, offer: Offer
) -> None:
    offer(*PACKAGES)
    choice = choose_inner(config(adam=adam, decay="decoupled" if decoupled else "l2"), device_type)
    groups: list[dict[str, Any]] = [{"params": []}]
    built: Any = choice.build(groups)
    assert (choice.name, choice.why) == (adam, ("asked for by name",))
    assert built.groups is groups
    assert built.options == {
        "lr": 0.25,
        "betas": (0.5, 0.75),
        "eps": 1e-3,
        "weight_decay": 0.125,
        mode: decoupled,
    }


@pytest.mark.parametrize(
    ("adam", "device_type"), [("transformer_engine", "cuda"), ("apex", "cuda"), ("deepspeed_cpu", "cpu")]
)
@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_build_when_a_param_group_has_what_the_source_does_not_look_at_then_refused(
    option: str, adam: str, device_type: str, offer: Offer
) -> None:
    offer(*PACKAGES)
    choice = choose_inner(config(adam=adam), device_type)
    choice.build([{"params": [], option: False}])
    with pytest.raises(ConfigError) as error:
        choice.build([{"params": []}, {"params": [], option: True}])
    assert str(error.value).startswith(f"Invalid param group 1: {option}=True. ")
    assert adam in str(error.value)
    assert "Drop the option" in str(error.value)


def param_with(values: list[float]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def build_over(param: Tensor, options: DistOptConfig) -> Optimizer:
    return choose_inner(options, "cpu").build([{"params": [param]}])


@pytest.mark.parametrize("adam", ["torch_fused", "torch_foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_build_when_the_source_is_torch_then_the_class_and_the_options_are_these(adam: str, decoupled: bool) -> None:
    inner = build_over(param_with([1.0]), config(adam=adam, decay="decoupled" if decoupled else "l2"))
    assert isinstance(inner, Adam)
    assert isinstance(inner, AdamW) == decoupled
    (group,) = inner.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-3)
    assert group["weight_decay"] == 0.125
    assert (bool(group["fused"]), bool(group["foreach"])) == (adam == "torch_fused", adam == "torch_foreach")


def test_build_when_a_group_has_its_own_options_then_they_win() -> None:
    param = param_with([1.0])
    inner = choose_inner(config(), "cpu").build([{"params": [param], "lr": 0.5, "lr_mult": 2.0}, {"params": []}])
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.25]
    assert inner.param_groups[0]["lr_mult"] == 2.0
    assert inner.param_groups[1]["params"] == []


GRAD = 0.01


def steps_by_hand(value: float, num_steps: int, *, lr: float, decay: float, decoupled: bool) -> float:
    """Adam of one number with a gradient of 0.01, in float64, with betas 0.9 and 0.999 and eps 1e-8."""
    first = second = 0.0
    for step in range(1, num_steps + 1):
        grad = GRAD if decoupled else GRAD + decay * value
        first += 0.1 * (grad - first)
        second += 0.001 * (grad * grad - second)
        shrunk = value * (1 - lr * decay) if decoupled else value
        value = shrunk - lr * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return value


#: fp32 values near 10 are 9.5e-7 apart. A step rounds the param twice (decay and update), each time by half of that.
ROUNDING_OF_100_STEPS = 100 * 2 * 9.5e-7 / 2


@pytest.mark.parametrize("adam", ["torch_fused", "torch_foreach"])
@pytest.mark.parametrize(("decoupled", "known"), [(True, 9.8010), (False, 9.9002)])
def test_step_when_weight_decay_is_decoupled_or_not_then_100_steps_lead_to_the_known_value(
    adam: str, decoupled: bool, known: float
) -> None:
    param = param_with([10.0])
    options = DistOptConfig(lr=1e-3, weight_decay=0.1, adam=adam, decay="decoupled" if decoupled else "l2")
    inner = build_over(param, options)
    for _ in range(100):
        param.grad = torch.full((1,), GRAD)
        inner.step()
    expected = steps_by_hand(10.0, 100, lr=1e-3, decay=0.1, decoupled=decoupled)
    assert round(expected, 4) == known
    assert abs(param.item() - expected) < ROUNDING_OF_100_STEPS


def test_step_when_weight_decay_is_decoupled_then_the_closed_form_holds() -> None:
    """With a constant gradient Adam moves by lr * g / (g + eps) a step; decoupled decay shrinks by 1 - lr * decay."""
    shrink, moved = 1 - 1e-3 * 0.1, 1e-3 * GRAD / (GRAD + 1e-8)
    closed = 10.0 * shrink**100 - moved * (1 - shrink**100) / (1 - shrink)
    by_hand = steps_by_hand(10.0, 100, lr=1e-3, decay=0.1, decoupled=True)
    # float64 rounds by 1e-16, which 100 steps and the division by 1 - shrink = 1e-4 make 1e-10 at most.
    assert math.isclose(by_hand, closed, rel_tol=1e-10)


@pytest.mark.parametrize("adam", ["torch_fused", "torch_foreach"])
def test_step_when_the_gradient_is_zero_then_decoupled_decay_only_shrinks(adam: str) -> None:
    param = param_with([8.0, -2.0])
    inner = build_over(param, DistOptConfig(lr=0.5, weight_decay=0.5, adam=adam))
    param.grad = torch.zeros(2)
    inner.step()
    # 1 - 0.5 * 0.5 = 0.75: every factor is exact in fp32.
    assert param.tolist() == [6.0, -1.5]


def test_choose_inner_when_sgd_then_torch_sgd_with_momentum_and_its_fused_kernel() -> None:
    choice = choose_inner(config(optimizer="sgd", momentum=0.75), "cpu")
    inner = choice.build([{"params": [param_with([1.0])]}])
    (group,) = inner.param_groups
    assert choice.name == "torch_sgd"
    assert type(inner) is SGD
    assert (group["lr"], group["momentum"], group["weight_decay"], group["fused"]) == (0.25, 0.75, 0.125, True)


def test_choose_inner_when_sgd_on_a_device_without_fused_kernels_then_torch_decides() -> None:
    param = param_with([1.0])
    inner = choose_inner(config(optimizer="sgd", momentum=0.75), "npu").build([{"params": [param]}])
    (group,) = inner.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.25, 0.75, 0.125)
    # Not passed at all, so it is torch's own default: an older torch does not know the option.
    assert group["fused"] == SGD([param_with([1.0])]).defaults["fused"]


def test_choose_inner_when_a_class_is_named_then_it_gets_the_options_that_it_takes() -> None:
    choice = choose_inner(config(optimizer="torch.optim:Adagrad"), "cpu")
    inner = choice.build([{"params": [param_with([1.0])]}])
    assert (choice.name, type(inner)) == ("torch.optim:Adagrad", Adagrad)
    assert (inner.defaults["lr"], inner.defaults["eps"], inner.defaults["weight_decay"]) == (0.25, 1e-3, 0.125)
    assert not {"betas", "momentum"} & set(inner.defaults)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            "torch.optim:Nope",
            "Invalid optimizer: 'torch.optim:Nope' (module 'torch.optim' has no attribute 'Nope'). "
            "Must be importable as module:Class. Check the spelling and the PYTHONPATH.",
        ),
        (
            "no_such_module:Adam",
            "Invalid optimizer: 'no_such_module:Adam' (No module named 'no_such_module'). "
            "Must be importable as module:Class. Check the spelling and the PYTHONPATH.",
        ),
        (
            "torch.nn:Linear",
            "Invalid optimizer: 'torch.nn:Linear'. Must name a subclass of torch.optim.Optimizer. "
            "Give a class such as torch.optim:Adagrad.",
        ),
        (
            "math:sqrt",
            "Invalid optimizer: 'math:sqrt'. Must name a subclass of torch.optim.Optimizer. "
            "Give a class such as torch.optim:Adagrad.",
        ),
    ],
)
def test_choose_inner_when_a_class_cannot_be_used_then_refused(optimizer: str, text: str) -> None:
    assert_says(refused("cpu", optimizer=optimizer), text)


def test_adopt_instance_when_new_then_one_like_it_has_main_params_in_its_groups() -> None:
    param = param_with([1.0])
    instance: Any = Adam([param], lr=0.5, betas=(0.25, 0.5))
    instance.note = "the user's"
    main = param_with([2.0, 3.0])
    choice = adopt_instance(instance)
    inner = choice.build([{"params": [main], "weight_decay": 0.125}, {"params": []}])
    assert (choice.name, choice.why) == ("Adam", ("an instance was given",))
    assert (type(inner), vars(inner)["note"], inner.defaults) == (Adam, "the user's", instance.defaults)
    assert [[id(param) for param in group["params"]] for group in inner.param_groups] == [[id(main)], []]
    # The user's groups stay those of model params.
    assert [[id(param) for param in group["params"]] for group in instance.param_groups] == [[id(param)]]
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["betas"]) == (0.5, (0.25, 0.5))
    assert [group["weight_decay"] for group in inner.param_groups] == [0.125, 0]


def test_adopt_instance_when_its_methods_were_replaced_and_it_has_hooks_then_its_copy_has_neither() -> None:
    instance, main, called = SGD([param_with([1.0])], lr=0.5), param_with([2.0]), list[str]()
    instance.register_step_pre_hook(lambda *_: called.append("hook"))
    instance.step = lambda closure=None: called.append("replaced")  # type: ignore[method-assign]
    inner = adopt_instance(instance).build([{"params": [main]}])
    main.grad = torch.ones(1)
    inner.step()
    assert (main.tolist(), called) == ([1.5], [])


def test_adopt_instance_when_it_has_state_then_refused() -> None:
    param = param_with([1.0])
    instance = Adam([param])
    param.grad = torch.ones(1)
    instance.step()
    with pytest.raises(ConfigError) as error:
        adopt_instance(instance)
    assert_says(
        str(error.value),
        "Invalid optimizer: one that has state. Must be new. "
        "Build the distributed optimizer before the first step or load_state_dict.",
    )


class NoDivision(SGD):
    """An optimizer that knows nothing of divisors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, momentum=0.5, foreach=True)


#: By name, how an optimizer over one param is built; the first two divide while they update, the others cannot.
INNER: dict[str, Callable[[Tensor], Optimizer]] = {
    "fused Adam": lambda param: build_over(param, config(adam="torch_fused")),
    "fused SGD": lambda param: build_over(param, config(optimizer="sgd")),
    "foreach Adam": lambda param: build_over(param, config(adam="torch_foreach")),
    "a class of the user's": lambda param: NoDivision([param]),
}


def fused_or_not(name: str) -> bool:
    return name.startswith("fused")


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
@pytest.mark.parametrize("divisor", [0.25, 1.0, 2.0, 65536.0])
def test_step_divided_when_by_a_power_of_two_then_bit_for_bit_as_by_hand(name: str, divisor: float) -> None:
    divided = three_steps(name, divisor, divide_by_hand=False)
    assert torch.equal(divided, three_steps(name, divisor, divide_by_hand=True))
    assert torch.equal(divided, three_steps(name, 1.0, divide_by_hand=False))


@pytest.mark.parametrize("name", INNER)
def test_step_divided_when_by_any_number_then_as_by_hand(name: str) -> None:
    divided = three_steps(name, 3.7, divide_by_hand=False)
    # A kernel may multiply with 1/3.7 instead: two roundings more, 2^-23 each, of a gradient up to 22, three times.
    torch.testing.assert_close(divided, three_steps(name, 3.7, divide_by_hand=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", INNER)
def test_step_divided_when_done_then_grads_hold_the_quotient_and_the_divisor_is_gone(name: str) -> None:
    param = param_with([1.0, 2.0])
    inner = INNER[name](param)
    assert getattr(inner, "_step_supports_amp_scaling", False) == fused_or_not(name)
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


@pytest.mark.parametrize("name", ["fused Adam", "foreach Adam"])
def test_step_divided_when_a_rank_owns_nothing_then_the_step_does_nothing(name: str) -> None:
    options = config(adam="torch_fused" if fused_or_not(name) else "torch_foreach")
    inner = choose_inner(options, "cpu").build([{"params": []}])
    step_divided(inner, [], 8.0)
    assert not inner.state


def test_inner_choice_when_made_without_reasons_then_there_are_none() -> None:
    assert InnerChoice("name", SGD).why == ()


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
    inner = adopt_instance(ForeignDivision([param])).build([{"params": [param]}])
    assert type(inner) is ForeignDivision
    param.grad = torch.tensor([8.0, -16.0])
    step_divided(inner, [param.grad], 8.0)
    assert param.grad.tolist() == [1.0, -2.0]
    assert param.tolist() == [0.875, 2.25]
    assert not hasattr(inner, "grad_scale")


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor", "SparseAdam"])
def test_choose_inner_when_the_class_is_not_elementwise_then_refused(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    with pytest.raises(ConfigError) as error:
        adopt_instance(getattr(torch.optim, name)([torch.zeros(2, 2, requires_grad=True)]))
    assert name in str(error.value)
    assert "not elements" in str(error.value) and "such as torch.optim.AdamW" in str(error.value)
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
    choice = choose_inner(config(optimizer=f"{__name__}:TakesAnything", momentum=0.75), "cpu")
    inner: Any = choice.build([{"params": [param_with([1.0])]}])
    assert inner.given == {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.125, "momentum": 0.75}
    assert inner.param_groups[0]["lr"] == 0.25


def test_choose_inner_when_the_class_needs_more_than_groups_then_refused_before_anything_is_moved() -> None:
    name = f"{__name__}:TakesNoMore"
    missing = "TakesNoMore.__init__() missing 1 required positional argument: 'rank'"
    assert_mentions(refused("cpu", optimizer=name), name, missing)
    with pytest.raises(ConfigError) as error:
        adopt_instance(TakesNoMore([param_with([1.0])], rank=1))
    assert_mentions(error.value, "TakesNoMore", missing)


def test_adopt_instance_when_it_was_loaded_into_then_refused_as_one_that_was_stepped() -> None:
    param = param_with([1.0])
    trained = Adam([param])
    param.grad = torch.ones(1)
    trained.step()
    loaded = Adam([param_with([1.0])])
    loaded.load_state_dict(trained.state_dict())
    with pytest.raises(ConfigError) as error:
        adopt_instance(loaded)
    assert_says(
        str(error.value),
        "Invalid optimizer: one that has state. Must be new. "
        "Build the distributed optimizer before the first step or load_state_dict.",
    )


def test_adopt_instance_when_its_class_fills_state_when_it_is_built_then_the_state_is_of_the_main_params() -> None:
    main = param_with([2.0, 3.0])
    instance = Adagrad([param_with([1.0])], lr=0.5, initial_accumulator_value=0.25)
    inner = adopt_instance(instance).build([{"params": [main]}])
    assert list(inner.state) == [main]
    assert inner.state[main]["sum"].tolist() == [0.25, 0.25]


class TakesAnyKeyword(torch.optim.SGD):
    """A constructor that hands its keywords on, as wrappers of torch's classes do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{name: options[name] for name in ("lr", "momentum") if name in options})


def test_adopt_instance_when_its_constructor_takes_any_keyword_then_its_defaults_are_kept() -> None:
    instance = TakesAnyKeyword([torch.zeros(2)], lr=0.5, momentum=0.25)
    built = adopt_instance(instance).build([{"params": [torch.zeros(3)]}])
    assert type(built) is TakesAnyKeyword
    assert [(group["lr"], group["momentum"]) for group in built.param_groups] == [(0.5, 0.25)]


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_choose_inner_when_codes_are_asked_for_and_the_device_has_no_fp16_then_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distopt.optimizer.choice.has_dtype", lambda device, dtype: False)
    with pytest.raises(ConfigError, match=f"^Invalid {name}: 'int8' on cpu"):
        choose_inner(DistOptConfig(**{name: "int8"}), "cpu")
    assert choose_inner(DistOptConfig(**{name: "bfloat16"}), "cpu").name == "low_precision"
