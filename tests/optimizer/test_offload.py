"""Which buckets are on the host, and what is refused before anything is allocated.
tests/sim/test_offload.py trains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import BufferLayout, ParamSpec, lay_out
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.offload import buckets_on_host, check_offload, host_nbytes

_CUDA, _CPU = torch.device("cuda"), torch.device("cpu")


def _layout(*numels: int) -> BufferLayout:
    return lay_out(
        [ParamSpec(str(index), numel) for index, numel in enumerate(numels)],
        num_shards=2,
        bucket_size=100,
    )


_LAYOUTS = [(_layout(90, 50, 120, 30), torch.bfloat16), (_layout(200, 10), torch.float32)]


@given(st.floats(0, 1))
def test_buckets_when_a_fraction_is_asked_for_then_it_is_reached_with_no_bucket_more_than_needed(
    fraction: float,
) -> None:
    (layout, _), (chosen, of_fp32) = _LAYOUTS[0], buckets_on_host(_LAYOUTS, fraction, _CUDA)
    numels = [bucket.in_buffer.numel for bucket in layout.buckets]
    assert chosen == frozenset(range(len(chosen)))
    assert sum(numels[: len(chosen)]) >= fraction * sum(numels)
    assert not chosen or sum(numels[: len(chosen) - 1]) < fraction * sum(numels)
    assert of_fp32 == frozenset()


def test_buckets_when_the_params_are_on_the_cpu_then_none() -> None:
    assert buckets_on_host(_LAYOUTS, 1.0, _CPU) == [frozenset(), frozenset()]


def test_offload_when_the_memory_of_the_machine_is_too_small_then_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = DistOptConfig(offload_fraction=1.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("megatron_distopt.optimizer.offload._available_nbytes", lambda: 5000)
    with pytest.raises(ConfigError) as error:
        check_offload(_LAYOUTS, config, _CUDA)
    assert f"{8 * host_nbytes(_LAYOUTS, 1.0, _CUDA):,} bytes on this machine for 8 rank(s)" in str(
        error.value
    )
    assert "5,000 bytes" in str(error.value)
    check_offload(_LAYOUTS, config, _CPU)


@pytest.mark.parametrize(
    ("available", "fraction"),
    [(0, 0.01), (5000, 0.01), (5000, 0.5), (5000, 1.0), (15_000, 1.0), (20_000, 1.0)],
)
def test_offload_when_a_fraction_is_refused_then_the_proposed_one_is_the_greatest(
    available: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets are whole: a fraction that is computed from bytes alone may take a bucket for which
    there is no room."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("megatron_distopt.optimizer.offload._available_nbytes", lambda: available)
    with pytest.raises(ConfigError) as error:
        check_offload(_LAYOUTS, DistOptConfig(offload_fraction=fraction), _CUDA)
    proposed = float(str(error.value).removesuffix(".").rpartition("=")[2])
    check_offload(_LAYOUTS, DistOptConfig(offload_fraction=proposed), _CUDA)
    with pytest.raises(ConfigError):
        check_offload(_LAYOUTS, DistOptConfig(offload_fraction=proposed + 0.01), _CUDA)


def test_inner_when_it_has_no_kernel_on_the_host_then_refused() -> None:
    config = DistOptConfig(offload_fraction=0.5)
    check_offload(_LAYOUTS, config, _CUDA, choose_inner(config, "cpu"))
    config = DistOptConfig(offload_fraction=0.5, optimizer="torch.optim:Adagrad")
    with pytest.raises(ConfigError, match=r"offload_fraction=0\.5"):
        check_offload(_LAYOUTS, config, _CUDA, choose_inner(config, "cpu"))


def test_flags_when_megatron_core_asks_for_state_on_the_host_then_its_fraction_counts() -> None:
    # it imports the host, which takes seconds
    from megatron_distopt.hosts.megatron_core.translate import offload_of

    host = SimpleNamespace(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert offload_of(host) == {"offload_fraction": 0.5}
    host.optimizer_cpu_offload = False
    assert offload_of(host) == {}
    host = SimpleNamespace(
        optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, pin_cpu_grads=False
    )
    with pytest.raises(ConfigError, match="--no-pin-cpu-grads"):
        offload_of(host)
