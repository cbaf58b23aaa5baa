"""Small repairs of a host that cannot start on this machine for reasons that have nothing to do with its optimizer.

Each repair is data, as a patch point is: what it looks for, what it does and why. Its condition is checked by reading
the host's source, so the doctor lists the same repairs that an installation makes. They act in memory, and the files
of the host stay as they are. MEGATRON_DISTOPT_FIXES=no switches all of them off.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from megatron_distopt.errors import UnknownHostError, refusal
from megatron_distopt.hosts.source.imports import first_missing, required_modules
from megatron_distopt.hosts.source.tree import (
    SourceTree,
    UnreadableSourceError,
    classes_of,
    methods_of,
    parameters_of,
)

Undo = Callable[[], None]


class Fix(Protocol):
    """A repair of a host."""

    @property
    def why(self) -> str:
        """The reason why it is no matter of the optimizer."""

    def is_needed(self, tree: SourceTree) -> bool:
        """Whether the host and this Python are as the repair expects; reads source and runs nothing of the host.

        Raises:
            UnreadableSourceError: the file that it looks at is no Python.
        """

    def apply(self) -> Undo:
        """Makes the repair, now or as soon as the module is imported that it is about."""


def needed_fixes(tree: SourceTree, fixes: Sequence[Fix]) -> tuple[Fix, ...]:
    """Returns the repairs whose conditions hold. A file that is no Python needs another repair than these."""
    return tuple(fix for fix in fixes if _holds(fix, tree))


def _holds(fix: Fix, tree: SourceTree) -> bool:
    try:
        return fix.is_needed(tree)
    except UnreadableSourceError:
        return False


#: The repairs in force in this process, for the start-up block.
_applied: list[Fix] = []


def applied_fixes() -> tuple[Fix, ...]:
    """Returns the repairs that are in force in this process."""
    return tuple(_applied)


def apply_fixes(fixes: Sequence[Fix]) -> Undo:
    """Makes repairs that are not in force yet.

    Returns:
        A function that takes them back. Modules that were imported meanwhile keep the stand-ins that they imported.
    """
    new = [fix for fix in fixes if fix not in _applied]
    undos = [fix.apply() for fix in new]
    _applied.extend(new)

    def undo() -> None:
        while undos:
            undos.pop()()
            _applied.remove(new.pop())

    return undo


@dataclass(frozen=True)
class StandIn:
    """Lets a module of the host be imported without a package that it does not need in this run.

    The stand-ins exist while that module is imported. So other packages that look for the missing one do not find it.

    Args:
        importer: the host's module.
        modules: what stands in, the missing module first.
        why: see `Fix`.
    """

    importer: str
    modules: tuple[str, ...]
    why: str

    def is_needed(self, tree: SourceTree) -> bool:
        """Whether the host's module imports what this Python does not have, and does not handle that itself."""
        file = tree.file_of(self.importer)
        if file is None or first_missing(self.modules[0]) != self.modules[0]:
            return False
        return any(self.modules[0] in (name, name.partition(".")[0]) for name in required_modules(tree.parse(file)))

    def apply(self) -> Undo:
        """Waits for the import of the host's module; one that is being imported gets the stand-ins at once."""
        if self.importer not in sys.modules:
            return _around_import(self.importer, lambda module: self._present())
        ours = self._put_in()
        return lambda: _remove_modules(ours)

    def _put_in(self) -> dict[str, ModuleType]:
        ours = _refusing_modules([name for name in self.modules if name not in sys.modules])
        sys.modules.update(ours)
        return ours

    @contextmanager
    def _present(self) -> Iterator[None]:
        ours = self._put_in()
        try:
            yield
        finally:
            _remove_modules(ours)

    def __str__(self) -> str:
        return f"{self.modules[0]} is not installed: a stand-in that refuses to be used, for {self.importer}"


@dataclass(frozen=True)
class Substitute:
    """Provides the functions that the host calls of a package that is not installed, for the whole run.

    Args:
        importer: the host's module that imports it.
        modules: the package, and modules of it, which get the same functions.
        source: the module of ours that has the functions.
        why: see `Fix`.
    """

    importer: str
    modules: tuple[str, ...]
    source: str
    why: str

    def is_needed(self, tree: SourceTree) -> bool:
        """Whether the host's module imports the package and this Python does not have it."""
        file = tree.file_of(self.importer)
        if file is None or first_missing(self.modules[0]) is None:
            return False
        return self.modules[0] in required_modules(tree.parse(file))

    def apply(self) -> Undo:
        """Puts modules with our functions in place of the package."""
        ours = import_module(self.source)
        made = _refusing_modules(self.modules)
        for module in made.values():
            vars(module).update({each: getattr(ours, each) for each in ours.__all__})
        sys.modules.update(made)
        return lambda: _remove_modules(made)

    def __str__(self) -> str:
        return f"{self.modules[0]} is not installed: its functions that the host calls are in {self.source}"


