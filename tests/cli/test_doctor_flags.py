"""What the doctor says about the flags of a launch script."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distopt.cli.doctor import check_launch_flags
from megatron_distopt.cli.doctor_demands import read_flags
from megatron_distopt.cli.show import Finding, Status, noted, ok
from megatron_distopt.config import Switch
from megatron_distopt.hosts.source.found import Survey
from megatron_distopt.hosts.source.survey import survey
from megatron_distopt.hosts.source.tree import fork_at
from tests.support.fork_trees import core, per_rank_2023
from tests.support.refusals import Said

FLAG = "--use-distributed-optimizer"


def read(folder: Path) -> Survey:
    return survey(fork_at(folder))


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.status is Status.PROBLEM]


def launch(words: str, found: Survey | None, switch: Switch = Switch.ON) -> list[Finding]:
    return list(check_launch_flags(words.split(), found, switch))


def test_flags_when_read_then_as_the_forks_parser_would(tmp_path: Path) -> None:
    options = read(per_rank_2023(tmp_path)).options
    words = [FLAG, "--no-contiguous-buffers-in-local-ddp", "--DDP-impl=torch", "--deepspeed", "--lr", "-1", "a", "--x"]
    assert vars(read_flags(words, options)) == {
        "use_distributed_optimizer": True,
        "use_contiguous_buffers_in_local_ddp": False,
        "DDP_impl": "torch",
        "deepspeed": True,
        "lr": "-1",
        "x": True,
    }


def test_flags_when_all_is_well_then_ok(tmp_path: Path) -> None:
    findings = launch(
        f"torchrun pretrain_gpt.py {FLAG} --DDP-impl local --distopt-adam auto", read(per_rank_2023(tmp_path))
    )
    assert findings == [ok("launch", FLAG, "given: this optimizer is used")]


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ("--deepspeed", "--deepspeed together with --use-distributed-optimizer"),
        ("--DDP-impl torch", "--DDP-impl torch"),
        ("--no-contiguous-buffers-in-local-ddp", "--no-contiguous-buffers-in-local-ddp"),
        ("--use-fsdp", "--use-fsdp"),
    ],
)
def test_flags_when_they_conflict_then_a_problem_only_with_ours(words: str, got: str, tmp_path: Path) -> None:
    found = read(per_rank_2023(tmp_path))
    (text,) = problems(launch(f"{words} {FLAG}", found))
    assert text.startswith(f"Invalid arguments: {got}. Must be ")
    assert problems(launch(words, found)) == []


def test_flags_when_megatron_core_has_an_option_that_is_refused_then_a_problem(tmp_path: Path) -> None:
    words = f"{FLAG} --optimizer-cuda-graph"
    assert problems(launch(words, read(core(tmp_path)))) == [
        Said("Invalid optimizer_cuda_graph: set", "Drop --optimizer-cuda-graph.")
    ]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--use-distributed-optimiser", FLAG),
        ("--use_distributed_optimizer", FLAG),
        ("--distopt-adma=apex", "--distopt-adam"),
        ("--distopt-non-finite", "--distopt-nonfinite"),
    ],
)
def test_flags_when_one_is_misspelt_then_a_problem_that_names_the_nearest(
    word: str, nearest: str, tmp_path: Path
) -> None:
    (text,) = problems(launch(word, read(per_rank_2023(tmp_path))))
    listed = f"{FLAG}. " if nearest == FLAG else "--distopt-adam, --distopt-optimizer, "
    assert text.startswith(f"Invalid flag: {word.partition('=')[0]}. Must be one of {listed}")
    assert text.endswith(f". Write {nearest}.")


def test_flags_when_the_parser_has_underscores_then_hyphens_are_a_problem(tmp_path: Path) -> None:
    file = per_rank_2023(tmp_path) / "megatron" / "arguments.py"
    file.write_text(file.read_text().replace(FLAG, "--use_distributed_optimizer"))
    found = read(tmp_path)
    assert launch("--use_distributed_optimizer", found)[0].status is Status.OK
    (text,) = problems(launch(FLAG, found))
    assert text.endswith(" Write --use_distributed_optimizer.")


def test_flags_when_ours_is_not_given_then_inert_or_a_problem_where_it_is_required(tmp_path: Path) -> None:
    found = read(per_rank_2023(tmp_path))
    text = f"not given: the package is inert; add {FLAG} to use it"
    assert launch("--bf16", found) == [noted("launch", FLAG, text)]
    assert problems(launch("--bf16", found, Switch.REQUIRE)) == [
        Said(f"Invalid run: without {FLAG}", f"Add {FLAG}, or unset the variable.")
    ]
    off = launch(FLAG, found, Switch.OFF)
    assert off == [noted("launch", FLAG, "given, but MEGATRON_DISTOPT=0: the host's own distributed optimizer runs")]


def test_flags_when_a_value_of_ours_is_bad_then_a_problem(tmp_path: Path) -> None:
    (text,) = problems(launch(f"{FLAG} --distopt-nonfinite explode", read(per_rank_2023(tmp_path))))
    assert text.startswith("Invalid nonfinite: 'explode'. Must be one of raise, skip, log.")
