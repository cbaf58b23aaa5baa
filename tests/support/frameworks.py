"""Runs frameworks' own code on a tiny GPT of megatron-core: with ours it has to train as without,
to the bit.

`python -m tests.support.frameworks FOLDER...` prints rows for docs/hosts.md. Folders are named as
in `PIECES`. What a piece needs is cut out of the framework's file and run as it is, so that nothing
of it has to be installed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.support.cases import Case
from tests.support.exact_core import variables
from tests.support.spawn import run_ranks

SIZE, STEPS = 2, 3
BF16 = Case("distopt", dp=SIZE, precision="bf16", num_microbatches=1)
#: In the block a model is built and trained; it gives what happens between two steps.
Piece = Callable[[Path], contextlib.AbstractContextManager[Callable[[Any], object]]]


def cut_out(
    file: Path, *names: str, modules: Mapping[str, Any] | None = None, **known: Any
) -> SimpleNamespace:
    """Functions and methods of a file by name, or all of it; `modules` are what it imports of the
    framework."""
    tree = ast.parse(file.read_text("utf-8"))
    if names:
        chosen = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
        tree.body = [*ast.parse("from __future__ import annotations").body, *chosen]
    found: dict[str, Any] = {"torch": torch, "__name__": file.stem, **known}
    with mock.patch.dict(sys.modules, {file.stem: ModuleType(file.stem), **(modules or {})}):
        exec(compile(tree, str(file), "exec"), found)
    return SimpleNamespace(**found)


@contextlib.contextmanager
def _moves_of_verl(folder: Path) -> Iterator[Callable[[Any], object]]:
    from megatron.core.optimizer import ChainedOptimizer

    file = next(
        each
        for each in folder.rglob("megatron_utils.py")
        if "def offload_megatron_opt" in each.read_text()
    )
    names = [
        f"{verb}_megatron_{what}"
        for verb in ("offload", "load")
        for what in ("copy_params", "optimizer")
    ]
    known: dict[str, Any] = {
        "gc": gc,
        "ChainedOptimizer": ChainedOptimizer,
        "get_device_id": lambda: "cpu",
    }
    code = cut_out(
        file, *names, get_torch_device=lambda: SimpleNamespace(empty_cache=bool), **known
    )

    def act(training: Any) -> None:
        code.offload_megatron_optimizer(training.optimizer)
        code.load_megatron_optimizer(training.optimizer)

    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        yield act


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return made


@contextlib.contextmanager
def _moves_of_roll(folder: Path) -> Iterator[Callable[[Any], object]]:
    device = SimpleNamespace(
        device_type="cpu", current_device=int, synchronize=bool, empty_cache=bool
    )
    modules: dict[str, Any] = {"transformers": SimpleNamespace(PreTrainedModel=object)}
    modules |= {"roll": SimpleNamespace(), "roll.utils": SimpleNamespace()}
    modules["roll.platforms"] = SimpleNamespace(current_platform=device)
    modules["roll.utils.offload_states"] = cut_out(
        folder / "roll/utils/offload_states.py", modules=modules
    )
    code = cut_out(folder / "roll/third_party/megatron/offload_states_patch.py", modules=modules)

    def act(training: Any) -> None:
        # its own factory puts no chain around one
        if len(getattr(training.optimizer, "chained_optimizers", ())) == 1:
            training.optimizer = training.optimizer.chained_optimizers[0]
        code.bind_megatron_offload_states_func(training.optimizer)
        training.optimizer.offload_states()
        training.optimizer.reload_states()

    with (
        mock.patch.multiple(torch, empty=_unpinned(torch.empty), tensor=_unpinned(torch.tensor)),
        mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
    ):
        yield act


@contextlib.contextmanager
def _swaps_of_nemo(folder: Path) -> Iterator[Callable[[Any], object]]:
    names = "use_reference_model", "_apply_state_dict_to_model"
    code = cut_out(
        folder / "nemo_rl/models/policy/workers/megatron_policy_worker.py",
        *names,
        contextmanager=contextlib.contextmanager,
    )

    def act(training: Any) -> None:
        worker = SimpleNamespace(
            model=training.chunks[0], should_disable_forward_pre_hook=False, sampling_params=None
        )
        worker.reference_state_dict = {
            name: each * 0.5
            for name, each in worker.model.state_dict().items()
            if torch.is_tensor(each)
        }
        worker.cfg = {"megatron_cfg": {"empty_unused_memory_level": 0}}
        worker._apply_state_dict_to_model = code._apply_state_dict_to_model.__get__(worker)
        before = next(worker.model.parameters()).clone()
        with code.use_reference_model(worker):
            assert not torch.equal(next(worker.model.parameters()), before), "nothing was swapped"

    with variables({"MAIN_PARAMS_DTYPE": "remainder"}):
        yield act


@contextlib.contextmanager
def _groups_made_again(folder: Path) -> Iterator[Callable[[Any], object]]:
    from megatron.core import parallel_state

    from tests.support import gpt

    name = folder.name
    utils: dict[str, Any] = {
        "accelerator": SimpleNamespace(
            is_accelerator_backend=lambda _: False, process_group_backend=str
        ),
        "memory_utils": SimpleNamespace(
            available_memory=lambda: {"free_GB": 9}, clear_memory=bool, print_memory=lambda *_: None
        ),
        "distributed_utils": SimpleNamespace(
            get_gloo_group=bool, init_gloo_group=bool, set_gloo_group=bool
        ),
    }
    modules = {name: SimpleNamespace(), f"{name}.utils": SimpleNamespace(**utils)}
    modules |= {f"{name}.utils.{each}": module for each, module in utils.items()}
    code = cut_out(folder / name / "utils/reloadable_process_group.py", modules=modules)
    code.monkey_patch_torch_dist()
    if hasattr(code, "register_default_process_group"):
        code.register_default_process_group(None)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    gpt._entered.clear()

    def act(training: Any) -> None:
        code.destroy_process_groups()
        code.reload_process_groups()

    yield act


@contextlib.contextmanager
def _adapters_of_skyrl(folder: Path) -> Iterator[Callable[[Any], object]]:
    code = cut_out(folder / "skyrl/backends/skyrl_train/workers/megatron/adapter_store.py")
    stores: dict[int, Any] = {}
    unchecked = mock.patch.dict(code.iter_opts.__globals__, {"_expected_lora_param_check": bool})

    def act(training: Any) -> None:
        """A second tenant trains in between."""
        where = training.chunks, training.optimizer
        if id(training) not in stores:
            store = stores[id(training)] = code.AdapterStore()
            store.register_pristine(*where, "signature")
            for tenant in ("one", "two"):
                store.create(tenant, *where, "signature")
        stores[id(training)].swap_to("two", *where)
        training.step()
        training.steps_taken -= 1
        stores[id(training)].swap_to("one", *where)

    with unchecked, mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone):
        yield act


@contextlib.contextmanager
def _sums_of_miles(folder: Path) -> Iterator[Callable[[Any], object]]:
    file = folder / "miles/backends/megatron_utils/local_weight_checksum.py"
    ci, found = "miles.backends.megatron_utils.ci_utils", SimpleNamespace(OptimizerStateInfo=dict)
    modules: dict[str, Any] = {
        ci: SimpleNamespace(_hash_tensor_bytes=lambda each: bytes(str(each), "utf-8"))
    }
    modules["miles.utils.audit_utils.event_logger.models"] = found
    code = cut_out(file, modules=modules)

    def act(training: Any) -> None:
        with mock.patch.dict(sys.modules, modules):
            sums = code._collect_optimizer_hashes(training.chunks, training.optimizer)
        assert all(each["param_names"] for each in sums), "nothing was named"

    yield act


@contextlib.contextmanager
def _factory_of_bridge(folder: Path) -> Iterator[Callable[[Any], object]]:
    import megatron_distopt

    names: dict[str, Any] = {
        "_get_scheduler": lambda *_: None,
        "get_model_config": lambda chunk: chunk.config,
    }
    provider = SimpleNamespace(build_config_overrides=lambda _: None)
    names["OptimizerConfigOverrideProviderContext"] = lambda *_: None
    code = cut_out(
        folder / "src/megatron/bridge/training/optim.py",
        "setup_optimizer",
        **names,
        get_megatron_optimizer=megatron_distopt.get_megatron_optimizer,
    )

    def factory(config: Any, chunks: Any) -> Any:
        return code.setup_optimizer(
            config, None, chunks, optimizer_config_override_provider=provider
        )[0]

    with mock.patch.object(megatron_distopt, "get_megatron_optimizer", factory):
        yield bool


@contextlib.contextmanager
def _adaptor_of_mindspeed(folder: Path) -> Iterator[Callable[[Any], object]]:
    """Its own patcher puts in what it puts into every run, and takes it out after the first
    training; not its sum of float64, which is refused on a CPU."""
    patches = cut_out(folder / "mindspeed/patch_utils.py", __name__="mindspeed.patch_utils")
    manager = patches.MindSpeedPatchesManager
    for file, names in REPLACED_BY_MINDSPEED.items():
        module = file.removesuffix(".py").replace("/", ".")
        known: dict[str, Any] = {"wraps": functools.wraps, "__name__": module}
        code = cut_out(folder / file, *names, **known)
        for name, place in names.items():
            manager.register_patch(f"megatron.core.optimizer.{place}", getattr(code, name))
    manager.apply_patches()
    try:
        yield lambda training: training.steps_taken == STEPS and manager.remove_patches()
    finally:
        manager.remove_patches()


#: Functions of its files, and what of the host's they take the place of.
REPLACED_BY_MINDSPEED = {
    "mindspeed/core/megatron_basic/megatron_basic.py": {
        "dist_optim_load_state_dict": "distrib_optimizer.DistributedOptimizer.load_state_dict"
    },
    "mindspeed/core/optimizer/distrib_optimizer.py": {
        "load_parameter_state": "distrib_optimizer.DistributedOptimizer.load_parameter_state"
    },
    "mindspeed/core/optimizer/optimizer.py": {
        "load_parameter_state": "optimizer.ChainedOptimizer.load_parameter_state"
    },
    "mindspeed/core/optimizer/fix_duplicate_allgather.py": {
        "step_with_ready_grads_distrib_opti_wrapper": (
            "distrib_optimizer.DistributedOptimizer.step_with_ready_grads"
        ),
        "get_megatron_optimizer_wrapper": "get_megatron_optimizer",
    },
    "mindspeed/core/megatron_basic/count_zero_fix.py": {"step": "optimizer.ChainedOptimizer.step"},
}


#: By folder of the checkout: what is run, how, and with which cases.
PIECES: dict[str, dict[str, tuple[Piece, tuple[Case, ...]]]] = {
    "verl": {"`offload_megatron_optimizer`, `load_megatron_optimizer`": (_moves_of_verl, (BF16,))},
    "SkyRL": {
        "`offload_megatron_optimizer`, `load_megatron_optimizer`": (_moves_of_verl, (BF16,)),
        "`AdapterStore`: two tenants": (_adapters_of_skyrl, (BF16,)),
    },
    "ROLL": {
        "`offload_states`, `reload_states`": (_moves_of_roll, (BF16, BF16.of(precision="fp32")))
    },
    "RL": {"NeMo-RL's `use_reference_model`, with remainders": (_swaps_of_nemo, (BF16,))},
    "slime": {"`ReloadableProcessGroup`": (_groups_made_again, (BF16,))},
    "miles": {
        "`ReloadableProcessGroup`": (_groups_made_again, (BF16,)),
        "checksums of optimizer state": (_sums_of_miles, (BF16,)),
    },
    "Megatron-Bridge": {"`setup_optimizer`": (_factory_of_bridge, (BF16,))},
    "MindSpeed": {"its replacements of methods": (_adaptor_of_mindspeed, (BF16,))},
}


def try_piece(rank: int, size: int, folder: str, what: str) -> str:
    """In a rank: "to the bit", or why not."""
    from tests.support import gpt

    piece, cases = PIECES[Path(folder).name][what]
    try:
        with piece(Path(folder)) as act:
            for case in cases:
                ends = []
                for acts in (True, False):
                    with contextlib.closing(gpt.Training(case)) as training:
                        for _ in range(STEPS):
                            loss = training.step().loss
                            if acts:
                                act(training)
                        ends.append((loss, training.params()))
                (loss, params), (usual, others) = ends
                same = all(torch.equal(param, others[name]) for name, param in params.items())
                assert (loss == usual) and same, f"trains otherwise: {loss} and {usual}"
    except Exception as error:  # noqa: BLE001 - it is the result
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "to the bit as without"


def main() -> None:
    for folder in sys.argv[1:]:
        for what in PIECES.get(Path(folder).name, {}):
            found = dict.fromkeys(
                run_ranks(try_piece, SIZE, str(Path(folder).resolve()), what, core=True)
            )
            sys.stdout.write(f"| {Path(folder).name} | {what} | {'; '.join(found)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
