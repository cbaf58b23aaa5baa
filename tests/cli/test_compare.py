"""The same training with the host's optimizer and with ours: launch lines, verdicts, and what is
left behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_distopt.cli import compare_command
from megatron_distopt.cli.compare_launch import (
    DISTRIBUTED,
    LOADING,
    WRITING,
    plus,
    train,
    with_runner,
    without,
)
from megatron_distopt.cli.compare_verdict import Outcome, judge
from megatron_distopt.cli.main import main
from megatron_distopt.cli.recorded_run import RecordedRun
from megatron_distopt.config import Switch
from megatron_distopt.errors import ConfigError, HostError
from megatron_distopt.optimizer import step as step_module
from megatron_distopt.patch_points import Undos
from megatron_distopt.plugin import recording
from megatron_distopt.plugin.recording import record_training
from tests.cli.test_compare_verdict import Training
from tests.hosts.test_main_line import _STAND_INS, _WORDS
from tests.support.facts import Facts, facts_of
from tests.support.mini_fork import FOLDER, InstalledFork, core_folder, free_port

# --- launch lines

RUNNER = "-m megatron_distopt"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "torchrun --nproc-per-node 2 a.py --bf16",
            f"torchrun --nproc-per-node 2 {RUNNER} a.py --bf16",
        ),
        ("torchrun -m package.a --bf16", f"torchrun {RUNNER} -m package.a --bf16"),
        (f"torchrun {RUNNER} a.py", f"torchrun {RUNNER} a.py"),
        (
            f"torchrun around.py {RUNNER} a.py --x b.py",
            f"torchrun around.py {RUNNER} a.py --x b.py",
        ),
        ("python3.11 a.py", f"python3.11 {RUNNER} a.py"),
        ("/opt/bin/python -u -m package.a", f"/opt/bin/python -u {RUNNER} -m package.a"),
        (
            "python -m torch.distributed.run --nnodes 1 a.py",
            f"python -m torch.distributed.run --nnodes 1 {RUNNER} a.py",
        ),
        ("deepspeed --num_gpus 2 a.py", "deepspeed --num_gpus 2 --module megatron_distopt a.py"),
        ("deepspeed --module package.a", "deepspeed --module megatron_distopt -m package.a"),
        ("deepspeed --module megatron_distopt a.py", "deepspeed --module megatron_distopt a.py"),
        ("env A=1 numactl -N 0 torchrun a.py", f"env A=1 numactl -N 0 torchrun {RUNNER} a.py"),
    ],
)
def test_launch_line_when_given_then_starts_the_runner(line: str, expected: str) -> None:
    assert with_runner(line.split()) == expected.split()


@pytest.mark.parametrize(
    "line", ["", "bash pretrain.sh", "torchrun", "torchrun --nproc-per-node 2", "a.py --bf16"]
)
def test_launch_line_when_it_starts_no_script_then_is_refused(line: str) -> None:
    with pytest.raises(
        ConfigError, match=r"launch line (.|\n)*torchrun --nproc-per-node 8 pretrain_gpt.py"
    ):
        with_runner(line.split())


def test_flags_when_left_out_or_added_then_with_their_values_and_the_lines_spelling() -> None:
    line = (
        "deepspeed --save_pid --module megatron_distopt a.py --save x y --lr 1 --load=z "
        "--save_interval 5 --loader q"
    )
    words = without(line.split(), f"{WRITING}|{LOADING}")
    assert words == "deepspeed --save_pid --module megatron_distopt a.py --lr 1 --loader q".split()  # noqa: SIM905
    assert (
        without([*words, "--use_distributed_optimizer", "--overlap-param-gather"], DISTRIBUTED)
        == words
    )
    assert plus([*words, "--a-b", "--a_b"], "--exit-interval", "3")[-2:] == ["--exit-interval", "3"]
    assert plus([*words, "--train_iters", "5"], "--exit-interval", "-3")[-2:] == [
        "--exit_interval",
        "-3",
    ]


# --- the command

Starts = list[tuple[str, str, Switch]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Starts]:
    """Trainings that were started, each replaced by a recorded one; the environment says what fails
    and differs."""
    starts: Starts = []

    def fake(
        scratch: Path,
        iterations: int,
        name: str,
        words: Sequence[str],
        switch: Switch,
        nudge: float = 0.0,
    ) -> RecordedRun:
        starts.append((name, " ".join(words), switch))
        is_distributed, is_ours = "--use-distributed-optimizer" in words, switch is Switch.REQUIRE
        if not is_ours and (
            ("--fails" in words and is_distributed)
            or ("--fails-alone" in words and not is_distributed)
            or ("--fails-again" in words and len(starts) > 1)
        ):
            raise HostError(f"NameError: {name}. Try alone: {name}")
        lr = 3e-3 * (1 + nudge)
        if ("--wrong" in words and is_ours) or ("--other" in words and not is_distributed):
            lr *= 1.01
        training = Training(lr=lr, iterations=iterations)
        if "--equal" not in words:
            training.order = 1e-7 if is_ours else 0.0 if is_distributed else 2e-7
        if "--unseeded" in words:
            training.dropout_seed = len(starts)
        return training.run(tmp_path / str(len(starts)))

    monkeypatch.setattr(compare_command, "train", fake)
    yield starts


OWN, OURS, PLAIN = "host's own", "ours", "the host's undistributed one"
ALONE, NUDGED = "host's own, undistributed", "the one with a learning rate that differs by rounding"


@pytest.mark.parametrize(
    "case",
    [
        ("--equal", 0, [OWN, OURS]),
        ("", 0, [OWN, OURS, PLAIN]),
        ("--wrong", 1, [OWN, OURS, PLAIN]),
        ("--other", 0, [OWN, OURS, PLAIN, NUDGED]),
        ("--fails-alone", 0, [OWN, OURS, PLAIN, NUDGED]),
        ("--fails", 0, [OWN, ALONE, OURS, NUDGED]),
        ("--fails --wrong", 1, [OWN, ALONE, OURS, NUDGED]),
        ("--unseeded", 3, [OWN, OURS, PLAIN, NUDGED]),
        ("--unseeded --fails", 3, [OWN, ALONE, OURS, NUDGED]),
        ("--fails-again", 3, [OWN, OURS, PLAIN, NUDGED]),
    ],
)
def test_command_when_runs_end_then_status_and_files_say_it(
    started: Starts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, int, list[str]],
) -> None:
    flags, status, names = case
    line = (
        "torchrun a.py --save s --load l --tensorboard-dir t --lr 3e-3 "
        f"--use-distributed-optimizer {flags}"
    )
    words = ["compare", "--iterations", "4", "--output", str(tmp_path / "out"), "--", *line.split()]
    assert main(words) == status
    assert [name for name, _, _ in started] == names
    assert all(words.startswith(f"torchrun {RUNNER} a.py") for _, words, _ in started)
    assert not any(
        flag in words for _, words, _ in started for flag in ("--save", "--load", "--tensorboard")
    )
    assert [switch for name, _, switch in started if name == OURS] == [Switch.REQUIRE]
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    text = capsys.readouterr().out
    assert document["is_same"] is {0: True, 1: False, 3: None}[status]
    assert document["verdict"] == text.strip().splitlines()[-1]
    assert ("its undistributed one is compared" in text) is ("--fails" in line.split())
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left in (["compare.json"], ["compare.json", "compare.png"])


def test_command_when_no_optimizer_of_the_host_runs_then_says_of_each_why(
    started: Starts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "torchrun a.py --fails --fails-alone --use-distributed-optimizer"
    assert main(["compare", "--output", str(tmp_path), "--", *line.split()]) == 3
    text = capsys.readouterr().err
    assert f"NameError: {OWN}." in text and f"NameError: {ALONE}." in text


def test_command_when_a_file_cannot_be_written_then_the_verdict_is_not_lost(
    started: Starts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_command, "_picture", mock.Mock(side_effect=ValueError("of it")))
    (tmp_path / "compare.json").mkdir()
    line = "torchrun a.py --lr 3e-3 --use-distributed-optimizer --equal"
    assert main(["compare", "--output", str(tmp_path), "--", *line.split()]) == 0
    text = capsys.readouterr().out
    assert (
        "compare.png could not be written: of it." in text
        and "compare.json could not be written" in text
    )
    assert text.strip().splitlines()[-1].startswith("Equal to the bit")


def test_command_when_the_flag_is_missing_then_our_run_gets_it_and_load_is_kept_if_asked(
    started: Starts, tmp_path: Path
) -> None:
    line = "torchrun a.py --load l --save s --lr 3e-3 --equal"
    assert main(["compare", "--keep-load", "--output", str(tmp_path), "--", *line.split()]) == 0
    own, ours, *_ = (words for _, words, _ in started)
    assert "--use-distributed-optimizer" not in own
    assert ours == f"{own} --use-distributed-optimizer"
    assert "--load l" in own and "--save" not in own


# --- processes

_SCRIPT = """
import os, subprocess, sys, time
kind, pids = sys.argv[-2:]
if kind == "fails":
    raise ValueError("of the script")
