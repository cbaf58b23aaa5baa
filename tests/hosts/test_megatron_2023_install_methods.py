"""The three install methods for a fork of 2023: the runner, the library and the entry point, on the
small fork.

Exercises plugin/entry_point.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

import megatron_distopt
from megatron_distopt import DistOptConfig
from megatron_distopt.cli.main import main
from megatron_distopt.version import VERSION
from tests.support.facts import Facts, facts_of
from tests.support.mini_fork import FOLDER, Launched, MiniFork, TrainingRun, core_folder, launch
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks

SIZE = 2
_ROOT = Path(__file__).parents[2]
_FLAG, _BF16 = "--use-distributed-optimizer", "--bf16"
_OURS = "megatron_distopt.hosts.megatron_2023.optimizer"
_THEIRS = "megatron.optimizer.distrib_optimizer"
_ACTIVE = f"megatron_distopt {VERSION} is active in "


@dataclass(frozen=True)
class Curves:
    """What a training left."""

    losses: list[float]  # by iteration
    params: list[Mapping[str, str]]  # checksums, by rank and name
    optimizers: list[str]  # module of the class, by rank

    @classmethod
    def of(cls, file: Path) -> Curves:
        curves = json.loads(file.read_text())
        ranks = curves["ranks"]
        losses = [each["loss"] for each in curves["iterations"]]
        return cls(
            losses, [rank["params"] for rank in ranks], [rank["optimizer_module"] for rank in ranks]
        )


def _block_in(output: str) -> list[str]:
    """The start-up block, which must be there once."""
    assert output.count(_ACTIVE) == 1, output
    lines = output[output.index(_ACTIVE) :].splitlines()
    return [
        lines[0],
        *itertools.takewhile(lambda line: re.match(r"  [a-z]+ {2,}\S", line), lines[1:]),
    ]


@dataclass(frozen=True)
class Done:
    """A training that a launcher has started and that has ended."""

    launched: Launched
    curves: Curves


#: By launcher: flags and environment; deepspeed starts a fork whose flags have underscores.
LAUNCHED: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "deepspeed": (
        ("--use_distributed_optimizer", "--distopt_nonfinite", "skip"),
        {"MINI_FORK_FILE_LAYOUT": "per_rank", "MINI_FORK_FLAGS": "underscore"},
    ),
    "torchrun": ((_FLAG, "--distopt-nonfinite=skip"), {}),
}
#: test_runner.py has torchrun, with megatron-core.
LAUNCHERS = ["deepspeed", pytest.param("torchrun", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=LAUNCHERS)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Done]:
    """Name of the launcher, and what it did."""
    launcher, file = request.param, tmp_path_factory.mktemp("curves") / "curves.json"
    flags, environment = LAUNCHED[launcher]
    words = ["-m", "megatron_distopt", "pretrain.py", _BF16, *flags, "--curves", str(file)]
    environment = {
        "MEGATRON_DISTOPT": "require",
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{FOLDER}",
        **environment,
    }
    done = launch(launcher, SIZE, words, environment=environment, seconds=240.0)
    assert file.exists(), done.output
    return launcher, Done(done, Curves.of(file))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the fork that asks for entry points."""
    folder = tmp_path_factory.mktemp("fork") / "mini_fork"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "conftest.py"))
    assert main(["patch", "--apply", str(folder)]) == 0
    return folder


def by_entry_point(rank: int, size: int, patched: Path, installs: bool) -> tuple[list[str], str]:
    """Modules of the optimizers of our training and of one that is switched off, and what was
    printed; nothing is installed by hand, but for `installs`: then before the fork is imported,
    with options."""
    os.environ["MEGATRON_DISTOPT"] = "require"
    if installs:
        sys.path.insert(0, str(patched))
        os.environ |= {"MINI_FORK_CORE": str(core_folder()), "MINI_FORK_NATIVE": "1"}
        megatron_distopt.install(DistOptConfig(nonfinite="skip"))
    fork, printed = MiniFork.imported(folder=patched, file_layout="gathered"), io.StringIO()
    words = (_BF16, _FLAG, "--train-iters", "1")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        runs = [fork.train(*words, ours=False)]
        if not installs:
            with mock.patch.dict(os.environ, MEGATRON_DISTOPT="0"):
                runs.append(fork.train(*words, "--distopt-nonfinite", "skip", ours=False))
    return [type(run.optimizer).__module__ for run in runs], printed.getvalue()


