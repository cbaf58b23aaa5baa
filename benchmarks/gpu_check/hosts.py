"""Is a training right inside a Megatron here? Against the optimizers that megatron-core and a fork
of 2023 have."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from peers.ranks import exchange, failure_of_any
from peers.transformer import TrainSetting, batch, transformer

from gpu_check import ROOT
from gpu_check.checks import Check, Found, Place, SkipError, WrongError

T = TypeVar("T")

STEPS = 8
_KINDS = ("plain", "distributed", "ours")
#: Relative, of the loss and of the norm of the gradient: bf16 params that are rounded the other
#: way.
_LOSS, _NORM = 5e-3, 5e-2
#: Names the folder of the megatron-core on which the small fork of 2023 stands.
_FORK_CORE_VARIABLE = "MINI_FORK_CORE"
_FORK = ROOT / "tests" / "hosts" / "mini_fork"
_FORK_WORDS = ("--bf16", "--use-distributed-optimizer", "--train-iters", str(STEPS))


@dataclass(frozen=True)
class Curve:
    """A training."""

    losses: tuple[float, ...]  # by step, the mean of all ranks
    norms: tuple[float, ...]  # of the gradient


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(ours / theirs - 1) for ours, theirs in zip(one, other, strict=True))


# megatron-core


def megatron_core(place: Place) -> Found:
    """The same transformer under its DistributedDataParallel with its two optimizers, and with ours
    in their place."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise SkipError("megatron-core is not installed")
    curves: dict[str, Curve] = {}
    for kind in _KINDS:
        place.say(kind)
        train = partial(_core_training, kind, place)
        curves[kind] = (
            train() if kind == "ours" else _theirs(f"megatron-core's own {kind} optimizer", train)
        )
    version = import_module("megatron.core").__version__
    figures = {"version": version, "losses": {kind: curve.losses for kind, curve in curves.items()}}
    ours = curves.pop("ours")
    found = {
        kind: (_apart(ours.losses, each.losses), _apart(ours.norms, each.norms))
        for kind, each in curves.items()
    }
    said = "; ".join(
        f"from its {kind} one: loss {loss:.1e}, norm {norm:.1e}"
        for kind, (loss, norm) in found.items()
    )
    if any(loss > _LOSS or norm > _NORM for loss, norm in found.values()):
        raise WrongError(
            f"{version}, {said}; at most {_LOSS:g} and {_NORM:g} is rounding: {figures['losses']}"
        )
    return Found(f"{version}, bf16, {STEPS} steps, both overlaps; {said}", figures)


def _theirs(name: str, train: Callable[[], T]) -> T:
    """Collective: a training with an optimizer of the host's.

    Raises:
        SkipError: it does not run on this device, so that there is nothing to compare with.
    """
    found: list[T] = []
    if why_not := failure_of_any(lambda: found.append(train())):
        raise SkipError(f"{name} does not run here: {why_not}")
    return found[0]


def _core_training(kind: str, place: Place) -> Curve:
    from peers.core_optimizer import CoreOptimizer

    setting = TrainSetting(2, 128, 256, 32, 2, 100_000, place.rank, place.size, str(place.device))
    core = CoreOptimizer(transformer(setting), bucket_size=setting.bucket_size, kind=kind)
    losses, norms = [], []
    try:
        for step in range(STEPS):
            core.zero_grad()
            loss = core.model(batch(setting, step))
            loss.backward()
            core.model.finish_grad_sync()
            _, norm, _ = core.optimizer.step()
            losses.append(sum(exchange(float(loss.detach()))) / place.size)
            norms.append(float(norm))
        if kind != "plain":
            core.model.start_param_sync(force_sync=True)
    finally:
        core.close()
    return Curve(tuple(losses), tuple(norms))


# A Megatron of 2023


def megatron_2023(place: Place) -> Found:
    """The small fork of the tests: its own distributed optimizer, and ours in its place."""
    fork = _fork(place)
    place.say("its own")
    theirs = _theirs("its own distributed optimizer", lambda: fork.train(*_FORK_WORDS, ours=False))
    place.say("ours")
    ours = fork.train(*_FORK_WORDS, ours=True)
    # The fork writes its curves on the first rank.
    losses = [exchange(run.losses)[0] for run in (ours, theirs)]
    norms = [exchange([each.grad_norm for each in run.iterations])[0] for run in (ours, theirs)]
    loss, norm = _apart(*losses), _apart(*norms)
    said = f"from its distributed optimizer: loss {loss:.1e}, norm {norm:.1e}"
    if loss > _LOSS or norm > _NORM:
        raise WrongError(f"{said}; at most {_LOSS:g} and {_NORM:g} is rounding: {losses}")
    figures = {"version": "`tests/hosts/mini_fork`", "losses": losses}
    return Found(f"gathered files, bf16, {STEPS} steps; {said}", figures)


def _fork(place: Place) -> Any:
    """
    Raises:
        SkipError: it is not there.
    """
    if not _FORK.exists():
        raise SkipError("the small fork of 2023 is part of a checkout of the repository only")
    support = import_module("tests.support.mini_fork")
    folder = os.environ.get(_FORK_CORE_VARIABLE)
    if folder is None or not (Path(folder) / "megatron").exists():
        raise SkipError(
            "megatron-core 0.2.0, on which the small fork of 2023 stands, could not be installed"
        )
    os.environ["MINI_FORK_DEVICE"] = place.device.type
    support.core_folder = lambda: Path(folder)
    return support.MiniFork.imported()


CHECKS = (
    Check(
        "megatron_core",
        "a training in megatron-core agrees with its own optimizers",
        megatron_core,
        limit=120,
    ),
    Check(
        "megatron_2023",
        "a training in a Megatron of 2023 agrees with its own optimizer",
        megatron_2023,
        limit=120,
        is_separate=True,
    ),
)
