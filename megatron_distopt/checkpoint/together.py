"""Saving and loading by all ranks of the model. Small messages travel between them; tensors go to the disk and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_distopt.checkpoint.collector import no_collection
from megatron_distopt.checkpoint.contribution import contribution_of
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.history import remember_saved
from megatron_distopt.checkpoint.load import load_planned, separate, verify_files
from megatron_distopt.checkpoint.load_plan import LoadPlan, check_names, plan_load
from megatron_distopt.checkpoint.saving import begin
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, exchange, raise_together
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["load_checkpoint", "names_of_all", "save_checkpoint"]


@no_collection()
def save_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: writes every rank's shards; the folder holds the new checkpoint afterwards, or still the old one.

    Args:
        folder: of the checkpoint; made where it is missing.
        model: with this rank's optimizers.
        everyone: all ranks that hold a part of the model.

    Raises:
        CheckpointError: on a rank that cannot write.
        RanksDisagreeError: on the others, with that rank's text.
    """
    saving = begin(folder, everyone)
    try:
        raise_together(lambda: saving.write(contribution_of(model)), everyone, "save")
        raise_together(saving.commit, everyone, "save")
        remember_saved(model, saving.save_id)
    except BaseException:
        saving.abandon()
        raise
    finally:
        saving.release()


@no_collection()
def load_checkpoint(folder: Path, model: WholeModel, everyone: Group) -> None:
    """Collective: reads this rank's shards, whatever the layout they were saved in; the params are not gathered yet.

    Everything is verified before anything is changed: each file by one rank, and by every rank that what it needs is
    there.

    Args: as of `save_checkpoint`.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    names = names_of_all(model, everyone)
    plan = raise_together(lambda: _verified(folder, model, everyone, names), everyone, "load")
    _check_same_save(folder, exchange(plan.manifest.save_id, everyone))
    ready = plan_load(plan.manifest, str(folder), model) if separate(plan.groups) else plan
    raise_together(lambda: load_planned(folder, ready, model), everyone, "load")


def _verified(folder: Path, model: WholeModel, everyone: Group, names: Iterable[str]) -> LoadPlan:
    manifest = read_manifest(folder)
    check_names(manifest, str(folder), model, names)
    plan = plan_load(manifest, str(folder), model)
    verify_files(folder, manifest.files[everyone.rank :: everyone.size])
    return plan


def _check_same_save(folder: Path, save_ids: Sequence[str]) -> None:
    """Another run may have saved there while the ranks were reading."""
    if len(set(save_ids)) > 1:
        got, rule = f"saves {', '.join(sorted(set(save_ids)))} on different ranks", "stay as it is while it is read"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, "Let one run save there at a time"))


def names_of_all(model: WholeModel, everyone: Group) -> set[str]:
    """Collective: names in the whole model of the params that train on any rank.

    Args: as of `save_checkpoint`.
    """
    return {name for names in exchange(_names_begun_here(model), everyone) for name in names}


def _names_begun_here(model: WholeModel) -> list[str]:
    """Names of the params of which this rank owns the first element: together each param once or a few times."""
    return [
        share.placements[shard.name].name
        for share in model.shares
        for flat in share.optimizer.flat_params
        for shard in flat.plan.shards
        if shard.in_param.start == 0
    ]
