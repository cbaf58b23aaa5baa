"""For all tests, doctests included."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from importlib.metadata import version
from typing import Any

import pytest

# Importing DeepSpeed takes seconds in every spawned rank and writes a line to stdout. What follows
# from asking it is tested where it is the subject: tests/optimizer/test_accelerator.py and
# tests/test_configs.py.
os.environ.setdefault("MEGATRON_DISTOPT_ACCELERATOR", "torch")
# Tests compare to the bit, and some of torch's operators (QR, products of matrices) round otherwise
# on several threads. torch reads this when it is imported, here and in spawned ranks, so it is set
# before.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Until all is imported there is next to no garbage, and looking for it takes a tenth of the time.
gc.disable()

# Collecting doctests imports a module, and these import megatron, which only spawned ranks should
# do.
collect_ignore_glob = [
    "megatron_distopt/hosts/megatron_core/*",
    "megatron_distopt/hosts/megatron_2023/*",
    "tests/hosts/toy_host/*",
]
if tuple(map(int, version("torch").split(".")[:2])) < (2, 10):
    # No backend in Python, on which the simulated device stands, and no fp32 gradients beside
    # 16-bit params, which the reference of drawn programs uses.
    collect_ignore_glob += [
        "tests/sim/*",
        "tests/support/sim/*",
        "tests/support/simulated.py",
        "tests/differential/*",
    ]

#: Files that take long, in this order: none of them is to begin when all others have ended.
_FIRST = (
    "test_megatron_core_versions",
    "test_megatron_2023_checkpoints",
    "test_megatron_2023_install_methods",
    "test_recipes",
    "test_idioms",
    "test_megatron_2023_owners",
    "test_megatron_core_owners",
    "test_promise_2023",
    "test_runner",
    "test_quickstart",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Before torch 2.10 a 16-bit param has no fp32 gradient, and a test of one is skipped for what
    the package says."""
    report = yield
    if (
        report.failed
        and call.excinfo is not None
        and "before torch 2.10" in str(call.excinfo.value)
    ):
        report.outcome = "skipped"
        report.longrepr = (
            str(item.path),
            0,
            "needs fp32 gradients of 16-bit params, which torch has from 2.10 on",
        )
    return report


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
