"""What the host of 2023 refuses, word for word, on all ranks, with everything left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_distopt
from megatron_distopt import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron_2023.base_optimizer import choose_for
from tests.support import fork_trees
from tests.support.mini_fork import MiniFork
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

SIZE = 2
_FLAG = "--use-distributed-optimizer"
_CHUNK = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Refused:
    """What became of an attempt.

    Args:
        kind: class of the error.
        text: of the error.
        changed: what is not as it was before: attributes of the fork's modules, params, gradients.
    """

    kind: str
    text: str
    changed: tuple[str, ...] = ()


class Attempts:
    """Starts trainings of the small fork that must not come about."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fork = MiniFork.imported(file_layout="gathered")
        self.factory = sys.modules["megatron.optimizer"]
        self.parser = sys.modules["megatron.arguments"]
        self.installation: Any = None

    def train(self, *words: str, change: _CHUNK = lambda chunks: chunks) -> Refused:
        """With `words` beside the flag, and the model changed after it was wrapped."""
        return self.attempt(lambda: self.fork.train(_FLAG, *words), change)

    def attempt(self, run: Callable[[], object], change: _CHUNK = lambda chunks: chunks) -> Refused:
        before, models, build = _attributes(), [], self.fork.training.get_model

        def get_model(*args: Any, **kwargs: Any) -> Any:
            chunks = change(build(*args, **kwargs))
            models.append((chunks, _places(chunks)))
            return chunks

        try:
            with _replaced(self.fork.training, get_model=get_model):
                run()
        except Exception as error:  # noqa: BLE001 - compared with what is wanted
            self.fork._forget()
            moved = [place for chunks, places in models for place in places.items() - _places(chunks).items()]
            changed = [name for name, value in _attributes().items() if before.get(name, value) is not value]
            return Refused(type(error).__name__, str(error), (*changed, *(str(place) for place in moved)))
        return TRAINED


TRAINED = Refused("nothing", "it trained")