Found = tuple[Curves, Curves, Mapping[str, object]]


def collect_facts(rank: int, size: int) -> Found:
    """Our curves, those of the fork's own optimizer, and facts; the first before the training
    module is imported."""
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    os.environ["MINI_FORK_CORE"], os.environ["MINI_FORK_NATIVE"] = str(core_folder()), "1"
    facts: dict[str, object] = {}
    sys.path.insert(0, str(FOLDER))
    installation = megatron_distopt.install()
    facts["not yet imported"] = "megatron.training" not in sys.modules
    training, factory = import_module("megatron.training"), import_module("megatron.optimizer")
    factory_of_ours = factory.get_megatron_optimizer
    facts["imported ours"] = (
        training.get_megatron_optimizer is factory_of_ours and factory_of_ours.original.__name__
    )
    installation.undo()

    fork = MiniFork.imported(file_layout="gathered")
    runs = {
        "their optimizer": fork.train(_BF16, _FLAG, ours=False),
        "our optimizer": fork.train(_BF16, _FLAG),
    }
    facts |= {name: type(run.optimizer).__module__ for name, run in runs.items()}
    theirs, ours = map(_curves_of, runs.values())
    # In a fork whose training module imports our function in place of its own.
    with mock.patch.object(
        training, "get_megatron_optimizer", megatron_distopt.get_megatron_optimizer
    ):
        run = fork.train(_BF16, _FLAG, ours=False)
        facts["called directly"] = (type(run.optimizer).__module__, _curves_of(run) == ours)
    with_l2 = functools.partial(
        megatron_distopt.get_megatron_optimizer, options=DistOptConfig(decay="l2")
    )
    with mock.patch.object(training, "get_megatron_optimizer", with_l2):
        short = fork.train(_BF16, _FLAG, "--train-iters", "1", ours=False)
        facts["called with options"] = short.optimizer.sharded.config.decay
    said: list[str] = []
    with mock.patch("megatron_distopt.hosts.megatron.flag.announce", said.append):
        alone, beside = (fork.train(_BF16, ours=ours) for ours in (False, True))
    facts["said without the flag"] = said
    facts["without the flag"] = (
        _curves_of(alone) == _curves_of(beside) and type(beside.optimizer).__name__
    )
    with mock.patch.dict(os.environ, MEGATRON_DISTOPT="0"):
        run = fork.train(_BF16, _FLAG, "--distopt-nonfinite", "skip")
    facts["switched off"] = _curves_of(run) == theirs and run.args.distopt_nonfinite
    with mock.patch.dict(os.environ, MEGATRON_DISTOPT="require"):
        facts["required without the flag"] = raised(lambda: fork.train(_BF16))
    return ours, theirs, facts


def _curves_of(run: TrainingRun) -> Curves:
    sha256 = import_module("megatron.training")._sha256
    params = {name: sha256(param) for name, param in run.params.items()}
    return Curves(run.losses, [params], [type(run.optimizer).__module__])


facts = facts_of(collect_facts, SIZE, before=core_folder)


@pytest.fixture(scope="module")
def ours(facts: Facts) -> Curves:
    """Of the library on all ranks, as rank 0 writes the curves down."""
    curves = [each for each, _, _ in facts.by_rank]
    return Curves(
        curves[0].losses,
        [each.params[0] for each in curves],
        [each.optimizers[0] for each in curves],
    )


