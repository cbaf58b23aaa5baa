"""What a user can choose, checked where it is written down. Imports no torch.

[Note: who wins] Code over a flag over an environment variable over the default. So a config remembers in `explicit`
which options somebody gave, be it the default's value; flags leave alone what code gave, and variables what code or a
flag gave.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.option_types import YES_OR_NO, of_its_type

__all__ = [
    "ADAM_SOURCES",
    "FREE_OPTIONS",
    "LARGEST_SCALE",
    "OPTIONS",
    "SMALLEST_SCALE",
    "DistOptConfig",
    "NonFinitePolicy",
    "Switch",
    "config_from_environment",
    "config_from_namespace",
    "flag_of",
    "switch_from",
    "with_options",
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
    "bucket_size",
    "log_communication",
    "reduce_dtype",
    "shared_memory",
    "debug",
)


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
        bucket_size: elements of a bucket; None for one bucket a buffer, or for as many as suit the size of the model
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
        reduce_dtype: "bfloat16" or "float16" for fp32 grads that travel in 16 bits and are added up in fp32, where the
            host leaves that to us; None for as they are.
        debug: every read of a param whose gather is pending, and every write to a gradient whose bucket is under way,
            is an error that names the param and the line; slow.
        shared_memory: ranks on one machine whose params are on its CPU exchange them through memory, not as messages.
        log_communication: log the communication of a step, and how much of it was hidden, every so many steps; None
            for never.
        explicit: names of options that were given, see [Note: who wins]; `dataclasses.replace` hands them on, nobody
            else gives them.

    Raises:
        ConfigError: an option that does not exist, a value of another type, or one that cannot work.

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
    bucket_size: int | None = None
    checkpoint_format: str = "distopt"
    async_save: bool = False
    async_buffer_mb: int = 4096
    keep_last: int | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool = False
    log_communication: int | None = None
    reduce_dtype: str | None = None
    shared_memory: bool = True
    debug: bool = False
    explicit: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __new__(cls, **given: object) -> DistOptConfig:
        """Here alone is known which options were given: `__init__` cannot tell a default from the same value."""
        _check_names(given)
        config = object.__new__(cls)
        vars(config)["_given"] = frozenset(given)
        return config

    def __post_init__(self) -> None:
        for name in OPTIONS:
            value = of_its_type(name, _ANNOTATIONS[name], getattr(self, name), _DEFAULTS[name])
            object.__setattr__(self, name, value)
        _check_values({name: getattr(self, name) for name in OPTIONS}, _in_code)
        _check_loss_scale(self)
        given: frozenset[str] = vars(self).pop("_given")
        if (
            "explicit" in given
        ):  # `dataclasses.replace` gives all options: those that it changed differ from the default
            given = self.explicit.union(name for name in OPTIONS if getattr(self, name) != _DEFAULTS[name])
        object.__setattr__(self, "explicit", given)

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
        return tuple(f"{name}={getattr(self, name)!r}" for name in OPTIONS)


#: Names of the options.
OPTIONS = tuple(each.name for each in dataclasses.fields(DistOptConfig) if each.name != "explicit")
_ANNOTATIONS = {each.name: str(each.type) for each in dataclasses.fields(DistOptConfig)}
_DEFAULTS = {name: getattr(DistOptConfig, name) for name in OPTIONS}
#: Options with few values.
_CHOICES: dict[str, tuple[str, ...]] = {
    "adam": ("auto", *ADAM_SOURCES),
    "accelerator": _ACCELERATORS,
    "nonfinite": tuple(policy.value for policy in NonFinitePolicy),
    "decay": ("decoupled", "l2"),
    "checkpoint_format": ("distopt", "native"),
    "reduce_dtype": ("None", "bfloat16", "float16"),
    "optimizer": ("adam", "sgd", "module:Class"),
}
#: The sentence that says what to type, for an option and a value.
_Write = Callable[[str, object], str]


def _in_code(name: str, value: object) -> str:
    return f"Write {name}={value!r}"


def _as_flag(name: str, value: object) -> str:
    return f"Drop {flag_of(name)}" if value is None else f"Write {flag_of(name)} {_word(value)}"


def _as_variable(name: str, value: object) -> str:
    return f"Unset {_variable_of(name)}" if value is None else f"Write {_variable_of(name)}={_word(value)}"


def _word(value: object) -> str:
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in _ANNOTATIONS:
            close = _nearest(name, OPTIONS)
            remedy = "help(megatron_distopt.DistOptConfig) lists them" if close is None else f"Write {close}=..."
            raise ConfigError(refusal("option", name, "be a field of DistOptConfig", remedy))


def _nearest(word: str, words: Iterable[str]) -> str | None:
    """Whichever letters are capitals."""
    by_lower = {each.lower(): each for each in words}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def _check_choice(name: str, value: str, choices: Sequence[str], write: _Write) -> None:
    if value not in choices:
        close = _nearest(value, choices) or choices[0]
        remedy = write(name, None if close == "None" else close)
        raise ConfigError(refusal(name, repr(value), f"be one of {', '.join(choices)}", remedy))


def _check_values(values: Mapping[str, Any], write: _Write) -> None:
    """Each by itself.

    Args:
        values: of the options' types; some or all options.
        write: for remedies.
    """
    for name, value in values.items():
        if name == "betas":
            _check_betas(value)
        elif name in ("lr", "weight_decay", "eps", "momentum", "clip_grad"):
            _check_number(name, value)
        elif name in _LEAST and value is not None and value < _LEAST[name].number:
            rule = f"be at least {_LEAST[name].number}{_LEAST[name].unit}"
            raise ConfigError(refusal(name, value, rule, _LEAST[name].remedy(name, write)))
        elif name in _CHOICES and not (name == "optimizer" and _MODULE_AND_CLASS.fullmatch(value)):
            _check_choice(name, str(value), _CHOICES[name], write)


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(refusal(name, value, "be a finite number of at least 0", f"Write {name}=0.0 for none"))


def _check_betas(betas: tuple[float, ...]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        rule = "be 2 numbers of at least 0 and below 1"
        raise ConfigError(refusal("betas", betas, rule, "Write betas=(0.9, 0.999)"))


@dataclass(frozen=True)
class _Least:
    """The least value of an option that is a whole number.

    Args:
        unit: behind the number.
        meant: what to write instead.
        otherwise: behind that.
    """

    number: int = 1
    unit: str = ""
    meant: int | None = 1
    otherwise: str = ""

    def remedy(self, name: str, write: _Write) -> str:
        return write(name, self.meant) + self.otherwise


_LEAST = {
    "growth_interval": _Least(),
    "hysteresis": _Least(),
    "async_buffer_mb": _Least(),
    "resume_step": _Least(0, " updates", 1000, ", the updates that the checkpoint has seen"),
    "keep_last": _Least(1, " checkpoint", 2, ", or leave it out to keep all"),
    "log_communication": _Least(1, " step", 1, ", or leave it out"),
    "bucket_size": _Least(1, " element", None, " for one bucket"),
}


def _check_loss_scale(config: DistOptConfig) -> None:
    scale = config.loss_scale
    if isinstance(scale, str) and scale != "dynamic":
        remedy = f"Write loss_scale={scale}" if scale.replace(".", "").isdigit() else "Write loss_scale='dynamic'"
        raise ConfigError(refusal("loss_scale", repr(scale), "be None, a positive number or 'dynamic'", remedy))
    if isinstance(scale, (int, float)) and not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        remedy = "Write loss_scale=None for none"
        raise ConfigError(refusal("loss_scale", scale, "be None, 'dynamic' or a number from 2**-126 to 2**127", remedy))
    if not SMALLEST_SCALE <= config.min_loss_scale <= config.initial_loss_scale <= LARGEST_SCALE:
        got = f"{config.min_loss_scale} with initial_loss_scale {config.initial_loss_scale}"
        rule = "be at least 2**-126 and at most the initial one, which must be at most 2**127"
        raise ConfigError(refusal("min_loss_scale", got, rule, "Write min_loss_scale=1.0"))


def flag_of(name: str) -> str:
    """How a free option is spelled as a flag.

    >>> flag_of("bucket_size")
    '--distopt-bucket-size'
    """
    return "--distopt-" + name.replace("_", "-")


def _variable_of(name: str) -> str:
    return _PREFIX + name.upper()


def with_options(config: DistOptConfig, options: Mapping[str, Any]) -> DistOptConfig:
    """`config` with options as a function takes them for keywords; they count as given by code.

    Raises:
        ConfigError: an option that does not exist (it names the nearest), or a value that the option does not take.

    >>> sorted(with_options(DistOptConfig(lr=0.1), {"clip_grad": 0.0}).explicit)
    ['clip_grad', 'lr']
    """
    _check_names(options)
    return dataclasses.replace(config, explicit=config.explicit.union(options), **options)


def config_from_environment(environ: Mapping[str, str], config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what MEGATRON_DISTOPT_* variables say about options that are not explicit in it.

    Args:
        environ: usually `os.environ`.
        config: what code and flags say; the defaults where None.

    Raises:
        ConfigError: an unknown variable (it lists the valid ones) or a bad value.

    >>> config_from_environment({"MEGATRON_DISTOPT_NONFINITE": "skip"}).nonfinite
    'skip'
    """
    known = {_variable_of(name): name for name in FREE_OPTIONS}
    given = {variable: value for variable, value in environ.items() if variable.startswith(_PREFIX)}
    for variable in given:
        if variable not in known:
            valid = ", ".join(["MEGATRON_DISTOPT", *known])
            # Without the prefix, which would make everything look alike.
            close = _nearest(variable.removeprefix(_PREFIX), [each.removeprefix(_PREFIX) for each in known])
            remedy = f"Write {_PREFIX}{close}" if close else f"Unset {variable}"
            raise ConfigError(refusal("environment variable", variable, f"be one of {valid}", remedy))
    texts = {known[variable]: value for variable, value in given.items()}
    return _with_texts(config or DistOptConfig(), texts, _as_variable)


