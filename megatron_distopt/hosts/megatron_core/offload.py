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
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, storages_of

__all__ = ["MainParams", "OffloadedState", "main_params_of"]

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
    """One for each allocation.

    Args:
        sharded: whose flat params they are.
        published: views of main params that others hold.
    """
    views: dict[int, list[Tensor]] = {}
    for view in (*(flat.main for flat in _owning(sharded)), *(each for each in published if not _is_coded(each))):
        views.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    return [MainParams.of(each) for each in views.values()]


def _owning(sharded: ShardedOptimizer) -> Iterator[FlatParam]:
    return (flat for flat in sharded.flat_params if flat.owns_memory and not _is_coded(flat.main))


def _is_coded(tensor: Tensor) -> bool:
    return not any(part is tensor for part in storages_of(tensor))


class OffloadedState:
    """Moves the state of one optimizer away and back.

    Args:
        sharded: whose state it is.
        main_params: all of them.
    """

    def __init__(self, sharded: ShardedOptimizer, main_params: Sequence[MainParams]) -> None:
        self._sharded, self._main_params = sharded, main_params
        self._homes: dict[tuple[Tensor, str], torch.device] = {}

    def move_to(self, device: torch.device) -> None:
        """Moves main params and everything that the inner optimizer keeps of them; what is there already stays."""
        for main in self._main_params:
            main.data = main.data.to(device)
        for flat, kept, name in self._kept():
            self._homes.setdefault((flat.main, name), kept[name].device)
            kept[name] = kept[name].to(device)
        empty_cache(self._sharded.device)

    def restore(self) -> None:
        """Moves all of it to where it was."""
        for main, device in zip(self._main_params, self._devices(), strict=True):
            main.data = main.data.to(device)
        for flat, kept, name in self._kept():
            usual = flat.model.device if kept[name].shape == flat.main.shape else kept[name].device
            kept[name] = kept[name].to(self._homes.get((flat.main, name), usual))
        self._homes.clear()

    def check_is_there(self) -> None:
        """Checks that the state has its values, wherever they are: what a save and a load need.

        Raises:
            LayoutError: other code has emptied it meanwhile.
        """
        for flat, kept, name in self._kept():
            if (kept[name].numel() == 0 and flat.main.numel() > 0) or kept[name].is_meta:
                rule, remedy = "have its values", "Call what your framework has to load it again before"
                raise LayoutError(refusal("optimizer state", f"emptied ({name} has no values)", rule, remedy))

    def check_is_back(self) -> None:
        """Checks that everything is where an update needs it.

        Raises:
            LayoutError
        """
        self.check_is_there()
        moments = [(flat, kept[name]) for flat, kept, name in self._kept() if kept[name].shape == flat.main.shape]
        for flat, tensor in [*((flat, flat.main) for flat in _owning(self._sharded)), *moments]:
            if tensor.device != flat.model.device:
                rule = f"be on {flat.model.device} during a step"
                remedy = "Call optimizer.restore_from_cpu(), or what your framework has for it, before"
                raise LayoutError(refusal("optimizer state", f"offloaded to {tensor.device}", rule, remedy))

    def _devices(self) -> list[torch.device]:
        home = {flat.main.untyped_storage().data_ptr(): flat.model.device for flat in _owning(self._sharded)}
        return [home[main.data.untyped_storage().data_ptr()] for main in self._main_params]

    def _kept(self) -> Iterator[tuple[FlatParam, dict[str, Any], str]]:
        """Every tensor that the inner optimizer keeps: of which flat param, in which dict, under which name."""
        for flat in self._sharded.flat_params:
            kept = self._sharded.inner.state.get(flat.main, {})
            yield from ((flat, kept, name) for name in list(kept) if torch.is_tensor(kept[name]))
