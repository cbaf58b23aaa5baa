"""What the host of 2023 refuses: one table, on all ranks, with everything left as it was.

Exercises hosts/megatron_2023/facts.py, hosts/megatron_2023/get_in.py, hosts/megatron/refused.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_distopt
from megatron_distopt import DistOptConfig
from megatron_distopt.comm import meeting
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron.inner_optimizers import inner_for
from megatron_distopt.hosts.megatron_2023.translate import with_host_flags
from tests.hosts.test_promise_2023 import AdamW
from tests.support import fork_trees
from tests.support.facts import Facts, facts_of
from tests.support.mini_fork import InstalledFork, MiniFork
from tests.support.refusals import assert_mentions, raised, refused
from tests.support.spawn import run_ranks
from tests.support.stand_ins import zeroing_float64

SIZE = 2
_FLAG = "--use-distributed-optimizer"
_CHANGE = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Refused:
    """What became of an attempt."""

    kind: str  # class of the error
    text: str
    # what is not as it was before: attributes of the fork's modules, params, gradients
    changed: tuple[str, ...] = ()


TRAINED = Refused("nothing", "it trained")


class _Entered(list[tuple[object, ...]]):
    """Keeps process groups: every refusal comes before anything is under way in them, and new ones
    take longest."""

    def clear(self) -> None:
        """Not after an error, see `MiniFork.train`."""


class Attempts:
    """Starts trainings of the small fork that must not come about."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fork = replace(InstalledFork.imported(file_layout="gathered"), entered=_Entered())
        self.apart = MiniFork(self.fork.training, self.fork.script, entered=self.fork.entered)
        self.factory = sys.modules["megatron.optimizer"]
        self.parser = sys.modules["megatron.arguments"]

    def train(
        self, words: str = "", change: _CHANGE = lambda chunks: chunks, *, apart: bool = False
    ) -> Refused:
        """With `words` beside the flag, and the model changed after it was wrapped."""
        fork = self.apart if apart else self.fork
        return self.attempt(lambda: fork.train(_FLAG, *words.split()), change, apart=apart)

    def attempt(
        self,
        run: Callable[[], object],
        change: _CHANGE = lambda chunks: chunks,
        *,
        apart: bool = False,
    ) -> Refused:
        """`apart`: the package is installed for this one alone, if it is; that takes as long as all
        the rest."""
        (self.fork.uninstall if apart else self.fork.install)()
        before, models, build = _attributes(), [], self.fork.training.get_model

        def get_model(*args: Any, **kwargs: Any) -> Any:
            chunks = change(build(*args, **kwargs))
            models.append((chunks, _places(chunks)))
            return chunks

        try:
            with mock.patch.object(self.fork.training, "get_model", get_model):
                run()
        except Exception as error:  # noqa: BLE001 - compared with what is wanted
            moved = [
                place
                for chunks, places in models
                for place in places.items() - _places(chunks).items()
            ]
            changed = [
                name
                for name, value in _attributes().items()
                if before.get(name, value) is not value
            ]
            return Refused(
                type(error).__name__, str(error), (*changed, *(str(place) for place in moved))
            )
        return TRAINED

    def with_arguments(self, words: str = "", **values: object) -> Refused:
        """What no flag of this fork says and other forks' do."""

        def change(chunks: list[Any]) -> list[Any]:
            vars(sys.modules["megatron"].get_args()).update(values)
            return chunks

        return self.train(words, change)

    def with_ddp(self, **values: object) -> Refused:
        return self.train(
            change=lambda chunks: [vars(chunk).update(values) or chunk for chunk in chunks]
        )

    def with_lossy_sums(self) -> Refused:
        with mock.patch.object(dist, "all_reduce", zeroing_float64(dist.all_reduce)):
            return self.train()

    def with_adam(self, base: type) -> Refused:
        with mock.patch.object(self.factory, "Adam", base):
            return self.train("--distopt-updates params")

    @contextlib.contextmanager
    def fork_with(self, source: str) -> Iterator[None]:
        """A fork that has `source` instead, which may define the factory and the class."""
        self.fork.uninstall()
        scope = vars(self.factory)
        before = {name: scope[name] for name in ("DistributedOptimizer", "get_megatron_optimizer")}
        try:
            exec(source, scope)
            factory = scope["get_megatron_optimizer"]
            with mock.patch.object(self.fork.training, "get_megatron_optimizer", factory):
                yield
        finally:
            scope.update(before)

    def install_with(self, source: str) -> Refused:
        with self.fork_with(source):
            return self.attempt(megatron_distopt.install, apart=True)

    def parse_leniently(self, words: str) -> Refused:
        """As scripts parse that have flags of their own: what is not known is dropped."""

        def parse() -> None:
            installation = megatron_distopt.install()
            try:
                with mock.patch.object(sys, "argv", ["pretrain.py", *words.split()]):
                    sys.modules["megatron.initialize"].parse_args(ignore_unknown_args=True)
            finally:
                installation.undo()

        return self.attempt(parse, apart=True)

    def built_by(self, what: str, parameters: str) -> Refused:
        """With a class of these parameters and a factory that returns `what`."""
        with self.fork_with(_FACTORY.format(parameters=parameters, what=what)):
            return self.train(apart=True)

    def without_count(self, words: str = "") -> Refused:
        with pytest.MonkeyPatch.context() as patch:
            for module in ("megatron", "megatron.global_vars"):
                patch.delattr(sys.modules[module], "get_num_microbatches")
            return self.train(words)

    def without_expert_group(self) -> Refused:
        def change(chunks: list[Any]) -> list[Any]:
            del sys.modules["megatron.core.parallel_state"].get_expert_data_parallel_group  # type: ignore[attr-defined]
            return chunks

        return self.train("--experts", change)

    def with_underscores(self) -> Refused:
        """A fork whose flags have underscores is given ours with hyphens."""
        with mock.patch.object(self.parser, "FLAGS", "underscore"):
            return self.train(apart=True)

    def with_other_variable(self) -> Refused:
        with mock.patch.dict(
            os.environ, {"MEGATRON_DISTOPT_DECAY": "l2"} if self.rank == 1 else {}
        ):
            return self.train(apart=True)


