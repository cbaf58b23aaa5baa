"""The three install methods for a fork of 2023: the runner, the library and the entry point, on the small fork."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import megatron_distopt
from megatron_distopt import DistOptConfig
from megatron_distopt.config import FREE_OPTIONS
from megatron_distopt.errors import DistOptError
from megatron_distopt.version import VERSION
from tests.support.mini_fork import FOLDER, SCRIPT, Launched, MiniFork, TrainingRun, core_folder, launch
from tests.support.spawn import run_ranks

SIZE = 2
_ROOT = Path(__file__).parents[2]
_FLAG, _BF16 = "--use-distributed-optimizer", "--bf16"
_OURS = "megatron_distopt.hosts.megatron_2023.optimizer"
_THEIRS = "megatron.optimizer.distrib_optimizer"
_ACTIVE = f"megatron_distopt {VERSION} is active in "

#: A user's script that works with other processes, which import it under another name.
_WITH_WORKERS = """
import multiprocessing
import sys

import pretrain as script
import torch
from megatron.training import pretrain


def double(number):
    return 2 * number


def data(iteration):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print("workers say", pool.map(double, [2, 3]), flush=True)
    return script.train_data(iteration)


if __name__ == "__main__":
    pretrain(data, script.model_provider, None, script.forward_step)
    torch.distributed.destroy_process_group()
"""
#: A user's script with a call of its own, with options that no variable says.
_WITH_INSTALL = """
import megatron_distopt

megatron_distopt.install(megatron_distopt.DistOptConfig(nonfinite="skip"))

import pretrain as script
from megatron.training import pretrain

pretrain(script.train_data, script.model_provider, None, script.forward_step)
"""


@dataclass(frozen=True)
class Curves:
    """What a training left.

    Args:
        losses: by iteration.
        params: checksums, by rank and name.
        optimizers: module of the class, by rank.
    """

    losses: list[float]
    params: list[Mapping[str, str]]
    optimizers: list[str]

    @classmethod
    def of(cls, file: Path) -> Curves:
        curves = json.loads(file.read_text())
        ranks = curves["ranks"]
        losses = [each["loss"] for each in curves["iterations"]]
        return cls(losses, [rank["params"] for rank in ranks], [rank["optimizer_module"] for rank in ranks])


@dataclass(frozen=True)
class Start:
    """How a launcher starts the fork: `words`, then those of every run."""

    launcher: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    flags: tuple[str, ...] = (_FLAG,)
    ranks: int = SIZE


def _starts(patched: Path) -> dict[str, Start]:
    """By name. All at once, two beside each other, because each costs seconds."""
    runner = ("-m", "megatron_distopt")
    of_patched = {"PYTHONPATH": f"{_ROOT}{os.pathsep}{patched}"}
    required = {"MEGATRON_DISTOPT": "require"}
    underscores = ("--use_distributed_optimizer", "--distopt_nonfinite", "skip")
    return {
        "deepspeed": Start(
            "deepspeed",
            (*runner, "pretrain.py"),
            {"MINI_FORK_FILE_LAYOUT": "per_rank", "MINI_FORK_FLAGS": "underscore", **required},
            underscores,
        ),
        "torchrun": Start(
            "torchrun", (*runner, str(patched / "with_workers.py")), required, (_FLAG, "--distopt-nonfinite=skip")
        ),
        "entry point": Start("torchrun", (str(patched / "pretrain.py"),), of_patched | required),
        "entry point, runner, module": Start("torchrun", (*runner, "-m", "tools.pretrain"), of_patched | required),
        "entry point, install": Start("torchrun", (str(patched / "with_install.py"),), of_patched | required, ranks=1),
        "entry point, switched off": Start(
            "torchrun",
            (str(patched / "pretrain.py"),),
            of_patched | {"MEGATRON_DISTOPT": "0", "MINI_FORK_NATIVE": "1"},
            (_FLAG, "--distopt-nonfinite", "skip"),
        ),
    }


@dataclass(frozen=True)
class Done:
    """A start that has ended."""

    launched: Launched
    curves: Curves

    @property
    def block(self) -> list[str]:
        """The start-up block, which must be there once."""
        assert self.launched.output.count(_ACTIVE) == 1, self.launched.output
        lines = self.launched.output[self.launched.output.index(_ACTIVE) :].splitlines()
        return [lines[0], *itertools.takewhile(lambda line: re.match(r"  [a-z]+ {2,}\S", line), lines[1:])]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the fork that asks for entry points, with more scripts."""
    folder = tmp_path_factory.mktemp("fork") / "mini_fork"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "conftest.py"))
    (folder / "with_workers.py").write_text(_WITH_WORKERS)
    (folder / "with_install.py").write_text(_WITH_INSTALL)
    (folder / "tools").mkdir()
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "pretrain.py").write_text(SCRIPT.read_text())
    done = _patch("--apply", folder)
    assert done.startswith("applied: megatron/optimizer/__init__.py, "), done
    return folder


