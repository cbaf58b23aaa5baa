"""Tensors of fp32 values that are kept in other forms."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Span
from megatron_distopt.optimizer.low_precision import low_precision_adam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    Precision,
    as_plain,
    memory_of,
    part_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import (
    PlainValues,
    RemainderValues,
    stored_zeros,
)

MOMENTS = ("float32", "bfloat16", "int8")
NUMEL = 1000
#: Halfway between two bf16 numbers: above and below an even and an odd one, of either sign.
TIES = (1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, -1 - 3 * 2.0**-8)
CUTS = ((0, 77), (77, 500), (500, NUMEL))


def _moment(dtype: str, *, has_ties: bool = False) -> LowPrecisionTensor:
    return LowPrecisionTensor(
        stored_zeros(PlainValues(torch.zeros(NUMEL)), dtype, is_second=True, has_ties=has_ties)
    )


def _values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(NUMEL, generator=generator) * torch.exp(
        -6 * torch.rand(NUMEL, generator=generator)
    )
    values[10:20] = 0
    return values


def _kept_values(dtype: str) -> tuple[LowPrecisionTensor, Tensor]:
    moment = _moment(dtype)
    moment.copy_(_values())
    return moment, moment.clone()


@pytest.mark.parametrize("dtype", MOMENTS)
def test_coded_when_it_is_filled_piece_by_piece_in_any_order_then_it_holds_the_same(
    dtype: str,
) -> None:
    moment, values = _kept_values(dtype)
    moment.zero_()
    for start, stop in ((333, 900), (0, 100), (900, NUMEL), (100, 333)):
        moment[start:stop].copy_(values[start:stop])
    assert torch.equal(moment.clone(), values)


@pytest.mark.parametrize("dtype", MOMENTS)
def test_coded_when_it_is_viewed_then_reads_and_writes_go_to_the_same_elements(dtype: str) -> None:
    moment, values = _kept_values(dtype)
    box = moment[100:340].view(12, 20)[3:5, 4:7]
    assert torch.equal(box.clone(), values[100:340].view(12, 20)[3:5, 4:7])
    box.zero_()
    values[100:340].view(12, 20)[3:5, 4:7] = 0
    assert torch.equal(moment.clone(), values)
    assert torch.equal(moment[-1].clone(), values[-1])


@pytest.mark.parametrize("dtype", MOMENTS)
def test_coded_when_it_is_cut_into_parts_of_their_own_then_they_keep_the_values(dtype: str) -> None:
    moment, values = _kept_values(dtype)
    parts = [part_of(moment, Span(*cut)) for cut in CUTS]
    for _ in range(2):
        assert torch.equal(torch.cat([part.clone() for part in parts]), values)
        for part in parts:
            part.copy_(part.clone())
    parts[1].zero_()
    assert torch.equal(parts[0].clone(), values[:77]) and torch.equal(
        parts[2].clone(), values[500:]
    )


@pytest.mark.parametrize("dtype", MOMENTS)
def test_second_moment_when_a_value_is_not_zero_then_what_is_kept_is_neither(dtype: str) -> None:
    moment, values = _kept_values(dtype)
    assert torch.equal(values == 0, _values() == 0)
    tiny = torch.full((NUMEL,), 1e-30)
    tiny[0] = 1.0
    moment.copy_(tiny)
    assert bool((moment > 0).all())


@pytest.mark.parametrize("dtype", MOMENTS)
def test_remainder_when_a_main_param_is_kept_so_then_every_bit_is_there(dtype: str) -> None:
    main, second, model = _remainder(dtype)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    values[:4] = torch.tensor(TIES)
    values[4:8] = torch.tensor([torch.inf, -torch.inf, 3.4e38, 1e-42])
    main.stored.update(slice(0, NUMEL), values.clone())
    assert torch.equal(as_plain(main), values)
    assert torch.equal(model, values.bfloat16())
    second.copy_(_values())
    # the signs of the second moment are the main param's
    assert torch.equal(as_plain(main), values)
    assert bool((second >= 0).all())
    values[0] = torch.nan
    main.stored.update(slice(0, NUMEL), values.clone())
    assert bool(as_plain(main)[0].isnan()) and torch.equal(as_plain(main)[1:], values[1:])


def _remainder(dtype: str) -> tuple[LowPrecisionTensor, LowPrecisionTensor, Tensor]:
    second = stored_zeros(PlainValues(torch.zeros(NUMEL)), dtype, is_second=True, has_ties=True)
    model = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16()
    return (
        LowPrecisionTensor(RemainderValues(model, torch.zeros(NUMEL, dtype=torch.int16), second)),
        LowPrecisionTensor(second),
        model,
    )


def test_remainder_when_moved_then_all_but_the_model_param_is_and_it_is_read_there() -> None:
    """As a save does meanwhile. The meta device, which keeps no values, stands for another one."""
    main, second, model = _remainder("int8")
    main.stored.move(lambda part: part.to("meta"))
    assert {part.device.type for tensor in (main, second) for part in memory_of(tensor)} == {"meta"}
    assert (model.device.type, main.values().device.type) == ("cpu", "meta")


def test_remainder_when_others_write_to_it_then_the_param_stays_until_the_next_step() -> None:
    main, _, model = _remainder("float32")
    assert torch.equal(as_plain(main), model.float())
    before, values = model.clone(), torch.randn(NUMEL)
    main[100:200].copy_(values[100:200])
    assert torch.equal(model, before)
    assert torch.equal(main[100:200].clone(), values[100:200]) and torch.equal(
        main[:100].clone(), before[:100].float()
    )
    kept = main.stored
    assert isinstance(kept, RemainderValues)
    kept.flush()
    assert torch.equal(model[100:200], values[100:200].bfloat16())
    assert torch.equal(main[100:200].clone(), values[100:200])
    assert sum(part.nbytes for part in memory_of(main)) == 2 * NUMEL


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "numpy", "tolist", "unbind"])
def test_coded_when_its_memory_or_many_views_are_asked_for_then_it_is_refused(name: str) -> None:
    with pytest.raises((LayoutError, RuntimeError)):  # torch itself refuses some
        getattr(_moment("int8"), name)()


def test_coded_when_it_is_copied_then_the_copy_is_plain() -> None:
    moment, values = _kept_values("int8")
    for made in (copy.deepcopy(moment), moment.clone(), moment + 0, moment.detach().cpu().clone()):
        assert type(made) is Tensor and torch.equal(made, values)
    assert moment.mul_(4) is moment and torch.equal(moment.clone(), values * 4)  # the root doubles
    torch._foreach_copy_([moment], [values])
    assert torch.equal(moment.clone(), values)


def _first_moment(precision: Precision, stretch: int) -> Tensor:
    """What steps in stretches of a length leave, in a buffer where blocks begin elsewhere."""
    generator = torch.Generator().manual_seed(0)
    model = torch.randn(3 + NUMEL, generator=generator).bfloat16()[3:]
    main = model.float() if precision.main_params_dtype == "float32" else precision.main(model)
    optimizer = low_precision_adam.LowPrecisionAdam(
        [{"params": [main]}], lr=0.1, precision=precision
    )
    with mock.patch.object(low_precision_adam, "_STRETCH_ON_CPU", stretch):
        for _ in range(3):
            main.grad = torch.randn(NUMEL, generator=generator)
            optimizer.step()
    return as_plain(optimizer.state[main]["exp_avg"]).clone()


@pytest.mark.parametrize("second", MOMENTS)
@pytest.mark.parametrize("main", ["float32", "bfloat16", "remainder"])
def test_first_moment_when_stretches_have_other_lengths_then_no_block_of_it_is_cut(
    main: str, second: str
) -> None:
    """Their lengths depend on the number of threads."""
    precision = Precision(main, "int8", second)
    assert torch.equal(_first_moment(precision, NUMEL), _first_moment(precision, 200))