@contextlib.contextmanager
def _replaced(module: Any, **names: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(module, name, value)
        yield


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def _attributes() -> dict[str, Any]:
    """Of the fork's modules, without the process groups of parallel_state, which every run makes anew."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    return {
        f"{module_name}.{name}": value
        for module_name, module in modules.items()
        for name, value in vars(module).items()
        if not (module_name.endswith("parallel_state") and name.startswith("_"))
    }


def _places(chunks: Sequence[Any]) -> Mapping[str, tuple[int, ...]]:
    """Where params and gradients lie."""
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    return {name: (param.data_ptr(), getattr(param, "main_grad", param).data_ptr()) for name, param in named}


@contextlib.contextmanager
def _fork_with(at: Attempts, source: str) -> Iterator[None]:
    """A fork that has `source` instead, which may define the factory and the class."""
    scope = vars(at.factory)
    before = {name: scope[name] for name in ("DistributedOptimizer", "get_megatron_optimizer")}
    try:
        exec(source, scope)
        with _replaced(at.fork.training, get_megatron_optimizer=scope["get_megatron_optimizer"]):
            yield
    finally:
        scope.update(before)


Cases = Mapping[str, Callable[[], Refused]]


def run_all(rank: int, size: int) -> dict[str, Refused]:
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    at = Attempts(rank)
    cases = {**_controls(at), **_of_flags(at), **_of_patch_points(at), **_of_class(at), **_of_model(at)}
    cases |= {**_of_overlap(at), **_of_ranks(at)}
    return {name: attempt() for name, attempt in cases.items()}


def _controls(at: Attempts) -> Cases:
    """Failures that do leave something behind, for the check that refusals do not."""

    def install_and_fail() -> None:
        at.installation = megatron_distopt.install()
        raise RuntimeError("installed")

    def installed() -> Refused:
        refused = at.attempt(install_and_fail)
        at.installation.undo()
        return refused

    def built() -> Refused:
        def train(*args: object) -> None:
            raise RuntimeError("built")

        with _replaced(at.fork.training, train=train):
            return at.train()

    return {"installed": installed, "built": built}


def _of_flags(at: Attempts) -> Cases:
    def leniently() -> Refused:
        """As scripts parse that have flags of their own: what is not known is dropped."""
        return at.attempt(lambda: _parse(at, "--distopt-adma", "torch_fused", ignore_unknown_args=True))

    def on_a_fork_with_underscores() -> Refused:
        with _replaced(at.parser, FLAGS="underscore"):
            return at.attempt(lambda: at.fork.train(_FLAG))

    return {
        "deepspeed": lambda: at.train("--deepspeed"),
        "torch's DDP": lambda: at.train("--DDP-impl", "torch"),
        "no buffers": lambda: at.train("--no-contiguous-buffers-in-local-ddp"),
        "optimiser": lambda: at.attempt(lambda: at.fork.train("--use-distributed-optimiser")),
        "underscores": lambda: at.attempt(lambda: at.fork.train("--use_distributed_optimizer")),
        "hyphens": on_a_fork_with_underscores,
        "adma": lambda: at.train("--distopt-adma", "torch_fused"),
        "adma with =": lambda: at.train("--distopt_adma=torch_fused"),
        "adma, leniently": leniently,
        "bad value": lambda: at.train("--distopt-nonfinite", "ignore"),
        "bad number": lambda: at.train("--distopt-resume-step", "ten"),
        "bad format": lambda: at.train("--distopt-checkpoint-format", "dcp"),
        "bad switch": lambda: at.train("--distopt-async-save", "later"),
        "absent adam": lambda: at.train("--distopt-adam", "apex"),
    }


def _parse(at: Attempts, *words: str, **options: Any) -> object:
    installation = megatron_distopt.install()
    try:
        with _replaced(sys, argv=["pretrain.py", *words]):
            return sys.modules["megatron.initialize"].parse_args(**options)
    finally:
        installation.undo()


def _of_patch_points(at: Attempts) -> Cases:
    def install_with(source: str) -> Refused:
        with _fork_with(at, source):
            return at.attempt(megatron_distopt.install)

    def install_with_parser(parser: object) -> Refused:
        with _replaced(at.parser, parse_args=parser):
            return at.attempt(megatron_distopt.install)

    def install_without(module: Any, name: str) -> Refused:
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(module, name)
            return at.attempt(megatron_distopt.install)

    def undo_after_somebody() -> Refused:
        installation = megatron_distopt.install()
        with _replaced(at.factory, get_megatron_optimizer=_somebodys):
            refused = at.attempt(installation.undo)
        installation.undo()
        return refused

    with_one_parameter = eval("lambda provider: None", {"__name__": "megatron.arguments"})
    return {
        "factory with other parameters": lambda: install_with("def get_megatron_optimizer(chunks, **options): pass"),
        "no factory": lambda: install_without(at.factory, "get_megatron_optimizer"),
        "no parser": lambda: install_without(at.parser, "parse_args"),
        "parser with other parameters": lambda: install_with_parser(with_one_parameter),
        "another patcher first": lambda: install_with_parser(_somebodys),
        "another patcher after": undo_after_somebody,
    }


def _somebodys(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> None:
    """What another package has put in."""


_USUAL = (
    "optimizer, clip_grad, log_num_zeros_in_grad, params_have_main_grad, use_contiguous_buffers_in_local_ddp, fp16, "
    "bf16, params_dtype, grad_scaler, models"
)
_GIVEN = "base, 1.0, False, True, True, False, False, get_args().params_dtype, None, model"


def _of_class(at: Attempts) -> Cases:
    def built_by(what: str, parameters: str = _USUAL) -> Refused:
        """With a class of these parameters and a factory that returns `what`."""
        source = f"""
class DistributedOptimizer:
    def __init__(self, {parameters}):
        pass

def get_megatron_optimizer(model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    base = Adam(get_param_groups(model, no_weight_decay_cond, scale_lr_cond, lr_mult), lr=get_args().lr)
    return {what}
"""
        with _fork_with(at, source):
            return at.train()

    build = f"DistributedOptimizer({_GIVEN})"
    by_name = ", ".join(f"{n}={v}" for n, v in zip(_USUAL.split(", "), _GIVEN.split(", "), strict=True))
    return {
        "class without a parameter": lambda: built_by(build, _USUAL.replace("params_dtype", "dtype")),
        "class with one more": lambda: built_by(build, f"{_USUAL}, overlap"),
        "class with an option": lambda: built_by(build, f"{_USUAL}, overlap=False"),
        "class with an option that is off": lambda: built_by(build[:-1] + ", False)", f"{_USUAL}, overlap=False"),
        "class with an option that is on": lambda: built_by(build[:-1] + ", overlap=True)", f"{_USUAL}, overlap=False"),
        "class with a default that is left out": lambda: built_by(
            f"DistributedOptimizer({by_name.replace('grad_scaler=None, ', '')})",
            _USUAL.replace("grad_scaler, models", "grad_scaler=None, models=None"),
        ),
        "factory that builds something else": lambda: built_by(f"FP32Optimizer({_GIVEN[:36]})"),
    }


def _of_model(at: Attempts) -> Cases:
    def with_arguments(**values: object) -> Refused:
        """What no flag of this fork says and other forks' do."""

        def change(chunks: list[Any]) -> list[Any]:
            vars(sys.modules["megatron"].get_args()).update(values)
            return chunks

        return at.train(change=change)

    def with_ddp(**values: object) -> Refused:
        return at.train(change=lambda chunks: [vars(chunk).update(values) or chunk for chunk in chunks])

    def with_adam(base: type) -> Refused:
        with _replaced(at.factory, Adam=base):
            return at.train()

    def without_expert_group() -> Refused:
        def change(chunks: list[Any]) -> list[Any]:
            del sys.modules["megatron.core.parallel_state"].get_expert_data_parallel_group  # type: ignore[attr-defined]
            return chunks

        return at.train("--experts", change=change)

    return {
        "FSDP": lambda: with_arguments(DDP_impl="FSDP"),
        "use_fsdp": lambda: with_arguments(use_fsdp=True),
        "use_torch_fsdp2": lambda: with_arguments(use_torch_fsdp2=True),
        "unwrapped": lambda: at.train(change=lambda chunks: [chunks[0].module]),
        "DDP without buffers": lambda: with_ddp(_grad_buffers=None),
        "DDP without an index map": lambda: with_ddp(_grad_buffer_param_index_map=None),
        "float64": lambda: at.train(change=lambda chunks: _with_dtype(chunks, torch.float64)),
        "fp16 without a loss scale": lambda: at.train(change=lambda chunks: _with_dtype(chunks, torch.float16)),
        "unfrozen after wrapping": lambda: at.train("--frozen-param", change=_unfrozen),
        "experts without a group": without_expert_group,
        "across params": lambda: with_adam(Clipped),
        "not buildable": lambda: with_adam(NeedsMore),
    }


def _of_overlap(at: Attempts) -> Cases:
    """Buckets and what runs beside what."""

    def without_count(*words: str) -> Refused:
        with pytest.MonkeyPatch.context() as patch:
            for module in ("megatron", "megatron.global_vars"):
                patch.delattr(sys.modules[module], "get_num_microbatches")
            return at.train(*words)

    def beside(name: str, value: object) -> Refused:
        def change(chunks: list[Any]) -> list[Any]:
            setattr(sys.modules["megatron"].get_args(), name, value)
            return chunks

        return at.train("--distopt-overlap-param-gather", change=change)

    return {
        "bucket of nothing": lambda: at.train("--distopt-bucket-size", "0"),
        "bucket below one element a rank": lambda: at.train("--distopt-bucket-size", "1"),
        "other buckets on one rank": lambda: at.train("--distopt-bucket-size", "700" if at.rank == 1 else "800"),
        "overlap on one rank": lambda: at.train("--distopt-overlap-grad-reduce", "yes" if at.rank == 1 else "no"),
        "bad overlap": lambda: at.train("--distopt-overlap-grad-reduce", "always"),
        "params read outside of forward": lambda: beside("log_params_norm", True),
        "params averaged outside of forward": lambda: beside("vision_pretraining_type", "dino"),
        "reduce dtype on one rank": lambda: at.train("--distopt-reduce-dtype", "bfloat16" if at.rank == 1 else "none"),
        "no microbatch count": lambda: without_count("--distopt-overlap-grad-reduce"),
        "no microbatch count, by itself": without_count,
    }


def _with_dtype(chunks: list[Any], dtype: torch.dtype) -> list[Any]:
    param = next(chunks[0].parameters())
    param.data = param.data.to(dtype)
    return chunks


def _unfrozen(chunks: list[Any]) -> list[Any]:
    return [chunk.requires_grad_(True) for chunk in chunks]


class Clipped(torch.optim.SGD):
    """Of a user; looks at the norm of all gradients."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: object, eps: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.defaults.update(betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1.0)
        super().step(closure)


class NeedsMore(torch.optim.SGD):
    """Of a user; has an argument without a default that is not among its defaults."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: object, eps: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


def _of_ranks(at: Attempts) -> Cases:
    def on_rank_1(**variables: str) -> Refused:
        with _variables(**variables) if at.rank == 1 else contextlib.nullcontext():
            return at.train()

    def change(chunks: list[Any]) -> list[Any]:
        return _with_dtype(chunks, torch.float64) if at.rank == 1 else chunks

    return {
        "float64 on one rank": lambda: at.train(change=change),
        "other flag on one rank": lambda: at.train("--distopt-nonfinite", "skip" if at.rank == 1 else "log"),
        "other format on one rank": lambda: at.train(
            "--distopt-checkpoint-format", "gathered" if at.rank == 1 else "distopt"
        ),
        "other fork's flag on one rank": lambda: at.train("--adam-eps", "1e-6" if at.rank == 1 else "1e-7"),
        "other variable on one rank": lambda: on_rank_1(MEGATRON_DISTOPT_DECAY="l2"),
    }


_ADMA = "Did you mean --distopt-adam?"
_LISTED = "Use a Megatron that docs/hosts.md lists."
_CLASS = "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it."
_EMBEDDINGS = "language_model.embedding.{}_embeddings.weight"
_FLOAT64 = (
    f"Invalid dtype of param '{_EMBEDDINGS.format('word')}': float64. Must be one of float32, bfloat16, float16. "
    "Convert or freeze the param."
)
#: Class of the error and its text, the same on all ranks.
WANTED: dict[str, tuple[str, str]] = {
    "deepspeed": (
        "ConfigError",
        "Invalid arguments: --deepspeed together with --use-distributed-optimizer. Must be one of the two, because the "
        "DeepSpeed engine owns gradients and optimizer. Drop --deepspeed to train with this optimizer, or drop "
        '--use-distributed-optimizer and write "zero_optimization": {"stage": 1} in the DeepSpeed config.',
    ),
    "torch's DDP": (
        "ConfigError",
        "Invalid arguments: --DDP-impl torch. Must be local, whose buffers are sharded. Write --DDP-impl local.",
    ),
    "no buffers": (
        "ConfigError",
        "Invalid arguments: --no-contiguous-buffers-in-local-ddp. Must be left out, because the contiguous buffers are "
        "sharded. Drop --no-contiguous-buffers-in-local-ddp.",
    ),
    "optimiser": (
        "ConfigError",
        f"There is no flag --use-distributed-optimiser. Did you mean {_FLAG}?",
    ),
    "underscores": (
        "ConfigError",
        f"There is no flag --use_distributed_optimizer. Did you mean {_FLAG}?",
    ),
    "hyphens": (
        "ConfigError",
        f"There is no flag {_FLAG}. Did you mean --use_distributed_optimizer?",
    ),
    "adma": ("ConfigError", f"There is no flag --distopt-adma. {_ADMA}"),
    "adma with =": ("ConfigError", f"There is no flag --distopt_adma. {_ADMA}"),
    "adma, leniently": ("ConfigError", f"There is no flag --distopt-adma. {_ADMA}"),
    "bad value": (
        "ConfigError",
        "--distopt-nonfinite is 'ignore'. It must be one of raise, skip, log.",
    ),
    "bad number": (
        "ConfigError",
        "--distopt-resume-step is 'ten'. It must be a whole number of at least 0, or none.",
    ),
    "bad format": (
        "ConfigError",
        "--distopt-checkpoint-format is 'dcp'. It must be one of distopt, gathered.",
    ),
    "bad switch": ("ConfigError", "--distopt-async-save is 'later'. It must be yes or no."),
    "absent adam": (
        "ConfigError",
        "Invalid adam 'apex': has no kernels for cpu. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    ),
    "factory with other parameters": (
        "HostMismatchError",
        "Invalid megatron.optimizer.get_megatron_optimizer: (chunks, options). Must start with "
        f"(model, no_weight_decay_cond, scale_lr_cond, lr_mult). {_LISTED}",
    ),
    "no factory": (
        "HostMismatchError",
        f"Invalid megatron.optimizer.get_megatron_optimizer: missing. Must exist. {_LISTED}",
    ),
    "no parser": ("HostMismatchError", f"Invalid megatron.arguments.parse_args: missing. Must exist. {_LISTED}"),
    "parser with other parameters": (
        "HostMismatchError",
        f"Invalid megatron.arguments.parse_args: (provider). Must start with (extra_args_provider). {_LISTED}",
    ),
    "another patcher first": (
        "HostMismatchError",
        f"Invalid megatron.arguments.parse_args: not the host's own function but {__name__}'s. Must be untouched. "
        "Take the other patcher out, or install megatron_distopt before it.",
    ),
    "another patcher after": (
        "HostMismatchError",
        "Invalid megatron.optimizer.get_megatron_optimizer: replaced by other code since. Undo that replacement first.",
    ),
    "class without a parameter": (
        "HostMismatchError",
        f"Invalid constructor of DistributedOptimizer: ({_USUAL.replace('params_dtype', 'dtype')}). "
        f"Must take {_USUAL}. {_CLASS}",
    ),
    "class with one more": (
        "HostMismatchError",
        f"Invalid constructor of DistributedOptimizer: ({_USUAL}, overlap). Must take {_USUAL}. {_CLASS}",
    ),
    "class with an option that is on": (
        "HostMismatchError",
        f"Invalid arguments of DistributedOptimizer: overlap=True. Must give {_USUAL} alone. "
        "Leave the fork's option behind it off.",
    ),
    "factory that builds something else": (
        "HostError",
        "Invalid megatron.optimizer.get_megatron_optimizer: built FP32Optimizer. Must build its DistributedOptimizer "
        "where use_distributed_optimizer is set. Use a fork that docs/hosts.md lists.",
    ),
    "FSDP": (
        "ConfigError",
        "Invalid arguments: --DDP-impl FSDP. Must be local, whose buffers are sharded. Write --DDP-impl local.",
    ),
    "bucket of nothing": (
        "ConfigError",
        "--distopt-bucket-size is 0. It must be a whole number of at least 1, or none.",
    ),
    "bucket below one element a rank": (
        "ConfigError",
        "Invalid bucket_size: 1 elements. Must have one for each of the 2 data-parallel ranks. "
        "Write --distopt-bucket-size 40000000, or leave it out.",
    ),
    "bad overlap": (
        "ConfigError",
        "--distopt-overlap-grad-reduce is 'always'. It must be yes, no or auto.",
    ),
    "params read outside of forward": (
        "ConfigError",
        "--log-params-norm cannot be combined with overlap_param_gather=True. Leave one of the two out.",
    ),
    "params averaged outside of forward": (
        "ConfigError",
        "--vision-pretraining-type dino cannot be combined with overlap_param_gather=True. Leave one of the two out.",
    ),
    "reduce dtype on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has reduce_dtype='bfloat16' where rank 0 has reduce_dtype=None. Must be "
        "the same on all 2 ranks. Start rank(s) 1 with the code and options of the others.",
    ),
    "no microbatch count": (
        "ConfigError",
        "Invalid number of microbatches: unknown: the fork has no get_num_microbatches. Must be known where grads are "
        "overlapped with backward. Write --distopt-overlap-grad-reduce no, or give the fork that function.",
    ),
    "use_fsdp": (
        "ConfigError",
        "Invalid arguments: --use-fsdp. Must be off. Drop --use-fsdp, or --use-distributed-optimizer.",
    ),
    "use_torch_fsdp2": (
        "ConfigError",
        "Invalid arguments: --use-torch-fsdp2. Must be off. Drop --use-torch-fsdp2, or --use-distributed-optimizer.",
    ),
    "unwrapped": (
        "HostError",
        "Invalid model chunk: megatron.model.gpt_model.GPTModel. Must be wrapped by the fork's local "
        "DistributedDataParallel. Write --DDP-impl local.",
    ),
    "DDP without buffers": (
        "ConfigError",
        "Invalid model chunk: without contiguous buffers. Must have them. Drop --no-contiguous-buffers-in-local-ddp.",
    ),
    "DDP without an index map": (
        "HostError",
        "Invalid model chunk: grad buffers without an index map. Must say where each param lies in them. "
        "Use a fork of Megatron-LM 23.04 or later.",
    ),
    "float64": ("LayoutError", _FLOAT64),
    "fp16 without a loss scale": (
        "ConfigError",
        "a model with fp16 params cannot be combined with loss_scale=None. Write loss_scale='dynamic'; in a Megatron "
        "start with --fp16 or --loss-scale 1024.",
    ),
    "unfrozen after wrapping": (
        "LayoutError",
        f"Invalid param '{_EMBEDDINGS.format('position')}': in no buffer. Must lie in a grad buffer of the fork's "
        "DistributedDataParallel. Unfreeze params before wrapping.",
    ),
    "experts without a group": (
        "HostError",
        "Invalid expert param 'language_model.encoder.layers.0.expert.weight': group_name 'ep_size_1'. Must belong to "
        "a group of DeepSpeed's, or to one that mpu.get_expert_data_parallel_group() gives. Use the MoE layer of "
        "deepspeed.moe, or give mpu that function.",
    ),
    "across params": (
        "ConfigError",
        "Clipped: which updates a param differently where it has others beside it. Must update each "
        "param by itself. Use one that does, such as torch.optim.Adafactor, or torch.optim.AdamW.",
    ),
    "not buildable": (
        "ConfigError",
        "NeedsMore: NeedsMore.__init__() missing 2 required positional arguments: 'betas' and "
        "'eps'. Must be buildable from param groups alone. Give the class defaults for its other arguments.",
    ),
    "other flag on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has nonfinite='skip' where rank 0 has nonfinite='log'. Must be the same "
        "on all 2 ranks. Start rank(s) 1 with the code and options of the others.",
    ),
    "other format on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has checkpoint_format='gathered' where rank 0 has "
        "checkpoint_format='distopt'. Must be the same on all 2 ranks. "
        "Start rank(s) 1 with the code and options of the others.",
    ),
    "other fork's flag on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has eps=1e-06 where rank 0 has eps=1e-07. Must be the same on all 2 "
        "ranks. Start rank(s) 1 with the code and options of the others.",
    ),
    "other buckets on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has bucket_size=700 where rank 0 has bucket_size=800. Must be the same "
        "on all 2 ranks. Start rank(s) 1 with the code and options of the others.",
    ),
    "overlap on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has overlap_grad_reduce=True where rank 0 has "
        "overlap_grad_reduce=False. Must be the same on all 2 ranks. "
        "Start rank(s) 1 with the code and options of the others.",
    ),
    "other variable on one rank": (
        "RanksDisagreeError",
        "Invalid options: rank 1 has decay='l2' where rank 0 has decay='decoupled'. Must be the same on "
        "all 2 ranks. Start rank(s) 1 with the code and options of the others.",
    ),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Refused]]:
    return run_ranks(run_all, SIZE)


