"""What a user can choose, checked where it is written down. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from megatron_distopt.errors import ConfigError, refusal

__all__ = [
    "ADAM_SOURCES",
    "FREE_OPTIONS",
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "DistOptConfig",
    "NonFinitePolicy",
    "Switch",
    "config_from_environment",
    "config_from_namespace",
    "flag_of",
    "option_word",
    "switch_from",
    "with_free_options",
]

#: Names that `adam` accepts beside "auto"; in order of preference on a CUDA device (see optimizer/adam.py).
ADAM_SOURCES = ("transformer_engine", "apex", "deepspeed", "torch_fused", "torch_foreach", "deepspeed_cpu", "triton")

#: Bounds of a loss scale: it is kept in fp32, where the next powers of two are infinite or lose bits.
LARGEST_SCALE = 2.0**127
SMALLEST_SCALE = 2.0**-126

_ACCELERATORS = ("auto", "deepspeed", "torch")
_MODULE_AND_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PREFIX = "MEGATRON_DISTOPT_"
#: Options that no host has a flag for: an environment variable or a flag of ours sets them.
FREE_OPTIONS = (
    "adam",
    "optimizer",
    "nonfinite",
    "accelerator",
    "decay",
    "resume_step",
    "checkpoint_format",
    "async_save",
    "async_buffer_mb",
    "keep_last",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "bucket_numel",
    "log_communication",
    "wire_dtype",
    "shared_memory",
)
#: Where a flag or a variable is not called like the option.
_OTHER_WORDS = {"bucket_numel": "bucket_size"}


class NonFinitePolicy(Enum):
    """What happens when a gradient is inf or nan and no dynamic loss scale can deal with it."""

    #: Stop on all ranks with an error that names rank and params. The default.
    RAISE = "raise"
    #: Leave params, moments and step counts as they are and go on.
    SKIP = "skip"
    #: Update all the same, after a warning: what the hosts do by themselves.
    LOG = "log"


class Switch(Enum):
    """The values of the environment variable MEGATRON_DISTOPT."""

    #: Inert: the host's own optimizer runs, for A/B comparisons.
    OFF = "0"
    #: Active where the host's flag asks for a distributed optimizer. The default.
    ON = "1"
    #: As ON, and a run that does not use it is an error.
    REQUIRE = "require"


@dataclass(frozen=True, kw_only=True)
class DistOptConfig:
    """Options of the distributed optimizer. Hosts fill in what their own flags say.

    Args:
        optimizer: "adam", "sgd", or "module:Class" of an element-wise `torch.optim.Optimizer`.
        adam: which implementation of Adam: "auto" or one of `ADAM_SOURCES`; a named one that is absent is an error.
        accelerator: who names the device: "deepspeed", "torch", or "auto" for DeepSpeed where it is installed.
        lr, weight_decay, betas, eps, momentum: of the inner optimizer.
        decay: of Adam: "decoupled" on every device, or "l2" where the decay is added to the gradient.
        resume_step: updates that the optimizer state of a checkpoint has seen; for one that does not say it itself.
        clip_grad: largest global gradient norm; 0 for no clipping.
        count_zeros: count zero elements of the gradient at every step.
        loss_scale: None for none (fp16 then needs "dynamic"), a number for a constant one, or "dynamic".
        initial_loss_scale, min_loss_scale: bounds of the dynamic scale.
        growth_interval: steps without overflow until the dynamic scale doubles.
        hysteresis: overflows until it is halved, counted from the last growth.
        nonfinite: "raise", "skip" or "log", see `NonFinitePolicy`.
        grads_in_fp32: keep fp32 grad buffers for 16-bit params (4 bytes an element instead of 2).
        bucket_numel: elements of a bucket; None for one bucket a buffer, or for as many as suit the size of the model
            where buckets are reduced beside backward.
        checkpoint_format: of the files behind a host's own calls: "distopt", which loads at any size, or "native", the
            host's own.
        async_save: train on while a copy of the state is written.
        async_buffer_mb: memory for that copy on each rank, in MB of 10**6 bytes; a larger state is copied in waves.
        keep_last: how many checkpoints of the optimizer stay beside each other; None for all.
        overlap_grad_reduce: reduce buckets beside backward, where the host leaves that to us. None for where that is
            known to be safe: in a Megatron of 2023, whose schedule counts microbatches. A loop of one's own has to put
            all but the last backward of a step into `no_sync()`, and says True.
        overlap_param_gather: gather params beside the next forward pass, where the host leaves that to us. Code that
            reads params outside of a forward pass then calls the optimizer's `finish_param_gather()` before.
        wire_dtype: "bfloat16" or "float16" for fp32 grads that travel in 16 bits and are added up in fp32, where the
            host leaves that to us; None for as they are.
        shared_memory: ranks on one machine whose params are on its CPU exchange them through memory, not as messages.
        log_communication: log the communication of a step, and how much of it was hidden, every so many steps; None
            for never.

    Raises:
        ConfigError: for every value that cannot work.

    >>> DistOptConfig(lr=3e-4, clip_grad=1.0).nonfinite
    'raise'
    """

    optimizer: str = "adam"
    adam: str = "auto"
    accelerator: str = "auto"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    decay: str = "decoupled"
    resume_step: int | None = None
    clip_grad: float = 0.0
    count_zeros: bool = False
    loss_scale: float | str | None = None
    initial_loss_scale: float = 2.0**16
    min_loss_scale: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    nonfinite: str = "raise"
    grads_in_fp32: bool = True
    bucket_numel: int | None = None
    checkpoint_format: str = "distopt"
    async_save: bool = False
    async_buffer_mb: int = 4096
    keep_last: int | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool = False
    log_communication: int | None = None
    wire_dtype: str | None = None
    shared_memory: bool = True

    def __post_init__(self) -> None:
        _check_choice("adam", self.adam, ("auto", *ADAM_SOURCES))
        _check_choice("accelerator", self.accelerator, _ACCELERATORS)
        _check_choice("nonfinite", self.nonfinite, tuple(policy.value for policy in NonFinitePolicy))
        _check_choice("decay", self.decay, ("decoupled", "l2"))
        _check_choice("checkpoint_format", self.checkpoint_format, ("distopt", "native"))
        _check_choice("wire_dtype", str(self.wire_dtype), ("None", "bfloat16", "float16"))
        if not _MODULE_AND_CLASS.fullmatch(self.optimizer):
            _check_choice("optimizer", self.optimizer, ("adam", "sgd", "module:Class"))
        _check_numbers(self)
        _check_loss_scale(self)

    @property
    def policy(self) -> NonFinitePolicy:
        """`nonfinite` as an enum."""
        return NonFinitePolicy(self.nonfinite)

    @property
    def is_decoupled(self) -> bool:
        """`decay` as a yes or no."""
        return self.decay == "decoupled"

    def described(self) -> tuple[str, ...]:
        """`name=value` of every option, for comparison between ranks."""
        return tuple(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = get_close_matches(value, choices, n=1)
        remedy = f"Write {name}={(close or choices)[0]!r}"
        raise ConfigError(refusal(name, repr(value), f"be one of {', '.join(choices)}", remedy))


def _check_numbers(config: DistOptConfig) -> None:
    for name in ("lr", "weight_decay", "eps", "momentum", "clip_grad"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(refusal(name, value, "be a finite number of at least 0", f"Write {name}=0.0 for none"))
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        rule = "be 2 numbers of at least 0 and below 1"
        raise ConfigError(refusal("betas", config.betas, rule, "Write betas=(0.9, 0.999)"))
    for name in ("growth_interval", "hysteresis", "async_buffer_mb"):
        if getattr(config, name) < 1:
            raise ConfigError(refusal(name, getattr(config, name), "be at least 1", f"Write {name}=1"))
    if config.resume_step is not None and config.resume_step < 0:
        rule, remedy = "be at least 0 updates", "Write the iteration at which the checkpoint was saved"
        raise ConfigError(refusal("resume_step", config.resume_step, rule, remedy))
    if config.keep_last is not None and config.keep_last < 1:
        remedy = "Write keep_last=2, or leave it out to keep all"
        raise ConfigError(refusal("keep_last", config.keep_last, "be at least 1 checkpoint", remedy))
    if config.log_communication is not None and config.log_communication < 1:
        rule, remedy = "be at least every step", "Write log_communication=1, or leave it out"
        raise ConfigError(refusal("log_communication", config.log_communication, rule, remedy))
    if config.bucket_numel is not None and config.bucket_numel < 1:
        remedy = "Write bucket_numel=None for one bucket"
        raise ConfigError(refusal("bucket_numel", config.bucket_numel, "be at least 1 element", remedy))


def _check_loss_scale(config: DistOptConfig) -> None:
    scale = config.loss_scale
    if isinstance(scale, str) and scale != "dynamic":
        remedy = "Write loss_scale='dynamic'"
        raise ConfigError(refusal("loss_scale", repr(scale), "be None, a positive number or 'dynamic'", remedy))
    if isinstance(scale, (int, float)) and not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        remedy = "Write loss_scale=None for none"
        raise ConfigError(refusal("loss_scale", scale, "be None, 'dynamic' or a number from 2**-126 to 2**127", remedy))
    if not SMALLEST_SCALE <= config.min_loss_scale <= config.initial_loss_scale <= LARGEST_SCALE:
        got = f"{config.min_loss_scale} with initial_loss_scale {config.initial_loss_scale}"
        rule = "be at least 2**-126 and at most the initial one, which must be at most 2**127"
        raise ConfigError(refusal("min_loss_scale", got, rule, "Write min_loss_scale=1.0"))


def option_word(name: str) -> str:
    """How a free option is spelled in flags and variables.

    >>> option_word("bucket_numel"), option_word("keep_last")
    ('bucket_size', 'keep_last')
    """
    return _OTHER_WORDS.get(name, name)


def flag_of(name: str) -> str:
    """The same as a flag.

    >>> flag_of("bucket_numel")
    '--distopt-bucket-size'
    """
    return "--distopt-" + option_word(name).replace("_", "-")


def config_from_environment(environ: Mapping[str, str], config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what MEGATRON_DISTOPT_* variables say.

    Args:
        environ: usually `os.environ`.
        config: what the variables override; the defaults where None.

    Raises:
        ConfigError: an unknown variable (it lists the valid ones) or a bad value.

    >>> config_from_environment({"MEGATRON_DISTOPT_NONFINITE": "skip"}).nonfinite
    'skip'
    """
    known = {_PREFIX + option_word(name).upper(): name for name in FREE_OPTIONS}
    given = {variable: value for variable, value in environ.items() if variable.startswith(_PREFIX)}
    for variable in given:
        if variable not in known:
            valid = ", ".join(["MEGATRON_DISTOPT", *known])
            # Without the prefix, which would make everything look alike.
            words = [each.removeprefix(_PREFIX) for each in known]
            close = get_close_matches(variable.removeprefix(_PREFIX), words, n=1)
            remedy = f"Write {_PREFIX}{close[0]}" if close else f"Unset {variable}"
            raise ConfigError(refusal("environment variable", variable, f"be one of {valid}", remedy))
    return with_free_options(config or DistOptConfig(), {known[variable]: value for variable, value in given.items()})


