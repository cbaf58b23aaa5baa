"""The backend `simccl` of torch.distributed, with the semantics of NCCL's.

A collective is queued on a stream of its communicator, behind what the current stream has queued.
`wait()` makes the current stream wait, and not the host. Tensors are kept until then, as NCCL's
backend keeps them. When a collective is carried out, ranks first compare which one it is: where
they differ, every rank raises what each of them called. Memory that they share carries the bytes
(wire.py), and gloo tensors of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.sim.machine import DEVICE, Point, SimError, Stream, machine
from tests.support.sim.memory import memory
from tests.support.sim.operators import rules, tensors_in
from tests.support.sim.wire import Wire, head_of, tensors_of

NAME = "simccl"


@dataclass
class _Backend:
    """How the groups of this process are."""

    carries_cpu: bool = True  # whether they carry tensors of the CPU as well


_backend = _Backend()

#: From every rank's input, bytes as tensors of the dtype, to what is written into the outputs.
_Combine = Callable[[list[Tensor]], list[Tensor]]


class SimWork(dist.Work):
    """A collective that is queued; tensors are kept until it is waited for."""

    def __init__(self, point: Point, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._point, self._kept = point, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        machine.wait_on(machine.current, self._point)
        self._kept.clear()
        return True

    def is_completed(self) -> bool:
        return machine.is_reached(self._point)


class SimBatch(dist.Work):
    """Messages that were begun together."""

    def __init__(self, works: Sequence[SimWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        for each in self._works:
            each.wait()
        return True

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)


class _Exchange:
    """Every rank's bytes, on their way to all ranks; `head` is what this rank calls the
    collective."""

    def __init__(
        self,
        wire: Wire,
        head: str,
        inputs: list[Tensor],
        finish: Callable[[list[list[Tensor]]], None],
    ) -> None:
        self._wire, self._inputs, self._finish = wire, inputs, finish
        self._found: dict[int, bytes] = {}
        self._number = wire.publish(head, inputs)

    def is_done(self) -> bool:
        for rank in range(self._wire.size):
            if rank not in self._found:
                found = self._wire.published(self._number, rank)
                if found is None:
                    return False
                self._found[rank] = found
        messages = [self._found[rank] for rank in range(self._wire.size)]
        heads = list(map(head_of, messages))
        if len(set(heads)) > 1:
            raise SimError(
                "ranks called different collectives: "
                + "; ".join(f"{n}: {h}" for n, h in enumerate(heads))
            )
        self._finish([tensors_of(each, self._inputs) for each in messages])
        return True


@dataclass
class _Message:
    """A message between two ranks."""

    receive: Callable[[], bool]  # takes it, if it is there

    def is_done(self) -> bool:
        return self.receive()


def _last(works: list[Any]) -> Any:
    """Of collectives that run one after the other, the one that stands for all."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _kind(op: Any) -> dist.ReduceOp.RedOpType:
    return next(kind for kind in dist.ReduceOp.RedOpType.__members__.values() if op == kind)


def _reduced(parts: Sequence[Tensor], op: Any, last: int) -> Tensor:
    """Added up around the ring, downwards, the part of rank `last` last: see
    megatron_distopt.comm.pairwise."""
    order = [parts[(last - distance) % len(parts)] for distance in range(1, len(parts))] + [
        parts[last]
    ]
    kind = _kind(op)
    combine = {
        dist.ReduceOp.RedOpType.SUM: torch.add,
        dist.ReduceOp.RedOpType.AVG: torch.add,
        dist.ReduceOp.RedOpType.MAX: torch.maximum,
        dist.ReduceOp.RedOpType.MIN: torch.minimum,
    }[kind]
    total = order[0].clone()
    for part in order[1:]:
        total = combine(total, part)
    return total / len(parts) if kind == dist.ReduceOp.RedOpType.AVG else total


