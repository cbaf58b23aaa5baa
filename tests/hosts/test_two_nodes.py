"""Two nodes, and three: the launch lines of docs/install-into-a-fork.md between namespaces, which
share no memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mini_fork import FOLDER, core_folder, free_port, launch
from tests.support.nodes import WHY_NOT, Nodes, three_nodes

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_CORE_SCRIPT = _ROOT / "examples" / "pretrain_gpt_core.py"
_PER_NODE, _PORT = 2, 29500
_RUNNER = ("-m", "megatron_distopt")
_FORK = ("--use-distributed-optimizer", "--bf16", "--clip-grad", "1.0")
#: Each rank says what tells nodes apart elsewhere, and how its groups communicate.
_DETECTION = """
import os
import socket

import torch.distributed as dist

from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.group_nodes import nodes_of

dist.init_process_group("gloo")
rank = dist.get_rank()
inside = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
between = [dist.new_group([first, first + 2]) for first in (0, 1)][rank % 2]
boot_id = open("/proc/sys/kernel/random/boot_id").read().strip()
lines = [f"host {rank} {socket.gethostname()} {boot_id}"]
for name, handle in (("all", None), ("inside", inside), ("between", between)):
    is_split = len(nodes_of(Group.of(handle)).in_memory) > 1
    lines.append(f"{name} {rank} {'messages' if is_split else 'memory'}")
# At once: other ranks write to the same pipe.
os.write(1, "".join(f"{line}\\n" for line in lines).encode())
dist.barrier()
dist.destroy_process_group()
"""
#: Checks of tests/comm/test_codes.py, between three nodes of 2, 2 and 1 ranks and between some of
#: these ranks.
_SUMS = """
import torch.distributed as dist

from tests.comm.test_several_nodes import between_namespaces

dist.init_process_group("gloo")
between_namespaces()
dist.barrier()
dist.destroy_process_group()
"""
#: Rank 3 is killed in its third backward pass.
_KILLED = """
import itertools
import os
import signal

import pretrain as script
from megatron.training import pretrain

calls = itertools.count()


def forward_step(data_iterator, model):
    output, loss_func = script.forward_step(data_iterator, model)
    if next(calls) == 2 and os.environ["RANK"] == "3":
        output.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    return output, loss_func


pretrain(script.train_data, script.model_provider, None, forward_step)
"""
_CORE = ("--use-distributed-optimizer", "--bf16", "--train-iters", "5")


@dataclass(frozen=True)
class Ended:
    """What the launchers of both nodes left."""

    status: tuple[int, ...]
    output: str


#: Losses and so on by iteration, and params by rank.
Curves = tuple[list[dict[str, float]], list[dict[str, str]]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three; most tests take two of them."""
    with three_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """A fork of 2023 with as many ranks on one node."""
    file = tmp_path_factory.mktemp("one") / "curves.json"
    ended = _on_one([*_RUNNER, "pretrain.py", *_FORK, "--curves", str(file)])
    assert ended.status == (0,), ended.output
    assert "in shared memory" in ended.output
    return _read(file)


