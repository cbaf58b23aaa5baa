"""Stand-ins around Megatron-LM's own `pretrain_gpt.py` on a machine without CUDA; the tree itself
is not edited.

Python imports a module of this name at its start when this folder is in PYTHONPATH.
`CURVES=file.json` also records what the run computed. Megatron-LM 0.12 to 0.19 stops without each
of these. Nothing here helps an optimizer, except for `OWN_OPTIMIZER=1`, under which the host's own
runs as a reference.

The answers about CUDA are given to modules of `megatron` alone: torch and `megatron_distopt` hear
the truth.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.util
import inspect
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)
_AFTER: dict[str, list[Callable[[Any], None]]] = {}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module was executed, before its importer sees
    it."""

    def __init__(self) -> None:
        self.busy: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _AFTER or fullname in self.busy:
            return None
        self.busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (
                execute(module),
                [each(module) for each in _AFTER[fullname]],
            )  # type: ignore[method-assign]
        return spec


def _after_import(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        _AFTER.setdefault(name, []).append(function)
        return function

    return register


class _Stream:
    """A stream of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, other: object) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def _asked_by_the_host() -> bool:
    name = sys._getframe(2).f_globals.get("__name__", "")
    return (
        name == "megatron"
        or name.startswith("megatron.")
        or (name == "__main__" and "pretrain" in sys.argv[0])
    )


def _to_the_host(owner: Any, name: str, answer: Any) -> None:
    """Gives an answer of CUDA's to the host, and the true one to everybody else."""
    truth = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: answer if _asked_by_the_host() else truth(*a, **k))


def _map_cuda() -> None:
    _to_the_host(torch.cuda, "is_available", True)
    _to_the_host(torch.cuda, "device_count", 8)
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    _to_the_host(
        torch.cuda,
        "get_device_properties",
        types.SimpleNamespace(major=9, minor=0, total_memory=1 << 34),
    )
    _to_the_host(torch.cuda, "get_device_capability", (9, 0))
    torch.cuda.device_memory_used = lambda device=None: 0
    torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda device=None: 0
    torch.cuda.memory_reserved = torch.cuda.max_memory_reserved = lambda device=None: 0
    torch.cuda.reset_peak_memory_stats = lambda device=None: None
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment,method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _map_random_state() -> None:
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    for owner in (torch.cuda, torch.cuda.random):
        owner.get_rng_state = lambda device="cuda": torch.get_rng_state()
        owner.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)


@_after_import("megatron.core.tensor_parallel.random")
def _random(module: Any) -> None:
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _map_process_group() -> None:
    """The host names the device of a rank; gloo has none."""
    start = dist.init_process_group

    @functools.wraps(start)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        start(*args, **kwargs)

    dist.init_process_group = init_process_group


def _map_type_strings() -> None:
    """What the host's own optimizers ask for."""
    plain = torch.Tensor.type

    def type_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[method-assign]


@_after_import("megatron.legacy.fused_kernels")
def _fused_kernels(module: Any) -> None:
    """0.12 looks for nvcc even where no fused kernel is asked for."""
    module.load = lambda args: None


class _Curves:
    """What the run computed, with every bit of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.losses: dict[int, str] = {}
        self.validations: list[str] = []
        self.model: list[torch.nn.Module] = []

    def watch(self, module: Any) -> None:
        """Wraps the functions of the host's training loop."""
        module.training_log = self._log(module.training_log)
        module.evaluate = self._evaluate(module.evaluate)
        module.setup_model_and_optimizer = self._set_up(module.setup_model_and_optimizer)
        module.train = self._train(module.train)

    def _log(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            said = inspect.signature(function).bind(*args, **kwargs).arguments
            loss = said["loss_dict"]["lm loss"]
            loss = loss[0] / loss[1] if torch.is_tensor(loss) and loss.numel() > 1 else loss
            self.losses[said["iteration"]] = float(loss).hex()
            if os.environ.get("FAILS_AFTER") == str(said["iteration"]):
                raise RuntimeError("FAILS_AFTER")
            return function(*args, **kwargs)

        return training_log

    def _evaluate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.validations.append(float(result[0]["lm loss"]).hex())
            return result

        return evaluate

    def _set_up(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.model = result[0]
            return result

        return setup_model_and_optimizer

    def _train(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self.write()

        return train

    def write(self) -> None:
        """One file a rank."""
        digest = hashlib.sha256()
        for chunk in self.model:
            for _, param in chunk.named_parameters():
                digest.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
        with open(f"{self.path}.{dist.get_rank()}", "w") as file:
            json.dump(
                {
                    "losses": self.losses,
                    "params": digest.hexdigest(),
                    "validations": self.validations,
                },
                file,
            )


if not hasattr(typing, "override"):  # 0.17 and newer declare Python 3.12
    typing.override = lambda method: method  # type: ignore[attr-defined]

if not torch.cuda.is_available():
    _map_cuda()
    _map_random_state()
    _map_process_group()
    if os.environ.get("OWN_OPTIMIZER"):
        _map_type_strings()
    if os.environ.get("CURVES"):
        _after_import("megatron.training.training")(_Curves(os.environ["CURVES"]).watch)
    sys.meta_path.insert(0, _AfterImport())
