"""Verdicts about recorded trainings of a small network, each broken in one way.

The trainings are real ones, of one process and without a Megatron: bf16 or fp32 weights, fp32 main
params, AdamW with clipping. What a fault does to a loss, to a norm and to weights that round, and
how fast rounding itself spreads, is therefore as it is in a host.

Exercises cli/verdict.py.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_distopt.cli.compare_verdict import Outcome, differences, judge
from megatron_distopt.cli.recorded_run import RecordedRun
from megatron_distopt.errors import ConfigError
from megatron_distopt.plugin.recording import RecordedParam

#: As far as a norm moves when it is added up in another order.
_ROUNDING = 1e-7


@dataclass
class Training:
    """A training, and what is wrong with it."""

    dtype: torch.dtype = torch.float32  # of the weights
    seed: int = 0  # of weights, data and dropout
    iterations: int = 8
    lr: float = 3e-3
    lr_of_biases: float = 1.0  # times the others'
    weight_decay: float = 0.1
    undecayed: Sequence[str] = ("fc1.bias",)
    decays_half: str = ""  # param of which a half is not decayed
    decays_gradient: bool = False  # L2 in the place of a decay that is decoupled
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    corrects_bias: bool = True
    clip_grad: float = 0.05
    order: float = 0.0  # relative change of the norm by another order of adding up
    norm: float = 1.0  # times the right one
    clips_twice: bool = False
    loses_a_rank: bool = False  # in the average of gradients, the norm included
    halves: int = 0  # each so many steps the gradient is half
    flips: int = 0  # signs of so many elements of the gradient
    rounds_mains: bool = False
    forgets_moment: bool = False
    rounds_moment: bool = False
    stale_at: int = 0  # step whose new params do not arrive at the other half of the weights
    not_updated: bool = False  # the half of the weights that another rank owns
    late_lr: bool = False  # a step uses the learning rate of the one before
    loss: float = 1.0  # times the right one
    dropout_seed: int = 0  # of a host that drops out, where it is not 0
    data_seed: int = 0
    skips: bool = False
    scale: float = 1.0

    def run(self, folder: Path) -> RecordedRun:
        """Trains, and writes what the recorder writes."""
        noise = torch.Generator().manual_seed(self.seed)
        shapes = {"fc1.weight": (96, 24), "fc1.bias": (96,), "fc2.weight": (8, 96)}
        mains = {name: torch.randn(shape, generator=noise) * 0.1 for name, shape in shapes.items()}
        data = torch.Generator().manual_seed(1000 + self.data_seed)
        models = {name: main.to(self.dtype) for name, main in mains.items()}
        moments = {
            name: (torch.zeros_like(each), torch.zeros_like(each)) for name, each in mains.items()
        }
        sizes = [
            RecordedParam(
                name,
                numel=each.numel(),
                sampled=each.numel(),
                is_matrix=each.ndim > 1,
                epsilon=_epsilon(each),
                grad_epsilon=_epsilon(mains[name]),
            )
            for name, each in models.items()
        ]
        lines: list[Any] = [[asdict(size) for size in sizes]]
        for step in range(1, self.iterations + 1):
            inputs = torch.randn(64, 24, generator=data).to(self.dtype)
            loss, grads = self._gradients(models, inputs, step)
            norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
            norm *= self.norm * (1 + self.order)
            lines.append(self._line(step, loss, norm, models, mains))
            if not self.skips:
                self._update(step, mains, models, moments, grads, norm)
        folder.mkdir(parents=True)
        (folder / "000000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RecordedRun(folder)

    def _gradients(
        self, models: Mapping[str, Tensor], inputs: Tensor, step: int
    ) -> tuple[float, dict[str, Tensor]]:
        params = {name: model.clone().requires_grad_() for name, model in models.items()}
        hidden = torch.tanh(inputs @ params["fc1.weight"].T + params["fc1.bias"])
        if self.dropout_seed:
            drawn = torch.Generator().manual_seed(1000 * self.dropout_seed + step)
            hidden = hidden * (torch.rand(hidden.shape, generator=drawn) > 0.1)
        outputs = (hidden @ params["fc2.weight"].T).float()
        loss = 5.0 + (outputs - torch.sin(3 * inputs[:, :8].float())).square().mean()
        loss.backward()
        grads = {
            name: param.grad.float() for name, param in params.items() if param.grad is not None
        }
        if self.loses_a_rank:
            grads = {name: grad * 0.7 for name, grad in grads.items()}
        return float(loss.detach()) * self.loss, grads

    def _update(
        self,
        step: int,
        mains: Mapping[str, Tensor],
        models: dict[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        grads: Mapping[str, Tensor],
        norm: float,
    ) -> None:
        clip = min(1.0, self.clip_grad / norm) if self.clip_grad else 1.0
        clip = clip**2 if self.clips_twice else clip
        beta1, beta2 = self.betas
        lr_now = self.lr * (1.2 - 0.1 * (step - self.late_lr))
        for name, main in mains.items():
            before, lr = main.clone(), lr_now * (self.lr_of_biases if main.ndim == 1 else 1.0)
            grad, decay = grads[name] * clip, 0.0 if name in self.undecayed else self.weight_decay
            if self.halves and step % self.halves == 0:
                grad = grad * 0.5
            grad.view(-1)[: self.flips].neg_()
            if self.decays_gradient:
                grad, decay = grad + decay * main, 0.0
            first, second = moments[name]
            if self.forgets_moment:
                first.zero_()
            first.lerp_(grad, 1 - beta1)
            if self.rounds_moment:
                first.copy_(first.bfloat16())
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            corrections = (1 - beta1**step, 1 - beta2**step) if self.corrects_bias else (1.0, 1.0)
            main.mul_(1 - lr * decay)
            if name == self.decays_half:
                half = main.view(-1)[: main.numel() // 2]
                half.div_(1 - lr * decay)
            main.sub_(lr * (first / corrections[0]) / ((second / corrections[1]).sqrt() + self.eps))
            if self.rounds_mains:
                main.copy_(main.bfloat16())
            others = slice(main.numel() // 2, None)
            if self.not_updated:
                main.view(-1)[others] = before.view(-1)[others]
            models[name] = main.to(self.dtype)
            if self.stale_at == step:
                models[name].view(-1)[others] = before.to(self.dtype).view(-1)[others]

    def _line(
        self,
        step: int,
        loss: float,
        norm: float,
        models: Mapping[str, Tensor],
        mains: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        is_fp32 = self.dtype is torch.float32
        integer = torch.int32 if is_fp32 else torch.int16
        values = torch.cat([model.flatten().float() for model in models.values()])
        main_values = torch.cat([main.flatten() for main in mains.values()])
        if is_fp32:
            main_values.fill_(math.nan)
        return {
            "started": float(step),
            "loss": loss,
            "norm": norm,
            "loss_scale": self.scale,
            "skipped": self.skips,
            "memory": 1 << 30,
            "bits": [int(each.view(integer).sum(dtype=torch.int64)) for each in models.values()],
            "sample": base64.b64encode(values.numpy().tobytes()).decode(),
            "mains": base64.b64encode(main_values.numpy().tobytes()).decode(),
        }


def _epsilon(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps)


#: What a Megatron or this package could do wrong, and the words that say where to look.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a learning rate 1 % too large": ({"lr": 3.03e-3}, "learning rate"),
    "a learning rate half too large": ({"lr": 4.5e-3}, "learning rate"),
    "another learning rate of biases": ({"lr_of_biases": 1.5}, ""),
    "the learning rate of the step before": ({"late_lr": True}, "learning rate"),
    "no decay": ({"weight_decay": 0.0}, ""),
    "a weight that is not decayed": (
        {"undecayed": ("fc1.bias", "fc1.weight")},
        "weight decay and param group of fc1.weight",
    ),
    "half a weight that is not decayed": ({"decays_half": "fc1.weight"}, "fc1.weight"),
    "biases that are decayed": ({"undecayed": ()}, ""),
    "decay in the gradient": ({"decays_gradient": True}, ""),
    "another norm": ({"norm": 1.005}, "norm"),
    "no clipping": ({"clip_grad": 0.0, "eps": 1e-4}, ""),
    "clipping twice": ({"clips_twice": True}, ""),
    "another beta1": ({"betas": (0.91, 0.95)}, "moments"),
    "another beta2": ({"betas": (0.9, 0.96)}, "moments"),
    "another epsilon": ({"eps": 1e-5}, ""),
    "no bias correction": ({"corrects_bias": False}, "learning rate"),
    "an average without a rank": ({"loses_a_rank": True}, "the sum of gradients over ranks"),
    "half the gradient of each second step": ({"halves": 2}, "moments"),
    "signs of some elements": ({"flips": 40}, ""),
    "params of another rank not updated": ({"not_updated": True}, ""),
    "a gather that came too late once": ({"stale_at": 2}, ""),
    "main params that are rounded": ({"rounds_mains": True}, ""),
    "moments that are forgotten": ({"forgets_moment": True}, "moments"),
    "a moment that is rounded": ({"rounds_moment": True}, ""),
    "another loss": ({"loss": 1.001}, "forward pass"),
    "another loss scale": ({"scale": 2.0}, "overflow"),
}


class Hosts:
    """The runs of a host, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, RecordedRun] = {}

    def run(self, **changes: Any) -> RecordedRun:
        key = repr(sorted(changes.items(), key=str))
        if key not in self._runs:
            folder = self._folder / str(len(self._runs))
            self._runs[key] = Training(**changes).run(folder)
        return self._runs[key]

    def yardsticks(self, **changes: Any) -> list[RecordedRun]:
        """The undistributed optimizer, and another learning rate by as much as rounding."""
        lr = Training().lr * (1 + 2.0**-19)
        return [self.run(**changes, order=2 * _ROUNDING), self.run(**changes, lr=lr)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_verdict_when_something_is_broken_then_says_so_and_where_to_look(
    hosts: Hosts, fault: str, dtype: torch.dtype
) -> None:
    changes, look = FAULTS[fault]
    own = hosts.run(dtype=dtype)
    ours = hosts.run(dtype=dtype, order=_ROUNDING, **changes)
    outcome, sentence = judge(own, ours, *hosts.yardsticks(dtype=dtype))
    assert outcome is Outcome.DIFFERENT, sentence
    if dtype is torch.float32:
        assert look in sentence


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_verdict_when_only_rounding_differs_then_is_equal_but_for_it(
    hosts: Hosts, dtype: torch.dtype, seed: int
) -> None:
    own, yardsticks = hosts.run(dtype=dtype, seed=seed), hosts.yardsticks(dtype=dtype, seed=seed)
    for order in (_ROUNDING, -_ROUNDING, 3 * _ROUNDING):
        outcome, sentence = judge(own, hosts.run(dtype=dtype, seed=seed, order=order), *yardsticks)
        assert outcome is Outcome.SAME, sentence
        assert "Equal" in sentence
    assert judge(own, hosts.run(dtype=dtype, seed=seed))[1].startswith("Equal to the bit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("what", ["seed", "dropout_seed", "data_seed"])
def test_verdict_when_the_host_does_not_seed_something_then_is_none_whatever_ours_does(
    hosts: Hosts, what: str, dtype: torch.dtype
) -> None:
    own, again = (hosts.run(dtype=dtype, **{what: seed}) for seed in (11, 12))
    for changes in ({}, {"lr": 4.5e-3}):
        ours = hosts.run(dtype=dtype, **{what: 13}, **changes)
        outcome, sentence = judge(own, ours, again)
        assert outcome is Outcome.NONE, sentence
        assert "the host's own two runs differ" in sentence
        assert "set dropout to 0" in sentence
        assert judge(own, ours)[0] is not Outcome.SAME


def test_verdict_when_a_yardstick_is_wide_then_bounds_with_a_reason_still_hold(
    hosts: Hosts,
) -> None:
    own, wide = hosts.run(), hosts.run(order=1.4e-5)
    assert judge(own, hosts.run(norm=1 + 5e-5), wide)[0] is Outcome.DIFFERENT
    assert judge(own, hosts.run(lr=3.003e-3), wide)[0] is Outcome.DIFFERENT


@pytest.mark.parametrize(
    ("numel", "norm", "outcome"),
    [
        (1 << 10, 1 + 5e-5, Outcome.DIFFERENT),
        (1 << 22, 1 + 5e-5, Outcome.SAME),  # torch's norm of so many elements was off by 8.6e-5
        (1 << 22, 1 + 2e-4, Outcome.DIFFERENT),
    ],
)
def test_verdict_when_a_param_is_large_then_its_norm_may_round_more(
    numel: int, norm: float, outcome: Outcome, tmp_path: Path
) -> None:
    own = Training().run(tmp_path / "own")
    ours = Training(norm=norm).run(tmp_path / "ours")
    for run in (own, ours):
        run.params[0] = replace(run.params[0], numel=numel)
    found, sentence = judge(own, ours)
    assert found is outcome, sentence


def test_verdict_when_only_main_params_differ_then_finds_what_16_bits_round_off(
    hosts: Hosts,
) -> None:
    own, ours = (
        hosts.run(dtype=torch.bfloat16),
        Training(dtype=torch.bfloat16).run(hosts._folder / "mains"),
    )
    yardsticks = hosts.yardsticks(dtype=torch.bfloat16)
    mains, start = ours.mains(1), ours.mains(0)
    ours.steps[1][0]["mains"] = _as_text(mains + 1e-3 * (mains - start))
    outcome, sentence = judge(own, ours, *yardsticks)
    assert outcome is Outcome.DIFFERENT
    assert "update of main params apart" in sentence and "at iteration 2" in sentence
    missing = _as_text(np.full_like(mains, math.nan))
    for step in ours.steps:
        step[0]["mains"] = missing  # another rank has them
    assert judge(own, ours, *yardsticks)[1].startswith("Equal to the bit")


def _as_text(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.astype(np.float32).tobytes()).decode()


def test_verdict_when_main_params_begin_otherwise_then_the_checkpoint_is_named(
    hosts: Hosts,
) -> None:
    own = hosts.run(dtype=torch.bfloat16)
    ours = Training(dtype=torch.bfloat16).run(hosts._folder / "begin")
    for step, number in zip(ours.steps, range(len(ours.steps)), strict=True):
        mains = ours.mains(number)
        mains[0] += 1e-5
        step[0]["mains"] = _as_text(mains)
    outcome, sentence = judge(own, ours, *hosts.yardsticks(dtype=torch.bfloat16))
    assert outcome is Outcome.DIFFERENT
    assert "main params apart" in sentence and "checkpoint of the start" in sentence


def test_verdict_when_runs_begin_with_other_weights_then_only_the_host_tells_whose_they_are(
    hosts: Hosts,
) -> None:
    own, ours = hosts.run(), hosts.run(seed=1)
    outcome, sentence = judge(own, ours)
    assert outcome is Outcome.NONE and "do not start with equal weights" in sentence
    outcome, sentence = judge(own, ours, *hosts.yardsticks())
    assert outcome is Outcome.DIFFERENT and "checkpoint of the start" in sentence


def test_verdict_when_a_value_is_not_finite_in_one_run_then_is_not_the_same(hosts: Hosts) -> None:
    own = hosts.run()
    outcome, sentence = judge(own, hosts.run(norm=math.nan))
    assert outcome is Outcome.DIFFERENT and "gradient norm apart by nan" in sentence
    outcome, sentence = judge(own, hosts.run(loss=math.nan), *hosts.yardsticks())
    assert outcome is Outcome.DIFFERENT and "loss apart by nan at iteration 1" in sentence


def test_verdict_when_a_difference_is_in_no_sample_then_is_not_equal_to_the_bit(
    hosts: Hosts,
) -> None:
    own, ours = hosts.run(), Training().run(hosts._folder / "unsampled")
    step = ours.steps[3][0]
    step["bits"][0] += 1
    outcome, sentence = judge(own, ours)
    assert outcome is Outcome.SAME and sentence.startswith("Equal but for rounding")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({"skips": True}, "--initial-loss-scale"), ({"lr": 0.0}, "--lr-warmup-iters 0")],
)
def test_verdict_when_the_host_updates_nothing_then_the_reason_is_named(
    hosts: Hosts, changes: dict[str, Any], remedy: str
) -> None:
    still = hosts.run(scale=65536.0, **changes)
    with pytest.raises(ConfigError, match=f"Write more --iterations, or {remedy}"):
        judge(still, still)


def test_verdict_when_runs_have_other_iterations_then_is_refused(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="other ranks, params or iterations"):
        differences(hosts.run(), hosts.run(iterations=3))