_FACTORY = """
class DistributedOptimizer:
    def __init__(self, {parameters}):
        pass

def get_megatron_optimizer(model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    groups = get_param_groups(model, no_weight_decay_cond, scale_lr_cond, lr_mult)
    base = Adam(groups, lr=get_args().lr)
    return {what}
"""


def _attributes() -> dict[str, Any]:
    """Of the fork's modules, without the process groups of parallel_state, which every run makes
    anew."""
    modules = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"
    }
    return {
        f"{module_name}.{name}": value
        for module_name, module in modules.items()
        for name, value in vars(module).items()
        if not (module_name.endswith("parallel_state") and name.startswith("_"))
    }


def _places(chunks: Sequence[Any]) -> Mapping[str, tuple[int, ...]]:
    """Where params and gradients lie."""
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    return {
        name: (param.data_ptr(), getattr(param, "main_grad", param).data_ptr())
        for name, param in named
    }


def _as(dtype: torch.dtype) -> _CHANGE:
    def change(chunks: list[Any]) -> list[Any]:
        param = next(chunks[0].parameters())
        param.data = param.data.to(dtype)
        return chunks

    return change


class Clipped(torch.optim.SGD):
    """Of a user; looks at the norm of all gradients."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: object, eps: float
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.defaults.update(betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(
            [param for group in self.param_groups for param in group["params"]], 1.0
        )
        super().step(closure)


class NeedsMore(torch.optim.SGD):
    """Of a user; has an argument without a default that is not among its defaults."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: object, eps: float
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


