"""torch's operators on the simulated device: each is queued, and carried out on the CPU later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from tests.support.sim.machine import DEVICE, SimError, machine
from tests.support.sim.memory import contiguous_strides, memory, void

_CPU = DispatchKeySet(DispatchKey.CPU)
#: Whose result, or the shape of whose result, the host has to know.
_READS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique", "_unique2", "bincount"),
    *("unique_dim", "unique_consecutive", "allclose"),
}
#: Operators that overwrite their first argument without a look at it.
_FILLS = {"copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_"}


#: Whose results have another dtype on the CPU than torch's rule for shapes says.
_ROUND_ELSEWHERE = ("aten::native_layer_norm",)


@dataclass
class Rules:
    """What the device has not.

    Args:
        missing: dtypes.
    """

    missing: frozenset[torch.dtype] = frozenset()


rules = Rules()


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator with a tensor of the device among its arguments, or that makes one."""
    memory.collect()
    name = op._schema.name.removeprefix("aten::")
    special = _SPECIAL.get(name)
    if special is not None:
        return special(op, *args, **kwargs)
    if _is_view(op):
        return op.redispatch(_CPU, *args, **kwargs)
    if name in _READS or _looks_through_mask(name, args):
        return _read(op, name, args, kwargs)
    return _launch(op, name, args, kwargs)


def _is_view(op: Any) -> bool:
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _looks_through_mask(name: str, args: Sequence[Any]) -> bool:
    masks = (torch.bool, torch.uint8)
    if name not in ("index", "index_put_", "_index_put_impl_"):
        return False
    is_masked = any(each is not None and each.dtype in masks for each in args[1])
    return is_masked and (name == "index" or args[2].numel() > 1)


