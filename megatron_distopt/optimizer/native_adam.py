"""Adam over state in any precision on a CPU: one call, and one pass over memory, for each flat param.

The C code (native_adam.c) rounds as torch's fused kernel does, also in the last elements, which are not a whole vector
of that; it is tried against the kernel before it is used. Whatever it does not know goes to the stretches of
low_precision_adam.py, which give the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, c_float, c_int32, c_uint32, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_distopt.layout.estimate import BLOCK_NUMEL
from megatron_distopt.optimizer.forms import Forms
from megatron_distopt.optimizer.kept import Blocks, Kept, Plain, Remainder
from megatron_distopt.optimizer.native import Form, Native, form_of, library, seed_of

_log = logging.getLogger("megatron_distopt")

#: Instructions of torch's kernel whose roundings are known.
_KNOWN = ("AVX2", "AVX512")
_PLAIN, _CODES, _REMAINDER = range(3)
#: Options that change the formula.
_UNUSUAL = ("amsgrad", "maximize")


class _Kept(Structure):
    """`Kept` of native_adam.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("values", "exponents", "model")),
        *((name, c_int32) for name in ("kind", "is_random")),
        ("form", Form),
    ]


class _Update(Structure):
    """`Update` of native_adam.c."""

    _fields_ = [
        *((name, c_float) for name in ("divisor", "decay", "first_weight", "beta2", "second_weight", "second_root")),
        *((name, c_float) for name in ("eps", "step_size")),
        ("is_decoupled", c_int32),
        ("seed", c_uint32),
    ]


def choose(forms: Sequence[Forms], groups: Sequence[Mapping[str, Any]], *, decoupled: bool) -> list[Forms]:
    """The flat params that are updated in one pass.

    Args:
        forms: of flat params.
        groups: their param groups.
        decoupled: whether decay is.
    """
    chosen = [each for each in forms if _is_known(each, groups[each.group])]
    return chosen if chosen and _is_right(decoupled) else []


def update(
    forms: Sequence[Forms],
    groups: Sequence[Mapping[str, Any]],
    *,
    decoupled: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Updates flat params that `choose` returned.

    Args:
        forms, groups, decoupled: see `choose`.
        grad_scale, found_inf: fp32 0-D, as torch's fused optimizers have them.
    """
    if found_inf is not None and float(found_inf):
        return
    divisor = 1.0 if grad_scale is None else float(grad_scale)
    for each in forms:
        each.step.add_(1)
        _update(each, groups[each.group], decoupled, divisor)


def _update(forms: Forms, group: Mapping[str, Any], decoupled: bool, divisor: float) -> None:
    native = library()
    if native is None:
        raise ValueError("flat params that were not chosen cannot be updated")
    kept = (_kept(forms.main, forms.model), _kept(forms.first), _kept(forms.second))
    native.adam(_numbers(forms, group, decoupled, divisor), kept, forms.grad, next(iter(forms.phases), 0))
    increment_version([forms.grad, *forms.tensors])


def _numbers(forms: Forms, group: Mapping[str, Any], decoupled: bool, divisor: float) -> _Update:
    """In double precision, as torch computes them, and then rounded to fp32."""
    count, (beta1, beta2), lr = int(forms.step), group["betas"], float(group["lr"])
    decay = 1 - lr * group["weight_decay"] if decoupled else group["weight_decay"]
    root, step_size = math.sqrt(1 - beta2**count), lr / (1 - beta1**count)
    moments = (1 - beta1, beta2, 1 - beta2, root)
    return _Update(divisor, decay, *moments, group["eps"], step_size, decoupled, seed_of(count, forms.number))


def _kept(kept: Kept, model: Tensor | None = None) -> _Kept:
    target = None if model is None else model.data_ptr()
    if isinstance(kept, Blocks):
        form, exponents = form_of(kept.code, kept.is_root, kept.has_ties), kept.exponents.data_ptr()
        return _Kept(kept.codes.data_ptr(), exponents, target, _CODES, kept.is_rounded_at_random, form)
    if isinstance(kept, Remainder):
        return _Kept(kept.low.data_ptr(), None, kept.model.data_ptr(), _REMAINDER, False, Form())
    plain = kept.parts[0]
    form = Form(plain.element_size(), 0, 0, False, isinstance(kept, Plain) and kept.has_ties)
    return _Kept(plain.data_ptr(), None, target, _PLAIN, kept.is_rounded_at_random, form)


def _is_known(forms: Forms, group: Mapping[str, Any]) -> bool:
    numbers = {part.dtype for kept in forms.kepts if isinstance(kept, Plain) for part in kept.parts}
    is_usual = not any(group.get(option) for option in _UNUSUAL) and len(forms.phases) <= 1
    has_numbers = numbers <= {torch.float32, torch.bfloat16} and forms.grad.dtype == torch.float32
    # Where a main param is rounded twice, the model param is what the form gives back.
    is_direct = forms.model is None or (forms.main.is_read_in_place and forms.model.dtype == torch.bfloat16)
    is_on_cpu = library(forms.grad, forms.step, *forms.tensors) is not None and _capability() in _KNOWN
    return is_usual and has_numbers and is_direct and is_on_cpu


def _capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


@cache
def _is_right(decoupled: bool) -> bool:
    """Whether the C code gives the bits of torch's kernel; it is tried once."""
    native = library()
    is_right = native is not None and all(_tries(native, decoupled, beta1) for beta1 in (0.9, 0.25))
    if not is_right:
        _log.info("optimizer state on the CPU is updated by torch's kernel, because the compiled one rounds otherwise")
    return is_right


def _tries(native: Native, decoupled: bool, beta1: float) -> bool:
    """On plain state whose end has a vector of 8 and less; how forms are read and written is tried by `library`."""
    generator = torch.Generator().manual_seed(7)
    main, first, grad = (torch.randn(2 * BLOCK_NUMEL + 13, generator=generator) for _ in range(3))
    second = torch.rand(main.numel(), generator=generator) * 1e-2
    torchs, step, scale = (main, first, second, grad), torch.tensor(3.0), torch.tensor(3.0)
    ours = [each.clone() for each in torchs]
    group: dict[str, Any] = {"lr": 1e-3, "betas": (beta1, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    forms = Forms(0, 0, Plain(ours[0]), Plain(ours[1]), Plain(ours[2]), ours[3], step, None)
    kernel: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_
    options = {"beta1": beta1, "beta2": 0.999, "amsgrad": False, "maximize": False, "grad_scale": scale}
    options |= {key: group[key] for key in ("lr", "eps", "weight_decay")}
    kernel([main], [grad], [first], [second], [], [step], found_inf=torch.zeros(()), **options)
    native.adam(_numbers(forms, group, decoupled, float(scale)), tuple(map(_kept, forms.kepts)), forms.grad, 0)
    return all(map(torch.equal, ours, torchs))
