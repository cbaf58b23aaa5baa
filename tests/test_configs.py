"""Every launch file under configs/ is dry-run: a stub stands in the launcher's place, and the real
parsers of launcher and runner read what it was given. One of those that need neither a fork nor
GPUs trains."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.plugin.runner import TrainingScript, parse_target

FOLDER = Path(__file__).parents[1] / "configs"
FILES = {"DATA": "text_document", "VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt"}
EXTRA = ("--lr", "7e-5", "--log-interval", "3")


@dataclass(frozen=True)
class Launch:
    """What a launch file is meant to start."""

    name: str  # of the file, without its ending
    nodes: int
    ranks: int  # on each node
    needs: tuple[str, ...]  # variables without which it must stop

    @property
    def by_deepspeed(self) -> bool:
        return "deepspeed" in self.name


CORE = ("gpt_tiny_deepspeed", "gpt_tiny_torchrun")
_DATA = ("MEGATRON_FORK", *FILES)
_KEPT = (*_DATA, "CHECKPOINT_DIR")
FORK = (
    Launch("gpt_tiny_fork_cpu_torchrun", 1, 2, _DATA),
    Launch("gpt_tiny_fork_cpu_deepspeed", 1, 2, _DATA),
    Launch("gpt_125m_torchrun", 1, 8, _KEPT),
    Launch("gpt_125m_deepspeed", 1, 8, _KEPT),
    Launch("gpt_7b_torchrun_2nodes", 2, 8, (*_KEPT, "MASTER_ADDR", "NODE_RANK")),
    Launch("gpt_7b_deepspeed_2nodes", 2, 8, (*_KEPT, "HOSTFILE")),
)
each_fork_launch = pytest.mark.parametrize("launch", FORK, ids=lambda launch: launch.name)


@dataclass(frozen=True)
class Started:
    """What a stub was started with: its name, words and variables."""

    launcher: str
    words: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Parsed:
    """What the launcher's own parser made of the words."""

    options: dict[str, Any]
    # what each rank runs, from its first word that is not the launcher's; `-m` before a module
    program: list[str]


# ------------------------------------------------------------
# training


@pytest.mark.long
def test_launch_file_when_the_deepspeed_launcher_runs_it_then_it_trains() -> None:
    """That of torchrun differs in its last lines only; the same script under torchrun:
    tests/plugin/test_runner.py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": str(port),
        "MEGATRON_DISTOPT": "require",
    }
    # as users have it: DeepSpeed names the device
    environment.pop("MEGATRON_DISTOPT_ACCELERATOR", None)
    command = ["bash", str(FOLDER / "gpt_tiny_deepspeed.sh"), "--train-iters", "3"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0]


# ------------------------------------------------------------
# dry-runs


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The whole environment of a dry-run: stubs first in PATH, every path with a space in it."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for launcher in ("torchrun", "deepspeed"):
        stub = stubs / launcher
        stub.write_text(
            f"#!{sys.executable} -IS\nimport json, os, sys\nwith open(os.environ['STARTED'], 'w') "
            f"as file:\n    json.dump([{launcher!r}, sys.argv[1:], dict(os.environ)], file)\n"
        )
        stub.chmod(0o755)
    fork = tmp_path / "a fork"
    fork.mkdir()
    (fork / "pretrain_gpt.py").touch()
    return {
        "PATH": f"{stubs}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "STARTED": str(tmp_path / "started.json"),
        "MEGATRON_FORK": str(fork),
        **{name: str(tmp_path / "the data" / file) for name, file in FILES.items()},
        "CHECKPOINT_DIR": str(tmp_path / "the checkpoints"),
        "HOSTFILE": str(FOLDER / "hostfile.example"),
        "MASTER_ADDR": "node0.example.invalid",
        "NODE_RANK": "1",
        "MEGATRON_DISTOPT": "require",
    }


def _bash(name: str, variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(FOLDER / f"{name}.sh"), *words]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def _dry_run(name: str, variables: dict[str, str], *words: str) -> Started:
    done = _bash(name, variables, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return Started(*json.loads(Path(variables["STARTED"]).read_text()))


def _parse(started: Started) -> Parsed:
    """By the launcher's own parser, which exits where a word is not one of its."""
    if started.launcher == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        options = vars(parse_args(started.words))
        script, arguments = options.pop("user_script"), options.pop("user_args")
    else:
        from torch.distributed.run import get_args_parser

        options = vars(get_args_parser().parse_args(started.words))
        script, arguments = options.pop("training_script"), options.pop("training_script_args")
    return Parsed(options, [*["-m"][: options["module"]], script, *arguments])


def _target(parsed: Parsed, launch: Launch) -> TrainingScript:
    """What the runner makes of its words on rank 0."""
    assert parsed.program[:2] == ["-m", "megatron_distopt"]
    return parse_target([*["--local_rank=0"][: launch.by_deepspeed], *parsed.program[2:]])


