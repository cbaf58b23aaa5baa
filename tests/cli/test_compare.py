"""The same training with the host's optimizer and with ours: launch lines, verdicts, and what is
left behind."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

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
from megatron_distopt.cli.compare_verdict import differences, judge
from megatron_distopt.cli.main import main
from megatron_distopt.config import Switch
from megatron_distopt.errors import ConfigError, HostError
from megatron_distopt.hosts import recording
from megatron_distopt.hosts.recording import RecordedParam, RecordedRun, record_training
from megatron_distopt.optimizer import step as step_module
from tests.hosts.test_main_line import _STAND_INS, _WORDS
from tests.support.mini_fork import FOLDER, InstalledFork, core_folder, free_port
from tests.support.spawn import run_ranks

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
        ConfigError, match=r"Invalid launch line(.|\n)*torchrun --nproc-per-node 8 pretrain_gpt.py"
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


# --- verdicts

SHAPES = {"decoder.fc1.weight": (64, 8), "decoder.fc2.weight": (8, 64), "decoder.fc1.bias": (64,)}


def recorded(folder: Path, iterations: int = 5, **changed: Any) -> RecordedRun:
    """A run of one rank whose updates have the size `lr`, written as the recorder writes it."""
    dtype, lr, noise = (
        changed.get("dtype", torch.float32),
        changed.get("lr", 1e-3),
        changed.get("noise", 0.0),
    )
    noises, epsilon, start = (
        torch.Generator().manual_seed(0),
        torch.finfo(dtype).eps,
        changed.get("start", 0.0),
    )
    mains = {
        name: torch.randn(shape, generator=noises) * 0.02 + start for name, shape in SHAPES.items()
    }
    sizes = (
        (name, each.numel(), each.numel(), each.ndim > 1, epsilon) for name, each in mains.items()
    )
    lines: list[Any] = [[asdict(RecordedParam(*size)) for size in sizes]]
    for number in range(1, iterations + 1):
        weights = [each.to(dtype) for each in mains.values()]
        integers = [
            weight.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
            for weight in weights
        ]
        values = torch.cat([weight.flatten().float() for weight in weights]).numpy()
        line = {
            "started": float(number),
            "skipped": False,
            "loss_scale": changed.get("scale", 1.0),
            "memory": 1 << 30,
        }
        line |= {"loss": changed.get("losses", {}).get(number, 7.0 - number / 10)}
        line |= {"norm": changed.get("norms", {}).get(number, 1.0)}
        line |= {"sample": base64.b64encode(values.tobytes()).decode()}
        lines.append(line | {"bits": [int(each.sum(dtype=torch.int64)) for each in integers]})
        for name, each in mains.items():
            update = torch.randn(each.shape, generator=noises).sign() * lr
            each.mul_(1 - 1e-4 * (name != changed.get("undecayed"))).sub_(update)
            each.mul_(
                1 + noise * torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
            )
    folder.mkdir(exist_ok=True)
    (folder / "000000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RecordedRun(folder)


@pytest.mark.parametrize(
    ("changes", "is_same", "says"),
    [
        ({}, True, ["Equal to the bit"]),
        ({"noise": 1e-8}, True, ["Equal but for rounding", "rounding explains"]),
        ({"noise": 1e-8, "dtype": torch.bfloat16}, True, ["Equal to the bit"]),
        ({"lr": 1.01e-3}, False, ["iteration 2", "learning rate"]),
        ({"lr": 1.01e-3, "dtype": torch.bfloat16}, False, ["iteration 2", "update"]),
        (
            {"undecayed": "decoder.fc1.weight"},
            False,
            ["iteration 2", "weight decay", "decoder.fc1.weight"],
        ),
        (
            {"norms": {1: 1.01}},
            False,
            ["iteration 1", "gradient norm", "both had the same weights"],
        ),
        ({"norms": {3: math.nan}}, False, ["iteration 3", "gradient norm"]),
        ({"losses": {2: 6.79}}, False, ["iteration 2", "loss", "forward"]),
        ({"scale": 2.0}, False, ["iteration 1", "loss scale", "overflow"]),
        ({"start": 1e-3}, False, ["iteration 1", "weights", "seed and checkpoint"]),
    ],
    ids=str,
)
def test_verdict_when_one_thing_differs_then_names_it(
    tmp_path: Path, changes: dict[str, Any], is_same: bool, says: Sequence[str]
) -> None:
    own = recorded(tmp_path / "own", dtype=changes.get("dtype", torch.float32))
    found, sentence = judge(own, recorded(tmp_path / "ours", **changes))
    assert found is is_same, sentence
    assert all(each in sentence for each in says), sentence


def test_verdict_when_runs_are_no_comparison_or_the_hosts_own_are_as_far_apart_then_says_so(
    tmp_path: Path,
) -> None:
    own, still = recorded(tmp_path / "own"), recorded(tmp_path / "still", 1)
    other = recorded(tmp_path / "other", losses={2: 6.79})
    assert judge(own, recorded(tmp_path / "near", losses={2: 6.78}), other)[0]
    assert not judge(own, recorded(tmp_path / "far", losses={2: 6.7}), other)[0]
    assert not judge(own, recorded(tmp_path / "wrong", lr=1.01e-3), other)[0]
    with pytest.raises(ConfigError, match="Write more --iterations"):
        judge(still, still)
    with pytest.raises(ConfigError, match="other ranks, params or iterations"):
        differences(own, still)


# --- the command

Starts = list[tuple[str, str, Switch]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Starts]:
    """Trainings that were started, each replaced by a recorded one; the environment says what fails
    and differs."""
    starts: Starts = []

    def fake(
        scratch: Path, iterations: int, name: str, words: Sequence[str], switch: Switch
    ) -> RecordedRun:
        starts.append((name, " ".join(words), switch))
        is_distributed = "--use-distributed-optimizer" in words
        if switch is Switch.OFF and is_distributed and "--fails" in words:
            raise HostError("NameError: torch")
        is_lr = switch is Switch.REQUIRE and "--wrong" in words
        noise = (
            1e-8
            if switch is Switch.REQUIRE or "--seed" in words
            else 0.0
            if is_distributed
            else 2e-8
        )
        noise *= "--equal" not in words
        return recorded(
            tmp_path / str(len(starts)), iterations, lr=1.01e-3 if is_lr else 1e-3, noise=noise
        )

    monkeypatch.setattr(compare_command, "train", fake)
    yield starts


@pytest.mark.parametrize(
    "case",
    [
        ("--equal", 0, ["host's own", "ours"]),
        ("", 0, ["host's own", "ours", "the host's undistributed one"]),
        ("--wrong", 1, ["host's own", "ours", "the host's undistributed one"]),
        ("--fails", 0, ["host's own", "host's own", "ours", "another seed"]),
        ("--fails --wrong", 1, ["host's own", "host's own", "ours"]),
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
        f"torchrun a.py --save s --load l --tensorboard-dir t --use-distributed-optimizer {flags}"
    )
    words = ["compare", "--iterations", "4", "--output", str(tmp_path / "out"), "--", *line.split()]
    assert main(words) == status
    assert [name for name, _, _ in started] == names
    assert all(
        words.startswith(f"torchrun {RUNNER} a.py") and "--exit-interval 4" in words
        for _, words, _ in started
    )
    assert not any(
        flag in words for _, words, _ in started for flag in ("--save", "--load", "--tensorboard")
    )
    assert [switch for name, _, switch in started if name == "ours"] == [Switch.REQUIRE]
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    text = capsys.readouterr().out
    assert document["is_same"] is (status == 0)
    assert document["verdict"] == text.strip().splitlines()[-1]
    assert ("The host's undistributed optimizer is compared" in text) is ("--fails" in flags)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left in (["compare.json"], ["compare.json", "compare.png"])


def test_command_when_the_flag_is_missing_then_our_run_gets_it_and_load_is_kept_if_asked(
    started: Starts, tmp_path: Path
) -> None:
    line = "torchrun a.py --load l --save s --equal"
    assert main(["compare", "--keep-load", "--output", str(tmp_path), "--", *line.split()]) in (
        0,
        1,
    )
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
    ("kind", "reason"), [("fails", "ValueError: of the script"), ("ends", "no output")]
)
def test_training_when_it_records_nothing_then_the_error_has_its_reason(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(HostError, match=rf"{reason}. Try alone: MEGATRON_DISTOPT=0 .*script.py"):
        _start(tmp_path, kind)


def test_training_when_interrupted_then_no_process_is_left(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            _start(tmp_path, "hangs")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
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


def _collect(rank: int, size: int, folder: Path) -> None:
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

    wrong: dict[str, tuple[str, Any]] = {
        "lr": ("update_mains", with_wrong_lr),
        "norm": ("local_stats", with_wrong_norm),
    }
    wrong |= {"decay": ("update_mains", without_decay), "ours": ("update_mains", update)}
    for precision in ("fp32", "bf16"):
        words = (
            "--use-distributed-optimizer",
            "--train-iters",
            "4",
            "--weight-decay",
            "0.1",
            "--hidden-size",
            "32",
        )
        words += ("--bf16",) * (precision == "bf16")
        for name in ("own", *(each for each in wrong if (precision, each) != ("bf16", "norm"))):
            undo = record_training(folder / f"{precision}-{name}")
            with mock.patch.object(step_module, *wrong.get(name, ("update_mains", update))):
                fork.train(*words, ours=name != "own")
            undo()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    run_ranks(_collect, 2, folder)
    return folder


@pytest.mark.parametrize(
    ("precision", "name", "is_same", "what"),
    [
        *((precision, "ours", True, "Equal") for precision in ("fp32", "bf16")),
        *(
            (precision, name, False, "update")
            for precision in ("fp32", "bf16")
            for name in ("lr", "decay")
        ),
        ("fp32", "norm", False, "gradient norm"),
    ],
)
def test_small_fork_when_something_is_broken_then_the_verdict_finds_it(
    trainings: Path, precision: str, name: str, is_same: bool, what: str
) -> None:
    own, ours = (
        RecordedRun(trainings / f"{precision}-own"),
        RecordedRun(trainings / f"{precision}-{name}"),
    )
    found, sentence = judge(own, ours)
    assert (found, what in sentence) == (is_same, True), sentence
    assert len(own.steps) == 4 and len(own.steps[0]) == 2


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
    recording._wrap(tmp_path, module)
    for ends in (True, False):
        with mock.patch.object(recording, "Group", everyone):
            module.train_step([model], optimizer, ends)
        assert optimizer.step is own
    run = RecordedRun(tmp_path)
    assert (run.values("loss"), run.values("skipped"), len(run.bits(0))) == ([3.0], [0.0], 2)
    assert math.isnan(run.values("norm")[0])


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
    assert ("undistributed optimizer is compared" in text) is (not native)
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