def _check(tensor: Tensor, name: str) -> None:
    if tensor.dtype in rules.missing:
        raise TypeError(f"{name}: the device has no {tensor.dtype}")


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Changes what arguments or results consist of; torch's own function for it takes most of the time of a test."""
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(change, each) for each in values])
    if isinstance(values, dict):
        return {key: _mapped(change, each) for key, each in values.items()}
    return change(values)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _tensors(each)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _captured(name: str, values: Any) -> Any:
    """Arguments for the CPU: memory of the device by reference, a number of the host by value."""

    def take(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if each.device.type == DEVICE:
            _check(each, name)
            return memory.on_cpu(each)
        if each.dim() == 0 and each.device.type == "cpu":
            return each.clone()
        raise SimError(f"{name}: one tensor is on {each.device}, another one on {DEVICE}")

    return _mapped(take, values)


def _on_host(values: Any) -> Any:
    """Devices among the arguments become the CPU."""

    def take(each: Any) -> Any:
        return torch.device("cpu") if isinstance(each, torch.device) and each.type == DEVICE else each

    return _mapped(take, values)


def _grow_outputs(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """torch gives operators outputs that are empty, to be resized."""
    outs = [value for each, value in _bound(op, args, kwargs) if each.is_out]
    if any(each.numel() == 0 for each in _tensors(outs)):
        shapes = op(*_as_meta(args), **_as_meta(dict(kwargs)))
        for into, like in zip(_tensors(outs), _tensors(shapes), strict=True):
            if into.shape != like.shape:
                made = memory.allocate(like.shape, like.stride(), into.dtype)
                torch.ops.aten.set_.source_Tensor(into, made)


def _as_declared(op: Any, args: Sequence[Any]) -> list[Any]:
    """Numbers become tensors where no number is taken: torch hands a tensor made of a number on as the number."""
    tensors = [str(each.type) == "Tensor" for each in op._schema.arguments[: len(args)]]
    return [
        torch.tensor(each) if is_tensor and isinstance(each, (int, float)) else each
        for each, is_tensor in zip(args, tensors, strict=True)
    ]


def _launch(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args = _as_declared(op, args)
    _grow_outputs(op, args, kwargs)
    given, named = _captured(name, (list(args), dict(kwargs)))
    given, named = _on_host(given), _on_host(named)
    outputs = _outputs(op, args, kwargs)
    for each in _tensors(outputs):
        _check(each, name)
    made = [memory.on_cpu(each) for each in _tensors(outputs.made)]
    seed = _seed_of(op)

    def run() -> None:
        if seed is not None:
            named["generator"] = torch.Generator().manual_seed(seed)
        result = op(*given, **named)
        for into, value in zip(made, _tensors(result) if made else (), strict=True):
            into.copy_(value)

    queue(name, run, reads=(given, named), writes=(outputs.written, made))
    return outputs.returned


def queue(name: str, run: Callable[[], Any], *, reads: Any, writes: Any) -> None:
    """Queues a kernel on the current stream, and counts it."""
    counts, only_written = machine.counts, name in _FILLS
    written = list(_tensors(writes))
    counts.launches.append(name)
    counts.nbytes_written += sum(each.nbytes for each in written)
    counts.nbytes_read += sum(each.nbytes for each in _tensors(reads)) - only_written * sum(w.nbytes for w in written)
    machine.launch(name, run, on=machine.current)


def _seed_of(op: Any) -> int | None:
    has_generator = any(each.name == "generator" for each in op._schema.arguments)
    return int(torch.randint(1 << 31, ())) if has_generator else None


@dataclass
class _Outputs:
    """What an operator returns.

    Args:
        returned: to the program.
        written: arguments that are changed.
        made: tensors that are new.
    """

    returned: Any
    written: list[Tensor]
    made: list[Tensor]


def _outputs(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Outputs:
    written = [value for each, value in _bound(op, args, kwargs) if each.alias_info and each.alias_info.is_write]
    flat = list(_tensors(written))
    returns = op._schema.returns
    if not returns:
        return _Outputs(None, flat, [])
    if all(each.alias_info is not None and each.alias_info.is_write for each in returns):
        return _Outputs(written[0] if len(returns) == 1 else tuple(written), flat, [])
    like = _as_zeros if op._schema.name in _ROUND_ELSEWHERE else _as_meta
    shapes = op(*like(args), **like(dict(kwargs)))
    made = _mapped(_allocated, shapes)
    return _Outputs(made, flat, list(_tensors(made)))


def _allocated(like: Any) -> Any:
    return memory.allocate(like.shape, like.stride(), like.dtype) if isinstance(like, Tensor) else like


def _bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for at, each in enumerate(op._schema.arguments):
        if at < len(args) and not each.kwarg_only:
            yield each, args[at]
        elif each.name in kwargs:
            yield each, kwargs[each.name]


def _as_meta(values: Any) -> Any:
    def take(each: Any) -> Any:
        if isinstance(each, torch.device):
            return torch.device("meta") if each.type == DEVICE else each
        if not isinstance(each, Tensor) or (each.device.type == "cpu" and each.dim() == 0):
            return each
        return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")

    return _mapped(take, values)


def _as_zeros(values: Any) -> Any:
    def take(each: Any) -> Any:
        return torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) else each

    return _mapped(take, _on_host(values))


def _read(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The host waits for the current stream and reads."""
    given, named = _captured(name, (list(args), dict(kwargs)))
    machine.synchronise(name, machine.current.now)
    return _mapped(lambda each: to_device(each) if isinstance(each, Tensor) else each, op(*given, **named))


def to_device(tensor: Tensor) -> Tensor:
    """A copy of what the host has."""
    made = memory.allocate(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype)
    into = memory.on_cpu(made)
    queue("copy_", lambda: void(into.copy_(tensor)), reads=into, writes=into)
    return made


# --- operators with rules of their own


def _empty(op: Any, size: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    made = memory.allocate(size, contiguous_strides(size), dtype or torch.get_default_dtype())
    _check(made, "empty")
    return made


def _empty_strided(op: Any, size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
    made = memory.allocate(size, stride, dtype or torch.get_default_dtype())
    _check(made, "empty_strided")
    return made


def _copy(op: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The host waits, but for a copy within the device and one that does not block, from or into pinned memory."""
    name = "copy_"
    if into.device.type == DEVICE and source.device.type == DEVICE:
        target, data = _captured(name, (into, source))
        queue(name, lambda: void(target.copy_(data)), reads=(data, target), writes=target)
        return into
    host = source if into.device.type == DEVICE else into
    is_waiting = not (non_blocking and is_pinned(host))
    target, data = (memory.on_cpu(each) if each.device.type == DEVICE else each.detach() for each in (into, source))
    if is_waiting and host is source:
        data = data.clone()  # staged
    _check(into if host is source else source, name)
    queue(name, lambda: void(target.copy_(data)), reads=(data, target), writes=target)
    if is_waiting and (host is into or not non_blocking):
        machine.synchronise("copy to the host" if host is into else "copy from the host", machine.current.now)
    return into


def _copy_from(op: Any, source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(op, into, source, non_blocking)


def _record_stream(op: Any, tensor: Tensor, stream: Any) -> None:
    memory.record_stream(tensor, machine.streams[stream.stream_id])


def _resize(op: Any, tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    if list(tensor.shape) == list(size):
        return tensor
    made = memory.allocate(size, contiguous_strides(size), tensor.dtype)
    numel = min(tensor.numel(), made.numel())
    old, new = memory.on_cpu(tensor).view(-1)[:numel], memory.on_cpu(made).view(-1)[:numel]
    queue("resize_", lambda: void(new.copy_(old)), reads=old, writes=new)
    return torch.ops.aten.set_.source_Tensor(tensor, made)


def _set(op: Any, tensor: Tensor, *args: Any) -> Tensor:
    return op.redispatch(_CPU, tensor, *args)


_pinned: set[int] = set()


def pinned_like_empty(*args: Any, **kwargs: Any) -> Tensor:
    """torch.empty whose memory is pinned for the device."""
    made = torch.empty(*args, **kwargs)
    _pinned.add(made.untyped_storage().data_ptr())
    return made


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


_SPECIAL = {
    "empty": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "record_stream": _record_stream,
    "resize_": _resize,
    "set_": _set,
    "_fused_sdp_choice": lambda *_, **__: 0,
}


def register() -> list[torch.library.Library]:
    """Gives torch the operators; they go when what is returned goes.

    Those that have a kernel on the CPU are one kernel here, too. torch takes the others apart into such.
    """
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    kernels = {
        name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if name.startswith("aten::")
    }
    whole = kernels | {f"aten::{name}" for name in _SPECIAL}
    for schema in torch._C._jit_get_all_schemas():
        full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if full_name in whole or schema.name in whole or schema.name.startswith("aten::_foreach_"):
            op = getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")
            aten.impl(op, partial(fallback, op), "PrivateUse1")
    return [everything, aten]
