"""The grad buffer: `param.grad` is a view of it, so that autograd itself accumulates there.

[Note: param.grad] `param.grad` means what it means in torch: None for no gradient, otherwise the
sum of the gradients since it was None. torch adds a second gradient to it in place, in whatever
dtype it has (`grad_dtype`), so a hook has to move only the first one into the buffer. That
overwrites old values, so nothing has to be zeroed.

On several ranks it holds this rank's contribution, or what the collective left there. In torch's
DistributedDataParallel it is the average. Code that reads it would silently compute something else,
so reading it is refused, even if a program has assigned it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_distopt.buffers.sharded_buffer import dtype_name, view_like
from megatron_distopt.errors import AccessError, ConfigError
from megatron_distopt.layout import BufferLayout


def _getters(*names: str) -> set[Any]:
    """The getters of tensor properties, as `__torch_function__` receives them. Leaves out
    properties that this release of torch does not have."""
    found: list[Any] = [getattr(torch.Tensor, name, None) for name in names]
    return {each.__get__ for each in found if hasattr(each, "__get__")}


#: Functions whose result does not depend on the values.
DESCRIBING = {
    *_getters(
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "_version",
    ),
    *_getters(
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_meta",
        "is_nested",
        "is_mkldnn",
        "is_cuda",
        "_base",
    ),
    *_getters(
        "itemsize",
        "nbytes",
        "grad",
        "_backward_hooks",
        "is_cpu",
        "is_xpu",
        "is_xla",
        "is_mps",
        "is_vulkan",
    ),
    *(
        getattr(torch.Tensor, name)
        for name in (
            *(
                "size",
                "stride",
                "numel",
                "nelement",
                "dim",
                "ndimension",
                "element_size",
                "is_contiguous",
                "__hash__",
            ),
            *(
                "storage_offset",
                "is_floating_point",
                "is_complex",
                "is_conj",
                "is_neg",
                "is_inference",
                "get_device",
            ),
            *("_is_view", "is_same_size", "__len__", "is_coalesced", "is_signed"),
        )
    ),
    torch._has_compatible_shallow_copy_type,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_same_size,
    torch.numel,
}
#: Functions whose result is a `LocalGrad` again, because module.cpu() and module.to(...) also
#: convert gradients.
_MOVING = {
    *(
        getattr(torch.Tensor, name)
        for name in ("to", "cpu", "float", "double", "half", "bfloat16", "detach")
    ),
    *(getattr(torch.Tensor, name) for name in ("type", "contiguous", "requires_grad_", "detach_")),
    vars(torch._C.TensorBase)["data"].__get__,
}
#: module.to(...) converts gradients in place; `GradSlot.take` brings them back.
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
#: Modules of torch's compiler. It asks for the storage size of gradients of params in a graph.
_COMPILER = "torch._subclasses."
#: DistributedDataParallel, whose C++ code copies gradients between its buckets and `param.grad`.
_DDP = "torch.nn.parallel.distributed"
#: Operators that autograd calls to accumulate a gradient into another.
_ACCUMULATING = {
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.copy_.default,  # called by DistributedDataParallel
}


class LocalGrad(Tensor):
    """`param.grad` on several ranks: a view of the grad buffer whose values are not the gradient of
    the model.

    torch's own C++ code adds to it as to any tensor. Python code may ask for its shape, dtype and
    device, zero it, and drop it.

    Raises:
        AccessError: for anything else; see [Note: param.grad].
    """

    param_name: str
    #: Called with the name of the param before the gradient is zeroed.
    on_zero: Callable[[str], None]

    @classmethod
    def of(cls, view: Tensor, name: str, on_zero: Callable[[str], None]) -> LocalGrad:
        """Shows a view of the grad buffer. `on_zero` raises while the values are communicated."""
        # `view` may be a LocalGrad itself; this does not read it.
        grad: LocalGrad = _unguarded(torch.Tensor._make_subclass, (cls, view), {})
        grad.param_name, grad.on_zero = name, on_zero
        return grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operator that Python code calls."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], cls) else None
        if func in DESCRIBING:
            return _unguarded(func, args, kwargs)
        if func is Tensor.untyped_storage and _asking_module().startswith(_COMPILER):
            return _unguarded(func, args, kwargs)
        if first is not None and func in _MOVING:
            return cls.of(_unguarded(func, args, kwargs), first.param_name, first.on_zero)
        if first is not None and func == _SET_DATA:
            return _unguarded(func, args, kwargs)
        if first is not None and func is torch.Tensor.zero_:
            first.on_zero(first.param_name)
            _unguarded(func, args, kwargs)
            return first
        raise _unreadable(_first_name(args, kwargs), func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called for every operator that C++ code calls: autograd, TorchScript, functorch and
        extensions do not ask `__torch_function__`."""
        kwargs = kwargs or {}
        is_autograd = func in _ACCUMULATING and torch._C._current_graph_task_id() >= 0
        is_guarded = torch._C._is_torch_function_enabled()
        if is_guarded and not is_autograd and _asking_module() != _DDP:
            raise _unreadable(_first_name(args, kwargs), func)
        return _unguarded(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalGrad(of {self.param_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


#: torch's own `param.grad`, and by param the function that replaces an assigned gradient.
_torch_grad: Any = torch._C.TensorBase.grad
_shown_by: MutableMapping[Parameter, Callable[[Parameter, Tensor], Tensor]] = WeakIdKeyDictionary()


def show_assigned(param: Parameter, show: Callable[[Parameter, Tensor], Tensor] | None) -> None:
    """From now on `param.grad = tensor` assigns what `show` returns for the tensor. None ends
    this."""
    if show is None:
        _shown_by.pop(param, None)
    else:
        _shown_by[param] = show
    if not _shown_by and "grad" in vars(Parameter):
        del Parameter.grad
    elif _shown_by:
        Parameter.grad = property(_torch_grad.__get__, _assign, _torch_grad.__delete__)  # type: ignore[assignment]


def _assign(param: Parameter, grad: Tensor | None) -> None:
    show = _shown_by.get(param) if type(grad) is Tensor else None
    _torch_grad.__set__(param, grad if show is None else show(param, grad))  # type: ignore[arg-type]


def _unguarded(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _asking_module() -> str:
    """The module whose code called the `__torch_function__` or `__torch_dispatch__` that calls
    this."""
    return str(sys._getframe(2).f_globals["__name__"])


def refuse_local_grads(call: str, args: Sequence[Any]) -> None:
    """Refuses a call that would read a `LocalGrad` among its arguments without asking its class."""
    if name := _first_name(*args):
        raise _unreadable(name, call)


def _first_name(*values: Any) -> str:
    for value in values:
        if isinstance(value, LocalGrad):
            return value.param_name
        if isinstance(value, (list, tuple, dict)) and (
            name := _first_name(*(value.values() if isinstance(value, dict) else value))
        ):
            return name
    return ""


def _unreadable(name: str, func: Any) -> AccessError:
    call = getattr(func, "__name__", str(func))
    remedy = (
        "Call optimizer.clip_grad_norm_(max_norm), or optimizer.full_grad(param) for the average, "
        "on all ranks"
    )
    if "_amp_" in call:  # torch.amp.GradScaler
        remedy = (
            "Give distribute(...) loss_scale='dynamic', and call "
            "optimizer.scale_loss(loss).backward()"
        )
    return AccessError(
        f"{call} used the grad of param {name!r} between backward and the end of the step. On "
        "several ranks that grad is only this rank's contribution and not the average. "
        f"{remedy}."
    )


class GradSlot:
    """The gradient of one param.

    Args:
        name: the name of the param.
        param: the param.
        view: a view of the grad buffer in the param's shape.
        shown: the tensor that `param.grad` is while there is a gradient. It is not `view` itself
            but shares its memory, because module.to(...) gives `param.grad` other memory. It is a
            `LocalGrad` if it must not be read.
    """

    __slots__ = ("_dtype", "address", "name", "param", "shown", "view")

    def __init__(self, name: str, param: Parameter, view: Tensor, shown: Tensor) -> None:
        self.name, self.param, self.view, self.shown = name, param, view, shown
        self.address, self._dtype = view.data_ptr(), param.dtype

    @property
    def is_missing(self) -> bool:
        return self.param.grad is None

    def take(self) -> None:
        """Moves into the buffer a gradient that autograd or the user has put into `param.grad`."""
        grad = self.param.grad
        if grad is None:
            return
        if grad is self.shown:
            with torch._C.DisableTorchFunctionSubclass():
                if grad.data_ptr() == self.address:
                    return
                grad = grad.detach()
        is_same_param = self.param.dtype is self._dtype and self.param.device == self.view.device
        if not is_same_param or grad.shape != self.view.shape:
            return  # the param was converted; the step will refuse that
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # an assigned one is guarded
            self.view.copy_(grad.to_dense() if grad.is_sparse else grad)
        self.show()

    @torch.no_grad()
    def copy(self) -> None:
        """Does what `take` does, but does not change `param.grad`."""
        grad = self.param.grad
        self.take()
        self.param.grad = grad

    @torch.no_grad()
    def give_back(self) -> None:
        """Gives `param.grad` memory of its own in the dtype of the param, so that others may read
        and change it."""
        if self.param.grad is self.shown:
            self.param.grad = self.view.to(self.param.dtype, copy=True)

    @torch.no_grad()
    def release(self, *, is_own: bool) -> None:
        """Makes `param.grad` torch's own again: a copy if the buffer holds a gradient of this rank,
        else None."""
        grad = self.param.grad
        if grad is self.shown:
            self.give_back()
            self.param.grad = self.param.grad if is_own else None
        elif isinstance(grad, LocalGrad):
            self.param.grad = _unguarded(Tensor.as_subclass, (grad, Tensor), {})
        if hasattr(self.param, "grad_dtype"):
            self.param.grad_dtype = self.param.dtype

    def show(self) -> None:
        """Makes `param.grad` show the buffer."""
        with torch._C.DisableTorchFunctionSubclass():
            # module.to(...) may have given it other memory
            if self.shown.data_ptr() != self.address:
                self.shown.data = self.view
        self.param.grad = self.shown


def check_grad_dtype(name: str, param: Parameter, dtype: torch.dtype) -> None:
    """Checks that `param.grad` may have this dtype. Older torch accepts only the param's own."""
    if dtype is not param.dtype and not hasattr(param, "grad_dtype"):
        raise ConfigError(
            f"The grad of the {dtype_name(param.dtype)} param {name!r} is to be "
            f"{dtype_name(dtype)}, but torch {torch.__version__} allows only the dtype of the "
            "param. Write grads_in_fp32=False, or run pip install 'torch>=2.10'."
        )


def allocate_grads(
    params: Mapping[str, Parameter],
    layout: BufferLayout,
    dtype: torch.dtype,
    show: Callable[[str, Tensor], Tensor] = lambda name, view: view.detach(),
) -> tuple[Tensor, tuple[GradSlot, ...]]:
    """Allocates the grad buffer for params of one device. A gradient that a param has already stays
    where it is until `GradSlot.take`.

    `show` returns what `param.grad` will be, from a param's name and its view of the buffer.

    Returns:
        The buffer, 1-D [layout.numel], and its slots in the order of the params. Padding is zero
        and stays zero.
    """
    first = next(iter(params.values()))
    buffer = torch.zeros(layout.numel, dtype=dtype, device=first.device)
    slots = []
    for name, param in params.items():
        view = view_like(buffer, layout.slot_of[name].in_buffer, param)
        if dtype is not param.dtype:
            param.grad_dtype = None
        slots.append(GradSlot(name, param, view, show(name, view)))
    return buffer, tuple(slots)
