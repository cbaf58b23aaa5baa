"""Which saves came before in the life of a run: those that it made, and those of the run that it was resumed from.

[Note: history] Every manifest names the saves before it, so that `keep_last` knows whose checkpoints it may remove. A
name or a date would not say it: a checkpoint beside it may be of another run with the same model, or of another life of
this one, which was resumed from an earlier checkpoint.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.optimizer import ShardedOptimizer

__all__ = ["earlier_saves", "remember_loaded", "remember_saved"]

#: Save ids in a manifest: a run that keeps more checkpoints than these removes none of the oldest.
_MOST = 1000
#: By the first optimizer of a rank, which lives as long as its run.
_SAVES: WeakKeyDictionary[ShardedOptimizer, tuple[str, ...]] = WeakKeyDictionary()


def earlier_saves(model: WholeModel) -> tuple[str, ...]:
    """Save ids, the latest last."""
    return _SAVES.get(model.shares[0].optimizer, ())


def remember_saved(model: WholeModel, save_id: str) -> None:
    """Called when a save has begun; one that fails leaves an id that nothing has."""
    _SAVES[model.shares[0].optimizer] = (*earlier_saves(model), save_id)[-_MOST:]


def remember_loaded(model: WholeModel, manifest: Manifest) -> None:
    """Called when a state was taken over; one of other software has no history."""
    own = (manifest.save_id,) if manifest.save_id else ()
    _SAVES[model.shares[0].optimizer] = (*manifest.earlier, *own)[-_MOST:]
