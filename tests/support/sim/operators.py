"""torch's operators on the simulated device: each is queued, and carried out on the CPU later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.sim.machine import DEVICE, SimError, machine
from tests.support.sim.memory import contiguous_strides, memory, void

_CPU = DispatchKeySet(DispatchKey.CPU)
#: Whose result, or the shape of whose result, the host has to know.
_READS = {
    *(
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "_unique",
        "_unique2",
        "bincount",
    ),
    *("unique_dim", "unique_consecutive", "allclose"),
}
#: Operators that overwrite their first argument without a look at it.
_FILLS = {"copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_"}


#: Whose results have another dtype on the CPU than torch's rule for shapes says.
_ROUND_ELSEWHERE = ("native_layer_norm",)


@dataclass
class Rules:
    """What the device has not."""

    missing: frozenset[torch.dtype] = frozenset()


rules = Rules()


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator with a tensor of the device among its arguments, or that makes one."""
    memory.collect()
    schema = _schema_of(op)
    special = _SPECIAL.get(schema.name)
    if special is not None:
        return special(op, *args, **kwargs)
    if schema.is_view:
        return op.redispatch(_CPU, *args, **kwargs)
    if schema.name in _READS or _looks_through_mask(schema.name, args):
        return _read(op, schema.name, args, kwargs)
    return _launch(op, schema, args, kwargs)


class _Argument(NamedTuple):
    """One argument of an operator."""

    name: str
    is_keyword: bool
    is_out: bool
    is_written: bool
    is_tensor: bool


class _Schema(NamedTuple):
    """What torch's schema of an operator says; torch makes it anew for whoever asks, which is
    slower than a kernel."""

    name: str  # without its namespace
    arguments: tuple[_Argument, ...]  # in order
    is_view: bool  # whether it returns memory of an argument
    num_returns: int  # how many values it returns
    returns_written: bool  # whether all of them are arguments that it changes

    @property
    def has_generator(self) -> bool:
        return any(each.name == "generator" for each in self.arguments)


@cache
def _schema_of(op: Any) -> _Schema:
    arguments, returns = op._schema.arguments, op._schema.returns
    infos = [each.alias_info for each in returns]
    return _Schema(
        op._schema.name.removeprefix("aten::"),
        tuple(map(_argument_of, arguments)),
        bool(infos) and infos[0] is not None and not infos[0].is_write,
        len(infos),
        all(each is not None and each.is_write for each in infos),
    )


def _argument_of(each: Any) -> _Argument:
    is_written = bool(each.alias_info and each.alias_info.is_write)
    return _Argument(
        each.name, each.kwarg_only, each.is_out, is_written, str(each.type) == "Tensor"
    )


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
    """Changes what arguments or results consist of; torch's own function for it takes most of the
    time of a test."""
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(change, each) for each in values])
    if isinstance(values, dict):
        return {key: _mapped(change, each) for key, each in values.items()}
    return change(values)


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from tensors_in(each)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


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
        return (
            torch.device("cpu") if isinstance(each, torch.device) and each.type == DEVICE else each
        )

    return _mapped(take, values)


