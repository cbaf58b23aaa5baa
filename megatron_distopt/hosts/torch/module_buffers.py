"""Module buffers that training changes (the running statistics of a batch norm) follow the first rank.

torch's DistributedDataParallel broadcasts all of them before each forward pass. Here those that change are broadcast
after each step, so that every forward pass begins with the same values as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from megatron_distopt.comm import Field, Group, compare, exchange, share_initial


@dataclass(frozen=True)
class _Seen:
    """A buffer as it was looked at last; what changed it since is a new tensor, or an operation in place."""

    identity: int
    version: int


class ModuleBuffers:
    """The buffers of a model's modules on this rank.

    Args:
        chunks: of the model.
        data: ranks that hold the same model.
        device: one that the group's backend carries.
    """

    def __init__(self, chunks: Sequence[Module], data: Group, device: torch.device) -> None:
        self._data, self._device = data, device
        self._modules = dict(_with_buffers(chunks)) if data.size > 1 else {}
        #: Of those whose buffers change, by name and the same on all ranks, how the buffers look.
        self._changing: dict[str, tuple[str, ...]] = {}
        self._seen = {name: _seen_in(module) for name, module in self._modules.items()}
        self.learn([name for name, module in self._modules.items() if _updates_statistics(module)])

    @property
    def has_any(self) -> bool:
        """Whether there is a buffer that could have to follow another rank."""
        return bool(self._modules)

    def begun(self) -> list[str]:
        """Modules whose buffers have changed for the first time, or have another shape now; the ranks may differ."""
        return [name for name, module in self._modules.items() if self._has_begun(name, module)]

    def _has_begun(self, name: str, module: Module) -> bool:
        if name in self._changing:
            return self._changing[name] != _described(module)
        return self._seen[name] != _seen_in(module)

    def learn(self, begun: Sequence[str]) -> None:
        """Collective: from now on these modules' buffers are broadcast, whichever rank has named them.

        Raises:
            RanksDisagreeError: on all ranks, where they have other shapes or dtypes.
        """
        if not self._modules:
            return
        named = {name for names in exchange(list(begun), self._data) for name in names}
        self._changing |= {name: _described(self._modules[name]) for name in sorted(named)}
        looks = tuple(f"{name}: {look}" for name in sorted(self._changing) for look in self._changing[name])
        compare([Field("module buffers that training changes", looks)], self._data)

    @torch.no_grad()
    def sync(self) -> None:
        """Collective: every rank has the values of the first one."""
        tensors = [tensor for name in sorted(self._changing) for tensor in _tensors_of(self._modules[name])]
        share_initial(tensors, self._data, self._device)


def _with_buffers(chunks: Sequence[Module]) -> Iterator[tuple[str, Module]]:
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if module._buffers:
                yield f"{number}.{name}", module


def _described(module: Module) -> tuple[str, ...]:
    return tuple(f"{tensor.dtype}{list(tensor.shape)}" for tensor in _tensors_of(module))


def _tensors_of(module: Module) -> list[Tensor]:
    return [buffer for _, buffer in sorted(module._buffers.items()) if buffer is not None]


def _updates_statistics(module: Module) -> bool:
    """Whether it is a norm of torch's, whose kernel changes running statistics without counting a version."""
    return isinstance(module, _NormBase) and bool(module.track_running_stats)


def _seen_in(module: Module) -> tuple[_Seen, ...]:
    return tuple(_Seen(id(buffer), buffer._version) for buffer in _tensors_of(module))
