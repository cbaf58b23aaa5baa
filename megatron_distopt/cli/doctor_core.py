"""What `megatron-distopt doctor` says about a release of megatron-core: what is served, and what is refused.

Reads its source: the release is shown, and nothing but the source decides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from megatron_distopt.cli.show import Finding, noted, ok
from megatron_distopt.hosts.detect import MEGATRON_CORE as GENERATION
from megatron_distopt.hosts.megatron_core.facts import REFUSED
from megatron_distopt.hosts.megatron_core.fields import judged
from megatron_distopt.hosts.source.found import Survey
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError, classes_of, methods_of
from megatron_distopt.version import MEGATRON_CORE

_SECTION = "fork"
#: The configs whose fields are judged, as `Refused.where` names them: module and class.
_CONFIGS = {
    "config": ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    "ddp_config": ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
}


def describe_core(found: Survey, tree: SourceTree) -> Iterator[Finding]:
    """Yields findings about megatron-core; none for other generations.

    Args:
        found: what the host's source says.
        tree: the host.
    """
    if found.generation != GENERATION:
        return
    yield from _release(tree)
    yield from _fields(tree)
    if _is_grid_only(tree):
        text = "takes shards of a regular grid only: sharded_state_dict is refused, save(folder) and load(folder) work"
        yield noted(_SECTION, "dist_checkpointing", text)


def _release(tree: SourceTree) -> Iterator[Finding]:
    module = _parsed(tree, "megatron.core.package_info")
    values = {
        target.id: str(node.value.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        return
    release = f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
    if _is_served((int(values["MAJOR"]), int(values["MINOR"]))):
        yield ok(_SECTION, "megatron-core", f"{release}, served are {MEGATRON_CORE}")
    else:
        text = f"{release}, tried are {MEGATRON_CORE}; what differs is refused when the optimizer is built"
        yield noted(_SECTION, "megatron-core", text)


def _is_served(release: tuple[int, int]) -> bool:
    """Whether a release lies in the range that is served.

    >>> _is_served((0, 9)), _is_served((0, 8)), _is_served((0, 20))
    (True, False, False)
    """
    oldest, after = ((int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", MEGATRON_CORE))
    return oldest <= release < after


def _fields(tree: SourceTree) -> Iterator[Finding]:
    """Says which of its options are refused, and which fields nobody has judged."""
    fields = {where: _fields_of(tree, *place) for where, place in _CONFIGS.items()}
    refused = [each.option for each in REFUSED if each.option in fields[each.where]]
    if refused:
        yield noted(_SECTION, "refused options", f"{', '.join(dict.fromkeys(refused))}: refused where they are on")
    unknown = sorted(name for where, names in fields.items() for name in names - judged(where))
    if unknown:
        text = f"{', '.join(unknown)}: refused where they are not at their defaults"
        yield noted(_SECTION, "unknown options", text)


def _fields_of(tree: SourceTree, module: str, name: str) -> frozenset[str]:
    definition = classes_of(_parsed(tree, module)).get(name)
    body = definition.body if definition is not None else []
    named = (node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    return frozenset(field for field in named if not field.startswith("_"))


def _is_grid_only(tree: SourceTree) -> bool:
    """Whether it demands of every shard that its offset is a multiple of its shape, as it did until 0.14.

    Since then it does so under an `if`, for shards that say that they lie in a grid.
    """
    definition = classes_of(_parsed(tree, "megatron.core.dist_checkpointing.mapping")).get("ShardedTensor")
    check = methods_of(definition).get("validate_metadata_integrity") if definition is not None else None
    loops = [node for node in check.body if isinstance(node, ast.For)] if check is not None else []
    return any(isinstance(node, ast.Mod) for loop in loops for node in ast.walk(loop))


def _parsed(tree: SourceTree, module: str) -> ast.Module:
    file = tree.file_of(module)
    try:
        return tree.parse(file) if file is not None else ast.Module(body=[], type_ignores=[])
    except UnreadableSourceError:  # a finding of its own
        return ast.Module(body=[], type_ignores=[])
