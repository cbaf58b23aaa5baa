"""Fixes with which unedited Megatron-DeepSpeed (4efb479d) starts on today's packages. None of them
concerns its optimizer.

A fix is made when the module that needs it is imported, if the source of that module is as
expected. It changes the module in memory and not the host's files. MEGATRON_DISTOPT_FIXES=no
switches all fixes off.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from megatron_distopt.errors import UnknownHostError
from megatron_distopt.patch_points import Undos, repairs
from megatron_distopt.plugin.fork_source import SourceTree


@dataclass(frozen=True)
class Fix:
    """A repair of one module of the host."""

    module: str
    pattern: str  # found in the source of the module if it needs the fix
    what: str  # what the fix does
    why: str  # why it is needed and safe
    #: Modules that are not installed and that the host's module does not use in this run, the
    #: outermost first. Stand-ins for them exist only while the host's module is imported, so that
    #: other packages do not take them for the real ones.
    absent: tuple[str, ...] = ()
    # changes the executed module
    after: Callable[[ModuleType, Undos], None] = lambda module, undos: None

    def is_needed(self, source: str) -> bool:
        if self.absent:
            parent, _, _ = self.absent[0].rpartition(".")
            if _is_installed(self.absent[0]) or (parent and not _is_installed(parent)):
                return False
        return re.search(self.pattern, source, re.MULTILINE) is not None

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Puts stand-ins into sys.modules, where an import finds them."""
        ours = {name: _RefusingModule(name) for name in self.absent if name not in sys.modules}
        for name, module in ours.items():
            parent, _, last = name.rpartition(".")
            if parent in ours:
                setattr(ours[parent], last, module)
        sys.modules.update(ours)
        try:
            yield
        finally:
            for name, module in ours.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]

    def __str__(self) -> str:
        return f"{self.module}: {self.what}"


def no_deepspeed_config(module: ModuleType, undos: Undos) -> None:
    """Sets the default on the class of parsed arguments, so that it can be read but does not get
    into checkpoints."""
    if not hasattr(argparse.Namespace, "deepspeed_config_dict"):
        argparse.Namespace.deepspeed_config_dict = None  # type: ignore[attr-defined]
        undos.callback(delattr, argparse.Namespace, "deepspeed_config_dict")


def contiguous_attention(module: ModuleType, undos: Undos) -> None:
    owner: Any = module.CoreAttention
    original = owner.forward

    @functools.wraps(original)
    def forward(
        attention: Any,
        query_layer: Any,
        key_layer: Any,
        value_layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        tensors = [tensor.contiguous() for tensor in (query_layer, key_layer, value_layer)]
        return original(attention, *tensors, *args, **kwargs)

    undos.replace(owner, "forward", forward)


#: Needed with torch 2.13 and DeepSpeed 0.19. The patterns match imports that are not in a `try`:
#: those are not indented.
FIXES: tuple[Fix, ...] = (
    *(
        Fix(
            f"megatron.data.{module}",
            r"^(import|from) torchvision\b",
            "torchvision is not installed; a stand-in replaces it and raises when it is used",
            "training.py imports the vision datasets for every model, but only vision models use "
            "them",
            absent=("torchvision", "torchvision.transforms", "torchvision.datasets"),
        )
        for module in ("vit_dataset", "image_folder")
    ),
    Fix(
        "megatron.training",
        r"^(import|from) deepspeed\.compression\.compress\b",
        "the installed DeepSpeed has no deepspeed.compression.compress; a stand-in replaces it and "
        "raises when it is used",
        "the fork uses it only with --compression-training",
        absent=("deepspeed.compression.compress",),
    ),
    Fix(
        "megatron.training",
        r"^    if args\.deepspeed:\n        args\.deepspeed_config_dict = ",
        "args.deepspeed_config_dict is None without --deepspeed",
        "the fork sets it only with --deepspeed but reads it for every model; for DeepSpeed, None "
        "means no config",
        after=no_deepspeed_config,
    ),
    Fix(
        "megatron.model.transformer",
        r"^class CoreAttention\b(?s:.*?)"
        r" forward\(self, query_layer, key_layer,\s*value_layer\b(?s:.*?)layer\.view\(",
        "query, key and value are made contiguous for CoreAttention.forward",
        "they are not contiguous for micro-batches above 1, and view needs contiguous tensors",
        after=contiguous_attention,
    ),
)


def needed_fixes(tree: SourceTree, fixes: Sequence[Fix] = FIXES) -> tuple[Fix, ...]:
    """Returns the fixes that the host needs. Reads its source and runs none of its code."""
    files = [(fix, tree.file_of(fix.module)) for fix in fixes]
    return tuple(
        fix
        for fix, file in files
        if file and fix.is_needed(file.read_text("utf-8", errors="replace"))
    )


def apply_fixes(fixes: Sequence[Fix], undos: Undos) -> None:
    """Makes fixes that are not made yet: when their module is imported, or now if it is loaded.

    After the undo, modules that were imported in between keep their stand-ins.
    """
    new = [fix for fix in fixes if fix not in repairs]
    finder = _FixingFinder([fix for fix in new if fix.module not in sys.modules], undos)
    for fix in new:
        if fix.module in sys.modules:  # it may be in the middle of its import
            undos.enter_context(fix.stand_ins())
            fix.after(sys.modules[fix.module], undos)
        repairs.append(fix)
        undos.callback(repairs.remove, fix)
    sys.meta_path.insert(0, finder)
    undos.callback(finder.leave)


class _FixingFinder(MetaPathFinder):
    """Finds modules as Python and the other import hooks of the process do, and makes fixes when
    they are executed."""

    def __init__(self, fixes: Sequence[Fix], undos: Undos) -> None:
        self._fixes, self._undos = fixes, undos
        self._searching: set[str] = set()

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Returns the module's own spec, with a loader that makes the fixes; None for modules
        without a fix."""
        fixes = [fix for fix in self._fixes if fix.module == fullname]
        if not fixes or fullname in self._searching:
            return None
        self._searching.add(fullname)  # find_spec asks every hook, and so this one again
        try:
            spec = find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        # each spec has a loader of its own, so it may be changed
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            execute = functools.partial(self._execute, fixes, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(
        self, fixes: Sequence[Fix], execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        with ExitStack() as stand_ins:
            for fix in fixes:
                stand_ins.enter_context(fix.stand_ins())
            execute(module)
        for fix in fixes:
            fix.after(module, self._undos)


class _RefusingModule(ModuleType):
    """A module whose attributes are classes. They can be inherited from, but raise when an object
    is made."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: object, **kwargs: object) -> None:
            top = self.__name__.partition(".")[0]
            raise UnknownHostError(
                f"{self.__name__}.{name} is used, but it is not installed. Run pip install {top} "
                "for a version that has it."
            )

        made = type(name, (), {"__init__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


def _is_installed(module: str) -> bool:
    """Whether a module is installed. Imports nothing, whereas `find_spec` imports the packages
    around a module."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # loaded without a spec
        return True
    for name in [f"{top}.{'.'.join(parts[:end])}" for end in range(1, len(parts) + 1)]:
        places = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, places) if places is not None else None
    return spec is not None
