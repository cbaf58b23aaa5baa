"""The optimizer state on disk, by param name and logical element. docs/checkpoint.md specifies the
files."""

from megatron_distopt.checkpoint.folder import MANIFEST, is_checkpoint, read_manifest
from megatron_distopt.checkpoint.load import load_checkpoint
from megatron_distopt.checkpoint.save import save_checkpoint
from megatron_distopt.checkpoint.whole_model import Share, WholeModel

__all__ = [
    "MANIFEST",
    "Share",
    "WholeModel",
    "is_checkpoint",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
]