if kind == "says":
    sys.exit(open(pids).read())
if kind == "dies":
    os.kill(os.getpid(), 9)
if kind == "hangs":
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    open(pids + "_", "w").write(f"{child.pid} {os.getpid()}")
    os.rename(pids + "_", pids)
    time.sleep(60)
"""


def _start(tmp_path: Path, kind: str) -> RecordedRun:
    (tmp_path / "script.py").write_text(_SCRIPT)
    words = [
        sys.executable,
        str(tmp_path / "script.py"),
        "megatron_distopt",
        kind,
        str(tmp_path / "pids"),
    ]
    (tmp_path / "scratch").mkdir()
    return train(tmp_path / "scratch", 2, "own", words, Switch.OFF)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fails", "ValueError: of the script"),
        ("ends", "no output"),
        ("dies", "A rank was killed by SIGKILL"),
    ],
)
def test_training_when_it_records_nothing_then_the_error_has_its_reason(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(HostError, match=rf"{reason}. .*MEGATRON_DISTOPT=0 .*script.py"):
        _start(tmp_path, kind)


_LAUNCHER = """
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
a.py FAILED
Root Cause (first observed failure):
[0]:
  exitcode  : {} (pid: 5)
============================================================"""
_TRACEBACK = """{0}Traceback (most recent call last):
{0}  File "a.py", line 8, in <module>
{0}    fail()
{0}{1}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (_TRACEBACK.format("", "AssertionError"), "AssertionError"),
        (_TRACEBACK.format("[rank0]: ", "my.Odd: of it."), "my.Odd: of it"),
        (
            _TRACEBACK.format("", "KeyError: 'a'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + _TRACEBACK.format("", "NameError: the last"),
            "NameError: the last",
        ),
        (
            _TRACEBACK.format("[rank0]: ", "ValueError: it")
            + _TRACEBACK.format("[rank1]: ", "RuntimeError: [pair.cc] Connection closed by peer"),
            "ValueError: it",
        ),
        (
            _TRACEBACK.format("[rank1]: ", "RuntimeError: Connection closed by peer")
            + _LAUNCHER.format(-9),
            "A rank was killed by SIGKILL",
        ),
        ("usage: a.py\na.py: error: unrecognized --b", "a.py: error: unrecognized --b"),
        ("megatron_distopt: Not found. Install it.", "megatron_distopt: Not found. Install it"),
        ("cannot start\n=====", "cannot start"),
    ],
)
def test_training_when_its_log_has_a_reason_then_it_is_shown_and_not_the_end_of_the_launcher(
    tmp_path: Path, log: str, reason: str
) -> None:
    said = log if "ChildFailedError" in log else log + _LAUNCHER.format(1) * ("Trace" in log)
    (tmp_path / "pids").write_text(said)
    with pytest.raises(HostError, match=rf"train_step\. {re.escape(reason)}\. To try"):
        _start(tmp_path, "says")


