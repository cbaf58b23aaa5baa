"""The compiled conversions of optimizer state: equal to torch's operators to the bit, and never needed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_distopt.layout.estimate import BLOCK_NUMEL
from megatron_distopt.optimizer import kept as kept_module
from megatron_distopt.optimizer import native, native_build
from megatron_distopt.optimizer.codes import CODES
from megatron_distopt.optimizer.codes import random_bits as torch_random_bits
from megatron_distopt.optimizer.kept import Blocks, Kept, Plain, Remainder
from megatron_distopt.optimizer.native_build import CannotBuild, cache_folder, load

#: What has bits of its own: zeros, subnormals, ties of bf16, the largest numbers, inf and NaN.
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.0 + 2.0**-8,
    -1.0 - 3 * 2.0**-8,
    3.4e38,
    -3.4e38,
    torch.inf,
    -torch.inf,
    torch.nan,
)
LENGTHS = (*range(0, 9), *range(60, 300, 13), 127, 128, 129, 255, 256, 257, 300)


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if native.library() is None:
        pytest.skip("there is no C compiler")


def _values(numel: int, seed: int, *, special: float) -> Tensor:
    """Of all sizes; some blocks have values that are special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp2(torch.randn(numel, generator=generator) * 12)
    chosen = torch.rand(numel, generator=generator) < special
    picks = torch.randint(len(SPECIAL), (numel,), generator=generator)
    return torch.where(chosen, torch.tensor(SPECIAL)[picks], values)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """To the bit, but that any NaN is one: torch's own operators give several, by the place of an element."""
    if one.is_floating_point():
        is_nan = one.isnan()
        if not torch.equal(is_nan, other.isnan()):
            return False
        one, other = (each.masked_fill(is_nan, 0.0) for each in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "library", lambda *_: None)


def _copies(kept: Kept, times: int) -> list[Kept]:
    return [kept.map(Tensor.clone) for _ in range(times)]


def _codes_same(one: Blocks, other: Blocks) -> bool:
    """Codes in a block of NaN are any NaN."""
    if not torch.equal(one.exponents, other.exponents):
        return False
    blocks = (torch.arange(one.numel) + one.phase) // BLOCK_NUMEL
    known = one.exponents[blocks] != 255
    return torch.equal(one.codes[known], other.codes[known])


