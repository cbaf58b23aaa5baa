"""A Megatron of 2023 and megatron-core on the simulated accelerator leave the bits that they leave on the CPU."""

from __future__ import annotations

import pytest

from tests.sim.host_programs import CORE, FORK
from tests.sim.trial import FEW, many, try_host
from tests.support.spawn import run_ranks

SHORT = {"fork": ("bf16 overlap, fp32 norms",), "core": ("bf16 overlap",)}
LONG = [("fork", name) for name in FORK] + [("core", name) for name in CORE]


@pytest.mark.parametrize("host", SHORT)
def test_megatron_when_on_an_asynchronous_device_then_the_bits_are_those_of_the_cpu(host: str) -> None:
    found = run_ranks(try_host, 2, host, SHORT[host], FEW, seconds=300)
    assert found == [{name: [] for name in SHORT[host]}] * 2


@pytest.mark.long
@pytest.mark.parametrize(("host", "name"), LONG)
def test_megatron_when_on_an_asynchronous_device_then_no_seed_finds_anything(host: str, name: str) -> None:
    assert run_ranks(try_host, 2, host, [name], many(name), seconds=3000) == [{name: []}] * 2
