"""Streams, events, and the order in which queued operations are carried out.

An operation is carried out when the host waits for something that needs it, or at times that the
seed decides. Among the streams the next one is chosen by priorities that change at random: an order
that keeps one stream far behind another one is then as likely as an even one (Burckhardt et al., "A
Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", 2010).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

#: Of the device `sim` among torch's.
DEVICE = "sim"
_PRIVATE_USE_1 = 20
#: How long the host waits for a collective before it says which one.
_SECONDS = 60.0
#: How long the host may be idle before the device goes on by itself, as one does while the host is
#: in another library.
_IDLE_SECONDS = 0.1


@contextmanager
def _disabled() -> Iterator[None]:
    with torch.no_grad(), _disable_current_modes():
        yield


def _unseen() -> AbstractContextManager[None]:
    """Neither autograd nor a mode sees torch's operators then; to disable nothing would take longer
    than a kernel."""
    if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return _disabled()
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


class SimError(RuntimeError):
    """The program did what a device refuses, or what hangs one."""


class UnderWay(Protocol):
    """An operation that needs other ranks."""

    def is_done(self) -> bool:
        """Goes on as far as it can."""


@dataclass(frozen=True)
class Point:
    """All operations of a stream up to one of them."""

    stream: Stream
    number: int

    @property
    def is_reached(self) -> bool:
        return self.stream.num_done >= self.number


@dataclass
class Operation:
    """One that is queued."""

    name: str  # for messages
    run: Callable[[], UnderWay | None]  # carries it out, or begins it and returns what is under way
    after: Sequence[Point] = ()  # what has to be reached before
    under_way: UnderWay | None = None


@dataclass
class Counts:
    """What the program made the device and the host do."""

    synchronisations: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    nbytes_read: int = 0
    nbytes_written: int = 0


class Stream(torch.Stream):
    """A queue of operations, which keep their order."""

    def __new__(cls, device: object = None, priority: int = 0, *, name: str = "") -> Stream:
        number = len(machine.streams)
        stream: Stream = super().__new__(
            cls, stream_id=number, device_index=0, device_type=_PRIVATE_USE_1
        )
        stream.name, stream.num_issued, stream.num_done = name or f"stream {number}", 0, 0
        stream.queue = deque[Operation]()
        stream.number = number
        machine.streams.append(stream)
        return stream

    name: str
    number: int
    num_issued: int
    num_done: int
    queue: deque[Operation]

    @property
    def now(self) -> Point:
        return Point(self, self.num_issued)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.point is not None:
            machine.wait_on(self, event.point)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        machine.synchronise(f"synchronize {self.name}", self.now)

    def query(self) -> bool:
        return machine.is_reached(self.now)

    def __enter__(self) -> Stream:
        self.outer = machine.current
        machine.current = self
        return self

    def __exit__(self, *_: object) -> None:
        machine.current = self.outer


class Event:
    """A point of a stream. The host, or another stream, can wait for it."""

    def __init__(self, *_: object, **__: object) -> None:
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.point = (stream or machine.current).now

    def wait(self, stream: Stream | None = None) -> None:
        (stream or machine.current).wait_event(self)

    def synchronize(self) -> None:
        if self.point is not None:
            machine.synchronise("synchronize event", self.point)

    def query(self) -> bool:
        return self.point is None or machine.is_reached(self.point)


class Machine:
    """The simulated device of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        #: Those with queued operations: a test makes thousands of streams, and uses few at a time.
        self.busy: dict[Stream, None] = {}
        self.counts = Counts()
        self._here = threading.local()
        self._failure: BaseException | None = None
        self._last_call = time.monotonic()
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Decides the order of operations from now on; those that are queued are carried out
        first."""
        self.finish()
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.0, 0.05, 0.3))
        self._priorities: dict[Stream, float] = {}

    def start(self) -> None:
        """Makes the default stream; the device goes on by itself where the host is idle."""
        self.default = Stream(name="default stream")
        #: On it, memory that was freed is used again some time later.
        self.later = Stream(name="later use of memory")
        #: That of the backward pass that runs, in a thread of its own.
        self.of_backward = self.default
        threading.Thread(target=self._go_on, name="sim device", daemon=True).start()

    @property
    def current(self) -> Stream:
        """The current stream of this thread; torch's threads of backward begin with that of
        backward."""
        is_host = threading.current_thread() is threading.main_thread()
        return getattr(self._here, "stream", self.default if is_host else self.of_backward)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._here.stream = stream
        if threading.current_thread() is not threading.main_thread() and stream is self.of_backward:
            del self._here.stream  # the next backward pass may have another one

    # --- queueing

    def launch(
        self,
        name: str,
        run: Callable[[], UnderWay | None],
        after: Iterable[Point] = (),
        *,
        on: Stream,
    ) -> None:
        """Queues an operation; now and then some are carried out at once."""
        with self.lock:
            self._raise_failure()
            self._last_call = time.monotonic()
            operation = Operation(name, run, tuple(after))
            on.queue.append(operation)
            on.num_issued += 1
            self.busy.setdefault(on)
            if self._random.random() < self._eagerness:
                for _ in range(self._random.randrange(8)):
                    self._step()

    def wait_on(self, stream: Stream, point: Point) -> None:
        """Makes a stream wait until a point is reached."""
        if point.stream is not stream and not point.is_reached:
            self.launch("wait", lambda: None, [point], on=stream)

    # --- waiting

    def synchronise(self, name: str, point: Point) -> None:
        """Makes the host wait."""
        self.counts.synchronisations.append(name)
        self._wait_until(lambda: point.is_reached)

    def is_reached(self, point: Point) -> bool:
        """A question of the host; the device goes on meanwhile."""
        with self.lock:
            for _ in range(self._random.randrange(4)):
                self._step()
            return point.is_reached

    def finish(self) -> None:
        """Carries out everything, uncounted: for tests."""
        self._wait_until(lambda: not self.busy)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while True:
            with self.lock:
                self._last_call = time.monotonic()
                self._raise_failure()
                if is_over():
                    return
                has_moved = self._step()
            if has_moved:
                deadline = time.monotonic() + _SECONDS
            elif not any(stream.queue[0].under_way for stream in self.busy):
                raise SimError(f"the streams wait for each other: {self._heads()}")
            elif time.monotonic() > deadline:
                raise SimError(f"no other rank came to {self._heads()}")
            else:
                time.sleep(2e-4)

    def _heads(self) -> list[str]:
        return [f"{stream.name}: {stream.queue[0].name}" for stream in self.busy]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # --- carrying out

    def _step(self) -> bool:
        """Carries out one operation, if one can be."""
        if self._random.random() < 0.1:
            self._priorities = {}
        if any(stream not in self._priorities for stream in self.busy):
            for stream in sorted(self.busy, key=lambda stream: stream.number):
                self._priorities.setdefault(stream, self._random.random())
        return any(
            self._advance(stream) for stream in sorted(self.busy, key=self._priorities.__getitem__)
        )

    def _advance(self, stream: Stream) -> bool:
        head = stream.queue[0]
        if not all(point.is_reached for point in head.after):
            return False
        try:
            with _unseen():
                if head.under_way is None:
                    head.under_way = head.run()
                    is_done = head.under_way is None
                else:
                    is_done = head.under_way.is_done()
        except Exception as error:  # noqa: BLE001 - raised where the program calls the device next
            error.add_note(f"in {head.name}, queued on {stream.name}")
            self._failure, is_done = error, True
        if is_done:
            stream.queue.popleft()
            stream.num_done += 1
            if not stream.queue:
                del self.busy[stream]
        return is_done

    def _go_on(self) -> None:
        """Of a thread: carries out operations while the host is elsewhere, for example waiting for
        another rank."""
        torch.set_num_threads(1)
        while True:
            time.sleep(_IDLE_SECONDS / 4)
            while time.monotonic() - self._last_call > _IDLE_SECONDS:
                with self.lock:
                    has_moved = self._step()
                time.sleep(0 if has_moved else 1e-3)


machine = Machine()
