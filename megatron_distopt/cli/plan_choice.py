"""The plan of one choice: layouts, bytes and collectives of every stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_distopt.cli.plan_model import DTYPES, Choice, GptSizes, StageParam, check_cut, stage_params
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import (
    BufferLayout,
    MatrixSpec,
    OwnerPlan,
    choose_buckets,
    default_bucket_size,
    lay_out,
    plan_owners,
)
from megatron_distopt.layout.balance import Balance, balance_of
from megatron_distopt.layout.estimate import (
    BucketShare,
    Collective,
    Footprint,
    Kind,
    collectives_of,
    footprint_of,
    shares_of,
    stats_collective,
)
from megatron_distopt.layout.matrix_work import MatrixWork, matrix_work_of


@dataclass(frozen=True)
class PlannedBuffer:
    """Params that share a buffer, and the group that shards it.

    Args:
        params: in the order of registration.
        layout: of the buffer, in the order of backward.
        rank: in the group.
        matrices: of those params that Muon updates, by name.
    """

    params: tuple[StageParam, ...]
    layout: BufferLayout
    rank: int
    matrices: Mapping[str, MatrixSpec] = field(default_factory=dict)

    @cached_property
    def group_of(self) -> dict[str, tuple[bool, bool]]:
        """Whether each param decays and whether Muon updates it, by name: neighbours that agree are one flat param."""
        return {each.spec.name: (each.decays, each.spec.name in self.matrices) for each in self.params}

    @cached_property
    def owners(self) -> OwnerPlan:
        """Who orthogonalizes what."""
        return plan_owners(self.layout, self.matrices)

    @cached_property
    def work(self) -> MatrixWork:
        """What this rank does for matrices."""
        return matrix_work_of(self.owners, self.matrices, self.rank)

    @cached_property
    def balance(self) -> Balance:
        """How evenly the ranks of the group share that."""
        return balance_of(self.owners)

    @cached_property
    def names_by_bucket(self) -> dict[int | None, list[str]]:
        """The names of the params in each bucket, by its index."""
        found: dict[int | None, list[str]] = {}
        for slot in self.layout.slots:
            found.setdefault(slot.bucket, []).append(slot.name)
        return found


@dataclass(frozen=True)
class StagePlan:
    """The plan of a rank of one pipeline stage.

    Args:
        choice: the choice that it belongs to.
        stage: from 0.
        params: all of them, in the order of registration.
        parts: the same, by buffer: those of experts have one of their own where expert-parallel ranks differ in them.
    """

    choice: Choice
    stage: int
    params: tuple[StageParam, ...]
    parts: tuple[PlannedBuffer, ...]

    @property
    def numel(self) -> int:
        """Elements of all params."""
        return sum(param.spec.numel for param in self.params)

    @cached_property
    def shares(self) -> tuple[tuple[BucketShare, ...], ...]:
        """What the rank owns of every bucket, by buffer."""
        return tuple(map(self._shares, self.parts))

    def _shares(self, part: PlannedBuffer) -> tuple[BucketShare, ...]:
        """Each buffer has an optimizer of its own, which puts its own fraction on the host."""
        (on_host,) = choose_buckets([part.layout], self.choice.offload_fraction)
        return shares_of(part.layout, part.rank, self.choice.widths, part.group_of.__getitem__, on_host, part.matrices)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes that the rank holds, by kind."""
        total = Footprint()
        for part, shares in zip(self.parts, self.shares, strict=True):
            blocks = part.work.blocks_nbytes if part.matrices else 0
            total = total.plus(footprint_of(part.layout, self.choice.widths, shares, part.matrices, blocks))
        return total

    def updated_at(self, *, is_on_host: bool) -> tuple[BucketShare, ...]:
        """What the rank updates in one of the two places, in the order in which it does."""
        return tuple(share for shares in self.shares for share in shares if share.is_on_host == is_on_host)

    @cached_property
    def collectives(self) -> tuple[tuple[PlannedBuffer | None, Collective], ...]:
        """The collectives of one step, each with the buffer whose bucket it moves."""
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[tuple[PlannedBuffer | None, Collective]]:
        for part in self.parts:
            yield from ((part, each) for each in collectives_of(part.layout, self.choice.widths))
        yield from ((None, each) for each in stats_collective(self.choice.cut.num_ranks))

    @property
    def num_buckets(self) -> int:
        """Buckets of all buffers."""
        return sum(len(part.layout.buckets) for part in self.parts)

    def sent_by(self, kind: Kind) -> list[int]:
        """Returns the bytes that the rank sends in each collective of one kind."""
        return [each.sent_nbytes for _, each in self.collectives if each.kind is kind]

    @property
    def with_matrices(self) -> tuple[PlannedBuffer, ...]:
        """The buffers in which Muon updates something, in the order in which it does."""
        return tuple(part for part in self.parts if part.matrices)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the rank sends in one step."""
        travelling = sum(part.work.sent_nbytes + part.work.gathered_nbytes for part in self.with_matrices)
        return sum(each.sent_nbytes for _, each in self.collectives) + travelling


@dataclass(frozen=True)
class ChoicePlan:
    """The plan of all stages of one choice; the stages between the first and the last are alike and listed once.

    Args:
        choice: the choice.
        stages: the different ones, in order.
    """

    choice: Choice
    stages: tuple[StagePlan, ...]

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.footprint.lasting_nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The most that a rank of any stage holds on its device at any time."""
        return max(stage.footprint.peak_nbytes for stage in self.stages)

    def host_nbytes(self, ranks_per_node: int) -> int:
        """What the ranks of one node hold in the memory of the host, if they are of the stage that holds most there.

        Args:
            ranks_per_node: of those that a full node has.
        """
        held = [stage.footprint.host_nbytes + stage.footprint.rounded_staging_nbytes for stage in self.stages]
        return max(held) * min(ranks_per_node, self.choice.cut.num_ranks)

    def with_state(self, **changes: str | float) -> ChoicePlan:
        """The same with the state in other forms or in another place, which changes no layout.

        Args:
            changes: fields of `Choice`: forms, or `offload_fraction`.
        """
        choice = replace(self.choice, **changes)  # type: ignore[arg-type]
        return ChoicePlan(choice, tuple(replace(stage, choice=choice) for stage in self.stages))

    def stage_numbers(self, plan: StagePlan) -> range:
        """The stages that one of `stages` stands for."""
        last = self.choice.cut.pp - 1
        return range(1, last) if 0 < plan.stage < last else range(plan.stage, plan.stage + 1)


