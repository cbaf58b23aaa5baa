"""The state of one rank: what is in it, what is refused, and that training goes on from it bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.checkpoint import local_state_dict
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import ParamSpec, lay_out
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan
from megatron_distopt.optimizer.step import make_step
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says

CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)
DTYPES = (torch.float32, torch.bfloat16)
ONE_RANK = Group(None, 0, 1)


pytestmark = pytest.mark.usefixtures("one_rank")


class Trained:
    """A model of `Params` with its optimizer."""

    def __init__(self, config: DistOptConfig = CONFIG, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        self.model = Params(default=dtype)
        self.optimizer = distribute(self.model, config, **how)
        self.steps_taken = 0

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(exact_grads(self.steps_taken, 0, 0))
            self.optimizer.scale_loss(loss).backward()
            assert stepped(self.optimizer).updated
            self.steps_taken += 1
        return self

    def load(self, state: Mapping[str, Any], steps_taken: int) -> Trained:
        self.optimizer.load_local_state_dict(state)
        self.steps_taken = steps_taken
        return self

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.local_state_dict())

    def held(self) -> dict[str, Any]:
        """Model and whole state, as copies."""
        params = {name: param.detach().clone() for name, param in self.model.named()}
        return {"params": params, "state": self.saved()}


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts, lists and tuples."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def refusal_of(trained: Trained, state: Mapping[str, Any]) -> str:
    """The text; nothing is changed."""
    before = trained.held()
    with pytest.raises(CheckpointError) as error:
        trained.optimizer.load_local_state_dict(state)
    assert same(trained.held(), before)
    return str(error.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_when_saved_before_the_first_step_then_it_trains_as_a_fresh_optimizer(dtype: torch.dtype) -> None:
    trained = Trained(dtype=dtype)
    state = trained.saved()
    assert all(part["cut"] == part["whole"] == {} for part in state["param_shards"].values())
    trained.train(3)
    assert trained.optimizer.sharded.inner.state
    trained.load(state, steps_taken=0)
    assert not trained.optimizer.sharded.inner.state
    assert same(trained.held(), Trained(dtype=dtype).held())
    assert same(trained.train(1).held(), Trained(dtype=dtype).train(1).held())


def test_load_when_saved_before_the_first_step_by_a_class_with_early_state_then_it_trains_as_a_fresh_one() -> None:
    config = replace(CONFIG, optimizer="torch.optim:Adagrad")
    trained = Trained(config)
    state = trained.saved()
    trained.train(3).load(state, steps_taken=0)
    assert same(trained.train(2).held(), Trained(config).train(2).held())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("torch_foreach", "torch_fused"), ("torch_fused", "torch_foreach"), ("torch_foreach", "torch_foreach")],
)
def test_load_when_another_kernel_of_torchs_saved_it_then_it_trains_on(
    saved_by: str, loaded_by: str, dtype: torch.dtype
) -> None:
    first = Trained(replace(CONFIG, adam=saved_by), dtype).train(3)
    second = Trained(replace(CONFIG, adam=loaded_by), dtype).load(first.saved(), steps_taken=3)
    assert same(
        {name: param.detach() for name, param in second.model.named()},
        {name: param.detach() for name, param in first.model.named()},
    )
    for group in second.optimizer.param_groups:
        assert (bool(group["fused"]), bool(group["foreach"])) == (loaded_by == "torch_fused", not group["fused"])
    first.train(3)
    second.train(3)
    for (_, left), (_, right) in zip(first.model.named(), second.model.named(), strict=True):
        # The two kernels round differently: some ulps of a value near 1, which a bf16 param can turn into one of its.
        tolerance = 0.0 if saved_by == loaded_by else 1e-5 if dtype is torch.float32 else 2.0**-6
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    assert all(float(state["step"]) == 6 for state in second.optimizer.state.values())


def test_load_when_saved_by_another_kind_of_optimizer_then_refused_and_nothing_changes() -> None:
    state = Trained(replace(CONFIG, optimizer="sgd")).train(2).saved()
    assert_says(
        refusal_of(Trained().train(1), state),
        "Invalid optimizer state: of torch_sgd. Must be of torch_foreach. "
        "Choose the inner optimizer of the saved run, by name.",
    )


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "text"),
    [
        (
            "dynamic",
            None,
            "Invalid loss scale in the state: ['good_steps', 'scale', 'tolerated']. Must hold []. "
            "Use the loss_scale option of the saved run.",
        ),
        (
            None,
            "dynamic",
            "Invalid loss scale in the state: []. Must hold ['good_steps', 'scale', 'tolerated']. "
            "Use the loss_scale option of the saved run.",
        ),
    ],
)
def test_load_when_the_loss_scale_is_of_another_kind_then_refused_and_nothing_changes(
    saved_with: str | None, loaded_with: str | None, text: str
) -> None:
    state = Trained(replace(CONFIG, loss_scale=saved_with)).train(2).saved()
    assert_says(refusal_of(Trained(replace(CONFIG, loss_scale=loaded_with)).train(1), state), text)


def _part(state: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = state["param_shards"]["held.wide_bias[0:17]"]
    return part


def _longer_main(state: dict[str, Any]) -> None:
    _part(state)["main"] = torch.zeros(18)


def _shaped_main(state: dict[str, Any]) -> None:
    _part(state)["main"] = torch.zeros(17, 1)


def _shorter_moment(state: dict[str, Any]) -> None:
    _part(state)["cut"]["exp_avg"] = torch.zeros(1)


def _missing_moment(state: dict[str, Any]) -> None:
    del _part(state)["cut"]["exp_avg_sq"]


def _missing_step(state: dict[str, Any]) -> None:
    del _part(state)["whole"]["step"]


@pytest.mark.parametrize("spoil", [_longer_main, _shaped_main, _shorter_moment, _missing_moment, _missing_step])
def test_load_when_shapes_or_keys_of_a_param_are_wrong_then_refused_and_nothing_changes(
    spoil: Callable[[dict[str, Any]], None],
) -> None:
    state = Trained().train(2).saved()
    spoil(state)
    assert_says(
        refusal_of(Trained().train(1), state),
        "Invalid state of held.wide_bias[0:17]: other shapes or keys. "
        "Must hold 1-D tensors of 17 elements and the keys of its group and its optimizer. "
        "Load a state that optimizer.local_state_dict() returned.",
    )


def test_load_when_a_moment_is_missing_in_every_shard_then_refused_and_nothing_changes() -> None:
    state = copy.deepcopy(Trained().train(1).optimizer.local_state_dict())
    for part in state["param_shards"].values():
        del part["cut"]["exp_avg_sq"]
    assert "Must hold 1-D tensors of" in refusal_of(Trained().train(1), state)


def test_load_when_another_model_saved_it_then_refused_and_nothing_changes() -> None:
    state = Trained().train(1).saved()
    del state["param_shards"]["held.scale[0:1]"]
    assert_says(
        refusal_of(Trained(), state),
        "Invalid optimizer state: held.scale[0:1] only in the optimizer. Must hold exactly this rank's param shards. "
        "Load each rank's own state at the data-parallel size at which it was saved.",
    )
    state["param_shards"]["held.other[0:1]"] = {}
    assert_says(
        refusal_of(Trained(), state),
        "Invalid optimizer state: held.other[0:1] only in the state. Must hold exactly this rank's param shards. "
        "Load each rank's own state at the data-parallel size at which it was saved.",
    )


def test_load_when_saved_with_another_number_of_groups_then_refused_and_nothing_changes() -> None:
    model = Params()
    optimizer = distribute(model, CONFIG, param_groups=model.groups())
    assert_says(
        refusal_of(Trained(), optimizer.local_state_dict()),
        "Invalid number of param groups: 2. Must be 1. Build the optimizer with the param groups of the saved run.",
    )


@pytest.mark.parametrize(("state", "got"), [({}, "None"), ({"format": 2}, "2")])
def test_load_when_it_is_of_another_format_then_refused_and_nothing_changes(state: dict[str, Any], got: str) -> None:
    assert_says(
        refusal_of(Trained(), state),
        f"Invalid optimizer state: format {got}. Must be 1. Load a state that optimizer.local_state_dict() returned.",
    )


class Peculiar(Optimizer):
    """Its step is a tensor of one element, as large as a main param of one element, and its keys are our words."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=torch.zeros(1), main=torch.zeros_like(param), cut=0, whole="a text")
                state["step"] += 1
                state["cut"] += 2
                state["main"].mul_(0.5).add_(param.grad)
                param.add_(state["main"], alpha=-group["lr"] / float(state["step"]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_when_the_users_optimizer_has_our_words_as_keys_then_it_round_trips(dtype: torch.dtype) -> None:
    def build() -> Trained:
        model = Params(default=dtype)
        trained = Trained.__new__(Trained)
        trained.model, trained.steps_taken = model, 0
        trained.optimizer = distribute(model, Peculiar(model.groups()), CONFIG)
        return trained

    first = build().train(3)
    state = first.saved()
    second = build().load(state, steps_taken=3)
    assert same(second.held(), first.held())
    part = state["param_shards"]["held.wide_weight[0:527]"]
    assert (sorted(part["cut"]), part["whole"]) == (
        ["main"],
        {"step": torch.tensor([3.0]), "cut": 6, "whole": "a text"},
    )
    assert same(second.train(3).held(), first.train(3).held())


class Alone(torch.nn.Module):
    """One param of one element: its main param is as large as a step that is a tensor of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.only = Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return self.only.square().sum()


def test_load_when_a_param_has_one_element_then_a_step_of_one_element_round_trips() -> None:
    def build() -> tuple[Alone, Any]:
        model = Alone()
        return model, distribute(model, Peculiar(model.parameters()), CONFIG)

    def train(model: Alone, optimizer: Any) -> float:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        return model.only.item()

    model, optimizer = build()
    for _ in range(2):
        train(model, optimizer)
    other, other_optimizer = build()
    other_optimizer.load_local_state_dict(copy.deepcopy(optimizer.local_state_dict()))
    assert [train(other, other_optimizer) for _ in range(3)] == [train(model, optimizer) for _ in range(3)]


def test_load_when_done_then_the_state_that_was_loaded_is_not_the_optimizers_own() -> None:
    first = Trained().train(2)
    state = first.saved()
    kept = copy.deepcopy(state)
    Trained().load(state, steps_taken=2).train(2)
    assert same(state, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_when_written_then_the_file_is_as_large_as_the_shards_and_not_as_the_buffer(dtype: torch.dtype) -> None:
    """Rank 5 of 8, of one large param: an eighth of main params and of two moments."""
    numel, num_shards = 8 * 8192, 8
    layout = lay_out([ParamSpec("wide", numel)], num_shards=num_shards)
    buffer = ShardedBuffer(layout, 5, torch.ones(layout.numel, dtype=dtype), torch.ones(layout.numel, dtype=dtype))
    config = replace(CONFIG, loss_scale=1.0)
    plan = StepPlan(
        groups=[ParamGroup({}, ("wide",))],
        choice=choose_inner(config, "cpu"),
        config=config,
        loss_scale=make_loss_scale(config, torch.device("cpu")),
        stats_group=lambda: ONE_RANK,
    )
    optimizer = ShardedOptimizer([buffer], plan)
    make_step([optimizer], ONE_RANK)
    file = io.BytesIO()
    torch.save(local_state_dict(optimizer), file)
    state_nbytes = numel // num_shards * 4 * 3
    # A few KiB of pickle and zip around them; the buffer alone would be 256 KiB (fp32) or 128 KiB (bf16).
    assert state_nbytes <= len(file.getvalue()) < state_nbytes + 8192


@pytest.mark.parametrize("part", ["inner", "loss_scale", "param_groups", "param_shards"])
def test_load_when_a_part_is_missing_then_refused_by_name(part: str) -> None:
    trained = Trained().train(1)
    state = {key: value for key, value in trained.saved().items() if key != part}
    assert_says(
        refusal_of(trained, state),
        f"Invalid optimizer state: without ['{part}']. Must be whole. "
        "Load a state that optimizer.local_state_dict() returned.",
    )
