"""The unedited Megatron-DeepSpeed, on its own training script and under both launchers, against
what its own optimizers did.

The fork is not part of this repository, nor are the curves and checkpoints of its own runs, so the
tests need

    MEGATRON_FORK=/path/to/Megatron-DeepSpeed     a checkout of main, 4efb479d
    MEGATRON_FORK_RUN=/path/to/mds_on_cpu         with the run.sh that starts it on a CPU
    MEGATRON_FORK_GOLDEN=/path/to/golden          with mds/*.json and checkpoints/

and are skipped where one is unset. A run takes 10 to 50 s; `-k fp32_distopt_bigclip` chooses one
case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import assert_mentions

_VARIABLES = ("MEGATRON_FORK", "MEGATRON_FORK_RUN", "MEGATRON_FORK_GOLDEN")
_UNSET = [name for name in _VARIABLES if not os.environ.get(name)]
pytestmark = pytest.mark.skipif(
    bool(_UNSET), reason=f"needs the real fork: {', '.join(_UNSET)} unset"
)

_ROOT = Path(__file__).parents[2]
_OURS = "megatron_distopt.hosts.megatron_2023.optimizer.DistributedOptimizer"
_SECONDS = 400.0


@dataclass(frozen=True)
class Run:
    """One start of the fork."""

    words: tuple[str, ...] = ()  # of its command line, in addition to those of run.sh
    precision: str = "fp32"
    ranks: int = 2
    launcher: str = "torchrun"  # or deepspeed
    optimizer: str = "ours"  # or "theirs" for the fork's distributed one, helped onto the CPU


@dataclass(frozen=True)
class Curves:
    """What a run left, by iteration or by rank."""

    losses: dict[int, float]
    norms: dict[int, float | None]  # None without clipping
    scales: dict[int, tuple[float, int]]  # loss scale, whether the step was skipped
    params: list[str]  # checksums
    optimizers: list[str]  # classes
    output: str = ""  # of the run; empty for one that was read from a file


@dataclass(frozen=True)
class Bound:
    """The largest relative difference that is allowed, of any iteration."""

    loss: float
    norm: float


def _read(file: Path, output: str = "") -> Curves:
    curves: dict[str, Any] = json.loads(file.read_text())
    rows, ranks = curves["iterations"], curves["ranks"]
    return Curves(
        {row["iteration"]: row["losses"]["lm loss"] for row in rows},
        {row["iteration"]: row["grad_norm"] for row in rows},
        {row["iteration"]: (row["loss_scale"], row["skipped"]) for row in rows},
        [rank["param_sha256"] for rank in ranks],
        [rank["optimizer_class"] for rank in ranks],
        output,
    )


def _golden(name: str) -> Path:
    return Path(os.environ["MEGATRON_FORK_GOLDEN"]) / name


Train = Callable[[Run], Curves]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs; the fork's data index is built in it once."""
    return tmp_path_factory.mktemp("megatron_deepspeed")


@pytest.fixture(scope="session")
def start(folder: Path) -> Callable[[Run], Curves | str]:
    """Runs the fork: its curves, or its output where it left none. The same run is made once.

    The exit status proves nothing: the fork calls sys.exit() with 0 where it cannot load a
    checkpoint.
    """
    done: dict[Run, Curves | str] = {}

    def run(wanted: Run) -> Curves | str:
        if wanted not in done:
            file = folder / f"{len(done)}.json"
            output = _launch(wanted, file, folder / "cache")
            done[wanted] = _read(file, output) if file.exists() else output
        return done[wanted]

    return run


def _launch(run: Run, curves: Path, cache: Path) -> str:
    ours = run.optimizer == "ours"
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("MEGATRON_DISTOPT")
        },
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
        "DATA_CACHE": str(cache),
        "CURVES": str(curves),
        "OPT": "bare" if ours else "distopt",
        "RUN": "-m megatron_distopt" if ours else "",
        "PREC": run.precision,
        "NPROC": str(run.ranks),
        "LAUNCH": run.launcher,
    }
    command = ["bash", str(Path(os.environ["MEGATRON_FORK_RUN"]) / "run.sh"), *run.words]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="session")