FACTS: dict[str, object] = {
    "not yet imported": True,
    "imported ours": "get_megatron_optimizer",
    "their optimizer": _THEIRS,
    "our optimizer": _OURS,
    "called directly": (_OURS, True),
    "called with options": "l2",
    "without the flag": "Float16OptimizerWithFloat16Params",
    "switched off": "skip",
}


@pytest.mark.parametrize("name", FACTS)
def test_as_library_when_used_in_a_fork_of_2023_then_as_promised(facts: Facts, name: str) -> None:
    assert [named[name] for _, _, named in facts.by_rank] == [FACTS[name]] * SIZE


def test_as_library_when_it_is_required_and_the_flag_is_missing_then_refused(facts: Facts) -> None:
    for _, _, named in facts.by_rank:
        kind, text = named["required without the flag"]
        assert kind == "ConfigError"
        assert_mentions(
            text, "MEGATRON_DISTOPT=require", "use_distributed_optimizer", f"Add {_FLAG}"
        )


def test_as_library_when_the_flag_is_missing_then_rank_0_alone_says_once_that_it_is_not_used(
    facts: Facts,
) -> None:
    line = "megatron_distopt is loaded but not used: use_distributed_optimizer is not set"
    assert [named["said without the flag"] for _, _, named in facts.by_rank] == [[line], []]


def test_as_library_when_trained_then_the_curve_is_the_forks_own(facts: Facts) -> None:
    """Adam is torch's fused one here and the fork's stand-in for apex's there; a param in bf16 has
    8 bits."""
    logged = [(ours.losses, theirs.losses) for ours, theirs, _ in facts.by_rank if ours.losses]
    assert len(logged) == 1
    assert logged[0][0] == pytest.approx(logged[0][1], rel=1e-4)


def test_runner_when_a_launcher_starts_the_fork_then_ours_is_active_and_trains_as_by_the_library(
    launched: tuple[str, Done], ours: Curves
) -> None:
    _, done = launched
    assert done.curves == ours
    assert done.launched.status == 0, done.launched.output[-5000:]


def test_runner_when_it_is_active_then_rank_0_says_once_what_it_does(
    launched: tuple[str, Done],
) -> None:
    launcher, done = launched
    files = {
        "deepspeed": "per-rank files, the fork's own",
        "torchrun": "gathered file, with the optimizer state in a folder that loads at any size",
    }
    assert _block_in(done.launched.output) == [
        f"{_ACTIVE}a Megatron of 2023 (megatron.optimizer.get_megatron_optimizer, "
        "megatron.arguments.parse_args)",
        "  device     cpu (accelerator cpu, named by torch)",
        "  inner      torch_fused",
        "  decay      decoupled",
        "  nonfinite  skip",
        "  groups     2 ranks, optimizer sharded over 2 by gloo, from pair to pair in shared "
        "memory",
        "  overlap    grads after backward (all grads fit into one bucket), params before the next "
        "forward",
        f"  files      {files[launcher]}",
        "  buffer     params bfloat16, grads float32, 28 params of 7,744 elements in 1 bucket(s), "
        "1/2 a rank",
        "  bytes      params 15.1 KiB, grads 30.2 KiB, main params 15.1 KiB, moments 30.2 KiB",
    ]


def test_entry_point_when_the_fork_finds_us_then_announced_once_and_can_be_off(
    patched: Path,
) -> None:
    ((modules, printed),) = run_ranks(by_entry_point, 1, patched, False)
    assert modules == [_OURS, _THEIRS]
    assert len(_block_in(printed)) == 10
    # Our flags are known and have no effect.
    assert re.search(r"^  distopt_nonfinite \.+ skip$", printed, re.MULTILINE)


def test_entry_point_when_the_script_installs_with_options_then_they_count(patched: Path) -> None:
    """The entry point itself knows variables and flags alone."""
    ((modules, printed),) = run_ranks(by_entry_point, 1, patched, True)
    assert modules == [_OURS]
    assert "  nonfinite  skip" in _block_in(printed)
