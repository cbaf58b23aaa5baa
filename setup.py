"""Packaging. Installing into an existing fork must not move its torch, deepspeed or megatron, so torch is named without
a version and everything else is an extra."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((ROOT / "megatron_distopt" / "version.py").read_text(encoding="utf-8"), VERSION)

MEGATRON_CORE = ["megatron-core==0.16.1", "einops", "numpy"]
DEEPSPEED = ["deepspeed"]
#: What examples/recipes train with.
RECIPES = ["accelerate", "lightning", "transformers"]
QUICKSTART = [*MEGATRON_CORE, *DEEPSPEED, "matplotlib", "rich"]

setup(
    name="megatron-distopt",
    version=VERSION["VERSION"],
    description="A better distributed optimizer (ZeRO stage 1) for Megatron forks and megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_distopt", "megatron_distopt.*"]),
    package_data={"megatron_distopt": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch"],
    entry_points={
        "console_scripts": ["megatron-distopt = megatron_distopt.plugin.cli:main"],
        "megatron.optimizer_factories": ["distopt = megatron_distopt.plugin.entry_point:distopt"],
    },
    extras_require={
        "deepspeed": DEEPSPEED,
        "triton": ["triton"],
        "megatron-core": MEGATRON_CORE,
        "quickstart": QUICKSTART,
        "recipes": RECIPES,
        "dev": [*QUICKSTART, *RECIPES, "pytest", "pytest-xdist", "hypothesis", "ruff", "mypy"],
    },
)
