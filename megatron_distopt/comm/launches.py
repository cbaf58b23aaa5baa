"""In which order, and when, the collectives of a model's buckets are launched while the program computes.

[Note: order of launches] Ranks that launched buckets in different orders would wait for each other in different
collectives. So all ranks have one order, and a bucket whose turn has not come waits for its turn. The first step shows
in which order gradients complete their buckets and modules need their params; the first rank's order is taken by all.

[Note: complete buckets] In the first step no bucket of grads is launched before backward has ended: that step shows how
often a gradient arrives in a microbatch (once, or once for every use of a recomputed module). Afterwards a bucket is
complete when each of its gradients has arrived as often in all microbatches. A bucket of which a gradient does not
arrive (a branch that was not taken), or is changed after backward (`defer`), and the buckets behind it, are launched
when the step asks for the sums: later than possible, but the same collectives in one order on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.pending import CommTime, Pending, profiled, waited


@dataclass(frozen=True, eq=False)
class Transfer:
    """What one collective communicates: a bucket of grads or params, or the packed params of a minority dtype."""

    buffer: ShardedBuffer  # that it belongs to
    whole: Tensor  # 1-D
    shard: Tensor  # 1-D, this rank's part of `whole`
    names: frozenset[str]  # of the params in it


def transfers_of_grads(buffer: ShardedBuffer, frozen: frozenset[str]) -> list[Transfer]:
    """The reduce-scatters of a grad buffer, one a bucket."""
    names = [frozenset(slot.name for slot in slots) - frozen for slots in buffer.layout.slots_of_bucket]
    return [Transfer(buffer, *each, of_bucket) for each, of_bucket in zip(buffer.reduces, names, strict=True)]


def transfers_of_params(buffer: ShardedBuffer) -> list[Transfer]:
    """The all-gathers of a param buffer: one a bucket, or one for all params of a minority dtype."""
    names: list[set[str]] = [set() for _ in buffer.gathers]
    for slot in buffer.layout.slots:
        if buffer.holds(slot.name):
            names[slot.bucket if len(names) == len(buffer.layout.buckets) else 0].add(slot.name)
    return [
        Transfer(buffer, *each, frozenset(of_bucket)) for each, of_bucket in zip(buffer.gathers, names, strict=True)
    ]


class Launches:
    """Collectives of one kind, which all ranks launch in one order, see [Note: order of launches].

    Args:
        kind: their name in a profiler.
        begin: launches one of them; from the whole and this rank's shard.
        group: whose ranks agree on the order.

    Attributes:
        transfers: what they communicate; their numbers are positions in this list.
        number_of: by the name of a param.
        order: of the numbers.
        under_way: launched and not yet waited for.
    """

    def __init__(self, kind: str, begin: Callable[[Tensor, Tensor], Pending], group: Group) -> None:
        self._kind, self._begin, self._group = kind, begin, group
        self.transfers: list[Transfer] = []
        self.number_of: dict[str, int] = {}
        self.order: list[int] = []
        self.under_way: dict[int, Pending] = {}
        #: Whether all ranks have taken one order; then no other one is asked for.
        self.is_agreed = False

    def add(self, transfers: Sequence[Transfer], *, backwards: bool = False) -> None:
        """Takes over further transfers, on all ranks alike. The order is agreed on anew after the next step.

        Args:
            transfers: in the order of backward.
            backwards: whether they are launched before the others and in the opposite order, as forward needs them.
        """
        numbers = range(len(self.transfers), len(self.transfers) + len(transfers))
        self.transfers += transfers
        self.number_of |= {name: number for number in numbers for name in self.transfers[number].names}
        self.order = [*reversed(numbers), *self.order] if backwards else [*self.order, *numbers]
        self.is_agreed = False

    def launch(self, number: int) -> None:
        """Collective: begins one of them."""
        transfer = self.transfers[number]
        with profiled(f"begin {self._kind} {number}"):
            self.under_way[number] = self._begin(transfer.whole, transfer.shard)

    def wait(self, numbers: Sequence[int]) -> CommTime:
        """Waits for some that are under way; they remain listed there."""
        return waited({f"wait for {self._kind} {number}": self.under_way[number] for number in numbers})

    def agree(self, wanted: list[int] | None) -> None:
        """Collective: takes the order that the first of the ranks with a wish wants; to be called until `is_agreed`.

        Args:
            wanted: all numbers in the order that this rank has seen; None where it has seen none.
        """
        known = [each for each in exchange(wanted, self._group) if each is not None]
        if known:
            self.order, self.is_agreed = known[0], True


class Arrivals:
    """Counts the gradients of a step and says which buckets are complete, see [Note: complete buckets]."""

    def __init__(self, num_microbatches: Callable[[], int]) -> None:
        self._num_microbatches = num_microbatches
        self._names: list[frozenset[str]] = []
        #: Arrivals of each gradient in a microbatch; empty before the first step has ended.
        self._each: Counter[str] = Counter()
        #: Gradients that do not arrive as often in every microbatch, and those that are changed after backward.
        self._irregular: set[str] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the gradients of the step before, but not what was learned from them."""
        self._arrived: Counter[str] = Counter()
        self._num_arrived = 0
        self._microbatches = 1
        #: By bucket, the number of arrivals when its last gradient so far arrived.
        self._last: dict[int, int] = {}
        self._num_missing = [len(names) for names in self._names]

    def add(self, names: Sequence[frozenset[str]]) -> None:
        """Takes over further buckets.

        Args:
            names: by bucket, of the params whose gradients it waits for.
        """
        self._names += names
        self._num_missing += [len(each) for each in names]

    @property
    def has_any(self) -> bool:
        """Whether a gradient has arrived in this step."""
        return bool(self._arrived)

    def count(self, name: str, bucket: int) -> bool:
        """Counts a gradient.

        Returns:
            Whether it was the last one expected of this param, so that its bucket may be complete.
        """
        if not self._arrived:
            self._microbatches = self._num_microbatches()
        self._arrived[name] += 1
        self._num_arrived += 1
        self._last[bucket] = self._num_arrived
        is_last = self._arrived[name] == self._each[name] * self._microbatches and name not in self._irregular
        if is_last:
            self._num_missing[bucket] -= 1
        return is_last

    def is_complete(self, bucket: int) -> bool:
        """Whether all gradients of a bucket have arrived."""
        return self._num_missing[bucket] == 0

    def defer(self, name: str) -> None:
        """Notes that a gradient is changed after backward: its bucket is never complete before the step asks."""
        self._irregular.add(name)

    def learn(self) -> None:
        """Learns from a step that has ended how often each gradient arrives in a microbatch."""
        for name, times in self._arrived.items():
            each, rest = divmod(times, self._microbatches)
            self._each[name] = max(self._each[name], each)
            if rest:
                self._irregular.add(name)

    def order(self) -> list[int]:
        """The buckets in the order in which this step completed them, after `learn`.

        Those that cannot be launched early come last, so that no other one waits for them.
        """

        def turn(bucket: int) -> tuple[bool, int, int]:
            names = self._names[bucket]
            is_early = names <= self._each.keys() and not names & self._irregular
            return not is_early, self._last.get(bucket, 0), bucket

        return sorted(range(len(self._names)), key=turn)