def _flags(arguments: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Value of every long flag, "" where it has none; each may be there once."""
    flags: dict[str, str] = {}
    for word in arguments:
        if word.startswith("--"):
            assert word not in flags, word
            flags[word] = ""
        else:
            flags[list(flags)[-1]] = word
    return flags


def test_launch_files_when_listed_then_all_are_tested_and_in_the_readme() -> None:
    names = {path.stem for path in FOLDER.glob("*.sh")}
    assert names == {*CORE, *(launch.name for launch in FORK)}
    readme = (FOLDER / "README.md").read_text()
    assert {name for name in names if f"| [`{name}.sh`]({name}.sh) |" not in readme} == set()


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_launch_files_when_read_then_name_no_machine_and_no_folder_of_one(path: Path) -> None:
    text = path.read_text()
    folders = set(re.findall(r"(?<![\w.~}*])/(?:\w+/)+\w*", text))
    assert folders <= {"/usr/bin/env", "/dev/null"}
    assert set(re.findall(r"\bnode\d[\w.-]*", text)) <= {
        "node0.example.invalid",
        "node1.example.invalid",
    }
    if path.suffix == ".sh":
        assert os.access(path, os.X_OK)
        assert "\nset -euo pipefail\n" in text


@each_fork_launch
def test_launch_when_dry_run_then_script_nodes_ranks_and_flags_are_those_that_are_meant(
    launch: Launch, variables: dict[str, str]
) -> None:
    started = _dry_run(launch.name, variables)
    parsed = _parse(started)
    options, target = parsed.options, _target(parsed, launch)
    assert (target.name, target.is_module) == (
        f"{variables['MEGATRON_FORK']}/pretrain_gpt.py",
        False,
    )
    assert started.launcher == ("deepspeed" if launch.by_deepspeed else "torchrun")
    if launch.by_deepspeed:
        assert options["num_gpus"] == launch.ranks
        assert options["num_nodes"] == (launch.nodes if launch.nodes > 1 else -1)
        assert options["master_port"] == 29500
    else:
        assert options["nproc_per_node"] == str(launch.ranks)
        assert options["standalone"] is (launch.nodes == 1)
        assert int(options["nnodes"].split(":")[-1]) == launch.nodes
    flags = _flags(target.arguments[launch.by_deepspeed :])
    assert flags["--use-distributed-optimizer"] == ""
    assert (
        not {"--deepspeed", "--deepspeed_config", "--deepspeed-config", "--zero-stage"}
        & flags.keys()
    )
    assert {flags["--data-path"], flags["--vocab-file"], flags["--merge-file"]} == {
        variables[name] for name in FILES
    }
    if "CHECKPOINT_DIR" in launch.needs:
        assert flags["--save"] == flags["--load"] == variables["CHECKPOINT_DIR"]
        assert "--bf16" in flags


def test_launch_when_there_are_two_nodes_then_they_meet_where_it_is_said_and_both_get_our_variables(
    variables: dict[str, str],
) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    options = _parse(
        _dry_run("gpt_7b_torchrun_2nodes", {**variables, "MASTER_PORT": "29501"})
    ).options
    assert (options["master_addr"], options["master_port"]) == ("node0.example.invalid", 29501)
    assert (options["node_rank"], options["rdzv_backend"]) == (1, "static")
    (Path(variables["HOME"]) / ".deepspeed_env").write_text("MINE=1\n")
    started = _dry_run("gpt_7b_deepspeed_2nodes", {**variables, "MEGATRON_DISTOPT_ADAM": "apex"})
    hosts = fetch_hostfile(_parse(started).options["hostfile"])
    assert dict(hosts) == {"node0.example.invalid": 8, "node1.example.invalid": 8}
    lines = Path(started.environment["DS_ENV_FILE"]).read_text().splitlines()
    assert (lines[0], lines[-1]) == ("CUDA_DEVICE_MAX_CONNECTIONS=1", "MINE=1")
    assert sorted(lines[1:-1]) == ["MEGATRON_DISTOPT=require", "MEGATRON_DISTOPT_ADAM=apex"]


@pytest.mark.parametrize("name", [*CORE, *(launch.name for launch in FORK)])
def test_launch_when_the_user_adds_arguments_or_a_script_to_run_before_then_they_are_passed_on(
    name: str, variables: dict[str, str]
) -> None:
    given = {**variables, "DATA_CACHE": "cache"}
    plain, started = _dry_run(name, given), _dry_run(name, given, *EXTRA)
    assert started.words == [*plain.words, *EXTRA]
    program = _parse(started).program
    assert Counter(program)["--lr"] == 2
    if name in CORE:
        options = _parse(plain).options
        assert int(options["num_gpus" if "deepspeed" in name else "nproc_per_node"]) == 2
        assert program[0] == "examples/pretrain_gpt_core.py"
        assert "--use-distributed-optimizer" in program
    else:
        before = _parse(_dry_run(name, {**given, "RUN_BEFORE": "path to/mend.py"}, *EXTRA))
        assert not before.options["module"]
        assert before.program == ["path to/mend.py", *program]


@each_fork_launch
def test_launch_when_variables_are_missing_then_it_starts_or_says_which_and_what_to_type(
    launch: Launch, variables: dict[str, str]
) -> None:
    needed = {name: variables[name] for name in ("PATH", "TMPDIR", "STARTED", *launch.needs)}
    _dry_run(launch.name, needed)
    Path(variables["STARTED"]).unlink()
    for missing in launch.needs:
        without = {name: value for name, value in variables.items() if name != missing}
        for given in (without, {**without, missing: ""}):
            done = _bash(launch.name, given)
            assert done.returncode != 0
            assert re.search(
                rf": {missing}: must .+\. Type: export {missing}=\S+$", done.stderr.strip()
            ), done.stderr
    assert not Path(variables["STARTED"]).exists()
