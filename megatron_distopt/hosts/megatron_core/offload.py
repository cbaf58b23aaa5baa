"""Optimizer state that leaves its device between two phases of training, and comes back with the same bits.

Frameworks for reinforcement learning need the memory of the device while they generate. megatron-core since 0.15 has
`offload_to_cpu` and `restore_from_cpu`; verl moves the tensors of `shard_fp32_from_float16_groups` and the moments by
assigning to their `data` and to the entries of `optimizer.state`. Both end here.

[Note: one allocation] The main params of a grad buffer lie in one allocation, of which the flat params and every
`param.main_param` are views. It can only be freed as a whole. So it moves as a whole: `MainParams` stands for all of
it, and whoever assigns to its `data` gives all views of it a new place. fp32 params are their own main params and stay
in the host's param buffers, which the host and these frameworks offload by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import empty_cache
from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.optimizer.low_precision.low_precision_tensor import LowPrecisionTensor
from megatron_distopt.optimizer.low_precision.stored_values import StoredValues
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_base_data: Any = Tensor.data


class MainParams(Tensor):
    """All main params of a grad buffer on this rank: fp32 1-D. See [Note: one allocation]."""

    _views: list[Tensor]

    # What is computed with it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> MainParams:
        """Stands for the allocation in which all of these lie.

        Args:
            views: 1-D and contiguous; those that follow it.
        """
        numel = views[0].untyped_storage().nbytes() // views[0].element_size()
        made: MainParams = Tensor._make_subclass(cls, views[0].detach().as_strided((numel,), (1,), 0))
        made._views = list(views)
        return made

    @property
    def data(self) -> Tensor:
        """The allocation; a new one moves there whatever lies in the old one."""
        allocation: Tensor = _base_data.__get__(self)
        return allocation.as_subclass(Tensor)

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.shape != self.shape or new.dtype != self.dtype:
            got, rule = f"{new.dtype} {list(new.shape)}", f"stay {self.dtype} {list(self.shape)}"
            raise LayoutError(refusal("main params", got, rule, "Assign a copy of them on another device"))
        spans = [slice(view.storage_offset(), view.storage_offset() + view.numel()) for view in self._views]
        _base_data.__set__(self, new)
        for view, span in zip(self._views, spans, strict=True):
            view.data = new[span]


def main_params_of(sharded: ShardedOptimizer, published: Iterable[Tensor]) -> list[MainParams]:
    """One for each allocation on the device.

    Args:
        sharded: whose flat params they are.
        published: views of main params that others hold.
    """
    views: dict[int, list[Tensor]] = {}
    on_host = [flat.main for flat in sharded.flat_params if flat.on_host is not None]
    stays = {_address(main) for main in on_host if not isinstance(main, LowPrecisionTensor)}
    others = [each for each in published if not isinstance(each, LowPrecisionTensor) and _address(each) not in stays]
    for view in (*(flat.main for flat in _owning(sharded)), *others):
        views.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    return [MainParams.of(each) for each in views.values()]


def _owning(sharded: ShardedOptimizer) -> Iterator[FlatParam]:
    return (flat for flat in _on_device(sharded) if flat.owns_memory and not isinstance(flat.main, LowPrecisionTensor))


def _on_device(sharded: ShardedOptimizer) -> Iterator[FlatParam]:
    """Those whose state belongs on the device; that of the others is on the host in every phase."""
    return (flat for flat in sharded.flat_params if flat.on_host is None)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _device_of(tensor: Tensor) -> torch.device:
    """Where the values are; a coded tensor itself names the device on which it was made."""
    return tensor.stored.device if isinstance(tensor, LowPrecisionTensor) else tensor.device


class OffloadedState:
    """Moves the state of one optimizer away and back, in whichever precision it is.

    What is kept in another form than fp32 moves in that form: its memory gets another place, and every tensor that
    shows its values follows. What is on the host in every phase (optimizer/offload.py) stays there.

    Args:
        sharded: whose state it is.
        main_params: all of them that are plain fp32 tensors on the device.
    """

    def __init__(self, sharded: ShardedOptimizer, main_params: Sequence[MainParams]) -> None:
        self._sharded, self._main_params = sharded, main_params
        self._homes: dict[tuple[Tensor, str], torch.device] = {}

    def move_to(self, device: torch.device) -> None:
        """Moves main params and everything that the inner optimizer keeps of them; what is there already stays."""
        for main in self._main_params:
            main.data = main.data.to(device)
        for _, form in self._forms():
            form.move(lambda part: part.to(device))
        for flat, kept, name in self._kept():
            self._homes.setdefault((flat.main, name), kept[name].device)
            kept[name] = kept[name].to(device)
        empty_cache(self._sharded.device)

    def restore(self) -> None:
        """Moves all of it to where it was."""
        for main, device in zip(self._main_params, self._devices(), strict=True):
            main.data = main.data.to(device)
        for flat, form in self._forms():
            form.move(lambda part, home=flat.model.device: part.to(home))  # type: ignore[misc]
        for flat, kept, name in self._kept():
            usual = flat.model.device if kept[name].shape == flat.main.shape else kept[name].device
            kept[name] = kept[name].to(self._homes.get((flat.main, name), usual))
        self._homes.clear()

    def check_is_there(self) -> None:
        """Checks that the state has its values, wherever they are: what a save and a load need.

        Raises:
            LayoutError: other code has emptied it meanwhile.
        """
        for flat, kept, name in self._all_kept(self._sharded.flat_params):
            if (kept[name].numel() == 0 and flat.main.numel() > 0) or kept[name].is_meta:
                rule, remedy = "have its values", "Call what your framework has to load it again before"
                raise LayoutError(refusal("optimizer state", f"emptied ({name} has no values)", rule, remedy))

    def check_is_back(self) -> None:
        """Checks that everything is where an update needs it.

        Frameworks bring all moments to the device. Those that belong on the host go back there.

        Raises:
            LayoutError
        """
        self.check_is_there()
        self._bring_home()
        found = self._all_kept(_on_device(self._sharded))
        moments = [(flat, kept[name]) for flat, kept, name in found if kept[name].shape == flat.main.shape]
        mains = [(flat, flat.main) for flat in _on_device(self._sharded) if flat.owns_memory]
        for flat, tensor in [*mains, *moments]:
            device = _device_of(tensor)
            if device != flat.model.device:
                rule = f"be on {flat.model.device} during a step"
                remedy = "Call optimizer.restore_from_cpu(), or what your framework has for it, before"
                raise LayoutError(refusal("optimizer state", f"offloaded to {device}", rule, remedy))

    def _bring_home(self) -> None:
        """Moments of main params on the host, which others have moved to the device."""
        elsewhere = [flat for flat in self._sharded.flat_params if flat.on_host is not None]
        for flat, kept, name in self._all_kept(elsewhere):
            if not isinstance(kept[name], LowPrecisionTensor) and kept[name].device != flat.main.device:
                kept[name] = kept[name].to(flat.main.device)

    def _devices(self) -> list[torch.device]:
        home = {_address(flat.main): flat.model.device for flat in _owning(self._sharded)}
        return [home[_address(main.data)] for main in self._main_params]

    def _kept(self) -> Iterator[tuple[FlatParam, dict[str, Any], str]]:
        """Every plain tensor that the inner optimizer keeps on the device: of what, in which dict, under which name."""
        found = self._all_kept(_on_device(self._sharded))
        return ((flat, kept, name) for flat, kept, name in found if not isinstance(kept[name], LowPrecisionTensor))

    def _all_kept(self, flat_params: Iterable[FlatParam]) -> Iterator[tuple[FlatParam, dict[str, Any], str]]:
        for flat in flat_params:
            kept = self._sharded.inner.state.get(flat.main, {})
            yield from ((flat, kept, name) for name in list(kept) if torch.is_tensor(kept[name]))

    def _forms(self) -> Iterator[tuple[FlatParam, StoredValues]]:
        """Everything that is kept in another form on the device, with the flat param that it is of."""
        for flat in _on_device(self._sharded):
            kept = self._sharded.inner.state.get(flat.main, {}).values()
            forms = [each.stored for each in (flat.main, *kept) if isinstance(each, LowPrecisionTensor)]
            yield from ((flat, form) for form in forms if not _is_model(form, flat.model))


def _is_model(form: StoredValues, model: Tensor) -> bool:
    """Whether what is kept is the model param itself, which is a main param in bf16."""
    return any(_address(part) == _address(model) for part in form.parts)
