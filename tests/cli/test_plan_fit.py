"""`plan --memory`: which forms and places of the state fit, in which order, and what a step with them costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron_distopt.cli.plan_choice import ChoicePlan, StagePlan, plan_choice
from megatron_distopt.cli.plan_fit import Candidates, Change, Fit, fits_of
from megatron_distopt.cli.plan_model import Choice, GptSizes, ParallelSizes
from megatron_distopt.cli.plan_times import Assumed, Machine, TimelineLane, times_of, update_times_of
from tests.support.plan_command import BUCKET, GPT, SIZES, Output, document, refused, run
from tests.support.refusals import Said

LARGE = GptSizes(layers=8, hidden=512, vocab=4096, seq=64, is_tied=False)
BUCKETS = 500_000
CHOICE = Choice(ParallelSizes(dp=4), bucket_size=BUCKETS)


def planned(**changes: Any) -> ChoicePlan:
    return plan_choice(LARGE, replace(CHOICE, **changes))


def listed(
    plans: list[ChoicePlan], nbytes: float, tried: Candidates | None = None, host_nbytes: int | None = None
) -> list[Fit]:
    machine = Machine(memory_nbytes=round(nbytes), host_nbytes=host_nbytes, ranks_per_node=4)
    return fits_of(plans, tried or Candidates(), Assumed(1e9, machine=machine))


def forms(fit: Fit) -> tuple[str, str, bool]:
    choice = fit.plan.choice
    return choice.main_params_dtype, choice.exp_avg_dtype, choice.offload_fraction > 0


def without_state() -> int:
    """Bytes of a device that holds no state at all."""
    return planned(offload_fraction=1.0).peak_nbytes


def test_fits_when_all_do_then_what_changes_least_is_first_and_nothing_is_on_the_host() -> None:
    fits = listed([planned()], 1 << 40)
    assert [forms(fit) for fit in fits] == [
        ("float32", "float32", False),
        ("remainder", "float32", False),
        ("float32", "bfloat16", False),
        ("remainder", "bfloat16", False),
        ("float32", "int8", False),
        ("remainder", "int8", False),
        ("bfloat16", "float32", False),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "int8", False),
    ]
    assert all(fit.lacking_nbytes == 0 for fit in fits)


def test_fits_when_memory_is_short_then_remainder_then_host_then_rounded_moments() -> None:
    """A remainder has the bits of fp32, state on the host too where the kernels agree; moments that are rounded not."""
    numel = planned().fullest.numel / 4
    fits = [fit for fit in listed([planned()], without_state() + 10.5 * numel) if not fit.lacking_nbytes]
    assert [forms(fit) for fit in fits[:3]] == [
        ("remainder", "float32", False),
        ("float32", "float32", True),
        ("float32", "bfloat16", False),
    ]
    assert [fit.change for fit in fits[:3]] == [Change.SAME_BITS, Change.PLACE, Change.MOMENTS]
    assert fits[0].options == "--distopt-main-params-dtype remainder"


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.9])
@pytest.mark.parametrize("bucket_size", [BUCKETS, 10 * BUCKETS, None])
def test_fits_when_some_state_has_to_go_to_the_host_then_no_bucket_more_than_needed(
    share: float, bucket_size: int | None
) -> None:
    plan = planned(bucket_size=bucket_size)
    whole, nothing = plan.peak_nbytes, plan.with_state(offload_fraction=1.0).peak_nbytes
    only_fp32 = Candidates(["float32"], ["float32"], ["float32"])
    (fit,) = listed([plan], nothing + share * (whole - nothing), only_fp32)
    fraction = fit.plan.choice.offload_fraction
    less = [plan.with_state(offload_fraction=hundredth / 100) for hundredth in range(round(100 * fraction))]
    assert fit.left_nbytes >= 0
    assert all(replace(fit, plan=each).left_nbytes < 0 or each.peak_nbytes == fit.plan.peak_nbytes for each in less)
    more = plan.with_state(offload_fraction=min(fraction + 0.01, 1.0))
    assert fraction == 1.0 or more.peak_nbytes < fit.plan.peak_nbytes  # the fraction is next to what is on the host


def test_fits_when_params_and_grads_alone_are_too_much_then_none_and_the_text_says_so(capsys: Output) -> None:
    assert all(fit.lacking_nbytes for fit in listed([planned()], without_state() - 1))
    status, lines, _ = run(capsys, *SIZES, "--dp", 2, "--memory", 0.0001)
    text = "\n".join(lines)
    assert status == 0
    assert "nothing fits into" in text
    assert "9 combinations, of which the nearest lacks" in text
    assert "params and grads alone take" in text and "--tp" in text and "--grad-dtype param" in text
    _, lines, _ = run(capsys, *SIZES, "--dp", 2, "--memory", 0.0001, "--grad-dtype", "param")
    assert "--grad-dtype param" not in "\n".join(lines)


def test_fits_when_only_the_state_is_too_much_then_more_data_parallel_ranks_are_proposed(capsys: Output) -> None:
    words = (*SIZES, "--dp", 1, "--dtype", "fp32")  # whose state stays on the device
    (fit, *_) = document(capsys, *words, "--memory", 1)["fits"]
    held = (fit["device_peak_nbytes"] - 1000) / 2**30
    _, lines, _ = run(capsys, *words, "--memory", held, "--exp-avg-dtype", "float32", "--exp-avg-sq-dtype", "float32")
    assert "write a larger --dp" in "\n".join(lines)


def test_fits_when_the_host_is_too_small_then_left_out_with_what_it_lacks() -> None:
    state = planned().peak_nbytes - without_state()
    nbytes = without_state() + state / 2
    needed = next(fit for fit in listed([planned()], nbytes) if forms(fit) == ("float32", "float32", True))
    one_less = listed([planned()], nbytes, host_nbytes=needed.host_nbytes - 1)
    lacking = {forms(fit): fit.lacking_nbytes for fit in one_less}
    assert lacking["float32", "float32", True] == 1
    enough = listed([planned()], nbytes, host_nbytes=needed.host_nbytes)
    assert {forms(fit): fit.lacking_nbytes for fit in enough}["float32", "float32", True] == 0


def test_fits_when_forms_and_fractions_are_given_then_those_and_no_others() -> None:
    tried = Candidates(["remainder"], ["int8", "float16"], ["bfloat16"], [0.0, 0.5])
    fits = listed([planned()], 1 << 40, tried)
    found = {(each.plan.choice.exp_avg_dtype, each.plan.choice.offload_fraction) for each in fits}
    assert found == set(itertools.product(("int8", "float16"), (0.0, 0.5)))
    assert {each.plan.choice.exp_avg_sq_dtype for each in fits} == {"bfloat16"}


def test_fits_when_params_are_fp16_or_fp32_then_only_forms_that_training_takes() -> None:
    plans = [planned(dtype=dtype) for dtype in ("fp16", "fp32")]
    found = {(fit.plan.choice.dtype, fit.plan.choice.main_params_dtype) for fit in listed(plans, without_state() / 4)}
    assert found == {("fp16", "float32"), ("fp16", "float16"), ("fp32", "float32")}


def test_fits_when_stages_differ_then_every_stage_has_room() -> None:
    plan = plan_choice(replace(LARGE, positions=0), replace(CHOICE, cut=ParallelSizes(dp=4, pp=4)))
    assert (len(plan.stages), plan.fullest.stage) == (3, 3)
    whole = plan.fullest.footprint.peak_nbytes
    (fit,) = listed([plan], whole - 1, Candidates(["float32"], ["float32"], ["float32"]))
    assert fit.plan.choice.offload_fraction > 0
    assert all(stage.footprint.peak_nbytes < whole for stage in fit.plan.stages)


def test_fits_when_several_sizes_are_compared_then_each_is_there_once(capsys: Output) -> None:
    words = ("--dp", 2, 4, "--memory", 1, "--main-params-dtype", "float32", "remainder")
    found = document(capsys, *SIZES, *words)["fits"]
    assert len(found) == 2 * 2 * 3
    _, lines, _ = run(capsys, *SIZES, *words)
    first = next(number for number, line in enumerate(lines) if line.startswith("fits into 1.0 GiB"))
    assert lines[first + 1].split()[:3] == ["dp", "main", "moments"]  # sizes that are the same in all rows are left out
    assert "nothing" in lines[first + 2]


#: Bytes an element that an update reads and writes, as docs/precision.md counts them.
MOVED = {
    ("float32", "float32"): 30,
    ("remainder", "float32"): 28,
    ("float32", "bfloat16"): 22,
    ("remainder", "bfloat16"): 20,
    ("remainder", "int8"): 16,
    ("bfloat16", "int8"): 12,
}


def moved(plan: StagePlan) -> float:
    shares = [share for each in plan.shares for share in each]
    return sum(share.update_nbytes for share in shares) / sum(share.numel for share in shares)


@pytest.mark.parametrize("pair", MOVED)
def test_update_when_its_bytes_are_counted_then_state_twice_with_gradient_and_param(pair: tuple[str, str]) -> None:
    plan = planned(main_params_dtype=pair[0], exp_avg_dtype=pair[1], exp_avg_sq_dtype=pair[1]).fullest
    assert moved(plan) == pytest.approx(MOVED[pair], abs=0.05)  # a scale for 128 elements, a counter for a flat param


def test_update_when_params_are_fp32_then_they_are_their_own_main_params() -> None:
    assert moved(planned(dtype="fp32").fullest) == pytest.approx(28, abs=0.05)  # grad 4, param 2 * 4, moments 2 * 8


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_update_when_places_work_at_the_same_time_then_it_is_no_shorter_than_any_and_no_longer_than_all(
    fraction: float,
) -> None:
    machine = Machine(device_bytes_per_second=1e9, link_bytes_per_second=1e8, host_bytes_per_second=1e9)
    plan = planned(offload_fraction=fraction).fullest
    update = update_times_of(plan, Assumed(1e9, machine=machine))
    busy = [update.busy_seconds(lane) for lane in TimelineLane]
    assert max(busy) <= update.seconds <= sum(busy)
    assert (busy[-1] > 0) == (fraction > 0)
    for lane in TimelineLane:
        spans = sorted((each.start, each.stop) for each in update.intervals if each.lane is lane)
        assert all(left[1] <= right[0] + 1e-12 for left, right in itertools.pairwise(spans))


def test_update_when_a_bucket_is_on_the_host_then_it_is_updated_after_its_copy_down_and_copied_up_after_that() -> None:
    machine = Machine(link_bytes_per_second=1e8, host_bytes_per_second=1e10)  # so that the host waits for copies
    plan = planned(offload_fraction=0.5).fullest
    update = update_times_of(plan, Assumed(1e9, machine=machine))
    lanes = (TimelineLane.DOWN, TimelineLane.HOST, TimelineLane.UP)
    by_lane = [[each for each in update.intervals if each.lane is lane] for lane in lanes]
    assert len(by_lane[0]) == len(plan.updated_at(is_on_host=True)) > 5
    for down, host, up in zip(*by_lane, strict=True):
        assert down.stop <= host.start < host.stop <= up.start
    assert by_lane[1][1].start > by_lane[1][0].stop


def test_update_when_it_is_on_the_host_then_its_ranks_share_the_memory_of_the_node() -> None:
    plan = planned(offload_fraction=1.0).fullest
    seconds = {
        ranks: update_times_of(plan, Assumed(1e9, machine=Machine(ranks_per_node=ranks))).busy_seconds(
            TimelineLane.HOST
        )
        for ranks in (1, 4, 8)
    }
    assert seconds[4] == pytest.approx(4 * seconds[1])
    assert seconds[8] == seconds[4]  # the run has only four ranks


def test_timeline_when_state_is_on_the_host_then_the_next_forward_waits_for_the_last_param() -> None:
    plan = planned(offload_fraction=0.5).fullest
    times = times_of(plan, Assumed(1e12, backward_seconds=0.1))
    assert times.timeline is not None
    up = max(each.stop for each in times.timeline.intervals if each.lane is TimelineLane.UP)
    gathers = [each.start for each in times.timeline.intervals if each.label.startswith("all-gather")]
    assert min(gathers) == pytest.approx(up)
    assert up - times.update.seconds == pytest.approx(0.1, rel=1e-2)


def test_plan_when_a_fraction_is_given_then_both_places_and_the_node_are_told(capsys: Output) -> None:
    words = ("--layers", 4, "--hidden", 40, "--vocab", 128, "--dp", 16, "--bucket-size", BUCKET)
    (choice,) = document(capsys, *words, "--offload-fraction", 0.5)["choices"]
    (plain,) = document(capsys, *words)["choices"]
    held, without = choice["stages"][0]["bytes"], plain["stages"][0]["bytes"]
    assert held["host_nbytes"] + held["lasting_nbytes"] == without["lasting_nbytes"]
    update = choice["stages"][0]["update"]
    assert (update["down_nbytes"], update["up_nbytes"]) == (4 * update["host_numel"], 2 * update["host_numel"])
    _, lines, _ = run(capsys, *words, "--offload-fraction", 0.5)
    text = "\n".join(lines)
    assert "for 8 ranks; of one rank" in text
    assert "copies down" in text and "copies up" in text


REFUSALS: list[tuple[tuple[object, ...], str]] = [
    (
        ("--offload-fraction", 50),
        Said("Invalid --offload-fraction: 50.0", "Write --offload-fraction 0.5."),
    ),
    (
        ("--offload-fraction", -0.1),
        Said("Invalid --offload-fraction: -0.1", "Write --offload-fraction 0.0."),
    ),
    (
        ("--offload-fraction", 0.5, "--dtype", "fp32"),
        Said("Invalid --offload-fraction: 0.5 for fp32 params", "Write --offload-fraction 0, or --dtype bf16."),
    ),
    (
        ("--offload-fraction", 0.5, "--rank", 0),
        Said("Invalid --rank: 0 with --offload-fraction 0.5", "Leave one of the two out."),
    ),
    (
        ("--reserve", 5),
        Said("Invalid --reserve: 5 GiB of no GiB", "Write --memory GIB, or a smaller reserve."),
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSALS)
def test_plan_when_a_place_cannot_be_then_one_line_says_what_to_write(
    words: tuple[object, ...], text: Said, capsys: Output
) -> None:
    assert refused(capsys, *SIZES, *words) == text


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
def test_plan_when_the_host_is_too_small_then_the_fraction_that_is_proposed_fits(share: float, capsys: Output) -> None:
    words = ("--layers", 4, "--hidden", 40, "--vocab", 128, "--dp", 8, "--bucket-size", BUCKET // 10)
    (choice,) = document(capsys, *words, "--offload-fraction", 1)["choices"]
    held = choice["stages"][0]["bytes"]
    limit = (share * 8 * (held["host_nbytes"] + held["rounded_staging_nbytes"]) + 1) / 2**30
    text = refused(capsys, *words, "--offload-fraction", 1, "--host-memory", limit)
    proposed = float(text.removesuffix(".").rpartition(" ")[2])
    assert run(capsys, *words, "--offload-fraction", proposed, "--host-memory", limit)[0] == 0
    assert "Write --offload-fraction" in refused(
        capsys, *words, "--offload-fraction", proposed + 0.01, "--host-memory", limit
    )


def test_plot_when_state_is_on_the_host_then_its_lanes_are_drawn(tmp_path: Any, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    heights = []
    for fraction in (0.0, 0.5):
        file = tmp_path / f"{fraction}.svg"
        words = ("--dp", 2, "--backward-ms", 1, "--offload-fraction", fraction, "--plot", file)
        assert run(capsys, *SIZES, *words)[0] == 0
        text = file.read_text(encoding="utf-8")
        heights.append(float(text.partition('height="')[2].partition("pt")[0]))
        assert ("copy down" in text) == bool(fraction)
    assert heights[1] > heights[0]


def test_model_when_it_is_that_of_the_other_tests_then_its_buckets_are_several() -> None:
    """Otherwise a fraction would be all or nothing, and the searches above would prove little."""
    assert planned().fullest.num_buckets > 20
    assert plan_choice(GPT, Choice(ParallelSizes(dp=8), bucket_size=BUCKET // 10)).fullest.num_buckets > 10