def test_training_when_its_folder_is_full_then_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(free=4096)
    monkeypatch.setattr("megatron_distopt.cli.compare_launch.shutil.disk_usage", lambda _: full)
    with pytest.raises(HostError, match=f"{tmp_path}.* has no space left.*TMPDIR"):
        _start(tmp_path, "fails")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_command_when_a_signal_ends_it_then_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupt(*_: object) -> None:
        if (tmp_path / "pids").exists():
            os.kill(os.getpid(), number)

    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    before = {each: signal.getsignal(each) for each in (number, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    script = [sys.executable, str(tmp_path / "script.py"), "-m", "megatron_distopt"]
    words = ["compare", "--output", str(tmp_path / "out"), "--", *script]
    try:
        assert main([*words, "hangs", str(tmp_path / "pids")]) == 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not [*(tmp_path / "scratch").iterdir()]
    for pid in (tmp_path / "pids").read_text().split():
        deadline = time.monotonic() + 5.0
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(pid)


def _is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


# --- what ranks record


def train_all(rank: int, size: int, folder: Path) -> None:
    """Trains the small fork: its own optimizer, ours, and ours with something wrong in it."""
    fork = InstalledFork.imported()
    update, stats = step_module.update_mains, step_module.local_stats

    def with_wrong_lr(inner: Any, *args: Any) -> None:
        for group in inner.param_groups:
            group["lr"] *= 1.01
        update(inner, *args)  # the scheduler of the fork writes the next one

    def without_decay(inner: Any, mains: list[torch.Tensor], *args: Any) -> None:
        group = max(inner.param_groups, key=lambda each: each["weight_decay"])
        mains[0][: mains[0].numel() // 4].div_(1 - group["lr"] * group["weight_decay"])
        update(inner, mains, *args)

    def with_wrong_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return stats(*args, **kwargs) * torch.tensor([1.01, 1.0, 1.0], dtype=torch.float64)

    def with_rounded_mains(inner: Any, mains: list[torch.Tensor], *args: Any) -> None:
        update(inner, mains, *args)
        for each in mains:
            each.copy_(each.bfloat16())

    replaced: dict[str, tuple[str, Any]] = {
        "lr": ("update_mains", with_wrong_lr),
        "norm": ("local_stats", with_wrong_norm),
        "decay": ("update_mains", without_decay),
        "mains": ("update_mains", with_rounded_mains),
    }
    words = ["--train-iters", "4", "--weight-decay", "0.1", "--hidden-size", "32"]
    distributed = "--use-distributed-optimizer"
    for precision in ("fp32", "bf16"):
        of_run = {
            "own": [distributed],
            "undistributed": [],
            "nudged": [distributed],
            **{name: [distributed] for name in ("ours", *replaced)},
        }
        for name, more in of_run.items():
            if (precision, name) in (("bf16", "norm"), ("fp32", "mains")):
                continue
            nudge = 2.0**-19 if name == "nudged" else 0.0
            undo = record_training(folder / f"{precision}-{name}", nudge=nudge).undo
            with mock.patch.object(step_module, *replaced.get(name, ("update_mains", update))):
                is_ours = name == "ours" or name in replaced
                fork.train(*words, *more, *["--bf16"] * (precision == "bf16"), ours=is_ours)
            undo()
    saved, longer = str(folder / "saved"), [*words, distributed, "--train-iters", "20"]
    fork.train(*longer, "--save", saved, "--exit-interval", "3")
    for name, loads in (("whole", []), ("loaded", ["--load", saved])):
        undo = record_training(folder / name, 5).undo
        with pytest.raises(SystemExit, match=r"^0$"):
            fork.train(*longer, *loads)
        undo()


facts = facts_of(train_all, 2)


@pytest.mark.parametrize(
    ("precision", "name", "outcome", "what"),
    [
        ("fp32", "ours", Outcome.SAME, "Equal"),
        ("bf16", "ours", Outcome.SAME, "Equal"),
        ("fp32", "lr", Outcome.DIFFERENT, "update"),
        ("bf16", "lr", Outcome.DIFFERENT, "update"),
        ("fp32", "decay", Outcome.DIFFERENT, "update"),
        ("bf16", "decay", Outcome.DIFFERENT, "update"),
        ("fp32", "norm", Outcome.DIFFERENT, "gradient norm"),
        ("bf16", "mains", Outcome.DIFFERENT, "precision of main params"),
    ],
)
def test_small_fork_when_something_is_broken_then_the_verdict_finds_it(
    facts: Facts, precision: str, name: str, outcome: Outcome, what: str
) -> None:
    own, ours, *hosts_others = (
        RecordedRun(facts.folder / f"{precision}-{each}")
        for each in ("own", name, "undistributed", "nudged")
    )
    found, sentence = judge(own, ours, *hosts_others)
    assert (found, what in sentence) == (outcome, True), sentence
    assert len(own.steps) == 4 and len(own.steps[0]) == 2


def test_small_fork_when_its_params_have_16_bits_then_main_params_are_recorded(
    facts: Facts,
) -> None:
    own, ours, undistributed = (
        RecordedRun(facts.folder / f"bf16-{name}") for name in ("own", "ours", "undistributed")
    )
    for run, share in ((own, 0.5), (ours, 0.5), (undistributed, 1.0)):
        mains, later, weights = run.mains(0), run.mains(3), run.weights(0)
        is_here = ~np.isnan(mains)
        assert abs(is_here.mean() - share) < 0.05
        assert np.array_equal(mains[is_here], weights[is_here])
        assert np.array_equal(np.isnan(later), ~is_here)
        moved = later[is_here] != torch.from_numpy(later[is_here]).bfloat16().double().numpy()
        assert moved.mean() > 0.5
    assert np.isnan(RecordedRun(facts.folder / "fp32-ours").mains(0)).all()


def test_recorder_when_a_training_loads_then_its_iterations_count_from_there(facts: Facts) -> None:
    whole, loaded = RecordedRun(facts.folder / "whole"), RecordedRun(facts.folder / "loaded")
    assert (len(whole.steps), len(loaded.steps)) == (5, 5)
    for number in (0, 1):
        assert loaded.bits(number) == whole.bits(3 + number)


def test_recorder_when_a_step_ends_early_or_the_optimizer_has_its_own_step_then_leaves_both(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = SimpleNamespace(
        get_loss_scale=lambda: torch.ones(1), step=(own := lambda: (True, None, None))
    )

    def train_step(model: Any, optimizer: Any, ends: bool) -> tuple[dict[str, torch.Tensor]]:
        if not ends:
            optimizer.step()
        return ({"lm loss": torch.tensor([6.0, 2.0])},)

    module = ModuleType("training")
    vars(module).update(train_step=train_step)
    everyone = SimpleNamespace(of=lambda: SimpleNamespace(rank=0))
    recording._wrap(tmp_path, 2, 0.0, module, Undos())
    with mock.patch.object(recording, "Group", everyone):
        for ends in (True, False):
            module.train_step([model], optimizer, ends)
            assert optimizer.step is own
    run = RecordedRun(tmp_path)
    assert (run.values("loss"), run.values("skipped"), len(run.bits(0))) == ([3.0], [0.0], 2)
    assert math.isnan(run.values("norm")[0])


def test_recorder_when_its_steps_are_done_or_it_finds_no_model_then_the_training_ends(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = SimpleNamespace(get_loss_scale=lambda: 1.0, step=lambda: (True, None, None))

    def train_step(*args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor]]:
        optimizer.step()
        return ({"lm loss": torch.tensor(6.0)},)

    module = ModuleType("training")
    vars(module).update(train_step=train_step)
    recording._wrap(tmp_path, 2, 0.0, module, Undos())
    with mock.patch.object(recording, "Group", mock.Mock()) as group:
        group.of.return_value = SimpleNamespace(rank=0, size=1)
        module.train_step([model], other=optimizer)
        with pytest.raises(HostError, match="train_step was called with int, SimpleNamespace"):
            module.train_step(3, optimizer)
        with pytest.raises(SystemExit, match=r"^0$"):
            module.train_step([model], other=optimizer)
    assert len(RecordedRun(tmp_path).steps) == 2


# --- whole trainings; tests/hosts/test_main_line.py says how MEGATRON_LM_TREES names real Megatrons


def compare(
    cwd: Path, output: Path, words: Sequence[str], **environment: str
) -> subprocess.Popen[str]:
    """Starts the command on two ranks under torchrun."""
    python_path = os.pathsep.join(
        [
            environment.pop("PYTHONPATH", ""),
            str(Path(__file__).parents[2]),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    environment |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "TMPDIR": str(output)}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [
        sys.executable,
        "-m",
        "megatron_distopt.cli.main",
        "compare",
        "--iterations",
        "5",
        "--output",
    ]
    line = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        *words,
        "--use-distributed-optimizer",
        "--train-iters",
        "9",
    ]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*command, str(output), "--", *line], cwd=cwd, env={**os.environ, **environment}, **streams
    )


@pytest.mark.long
@pytest.mark.parametrize("native", ["", "1"])
def test_small_fork_when_compared_then_is_the_same_and_says_which_optimizer_the_host_has(
    tmp_path: Path, native: str
) -> None:
    variables = {"MINI_FORK_CORE": str(core_folder()), "MEGATRON_DISTOPT_ACCELERATOR": "torch"}
    run = compare(
        FOLDER, tmp_path, ["pretrain.py", "--save", "never"], MINI_FORK_NATIVE=native, **variables
    )
    text, errors = run.communicate()
    assert run.returncode == 0, text + errors
    assert ("undistributed one is compared" in text) is (not native)
    assert json.loads((tmp_path / "compare.json").read_text())["is_same"]
    assert not (FOLDER / "never").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "tree", [Path(tree) for tree in os.environ.get("MEGATRON_LM_TREES", "").split(":") if tree]
)
@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_main_line_when_compared_then_is_the_same(
    tree: Path, precision: tuple[str, ...], tmp_path: Path
) -> None:
    python_path = os.pathsep.join([str(_STAND_INS), str(tree)])
    words = ["pretrain_gpt.py", *_WORDS[:-1], "--clip-grad", "1.0", *precision]
    stand_ins = {
        "TORCH_COMPILE_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OWN_OPTIMIZER": "1",
    }
    run = compare(tree, tmp_path, words, PYTHONPATH=python_path, **stand_ins)
    text, errors = run.communicate()
    assert run.returncode == 0, text + errors