@pytest.mark.parametrize("name", WANTED)
def test_host_of_2023_when_input_is_bad_then_every_rank_says_what_to_do_and_nothing_is_changed(
    found: list[dict[str, Refused]], name: str
) -> None:
    for rank in range(SIZE):
        refused, (kind, text) = found[rank][name], WANTED[name]
        assert dataclasses.replace(refused, text="") == Refused(kind, "")
        assert refused.text == found[0][name].text
        assert_says(refused.text, text)


@pytest.mark.parametrize(
    "name",
    ["class with an option", "class with an option that is off", "class with a default that is left out"],
)
def test_host_of_2023_when_its_class_takes_more_that_is_not_used_then_trains(
    found: list[dict[str, Refused]], name: str
) -> None:
    assert [each[name] for each in found] == [TRAINED] * SIZE


def test_host_of_2023_when_it_cannot_say_its_microbatches_then_it_trains_without_overlap(
    found: list[dict[str, Refused]],
) -> None:
    assert [each["no microbatch count, by itself"] for each in found] == [TRAINED] * SIZE


def test_host_of_2023_when_one_rank_refuses_then_the_other_says_which(found: list[dict[str, Refused]]) -> None:
    own, other = found[1]["float64 on one rank"], found[0]["float64 on one rank"]
    assert (own.kind, other.kind) == ("LayoutError", "RanksDisagreeError")
    assert_says(own.text, _FLOAT64)
    assert f"rank 1 refused with «{own.text}»" in other.text


