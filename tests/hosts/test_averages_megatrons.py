"""Averages of params in the Megatrons: shown and put back, in checkpoints of another layout, and
under evaluation.

Exercises hosts/megatron/averaging.py, session/session_calls.py, session/shown_averages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_distopt.checkpoint.whole_model import WholeModel, owned_pieces
from megatron_distopt.comm import Group
from megatron_distopt.formats import convert
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from tests.support.exact_core import BF16, EXACT, OVERLAPPED, exact_training
from tests.support.mini_fork import InstalledFork, point_to
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks
from tests.support.values import from_ranks

DECAY = 0.75
OURS = (
    f"--use-distributed-optimizer --train-iters 4 --global-batch-size 4 --distopt-ema-decay {DECAY}"
)
FORKS = {
    "bf16, overlapped gather": "--bf16 --distopt-overlap-param-gather --distopt-bucket-size 3000",
    "fp32 norms": "--bf16 --fp32-norms",
    "remainder": "--bf16 --distopt-main-params-dtype remainder",
    "fp16": "--fp16 --initial-loss-scale 1024 --nan-at 2 0",
}
CORES = {
    "bf16, overlapped": BF16.of(dp=2, **OVERLAPPED),
    "fp32": EXACT.of(dp=2),
    "experts": BF16.of(dp=2, num_experts=2, ep=2, fp32_norms=True),
}
#: How many of these run.
CASES = [1, pytest.param(4, marks=pytest.mark.long)]


class _Watched:
    """Compares what an optimizer averages with torch's average of its main params."""

    def __init__(self, sharded: Sequence[ShardedOptimizer]) -> None:
        self._flat_params = [flat for each in sharded for flat in each.flat_params]
        self._averaged: Any = None

    def _mains(self) -> ParameterList:
        return ParameterList(
            [Parameter(as_plain(flat.main.detach()).clone()) for flat in self._flat_params]
        )

    def step(self) -> None:
        """After one that was taken."""
        if self._averaged is None:
            self._averaged = AveragedModel(self._mains(), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self._averaged.update_parameters(self._mains())

    def wrong(self, optimizer: Any, params: Callable[[], Sequence[Tensor]]) -> list[str]:
        """Collective: what is not as it has to be; ranks have the same params."""
        expected = list(self._averaged.module)
        pairs = [
            (flat.average, average)
            for flat, average in zip(self._flat_params, expected, strict=True)
        ]
        found = [] if all(torch.equal(*pair) for pair in pairs) else ["averages"]
        before, mains = [each.detach().clone() for each in params()], self._mains()
        with optimizer.averaged_params():
            shown = [each.detach().clone() for each in params()]
            rounded = [
                torch.equal(flat.model, flat.average.to(flat.model.dtype))
                for flat in self._flat_params
            ]
        found += [] if all(rounded) and not all(map(torch.equal, before, shown)) else ["shown"]
        found += [] if all(map(torch.equal, before, params())) else ["put back"]
        found += [] if all(map(torch.equal, mains, self._mains())) else ["main params"]
        return found


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Collective: whether all ranks have the same."""
    sums = from_ranks([float(each.double().sum()) for each in tensors])
    return all(each == sums[0] for each in sums)


def _whole(model: WholeModel) -> dict[str, Tensor]:
    """Collective: the averages of the whole model, by name."""
    own = [
        (
            piece.placement.name,
            piece.placement.global_shape,
            piece.piece.in_global,
            piece.view(piece.flat.average).clone(),
        )
        for piece in owned_pieces(model)
        if piece.flat.average is not None
    ]
    whole: dict[str, Tensor] = {}
    for name, shape, box, values in (each for of_rank in from_ranks(own) for each in of_rank):
        whole.setdefault(name, torch.full(shape, torch.nan))[box.as_slices()] = values
    return whole


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- a fork of 2023


def _forks(rank: int, size: int, folder: Path, number_of_cases: int) -> dict[str, Any]:
    fork = InstalledFork.imported(file_layout="gathered")
    from megatron_distopt.checkpoint import load_checkpoint
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

    found: dict[str, Any] = {}
    step, watches = DistributedOptimizer.step, dict[int, _Watched]()

    def watched(self: Any, *args: Any) -> Any:
        done = step(self, *args)
        if done[0]:
            watches.setdefault(id(self), _Watched([self.sharded])).step()
        return done

    with mock.patch.object(DistributedOptimizer, "step", watched):
        for number, (name, words) in enumerate(islice(FORKS.items(), number_of_cases)):
            save = f"--save {folder / str(number)} --save-interval 4"
            run = fork.train(*f"{OURS} {words} {save}".split())
            params = lambda run=run: [param for chunk in run.model for param in chunk.parameters()]  # noqa: E731
            found[name] = watches[id(run.optimizer)].wrong(run.optimizer, params)
            saved, alike = _whole(run.optimizer.fork.whole()), _alike(params())
            found[name] += [] if alike else ["ranks differ"]
            with run.optimizer.averaged_params():
                refused = raised(lambda run=run: run.optimizer.step(None, None))
                assert_mentions(refused, "step", "averaged_params()")
                found[name] += [] if _alike(params()) else ["ranks are shown others"]
            run.optimizer.save(folder / f"{number} by hand")
            run.optimizer.finish_saving()
            other = fork.train(*f"{OURS} {words} --tensor-model-parallel-size 2".split()).optimizer
            (manifest,) = (folder / str(number)).rglob("manifest.json")
            load_checkpoint(manifest.parent, other.fork.whole(), Group.of())
            found[name] += (
                [] if _equal(saved, _whole(other.fork.whole())) else ["loaded at another layout"]
            )
            other.reset_state()
            other.load(folder / f"{number} by hand")
            if not _equal(saved, _whole(other.fork.whole())):
                found[name].append("saved and loaded without the script")
            if number == 0:
                found["converted"] = _converted(fork, folder / str(number), run)
            watches.clear()
    found["refusals"] = _refusals(fork)
    found["evaluation"] = _evaluated(fork)
    return found


def _converted(fork: InstalledFork, saved: Path, run: Any) -> list[str]:
    """Collective: the fork itself goes on from averages, with and without which the state is
    written as its own."""
    params = {name: param for chunk in run.model for name, param in chunk.named_parameters()}
    trained = {name: param.detach().clone() for name, param in params.items()}
    with run.optimizer.averaged_params():
        averaged = {name: param.detach().clone() for name, param in params.items()}
    wrong = []
    for is_averaged, expected in ((False, trained), (True, averaged)):
        to = saved.with_name(f"converted {is_averaged}") / "iter_0000004"
        if dist.get_rank() == 0:
            to.parent.mkdir()
            convert(saved / to.name, to, "gathered", dp=2, is_averaged=is_averaged)
        point_to(to.parent, 4)
        own = f"{OURS.partition(' --distopt')[0]} --bf16".split()
        loaded = fork.train(*own, "--load", str(to.parent), ours=False)
        found = {name: param for chunk in loaded.model for name, param in chunk.named_parameters()}
        if not all(torch.equal(found[name], each) for name, each in expected.items()):
            wrong.append(f"averaged is {is_averaged}")
    return wrong


def _refusals(fork: InstalledFork) -> dict[str, tuple[str, str]]:
    words = f"{OURS} --bf16".split()
    host = import_module("megatron.optimizer.distrib_optimizer").DistributedOptimizer
    found = {
        "no function": raised(lambda: fork.train(*words, "--distopt-ema-eval")),
        "gathered": raised(lambda: fork.train(*words, "--distopt-checkpoint-format", "gathered")),
        "no decay": raised(lambda: fork.train(*words[:-3], "--bf16", "--distopt-ema-eval")),
    }
    gathers, _ = host.save_parameter_state, delattr(host, "save_parameter_state")
    found["per-rank"] = raised(lambda: fork.train(*words))
    host.save_parameter_state = gathers
    return found


def _evaluated(fork: InstalledFork) -> list[str]:
    """With an `evaluate` like the forks' own, which says what params it sees."""
    code = (
        "def evaluate(forward_step_func, data_iterator, model, verbose=False): return [*map(seen, "
        "model)]"
    )
    vars(fork.training)["seen"] = lambda chunk: [
        param.detach().clone() for param in chunk.parameters()
    ]
    exec(code, vars(fork.training))
    run = fork.train(*f"{OURS} --bf16 --distopt-ema-eval".split())
    trained = fork.training.seen(run.model[0])
    with run.optimizer.averaged_params():
        averaged = fork.training.seen(run.model[0])
    own = vars(fork.training)["evaluate"].original
    (seen,) = fork.training.evaluate(None, None, run.model)
    fork.uninstall()
    wrong = [] if all(map(torch.equal, seen, averaged)) else ["not averaged"]
    wrong += (
        [] if all(map(torch.equal, trained, fork.training.seen(run.model[0]))) else ["not put back"]
    )
    return wrong + ([] if fork.training.evaluate is own else ["evaluate is still replaced"])


@pytest.mark.parametrize("number_of_cases", CASES)
def test_averages_when_in_a_fork_then_those_of_torch_in_model_checkpoint_and_evaluation(
    number_of_cases: int, tmp_path: Path
) -> None:
    for found in run_ranks(_forks, 2, tmp_path, number_of_cases):
        refusals = found.pop("refusals")
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        assert_mentions(refusals["no function"], "megatron.training.evaluate", "missing")
        assert_mentions(refusals["gathered"], "ema_decay", "checkpoint_format")
        assert_mentions(refusals["no decay"], "ema_eval", "ema_decay=0.999")
        assert_mentions(refusals["per-rank"], "ema_decay", "23.06")


# --- megatron-core


def _cores(rank: int, size: int, folder: Path, number_of_cases: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in islice(CORES.items(), number_of_cases):
        with exact_training(case, EMA_DECAY=str(DECAY)) as training:
            optimizer = training.optimizer
            watch = _Watched(optimizer.started().host.optimizers)
            for _ in range(3):
                assert training.step().success
                watch.step()
            params = lambda training=training: list(training.params().values())  # noqa: E731
            found[name] = watch.wrong(optimizer, params)
            with optimizer.averaged_params():
                found[name] += (
                    [] if name == "experts" or _alike(params()) else ["ranks are shown others"]
                )
                assert_mentions(raised(optimizer.step), "step", "averaged_params()")
                assert_mentions(raised(partial(optimizer.save, folder)), "averaged_params()")
            optimizer.offload_to_cpu()
            optimizer.restore_from_cpu()
            saved = _whole(optimizer.started().host.whole())
            optimizer.save(folder / name)
        with exact_training(
            case.of(dp=1, tp=2, ep=1) if name != "experts" else case, EMA_DECAY=str(DECAY)
        ) as other:
            other.optimizer.load(folder / name)
            found[name] += (
                []
                if _equal(saved, _whole(other.optimizer.started().host.whole()))
                else ["loaded at another layout"]
            )
    return found


@pytest.mark.parametrize("number_of_cases", CASES)
def test_averages_when_in_megatron_core_then_those_of_torch_in_model_and_checkpoint(
    number_of_cases: int, tmp_path: Path
) -> None:
    for found in run_ranks(_cores, 2, tmp_path, number_of_cases, core=True):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
