"""The communicator of a model: grads are reduce-scattered to their owners, updated params are
all-gathered from them.

Both are eager, launched when the host asks for the result, or overlapped: a bucket of grads is
reduced while backward computes others, and params are gathered until forward reads them.

[Note: order of launches] Ranks that launched buckets in different orders would wait for each other
in different collectives. So all ranks have one order, and a bucket whose turn has not come waits
for its turn. The first step shows in which order gradients complete their buckets and modules need
their params; the first rank's order is taken by all.

[Note: complete buckets] In the first step no bucket of grads is launched before backward has ended:
that step shows how often a gradient arrives in a microbatch (once, or once for every use of a
recomputed module). Afterwards a bucket is complete when each of its gradients has arrived as often
in all microbatches. If a gradient of a bucket does not arrive (a branch that was not taken) or is
changed after backward (`defer`), this bucket and those behind it are launched when the step asks
for the sums. That is late, but all ranks still run the same collectives in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_distopt.buffers import CompactBuffer, ShardedBuffer
from megatron_distopt.comm.agree import all_gather_objects
from megatron_distopt.comm.collectives import (
    PLAIN_SUM,
    Reduction,
    all_gather,
    gather_params,
    profiled,
    reduce_grads,
    reduce_scatter,
)
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.pending import Pending
from megatron_distopt.device import CPU, current_stream, fence, wait_for_streams
from megatron_distopt.errors import LayoutError

#: By group, the communicator that reduced the last bucket of grads in it.
_last_launcher: WeakKeyDictionary[ProcessGroup, ReferenceType[Communicator]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Transfer:
    """What one collective communicates: a bucket of grads or params, or the packed params of a
    minority dtype."""

    buffer: ShardedBuffer  # that it belongs to
    whole: Tensor  # 1-D
    shard: Tensor  # 1-D, this rank's part of `whole`
    names: frozenset[str]  # of the params in it


class Launches:
    """Collectives of one kind, which all ranks launch in one order, see [Note: order of launches].

    Args:
        kind: their name in a profiler.
        begin: launches one of them, given the whole bucket and this rank's shard.
        group: whose ranks agree on the order.

    Attributes:
        transfers: what they communicate; their numbers are positions in this list.
        number_of: by the name of a param.
        order: of the numbers.
        under_way: launched and not yet waited for.
    """

    def __init__(self, kind: str, begin: Callable[..., Pending], group: Group) -> None:
        self._kind, self._begin, self._group = kind, begin, group
        self.transfers: list[Transfer] = []
        self.number_of: dict[str, int] = {}
        self.order: list[int] = []
        self.under_way: dict[int, Pending] = {}
        #: Whether all ranks have taken one order; then no other one is asked for.
        self.is_agreed = False

    def add(self, transfers: Sequence[Transfer], *, backwards: bool = False) -> None:
        """Takes over further transfers, on all ranks alike. The order is agreed on anew after the
        next step.

        Args:
            transfers: in the order of backward.
            backwards: whether they are launched before the others and in the opposite order, as
                forward needs them.
        """
        numbers = range(len(self.transfers), len(self.transfers) + len(transfers))
        self.transfers += transfers
        self.number_of |= {
            name: number for number in numbers for name in self.transfers[number].names
        }
        self.order = [*reversed(numbers), *self.order] if backwards else [*self.order, *numbers]
        self.is_agreed = False

    def launch(self, number: int) -> None:
        """Collective: begins one of them."""
        transfer = self.transfers[number]
        with profiled(f"begin {self._kind} {number}"):
            self.under_way[number] = self._begin(transfer.whole, transfer.shard)

    def wait(self, numbers: Sequence[int]) -> None:
        """Waits for some that are under way; they remain listed there."""
        for number in numbers:
            with profiled(f"wait for {self._kind} {number}"):
                self.under_way[number].wait()

    def agree(self, wanted: list[int] | None) -> None:
        """Collective: takes the order that the first rank with a known order has seen; to be called
        until `is_agreed`.

        Args:
            wanted: all numbers in the order that this rank has seen; None where it has seen none.
        """
        known = [each for each in all_gather_objects(wanted, self._group) if each is not None]
        if known:
            self.order, self.is_agreed = known[0], True


class Arrivals:
    """Counts the gradients of a step and says which buckets are complete, see [Note: complete
    buckets]."""

    def __init__(self, num_microbatches: Callable[[], int]) -> None:
        self._num_microbatches = num_microbatches
        self._names: list[frozenset[str]] = []
        #: Arrivals of each gradient in a microbatch; empty before the first step has ended.
        self._each: Counter[str] = Counter()
        #: Gradients that do not arrive as often in every microbatch, and those that are changed
        #: after backward: their buckets are never complete before the step asks.
        self.irregular: set[str] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the gradients of the step before, but not what was learned from them."""
        self.arrived: Counter[str] = Counter()
        self._num_arrived = 0
        self._microbatches = 1
        #: By bucket, the number of arrivals when its last gradient so far arrived.
        self._last: dict[int, int] = {}
        #: By bucket, the number of gradients that have not arrived.
        self.num_missing = [len(names) for names in self._names]

    def add(self, names: Sequence[frozenset[str]]) -> None:
        """Takes over further buckets.

        Args:
            names: by bucket, of the params whose gradients it waits for.
        """
        self._names += names
        self.num_missing += [len(each) for each in names]

    def count(self, name: str, bucket: int) -> bool:
        """Counts a gradient.

        Returns:
            Whether it was the last one expected of this param, so that its bucket may be complete.
        """
        if not self.arrived:
            self._microbatches = self._num_microbatches()
        self.arrived[name] += 1
        self._num_arrived += 1
        self._last[bucket] = self._num_arrived
        is_last = (
            self.arrived[name] == self._each[name] * self._microbatches
            and name not in self.irregular
        )
        if is_last:
            self.num_missing[bucket] -= 1
        return is_last

    def learn(self) -> None:
        """Learns from a step that has ended how often each gradient arrives in a microbatch."""
        for name, times in self.arrived.items():
            each, rest = divmod(times, self._microbatches)
            self._each[name] = max(self._each[name], each)
            if rest:
                self.irregular.add(name)

    def order(self) -> list[int]:
        """The buckets in the order in which this step completed them, after `learn`.

        Those that cannot be launched early come last, so that no other one waits for them.
        """

        def turn(bucket: int) -> tuple[bool, int, int]:
            names = self._names[bucket]
            is_early = names <= self._each.keys() and not names & self.irregular
            return not is_early, self._last.get(bucket, 0), bucket

        return sorted(range(len(self._names)), key=turn)