def test_attempt_when_something_is_left_behind_then_it_is_seen(found: list[dict[str, Refused]]) -> None:
    for rank in range(SIZE):
        assert set(found[rank]["installed"].changed) == {
            "megatron.arguments.parse_args",
            "megatron.initialize.parse_args",
            "megatron.optimizer.get_megatron_optimizer",
            "megatron.training.get_megatron_optimizer",
        }
        assert any("word_embeddings" in change for change in found[rank]["built"].changed)


def train_with_ours_on_rank_0_only(rank: int, size: int) -> Refused:
    """Rank 1 was started without the package, or with MEGATRON_DISTOPT=0: it builds the fork's own and trains."""
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    at = Attempts(rank)

    def theirs(*args: object) -> None:
        time.sleep(6.0)  # in a forward and backward pass that meets nobody
        raise RuntimeError("trains")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_distopt.comm.agree.SECONDS_TO_SHOW", 2.0)
        if rank == 0:
            return at.train()
        patch.setattr(at.fork.training, "get_megatron_optimizer", theirs)
        return at.attempt(lambda: at.fork.train(_FLAG, ours=False))


def test_host_of_2023_when_one_rank_is_without_the_package_then_the_other_says_so_and_does_not_hang() -> None:
    found = run_ranks(train_with_ours_on_rank_0_only, SIZE, seconds=30.0)
    assert found[0] == Refused(
        "RanksDisagreeError",
        "Invalid start-up: megatron_distopt is not used on rank 1 (not loaded). Must be used on all 2 ranks or on "
        "none. Start every rank with the package installed and with the same flags and variables.",
    )


