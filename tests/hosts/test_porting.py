"""The steps of docs/porting.md, executed: a host of two small files is ported by two, and
trains, saves and resumes."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from megatron_distopt.plugin import detect
from tests.hosts.toy_host.facts import TOY
from tests.support.spawn import run_ranks

HOST = Path(__file__).parent / "toy_host"
ROOT = Path(__file__).parents[2]
SAVED, LAST = 3, 6


def _train(folder: Path, *, ours: bool, first: int = 0, last: int = LAST) -> list[Tensor]:
    from megatron.toy import training

    args = Namespace(lr=2.0**-6, use_distributed_optimizer=ours)
    model, optimizer = training.setup(args)
    if first:
        optimizer.load(folder / "checkpoint")
    params: list[Tensor] = training.train(args, model, optimizer, first, last)
    if last == SAVED:
        optimizer.save(folder / "checkpoint")
    return params


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@contextmanager
def _installed() -> Iterator[None]:
    """In the block the process has the toy host, and the package is installed into it."""
    sys.path.insert(0, str(HOST))
    with mock.patch.object(detect, "GENERATIONS", (TOY,)):
        installation = megatron_distopt.install()
        yield
        installation.undo()


def _ported(rank: int, size: int, folder: Path) -> dict[str, Any]:
    with _installed():
        hosts = _train(folder, ours=False)
        found = {"updates": _distance(hosts, _train(folder, ours=False, last=1))}
        whole = _train(folder, ours=True)
        found["from the host's"] = _distance(whole, hosts)
        _train(folder, ours=True, last=SAVED)
        found["resumed"] = _distance(_train(folder, ours=True, first=SAVED), whole)
    dist.barrier()
    return found


def _at_one_rank(rank: int, size: int, folder: Path) -> float:
    with _installed():
        whole = _train(folder, ours=True)
        return _distance(_train(folder, ours=True, first=SAVED), whole)


def test_host_when_ported_by_the_steps_then_it_trains_saves_and_resumes(tmp_path: Path) -> None:
    for found in run_ranks(_ported, 2, tmp_path):
        assert found["updates"] > 2.0**-6  # steps do something
        # Sums of two ranks are the same; torch's fused Adam rounds otherwise than its loop.
        assert found["from the host's"] < 1e-6
        assert found["resumed"] == 0.0
    (resumed,) = run_ranks(_at_one_rank, 1, tmp_path)
    assert resumed < 1e-6  # gradients of two ranks are added up in another order


def test_port_when_counted_then_it_is_as_small_as_the_page_says() -> None:
    page = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
    for file in (HOST / "facts.py", HOST / "get_in.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert f"[{len(lines)} lines](../tests/hosts/toy_host/{file.name})" in page