def with_free_options(config: DistOptConfig, texts: Mapping[str, str]) -> DistOptConfig:
    """`config` with free options as they stand on a command line or in a variable.

    Raises:
        ConfigError: a value that the option does not take.

    >>> with_free_options(DistOptConfig(), {"resume_step": "10"}).resume_step
    10
    """
    changes: dict[str, Any] = dict(texts)
    for name in ("resume_step", "async_buffer_mb", "keep_last", "bucket_numel", "log_communication"):
        if name in changes:
            changes[name] = _whole_number(name, changes[name])
    for name in ("async_save", "overlap_param_gather", "shared_memory"):
        if name in changes:
            changes[name] = _yes_or_no(name, changes[name])
    if changes.get("wire_dtype") in ("None", "none"):
        changes["wire_dtype"] = None
    if "overlap_grad_reduce" in changes:
        changes["overlap_grad_reduce"] = _yes_no_or_auto("overlap_grad_reduce", changes["overlap_grad_reduce"])
    return dataclasses.replace(config, **changes)


def config_from_namespace(args: object, config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what the attributes `distopt_*` of parsed arguments say; None stands for "not given".

    Raises:
        ConfigError: a value that the option does not take.
    """
    given = {name: getattr(args, f"distopt_{option_word(name)}", None) for name in FREE_OPTIONS}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return with_free_options(config or DistOptConfig(), texts)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(refusal(name, repr(text), "be a whole number", f"Write {name}=10")) from None


_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _yes_or_no(name: str, text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ConfigError(refusal(name, repr(text), "be yes or no", f"Write {name}=yes"))
    return _WORDS[text.lower()]


def _yes_no_or_auto(name: str, text: str) -> bool | None:
    if text.lower() not in ("auto", *_WORDS):
        raise ConfigError(refusal(name, repr(text), "be yes, no or auto", f"Write {name}=yes"))
    return _WORDS.get(text.lower())


def switch_from(environ: Mapping[str, str]) -> Switch:
    """What the environment variable MEGATRON_DISTOPT says.

    Raises:
        ConfigError: a value that is none of the three.
    """
    value = environ.get("MEGATRON_DISTOPT", Switch.ON.value)
    _check_choice("MEGATRON_DISTOPT", value, (Switch.ON.value, Switch.OFF.value, Switch.REQUIRE.value))
    return Switch(value)
