"""The gradients of a model from backward to the step: where they are, what they mean, and how they
are reduced.

[Note: phases of a gradient] A rank's contributions are *local* until they are *reduced*: then its
own shards hold the sum over ranks, and the rest of the buffer has no meaning. As in torch,
`param.grad` stays after the step until it is cleared, and a backward before that adds to it. Then
`_reopen` first makes the buffer local again: it zeroes the elements that this rank does not own,
and scales its sums so that the next reduction restores them. The same holds for a backward after
`clip_grad_norm_` or `full_grad`. A *round* is the time from the first backward until a step is made
or gradients are cleared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megatron_distopt.buffers import (
    GradSlot,
    LocalGrad,
    ShardedBuffer,
    refuse_local_grads,
    show_assigned,
    view_like,
    view_of,
)
from megatron_distopt.comm import Communicator, Tally, sum_over
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, DistOptError, LayoutError
from megatron_distopt.hosts.torch.cpp_calls import before_cpp_calls
from megatron_distopt.hosts.torch.ddp import DDPWatch
from megatron_distopt.layout import Span, owned_shards
from megatron_distopt.optimizer.loss_scale import LossScale
from megatron_distopt.optimizer.step import StepAction, StepDecision


class Phase(Enum):
    """What the grad buffers hold."""

    #: This rank's contributions.
    LOCAL = "local"
    #: The sums over ranks, in this rank's shards; the next step uses them.
    REDUCED = "reduced"
    #: The same sums, after the step was made.
    STEPPED = "stepped"


class ScaledLoss:
    """With a loss scale, refuses gradients of a loss that was not scaled."""

    def __init__(self, config: DistOptConfig) -> None:
        #: Whether every backward has to begin at a loss that `mark` returned.
        self.is_needed = config.loss_scale not in (None, 1, 1.0)
        self._is_in_backward = False

    def mark(self, loss: Tensor) -> Tensor:
        """Marks a loss as scaled, so that its backward is accepted; returns it."""

        def begin(_: Tensor) -> None:
            self._is_in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

        if loss.requires_grad:
            loss.register_hook(begin)  # type: ignore[no-untyped-call]
        return loss

    def end(self) -> None:
        self._is_in_backward = False

    def check(self, name: str) -> None:
        """Called in a backward, when it has the gradient of the param `name`."""
        if not self._is_in_backward:
            raise ConfigError(
                f"The gradient of param {name!r} comes from a loss that was not scaled, but "
                "loss_scale is set. Write optimizer.scale_loss(loss).backward(), or leave "
                "loss_scale out."
            )


class SumDivisor:
    """What sums over ranks have to be divided by to give torch's `param.grad`: the number of ranks,
    the loss scale, and what users have clipped by."""

    def __init__(self, loss_scale: LossScale, num_ranks: int) -> None:
        self._loss_scale, self._num_ranks = loss_scale, num_ranks
        #: What users have clipped the sums by since they were reduced, or since the step.
        self._clip = 1.0
        #: Of the step whose sums stay in the buffers; None before it.
        self._decision: StepDecision | None = None

    def reduced(self) -> None:
        """The buffers have new sums."""
        self._decision, self._clip = None, 1.0

    def clip(self, divisor: float) -> None:
        """A user clips the sums."""
        self._clip *= divisor

    def stepped(self, decision: StepDecision) -> None:
        """A step was made or skipped, which divides fp32 sums in place."""
        self._decision, self._clip = decision, 1.0

    def of(self, grad_dtype: torch.dtype) -> float | Tensor:
        if self._decision is None:
            return self._loss_scale.value * self._num_ranks * self._clip
        if self._decision.action is not StepAction.UPDATE:
            return self._decision.unclipped * self._clip
        # Of 16-bit sums only an fp32 copy was divided.
        if grad_dtype == torch.float32:
            return self._clip
        return self._decision.divisor * self._clip


class Grads:
    """The grad buffers of one model on this rank, which a communicator reduces.

    `on_drop` is called after gradients were cleared while their buckets were being reduced. It is
    collective, as clearing them is then.
    """

    def __init__(
        self,
        communicator: Communicator,
        loss_scale: LossScale,
        config: DistOptConfig,
        on_drop: Callable[[], None],
    ) -> None:
        self._communicator = communicator
        self._data = communicator.group
        self._divisor = SumDivisor(loss_scale, self._data.size)
        self.scaled_loss = ScaledLoss(config)
        self.ddp = DDPWatch(overlaps=communicator.overlaps_grads)
        #: The gradient of each param, in the order of the buffers.
        self.slots: list[GradSlot] = []
        self._buffers: list[ShardedBuffer] = []
        # elements of each param in this rank's shards; most params of a large model are not here
        self._owned: dict[str, Span] = {}
        self._handles: list[RemovableHandle] = []
        #: Params whose gradients are shown as LocalGrad; those without a slot have a hook, too.
        self._guarded: dict[Parameter, RemovableHandle | None] = {}
        #: By param name, autograd's node that accumulates the gradient, with a hook that reopens
        #: sums before it does. The node is kept because its hook ends with it.
        self._accumulators: dict[str, tuple[Node, RemovableHandle]] = {}
        #: Rounds so far, see [Note: phases of a gradient].
        self.num_rounds = 0
        self.phase = Phase.LOCAL
        #: Whether a backward of this round has added to gradients that other ranks wait for.
        self._has_arrived = False
        #: Whether the gradients of this round were read before the step; the same on all ranks.
        self._was_read = False
        #: By slot, whether this rank has a gradient of it; as of the last reduction.
        self.present: list[bool] = []
        #: Gradients that are sums over ranks, or to which a backward has added since the sum.
        self._summed: set[str] = set()
        #: A checksum of the summed gradients to which this round adds, see `_mark`.
        self.kept = 0
        #: A checksum of gradients that went through DDP's communication hooks; alike on all ranks.
        self.sum_of_hooked = 0
        self._on_drop = on_drop
        #: Errors of this rank that are to be raised on all ranks.
        self.complaints: list[DistOptError] = []

    def add(self, buffers: Sequence[ShardedBuffer], slots: Sequence[GradSlot]) -> None:
        """Takes over further params, which the communicator has already. Called between two steps,
        on all ranks alike."""
        self._buffers += buffers
        self.slots += slots
        self.present += [slot.param.grad is not None for slot in slots]
        for buffer in buffers:
            self._owned |= {
                shard.name: shard.in_param for shard in owned_shards(buffer.layout, buffer.rank)
            }
        for slot in slots:
            before, after = partial(self._before, slot), partial(self._after, slot)
            with _unfrozen(slot.param):
                self._handles.append(slot.param.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(slot.param.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
            self._guard(slot.name, slot.param, None)
        if self.phase is Phase.REDUCED:  # as the other gradients of this step are reduced already
            for slot in slots:
                slot.take()
            self._communicator.finish_grads(buffers)
            self._summed.update(slot.name for slot in slots)

    def guard(self, untrained: Mapping[str, Parameter]) -> None:
        """Guards the first gradients of params that may begin to train and are in no buffer yet."""

        def accumulated(param: Parameter) -> None:
            param.grad = param.grad  # as if it had been assigned

        for name, param in untrained.items():
            if param not in self._guarded and self._data.size > 1:
                with _unfrozen(param):
                    handle = param.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
                self._guard(name, param, handle)

    def _guard(self, name: str, param: Parameter, handle: RemovableHandle | None) -> None:
        """Shows gradients that are assigned to a param as those of backward, see [Note:
        param.grad]."""
        if self._data.size > 1:
            if earlier := self._guarded.get(param):
                earlier.remove()
            self._guarded[param] = handle
            show_assigned(param, partial(self._shown, name))
            before_cpp_calls(refuse_local_grads)
            param.grad = param.grad  # it may have been assigned before

    def _shown(self, name: str, param: Parameter, grad: Tensor) -> Tensor:
        return grad if self.ddp.has(param) else LocalGrad.of(grad, name, self.zeroing)

    def release(self) -> None:
        """Removes the hooks: from now on gradients are torch's own and are not reduced."""
        self._remove_accumulators()
        for handle in self._handles:
            handle.remove()
        for param, guard in self._guarded.items():
            show_assigned(param, None)
            if guard is not None:
                guard.remove()
        is_local = self._data.size == 1 or self.phase is Phase.LOCAL
        for slot in self.slots:
            slot.release(is_own=is_local and not self._communicator.is_reducing(slot.name))
        self.phase = Phase.LOCAL
        self._handles.clear()
        self._guarded.clear()

    def zeroing(self, name: str) -> None:
        """Called before a gradient is zeroed in place, as `model.zero_grad(set_to_none=False)`
        does."""
        self._communicator.check_open(name)
        self._summed.discard(name)

    def _before(self, slot: GradSlot, _: Tensor) -> None:
        """Called when a gradient was computed. It may not be accumulated, as by
        `torch.autograd.grad`, so sums are reopened only when it is."""

        def accumulates(_: object) -> None:
            if self.phase is not Phase.LOCAL:
                self._reopen()

        if self.phase is not Phase.LOCAL and slot.name not in self._accumulators:
            node = get_gradient_edge(slot.param).node
            self._accumulators[slot.name] = node, node.register_prehook(accumulates)

    def _after(self, slot: GradSlot, _: Tensor) -> None:
        grad = slot.param.grad
        if self.scaled_loss.is_needed:
            self.scaled_loss.check(slot.name)
        if self._communicator.overlaps_grads and self._communicator.is_reducing(slot.name):
            if isinstance(grad, LocalGrad):
                self._communicator.check_open(slot.name)
            # the user cleared it by model.zero_grad() or param.grad = None, not by `clear`
            self._drop_round()
        if self.ddp.has(slot.param):  # see [Note: gradients under DDP]
            slot.give_back()
            self.ddp.arrived(slot.param)
            self._has_arrived = True
            return
        if grad is not slot.shown:
            self._summed.discard(slot.name)
        # On one rank a gradient with a graph stays readable and differentiable until the step.
        if self._data.size > 1 or grad is None or not grad.requires_grad:
            slot.take()
        if not self._communicator.is_paused:
            self._has_arrived = True
            if self._communicator.overlaps_grads:
                self._communicator.grad_arrived(slot.name)

    @torch.no_grad()
    def _reopen(self) -> None:
        """Makes sums local contributions again, see [Note: phases of a gradient]."""
        kept = {slot.name: slot for slot in self.slots if slot.param.grad is slot.shown}
        self._summed.intersection_update(kept)
        in_ddp = (not slot.is_missing and self.ddp.has(slot.param) for slot in self.slots)
        is_scaled = self.phase is Phase.STEPPED and self.scaled_loss.is_needed
        if is_scaled and (kept or any(in_ddp)):
            raise ConfigError(
                "Gradients of the last step were not cleared before backward, and the loss scale "
                "may have changed in that step. Call optimizer.zero_grad() before backward."
            )
        for buffer in self._buffers:
            divisor = self._divisor.of(buffer.grad.dtype)
            for place in buffer.layout.slots:
                if place.name not in kept:
                    continue
                kept[place.name].take()
                flat = view_of(buffer.grad, place.in_buffer)
                owned = self._owned.get(place.name, Span(0, 0))
                flat[: owned.start].zero_()
                flat[owned.stop :].zero_()
                flat[owned.as_slice()].mul_(self._data.size / divisor)
        self.phase = Phase.LOCAL
        self._remove_accumulators()

    def _remove_accumulators(self) -> None:
        for _, handle in self._accumulators.values():
            handle.remove()
        self._accumulators.clear()

    def reduce_ahead(self) -> None:
        """Collective: reduces gradients before the step, for calls that read them."""
        if self._is_local_somewhere():
            self.reduce(for_step=False)
        self._was_read = True
        present = [not slot.is_missing for slot in self.slots]
        flags = torch.tensor(present, dtype=torch.float32, device=self.slots[0].view.device)
        sum_over(flags, self._data)
        self.fill_missing([flag > 0 for flag in flags.tolist()])

    def reduce(self, *, for_step: bool = True) -> None:
        """Collective: reduces gradients that are not reduced yet, so that each rank's shards hold
        the sums. For the step, gradients under DDP are copied into the buffer, too."""
        is_reduced = for_step and self._was_read and not self._is_local_somewhere()
        if is_reduced and self.phase is Phase.REDUCED:
            self._take_grads(for_step=True)
            return
        try:
            if self.phase is not Phase.LOCAL:
                self._reopen()
        except ConfigError as error:
            self.complaints.append(error)
        self.kept = self._mark() if self._summed else 0
        self.sum_of_hooked = 0
        if self.ddp.used:
            self.sum_of_hooked = self.ddp.sum_of_hooked(self.slots, self._data.size)
            if complaint := self.ddp.complaint(self.slots):
                self.complaints.append(complaint)
        self._take_grads(for_step=for_step)
        self._communicator.finish_grads()
        self.phase = Phase.REDUCED
        self._divisor.reduced()
        self._summed = {slot.name for slot in self.slots}

    def _take_grads(self, *, for_step: bool) -> None:
        """Makes missing gradients zero, and takes those that the user assigned. An assignment to a
        gradient that is already being reduced is a complaint."""
        self.present, outside = [], []
        # a LocalGrad asks Python before each of its attributes
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                grad = slot.param.grad
                self.present.append(grad is not None)
                if grad is not slot.shown or grad.data_ptr() != slot.address:
                    outside.append(slot)
        for slot in outside:
            is_assigned = slot.param.grad is not slot.shown
            if self._communicator.is_reducing(slot.name):
                if is_assigned:
                    self._complain(
                        f"The grad of param {slot.name!r} was assigned or cleared after backward, "
                        "while it was already being reduced. Clear gradients with "
                        "optimizer.zero_grad(), or write overlap_grad_reduce=False."
                    )
            elif slot.is_missing:
                slot.view.zero_()
            elif self.phase is Phase.REDUCED:
                if is_assigned:
                    self._complain(
                        f"The grad of param {slot.name!r} was assigned after clip_grad_norm_ or "
                        "full_grad had summed the gradients over ranks. Assign it before that "
                        "call, or call optimizer.zero_grad() in between."
                    )
            elif for_step and self.ddp.has(slot.param):
                slot.copy()
            else:
                slot.take()

    def _complain(self, text: str) -> None:
        self.complaints.append(LayoutError(text))

    def _is_local_somewhere(self) -> bool:
        """Collective: whether any rank has contributions that are not reduced.

        All ranks must have cleared the same gradients since the last reduction: a sum needs the
        parts of all ranks.
        """
        kept = self._mark()
        numbers = [float(self.phase is Phase.LOCAL), float(kept), float(kept**2)]
        sums = torch.tensor(numbers, device=self.slots[0].view.device)
        sum_over(sums, self._data)
        local, total, squares = sums.tolist()
        if Tally(total, squares).spread(self._data.size):
            self._complain(
                "Some ranks cleared gradients after step(), clip_grad_norm_ or full_grad had "
                "summed them, and other ranks did not. Clear gradients before that call, or on all "
                "ranks."
            )
        return bool(local)

    @property
    def divisor(self) -> float:
        """The sums divided by this are torch's `param.grad`; not for the phase LOCAL."""
        return float(self._divisor.of(self._buffers[0].grad.dtype))

    def clip(self, divisor: float) -> None:
        """Divides the sums. On one rank this happens now, because users may read them there; on
        several it happens in the step."""
        if self._data.size == 1:
            for buffer in self._buffers:
                buffer.grad.div_(divisor)
        else:
            self._divisor.clip(divisor)

    def raise_complaint(self) -> None:
        complaints, self.complaints = self.complaints, []
        if complaints:
            raise complaints[0]

    def _mark(self) -> int:
        """A checksum below 64 of which gradients are sums or were added to sums; 0 for none.

        Ranks compare it through sums. It is small so that the sum of squares over thousands of
        ranks is exact in fp32.
        """
        is_kept = [
            slot.name in self._summed and slot.param.grad is slot.shown for slot in self.slots
        ]
        return 1 + zlib.crc32(bytes(is_kept)) % 63 if any(is_kept) else 0

    def fill_missing(self, is_active: Sequence[bool]) -> None:
        """Gives a param a gradient on every rank if it has one on any rank."""
        for slot, active in zip(self.slots, is_active, strict=True):
            if active and slot.is_missing:
                slot.show()

    def end_round(self, decision: StepDecision) -> None:
        """Ends the round after a step that was made or skipped, which has divided the fp32
        gradients."""
        self._divisor.stepped(decision)
        self.phase, self._was_read = Phase.STEPPED, False
        self._next_round()

    def _next_round(self) -> None:
        self.num_rounds += 1
        self._has_arrived = False
        self.scaled_loss.end()
        self.ddp.end_round()

    def averaged(self, slot: GradSlot) -> Tensor | None:
        """Collective: the averaged gradient in fp32, in the shape of the param; None if no rank has
        one."""
        buffer = next(buffer for buffer in self._buffers if slot.name in buffer.layout.slot_of)
        whole = torch.zeros(slot.view.numel(), device=slot.view.device)
        owned = self._owned.get(slot.name, Span(0, 0))
        if not slot.is_missing:
            flat = view_of(buffer.grad, buffer.layout.slot_of[slot.name].in_buffer)
            divisor = self._divisor.of(buffer.grad.dtype)
            whole[owned.as_slice()] = flat[owned.as_slice()].float() / divisor
        present = torch.tensor([0.0 if slot.is_missing else 1.0], device=whole.device)
        both = torch.cat([whole, present])
        sum_over(both, self._data)
        return view_like(both, Span(0, whole.numel()), slot.view) if both[-1] > 0 else None

    def clear(self, *, set_to_none: bool = True) -> None:
        """Drops the gradients, or zeroes them; collective where buckets are under way."""
        if self._has_arrived:
            self._drop_round()
        for slot in self.slots:
            if set_to_none:
                slot.param.grad = None
            elif not slot.is_missing:
                slot.take()
                slot.view.zero_()
        self.phase = Phase.LOCAL
        self._summed.clear()

    def _drop_round(self) -> None:
        if self._communicator.has_arrived:
            self._communicator.finish_grads()
            self._on_drop()
        self._next_round()


@contextmanager
def _unfrozen(param: Parameter) -> Iterator[None]:
    """Unfreezes a param so that it takes hooks; torch keeps them when the param is frozen again."""
    is_trained = param.requires_grad
    param.requires_grad_(True)
    yield
    param.requires_grad_(is_trained)