def config_from_namespace(args: object, config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what the attributes `distopt_*` of parsed arguments say about options that are not explicit in it.

    Args:
        args: None as an attribute stands for "not given".
        config: what code says; the defaults where None.

    Raises:
        ConfigError: a value that the option does not take.
    """
    given = {name: getattr(args, f"distopt_{name}", None) for name in FREE_OPTIONS}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return _with_texts(config or DistOptConfig(), texts, _as_flag)


def _with_texts(config: DistOptConfig, texts: Mapping[str, str], write: _Write) -> DistOptConfig:
    """`config` with free options as they stand on a command line or in a variable, see [Note: who wins].

    Raises:
        ConfigError: a value that the option does not take.
    """
    changes: dict[str, Any] = {
        name: _read(name, text, write) for name, text in texts.items() if name not in config.explicit
    }
    _check_values(changes, write)
    return dataclasses.replace(config, explicit=config.explicit.union(changes), **changes)


def _read(name: str, text: str, write: _Write) -> object:
    """A text as a value of the option's type."""
    kinds = _ANNOTATIONS[name].split(" | ")
    if "None" in kinds and text.lower() == ("auto" if "bool" in kinds else "none"):
        return None
    if "int" in kinds:
        return _whole_number(name, text, write)
    if "bool" in kinds:
        return _yes_or_no(name, text, "yes, no or auto" if "None" in kinds else "yes or no", write)
    return text


def _whole_number(name: str, text: str, write: _Write) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(refusal(name, repr(text), "be a whole number", write(name, 10))) from None


def _yes_or_no(name: str, text: str, words: str, write: _Write) -> bool:
    if text.lower() not in YES_OR_NO:
        raise ConfigError(refusal(name, repr(text), f"be {words}", write(name, True)))
    return YES_OR_NO[text.lower()]


def switch_from(environ: Mapping[str, str]) -> Switch:
    """What the environment variable MEGATRON_DISTOPT says; yes, true and on stand for 1, and no, false and off for 0.

    Raises:
        ConfigError: another value.
    """
    value = environ.get("MEGATRON_DISTOPT", Switch.ON.value).lower()
    if value in YES_OR_NO:
        return Switch.ON if YES_OR_NO[value] else Switch.OFF
    choices = (Switch.ON.value, Switch.OFF.value, Switch.REQUIRE.value)
    if value not in choices:
        got, remedy = (
            repr(environ["MEGATRON_DISTOPT"]),
            f"Write MEGATRON_DISTOPT={_nearest(value, choices) or choices[0]}",
        )
        raise ConfigError(refusal("MEGATRON_DISTOPT", got, f"be one of {', '.join(choices)}", remedy))
    return Switch(value)