@pytest.mark.parametrize(
    ("flags", "device", "text"),
    [
        (
            {"cpu_optimizer": True},
            "cuda",
            "Invalid adam 'deepspeed_cpu': runs on cpu, not on cuda. Must be usable when it is asked for by name. "
            "Install it, or write adam='auto'.",
        ),
    ],
)
def test_inner_when_a_flag_of_the_fork_asks_for_one_that_the_device_has_not_then_refused(
    flags: dict[str, bool], device: str, text: str
) -> None:
    base = torch.optim.Adam([torch.zeros(1)])
    with pytest.raises(ConfigError) as error:
        choose_for(base, DistOptConfig(), SimpleNamespace(**flags), device)
    assert_says(str(error.value), text)


def test_inner_when_the_fork_wants_torchs_on_the_cpu_then_the_best_there_is() -> None:
    base = torch.optim.Adam([torch.zeros(1)])
    flags = SimpleNamespace(cpu_optimizer=True, cpu_torch_adam=True)
    assert choose_for(base, DistOptConfig(), flags, "cpu").choice.name == "torch_fused"


_APEX = "from apex.optimizers import FusedAdam\n"
_NOT_IMPORTABLE = "Install what it misses; NVIDIA apex is built from its sources."
#: Name of a fork: how it is made, what of it is different, and the text.
FORKS: dict[str, tuple[Callable[[Path], Path], dict[str, str], str]] = {
    "GPT-NeoX": (
        fork_trees.neox,
        {},
        'Invalid GPT-NeoX: Write "zero_optimization": {"stage": 1} in its DeepSpeed config: the '
        "engine owns its optimizer.",
    ),
    "core 0.4": (
        fork_trees.early_core,
        {},
        "Invalid Megatron-LM with megatron-core 0.4 or 0.5: Move the fork to megatron-core 0.9 "
        "or newer, or call megatron_distopt.distribute(...) on its model.",
    ),
    "2.6": (
        fork_trees.pre_distopt,
        {},
        "Invalid Megatron without a distributed optimizer: Call megatron_distopt.distribute(...) on its "
        "model in place of its DistributedDataParallel.",
    ),
    "no apex": (
        fork_trees.gathered_2023,
        {"megatron/__init__.py": _APEX},
        f"Invalid cannot be imported: (No module named 'apex'). {_NOT_IMPORTABLE}",
    ),
    "no apex in the optimizer": (
        fork_trees.gathered_2023,
        {"megatron/optimizer/__init__.py": _APEX},
        f"Invalid cannot be imported: (No module named 'apex'). {_NOT_IMPORTABLE}",
    ),
    "no apex in the parser": (
        fork_trees.gathered_2023,
        {"megatron/arguments.py": _APEX},
        "Invalid megatron.arguments: No module named 'apex'. Must be importable. "
        "Start in the folder of your Megatron, and mend what its import misses.",
    ),
    "apex asked for in words": (
        fork_trees.gathered_2023,
        {"megatron/__init__.py": "raise ImportError('Please install NVIDIA apex')\n"},
        f"Invalid cannot be imported: (Please install NVIDIA apex). {_NOT_IMPORTABLE}",
    ),
    "a module of its own missing": (
        fork_trees.gathered_2023,
        {"megatron/__init__.py": "from megatron.timers import Timers\n"},
        "Invalid cannot be imported: (No module named 'megatron.timers'). " + _NOT_IMPORTABLE,
    ),
}
#: Installs in one fork after the other.
_INSTALL = """
import importlib, json, sys
import megatron_distopt

found = {}
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        megatron_distopt.install()
    except megatron_distopt.errors.HostError as error:
        found[folder] = [type(error).__name__, str(error)]
    sys.path.remove(folder)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused_forks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folders = {}
    for name, (make, files, _) in FORKS.items():
        folders[name] = tmp_path_factory.mktemp("fork")
        fork_trees.write_tree(make(folders[name]), files)
    words = [sys.executable, "-c", _INSTALL, *map(str, folders.values())]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_DISTOPT")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: found[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", FORKS)
def test_install_when_a_fork_is_not_supported_or_not_whole_then_says_what_to_do(
    refused_forks: dict[str, list[str]], name: str
) -> None:
    kind, text = refused_forks[name]
    assert kind == "UnknownHostError"
    assert_says(text, FORKS[name][2])


class AdamW(torch.optim.Optimizer):
    """A user's, which happens to have the name of torch's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign() * group["lr"])