def _grow_outputs(op: Any, schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """torch gives operators outputs that are empty, to be resized."""
    outs = [value for each, value in _bound(schema, args, kwargs) if each.is_out]
    if any(each.numel() == 0 for each in tensors_in(outs)):
        shapes = op(*_as_meta(args), **_as_meta(dict(kwargs)))
        for into, like in zip(tensors_in(outs), tensors_in(shapes), strict=True):
            if into.shape != like.shape:
                made = memory.allocate(like.shape, like.stride(), into.dtype)
                torch.ops.aten.set_.source_Tensor(into, made)


def _as_declared(schema: _Schema, args: Sequence[Any]) -> list[Any]:
    """Numbers become tensors where no number is taken: torch hands a tensor made of a number on as
    the number."""
    return [
        torch.tensor(each) if argument.is_tensor and isinstance(each, (int, float)) else each
        for each, argument in zip(args, schema.arguments, strict=False)
    ]


def _launch(op: Any, schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, name = _as_declared(schema, args), schema.name
    _grow_outputs(op, schema, args, kwargs)
    given, named = _captured(name, (list(args), dict(kwargs)))
    given, named = _on_host(given), _on_host(named)
    outputs = _outputs(op, schema, args, kwargs)
    for each in tensors_in(outputs.made):
        _check(each, name)
    made = [memory.on_cpu(each) for each in outputs.made]
    seed = int(torch.randint(1 << 31, ())) if schema.has_generator else None

    def run() -> None:
        if seed is not None:
            named["generator"] = torch.Generator().manual_seed(seed)
        result = _computed(op, given, named)
        for into, value in zip(made, tensors_in(result) if made else (), strict=True):
            into.copy_(value)

    queue(name, run, reads=(given, named), writes=(outputs.written, made))
    return outputs.returned


def _computed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the CPU's kernel returns. Roots are rounded to nearest, as on a GPU: MKL's are an ulp
    off at times.

    A single number is left to the CPU, with whose norm that of a device without float64 is
    compared.
    """
    if op is torch.ops.aten.sqrt.default and args[0].dtype == torch.float32 and args[0].numel() > 1:
        return args[0].double().sqrt().float()
    return op(*args, **kwargs)


def queue(name: str, run: Callable[[], Any], *, reads: Any, writes: Any) -> None:
    """Queues a kernel on the current stream, and counts it."""
    counts, only_written = machine.counts, name in _FILLS
    written = list(tensors_in(writes))
    counts.launches.append(name)
    counts.nbytes_written += sum(each.nbytes for each in written)
    counts.nbytes_read += sum(each.nbytes for each in tensors_in(reads)) - only_written * sum(
        w.nbytes for w in written
    )
    machine.launch(name, run, on=machine.current)


@dataclass
class _Outputs:
    """What an operator returns."""

    returned: Any  # to the program
    written: list[Tensor]  # arguments that are changed
    made: list[Tensor]  # tensors that are new


def _outputs(op: Any, schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Outputs:
    written = [value for each, value in _bound(schema, args, kwargs) if each.is_written]
    flat = list(tensors_in(written))
    if not schema.num_returns:
        return _Outputs(None, flat, [])
    if schema.returns_written:
        return _Outputs(written[0] if schema.num_returns == 1 else tuple(written), flat, [])
    made = _mapped(_allocated, _shapes(op, schema, args, kwargs))
    return _Outputs(made, flat, list(tensors_in(made)))


#: Results by operator and what their shapes and dtypes follow from.
_known_shapes: dict[Any, Any] = {}


def _shapes(op: Any, schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tensors like the results; torch's functions for it are in Python and take longer than a
    kernel."""
    key = (op, torch.get_default_dtype(), _described(args), _described(kwargs))
    if key not in _known_shapes:
        like = _as_zeros if schema.name in _ROUND_ELSEWHERE else _as_meta
        _known_shapes[key] = op(*like(args), **like(dict(kwargs)))
    return _known_shapes[key]


def _described(value: Any) -> Any:
    """What matters of an argument; a number and a number of another type are not the same."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([_described(each) for each in value])
    if isinstance(value, Mapping):
        return tuple([(key, _described(each)) for key, each in value.items()])
    return type(value), value


def _allocated(like: Any) -> Any:
    return (
        memory.allocate(like.shape, like.stride(), like.dtype) if isinstance(like, Tensor) else like
    )


def _bound(
    schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[_Argument, Any]]:
    for at, each in enumerate(schema.arguments):
        if at < len(args) and not each.is_keyword:
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
    return _mapped(
        lambda each: to_device(each) if isinstance(each, Tensor) else each, op(*given, **named)
    )


def to_device(tensor: Tensor) -> Tensor:
    """A copy of what the host has."""
    made = memory.allocate(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype)
    into = memory.on_cpu(made)
    queue("copy_", lambda: void(into.copy_(tensor)), reads=into, writes=into)
    return made


# --- operators with rules of their own


def _empty(
    op: Any, size: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> Tensor:
    made = memory.allocate(size, contiguous_strides(size), dtype or torch.get_default_dtype())
    _check(made, "empty")
    return made


def _empty_strided(
    op: Any, size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any
) -> Tensor:
    made = memory.allocate(size, stride, dtype or torch.get_default_dtype())
    _check(made, "empty_strided")
    return made


def _copy(op: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The host waits, but for a copy within the device and one that does not block, from or into
    pinned memory."""
    name = "copy_"
    if into.device.type == DEVICE and source.device.type == DEVICE:
        target, data = _captured(name, (into, source))
        queue(name, lambda: void(target.copy_(data)), reads=(data, target), writes=target)
        return into
    host = source if into.device.type == DEVICE else into
    is_waiting = not (non_blocking and is_pinned(host))
    target, data = (
        memory.on_cpu(each) if each.device.type == DEVICE else each.detach()
        for each in (into, source)
    )
    if is_waiting and host is source:
        data = data.clone()  # staged
    _check(into if host is source else source, name)
    queue(name, lambda: void(target.copy_(data)), reads=(data, target), writes=target)
    if is_waiting and (host is into or not non_blocking):
        machine.synchronise(
            "copy to the host" if host is into else "copy from the host", machine.current.now
        )
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


#: By address. What lies there later, once the tensor is gone, is not pinned.
_pinned: dict[int, StorageWeakRef] = {}


def pinned_like_empty(*args: Any, **kwargs: Any) -> Tensor:
    """torch.empty whose memory is pinned for the device."""
    made = torch.empty(*args, **kwargs)
    storage = made.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return made


def is_pinned(tensor: Tensor) -> bool:
    return is_pinned_at(tensor.untyped_storage().data_ptr())


def is_pinned_at(address: int) -> bool:
    """Whether a live storage that begins there is pinned."""
    found = _pinned.get(address)
    return found is not None and not found.expired()


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

    Those that have a kernel on the CPU are one kernel here, too. torch takes the others apart into
    such.
    """
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    kernels = {
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("aten::")
    }
    whole = kernels | {f"aten::{name}" for name in _SPECIAL}
    for schema in torch._C._jit_get_all_schemas():
        full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if full_name in whole or schema.name in whole or schema.name.startswith("aten::_foreach_"):
            op = getattr(
                getattr(torch.ops.aten, schema.name.removeprefix("aten::")),
                schema.overload_name or "default",
            )
            aten.impl(op, partial(fallback, op), "PrivateUse1")
    return [everything, aten]