def train(start: Callable[[Run], Curves | str]) -> Train:
    """The curves of a run that must have left some, and of the optimizer that was asked for."""

    def run(wanted: Run) -> Curves:
        found = start(wanted)
        assert isinstance(found, Curves), found[-4000:]
        assert [name == _OURS for name in found.optimizers] == [
            wanted.optimizer == "ours"
        ] * wanted.ranks
        assert found.output.count("is active in a Megatron of 2023") == (wanted.optimizer == "ours")
        return found

    return run


def _distance(left: Curves, right: Curves) -> Bound:
    """The largest relative differences over the iterations that both have."""
    common = left.losses.keys() & right.losses.keys()
    assert common
    losses = [_relative(left.losses[each], right.losses[each]) for each in common]
    return Bound(
        max(losses), max(_relative(left.norms[each], right.norms[each]) for each in common)
    )


def _relative(left: float | None, right: float | None) -> float:
    if left == right:
        return 0.0
    if left is None or right is None:
        return float("inf")
    return abs(left - right) / max(abs(left), abs(right))


def _check(
    found: Curves, wanted: Curves, bound: Bound, what: str, record: Callable[[str, object], None]
) -> None:
    distance = _distance(found, wanted)
    record(
        "deviation",
        {"what": f"Megatron-DeepSpeed {what}", "loss": distance.loss, "norm": distance.norm},
    )
    assert found.losses.keys() == wanted.losses.keys()
    assert found.scales == wanted.scales
    assert distance.loss <= bound.loss and distance.norm <= bound.norm, (distance, bound)


#: The golden norms are torch's fp32 vector_norm of each param, which by itself is up to 1.9e-6 away
#: from float64 (measured: the 65,536 elements of the embedding); ours are added up in float64.
_NORM_IN_FP32 = 2.5e-6


def _bound_of(precision: str, iterations: int = 20) -> Bound:
    """In fp32 a few roundings. In 16 bits a rounding that falls the other way is 2^-9 of a param:
    twice the distance between the fork's own distributed and plain optimizers, which differ in the
    order of their sums alone.
    """
    if precision == "fp32":
        return Bound(1e-6 if iterations == 20 else 1e-5, _NORM_IN_FP32)
    variant = "" if iterations == 20 else f"_{iterations}it"
    plain, sharded = (
        _read(_golden(f"mds/{precision}_{kind}{variant}.json")) for kind in ("plain", "distopt")
    )
    distance = _distance(plain, sharded)
    return Bound(2 * distance.loss, 2 * distance.norm)


_BIGCLIP = ("--clip-grad", "1e9")
_PIPELINE = ("--pipeline-model-parallel-size", "2", "--expert-interval", "3")
#: By what follows "distopt" in the golden file's name: the ranks, and the words that made it. The
#: fork's own optimizer ran with decoupled decay, as on a GPU, but for "torchadam", which is what it
#: does off CUDA.
_VARIANTS: dict[str, Run] = {
    "": Run(),
    "_bigclip": Run(_BIGCLIP),
    "_nodropout": Run(("--attention-dropout", "0", "--hidden-dropout", "0")),
    "_dp5_bigclip": Run((*_BIGCLIP, "--global-batch-size", "20"), ranks=5),
    "_tp2dp2_bigclip": Run((*_BIGCLIP, "--tensor-model-parallel-size", "2"), ranks=4),
    "_pp2dp2_bigclip": Run((*_BIGCLIP, *_PIPELINE), ranks=4),
    "_torchadam": Run(("--distopt-decay", "l2")),
    "_200it": Run(("--train-iters", "200", "--lr-warmup-iters", "10")),
}
_FP16 = ("--initial-loss-scale", "4194304", "--loss-scale-window", "5", "--hysteresis", "1")
CASES: dict[str, Run] = {
    **{
        f"{precision}_distopt{variant}": replace(run, precision=precision)
        for precision in ("fp32", "bf16")
        for variant, run in _VARIANTS.items()
    },
    "fp32_distopt_noclip": Run(("--clip-grad", "0")),
    "fp16_distopt": Run(_FP16, precision="fp16"),
}