_USUAL = (
    "optimizer, clip_grad, log_num_zeros_in_grad, params_have_main_grad, "
    "use_contiguous_buffers_in_local_ddp, fp16, bf16, params_dtype, grad_scaler, models"
)
_GIVEN = "base, 1.0, False, True, True, False, False, get_args().params_dtype, None, model"
_BUILD = f"DistributedOptimizer({_GIVEN})"
_WORD, _POSITION = (
    f"language_model.embedding.{kind}_embeddings.weight" for kind in ("word", "position")
)
_LISTED, _ADAM = "docs/hosts.md", "--distopt-adam"
_CLASS = f"DistributedOptimizer | {_LISTED} | megatron_distopt.DistributedOptimizer"
_FACTORY_NAME = "megatron.optimizer.get_megatron_optimizer"
_GATHER = "--distopt-overlap-param-gather"
_OVERLAP = "--distopt-overlap-grad-reduce"
_FLOAT64 = f"'{_WORD}' | float64 | float32, bfloat16, float16 | requires_grad_(False)"


def _on_rank_1(option: str, value: str, others: str) -> str:
    return f"rank 1 has {option}={value} | rank 0 has {option}={others} | all 2 | rank(s) 1"


#: What is done: words beside the flag, or an act. Then the class of the error, and what its message
#: names, what to write instead among it, between bars.
CASES: dict[str, tuple[Any, str, str]] = {
    # Flags.
    "deepspeed": (
        "--deepspeed",
        "ConfigError",
        f'--deepspeed | {_FLAG} | "zero_optimization": {{"stage": 1}} | Drop',
    ),
    "torch's DDP": (
        "--DDP-impl torch",
        "ConfigError",
        "DDP_impl is 'torch' | Write --DDP-impl local",
    ),
    "no buffers": (
        "--no-contiguous-buffers-in-local-ddp",
        "ConfigError",
        "Drop --no-contiguous-buffers-in-local-ddp",
    ),
    "optimiser": (
        lambda at: at.attempt(lambda: at.fork.train("--use-distributed-optimiser")),
        "ConfigError",
        f"--use-distributed-optimiser | Did you mean {_FLAG}?",
    ),
    "underscores": (
        lambda at: at.attempt(lambda: at.fork.train("--use_distributed_optimizer")),
        "ConfigError",
        f"--use_distributed_optimizer | Did you mean {_FLAG}?",
    ),
    "hyphens": (
        Attempts.with_underscores,
        "ConfigError",
        f"{_FLAG} | Did you mean --use_distributed_optimizer?",
    ),
    "adma, leniently": (
        lambda at: at.parse_leniently("--distopt-adma torch_fused"),
        "ConfigError",
        f"--distopt-adma | Did you mean {_ADAM}?",
    ),
    # What the fork is; see tests/plugin/test_patcher.py for what is missing or replaced in it.
    "factory with other parameters": (
        lambda at: at.install_with("def get_megatron_optimizer(chunks, **options): pass"),
        "HostMismatchError",
        f"{_FACTORY_NAME} | (chunks, options) | (model, no_weight_decay_cond, scale_lr_cond, "
        f"lr_mult) | {_LISTED}",
    ),
    "class with one more": (
        lambda at: at.built_by(_BUILD, f"{_USUAL}, overlap"),
        "HostMismatchError",
        f"({_USUAL}, overlap) | {_USUAL}. | {_CLASS}",
    ),
    "class with an option that is off": (
        lambda at: at.built_by(_BUILD[:-1] + ", False)", f"{_USUAL}, overlap=False"),
        "nothing",
        "it trained",
    ),
    "class with an option that is on": (
        lambda at: at.built_by(_BUILD[:-1] + ", overlap=True)", f"{_USUAL}, overlap=False"),
        "HostMismatchError",
        f"DistributedOptimizer | overlap=True | {_USUAL} | Leave the fork's option for it off",
    ),
    "factory that builds something else": (
        lambda at: at.built_by(f"FP32Optimizer({_GIVEN[:36]})", _USUAL),
        "HostError",
        f"{_FACTORY_NAME} | FP32Optimizer | DistributedOptimizer | use_distributed_optimizer | "
        f"{_LISTED}",
    ),
    "no microbatch count": (
        lambda at: at.without_count(f"{_OVERLAP} yes"),
        "ConfigError",
        f"get_num_microbatches | Write {_OVERLAP} no",
    ),
    "no microbatch count, by itself": (Attempts.without_count, "nothing", "it trained"),
    # Arguments of other forks, and the model.
    "FSDP": (
        lambda at: at.with_arguments(DDP_impl="FSDP"),
        "ConfigError",
        "DDP_impl is 'FSDP' | Write --DDP-impl local",
    ),
    "use_fsdp": (
        lambda at: at.with_arguments(use_fsdp=True),
        "ConfigError",
        f"Drop --use-fsdp | {_FLAG}",
    ),
    "use_torch_fsdp2": (
        lambda at: at.with_arguments(use_torch_fsdp2=True),
        "ConfigError",
        f"Drop --use-torch-fsdp2 | {_FLAG}",
    ),
    "params read outside of forward": (
        lambda at: at.with_arguments(_GATHER, log_params_norm=True),
        "ConfigError",
        "--log-params-norm | overlap_param_gather=True | Leave one of the two out",
    ),
    "params averaged outside of forward": (
        lambda at: at.with_arguments(_GATHER, vision_pretraining_type="dino"),
        "ConfigError",
        "--vision-pretraining-type dino | overlap_param_gather=True | Leave one of the two out",
    ),
    "unwrapped": (
        lambda at: at.train(change=lambda chunks: [chunks[0].module]),
        "HostError",
        "megatron.model.gpt_model.GPTModel | DistributedDataParallel | Write --DDP-impl local",
    ),
    "DDP without buffers": (
        lambda at: at.with_ddp(_grad_buffers=None),
        "ConfigError",
        "Drop --no-contiguous-buffers-in-local-ddp",
    ),
    "DDP without an index map": (
        lambda at: at.with_ddp(_grad_buffer_param_index_map=None),
        "HostError",
        "index map | Megatron-LM 23.04",
    ),
    "float64": (lambda at: at.train(change=_as(torch.float64)), "LayoutError", f"{_FLOAT64}"),
    "fp16 without a loss scale": (
        lambda at: at.train(change=_as(torch.float16)),
        "ConfigError",
        "fp16 | loss_scale=None | loss_scale='dynamic' | --fp16 | --loss-scale 1024",
    ),
    "unfrozen after wrapping": (
        lambda at: at.train(
            "--frozen-param", lambda chunks: [chunk.requires_grad_(True) for chunk in chunks]
        ),
        "LayoutError",
        f"'{_POSITION}' | DistributedDataParallel | param.requires_grad_(True)",
    ),
    "experts in the fork's file": (
        "--experts --distopt-checkpoint-format gathered",
        "ConfigError",
        "a model with experts | checkpoint_format='gathered' | Leave checkpoint_format out",
    ),
    "experts without a group": (
        Attempts.without_expert_group,
        "HostError",
        "'language_model.encoder.layers.0.expert.weight' | 'ep_size_1' | DeepSpeed | "
        "mpu.get_expert_data_parallel_group() | deepspeed.moe",
    ),
    "across params": (
        lambda at: at.with_adam(Clipped),
        "ConfigError",
        "Clipped | torch.optim.Adafactor | torch.optim.AdamW",
    ),
    "not buildable": (
        lambda at: at.with_adam(NeedsMore),
        "ConfigError",
        "NeedsMore.__init__() | 'betas' | 'eps' | torch.optim.AdamW",
    ),
    # What is around the fork.
    "all-reduce that loses float64": (
        Attempts.with_lossy_sums,
        "ConfigError",
        "torch.distributed.all_reduce | tests.support.stand_ins | stand_ins.py | float64 | "
        "torch.distributed.all_reduce = torch.distributed.distributed_c10d.all_reduce",
    ),
    # One rank alone.
    "other bucket size on one rank": (
        lambda at: at.train(f"--distopt-bucket-size {700 if at.rank == 1 else 800}"),
        "RanksDisagreeError",
        _on_rank_1("bucket_size", "700", "800"),
    ),
    "other variable on one rank": (
        Attempts.with_other_variable,
        "RanksDisagreeError",
        _on_rank_1("decay", "'l2'", "'decoupled'"),
    ),
}


