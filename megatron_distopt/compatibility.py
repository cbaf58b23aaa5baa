"""Which features exclude each other, and what to do instead: one table, which all hosts check
before training starts.

A feature is something that an option, a param or the host asks for. The features of a run are a
mapping from features to how the user asked for them, such as `{Feature.OFFLOAD:
"offload_fraction=0.5"}`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError


class Feature(Enum):
    """Features that exclude others. The value describes the feature in docs/reference.md."""

    # Options.
    OFFLOAD = "`offload_fraction` above 0"
    LOW_PRECISION = "`main_params_dtype`, `exp_avg_dtype` or `exp_avg_sq_dtype` other than float32"
    BF16_MAIN_PARAMS = "`main_params_dtype` remainder or bfloat16"
    GATHERED_FORMAT = "`checkpoint_format` gathered"
    REDUCE_DTYPE = "`reduce_dtype`"
    OVERLAPPED_GATHER = "`overlap_param_gather`"
    NO_LOSS_SCALE = "no `loss_scale`"
    MUON_OPTIONS = "an option of Muon, such as `muon_momentum`"
    AVERAGES = "`ema_decay`"
    NO_AVERAGES = "no `ema_decay`"
    AVERAGED_EVALUATION = "`ema_eval`"
    # The inner optimizer.
    WHOLE_PARAMS = (
        "an inner optimizer that updates whole matrices or params: Muon, or a class like Adafactor"
    )
    NOT_ADAM = "an inner optimizer other than Adam and AdamW"
    NOT_MUON = "an `optimizer` other than muon"
    HOSTS_MUON = "megatron-core's own `--optimizer muon`"
    NO_HOST_KERNEL = "an inner optimizer other than torch's Adam and SGD"
    # Params and gradients.
    FP16_PARAMS = "fp16 params"
    ONLY_FP32_PARAMS = "a model with only fp32 params"
    SHORT_GRADS = "gradients that are kept in 16 bits"
    # Calls and the host.
    TORCH_FORMAT = (
        "`state`, `state_dict()`, `load_state_dict()` and `full_state_dict()` in torch's format"
    )
    HOST_BOXES = "megatron-core's `sharded_state_dict()`, which `--ckpt-format torch_dist` calls"
    MOVED_STATE = "`offload_to_cpu()`"
    ADDED_GROUP = "`add_param_group()`"
    FORK_BUCKETS = (
        "`overlap_grad_reduce`, `overlap_param_gather` or `bucket_size` in a Megatron of 2023"
    )
    FORK_EXPERTS = "experts in a Megatron of 2023"
    OWN_LOOP = "a training loop of your own with plain torch"
    PER_RANK_FILES = "a Megatron of 2023 that saves per-rank files (23.04)"
    PARAM_READERS = "a flag that makes a Megatron of 2023 read params outside of a forward pass"


_FP32_STATE = (
    "Leave main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype at float32, or use AdamW."
)
_OWN_FILES = "Call optimizer.save(folder) and optimizer.load(folder) instead."

#: By feature, the features that it excludes, and what to do instead.
EXCLUSIONS: dict[Feature, dict[Feature, str]] = {
    Feature.WHOLE_PARAMS: {
        Feature.OFFLOAD: "Leave offload_fraction out, or use AdamW.",
        Feature.LOW_PRECISION: _FP32_STATE,
        Feature.GATHERED_FORMAT: "Leave checkpoint_format out: a gathered file can hold only "
        "Adam's moments.",
        Feature.TORCH_FORMAT: f"{_OWN_FILES} A framework must not save or load the optimizer "
        "itself, see docs/whole_params.md.",
        Feature.HOST_BOXES: f"{_OWN_FILES} With Megatron-LM's training script, write --ckpt-format "
        "torch.",
        Feature.MOVED_STATE: "Keep the state where it is, or use Adam.",
        Feature.ADDED_GROUP: "Give the optimizer all params before distribute(...).",
    },
    Feature.NOT_ADAM: {Feature.LOW_PRECISION: _FP32_STATE},
    Feature.NO_HOST_KERNEL: {
        Feature.OFFLOAD: "Write adam=torch_fused, or leave offload_fraction out."
    },
    Feature.ONLY_FP32_PARAMS: {
        Feature.OFFLOAD: "Train in bf16, or leave offload_fraction out: fp32 params are their own "
        "main params and stay on the device."
    },
    Feature.FP16_PARAMS: {
        Feature.BF16_MAIN_PARAMS: "Write main_params_dtype=float32.",
        Feature.NO_LOSS_SCALE: "Write loss_scale='dynamic', or in a Megatron --fp16 or "
        "--loss-scale 1024.",
    },
    Feature.SHORT_GRADS: {
        Feature.REDUCE_DTYPE: "Leave reduce_dtype out, or keep gradients in fp32 with "
        "grads_in_fp32=True, or in a Megatron with --accumulate-allreduce-grads-in-fp32."
    },
    Feature.MUON_OPTIONS: {
        Feature.NOT_MUON: "In a Megatron write optimizer=muon. In plain torch give the option to "
        "torch.optim.Muon.",
        Feature.HOSTS_MUON: "Use the host's --muon-* flags instead.",
    },
    Feature.AVERAGES: {
        Feature.GATHERED_FORMAT: "Leave checkpoint_format out: a gathered file cannot hold "
        "averages.",
        Feature.PER_RANK_FILES: "Leave ema_decay out, or use a fork of Megatron-LM 23.06 or later.",
    },
    Feature.AVERAGED_EVALUATION: {
        Feature.OWN_LOOP: "Write 'with optimizer.averaged_params():' around your evaluation.",
        Feature.NO_AVERAGES: "Write ema_decay=0.999 as well.",
    },
    Feature.PARAM_READERS: {Feature.OVERLAPPED_GATHER: "Leave one of the two out."},
    Feature.FORK_EXPERTS: {
        Feature.GATHERED_FORMAT: "Leave checkpoint_format out: the fork's file cannot hold experts."
    },
    Feature.FORK_BUCKETS: {
        Feature.GATHERED_FORMAT: "Leave one of the two out. megatron-distopt convert --to gathered "
        "makes the fork's file from our format."
    },
}


def check_compatible(
    config: DistOptConfig, others: Mapping[Feature, str] = MappingProxyType({})
) -> None:
    """Refuses two features that exclude each other. `others` are features in addition to those of
    `config`, with their descriptions for the error."""
    found = {**_features_of(config), **others}
    for feature, excluded in EXCLUSIONS.items():
        for other, instead in excluded.items():
            if feature in found and other in found:
                raise ConfigError(
                    f"{found[feature]} cannot be combined with {found[other]}. {instead}"
                )


def _features_of(config: DistOptConfig) -> dict[Feature, str]:
    def text(name: str) -> str:
        return f"{name}={getattr(config, name)!r}"

    forms = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    short = next((name for name in forms if getattr(config, name) != "float32"), None)
    muon = next((name for name in sorted(config.explicit) if name.startswith("muon_")), None)
    asked = {
        Feature.OFFLOAD: config.offload_fraction and text("offload_fraction"),
        Feature.LOW_PRECISION: short and text(short),
        Feature.BF16_MAIN_PARAMS: config.main_params_dtype in ("remainder", "bfloat16")
        and text("main_params_dtype"),
        Feature.GATHERED_FORMAT: config.checkpoint_format == "gathered"
        and text("checkpoint_format"),
        Feature.REDUCE_DTYPE: config.reduce_dtype and text("reduce_dtype"),
        Feature.OVERLAPPED_GATHER: config.overlap_param_gather and text("overlap_param_gather"),
        Feature.NO_LOSS_SCALE: config.loss_scale is None and text("loss_scale"),
        Feature.MUON_OPTIONS: muon and text(muon),
        Feature.AVERAGES: config.ema_decay is not None and text("ema_decay"),
        Feature.NO_AVERAGES: config.ema_decay is None and text("ema_decay"),
        Feature.AVERAGED_EVALUATION: config.ema_eval and text("ema_eval"),
        Feature.WHOLE_PARAMS: config.optimizer == "muon" and text("optimizer"),
        Feature.NOT_MUON: config.optimizer != "muon" and text("optimizer"),
        Feature.NOT_ADAM: config.optimizer not in ("adam", "muon") and text("optimizer"),
    }
    return {feature: words for feature, words in asked.items() if words}
