"""Main-line Megatron-LM's own `pretrain_gpt.py`, unedited, started by our runner as its users start
it.

The trees are not part of this repository, so the tests need

    MEGATRON_LM_TREES=/path/to/core_v0.12.3:/path/to/core_v0.16.1:/path/to/core_v0.19.0

and are skipped where it is unset. Stand-ins for CUDA are around the tree (tests/support/main_line),
none of them inside. 0.19 imports triton: put a folder that has it into PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.mini_fork import free_port

_ROOT = Path(__file__).parents[2]
_STAND_INS = _ROOT / "tests" / "support" / "main_line"
_TREES = [Path(tree) for tree in os.environ.get("MEGATRON_LM_TREES", "").split(":") if tree]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not _TREES, reason="needs checkouts of Megatron-LM: MEGATRON_LM_TREES unset"
    ),
]

_SECONDS = 400.0
_ITERATIONS, _HALF = 8, 4
_OURS = "--use-distributed-optimizer"
_STOP = ("--save-interval", "100", "--exit-interval", str(_HALF))
#: Megatron-LM 0.12's mock data has tokens up to 4096.
_WORDS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1e9 --adam-beta1 0.9
    --adam-beta2 0.95 --seed 1234 --log-interval 1 --eval-interval 4 --eval-iters 1 --num-workers 0
    --split 90,5,5 --mock-data --tokenizer-type NullTokenizer --vocab-size 4200
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --attention-dropout 0 --hidden-dropout 0 --bf16
""".split()  # noqa: SIM905 - as it is typed


@dataclass(frozen=True)
class Curves:
    """What a run left."""

    losses: Mapping[int, str]  # by iteration, every bit as hexadecimal digits
    params: str  # checksum of the first rank's
    validations: Sequence[str] = field(default=(), compare=False)  # losses, as `losses`

    @classmethod
    def read(cls, path: Path) -> Curves:
        record = json.loads(path.read_text())
        losses = {int(at): loss for at, loss in record["losses"].items()}
        return cls(losses, record["params"], record["validations"])


def _train(tree: Path, curves: Path, *words: str, ranks: int = 2, own: bool = False) -> Curves:
    """Starts the tree's script; `own` leaves its optimizer to the host, which is then helped onto
    the CPU."""
    python_path = os.pathsep.join(
        [str(_STAND_INS), str(tree), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    )
    environment = {
        **os.environ,
        "PYTHONPATH": python_path,
        "CURVES": str(curves),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **({"MEGATRON_DISTOPT": "0", "OWN_OPTIMIZER": "1"} if own else {}),
    }
    torchrun = [
        str(Path(sys.executable).parent / "torchrun"),
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    command = [
        *torchrun,
        "-m",
        "megatron_distopt",
        "pretrain_gpt.py",
        *_WORDS,
        f"--train-iters={_ITERATIONS}",
        *words,
    ]
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return Curves.read(Path(f"{curves}.0"))


@pytest.fixture(scope="module", params=_TREES, ids=lambda tree: tree.name)
def tree(request: pytest.FixtureRequest) -> Path:
    """A checkout."""
    return Path(request.param)


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """A training with our optimizer that was not interrupted."""
    return _train(tree, tmp_path_factory.mktemp("whole") / "curves", _OURS)


def test_losses_when_the_norm_never_scales_then_equal_the_hosts_undistributed(
    tree: Path, whole: Curves, tmp_path: Path
) -> None:
    assert _train(tree, tmp_path / "curves", own=True) == whole


def test_losses_when_the_host_overlaps_then_stay(tree: Path, whole: Curves, tmp_path: Path) -> None:
    overlaps = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000")
    assert _train(tree, tmp_path / "curves", _OURS, *overlaps) == whole


def test_validation_when_of_averages_then_a_decay_of_0_is_without_and_training_stays(
    tree: Path, whole: Curves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT_EMA_EVAL", "yes")
    for decay in ("0", "0.9"):
        monkeypatch.setenv("MEGATRON_DISTOPT_EMA_DECAY", decay)
        averaged = _train(tree, tmp_path / decay, _OURS)
        assert averaged == whole
        assert len(averaged.validations) == len(whole.validations) >= 2
        are_same = [
            one == other for one, other in zip(averaged.validations, whole.validations, strict=True)
        ]
        assert all(are_same) if decay == "0" else not any(are_same)


def _takes_boxes(tree: Path) -> bool:
    """Whether the tree's `dist_checkpointing` takes shards that form no grid, as it does from 0.15
    on."""
    return (
        "axis_fragmentations is not None:"
        in (tree / "megatron/core/dist_checkpointing/mapping.py").read_text()
    )


@pytest.mark.parametrize(
    "words", [(), ("--async-save",), ("--ckpt-format", "torch")], ids=["default", "async", "torch"]
)
def test_resume_when_stopped_halfway_then_goes_on_as_if_never_stopped(
    tree: Path, whole: Curves, words: tuple[str, ...], tmp_path: Path
) -> None:
    save = ("--save", str(tmp_path / "saved"), *_STOP)
    if "torch" not in words and not _takes_boxes(tree):
        with pytest.raises(AssertionError, match="--ckpt-format torch"):
            _train(tree, tmp_path / "first", _OURS, *words, *save)
        return
    _train(tree, tmp_path / "first", _OURS, *words, *save)
    resumed = _train(tree, tmp_path / "second", _OURS, *words, "--load", str(tmp_path / "saved"))
    assert resumed.params == whole.params
    assert resumed.losses == {at: loss for at, loss in whole.losses.items() if at > _HALF}


def test_resume_when_on_one_rank_then_trains_on(tree: Path, whole: Curves, tmp_path: Path) -> None:
    words = () if _takes_boxes(tree) else ("--ckpt-format", "torch")
    _train(tree, tmp_path / "first", _OURS, *words, "--save", str(tmp_path / "saved"), *_STOP)
    alone = _train(
        tree, tmp_path / "second", _OURS, *words, "--load", str(tmp_path / "saved"), ranks=1
    )
    assert len(alone.losses) == _ITERATIONS - _HALF
    for at, loss in alone.losses.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole.losses[at]), rel=1e-4)


def test_resume_when_a_snapshot_is_in_memory_then_as_from_disk(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--attention-dropout",
        "0.1",
        *(() if _takes_boxes(tree) else ("--ckpt-format", "torch")),
    )
    saved, nothing = tmp_path / "saved", ("--load", str(tmp_path / "none"))
    save = ("--save", str(saved), "--save-interval", str(_HALF))
    # the last border is that of iteration 4
    monkeypatch.setenv("MEGATRON_DISTOPT_PROTECT_EVERY", str(_HALF + 1))
    monkeypatch.setenv("MEGATRON_DISTOPT_PROTECT_FOLDER", str(tmp_path / "memory"))
    monkeypatch.setenv("FAILS_AFTER", str(_HALF + 1))
    with pytest.raises(AssertionError, match="RuntimeError: FAILS_AFTER"):
        _train(tree, tmp_path / "first", _OURS, *words, *nothing, *save)
    monkeypatch.delenv("FAILS_AFTER")
    from_memory = _train(tree, tmp_path / "second", _OURS, *words, *nothing)
    (saved / "latest_checkpointed_iteration.txt").write_text(str(_HALF))
    monkeypatch.delenv("MEGATRON_DISTOPT_PROTECT_EVERY")
    assert from_memory == _train(tree, tmp_path / "third", _OURS, *words, "--load", str(saved))
    assert [*from_memory.losses] == [*range(_HALF + 1, _ITERATIONS + 1)]