def collect_facts(rank: int, size: int) -> dict[str, Refused]:
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    at = Attempts(rank)
    found = {
        name: at.train(act) if isinstance(act, str) else act(at)
        for name, (act, *_) in CASES.items()
    }
    found["float64 on one rank"] = at.train(
        change=_as(torch.float64) if rank == 1 else lambda chunks: chunks
    )
    # Last of all: no collective is possible any more where one rank has left.
    off = mock.patch.dict(os.environ, {"MEGATRON_DISTOPT": "0"} if rank == 1 else {})
    with off, mock.patch.object(meeting, "SECONDS_TO_LOOK", 0.25):
        found["off on one rank"] = at.train(apart=True)
    return found


found = facts_of(collect_facts, SIZE)


@pytest.mark.parametrize("name", CASES)
def test_host_of_2023_when_input_is_bad_then_every_rank_says_what_to_do_and_nothing_is_changed(
    found: Facts, name: str
) -> None:
    _, kind, mentions = CASES[name]
    first, second = found[name]
    assert first == second
    assert (first.kind, first.changed) == (kind, ())
    assert_mentions(first.text, *mentions.split(" | "))


def test_host_of_2023_when_one_rank_refuses_then_the_other_says_which(found: Facts) -> None:
    other, own = found["float64 on one rank"]
    assert (own.kind, other.kind) == ("LayoutError", "RanksDisagreeError")
    assert_mentions(own.text, *_FLOAT64.split(" | "))
    assert f"rank 1 raised «{own.text}»" in other.text