@dataclass(frozen=True)
class ArgumentDefault:
    """Gives parsed arguments a default that the host sets only in one branch and reads in all.

    Args:
        module: of the host, which sets it.
        branch: the condition under which it does.
        name: of the argument.
        value: the default.
        why: see `Fix`.
    """

    module: str
    branch: str
    name: str
    value: object
    why: str

    def is_needed(self, tree: SourceTree) -> bool:
        """Whether the host sets the argument in that branch alone."""
        file = tree.file_of(self.module)
        nodes = list(ast.walk(tree.parse(file))) if file is not None else []
        branches = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == self.branch]
        inside = sum(self._sets(node) for branch in branches for part in branch.body for node in ast.walk(part))
        return inside > 0 and inside == sum(map(self._sets, nodes))

    def _sets(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == self.name and isinstance(node.ctx, ast.Store)

    def apply(self) -> Undo:
        """Puts the default behind the arguments, where it is read and does not get into checkpoints."""
        if hasattr(argparse.Namespace, self.name):
            return lambda: None
        setattr(argparse.Namespace, self.name, self.value)
        return lambda: delattr(argparse.Namespace, self.name)

    def __str__(self) -> str:
        return f"args.{self.name} is {self.value} unless {self.branch}, under which alone {self.module} sets it"


@dataclass(frozen=True)
class ContiguousArguments:
    """Makes tensors contiguous before a method of the host calls `view` on them.

    Args:
        module, owner, method: the method and its class.
        parameters: the tensors, which come first in its signature.
        why: see `Fix`.
    """

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    why: str

    def is_needed(self, tree: SourceTree) -> bool:
        """Whether the method has these parameters and calls `view` on the first."""
        file = tree.file_of(self.module)
        owner = classes_of(tree.parse(file)).get(self.owner) if file is not None else None
        method = methods_of(owner).get(self.method) if owner is not None else None
        if method is None or parameters_of(method)[1 : len(self.parameters) + 1] != self.parameters:
            return False
        return f"{self.parameters[0]}.view" in [ast.unparse(node) for node in ast.walk(method)]

    def apply(self) -> Undo:
        """Wraps the method, now or when its module is imported."""
        undos: list[Undo] = []
        if self.module in sys.modules:
            undos.append(self._wrap(sys.modules[self.module]))
            return undos[0]
        stop = _around_import(self.module, lambda module: self._after(module, undos))

        def undo() -> None:
            stop()
            while undos:
                undos.pop()()

        return undo

    @contextmanager
    def _after(self, module: ModuleType, undos: list[Undo]) -> Iterator[None]:
        yield
        undos.append(self._wrap(module))

    def _wrap(self, module: ModuleType) -> Undo:
        owner = getattr(module, self.owner)
        original = getattr(owner, self.method)
        count = len(self.parameters)

        @functools.wraps(original)
        def wrapped(instance: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [tensor.contiguous() for tensor in args[:count]]
            given = {name: each.contiguous() if name in self.parameters else each for name, each in kwargs.items()}
            return original(instance, *tensors, *args[count:], **given)

        setattr(owner, self.method, wrapped)
        return lambda: setattr(owner, self.method, original)

    def __str__(self) -> str:
        return f"{', '.join(self.parameters)} are made contiguous for {self.module}.{self.owner}.{self.method}"


def _refusing_modules(names: Sequence[str]) -> dict[str, ModuleType]:
    """Makes modules that refuse to be used; each is an attribute of its package, as after an import."""
    made: dict[str, ModuleType] = {name: _Refusing(name) for name in names}
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent in made:
            setattr(made[parent], last, module)
    return made


def _remove_modules(ours: Mapping[str, ModuleType]) -> None:
    for name, module in ours.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


class _Refusing(ModuleType):
    """A module whose attributes are classes that can be inherited from and refuse to be made."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: object, **kwargs: object) -> None:
            top, remedy = self.__name__.partition(".")[0], "Install a version that has it"
            rule = "be installed where the host uses it"
            raise UnknownHostError(refusal(f"{self.__name__}.{name}", f"a stand-in, {top} lacks it", rule, remedy))

        made = type(name, (), {"__init__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


Around = Callable[[ModuleType], Any]


def _around_import(module: str, around: Around) -> Undo:
    """Runs the import of a module inside the context that `around` makes."""
    finder = _Finder(module, around)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None


class _Finder(MetaPathFinder):
    def __init__(self, module: str, around: Around) -> None:
        self._module, self._around, self._is_looking = module, around, False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds the module as Python does, with a loader that acts around its execution."""
        if fullname != self._module or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec


class _Loader(Loader):
    def __init__(self, original: Any, around: Around) -> None:
        self._original, self._around = original, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leaves this to the module's own loader."""
        made: ModuleType | None = self._original.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module inside the context."""
        with self._around(module):
            self._original.exec_module(module)