#: By name of a collective, the one of gloo's that is called otherwise.
_GLOO_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def _or_gloo(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose tensors are on the CPU is gloo's."""
    name = _GLOO_NAMES.get(collective.__name__, collective.__name__)

    @wraps(collective)
    def run(group: SimGroup, *args: Any) -> Any:
        if next(tensors_in(args)).device.type != DEVICE:
            return getattr(group._cpu, name)(*(arg for arg in args if arg is not None))
        return collective(group, *args)

    return run


class SimGroup(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._wire = Wire(dist.PrefixStore("sim", store), rank, size)
        self._of_cpu = dist.ProcessGroupGloo(
            dist.PrefixStore("cpu", store), rank, size, timeout=timeout
        )
        self._stream = Stream(name=f"communicator of {size}")
        self._store = store
        #: By kind and rank at the other end: torch begins those of a batch one after the other on a
        #: group of Python.
        self._lanes: dict[tuple[str, int], Stream] = {}
        self._batch: list[SimWork] | None = None

    @property
    def _cpu(self) -> Any:
        """Carries tensors of the CPU, where the group was made for these as well."""
        if not _backend.carries_cpu:
            raise RuntimeError("No backend type associated with device type cpu")
        return self._of_cpu

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return self._cpu if torch.device(device).type == "cpu" else self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE), *([torch.device("cpu")] if _backend.carries_cpu else [])]

    @property
    def supports_coalescing(self) -> bool:
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        """Torch before 2.15 does not ask a group of Python for it."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> SimBatch:
        batch, self._batch = self._batch or [], None
        return SimBatch(batch)

    def get_group_store(self) -> dist.Store:
        return self._store

    def _lane(self, kind: str, peer: int) -> Stream:
        if (kind, peer) not in self._lanes:
            self._lanes[kind, peer] = Stream(name=f"{kind} with rank {peer}")
        return self._lanes[kind, peer]

    def _queue(
        self,
        name: str,
        run: Callable[[], Any],
        tensors: Sequence[Tensor],
        stream: Stream | None = None,
    ) -> SimWork:
        stream = stream or self._stream
        for each in tensors:
            if each.dtype in rules.missing:
                raise TypeError(f"{name}: the device's collectives have no {each.dtype}")
        machine.launch(f"{name} of {self._size} ranks", run, [machine.current.now], on=stream)
        work = SimWork(stream.now, tensors)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _collective(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        combine: _Combine,
        extra: object = "",
    ) -> SimWork:
        """
        Args:
            name: of the collective.
            inputs: of this rank, as long on every rank.
            outputs: of this rank.
            combine: makes the values of one output from all ranks' values of the input of the same
                number.
            extra: what ranks have to agree on besides.
        """
        mine = [memory.on_cpu(each.detach()) for each in inputs]
        into = [memory.on_cpu(each.detach()) for each in outputs]
        shapes = [(str(each.dtype).removeprefix("torch."), each.numel()) for each in inputs]
        head = f"{name} of {shapes} {extra}"

        def finish(found: list[list[Tensor]]) -> None:
            values = [
                value
                for at in range(len(mine))
                for value in combine([of_rank[at] for of_rank in found])
            ]
            for target, value in zip(into, values, strict=True):
                target.copy_(value.reshape(target.shape))

        return self._queue(
            name, lambda: _Exchange(self._wire, head, mine, finish), [*inputs, *outputs]
        )

    # --- the collectives as torch.distributed calls them

    @_or_gloo
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = opts.reduceOp
        return self._collective(
            "all-reduce", tensors, tensors, lambda all_: [_reduced(all_, op, 0)], _kind(op)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    @_or_gloo
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank
        return self._collective("broadcast", tensors, tensors, lambda all_: [all_[root]], root)

    @_or_gloo
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._collective("all-gather", inputs, outputs[0], lambda all_: all_)

    @_or_gloo
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        if inputs[0].device.type != DEVICE:
            return _last(
                [self._cpu._allgather_base(*each) for each in zip(outputs, inputs, strict=True)]
            )
        return self._collective(
            "all-gather", inputs, outputs, lambda all_: [torch.cat([x.view(-1) for x in all_])]
        )

    @_or_gloo
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        if inputs[0].device.type != DEVICE:
            pairs = zip(outputs, inputs, strict=True)
            return _last([self._cpu._reduce_scatter_base(*each, opts) for each in pairs])
        op, rank = opts.reduceOp, self._rank

        def combine(all_: list[Tensor]) -> list[Tensor]:
            shares = [each.reshape(self._size, -1)[rank] for each in all_]
            return [_reduced(shares, op, rank)]

        return self._collective("reduce-scatter", inputs, outputs, combine, _kind(op))

    @_or_gloo
    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_split: Any, in_split: Any, opts: Any = None
    ) -> Any:
        if out_split or in_split:
            raise SimError("all-to-all with parts of different lengths is not simulated")
        rank = self._rank

        def combine(inputs: Any) -> list[Tensor]:
            return [torch.cat([x.reshape(self._size, -1)[rank] for x in inputs])]

        return self._collective("all-to-all", [input], [output], combine)

    def barrier(self, opts: Any = None) -> Any:
        machine.synchronise("barrier", machine.current.now)
        return self._of_cpu.barrier()

    @_or_gloo
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        data = memory.on_cpu(tensors[0].detach())
        return self._queue(
            "send", lambda: self._sent(data, dst, tag), tensors, self._lane("send", dst)
        )

    def _sent(self, data: Tensor, dst: int, tag: int) -> None:
        self._wire.send(self._wire.message(self._rank, dst, tag), data)

    @_or_gloo
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        into = memory.on_cpu(tensors[0].detach())
        return self._queue(
            "receive", lambda: self._received(into, src, tag), tensors, self._lane("receive", src)
        )

    def _received(self, into: Tensor, src: int, tag: int) -> _Message:
        name = self._wire.message(src, self._rank, tag)
        return _Message(lambda: self._wire.receive(name, into))

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def register() -> None:
    """Makes the backend known to torch; `init_process_group` takes it where no other one is asked
    for."""
    dist.Backend.register_backend(NAME, SimGroup, devices=[DEVICE])


def take_over_world(*, carries_cpu: bool = True) -> None:
    """Collective: gives the ranks of the world a group that carries tensors of the device, and of
    the CPU or not."""
    _backend.carries_cpu = carries_cpu
    rank, size, store = (
        dist.get_rank(),
        dist.get_world_size(),
        dist.distributed_c10d._get_default_store(),
    )
    dist.destroy_process_group()
    store = dist.PrefixStore("world of sim", store)
    backend = f"cpu:gloo,{DEVICE}:{NAME}" if carries_cpu else NAME
    # The flight recorder of torch 2.15 asks for the name of the group in C++, which a group of
    # Python has not.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