def test_rank_when_it_is_switched_off_then_the_other_says_which(found: Facts) -> None:
    """A rank that runs without the package: see test_handshake.py. megatron-core:
    test_megatron_core_refusals.py."""
    assert (
        "megatron_distopt is not used on rank 1 (MEGATRON_DISTOPT=0)"
        in found.first["off on one rank"].text
    )
    assert found["off on one rank"][1] != TRAINED


def test_inner_when_the_fork_wants_torchs_on_the_cpu_then_the_best_there_is() -> None:
    base = torch.optim.Adam([torch.zeros(1)])
    flags = SimpleNamespace(cpu_optimizer=True, cpu_torch_adam=True)
    assert _inner(base, DistOptConfig(), flags, "cpu")[0].name == "torch_fused"


_APEX = "from apex.optimizers import FusedAdam\n"
_NO_APEX = "cannot be imported | No module named 'apex' | Install the missing module | NVIDIA apex"
#: Name of a fork: how it is made, a file that is different and what is in it, and what the message
#: names.
FORKS: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "GPT-NeoX": (
        fork_trees.neox,
        "",
        "",
        'GPT-NeoX | "zero_optimization": {"stage": 1} | DeepSpeed',
    ),
    "core 0.4": (
        fork_trees.early_core,
        "",
        "",
        "megatron-core 0.4 or 0.5 | megatron-core 0.9 | megatron_distopt.distribute(...)",
    ),
    "2.6": (
        fork_trees.pre_distopt,
        "",
        "",
        "megatron_distopt.distribute(...) | DistributedDataParallel",
    ),
    "no apex": (fork_trees.gathered_2023, "megatron/__init__.py", _APEX, _NO_APEX),
    "no apex in the parser": (
        fork_trees.gathered_2023,
        "megatron/arguments.py",
        _APEX,
        "megatron.arguments | No module named 'apex' | Start in the folder of your Megatron",
    ),
}


def install_in_each(rank: int, size: int, folders: Mapping[str, Path]) -> dict[str, Refused]:
    """In a rank: installs in one fork after the other."""
    found = {}
    for name, folder in folders.items():
        for module in [module for module in sys.modules if module.partition(".")[0] == "megatron"]:
            del sys.modules[module]
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        found[name] = Refused(*raised(megatron_distopt.install))
        sys.path.remove(str(folder))
    return found


@pytest.fixture(scope="module")
def refused_forks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    folders = {}
    for name, (make, file, text, _) in FORKS.items():
        folders[name] = tmp_path_factory.mktemp("fork")
        fork_trees.write_tree(make(folders[name]), {file: text} if file else {})
    return run_ranks(install_in_each, 1, folders)[0]


