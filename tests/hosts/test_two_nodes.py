"""Two nodes: the launch lines of docs/install-into-a-fork.md between network namespaces, which share no memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mini_fork import FOLDER, core_folder, launch
from tests.support.nodes import WHY_NOT, Nodes, two_nodes

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_CORE_SCRIPT = _ROOT / "examples" / "pretrain_gpt_core.py"
_PER_NODE, _PORT = 2, 29500
_RUNNER = ("-m", "megatron_distopt")
_FORK = ("--use-distributed-optimizer", "--bf16", "--clip-grad", "1.0")
_CORE = ("--use-distributed-optimizer", "--bf16", "--train-iters", "5")


@dataclass(frozen=True)
class Ended:
    """What the launchers of both nodes left."""

    status: tuple[int, ...]
    output: str


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def _environment(**more: str) -> dict[str, str]:
    environment = {"MINI_FORK_CORE": str(core_folder()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    paths = os.pathsep.join(map(str, (_ROOT, _ROOT / "examples")))
    return environment | {
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        "PYTHONPATH": paths,
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def _on_both(nodes: Nodes, words: Sequence[str], *, of_node: Mapping[int, Mapping[str, str]] | None = None) -> Ended:
    """torchrun on each node, from the fork's folder."""
    processes = []
    for node in range(2):
        line = ["torchrun", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(_PER_NODE)]
        line += ["--master-addr", nodes.address(0), "--master-port", str(_PORT), *words]
        command = ["env", f"--chdir={FOLDER}", str(_BIN / line[0]), *line[1:]]
        processes.append(nodes.start(node, command, _environment(**(of_node or {}).get(node, {}))))
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return Ended(tuple(process.returncode for process in processes), "".join(outputs))


def _on_one(words: Sequence[str], ranks: int = 2 * _PER_NODE) -> Ended:
    done = launch("torchrun", ranks, words, environment=_environment())
    return Ended((done.status,), done.output)


def _curves(file: Path) -> object:
    curves = json.loads(file.read_text())
    return curves["iterations"], [rank["params"] for rank in curves["ranks"]]


def test_torchrun_when_there_are_two_nodes_then_a_fork_of_2023_trains_to_the_bit_as_on_one(
    nodes: Nodes, tmp_path: Path
) -> None:
    words = (*_RUNNER, "pretrain.py", *_FORK, "--curves")
    two = _on_both(nodes, [*words, str(tmp_path / "two.json")])
    assert two.status == (0, 0), two.output
    assert "optimizer sharded over 4 by gloo" in two.output and "in shared memory" not in two.output
    one = _on_one([*words, str(tmp_path / "one.json")])
    assert one.status == (0,), one.output
    assert "in shared memory" in one.output
    assert _curves(tmp_path / "two.json") == _curves(tmp_path / "one.json")


def test_checkpoint_when_two_nodes_saved_it_then_one_node_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    flags = "--global-batch-size 8 --micro-batch-size 1 --train-iters 6 --save-interval 3 --lr-decay-style constant"
    common = (*_RUNNER, "pretrain.py", *_FORK, *flags.split())
    saved = _on_both(nodes, [*common, "--save", str(tmp_path / "kept"), "--curves", str(tmp_path / "all.json")])
    assert saved.status == (0, 0), saved.output
    (tmp_path / "kept" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = _on_one([*common, "--load", str(tmp_path / "kept"), "--curves", str(tmp_path / "rest.json")], ranks=2)
    assert resumed.status == (0,), resumed.output
    whole, rest = (json.loads((tmp_path / name).read_text())["iterations"] for name in ("all.json", "rest.json"))
    # In bf16 a sum over two ranks and one over four round differently.
    losses = [[row["loss"] for row in rows][-3:] for rows in (whole, rest)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_torchrun_when_there_are_two_nodes_then_megatron_core_trains_to_the_bit_as_on_one(nodes: Nodes) -> None:
    two, one = _on_both(nodes, [str(_CORE_SCRIPT), *_CORE]), _on_one([str(_CORE_SCRIPT), *_CORE])
    assert two.status == (0, 0), two.output
    lines = [re.findall(r"iteration +\d+ \| loss .*", each.output) for each in (two, one)]
    assert len(lines[0]) == 5
    assert lines[0] == lines[1]


def test_torchrun_when_the_package_is_switched_off_on_one_node_then_the_other_names_its_ranks(nodes: Nodes) -> None:
    words = [*_RUNNER, "pretrain.py", "--use-distributed-optimizer"]
    ended = _on_both(nodes, words, of_node={1: {"MEGATRON_DISTOPT": "0", "MINI_FORK_NATIVE": "1"}})
    assert "megatron_distopt is not used on rank 2 (MEGATRON_DISTOPT=0), rank 3 (MEGATRON_DISTOPT=0)" in ended.output
    assert all(ended.status)


@pytest.fixture
def reachable(nodes: Nodes, tmp_path: Path) -> Iterator[Path]:
    """A folder with an `ssh` that gets into both nodes; the launcher starts pdsh, and pdsh starts ssh."""
    for name in ("pdsh", "sshd", "ssh-keygen"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: apt-get install pdsh openssh-server")
    key, folder = tmp_path / "key", tmp_path / "bin"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    folder.mkdir()
    options = f"-i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = [str(shutil.which("sshd")), "-D", "-e", "-h", str(key), "-o", f"AuthorizedKeysFile={key}.pub"]
    daemon += ["-o", "PidFile=none", "-o", "StrictModes=no", "-o", "UsePAM=no"]
    network = [f"SetEnv=GLOO_SOCKET_IFNAME={nodes.link.interface(node)}" for node in range(2)]
    servers = [nodes.start(node, [*daemon, "-o", network[node]], {}) for node in range(2)]
    yield folder
    for server in servers:
        server.kill()
        server.wait()


def test_deepspeed_when_there_is_a_hostfile_then_a_fork_of_2023_trains_to_the_bit_as_by_torchrun(
    nodes: Nodes, reachable: Path, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text("".join(f"{nodes.address(node)} slots={_PER_NODE}\n" for node in range(2)))
    line = ["deepspeed", "--hostfile", str(tmp_path / "hostfile"), "--num_nodes", "2", "--num_gpus", str(_PER_NODE)]
    line += ["--module", "megatron_distopt", "pretrain.py", *_FORK, "--curves", str(tmp_path / "two.json")]
    (tmp_path / ".deepspeed_env").write_text(
        "".join(f"{name}={value}\n" for name, value in _environment().items() if name != "PYTHONWARNINGS")
    )
    environment = _environment(
        PATH=f"{reachable}:{_BIN}:{os.environ['PATH']}", HOME=str(tmp_path), PDSH_RCMD_TYPE="ssh"
    )
    command = ["env", f"--chdir={FOLDER}", str(_BIN / line[0]), *line[1:]]
    process = nodes.start(0, command, environment)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    one = _on_one([*_RUNNER, "pretrain.py", *_FORK, "--curves", str(tmp_path / "one.json")])
    assert one.status == (0,), one.output
    assert _curves(tmp_path / "two.json") == _curves(tmp_path / "one.json")
