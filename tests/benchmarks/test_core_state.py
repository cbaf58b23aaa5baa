"""What benchmarks/core_state.py reads: its stand-ins compute Adam, and its clock and counters are of the host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import core_state
from peers.core_state import StateReading
from peers.te_adam import Float8, Quantizer, adam_of_block, join, split


def test_stand_in_of_the_kernel_when_it_updates_then_it_is_adamw() -> None:
    torch.manual_seed(0)
    main, moments = torch.randn(1000), [torch.zeros(1000), torch.zeros(1000)]
    param = torch.nn.Parameter(main.clone())
    adamw = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(1, 4):
        param.grad = torch.randn(1000)
        adam_of_block(main, param.grad, *moments, 1e-2, 0.9, 0.99, 1e-8, step, 1, 1, 0.1)
        adamw.step()
    # The order of operations differs, by a few roundings of fp32.
    torch.testing.assert_close(main, param.detach(), rtol=1e-5, atol=1e-7)


def test_remainders_when_split_and_joined_then_every_bit_is_there_and_the_param_is_rounded() -> None:
    main = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    param, remainder = split(main)
    assert torch.equal(join(param, remainder), main)
    assert param.dtype == torch.bfloat16
    assert ((param.float() - main).abs() <= main.abs() * 2**-8).all()


def test_fp8_stand_in_when_it_holds_values_then_they_are_rounded_to_three_bits() -> None:
    kept = Quantizer(scale=torch.tensor([2.0])).make_empty((4,))
    kept.copy_(torch.tensor([1.0, 1.05, -3.0, 100.0]))
    assert isinstance(kept, Float8)
    assert kept.float().tolist() == [1.0, 1.0, -3.0, 96.0]


def test_summary_when_a_contestant_did_not_run_then_its_row_says_why_and_ratios_are_of_the_same_round() -> None:
    readings = [
        StateReading("ours", "fp32", 0, 2.0),
        StateReading("ours", "fp32", 1, 4.0),
        StateReading("theirs", "fp32", 0, 4.0),
        StateReading("theirs", "fp32", 1, 8.0),
        StateReading("theirs, low", "low", 0, why_not="RuntimeError: asks for a package"),
    ]
    ours, theirs, low = core_state.summary(readings)
    assert ours["over"] is None
    assert (theirs["over"].least, theirs["over"].most) == (2.0, 2.0)
    assert "did not run: RuntimeError: asks for a package" in core_state.cells(low, ("state",))


def _read(rank: int, size: int) -> SimpleNamespace:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from peers.core_offload import Simulated

    device, host = Simulated(), torch.ones(1 << 22)
    there = torch.ones(1 << 22).to("sim")
    device.down = device.up = 0
    on_host = device.host_seconds(lambda: [host.mul_(1.5) for _ in range(5)])
    on_device = device.host_seconds(lambda: [there.mul_(1.5) for _ in range(5)] + [there.cpu()])
    there[:100].copy_(host[:100])
    return SimpleNamespace(on_host=on_host, on_device=on_device, down=device.down, up=device.up)


def test_clock_of_the_host_when_the_device_computes_then_that_is_not_counted_and_copies_are() -> None:
    found = run_ranks(_read, 1)[0]
    # 16 MiB that are multiplied five times, beside some calls of Python.
    assert found.on_device < 0.5 * found.on_host
    assert (found.down, found.up) == (4 << 22, 400)