def _patch(action: str, folder: Path) -> str:
    command = [sys.executable, "-m", "megatron_distopt.cli.main", "patch", action, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def launched(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Done]]:
    folder = tmp_path_factory.mktemp("curves")

    def run(name: str, start: Start) -> Done:
        file = folder / f"{name}.json"
        words = [*start.words, _BF16, *start.flags, "--curves", str(file)]
        done = launch(start.launcher, start.ranks, words, environment=start.environment, seconds=240.0)
        assert file.exists(), done.output
        return Done(done, Curves.of(file))

    pool = ThreadPoolExecutor(max_workers=2)
    runs: dict[str, Future[Done]] = {name: pool.submit(run, name, start) for name, start in _starts(patched).items()}
    yield lambda name: runs[name].result()
    pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Found:
    """What one rank saw of the library, and the curves that all install methods are compared with."""

    ours: Curves
    theirs: Curves
    facts: Mapping[str, object]


def as_library(rank: int, size: int, folder: str) -> Found:
    """All cases in one process: the first before the training module is imported."""
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    facts: dict[str, object] = {}
    _install_before_the_training_module(facts)
    fork = MiniFork.imported(file_layout="gathered")
    theirs = fork.train(_BF16, _FLAG, ours=False)
    ours = fork.train(_BF16, _FLAG)
    facts["their optimizer"] = type(theirs.optimizer).__module__
    facts["our optimizer"] = type(ours.optimizer).__module__
    _install_and_undo(fork, facts)
    _install_twice(facts)
    _call_directly(fork, ours, facts)
    _without_the_flag(fork, facts)
    _switched_off(fork, theirs, facts)
    facts["required without the flag"] = _refusal(lambda: fork.train(_BF16), MEGATRON_DISTOPT="require")
    return Found(_curves_of(ours), _curves_of(theirs), facts)


def _curves_of(run: TrainingRun) -> Curves:
    sha256 = import_module("megatron.training")._sha256
    params = {name: sha256(param) for name, param in run.params.items()}
    return Curves(run.losses, [params], [type(run.optimizer).__module__])


def _install_before_the_training_module(facts: dict[str, object]) -> None:
    os.environ["MINI_FORK_CORE"], os.environ["MINI_FORK_NATIVE"] = str(core_folder()), "1"
    sys.path.insert(0, str(FOLDER))
    installation = megatron_distopt.install()
    facts["not yet imported"] = "megatron.training" not in sys.modules
    training, factory = import_module("megatron.training"), import_module("megatron.optimizer")
    ours = factory.get_megatron_optimizer
    facts["imported ours"] = training.get_megatron_optimizer is ours and ours.original.__name__
    installation.undo()
    everywhere = {id(each.get_megatron_optimizer) for each in (training, factory)}
    facts["undone where it was imported since"] = everywhere == {id(ours.original)}


def _attributes() -> dict[tuple[str, str], Any]:
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    return {(name, key): value for name, module in modules.items() for key, value in vars(module).items()}


def _changed(run: Callable[[], object]) -> set[tuple[str, str]]:
    before = _attributes()
    run()
    return {key for key, value in _attributes().items() if before.get(key, run) is not value}


def _install_and_undo(fork: MiniFork, facts: dict[str, object]) -> None:
    short = (_BF16, _FLAG, "--train-iters", "1")
    without_us = _changed(lambda: fork.train(*short, ours=False))
    facts["a run changes only what it changes without us"] = _changed(lambda: fork.train(*short)) == without_us
    facts["install and undo change"] = _changed(lambda: megatron_distopt.install().undo())
    installations: list[megatron_distopt.Installation] = []
    facts["install changes"] = _changed(lambda: installations.append(megatron_distopt.install()))
    installations[0].undo()


def _install_twice(facts: dict[str, object]) -> None:
    first = megatron_distopt.install(DistOptConfig(decay="l2"))
    facts["a second install is the first"] = megatron_distopt.install(DistOptConfig(decay="l2")) is first
    before = _attributes()
    facts["other options"] = _refusal(megatron_distopt.install)
    facts["other options change"] = {key for key, value in _attributes().items() if before[key] is not value}
    first.undo()