def _cases(numel: int, shuffled: random.Random) -> Iterator[tuple[Kept, Tensor, Tensor | None]]:
    """Forms of some values, what is written into them, and with which noise."""
    noise = torch_random_bits(shuffled.randrange(1 << 20), numel, torch.tensor(3.0), 1)
    for code in CODES.values():
        for is_root in (False, True):
            phase = shuffled.choice((0, 0, 1, 77, 127))
            codes = torch.randint(0, 128, (numel + 3,)).to(code.storage)[shuffled.randrange(4) :][:numel]
            exponents = torch.randint(0, 200, (-(-(numel + phase) // BLOCK_NUMEL),), dtype=torch.uint8)
            has_ties = is_root and shuffled.random() < 0.5
            blocks = Blocks(codes, exponents, code, phase, is_root, has_ties)
            values = _values(numel, numel, special=shuffled.choice((0.0, 0.01, 0.5)))
            yield blocks, values.abs() if is_root else values, shuffled.choice((None, noise))
    for dtype in (torch.float32, torch.bfloat16):
        for has_ties in (False, True):
            values = _values(numel, numel + 1, special=0.3)
            plain = Plain(torch.randn(numel + 1)[1:].to(dtype), has_ties)
            yield plain, values.abs() if has_ties else values, shuffled.choice((None, noise >> 15))


@pytest.mark.parametrize("numel", LENGTHS)
def test_form_when_compiled_then_it_is_that_of_torch(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(numel)
    for number, (kept, values, noise) in enumerate(_cases(numel, random.Random(numel))):
        ours, torchs = _copies(kept, 2)
        read = ours.read(0, numel).clone()
        ours.update(0, numel, values.clone(), noise)
        again = ours.read(0, numel).clone()
        with monkeypatch.context() as patch:
            _without(patch)
            assert _is_same(torchs.read(0, numel), read), (number, kept)
            torchs.update(0, numel, values.clone(), noise)
            assert _is_same(torchs.read(0, numel), again), (number, kept)
        if isinstance(ours, Blocks) and isinstance(torchs, Blocks):
            assert _codes_same(ours, torchs), (number, kept)
        else:
            assert all(_is_same(*pair) for pair in zip(ours.parts, torchs.parts, strict=True)), (number, kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *CODES])
def test_remainder_when_compiled_then_it_is_that_of_torch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (1, 127, 128, 300):
        values = _values(numel, numel, special=0.5)
        made = []
        for is_compiled in (True, False):
            second = kept_module.zeros_kept(numel, torch.device("cpu"), dtype, is_second=True, has_ties=True)
            model, low = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
            kept = Remainder(model, low, second)
            with monkeypatch.context() as patch:
                if not is_compiled:
                    _without(patch)
                second.update(0, numel, values.abs().nan_to_num_(1.0, 2.0), None)
                kept.update(0, numel, values.clone())
                second.update(0, numel, values.abs().nan_to_num_(3.0, 4.0), None)
                made.append([kept.read(0, numel).clone(), model, low, *second.parts])
        assert all(_is_same(*pair) for pair in zip(*made, strict=True)), numel
        assert _is_same(made[0][0], values), numel


def test_stretch_when_it_cuts_blocks_then_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for start, stop in ((0, 5), (100, 300), (51, 179), (307, 400)):
        for kept, values, _ in _cases(400, random.Random(start)):
            ours, torchs = _copies(kept, 2)
            ours.write(start, stop, values[start:stop].clone())
            part = ours.read(start, stop)
            with monkeypatch.context() as patch:
                _without(patch)
                torchs.write(start, stop, values[start:stop].clone())
                assert _is_same(torchs.read(start, stop), part)
                assert _is_same(torchs.read(0, 400), ours.read(0, 400))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_when_several_then_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, numel = torch.get_num_threads(), 1 << 16
    torch.set_num_threads(threads)
    try:
        test_form_when_compiled_then_it_is_that_of_torch(numel, monkeypatch)
        bits = native.random_bits(5, numel, torch.tensor(9.0), 3)
        assert torch.equal(bits, torch_random_bits(5, numel, torch.tensor(9.0), 3))
    finally:
        torch.set_num_threads(known)


def test_write_when_compiled_then_torch_counts_it() -> None:
    model = torch.zeros(10, dtype=torch.bfloat16)
    before = model._version
    Plain(model).write(0, 10, torch.ones(10))
    assert model._version > before


def test_tensor_when_not_plain_memory_of_a_cpu_then_torch_converts_it() -> None:
    assert native.library(torch.empty(3, device="meta")) is None
    assert native.library(torch.empty(4, 2).t()) is None


@pytest.mark.parametrize("obstacle", ["no compiler", "no folder", "fails"])
def test_library_when_it_cannot_be_made_then_one_line_says_so(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" if obstacle == "no folder" else tmp_path))
    if obstacle != "no folder":
        monkeypatch.setenv("CC", "no-such-compiler" if obstacle == "no compiler" else "false")
    with caplog.at_level(logging.INFO, logger="megatron_distopt"):
        assert native._library.__wrapped__() is None
    assert len(caplog.records) == 1


def test_library_when_the_file_is_broken_then_torch_converts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "_FLAGS", ("-O0", "-fPIC"))  # another library than those that are loaded
    made = []

    def break_it(path: str) -> CDLL:
        made.append(Path(path))
        Path(path).write_bytes(b"not a library")
        return CDLL(path)

    monkeypatch.setattr(native_build, "CDLL", break_it)
    with pytest.raises(CannotBuild):
        load()
    # Nothing but the libraries is left in the folder, one with threads and one without.
    assert sorted(made) == sorted(cache_folder().iterdir())


def test_library_when_it_gives_other_numbers_then_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.Native, "random_bits", lambda *args: args[-1].zero_())
    with caplog.at_level(logging.INFO, logger="megatron_distopt"):
        assert native._library.__wrapped__() is None
    assert "random bits" in caplog.text
