"""Questions to a syntax tree, where running the module would need a GPU, apex or torchvision."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = [
    "Binding",
    "bindings_of",
    "classes_of",
    "flags_added",
    "imports_when_loaded",
    "methods_of",
    "parameters_of",
    "required_of",
    "resolved",
    "values_given",
]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


Binding = ast.stmt | ast.expr


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when the module is loaded, in the order of the source: no body of a function or a class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _at_module_level(child)


def bindings_of(module: ast.Module, name: str) -> list[Binding]:
    """Where the module's own `name` gets a value when it is loaded, in that order."""
    return [node for node in _at_module_level(module) if isinstance(node, Binding) and name in _bound_by(node)]


def _bound_by(node: Binding) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else set()


def parameters_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Names in the order of `inspect.signature`.

    >>> parameters_of(ast.parse("def f(a, /, b, *rest, c, **others): ...").body[0])
    ('a', 'b', 'rest', 'c', 'others')
    """
    given = function.args
    positional, keywords = [*given.posonlyargs, *given.args], given.kwonlyargs
    ordered = [*positional, given.vararg, *keywords, given.kwarg]
    return tuple(argument.arg for argument in ordered if argument is not None)


def required_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Those without a default.

    >>> required_of(ast.parse("def f(a, b=1, *rest, c, d=2): ...").body[0])
    ('a', 'c')
    """
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    keywords = [argument for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if not default]
    return tuple(argument.arg for argument in [*positional[: len(positional) - len(given.defaults)], *keywords])


def classes_of(module: ast.Module) -> dict[str, ast.ClassDef]:
    """By name."""
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def methods_of(definition: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """By name, without inherited ones."""
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def resolved(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of what a `from ... import` names.

    Args:
        package: of the module that it stands in; of an `__init__.py`, that itself.

    >>> resolved(ast.parse("from ..core import mpu").body[0], "megatron.optimizer")
    'megatron.core'
    """
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *filter(None, [node.module])])


def imports_when_loaded(module: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(top-level package, line, whether under an `if`) of what loading the module imports, or else it fails.

    What stands in a `try` may be missing, and what stands in a function is imported when that is called.
    """
    yield from _imports_of(module.body, is_conditional=False)


def _imports_of(body: list[ast.stmt], *, is_conditional: bool) -> Iterator[tuple[str, int, bool]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno, is_conditional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0], node.lineno, is_conditional
        elif isinstance(node, ast.If):
            yield from _imports_of([*node.body, *node.orelse], is_conditional=True)
        elif isinstance(node, ast.With) or (isinstance(node, ast.Try) and not node.handlers):
            yield from _imports_of(node.body, is_conditional=is_conditional)


def flags_added(module: ast.Module) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Calls of `add_argument` with the flags that they spell out."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            flags = tuple(word for word in words if isinstance(word, str) and word.startswith("--"))
            if flags:
                yield node, flags


def values_given(call: ast.Call) -> dict[str, object]:
    """Keywords of a call whose values are spelled out."""
    given = [(keyword.arg, keyword.value) for keyword in call.keywords]
    return {name: value.value for name, value in given if name is not None and isinstance(value, ast.Constant)}
