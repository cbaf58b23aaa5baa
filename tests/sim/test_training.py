"""Training with plain torch on the simulated accelerator leaves the bits that it leaves on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.programs import PROGRAMS
from tests.sim.trial import FEW, MANY, many, try_programs, try_through_deepspeed
from tests.support.sim import Personality
from tests.support.spawn import run_ranks

Found = list[dict[str, list[str]]]
#: What is not long.
SHORT = (
    *("mixed overlap", "bf16 overlap, two streams", "reduced in bf16, forward on a stream", "step on a stream"),
    *("fp16 dynamic", "nan raise", "saved in the background", "a param begins to train"),
    *("low precision, nan skip", "host half, remainders", "muon, step on a stream"),
)
#: On a device that DeepSpeed names.
NAMED = ("mixed overlap", "saved in the background")
#: On four ranks; what differs between two and four is the collectives.
ON_FOUR = ("bf16 overlap", "mixed overlap", "reduced in bf16, forward on a stream", "fp16 dynamic", "nan skip")
#: Long ones are cut into parts of equal seeds, so that a rank need not live for an hour.
_BY_SEEDS = {seeds: sorted(name for name in PROGRAMS if many(name) == seeds) for seeds in map(many, PROGRAMS)}
PARTS = [(seeds, names[start::10]) for seeds, names in _BY_SEEDS.items() for start in range(10)]
#: A device without float64 and fp16 has other numbers of a step, and the same streams.
SMALL = (*NAMED, "a module's buffers", "fp32 overlap", "reduced in bf16, overlap", "nan skip", "host half", "muon")


@pytest.fixture(scope="module")
def found() -> Found:
    return run_ranks(try_programs, 2, SHORT, FEW, seconds=300)


@pytest.fixture(scope="module")
def found_through_deepspeed() -> Found:
    return run_ranks(try_through_deepspeed, 2, NAMED, range(2), seconds=300)


@pytest.mark.parametrize("name", SHORT)
def test_training_when_on_an_asynchronous_device_then_the_bits_are_those_of_the_cpu(found: Found, name: str) -> None:
    assert [of_rank[name] for of_rank in found] == [[], []]


@pytest.mark.parametrize("name", NAMED)
def test_training_when_deepspeed_names_a_device_without_float64_and_fp16_then_the_bits_are_those_of_the_cpu(
    found_through_deepspeed: Found, name: str
) -> None:
    assert [of_rank[name] for of_rank in found_through_deepspeed] == [[], []]


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "seeds", "names"), [*((2, *part) for part in PARTS), *((4, many(name), (name,)) for name in ON_FOUR)]
)
def test_training_when_on_an_asynchronous_device_then_no_seed_finds_anything(
    size: int, seeds: Sequence[int], names: Sequence[str]
) -> None:
    found = run_ranks(try_programs, size, names, seeds, seconds=3000)
    assert [{name: wrong for name, wrong in of_rank.items() if wrong} for of_rank in found] == [{}] * size


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_training_when_the_device_lacks_float64_and_fp16_then_no_seed_finds_anything(
    name: str,
) -> None:
    assert run_ranks(try_programs, 2, [name], MANY, Personality.SMALL, seconds=3000) == [{name: []}] * 2
