"""How much memory does training need here, compared with 6 + 12/n bytes an element and with peers?"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace

import torch
from peers.memory_reading import MemoryReading, read
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting

from gpu_check.checks import Check, Found, Place, SkipError, Where, WrongError
from gpu_check.machine import CPU, empty_cache, memory_now, most_memory, reset_most_memory, synchronize
from gpu_check.peers import OURS, memory_peers

#: So few tokens that what is measured is not activations.
_VOCABULARY, _SEQUENCE = 256, 8
_GIB = 1 << 30
#: Of the target: what buckets are padded with, and tensors that do not grow with the model.
_MARGIN = 1.05


def target(ranks: int) -> float:
    """Bytes an element: param 2, grad 4, main param and two moments of the owned part.

    >>> target(4)
    9.0
    """
    return 6 + 12 / ranks


def held(place: Place) -> Found:
    """Bytes of tensors between two steps, and at the peak of one."""
    setting = _setting(place)
    readings = []
    for entry in memory_peers(place):
        place.say(entry.name)
        _read(place, entry, replace(setting, layers=1, hidden=128))  # imports, first connections
        readings.append(_read(place, entry, setting))
    ours = next(reading for reading in readings if reading.contestant == OURS)
    if ours.why_not:
        raise WrongError(f"ours did not run: {ours.why_not}")
    between, peak, wanted = ours.held / ours.numel, ours.step_peak / ours.numel, target(place.size)
    figures = {"numel": ours.numel, "target": wanted, "contestants": [asdict(each) for each in readings]}
    if between > _MARGIN * wanted:
        raise WrongError(f"{between:.2f} bytes an element are held between steps, not 6 + 12/n = {wanted:.2f}")
    said = f"{between:.2f} bytes an element held, {peak:.2f} at the peak of a step; 6 + 12/n = {wanted:.2f}"
    return Found(f"{said}; {ours.numel / 1e6:.1f} M elements", figures)


def _setting(place: Place) -> TrainSetting:
    is_large = place.device.type != CPU and place.memory_nbytes >= 12 * _GIB
    hidden = 2048 if is_large else 512
    layers = 4
    return TrainSetting(
        layers, hidden, _VOCABULARY, _SEQUENCE, 1, 12 * hidden**2, place.rank, place.size, str(place.device)
    )


def _read(place: Place, entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    """Collective: of the rank that needed most."""
    if place.device.type == CPU:
        return read(entry, setting)
    if memory_now(place.device) is None:
        raise SkipError(f"torch counts no memory of {place.device.type}")
    reading = read(entry, setting, lambda: DeviceMemory(place.device))
    empty_cache(place.device)
    return reading


class DeviceMemory:
    """As `HostMemory`, of tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0
        gc.collect()
        self._before = self.held()
        self.reset()

    def reset(self) -> None:
        reset_most_memory(self._device)

    def peak(self) -> int:
        synchronize(self._device)
        return (most_memory(self._device) or 0) - self._before

    def held(self) -> int:
        synchronize(self._device)
        return (memory_now(self._device) or 0) - self._before


CHECKS = (Check("held", "bytes an element are 6 + 12/n", held, "memory", Where.ENDS, limit=200),)
