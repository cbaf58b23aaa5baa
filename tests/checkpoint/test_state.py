"""The state of one rank: training goes on from it bit for bit, whatever the optimizer keeps."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import CheckpointError
from tests.support.models import Params, exact_grads, stepped
from tests.support.values import same

CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)
DTYPES = (torch.float32, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("one_rank")


class Trained:
    """A model of `Params` with its optimizer."""

    def __init__(
        self, config: DistOptConfig = CONFIG, dtype: torch.dtype = torch.float32, **how: Any
    ) -> None:
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

    def save(self, folder: Path) -> Trained:
        self.optimizer.save(folder)
        return self

    def load(self, folder: Path, steps_taken: int) -> Trained:
        self.optimizer.load(folder)
        self.steps_taken = steps_taken
        return self

    def held(self) -> dict[str, Any]:
        """Model and whole state, as copies."""
        params = {name: param.detach().clone() for name, param in self.model.named()}
        return {"params": params, "state": copy.deepcopy(self.optimizer.state_dict())}


@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, optimizer="torch.optim:Adagrad")], ids=["adam", "adagrad"]
)
def test_load_when_saved_before_the_first_step_then_it_trains_as_a_fresh_optimizer(
    config: DistOptConfig, tmp_path: Path
) -> None:
    """Adagrad has a state from the start."""
    dtype = torch.bfloat16
    trained = Trained(config, dtype).save(tmp_path).train(3)
    assert trained.optimizer.sharded.inner.state
    trained.load(tmp_path, steps_taken=0)
    assert same(trained.held(), Trained(config, dtype).held())
    assert same(trained.train(2).held(), Trained(config, dtype).train(2).held())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("torch_foreach", "torch_fused"), ("torch_foreach", "torch_foreach")],
)
def test_load_when_another_kernel_of_torchs_saved_it_then_it_trains_on(
    saved_by: str, loaded_by: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    first = Trained(replace(CONFIG, adam=saved_by), dtype).train(3).save(tmp_path)
    second = Trained(replace(CONFIG, adam=loaded_by), dtype).load(tmp_path, steps_taken=3)
    assert same(
        {name: param.detach() for name, param in second.model.named()},
        {name: param.detach() for name, param in first.model.named()},
    )
    for group in second.optimizer.param_groups:
        assert (bool(group["fused"]), bool(group["foreach"])) == (
            loaded_by == "torch_fused",
            not group["fused"],
        )
    first.train(3)
    second.train(3)
    for (_, left), (_, right) in zip(first.model.named(), second.model.named(), strict=True):
        # The two kernels round differently: some ulps of a value near 1, which a bf16 param can
        # turn into one of its.
        tolerance = 0.0 if saved_by == loaded_by else 1e-5 if dtype is torch.float32 else 2.0**-6
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    assert all(float(state["step"]) == 6 for state in second.optimizer.state.values())


def test_load_when_saved_by_another_kind_of_optimizer_then_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    Trained(replace(CONFIG, optimizer="sgd")).train(2).save(tmp_path)
    trained = Trained().train(1)
    before = trained.held()
    with pytest.raises(
        CheckpointError, match=r"state of SGD, but the optimizer of this run is Adam"
    ):
        trained.load(tmp_path, 0)
    assert same(trained.held(), before)