def plan_choice(gpt: GptSizes, choice: Choice) -> ChoicePlan:
    """Works out every stage for the first data-parallel rank, on which no padding of a bucket's end lies.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    numbers = sorted({0, min(1, choice.cut.pp - 1), choice.cut.pp - 1})
    return ChoicePlan(choice, tuple(plan_stage(gpt, choice, stage) for stage in numbers))


def plan_stage(gpt: GptSizes, choice: Choice, stage: int, rank: int = 0) -> StagePlan:
    """Works out one rank.

    Args:
        gpt: the model.
        choice: how it is trained.
        stage: of the pipeline.
        rank: in the data-parallel group; its experts' group has every `ep`-th of its ranks.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    cut = choice.cut
    check_cut(gpt, cut)
    if choice.has_muon and gpt.heads is None:
        rule, remedy = "have heads, as Muon takes queries, keys and values for three matrices", "Write --heads N"
        raise ConfigError(refusal("model", "no heads", rule, remedy))
    params = stage_params(gpt, cut, stage, DTYPES[choice.dtype][0])
    dense = tuple(param for param in params if not param.is_expert)
    experts = tuple(param for param in params if param.is_expert)
    parts = [_part(dense, choice, cut.dp, rank)]
    parts += [_part(experts, choice, cut.dp // cut.ep, rank // cut.ep)] if experts else []
    return StagePlan(choice, stage, params, tuple(parts))


def _part(params: tuple[StageParam, ...], choice: Choice, num_shards: int, rank: int) -> PlannedBuffer:
    numel = choice.bucket_size
    if isinstance(numel, int) and numel < num_shards:
        rule, remedy = f"be at least one element for each of {num_shards} ranks", "Write --bucket-size 40000000"
        raise ConfigError(refusal("bucket size", f"{numel} elements", rule, remedy))
    over = choice.cut.tp, choice.muon_tp_mode
    matrices = {param.spec.name: param.matrices_over(*over) for param in params} if choice.has_muon else {}
    known = {name: spec for name, spec in matrices.items() if spec is not None}
    return PlannedBuffer(params, layout_of(params, choice, num_shards), rank, known)


def layout_of(params: Sequence[StageParam], choice: Choice, num_shards: int) -> BufferLayout:
    """Lays out a buffer in the reverse order of registration, as `distribute` does.

    Args:
        params: in the order of registration.
        choice: says the size of a bucket.
        num_shards: size of the data-parallel group.
    """
    specs, numel = [param.spec for param in reversed(params)], choice.bucket_size
    if isinstance(numel, str):
        numel = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    return lay_out(specs, num_shards=num_shards, bucket_size=numel)
