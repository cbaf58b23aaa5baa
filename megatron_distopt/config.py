"""The options that a user can set, and their checks. Imports no torch.

[Note: who wins] Code wins over a flag, a flag over an environment variable, and that over the
default. So a config remembers in `explicit` which options were given, even if the value is the
default. Flags do not change what code gave, and variables do not change what code or a flag gave.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

from megatron_distopt.errors import ConfigError
from megatron_distopt.options import (
    FRACTION,
    NOT_NEGATIVE,
    VARIABLE_PREFIX,
    YES_OR_NO,
    Rule,
    at_least,
    flag_of,
    nearest,
    one_of,
    option,
    options_of,
    variable_of,
)

#: Names that `adam` accepts, apart from "auto"; optimizer/adam.py says which of them "auto" is.
ADAM_SOURCES = (
    "transformer_engine",
    "apex",
    "deepspeed",
    "torch_fused",
    "torch_foreach",
    "deepspeed_cpu",
)

#: Names of all implementations of Adam: those, and ours for state in precisions other than fp32.
LOW_PRECISION = "low_precision"
ADAM_NAMES = (*ADAM_SOURCES, LOW_PRECISION)

#: Dtypes in which a moment may be kept.
_MOMENT_DTYPES = ("float32", "bfloat16", "int8")

#: Bounds of a loss scale. It is kept in fp32, where the next power of two is infinite or loses
#: bits.
LARGEST_SCALE = 2.0**127
SMALLEST_SCALE = 2.0**-126

#: Whether to repair a host that cannot start for reasons other than its optimizer, see
#: plugin/fixes.py. It is not an option, because it is read before the host and its parser are
#: imported.
FIXES_VARIABLE = f"{VARIABLE_PREFIX}FIXES"

_MODULE_AND_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class NonFinitePolicy(Enum):
    """What to do with a gradient that is inf or nan, unless a dynamic loss scale handles it."""

    #: Stop on all ranks with an error that names rank and params. The default.
    RAISE = "raise"
    #: Skip the step: params, moments and step counts stay as they are.
    SKIP = "skip"
    #: Update anyway, after a warning, as the hosts do.
    LOG = "log"


class Switch(Enum):
    """The values of the environment variable MEGATRON_DISTOPT."""

    #: The host's own optimizer runs, for comparisons.
    OFF = "0"
    #: Active if the host's flag asks for a distributed optimizer. The default.
    ON = "1"
    #: Like ON, but a run that does not use the package is an error.
    REQUIRE = "require"


_BETAS = Rule(
    "2 numbers of at least 0 and below 1",
    lambda value: len(value) == 2 and all(0 <= v < 1 for v in value),
)
_LOSS_SCALE = Rule(
    "dynamic, or a number from 2**-126 to 2**127",  # fp32 holds their inverses, too
    lambda value: (
        value == "dynamic" if isinstance(value, str) else SMALLEST_SCALE <= value <= LARGEST_SCALE
    ),
    words=("dynamic",),
)
_Config = TypeVar("_Config")


def _remembers_given(config: type[_Config]) -> type[_Config]:
    """Makes the constructor of a config remember in `explicit` which options it was given, see
    [Note: who wins]."""
    original: Callable[..., None] = config.__init__

    @wraps(original)
    def __init__(self: _Config, **given: Any) -> None:
        for name in given:
            if name not in OPTIONS and name != "explicit":
                close = nearest(name, OPTIONS)
                listed = "help(megatron_distopt.DistOptConfig) lists them."
                meant = f"Did you mean {close}?" if close else listed
                raise ConfigError(f"There is no option {name!r}. {meant}")
        original(self, **given)
        names = frozenset(given)
        # `dataclasses.replace` gives all options; those that are not the default were given before
        if "explicit" in given:
            changed = (
                name for name, each in OPTIONS.items() if getattr(self, name) != each.default
            )
            names = given["explicit"].union(changed)
        object.__setattr__(self, "explicit", names)

    config.__init__ = __init__  # type: ignore[assignment]
    return config


@_remembers_given
@dataclass(frozen=True, kw_only=True)
class DistOptConfig:
    """Options of the distributed optimizer. A Megatron fills in those that its own flags set.

    Raises:
        ConfigError: for an option that does not exist, or a value that the option cannot have.

    Examples:
        >>> DistOptConfig(lr=3e-4, clip_grad=1.0).nonfinite
        'raise'
    """

    adam: str = option(
        "auto",
        "the implementation of Adam; auto is the best one that is installed for the device, and "
        "naming one that is not installed is an error",
        one_of("auto", *ADAM_SOURCES),
    )
    optimizer: str = option(
        "adam",
        "the inner optimizer; muon updates the matrices of a Megatron's layers with Muon and all "
        "other params with Adam, module:Class is a torch.optim.Optimizer of your own that updates "
        "each element or each param independently",
        one_of("adam", "sgd", "muon", "module:Class", pattern=_MODULE_AND_CLASS),
    )
    updates: str | None = option(
        None,
        "what an optimizer class of your own updates independently; leave it out for a class of "
        "torch's. elements: each element from its own gradient and state, so each rank updates its "
        "shard; params: each param as a whole, so one rank updates it",
        one_of("elements", "params"),
    )
    accelerator: str = option(
        "auto",
        "the library that names the device; auto is DeepSpeed if it is installed, else torch",
        one_of("auto", "deepspeed", "torch"),
    )
    lr: float = option(1e-3, "learning rate", NOT_NEGATIVE, by_host=True)
    weight_decay: float = option(0.01, "weight decay", NOT_NEGATIVE, by_host=True)
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay rates of Adam's two moments", _BETAS, by_host=True
    )
    eps: float = option(
        1e-8,
        "the number that Adam adds to the root of the second moment",
        NOT_NEGATIVE,
        by_host=True,
    )
    momentum: float = option(0.9, "momentum of SGD", NOT_NEGATIVE, by_host=True)
    muon_momentum: float = option(0.95, "momentum of Muon in a Megatron", NOT_NEGATIVE)
    muon_nesterov: bool = option(True, "Nesterov momentum for Muon in a Megatron")
    muon_ns_steps: int = option(
        5, "steps of Muon's Newton-Schulz iteration in a Megatron", at_least(1)
    )
    muon_adjust_lr: str = option(
        "match_rms_adamw",
        "the factor by which Muon multiplies a Megatron's learning rate; match_rms_adamw is 0.2 * "
        "sqrt(max(rows, columns)), which suits a learning rate for AdamW, original is sqrt(max(1, "
        "rows / columns))",
        one_of("match_rms_adamw", "original"),
    )
    muon_split: str = option(
        "qkv",
        "the fused weights of a Megatron that Muon treats as several matrices; qkv splits queries, "
        "keys and values, all also splits gate and up projections",
        one_of("none", "qkv", "all"),
    )
    muon_tp_mode: str = option(
        "duplicated",
        "how tensor-parallel ranks orthogonalize a matrix that is cut over them; duplicated "
        "gathers it, so the result is that of one rank, distributed adds up products, blockwise "
        "treats each part as a matrix of its own",
        one_of("duplicated", "distributed", "blockwise"),
    )
    decay: str = option(
        "decoupled",
        "the kind of Adam's weight decay; l2 adds it to the gradient, as torch's Adam does, which "
        "some forks use on devices other than CUDA",
        one_of("decoupled", "l2"),
    )
    resume_step: int | None = option(
        None,
        "the number of updates in the optimizer state of a checkpoint that does not record it",
        at_least(0),
    )
    clip_grad: float = option(
        0.0, "largest global norm of the gradient; 0 for no clipping", NOT_NEGATIVE, by_host=True
    )
    count_zeros: bool = option(
        False, "count the zero elements of the gradient at every step", by_host=True
    )
    loss_scale: float | str | None = option(
        None,
        "the factor by which the loss is multiplied; fp16 params need one",
        _LOSS_SCALE,
        by_host=True,
    )
    initial_loss_scale: float = option(
        2.0**16, "the dynamic loss scale of the first step", by_host=True
    )
    min_loss_scale: float = option(1.0, "the smallest dynamic loss scale", by_host=True)
    growth_interval: int = option(
        1000,
        "the number of steps without overflow after which the dynamic loss scale doubles",
        at_least(1),
        by_host=True,
    )
    hysteresis: int = option(
        2,
        "the number of overflows since the last growth after which the dynamic loss scale is "
        "halved",
        at_least(1),
        by_host=True,
    )
    nonfinite: str = option(
        "raise",
        "what to do when a gradient is inf or nan and no dynamic loss scale handles it: raise "
        "stops all ranks, skip skips the step, log updates anyway",
        one_of(*(policy.value for policy in NonFinitePolicy)),
    )
    grads_in_fp32: bool = option(
        True,
        "keep fp32 grad buffers for 16-bit params, 4 bytes an element instead of 2",
        by_host=True,
    )
    main_params_dtype: str = option(
        "float32",
        "how the main params of 16-bit params are stored; remainder stores the bits that a bf16 "
        "param lacks, so it is exact fp32 in 2 more bytes, bfloat16 keeps none and rounds the "
        "param stochastically",
        one_of("float32", "remainder", "bfloat16"),
    )
    exp_avg_dtype: str = option(
        "float32",
        "how Adam's first moment is stored; int8 is a code of 8 bits with a scale for each block "
        "of 128 elements",
        one_of(*_MOMENT_DTYPES),
    )
    exp_avg_sq_dtype: str = option(
        "float32",
        "how Adam's second moment is stored; int8 stores its root",
        one_of(*_MOMENT_DTYPES),
    )
    offload_fraction: float = option(
        0.0,
        "the fraction of the optimizer state of 16-bit params, by whole buckets, that is kept and "
        "updated in CPU memory; 0 for none",
        FRACTION,
    )
    ema_decay: float | None = option(
        None, "the decay of fp32 averages of the main params, such as 0.999", FRACTION
    )
    ema_eval: bool = option(False, "evaluate the averages in place of the params in a Megatron")
    bucket_size: int | None = option(
        None,
        "the number of elements in a bucket; none for one bucket in each buffer, or with "
        "overlapped communication for a suitable size",
        at_least(1),
    )
    reduce_dtype: str | None = option(
        None,
        "the dtype in which fp32 gradients are communicated; they are always added up in fp32. "
        "none for fp32. With float32 each node adds up its own gradients first and sends only the "
        "sum; on one node that is the same as none",
        one_of("float32", "bfloat16", "float16"),
    )
    overlap_grad_reduce: bool | None = option(
        None,
        "overlap the reduction of gradients with backward; auto overlaps it only in a Megatron of "
        "2023, if that is known to be safe. Your own loop needs yes, and no_sync() around all but "
        "the last backward of a step",
    )
    overlap_param_gather: bool = option(
        False,
        "overlap the gathering of params with the next forward; code that reads params outside of "
        "a forward pass may then have to call finish_param_gather() of the optimizer first",
    )
    shared_memory: bool = option(
        True,
        "ranks that train on the CPU of one machine communicate through shared memory instead of "
        "messages",
    )
    checkpoint_format: str = option(
        "distopt",
        "the format in which a host's own calls save the optimizer; distopt loads at any parallel "
        "size, gathered is the file that a Megatron's own optimizer writes and reads",
        one_of("distopt", "gathered"),
    )
    async_save: bool = option(
        False, "continue training while a copy of the optimizer state is written"
    )
    protect_every: int | None = option(
        None,
        "the number of steps between two snapshots of the optimizer state, which are kept in the "
        "memory of two nodes so that a run continues after it lost one; none for no snapshots",
        at_least(1),
    )
    protect_folder: str | None = option(
        None,
        "the folder, in memory, in which each node keeps its snapshots; none for a folder below "
        "/dev/shm named by torchrun's --rdzv-id",
    )
    protect_take: int | None = option(
        None,
        "the step of a snapshot from which to continue although the checkpoints on disk were "
        "changed after it was made; none refuses such a start",
        at_least(0),
    )
    protect_timeout: float = option(
        20.0,
        "the number of seconds without a sign of life of a rank after which the other ranks of a "
        "protected run exit, so that torchrun restarts them",
        Rule("a finite number of at least 1", lambda value: math.isfinite(value) and value >= 1),
    )
    #: Names of the options that were given, see [Note: who wins]; only `dataclasses.replace` passes
    #: it.
    explicit: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            object.__setattr__(self, name, declared.checked(getattr(self, name)))
        if not SMALLEST_SCALE <= self.min_loss_scale <= self.initial_loss_scale <= LARGEST_SCALE:
            raise ConfigError(
                f"min_loss_scale is {self.min_loss_scale}, and initial_loss_scale is "
                f"{self.initial_loss_scale}. Give min_loss_scale a number from 2**-126 to "
                "initial_loss_scale, and initial_loss_scale one of at most 2**127."
            )

    @property
    def policy(self) -> NonFinitePolicy:
        return NonFinitePolicy(self.nonfinite)

    @property
    def is_decoupled(self) -> bool:
        return self.decay == "decoupled"

    def described(self) -> tuple[str, ...]:
        """`name=value` of every option that must be equal on all ranks. Only `protect_folder` may
        differ between nodes."""
        return tuple(
            f"{name}={getattr(self, name)!r}" for name in OPTIONS if name != "protect_folder"
        )


#: All options, by name.
OPTIONS = options_of(DistOptConfig)
#: Names of the options that a flag or an environment variable `MEGATRON_DISTOPT_*` can set.
FREE_OPTIONS = tuple(name for name, each in OPTIONS.items() if not each.by_host)
DistOptConfig.__doc__ = "\n\n".join(
    [
        str(DistOptConfig.__doc__).rstrip(),
        "    Args:\n"
        + "\n".join(f"        {each.name}: {each.meaning}." for each in OPTIONS.values()),
    ]
)


def with_options(config: DistOptConfig, options: Mapping[str, Any]) -> DistOptConfig:
    """Returns `config` with options that a function took as keywords; code has given them, see
    [Note: who wins]."""
    return dataclasses.replace(config, explicit=config.explicit.union(options), **options)


def config_from_environment(
    environ: Mapping[str, str], config: DistOptConfig | None = None
) -> DistOptConfig:
    """Returns `config` with the options that MEGATRON_DISTOPT_* variables set and that are not
    explicit in it."""
    given = {
        variable: value
        for variable, value in environ.items()
        if variable.startswith(VARIABLE_PREFIX)
    }
    if given.pop(FIXES_VARIABLE, None) is not None:
        fixes_from(environ)
    known = {variable_of(name): name for name in FREE_OPTIONS}
    for variable in given:
        if variable not in known:
            valid = ["MEGATRON_DISTOPT", *known, FIXES_VARIABLE]
            # Compared without the prefix, which would make all names look alike.
            bare = [each.removeprefix(VARIABLE_PREFIX) for each in valid]
            close = nearest(variable.removeprefix(VARIABLE_PREFIX), bare)
            meant = f"Did you mean {VARIABLE_PREFIX}{close}?" if close else "Unset it."
            raise ConfigError(
                f"megatron_distopt has no environment variable {variable}, only "
                f"{', '.join(valid)}. {meant}"
            )
    return _with_texts(
        config or DistOptConfig(),
        {known[each]: value for each, value in given.items()},
        variable_of,
    )


def config_from_arguments(args: object, config: DistOptConfig | None = None) -> DistOptConfig:
    """Returns `config` with the options that parsed arguments `distopt_*` set and that are not
    explicit in it.

    Args:
        args: the parsed arguments; an attribute that is None was not given.
        config: the options that code has set; None for the defaults.

    Raises:
        ConfigError: for a value that the option cannot have.
    """
    given = {name: getattr(args, f"distopt_{name}", None) for name in FREE_OPTIONS}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return _with_texts(config or DistOptConfig(), texts, flag_of)


def _with_texts(
    config: DistOptConfig, texts: Mapping[str, str], spell: Callable[[str], str]
) -> DistOptConfig:
    """Returns `config` with options from the texts of flags or variables, see [Note: who wins]."""
    read = {name: text for name, text in texts.items() if name not in config.explicit}
    changes: dict[str, Any] = {
        name: OPTIONS[name].read(text, spell(name)) for name, text in read.items()
    }
    return dataclasses.replace(config, explicit=config.explicit.union(changes), **changes)


def switch_from(environ: Mapping[str, str]) -> Switch:
    """Reads the environment variable MEGATRON_DISTOPT. yes, true and on mean 1; no, false and off
    mean 0."""
    value = environ.get("MEGATRON_DISTOPT", Switch.ON.value).lower()
    if value == Switch.REQUIRE.value:
        return Switch.REQUIRE
    if value not in YES_OR_NO:
        raise ConfigError(f"MEGATRON_DISTOPT is {value!r}. It must be one of 0, 1, require.")
    return Switch.ON if YES_OR_NO[value] else Switch.OFF


def fixes_from(environ: Mapping[str, str]) -> bool:
    """Reads the environment variable MEGATRON_DISTOPT_FIXES; yes if it is not set."""
    value = environ.get(FIXES_VARIABLE, "yes")
    if value.lower() not in YES_OR_NO:
        raise ConfigError(f"{FIXES_VARIABLE} is {value!r}. It must be yes or no.")
    return YES_OR_NO[value.lower()]