class Communicator:
    """Reduces the grads of a model and gathers its params over the ranks that share them.

    A host announces every gradient (`grad_arrived`) and every read of a param (`param_needed`), and
    calls `finish_grads` and `finish_params` when it needs the results. Where nothing is overlapped
    announcements do nothing.

    Args:
        group: the data-parallel ranks.
        how: grads are added up, see `Reduction`.
        overlap_grads: whether buckets of grads are reduced while backward computes others.
        overlap_params: whether buckets of params are gathered while the next forward pass computes
            with others.
        num_microbatches: returns the number in the step that begins; called once a step. None for
            one in every step.

    Attributes:
        group, overlaps_grads, overlaps_params: as given.
        is_paused: whether more backward passes follow before buckets may be launched, see
            `no_sync`.
    """

    def __init__(
        self,
        group: Group,
        how: Reduction = PLAIN_SUM,
        *,
        overlap_grads: bool = False,
        overlap_params: bool = False,
        num_microbatches: Callable[[], int] | None = None,
    ) -> None:
        self.group, self._how = group, how
        self.overlaps_grads, self.overlaps_params = overlap_grads, overlap_params
        self.is_paused = False
        self._grad_buffers: list[ShardedBuffer] = []
        self._param_buffers: list[ShardedBuffer] = []
        self._grads = Launches(
            "reduce-scatter", partial(reduce_scatter, group=group, how=how, overlapped=True), group
        )
        self._params = Launches(
            "all-gather", partial(all_gather, group=group, overlapped=True), group
        )
        self._arrivals = Arrivals(num_microbatches or (lambda: 1))
        #: By bucket, the streams on which its gradients were added up: branches of a model may have
        #: streams.
        self._streams: defaultdict[int, set[Any]] = defaultdict(set)
        #: Held by announcements: a gradient that is added up outside of autograd may be announced
        #: by another thread.
        self._lock = RLock()
        #: Numbers of this step's gathers, in the order of their first wait, and whether any wait
        #: was for a read.
        self._met: list[int] = []
        self._is_met_by_reads = False
        if overlap_grads and group.size > 1:
            # A communicator that was abandoned in the middle of a step must not block this one. All
            # ranks forget it alike.
            _last_launcher.pop(group.own_handle, None)

    def add(
        self,
        grads: Sequence[ShardedBuffer],
        params: Sequence[ShardedBuffer],
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """Takes over further buffers, on all ranks alike; waits for params that are being gathered.

        Args:
            grads: buffers whose grads are reduced, in the same order on all ranks.
            params: buffers whose params are gathered: two for a grad buffer of params of two
                dtypes.
            frozen: names of params in `grads` that never have a gradient.
        """
        self.finish_params()
        self._met, self._is_met_by_reads = [], False
        self._grad_buffers += grads
        self._param_buffers += params
        reduces: list[Transfer] = []
        for buffer in grads:
            for bucket, slots in zip(buffer.reduces, buffer.layout.slots_of_bucket, strict=True):
                names = frozenset(slot.name for slot in slots) - frozen
                reduces.append(Transfer(buffer, *bucket, names))
        self._grads.add(reduces)
        self._arrivals.add([transfer.names for transfer in reduces])
        gathers: list[Transfer] = []
        for buffer in params:
            slots_of = buffer.layout.slots_of_bucket
            if len(buffer.gathers) != len(slots_of):  # one for all params of a minority dtype
                slots_of = (buffer.layout.slots,)
            for bucket, slots in zip(buffer.gathers, slots_of, strict=True):
                names = frozenset(slot.name for slot in slots if buffer.holds(slot.name))
                gathers.append(Transfer(buffer, *bucket, names))
        # A buffer lies in the order of backward, so forward begins at its end.
        self._params.add(gathers, backwards=True)

    # --- grads

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient arrived since the last `finish_grads`; always False where grads are
        not overlapped."""
        return bool(self._arrivals.arrived)

    @property
    def num_reducing(self) -> int:
        """Number of buckets of grads that are under way: launched and not yet waited for."""
        return len(self._grads.under_way)

    def is_reducing(self, name: str) -> bool:
        """Whether the bucket of a gradient is under way."""
        return self._grads.number_of.get(name) in self._grads.under_way

    def check_open(self, name: str) -> None:
        """Checks that a gradient may still be changed.

        Raises:
            LayoutError: its bucket is under way.
        """
        if self.is_reducing(name):
            raise LayoutError(
                f"The gradient of {name!r} arrived after its bucket was reduced. Each gradient "
                "must arrive as often in every microbatch as it did in the first step. Call all "
                "but the last backward of a step inside no_sync(), or write "
                "overlap_grad_reduce=False."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for all but the last backward of a step: gradients are added up, and no bucket is
        launched."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def grad_arrived(self, name: str) -> None:
        """Announces that a gradient was added to its buffer, and launches the buckets that are
        complete.

        Raises:
            LayoutError: its bucket is under way already, or another communicator has buckets under
                way in the group.
        """
        if not self.overlaps_grads:
            return
        with self._lock:
            self.check_open(name)
            bucket = self._grads.number_of[name]
            self._streams[bucket].add(current_stream(self._grads.transfers[bucket].whole.device))
            if not self.is_paused and self._arrivals.count(name, bucket):
                for number in self._grads.order[len(self._grads.under_way) :]:
                    if self._arrivals.num_missing[number]:
                        return
                    self._launch(number)

    def _launch(self, number: int) -> None:
        if self.group.size > 1:
            self._claim_group()
        transfer = self._grads.transfers[number]
        wait_for_streams(self._streams.pop(number, ()), transfer.whole.device)
        self._grads.launch(number)

    def _claim_group(self) -> None:
        """Refuses to reduce while another communicator has buckets under way in the group.

        Ranks that launched the buckets of two optimizers in different orders would add those of one
        to the other's.
        """
        known = _last_launcher.get(self.group.own_handle)
        last = None if known is None else known()
        if last is not None and last is not self and last.num_reducing:
            raise LayoutError(
                "Two optimizers share one data-parallel group, and both reduce buckets at once. "
                "Give the second optimizer process_group=torch.distributed.new_group(), or write "
                "overlap_grad_reduce=False for both."
            )
        _last_launcher[self.group.own_handle] = ref(self)

    def defer(self, name: str) -> None:
        """Notes that a gradient is changed after backward: from now on its bucket is launched by
        `finish_grads`.

        Raises:
            LayoutError: its bucket is under way already.
        """
        if self.is_reducing(name):
            raise LayoutError(
                f"The gradient of {name!r} was changed after backward, while its bucket was being "
                "reduced. Write --distopt-overlap-grad-reduce no, or overlap_grad_reduce=False."
            )
        self._arrivals.irregular.add(name)

    def finish_grads(self, added: Sequence[ShardedBuffer] | None = None) -> None:
        """Collective: completes the sums of every rank's shards.

        Args:
            added: buffers that were added after the other sums were complete; only these are
                reduced, without overlap.

        Raises:
            LayoutError: another communicator has buckets under way in the group.
        """
        if self.overlaps_grads and added is None:
            self._finish_launches()
        else:
            if self.group.size > 1:
                self._claim_group()
            for buffer in self._grad_buffers if added is None else added:
                reduce_grads(buffer, self.group, self._how)

    def _finish_launches(self) -> None:
        """Collective: launches what was not complete, waits for all, and sets the order of launches
        of later steps."""
        for number in self._grads.order[len(self._grads.under_way) :]:
            self._launch(number)
        self._grads.wait(list(self._grads.under_way))
        self._grads.under_way.clear()
        self._arrivals.learn()
        if not self._grads.is_agreed:
            self._grads.agree(self._arrivals.order())
        self._arrivals.begin_step()

    # --- params

    def gather_of(self, name: str) -> int:
        """The number of the gather that a param is in."""
        return self._params.number_of[name]

    def gather(self, *, is_overlapped: bool = True) -> None:
        """Collective: gathers the params that their owners have updated; with `overlaps_params` it
        only begins, unless `is_overlapped` is False."""
        self.finish_params()
        if not (self.overlaps_params and is_overlapped):
            for buffer in self._param_buffers:
                gather_params(buffer, self.group)
            return
        if not self._params.is_agreed:
            self._params.agree(self._met if self._met and self._is_met_by_reads else None)
        self._met, self._is_met_by_reads = [], False
        for number in self._params.order:
            self._params.launch(number)

    def param_needed(self, name: str) -> bool:
        """Announces that a param is about to be read, and waits on the current stream until it may
        be.

        Returns:
            Whether its gather has ended: otherwise a read on another stream has to wait as well.
        """
        self._is_met_by_reads = True
        number = self._params.number_of[name]
        self._wait_for([number])
        return number not in self._params.under_way

    def _wait_for(self, numbers: Iterable[int]) -> None:
        """Waits for buckets that are under way.

        On a device the current stream waits, and not the CPU. A bucket stays in `under_way` until
        its gather has ended, so that a read on another stream waits as well. Where params were
        copied to their places on a device, the copy stays until `finish_params`.
        """
        under_way, order = self._params.under_way, self._params.order
        for number in sorted(under_way.keys() & numbers, key=order.index):
            pending = under_way[number]
            self._params.wait([number])
            if number not in self._met:
                self._met.append(number)
                buffer = self._params.transfers[number].buffer
                buffer.publish()
                if isinstance(buffer, CompactBuffer) and buffer.param.device.type != CPU:
                    pending = Pending([fence(buffer.param.device)], is_completed=lambda: False)
                    under_way[number] = pending
            # Not earlier, so that an error of the gather is raised at every wait. Publishing may
            # have removed it already.
            if pending.is_completed():
                under_way.pop(number, None)

    def finish_params(self) -> None:
        """Waits until all params are gathered; on a device the current stream waits."""
        if self._params.under_way:
            self._wait_for(tuple(self._params.under_way))
            self._params.under_way.clear()