@pytest.mark.parametrize("name", FORKS)
def test_install_when_a_fork_is_not_supported_or_not_whole_then_says_what_to_do(
    refused_forks: dict[str, Refused], name: str
) -> None:
    assert refused_forks[name].kind == "UnknownHostError"
    assert_mentions(refused_forks[name].text, *FORKS[name][-1].split(" | "))


def _inner(base: Any, config: DistOptConfig, flags: Any, device: str) -> Any:
    return inner_for(base, with_host_flags(config, base, flags, device), device)


def _chosen(make: Any, config: DistOptConfig | None = None) -> tuple[str, Any]:
    """The name of what is chosen, and what it builds."""
    param = torch.ones(4)
    base = make([{"params": [param]}])
    choice, groups = _inner(base, config or DistOptConfig(), SimpleNamespace(), "cpu")
    return choice.name, choice.build([dict(group) for group in groups])


def test_inner_when_ours_does_the_same_as_the_forks_then_it_is_replaced() -> None:
    """Where it does not, the fork's own is used: see "amsgrad" and "own_class_named_as_torchs" in
    test_promise_2023."""
    assert _chosen(torch.optim.Adam)[0] == "torch_fused"
    assert _chosen(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5))[0] == "torch_sgd"
    assert (
        _chosen(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5, nesterov=True))[0]
        == "SGD"
    )
    assert _chosen(lambda groups: torch.optim.AdamW(groups, maximize=True))[0] == "AdamW"


def _own_adam(groups: Any) -> torch.optim.Optimizer:
    return AdamW(groups, 0.1, (0.9, 0.95), 1e-8, 0.0)


def _with_options(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, amsgrad=True, maximize=True)


FOREACH = DistOptConfig(adam="torch_foreach")
_ON_HOST = SimpleNamespace(cpu_optimizer=True)
_NOT_BOTH = ("amsgrad=True, maximize=True", "Drop these options")


@pytest.mark.parametrize(
    ("base", "config", "flags", "device", "mentions"),
    [
        (
            torch.optim.Adam,
            DistOptConfig(offload_fraction=0.0),
            _ON_HOST,
            "cuda",
            ("'deepspeed_cpu'", "cpu", "cuda", "adam='auto'"),
        ),
        (_with_options, FOREACH, SimpleNamespace(), "cpu", _NOT_BOTH),
        (_with_options, DistOptConfig(optimizer="adam"), SimpleNamespace(), "cpu", _NOT_BOTH),
        (
            _own_adam,
            FOREACH,
            None,
            "cpu",
            ("adam is torch_foreach", "AdamW", "--distopt-optimizer adam"),
        ),
    ],
    ids=["another device", "options and an adam", "options and an optimizer", "a class of its own"],
)
def test_inner_when_what_is_asked_for_cannot_take_the_place_of_the_forks_then_refused(
    base: Any, config: DistOptConfig, flags: Any, device: str, mentions: tuple[str, ...]
) -> None:
    groups = [{"params": [torch.zeros(1)]}]
    assert_mentions(
        refused(ConfigError, lambda: _inner(base(groups), config, flags, device)), *mentions
    )


def test_inner_when_adam_is_named_in_the_place_of_the_forks_own_class_then_it_is_replaced() -> None:
    assert (
        _chosen(_own_adam, DistOptConfig(adam="torch_foreach", optimizer="adam"))[0]
        == "torch_foreach"
    )


@pytest.mark.parametrize(
    ("mode", "decay", "is_decoupled"), [(1, None, True), (0, None, False), (0, "decoupled", True)]
)
def test_inner_when_apexs_adam_is_told_how_to_decay_then_ours_does_so_unless_an_option_says_else(
    mode: int, decay: str | None, is_decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: NVIDIA's is not on the package index."""

    class FusedAdam(torch.optim.AdamW):
        adam_w_mode = mode

    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=FusedAdam))
    name, built = _chosen(
        FusedAdam, DistOptConfig() if decay is None else DistOptConfig(decay=decay)
    )
    assert name == "torch_fused"
    assert isinstance(built, torch.optim.AdamW) is is_decoupled
