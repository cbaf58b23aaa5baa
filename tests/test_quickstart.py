"""The quickstart chooses what three minutes allow, all ranks the same, and writes down what it
chose and measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_gpt import choose as choosing
from byte_gpt.choose import Choice, Insisted, Probe, Trial, choose, choose_precision
from byte_gpt.records import Iteration, StepTime
from byte_gpt.settings import Precision, Settings
from hypothesis import given
from hypothesis import strategies as st

from tests.support.facts import Facts, facts_of

BF16, FP32, FP16 = Precision.BF16, Precision.FP32, Precision.FP16
ON_A_CPU = (BF16, FP32)


def trials(bf16: float, fp32: float) -> tuple[Trial, ...]:
    return Trial(BF16, bf16), Trial(FP32, fp32)


NOTHING = Insisted()


def chosen(probe: Probe | None, insisted: Insisted = NOTHING, **more: Any) -> Choice:
    return choose(
        insisted,
        **{"precision": FP32, "trials": trials(0.3, 0.1), "probe": probe, "ranks": 2, **more},
    )


@pytest.mark.parametrize(
    ("bf16", "fp32", "expected"),
    [
        (0.01, 0.03, BF16),  # AMX
        (0.09, 0.03, FP32),  # AVX512 without bf16
        (0.60, 0.02, FP32),  # AVX2: emulated without vectors
        (0.02, 0.02, BF16),  # half the memory at the same speed
    ],
)
def test_precision_when_both_are_measured_then_it_is_the_faster(
    bf16: float, fp32: float, expected: Precision
) -> None:
    assert choose_precision(NOTHING, candidates=ON_A_CPU, trials=trials(bf16, fp32)) is expected


@pytest.mark.parametrize("precision", Precision)
def test_precision_when_it_is_given_then_no_measurement_overrules_it(precision: Precision) -> None:
    insisted = Insisted(precision=precision)
    assert choose_precision(insisted, candidates=ON_A_CPU, trials=trials(1e-6, 1e-6)) is precision
    assert "--precision" in chosen(None, insisted, precision=precision, trials=()).reason


@pytest.mark.parametrize("only", [BF16, FP32])
def test_precision_when_the_device_has_one_then_it_is_that_untried(only: Precision) -> None:
    assert choose_precision(NOTHING, candidates=(only,), trials=()) is only
    has = {BF16: "bf16, which the GPUs have", FP32: "fp32, because a GPU has no bf16"}
    assert has[only] in chosen(None, precision=only, trials=()).reason


@pytest.mark.parametrize(
    ("window_seconds", "other_seconds", "before", "size", "iterations"),
    [
        (0.001, 0.01, 20, 8, 480),  # a GPU, or many cores: no longer than is of use
        (0.1, 0.05, 20, 4, 242),  # two cores with AVX512: half the batch
        (0.2, 0.1, 25, 1, 313),  # two older cores
        (5.0, 1.0, 30, 1, 150),  # hopeless: as few as are of use
        (0.1, 0.05, 300, 1, 150),  # it took longer than that to start
    ],
)
def test_length_when_a_machine_is_so_fast_then_batch_and_iterations_fit(
    window_seconds: float, other_seconds: float, before: float, size: int, iterations: int
) -> None:
    choice = chosen(Probe(2, 2 * window_seconds, other_seconds, before))
    assert (choice.micro_batch_size, choice.iterations) == (size, iterations)


positive = st.floats(1e-5, 10.0)


@given(positive, positive, st.floats(0, 100), st.integers(1, 8))
def test_length_when_more_than_the_fewest_are_chosen_then_three_minutes_are_kept(
    window_seconds: float, other_seconds: float, before: float, ranks: int
) -> None:
    probe = Probe(2, 2 * window_seconds, other_seconds, before)
    choice = chosen(probe, ranks=ranks)
    assert choosing.LEAST_ITERATIONS <= choice.iterations <= choosing.MOST_ITERATIONS
    forwards = Settings.validation_windows / ranks + Settings.sample_nbytes / 2
    training = choice.iterations * (choice.micro_batch_size * window_seconds + other_seconds)
    if choice.iterations > choosing.LEAST_ITERATIONS:
        assert before + training + forwards * window_seconds / 3 <= 180


# On two ranks: a model of two layers, of which a training takes a moment.
TINY = Settings(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    seq_length=16,
    validation_windows=8,
    sample_nbytes=4,
)
FAST, SLOW = 0.01, 0.2  # seconds of an iteration: given, because a busy machine measures anything


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    import megatron_on_cpu
    import quickstart
    from byte_gpt import data, measure

    megatron_on_cpu.install()
    cpu = torch.device("cpu")
    file = folder / f"text{rank}"
    file.write_bytes(b"def spam(eggs):\n    return eggs\n" * 1000)
    text = data.load(file, seq_length=TINY.seq_length)
    found: dict[str, Any] = {}

    def measured(**insisted: Any) -> Choice:
        return measure.measure(
            TINY, Insisted(**insisted), text, cpu, seconds_before=lambda: 40.0 + rank
        )

    iterate = measure.iterate
    measure.MOST_REPEATS = 1

    def slow_in_bf16_on_the_last(trainer: Any, number: int, began: float) -> Iteration:
        is_slow = rank == size - 1 and trainer.settings.precision is BF16
        step = StepTime(SLOW if is_slow else FAST, communication_seconds=0.0, update_seconds=0.0)
        return replace(iterate(trainer, number, began), step=step)

    measure.iterate = slow_in_bf16_on_the_last
    found["bf16 is slow on the last rank"] = measured()
    found["precision is given"] = measured(precision=BF16)
    found["iterations are given"] = measured(iterations=3)
    found["both are given"] = measured(precision=FP16, iterations=3)
    measure.iterate = iterate

    args = {"precision": None, "iterations": 4, "use_distributed_optimizer": True}
    settings = quickstart.settings_of(argparse.Namespace(seed=1, **args))
    settings = quickstart.replace(
        settings, **{name: getattr(TINY, name) for name in vars(TINY) if name != "iterations"}
    )
    for precision, compare in (("fp32", True), ("bf16", False)):
        more = {"precision": precision, "compare": compare, "output": folder / precision}
        namespace = argparse.Namespace(**{**args, **more})
        quickstart.run_all(namespace, settings, text, cpu)
        # curves take longer than a training, and are drawn once
        quickstart.plot.plot = lambda *runs, **about: None
    return found


def skip_where_something_is_missing() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("matplotlib")


facts = facts_of(collect_facts, 2, seconds=300, core=True, before=skip_where_something_is_missing)


def test_measure_when_ranks_differ_in_speed_then_they_choose_the_same_and_measure_what_is_not_given(
    facts: Facts,
) -> None:
    assert facts.by_rank[0] == facts.by_rank[1]
    slow = facts.first["bf16 is slow on the last rank"]
    assert slow.precision is FP32
    assert slow.trials[0].precision is BF16 and slow.trials[0].seconds == SLOW
    assert slow.probe is not None and slow.probe.seconds_before == 41.0  # the last rank's
    in_bf16 = facts.first["precision is given"]
    assert (in_bf16.precision, in_bf16.trials) == (BF16, ())
    assert in_bf16.probe is not None and in_bf16.probe.forward_backward_seconds == SLOW
    short = facts.first["iterations are given"]
    assert (short.precision, short.iterations, short.probe, len(short.trials)) == (FP32, 3, None, 2)
    given = facts.first["both are given"]
    assert (given.precision, given.iterations, given.trials, given.probe) == (FP16, 3, (), None)


@pytest.fixture
def summaries(facts: Facts) -> dict[str, Any]:
    return {
        name: json.loads((facts.folder / name / "summary.json").read_text())
        for name in ("fp32", "bf16")
    }


def test_summary_when_a_run_ends_then_it_says_what_was_chosen_and_measured(
    summaries: dict[str, Any], facts: Facts
) -> None:
    for name, summary in summaries.items():
        choice = summary["choice"]
        assert (choice["precision"], choice["iterations"], choice["trials"]) == (name, 4, [])
        assert "--precision" in choice["reason"] and "--iterations" in choice["reason"]
        assert (
            all(seconds > 0 for seconds in summary["step"].values()) and len(summary["step"]) == 3
        )
        for metrics in ["metrics.jsonl", "metrics-host.jsonl"][: 2 if name == "fp32" else 1]:
            lines = [
                json.loads(line)
                for line in (facts.folder / name / metrics).read_text().splitlines()
            ]
            assert len(lines) == 4
            # Adding iterations up leaves out the scheduler and the report between them.
            assert sum(sum(line["step"].values()) for line in lines) <= lines[-1]["seconds"]
    assert (facts.folder / "fp32" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


NUMEL = (
    256 * 32
    + 2 * (3 * 32 * 32 + 3 * 32 + 32 * 32 + 32 + 2 * 4 * 32 * 32 + 4 * 32 + 32 + 4 * 32)
    + 2 * 32
)


@pytest.mark.parametrize(("name", "param", "state"), [("fp32", 4, 8), ("bf16", 2, 12)])
def test_summary_when_a_run_ends_then_memory_is_that_of_the_model(
    summaries: dict[str, Any], name: str, param: int, state: int
) -> None:
    whole, rank = summaries[name]["memory_undistributed"], summaries[name]["memory_per_rank"]
    assert (whole["param_nbytes"], whole["grad_nbytes"]) == (param * NUMEL, 4 * NUMEL)
    # megatron-core pads each param to 64 elements and the bucket to 128 a rank: a few percent of so
    # small a model.
    assert whole["state_nbytes"] == pytest.approx(state * NUMEL, rel=0.05)
    assert rank["param_nbytes"] == pytest.approx(param * NUMEL, rel=0.05)
    assert rank["grad_nbytes"] == pytest.approx(4 * NUMEL, rel=0.05)
    assert rank["state_nbytes"] == pytest.approx(state * NUMEL / 2, rel=0.05)
