"""The reduce-scatter of a bucket while backward still computes the gradients of others.

[Note: order of launches] Ranks that launched buckets in different orders would wait for each other in different
collectives. So there is one order, and a bucket whose turn has not come waits for its turn. In the first step nothing
is launched early: that step shows in which order buckets are completed, and how often a gradient arrives in a
microbatch (once, or once for every use of a recomputed module). The first rank's order is taken by all.

[Note: what is not launched] A bucket of which a gradient does not come (a branch that was not taken) is launched by
`finish`, and so are those behind it: later than they could be, but the same collectives in one order on every rank.
The same holds for a bucket that somebody still adds to after backward (`defer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.clock import CommTime, waited
from megatron_distopt.comm.collectives import AS_THEY_ARE, Pending, Reduction, begin_reduce_scatter
from megatron_distopt.comm.groups import Group, ProcessGroup
from megatron_distopt.comm.ranges import profiled
from megatron_distopt.errors import LayoutError, refusal

__all__ = ["GradOverlap", "check_alone"]

#: By group, who launched the last bucket in it.
_launched: WeakKeyDictionary[ProcessGroup, ReferenceType[GradOverlap]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _Unit:
    """One bucket: what is launched at once."""

    whole: Tensor
    part: Tensor
    names: frozenset[str]

    def begin(self, group: Group, how: Reduction) -> Pending:
        """Collective."""
        return begin_reduce_scatter(self.whole, self.part, group, how)


class GradOverlap:
    """Counts gradients as they come in, and launches buckets in one order, see [Note: order of launches].

    Args:
        buffers: all grad buffers of this rank, in the order in which every rank has them.
        group: over which they are reduced.
        num_microbatches: of the step that begins; asked once a step.
        how: see `Reduction`.
        frozen: params in the buffers of which no gradient will come.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedBuffer],
        group: Group,
        *,
        num_microbatches: Callable[[], int] = lambda: 1,
        how: Reduction = AS_THEY_ARE,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self._group, self._num_microbatches, self._how = group, num_microbatches, how
        self._units = [unit for buffer in buffers for unit in _units_of(buffer, frozen)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit.names}
        self._order = list(range(len(self._units)))
        self._is_agreed = False
        #: Arrivals of each gradient in a microbatch; nothing before the first step has ended.
        self._each: Counter[str] = Counter()
        #: What does not arrive as often in every microbatch, and what somebody adds to after backward.
        self._irregular: set[str] = set()
        #: A gradient that no kernel returns (it was added up elsewhere) may be announced by another thread.
        self._lock = RLock()
        if group.size > 1:  # one that was given up in the middle of a step counts no more, on all ranks alike
            _launched.pop(group.own_handle, None)
        self._begin_step()

    def _begin_step(self) -> None:
        self._arrived: Counter[str] = Counter()
        self._num_arrived = 0
        self._microbatches = 1
        #: By bucket, when the last gradient so far came in, counted in arrivals.
        self._last: dict[int, int] = {}
        self._missing = [set(unit.names) for unit in self._units]
        self._begun: dict[int, Pending] = {}

    @property
    def num_begun(self) -> int:
        """Buckets that are under way."""
        return len(self._begun)

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient came in since the last `finish`."""
        return bool(self._arrived)

    def arrived(self, name: str) -> None:
        """A gradient was added to its buffer.

        Raises:
            LayoutError: its bucket is under way already.
        """
        with self._lock:
            number = self._unit_of[name]
            self.check_open(name)
            if not self._arrived:
                self._microbatches = self._num_microbatches()
            self._arrived[name] += 1
            self._num_arrived += 1
            self._last[number] = self._num_arrived
            if self._arrived[name] == self._each[name] * self._microbatches and name not in self._irregular:
                self._missing[number].discard(name)
                self._begin_complete()

    def is_begun(self, name: str) -> bool:
        """Whether the bucket of a param is under way."""
        return self._unit_of[name] in self._begun

    def check_open(self, name: str) -> None:
        """Whether something may still be added to a gradient.

        Raises:
            LayoutError: its bucket is under way already.
        """
        if self.is_begun(name):
            raise _late(name)

    def defer(self, name: str) -> None:
        """Somebody adds to this gradient after backward: its bucket is launched by `finish`, from now on.

        Raises:
            LayoutError: its bucket is under way already.
        """
        if self.is_begun(name):
            raise _touched(name)
        self._irregular.add(name)

    def _begin_complete(self) -> None:
        """Whatever is complete and has its turn."""
        for number in self._order[len(self._begun) :]:
            if self._missing[number]:
                return
            self._begin(number)

    def _begin(self, number: int) -> None:
        check_alone(self._group, self)
        with profiled(f"begin reduce-scatter {number}"):
            self._begun[number] = self._units[number].begin(self._group, self._how)

    def finish(self) -> CommTime:
        """Collective: launches the rest, waits for all, and learns for the next step."""
        for number in self._order[len(self._begun) :]:
            self._begin(number)
        time = waited({f"wait for reduce-scatter {number}": each for number, each in self._begun.items()})
        self._learn()
        self._begin_step()
        return time

    def _learn(self) -> None:
        """Collective after the first step, in which the order is agreed upon."""
        for name, times in self._arrived.items():
            each, rest = divmod(times, self._microbatches)
            self._each[name] = max(self._each[name], each)
            if rest:
                self._irregular.add(name)
        if not self._is_agreed:  # on every rank, whatever has come in there
            self._order = exchange(sorted(self._order, key=self._turn), self._group)[0]
            self._is_agreed = True

    def _turn(self, number: int) -> tuple[bool, int, int]:
        """Buckets that cannot be launched early come last, so that none waits for them."""
        names = self._units[number].names
        is_early = names <= self._each.keys() and not names & self._irregular
        return not is_early, self._last.get(number, 0), number


def check_alone(group: Group, mine: GradOverlap | None) -> None:
    """Ranks that begin buckets of two optimizers in different orders would add up one with the other.

    Args:
        group: in which a bucket is about to be reduced.
        mine: whose it is; None for one that reduces them at once.

    Raises:
        LayoutError: another one has buckets under way in the group.
    """
    if group.size == 1:
        return
    last = _launched.get(group.own_handle, lambda: None)()
    if last is not None and last is not mine and last.num_begun:
        raise _shared()
    if mine is not None:
        _launched[group.own_handle] = ref(mine)


def _units_of(buffer: ShardedBuffer, frozen: frozenset[str]) -> list[_Unit]:
    names = [frozenset(slot.name for slot in slots) - frozen for slots in buffer.layout.slots_of_bucket]
    return [_Unit(*each, of_bucket) for each, of_bucket in zip(buffer.reduces(), names, strict=True)]


def _late(name: str) -> LayoutError:
    got, rule = "arrived after its bucket was reduced", "arrive as often in every microbatch as in the first step"
    remedy = "Call all but the last backward of a step inside no_sync(), or write overlap_grad_reduce=False"
    return LayoutError(refusal(f"gradient of {name!r}", got, rule, remedy))


def _touched(name: str) -> LayoutError:
    got, rule = "changed after backward, when its bucket was under way", "be complete when backward ends"
    remedy = "Write --distopt-overlap-grad-reduce no, or overlap_grad_reduce=False"
    return LayoutError(refusal(f"gradient of {name!r}", got, rule, remedy))


def _shared() -> LayoutError:
    got, rule = "shared by two optimizers with buckets under way", "be of one that reduces grads beside backward"
    remedy = (
        "Give the second one process_group=torch.distributed.new_group(), or write overlap_grad_reduce=False for both"
    )
    return LayoutError(refusal("data-parallel group", got, rule, remedy))
