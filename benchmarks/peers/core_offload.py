"""megatron-core's optimizer with state on the host, its own and ours, on the simulated accelerator.

[Note: what is read on a simulated device] What the device computes is the CPU's here, and takes no time that means
anything. So CPU time inside the device (its kernels, and what queues them) is taken off, and what is left is what the
host itself computes: on a machine with an accelerator it would do the same. Bytes are those of live storages, on the
device and on the host; copies are counted where they pass from one to the other.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from peers.core_state import StateEntry, StateReading, given_storages
from peers.memory_reading import covered, storages
from peers.ratios import failure
from peers.step_contestants import Core
from peers.step_reading import FIRST_NORMS, deviation
from peers.steppers import Stepper, StepSetting, set_grads

__all__ = ["DEVICE", "Simulated", "offload_entries"]

DEVICE = "sim"
_HOST, _BF16 = "all on the host", torch.bfloat16
_OFFLOAD = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
_OVERLAP = {"overlap_cpu_optimizer_d2h_h2d": True}
_LOW = {"exp_avg_dtype": _BF16, "exp_avg_sq_dtype": _BF16}
#: Ours puts whole buckets on the host.
_NUM_BUCKETS = 8


class Simulated:
    """The device in this process, the clock of the host, and the bytes that pass between the two."""

    def __init__(self) -> None:
        os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
        self._operators = import_module("tests.support.sim.operators")
        sim = import_module("tests.support.sim")
        machine = import_module("tests.support.sim.machine")
        self.machine, self.memory = machine.machine, import_module("tests.support.sim.memory").memory
        self._inside, self._is_inside = 0.0, False
        self.down = self.up = 0
        self._operators.fallback = self._taken_off(self._operators.fallback)
        for name in ("_step", "_wait_until", "launch"):
            setattr(machine.Machine, name, self._taken_off(getattr(machine.Machine, name)))
        copy = self._counted(self._operators._copy)
        self._operators._copy = self._operators._SPECIAL["copy_"] = copy
        sim.install()
        import_module("tests.support.sim.collectives").take_over_world()

    def _taken_off(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a part of the device: see the note above. Only the thread of the program is the host."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._is_inside, start = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += time.thread_time() - start
                self._is_inside = False

        return timed

    def _counted(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def counted(op: Any, into: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
            if into.device.type != source.device.type:
                self.up += source.nbytes * (into.device.type == DEVICE)
                self.down += source.nbytes * (into.device.type != DEVICE)
            return copy(op, into, source, *args, **kwargs)

        return counted

    def host_seconds(self, act: Callable[[], object]) -> float:
        """CPU time that the host itself takes for something."""
        self._inside, start = 0.0, time.thread_time()
        act()
        return time.thread_time() - start - self._inside

    def on_host(self) -> dict[int, int]:
        """Address and bytes of live storages of the host, without those that are the device's memory."""
        gc.collect()
        self.machine.finish()
        self.memory.collect()
        self.machine.finish()
        blocks = self.memory._by_address.values()
        devices = {each.memory.untyped_storage().data_ptr() for each in blocks} | {each.address for each in blocks}
        return {address: nbytes for address, nbytes in storages().items() if address not in devices}

    def pinned(self, found: Mapping[int, int]) -> int:
        """Bytes of these that are pinned."""
        return sum(nbytes for address, nbytes in found.items() if self._operators.is_pinned_at(address))

    def read(self, entry: StateEntry, setting: StepSetting, number: int, reference: list[Tensor]) -> StateReading:
        """A contestant in one round: host time of a step, and its bytes."""
        figures: dict[str, float] = {}
        why_not = failure(lambda: figures.update(self._figures(entry, setting, reference)))
        ns = figures.pop("ns", None)
        return StateReading(entry.name, entry.state, number, ns, {} if why_not else figures, why_not)

    def _figures(self, entry: StateEntry, setting: StepSetting, reference: list[Tensor]) -> dict[str, float]:
        known, numel = self.on_host(), setting.numel
        before = self.memory.held
        stepper = entry.build(setting)
        try:
            for norm in FIRST_NORMS:
                set_grads(stepper, norm)
                stepper.step()
            apart = deviation(stepper, "ours" if entry.name == "ours" else "", reference)
            found = {address: nbytes for address, nbytes in self.on_host().items() if address not in known}
            state = self.memory.held - before - covered(given_storages(stepper))
            seconds, more, traffic = self._steps(stepper)
        finally:
            stepper.close()
        figures = {
            "on the host": covered(found.items()),
            "pinned": self.pinned(found),
            "on the device": state,
            "more on the device": more,
            **traffic,
        }
        by_element = {name: value / numel for name, value in figures.items()}
        return {"ns": seconds * 1e9 / numel, **by_element, **({} if apart is None else {"apart": apart})}

    def _steps(self, stepper: Stepper) -> tuple[float, int, dict[str, int]]:
        """Seconds of the host, bytes that the device needs meanwhile, bytes down and up."""
        seconds, more, traffic = [], 0, {}
        for _ in range(3):
            set_grads(stepper, FIRST_NORMS[-1])
            self.machine.finish()
            self.memory.reset_peak()
            held, self.down, self.up = self.memory.held, 0, 0
            seconds.append(self.host_seconds(stepper.step))
            more, traffic = self.memory.peak - held, {"down": self.down, "up": self.up}
        return statistics.median(seconds), more, traffic