@pytest.mark.parametrize("name", CASES)
def test_megatron_deepspeed_when_trained_with_ours_then_the_curves_are_its_own(
    name: str, train: Train, record_property: Callable[[str, object], None]
) -> None:
    run = CASES[name]
    wanted = _read(_golden(f"mds/{name}.json"))
    bound = _bound_of(run.precision, iterations=200 if name.endswith("200it") else 20)
    _check(train(run), wanted, bound, name, record_property)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatron_deepspeed_when_deepspeed_launches_it_then_bits_are_as_under_torchrun(
    precision: str, train: Train
) -> None:
    torchrun = CASES[f"{precision}_distopt_bigclip"]
    first, second = train(torchrun), train(replace(torchrun, launcher="deepspeed"))
    assert (first.losses, first.norms, first.params) == (second.losses, second.norms, second.params)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatron_deepspeed_when_its_own_optimizer_has_the_same_kernels_then_bit_for_bit_equal(
    precision: str, train: Train
) -> None:
    """Nothing is scaled at this clip, and torch's for-each AdamW is what the fork's optimizer is
    given here."""
    theirs = train(Run(_BIGCLIP, precision, optimizer="theirs"))
    ours = train(Run((*_BIGCLIP, "--distopt-adam", "torch_foreach"), precision))
    assert len(ours.losses) == 20
    assert ours.losses == theirs.losses
    assert ours.params == theirs.params


_L2 = ("--distopt-decay", "l2")
#: By the golden checkpoint, which the fork's own optimizer wrote at iteration 10: how ours goes on
#: from it.
RESUMED: dict[str, Run] = {
    "mds_distopt_fp32": Run(),
    "mds_distopt_bf16": Run(precision="bf16"),
    "mds_distopt_bf16_dp5": Run(("--global-batch-size", "20"), precision="bf16", ranks=5),
    "mds_plain_fp32": Run(),
    "mds_plain_bf16": Run(precision="bf16"),
    "mds_distopt_fp32_torchadam": Run((*_L2, "--distopt-resume-step", "10")),
}


def _loading(run: Run, checkpoint: Path) -> Run:
    return replace(run, words=(*run.words, "--load", str(checkpoint)))


@pytest.mark.parametrize("name", RESUMED)
def test_megatron_deepspeed_when_its_own_checkpoint_is_resumed_then_goes_on_as_it_would(
    name: str, train: Train, record_property: Callable[[str, object], None]
) -> None:
    found = train(_loading(RESUMED[name], _golden(f"checkpoints/{name}")))
    wanted = _read(_golden(f"checkpoints/{name}.resumed.json"))
    assert min(found.losses) == 11
    _check(found, wanted, _bound_of(RESUMED[name].precision), f"{name} resumed", record_property)


def test_megatron_deepspeed_when_resumed_on_more_ranks_then_only_dropout_differs(
    train: Train, record_property: Callable[[str, object], None]
) -> None:
    """Other ranks draw other dropout masks. What masks can do to a curve is measured by leaving
    them out."""
    with_masks = _read(_golden("mds/bf16_distopt.json"))
    without = _read(_golden("mds/bf16_distopt_nodropout.json"))
    found = train(_loading(Run(precision="bf16", ranks=4), _golden("checkpoints/mds_distopt_bf16")))
    wanted = _read(_golden("checkpoints/mds_distopt_bf16.resumed.json"))
    _check(
        found,
        wanted,
        _distance(with_masks, without),
        "mds_distopt_bf16 resumed on 4 ranks",
        record_property,
    )


def _keep_iteration_10(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "iter_0000020")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("10")