def _chosen(make: Any, config: DistOptConfig | None = None) -> tuple[str, Any]:
    """The name of what is chosen, and what it builds."""
    param = torch.ones(4)
    base = make([{"params": [param]}])
    inner = choose_for(base, config or DistOptConfig(), SimpleNamespace(), "cpu")
    built = inner.choice.build([dict(group) for group in inner.groups])
    return inner.choice.name, built if built is not base else base


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.Adam, "torch_fused"),
        (lambda groups: torch.optim.AdamW(groups, foreach=True), "torch_fused"),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5), "torch_sgd"),
        (AdamW, "AdamW"),
        (lambda groups: torch.optim.Adam(groups, amsgrad=True), "Adam"),
        (lambda groups: torch.optim.AdamW(groups, maximize=True), "AdamW"),
        (lambda groups: torch.optim.AdamW([{**groups[0], "amsgrad": True}]), "AdamW"),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5, nesterov=True), "SGD"),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5, dampening=0.25), "SGD"),
    ],
)
def test_inner_when_the_fork_built_it_then_replaced_where_ours_does_the_same_and_used_itself_elsewhere(
    make: Any, name: str
) -> None:
    chosen, built = _chosen(make)
    assert chosen == name
    wanted = make([{"params": [torch.ones(4)]}])
    if name in ("torch_fused", "torch_sgd"):
        return
    assert type(built) is type(wanted)
    given, (param,) = built.param_groups[0], built.param_groups[0]["params"]
    assert {key: value for key, value in given.items() if key != "params"} == {
        key: value for key, value in wanted.param_groups[0].items() if key != "params"
    }
    for optimizer in (built, wanted):
        for grad in (1.0, -2.0, 0.5):
            optimizer.param_groups[0]["params"][0].grad = torch.full((4,), grad)
            optimizer.step()
    assert torch.equal(param, wanted.param_groups[0]["params"][0])