def _call_directly(fork: MiniFork, ours: TrainingRun, facts: dict[str, object]) -> None:
    """In a fork whose training module imports our function in place of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork.training, "get_megatron_optimizer", megatron_distopt.get_megatron_optimizer)
        run = fork.train(_BF16, _FLAG, ours=False)
        facts["called directly"] = (type(run.optimizer).__module__, _curves_of(run) == _curves_of(ours))
        patch.setattr(fork.training, "get_megatron_optimizer", _with_l2)
        short = fork.train(_BF16, _FLAG, "--train-iters", "1", ours=False)
        facts["called with options"] = short.optimizer.sharded.config.decay


def _with_l2(*args: Any, **kwargs: Any) -> Any:
    return megatron_distopt.get_megatron_optimizer(*args, options=DistOptConfig(decay="l2"), **kwargs)


def _without_the_flag(fork: MiniFork, facts: dict[str, object]) -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_distopt.hosts.base.announce", said.append)
        alone, beside = (fork.train(_BF16, ours=ours) for ours in (False, True))
    facts["said without the flag"] = said
    facts["without the flag"] = _curves_of(alone) == _curves_of(beside) and type(beside.optimizer).__name__


def _switched_off(fork: MiniFork, theirs: TrainingRun, facts: dict[str, object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_DISTOPT", "0")
        run = fork.train(_BF16, _FLAG, "--distopt-nonfinite", "skip")
        facts["switched off"] = _curves_of(run) == _curves_of(theirs) and run.args.distopt_nonfinite


def _refusal(run: Callable[[], object], **variables: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            run()
        except DistOptError as error:
            return str(error)
    return "nothing was refused"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(as_library, SIZE, str(tmp_path_factory.mktemp("library")))


@pytest.fixture(scope="module")
def ours(found: list[Found]) -> Curves:
    """Of the library."""
    return _of_all_ranks([each.ours for each in found])


@pytest.fixture(scope="module")
def theirs(found: list[Found]) -> Curves:
    """Of the fork's own distributed optimizer."""
    return _of_all_ranks([each.theirs for each in found])


def _of_all_ranks(curves: Sequence[Curves]) -> Curves:
    """Rank 0 writes the curves down."""
    params = [each.params[0] for each in curves]
    return Curves(curves[0].losses, params, [each.optimizers[0] for each in curves])


_PLACES = [
    ("megatron.arguments", "parse_args"),
    ("megatron.initialize", "parse_args"),
    ("megatron.optimizer", "get_megatron_optimizer"),
    ("megatron.training", "get_megatron_optimizer"),
]
FACTS: dict[str, object] = {
    "not yet imported": True,
    "imported ours": "get_megatron_optimizer",
    "undone where it was imported since": True,
    "their optimizer": _THEIRS,
    "our optimizer": _OURS,
    "a run changes only what it changes without us": True,
    "install and undo change": set(),
    "install changes": set(_PLACES),
    "a second install is the first": True,
    "other options": "install() was called before with other options. Call undo() on the first installation.",
    "other options change": set(),
    "called directly": (_OURS, True),
    "called with options": "l2",
    "without the flag": "Float16OptimizerWithFloat16Params",
    "switched off": "skip",
    "required without the flag": "MEGATRON_DISTOPT=require, and the run is without use_distributed_optimizer. "
    "Add --use-distributed-optimizer, or unset the variable.",
}


@pytest.mark.parametrize("name", FACTS)
def test_as_library_when_used_in_a_fork_of_2023_then_as_promised(found: list[Found], name: str) -> None:
    assert [each.facts[name] for each in found] == [FACTS[name]] * SIZE


def test_as_library_when_the_flag_is_missing_then_rank_0_alone_says_once_that_it_is_not_used(
    found: list[Found],
) -> None:
    line = "megatron_distopt is loaded and not used: use_distributed_optimizer is not set"
    assert [each.facts["said without the flag"] for each in found] == [[line], []]


def test_as_library_when_trained_then_the_curve_is_the_forks_own(ours: Curves, theirs: Curves) -> None:
    """Adam is torch's fused one here and the fork's stand-in for apex's there; a param in bf16 has 8 bits."""
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["deepspeed", "torchrun", "entry point", "entry point, runner, module"])
def test_install_method_when_a_launcher_starts_the_fork_then_ours_is_active_and_trains_as_by_the_as_library(
    launched: Callable[[str], Done], ours: Curves, name: str
) -> None:
    assert launched(name).curves == ours
    assert launched(name).launched.status == 0, launched(name).launched.output[-5000:]