def _environment(**more: str) -> dict[str, str]:
    environment = {
        "MINI_FORK_CORE": str(core_folder()),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    paths = os.pathsep.join(map(str, (_ROOT, _ROOT / "examples")))
    return environment | {
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        "PYTHONPATH": paths,
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def _start_on_all(
    nodes: Nodes,
    words: Sequence[str],
    of_node: Mapping[int, Mapping[str, str]],
    local_sizes: Sequence[int] = (_PER_NODE, _PER_NODE),
) -> list[subprocess.Popen[str]]:
    """torchrun on each node with its number of ranks, from the fork's folder."""
    port = free_port() if nodes.shares_network else _PORT
    processes = []
    for node, size in enumerate(local_sizes):
        line = [
            "torchrun",
            "--nnodes",
            str(len(local_sizes)),
            "--node-rank",
            str(node),
            "--nproc-per-node",
            str(size),
        ]
        line += ["--master-addr", nodes.address(0), "--master-port", str(port), *words]
        command = ["env", f"--chdir={FOLDER}", str(_BIN / line[0]), *line[1:]]
        processes.append(nodes.start(node, command, _environment(**of_node.get(node, {}))))
    return processes


def _on_all(
    nodes: Nodes, words: Sequence[str], local_sizes: Sequence[int] = (_PER_NODE, _PER_NODE)
) -> Ended:
    return _ended(_start_on_all(nodes, words, {}, local_sizes))


def _ended(processes: Sequence[subprocess.Popen[str]]) -> Ended:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return Ended(tuple(process.returncode for process in processes), "".join(outputs))


def _on_one(words: Sequence[str], ranks: int = 2 * _PER_NODE) -> Ended:
    done = launch("torchrun", ranks, words, environment=_environment())
    return Ended((done.status,), done.output)


def _read(file: Path) -> Curves:
    curves = json.loads(file.read_text())
    return curves["iterations"], [rank["params"] for rank in curves["ranks"]]


@pytest.mark.parametrize("shares_network", [False, True])
def test_memory_when_nodes_have_one_name_and_boot_id_then_only_ranks_that_can_map_it_share_it(
    nodes: Nodes, shares_network: bool, tmp_path: Path
) -> None:
    script = tmp_path / "detection.py"
    script.write_text(_DETECTION)
    ended = _on_all(nodes.alike(shares_network=shares_network), [str(script)])
    assert ended.status == (0, 0), ended.output
    assert len(set(re.findall(r"^host \d (.*)$", ended.output, re.MULTILINE))) == 1
    assert sorted(re.findall(r"^(\w+ \d) (messages|memory)$", ended.output, re.MULTILINE)) == [
        *((f"all {rank}", "messages") for rank in range(4)),
        *((f"between {rank}", "messages") for rank in range(4)),
        *((f"inside {rank}", "memory") for rank in range(4)),
    ]


def test_torchrun_when_there_are_two_nodes_then_a_fork_of_2023_trains_to_the_bit_as_on_one(
    nodes: Nodes, on_one: Curves, tmp_path: Path
) -> None:
    """Without an interruption, and saved and loaded at the third step."""
    words, kept = (*_RUNNER, "pretrain.py", *_FORK, "--curves"), str(tmp_path / "kept")
    whole = _on_all(nodes, [*words, str(tmp_path / "two.json")])
    assert whole.status == (0, 0), whole.output
    assert (
        "optimizer sharded over 4 by gloo" in whole.output
        and "in shared memory" not in whole.output
    )
    assert _read(tmp_path / "two.json") == on_one
    for name, more in (
        ("first", ("--save", kept, "--exit-interval", "3")),
        ("rest", ("--load", kept)),
    ):
        ended = _on_all(nodes, [*words, str(tmp_path / f"{name}.json"), *more])
        assert ended.status == (0, 0), ended.output
    rows, params = _read(tmp_path / "rest.json")
    assert params == on_one[1]
    assert [row["loss"] for row in rows] == [row["loss"] for row in on_one[0]][3:]


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_grads_when_nodes_add_up_their_own_then_a_fork_of_2023_trains_repeats_and_stays_close(
    nodes: Nodes, on_one: Curves, form: str, tmp_path: Path
) -> None:
    """Once eager, in one bucket of the fork's, and twice overlapped, in buckets."""
    words = [*_RUNNER, "pretrain.py", *_FORK, "--distopt-reduce-dtype", form, "--curves"]
    overlapped = ["--distopt-overlap-grad-reduce", "yes", "--distopt-bucket-size", "4000"]
    curves = []
    for number, more in enumerate(([], overlapped, overlapped)):
        file = tmp_path / f"{number}.json"
        ended = _on_all(nodes, [*words, str(file), *more])
        assert ended.status == (0, 0), ended.output
        told = "bfloat16" if form == "bfloat16" else "fp32 between 2 node(s) of 2+2"
        assert f"grads in {told}" in ended.output
        curves.append(_read(file))
    assert curves[1] == curves[2]
    losses = [[row["loss"] for row in rows] for rows, _ in (*curves, on_one)]
    # The bits of bf16 params differ by a step here and there.
    assert losses[0] == pytest.approx(losses[-1], rel=0.01) and losses[1] == pytest.approx(
        losses[-1], rel=0.01
    )


def test_sums_when_three_nodes_have_unlike_sizes_then_they_are_those_of_the_nodes_to_the_bit(
    nodes: Nodes, tmp_path: Path
) -> None:
    script = tmp_path / "sums.py"
    script.write_text(_SUMS)
    ended = _on_all(nodes, [str(script)], (2, 2, 1))
    assert ended.status == (0, 0, 0), ended.output
    right = re.findall(r"^right on (.*)$", ended.output, re.MULTILINE)
    assert Counter(right) == {"2+2+1": 5, "1+1+1": 3, "2+1": 3, "2+2": 4, "1+1": 2}


def test_sums_when_saved_on_two_nodes_then_three_nodes_go_on_and_resume_to_the_bit(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Three nodes of one rank each, and of two, one and one."""
    words = [
        *_RUNNER,
        "pretrain.py",
        *_FORK,
        "--global-batch-size",
        "24",
        "--micro-batch-size",
        "2",
    ]
    words += ["--distopt-reduce-dtype", "float32", "--curves"]
    kept = str(tmp_path / "kept")
    whole = _on_all(nodes, [*words, str(tmp_path / "whole.json")])
    saved = _on_all(
        nodes, [*words, str(tmp_path / "saved.json"), "--save", kept, "--exit-interval", "3"]
    )
    assert whole.status == saved.status == (0, 0), saved.output
    wanted, _ = _read(tmp_path / "whole.json")
    for local_sizes in ((1, 1, 1), (2, 1, 1)):
        rests = []
        for number in range(2):
            file = tmp_path / f"{len(local_sizes)}, {number}.json"
            ended = _on_all(nodes, [*words, str(file), "--load", kept], local_sizes)
            assert ended.status == (0, 0, 0), ended.output
            named = "+".join(map(str, local_sizes))
            assert f"grads in fp32 between 3 node(s) of {named}" in ended.output
            rests.append(_read(file))
        assert rests[0] == rests[1]
        # The bits of bf16 params differ by a step here and there, as between two other ways to add
        # up.
        losses = [[row["loss"] for row in rows] for rows in (rests[0][0], wanted[3:])]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_torchrun_when_there_are_two_nodes_then_megatron_core_trains_to_the_bit_as_on_one(
    nodes: Nodes,
) -> None:
    two, one = _on_all(nodes, [str(_CORE_SCRIPT), *_CORE]), _on_one([str(_CORE_SCRIPT), *_CORE])
    assert two.status == (0, 0), two.output
    lines = [re.findall(r"iteration +\d+ \| loss .*", each.output) for each in (two, one)]
    assert len(lines[0]) == 5
    assert lines[0] == lines[1]


def test_rank_when_killed_on_one_node_then_the_other_node_names_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    paths = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{_ROOT}"}
    processes = _start_on_all(nodes, [*_RUNNER, str(script), *_FORK], {0: paths, 1: paths})
    outputs = [_ended([process]).output for process in processes]
    assert all(process.returncode for process in processes)
    assert len(re.findall(r"RanksDisagreeError: .*lost rank 3\b", outputs[0])) == _PER_NODE, (
        outputs[0]
    )


@pytest.fixture
def reachable(nodes: Nodes, tmp_path: Path) -> Iterator[Path]:
    """A folder with an `ssh` that gets into both nodes; the launcher starts pdsh, and pdsh starts
    ssh."""
    for name in ("pdsh", "sshd", "ssh-keygen"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: apt-get install pdsh openssh-server")
    key, folder = tmp_path / "key", tmp_path / "bin"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    folder.mkdir()
    options = (
        f"-i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = [
        str(shutil.which("sshd")),
        "-D",
        "-e",
        "-h",
        str(key),
        "-o",
        f"AuthorizedKeysFile={key}.pub",
    ]
    daemon += ["-o", "PidFile=none", "-o", "StrictModes=no", "-o", "UsePAM=no"]
    network = [f"SetEnv=GLOO_SOCKET_IFNAME={nodes.link.interface(node)}" for node in range(2)]
    servers = [nodes.start(node, [*daemon, "-o", network[node]], {}) for node in range(2)]
    yield folder
    for server in servers:
        server.kill()
        server.wait()


def test_deepspeed_when_there_is_a_hostfile_then_a_fork_of_2023_trains_to_the_bit_as_by_torchrun(
    nodes: Nodes, on_one: Curves, reachable: Path, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(
        "".join(f"{nodes.address(node)} slots={_PER_NODE}\n" for node in range(2))
    )
    line = [
        "deepspeed",
        "--hostfile",
        str(tmp_path / "hostfile"),
        "--num_nodes",
        "2",
        "--num_gpus",
        str(_PER_NODE),
    ]
    line += [
        "--module",
        "megatron_distopt",
        "pretrain.py",
        *_FORK,
        "--curves",
        str(tmp_path / "two.json"),
    ]
    (tmp_path / ".deepspeed_env").write_text(
        "".join(
            f"{name}={value}\n"
            for name, value in _environment().items()
            if name != "PYTHONWARNINGS"
        )
    )
    environment = _environment(
        PATH=f"{reachable}:{_BIN}:{os.environ['PATH']}", HOME=str(tmp_path), PDSH_RCMD_TYPE="ssh"
    )
    command = ["env", f"--chdir={FOLDER}", str(_BIN / line[0]), *line[1:]]
    process = nodes.start(0, command, environment)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert _read(tmp_path / "two.json") == on_one


def test_deepspeed_when_there_is_no_ssh_then_its_line_on_each_node_trains_to_the_bit_as_on_one(
    nodes: Nodes, on_one: Curves, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(
        "".join(f"{nodes.address(node)} slots={_PER_NODE}\n" for node in range(2))
    )
    processes = []
    for node in range(2):
        line = [
            "deepspeed",
            "--hostfile",
            str(tmp_path / "hostfile"),
            "--no_ssh",
            "--node_rank",
            str(node),
        ]
        line += [
            "--master_addr",
            nodes.address(0),
            "--master_port",
            str(_PORT),
            "--module",
            "megatron_distopt",
        ]
        line += ["pretrain.py", *_FORK, "--curves", str(tmp_path / "two.json")]
        processes.append(
            nodes.start(
                node, ["env", f"--chdir={FOLDER}", str(_BIN / line[0]), *line[1:]], _environment()
            )
        )
    ended = _ended(processes)
    assert ended.status == (0, 0), ended.output
    assert _read(tmp_path / "two.json") == on_one