@pytest.mark.parametrize("config", [DistOptConfig(adam="torch_foreach"), DistOptConfig(optimizer="adam")])
def test_inner_when_one_is_named_that_has_not_what_the_fork_built_then_refused(config: DistOptConfig) -> None:
    with pytest.raises(ConfigError) as error:
        _chosen(lambda groups: torch.optim.Adam(groups, amsgrad=True, maximize=True), config)
    assert "amsgrad=True, maximize=True" in str(error.value)
    assert "Drop one of the two" in str(error.value)


def test_inner_when_an_adam_is_named_and_the_forks_class_is_its_own_then_refused() -> None:
    with pytest.raises(ConfigError) as error:
        _chosen(AdamW, DistOptConfig(adam="torch_foreach"))
    assert "adam is torch_foreach with the fork's own AdamW" in str(error.value)
    assert "--distopt-optimizer adam" in str(error.value)
    assert _chosen(AdamW, DistOptConfig(adam="torch_foreach", optimizer="adam"))[0] == "torch_foreach"


@pytest.mark.parametrize(("mode", "decay", "is_decoupled"), [(1, None, True), (0, None, False), (0, "decoupled", True)])
def test_inner_when_apexs_adam_is_told_how_to_decay_then_ours_does_so_unless_an_option_says_else(
    mode: int, decay: str | None, is_decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: NVIDIA's is not on the package index."""

    class FusedAdam(torch.optim.AdamW):
        adam_w_mode = mode

    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=FusedAdam))
    name, built = _chosen(FusedAdam, DistOptConfig() if decay is None else DistOptConfig(decay=decay))
    assert name == "torch_fused"
    assert isinstance(built, torch.optim.AdamW) is is_decoupled
