"""What a fork asks of the machine and the launch flags, and what the doctor says about a release of megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distopt.cli import doctor_demands
from megatron_distopt.cli.doctor_core import describe_core
from megatron_distopt.cli.doctor_demands import describe_demands
from megatron_distopt.cli.show import Finding, Status
from megatron_distopt.hosts.megatron_2023 import ezpz
from megatron_distopt.hosts.source.survey import survey
from megatron_distopt.hosts.source.tree import fork_at
from tests.support.fork_trees import core, gathered_2023, write_tree

BACKEND = (
    "def add(group):\n    group.add_argument('--distributed-backend', default='absent_backend')\n"
    "    group.add_argument('--no-async-reduce', action='store_false', dest='async_reduce')\n"
    "\n\ndef parse_args(extra_args_provider=None, ignore_unknown_args=False):\n    pass\n"
)
CONNECTIONS = (
    "import os\n\n\ndef check(args):\n    if os.environ.get('FORK_CONNECTIONS') != '1':\n"
    "        if args.async_reduce:\n            raise RuntimeError()\n"
)


def demands(folder: Path, text: str, *launch: str) -> list[Finding]:
    write_tree(gathered_2023(folder), {"megatron/arguments.py": BACKEND, "pretrain_gpt.py": text})
    tree = fork_at(folder)
    return list(describe_demands(survey(tree), tree, [folder.resolve() / "pretrain_gpt.py"], launch))


@pytest.mark.parametrize(
    "text", ["init(backend=args.distributed_backend)\n", "d = {'backend': args.distributed_backend}\n"]
)
def test_backend_when_torch_lacks_the_default_then_a_problem_unless_another_is_given(tmp_path: Path, text: str) -> None:
    (found,) = demands(tmp_path, text)
    assert found.status is Status.PROBLEM
    assert "absent_backend" in found.text
    assert not demands(tmp_path, text, "--distributed-backend", "gloo")
    assert not demands(tmp_path, "init(backend='gloo')\n")


def test_variable_when_an_option_that_is_on_demands_it_then_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = demands(tmp_path, CONNECTIONS)
    assert "FORK_CONNECTIONS=1" in found.text
    assert not demands(tmp_path, CONNECTIONS, "--no-async-reduce")
    monkeypatch.setenv("FORK_CONNECTIONS", "1")
    assert not demands(tmp_path, CONNECTIONS)


@pytest.mark.parametrize(("tools", "has_problem"), [(("make", "python3", "python3-config", "c++"), False), ((), True)])
def test_data_index_when_the_compiler_is_missing_then_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: tuple[str, ...], has_problem: bool
) -> None:
    monkeypatch.setattr(doctor_demands.shutil, "which", lambda name: name if name in tools else None)
    (tmp_path / "Makefile").write_text("default:\n")
    (found,) = demands(tmp_path, "def compile_helper():\n    pass\n")
    assert (found.status is Status.PROBLEM) is has_problem


def release(minor: int) -> str:
    return f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"


@pytest.mark.parametrize(("minor", "status"), [(9, Status.OK), (19, Status.OK), (20, Status.NOTE), (8, Status.NOTE)])
def test_release_of_core_when_read_then_it_is_named_and_compared(tmp_path: Path, minor: int, status: Status) -> None:
    fork = write_tree(core(tmp_path), {"megatron/core/package_info.py": release(minor)})
    (found,) = describe_core(survey(fork_at(fork)), fork_at(fork))
    assert (found.status, found.text.partition(",")[0]) == (status, f"0.{minor}.1rc0")


def test_options_of_core_when_refused_or_unknown_then_they_are_named(tmp_path: Path) -> None:
    config = (
        "class OptimizerConfig:\n    lr: float = 0\n    optimizer_cuda_graph: bool = False\n    brand_new: int = 0\n"
    )
    mapping = (
        "class ShardedTensor:\n    def validate_metadata_integrity(self):\n"
        "        for off, sh in self.pairs:\n            if off % sh:\n                raise ValueError\n"
    )
    files = {
        "megatron/core/optimizer/optimizer_config.py": config,
        "megatron/core/dist_checkpointing/mapping.py": mapping,
    }
    fork = write_tree(core(tmp_path), files)
    texts = {each.subject: each.text for each in describe_core(survey(fork_at(fork)), fork_at(fork))}
    assert "optimizer_cuda_graph" in texts["refused options"]
    assert texts["unknown options"].startswith("brand_new:")
    assert "save(folder)" in texts["dist_checkpointing"]


def test_ezpz_when_the_launcher_says_the_rank_then_its_functions_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (ezpz.get_rank(), ezpz.get_world_size(), ezpz.get_local_rank()) == (3, 4, 1)
    assert ezpz.timeitlogit(rank=0)(len) is len
    assert ezpz.get_logger("a", "rich").name == "a"
