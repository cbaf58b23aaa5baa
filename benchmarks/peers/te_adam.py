"""TransformerEngine's FusedAdam on a CPU: its own Python file, over stand-ins of its kernels and of its fp8 tensors.

What it keeps, and what it allocates during a step, is decided by that file. So memory is that of TransformerEngine, but
for fp8, where the stand-in keeps one byte an element (on some GPUs TransformerEngine keeps a transposed copy as well).
How long its kernels take cannot be known here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["adam_of_block", "join", "split", "transformer_engine_from"]

_BASE = "transformer_engine"
_OPTIMIZERS = f"{_BASE}.pytorch.optimizers"
#: Elements that a stand-in of a kernel updates at a time: what it allocates is not seen beside a model.
_BLOCK_NUMEL = 1 << 15


@contextmanager
def transformer_engine_from(folder: Path | None) -> Iterator[None]:
    """In the block megatron-core builds its optimizers as if TransformerEngine were installed.

    Args:
        folder: what `pip install --no-deps --target FOLDER transformer_engine` fills; no CUDA is needed for that.

    Raises:
        ModuleNotFoundError: there is no such folder.
    """
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer
    from packaging.version import Version

    if folder is None or not (folder / _BASE).is_dir():
        raise ModuleNotFoundError("TransformerEngine: --transformer-engine FOLDER names its files")
    with ExitStack() as undo:
        fused_adam = undo.enter_context(_loaded(folder))
        for owner, name, value in (
            (optimizer, "Adam", fused_adam),
            (optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", fused_adam),
            (distrib_optimizer, "USING_TE_OPTIMIZER", True),
            (utils, "_te_version", Version(_version_in(folder))),
        ):
            undo.enter_context(mock.patch.object(owner, name, value))
        yield


def _version_in(folder: Path) -> str:
    (found,) = folder.glob(f"{_BASE}-*.dist-info")
    return found.name.removesuffix(".dist-info").split("-")[1]


@contextmanager
def _loaded(folder: Path) -> Iterator[type]:
    """The class of the file; the modules around it are stand-ins while the block runs."""
    kernels = dict.fromkeys(("_fp8", "_capturable", "_capturable_master"), _no_kernel)
    own = {f"multi_tensor_adam{name}": kernel for name, kernel in kernels.items()}
    own |= {"multi_tensor_adam": _adam, "multi_tensor_adam_param_remainder": _adam_of_remainders}
    fp8 = {"Float8Tensor": Float8, "Float8Quantizer": Quantizer}
    stand_ins = {
        _BASE: _module(_BASE, __version__=_version_in(folder)),
        f"{_BASE}_torch": _module(f"{_BASE}_torch", **own),
        f"{_BASE}.pytorch": _module(f"{_BASE}.pytorch"),
        f"{_BASE}.pytorch.constants": _module(f"{_BASE}.pytorch.constants", DType=_Dtypes),
        f"{_BASE}.pytorch.quantized_tensor": _module(f"{_BASE}.pytorch.quantized_tensor", QuantizedTensor=Float8),
        f"{_BASE}.pytorch.tensor": _module(f"{_BASE}.pytorch.tensor"),
        f"{_BASE}.pytorch.tensor.float8_tensor": _module(f"{_BASE}.pytorch.tensor.float8_tensor", **fp8),
        _OPTIMIZERS: _module(_OPTIMIZERS),
    }
    with mock.patch.dict(sys.modules, stand_ins):
        path = folder / Path(*_OPTIMIZERS.split("."))
        _import(path / "multi_tensor_apply.py")
        stand_ins[_OPTIMIZERS].FusedAdam = found = _import(path / "fused_adam.py").FusedAdam  # type: ignore[attr-defined]
        yield found


def _module(name: str, **content: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content, __path__=[])
    return made


def _import(file: Path) -> ModuleType:
    name = f"{_OPTIMIZERS}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(str(file))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Dtypes:
    """Its names of dtypes that the file mentions."""

    kFloat32, kFloat8E4M3 = "fp32", "e4m3"


class Float8:
    """One fp8 tensor with a scale, as far as the file uses it.

    Args:
        shape: of it.
        quantizer: with its scale.
    """

    def __init__(self, shape: Sequence[int], quantizer: Quantizer) -> None:
        self._data, self._quantizer = torch.zeros(shape, dtype=torch.float8_e4m3fn), quantizer
        self.dtype, self.device = torch.float32, self._data.device

    def copy_(self, values: Tensor) -> None:
        self._data.copy_(values * self._quantizer.scale)

    quantize_ = copy_

    def float(self) -> Tensor:
        return self._data.float() / self._quantizer.scale


class Quantizer(SimpleNamespace):
    """Its scale: what a value is multiplied with."""

    def make_empty(self, shape: Sequence[int]) -> Float8:
        return Float8(shape, self)


def _no_kernel(*_: object) -> None:
    raise NotImplementedError("no stand-in of this kernel")


def _adam(chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *numbers: Any) -> None:
    """Gradients, params, both moments, and main params where the params are not fp32."""
    for tensors in zip(*lists, strict=True):
        for grad, param, exp_avg, exp_avg_sq, *main in zip(*map(_blocks, tensors), strict=True):
            adam_of_block(main[0] if main else param, grad, exp_avg, exp_avg_sq, *numbers)
            param.copy_(main[0] if main else param)


def _adam_of_remainders(chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *numbers: Any) -> None:
    """The main param is a bf16 param and the 16 bits that it lacks."""
    for tensors in zip(*lists, strict=True):
        for grad, param, exp_avg, exp_avg_sq, remainder in zip(*map(_blocks, tensors), strict=True):
            main = join(param, remainder)
            adam_of_block(main, grad, exp_avg, exp_avg_sq, *numbers)
            for into, part in zip((param, remainder), split(main), strict=True):
                into.copy_(part)


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().view(-1).split(_BLOCK_NUMEL)


def adam_of_block(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    is_decoupled: int,
    is_corrected: int,
    decay: float,
) -> None:
    """One update in fp32, in the order of its kernel's arguments."""
    if not (is_decoupled and is_corrected):
        raise NotImplementedError("a stand-in of AdamW with bias correction alone")
    first, second = exp_avg.float() * beta1 + (1 - beta1) * grad, exp_avg_sq.float() * beta2 + (1 - beta2) * grad**2
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    change = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
    main.sub_(lr * (change + decay * main))


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """fp32 of a bf16 param, which is rounded to nearest, and its remainder, int16."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(main: Tensor) -> tuple[Tensor, Tensor]:
    """The opposite of `join`."""
    bits = main.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)