class _OnDevice(Core):
    """A contestant whose model is on the simulated device.

    Args:
        setting: of the model.
        is_ours: or megatron-core's own, which asks for CUDA by name.
        fields: of the host's config.
    """

    def __init__(self, setting: StepSetting, *, is_ours: bool, fields: Mapping[str, Any]) -> None:
        with ExitStack() as undo:
            undo.enter_context(_streams_and_memory())
            if not is_ours:
                undo.enter_context(import_module("tests.support.sim.as_cuda").taken_for_cuda())
            kind, bucket_size = "ours" if is_ours else "distributed", setting.numel // _NUM_BUCKETS
            super().__init__(setting, kind=kind, bucket_size=bucket_size, fields=fields)
            self._more_undo = undo.pop_all()

    def close(self) -> None:
        super().close()
        self._more_undo.close()


@contextmanager
def _streams_and_memory() -> Iterator[None]:
    """megatron-core's streams and buffers are those of the device, where the CPU has stand-ins."""
    import megatron_on_cpu

    def map_streams(undo: Any) -> None:
        for name in ("current_stream", "default_stream", "stream", "synchronize", "Stream", "Event"):
            undo.replace(torch.cuda, name, getattr(torch.sim, name))  # type: ignore[attr-defined]
        undo.replace(Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)

    with (
        mock.patch.object(megatron_on_cpu, "_map_synchronize_and_moves", map_streams),
        mock.patch.object(megatron_on_cpu, "_CPU", torch.device(DEVICE)),
    ):
        yield


def offload_entries() -> Sequence[StateEntry]:
    """Ours first in every state, and of all with the whole fp32 state on the host."""
    half = {**_OFFLOAD, "optimizer_offload_fraction": 0.5}
    whole = {**_OFFLOAD, "optimizer_offload_fraction": 1.0}
    ours = {"store_param_remainders": False, "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True}

    def entry(name: str, state: str, fields: Mapping[str, Any]) -> StateEntry:
        is_ours = name.startswith("ours")
        given = {**fields, **(ours if is_ours else {})}
        return StateEntry(name, state, partial(_OnDevice, is_ours=is_ours, fields=given))

    low = f"{_HOST}, moments bfloat16"
    return (
        entry("ours", _HOST, whole),
        entry("megatron-core", _HOST, whole),
        entry("megatron-core, overlapped", _HOST, {**whole, **_OVERLAP}),
        entry("ours, half", "half on the host", half),
        entry("megatron-core, half, overlapped", "half on the host", {**half, **_OVERLAP}),
        entry("ours, moments bfloat16", low, {**whole, **_LOW}),
        entry("megatron-core, moments bfloat16", low, {**whole, **_OVERLAP, **_LOW}),
    )