@pytest.mark.parametrize(
    ("optimizer", "step"), [("theirs", ("--distopt-resume-step", "10")), ("ours", ())]
)
def test_megatron_deepspeed_when_resumed_on_more_ranks_without_dropout_then_goes_on_as_it_would(
    optimizer: str,
    step: tuple[str, ...],
    train: Train,
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The same batch on twice the ranks: the sums of gradients have another order, nothing else
    differs.

    Torch's AdamW stands in for apex's in the fork's own, so its file does not say the step.
    """
    calm, checkpoint = (
        ("--attention-dropout", "0", "--hidden-dropout", "0"),
        folder / f"{optimizer}_calm",
    )
    whole = train(
        Run((*calm, "--save", str(checkpoint), "--save-interval", "10"), optimizer=optimizer)
    )
    _keep_iteration_10(checkpoint)
    rest = train(_loading(Run((*calm, *step), ranks=4), checkpoint))
    assert min(rest.losses) == 11
    since = replace(
        whole,
        losses={each: whole.losses[each] for each in rest.losses},
        scales={each: whole.scales[each] for each in rest.losses},
    )
    what = f"{optimizer}, fp32, resumed on 4 ranks, no dropout"
    _check(rest, since, _bound_of("fp32"), what, record_property)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatron_deepspeed_when_our_checkpoint_is_resumed_then_bit_for_bit_equal(
    precision: str, train: Train, folder: Path
) -> None:
    checkpoint = folder / f"ours_{precision}"
    whole = train(Run(("--save", str(checkpoint), "--save-interval", "10"), precision))
    _keep_iteration_10(checkpoint)
    rest = train(_loading(Run(precision=precision), checkpoint))
    assert list(rest.losses) == list(range(11, 21))
    assert rest.losses.items() <= whole.losses.items()
    assert rest.norms.items() <= whole.norms.items()
    assert rest.params == whole.params


def test_megatron_deepspeed_when_a_checkpoint_does_not_say_the_step_then_refused(
    start: Callable[[Run], Curves | str],
) -> None:
    found = start(_loading(Run(_L2), _golden("checkpoints/mds_distopt_fp32_torchadam")))
    assert isinstance(found, str), "it trained"
    assert_mentions(
        found,
        "megatron_distopt.errors.CheckpointError",
        "no update count",
        "--distopt-resume-step N",
    )


_BUCKETS = (
    "--distopt-adam",
    "torch_foreach",
    "--distopt-bucket-size",
    "30000",
    "--global-batch-size",
    "16",
)
_AFTER = ("--distopt-overlap-grad-reduce", "no")
_OVERLAPPED = ("--distopt-overlap-grad-reduce", "yes", "--distopt-overlap-param-gather")
OVERLAPPED: dict[str, Run] = {
    "dp2": Run(_BUCKETS, precision="bf16"),
    "dp2 fp16": Run((*_BUCKETS, *_FP16), precision="fp16"),
    "pp2": Run((*_BUCKETS, *_PIPELINE), ranks=4),
    "tp2": Run((*_BUCKETS, "--tensor-model-parallel-size", "2"), ranks=4, precision="bf16"),
    "interleaved pipeline": Run(
        (
            *_BUCKETS,
            *(
                "--pipeline-model-parallel-size",
                "4",
                "--num-layers-per-virtual-pipeline-stage",
                "1",
            ),
            *(
                "--num-layers",
                "8",
                "--expert-interval",
                "9",
                "--global-batch-size",
                "32",
                "--train-iters",
                "5",
            ),
        ),
        ranks=8,
        precision="bf16",
    ),
    "recomputed": Run(
        (*_BUCKETS, "--recompute-granularity", "full", "--recompute-method", "uniform")
    ),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_megatron_deepspeed_when_communication_is_overlapped_then_every_loss_and_norm_is_the_same(
    name: str, train: Train
) -> None:
    run = OVERLAPPED[name]
    after, overlapped = (
        train(replace(run, words=(*run.words, *words))) for words in (_AFTER, _OVERLAPPED)
    )
    assert (after.losses, after.norms, after.scales) == (
        overlapped.losses,
        overlapped.norms,
        overlapped.scales,
    )
    assert (
        "overlap    grads overlapped with backward, params overlapped with the next forward"
        in overlapped.output
    )