@pytest.mark.parametrize(("name", "files"), [("deepspeed", "per-rank files"), ("torchrun", "gathered file")])
def test_runner_when_it_is_active_then_rank_0_says_once_what_it_does(
    launched: Callable[[str], Done], name: str, files: str
) -> None:
    kinds = {
        "per-rank files": "per-rank files, the fork's own",
        "gathered file": "gathered file, a folder that loads at any size",
    }
    assert launched(name).block == [
        f"{_ACTIVE}a Megatron of 2023 (megatron.optimizer.get_megatron_optimizer, megatron.arguments.parse_args)",
        "  device     cpu (accelerator cpu, named by torch)",
        "  inner      torch_fused",
        "  decay      decoupled",
        "  nonfinite  skip",
        "  groups     2 ranks, optimizer sharded over 2 by gloo, from pair to pair in shared memory",
        "  overlap    grads after backward (all grads fit into one bucket), params before the next forward",
        f"  files      {kinds[files]}",
        "  buffer     params bfloat16, grads float32, 28 params of 7,744 elements in 1 bucket(s), 1/2 a rank",
        "  bytes      params 15.1 KiB, grads 30.2 KiB, main params 15.1 KiB, moments 30.2 KiB",
    ]


@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_runner_when_the_fork_prints_its_arguments_then_ours_are_among_them(
    launched: Callable[[str], Done], name: str
) -> None:
    printed = dict(re.findall(r"^  (distopt_\w+) \.+ (.*)$", launched(name).launched.output, re.MULTILINE))
    assert printed == {f"distopt_{each}": "skip" if each == "nonfinite" else "None" for each in FREE_OPTIONS}


def test_runner_when_the_script_has_worker_processes_then_they_work_and_do_not_announce_it(
    launched: Callable[[str], Done],
) -> None:
    assert launched("torchrun").launched.output.count("workers say [4, 6]") == SIZE
    assert len(launched("torchrun").block) == 10


@pytest.mark.parametrize("name", ["entry point", "entry point, runner, module"])
def test_entry_point_when_the_fork_finds_us_by_itself_then_it_is_announced_once(
    launched: Callable[[str], Done], name: str
) -> None:
    assert len(launched(name).block) == 10


def test_entry_point_when_the_script_installs_with_options_then_they_count(launched: Callable[[str], Done]) -> None:
    """The entry point itself knows variables and flags alone."""
    done = launched("entry point, install")
    assert done.curves.optimizers == [_OURS]
    assert "  nonfinite  skip" in done.block


def test_entry_point_when_switched_off_then_the_forks_own_optimizer_trains_and_our_flags_are_ignored(
    launched: Callable[[str], Done], theirs: Curves
) -> None:
    done = launched("entry point, switched off")
    assert done.curves == theirs
    assert _ACTIVE not in done.launched.output
    assert re.search(r"^  distopt_nonfinite \.+ skip$", done.launched.output, re.MULTILINE)


def test_entry_point_when_taken_out_then_the_fork_is_as_it_was_to_the_byte(patched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fork"
    shutil.copytree(patched, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert _contents(folder / "megatron") != _contents(FOLDER / "megatron")
    assert _patch("--undo", folder).startswith("undone: megatron/optimizer/__init__.py, ")
    assert _contents(folder / "megatron") == _contents(FOLDER / "megatron")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.py"))}


#: Says how it was started, and fails.
_PROBE = """
import json
import sys

main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ is None, vars(main) is globals()]))
print("megatron.training" in sys.modules)


def outer():
    try:
        {}["no such key"]
    except KeyError as error:
        raise ValueError("from the script") from error


if "--fail" in sys.argv:
    outer()
sys.exit(7)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same script by itself and in a package."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    for file in (folder / "probe.py", folder / "package" / "probe.py"):
        file.write_text(_PROBE)
    (folder / "broken.py").write_text("x = = 3\n")
    return folder


def _python(folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_DISTOPT")}
    environment |= {"MINI_FORK_CORE": str(core_folder()), "PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("probe.py", "--fail"), {}),
        (("-m", "package.probe", "--lr", "1"), {}),
        (("probe.py",), {"PYTHONSAFEPATH": "1", "MEGATRON_DISTOPT": "0"}),
        (("broken.py",), {"MEGATRON_DISTOPT": "0"}),
    ],
    ids=["script that raises", "module", "safe path", "script that is no Python"],
)
def test_runner_when_a_script_runs_in_the_fork_then_it_is_as_if_started_alone(
    probe: Path, words: tuple[str, ...], variables: dict[str, str]
) -> None:
    alone = _python(probe, *words, **variables)
    assert _python(probe, "-m", "megatron_distopt", *words, **variables) == alone
    assert alone[0] == (1 if alone[2] else 7)
