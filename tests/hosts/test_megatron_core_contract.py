"""What megatron-core's training loop and checkpoint code read off an optimizer, they find on ours.

The facts are collected in one spawn of two ranks, see `contract_facts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.refusals import assert_mentions
from tests.support.spawn import run_ranks

HOST_KEYS = {
    "params",
    "lr",
    "weight_decay",
    "max_lr",
    "min_lr",
    "lr_mult",
    "wd_mult",
    "is_decoupled_lr",
    "is_expert_parallel",
    "default_config",
}


def _collect(rank: int, size: int) -> dict[str, dict[str, Any]]:
    from tests.hosts import contract_facts  # in the rank only: it imports the host

    return {collect.__name__: _facts_of(collect, contract_facts.HostCannot) for collect in contract_facts.ALL}


def _facts_of(collect: Callable[[], dict[str, Any]], lacking: type[Exception]) -> dict[str, Any]:
    try:
        return collect()
    except lacking as reason:
        return {LACKING: str(reason)}


#: In place of facts about something that this version of the host does not have, with the reason.
LACKING = "host lacks it"


class Facts(dict[str, dict[str, Any]]):
    """The facts of one rank; a test of one that the host itself lacks is skipped."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        found = super().__getitem__(name)
        if LACKING in found:
            pytest.skip(found[LACKING])
        return found


@pytest.fixture(scope="module")
def by_rank() -> list[Facts]:
    return [Facts(facts) for facts in run_ranks(_collect, 2, seconds=240)]


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def facts(request: pytest.FixtureRequest, by_rank: list[Facts]) -> Facts:
    return by_rank[request.param]


def test_optimizer_when_the_host_asks_what_it_is_then_it_is_of_the_hosts_classes(facts: dict[str, Any]) -> None:
    assert facts["types"] == {
        "chained is the host's": True,
        "ours is the host's distributed": True,
        "ours is the host's": True,
        "ours is not the host's own": True,
        "optimizers": 1,
        "stubs": (False, False),
        "chunks": True,
        "config": True,
        "inner": True,
        "inner groups": True,
        "inner state": ["exp_avg", "exp_avg_sq", "step"],
        "stats group": 2,
        "tp group": 1,
        "loss scale": 1.0,
        "scaled loss": 3.0,
        "type string": "torch.FloatTensor",  # unmapped: ours compares none
    }


def test_stub_when_no_param_trains_anywhere_then_it_steps_as_the_hosts(facts: dict[str, Any]) -> None:
    ours = facts["optimizer_without_params"]["distopt"]
    assert ours == facts["optimizer_without_params"]["host-distributed"]
    assert (ours["stub"], ours["inner stub"], ours["groups"]) == (True, True, [])


def test_param_groups_when_a_rank_trains_nothing_then_they_have_the_form_of_the_others(
    by_rank: list[dict[str, dict[str, Any]]],
) -> None:
    first, last = (facts["groups_of_a_rank_without_params"] for facts in by_rank)
    assert first["keys"] == last["keys"]
    assert len(first["keys"]) == 2
    assert first["numel"] == [0, 0]
    assert min(last["numel"]) > 0


@pytest.mark.parametrize("optimizer", ["host-distributed", "distopt"])
def test_main_param_when_sharded_then_the_ranks_hold_the_unrounded_param(facts: dict[str, Any], optimizer: str) -> None:
    if optimizer not in facts["main_params"]:
        pytest.skip("this megatron-core has no param.main_param")
    found = facts["main_params"][optimizer]
    assert found["sharded"] == {True}
    assert [str(dtype) for dtype in found["dtypes"]] == ["torch.float32"]
    assert found["whole"]
    assert found["rounds to the model"]
    # 45,280 elements; were they rounded, all would be bf16 values. Some hundred are: biases of gradient zero.
    assert found["is a bf16 value"] < 2000


def test_main_param_when_a_rank_owns_none_then_it_is_none_as_the_hosts(by_rank: list[dict[str, Any]]) -> None:
    owned = [facts["main_params"]["distopt"]["owned"] for facts in by_rank]
    theirs = [
        facts["main_params"].get("host-distributed", {"owned": ours})
        for facts, ours in zip(by_rank, owned, strict=True)
    ]
    assert owned == [each["owned"] for each in theirs]
    assert None in owned[0].values()
    assert any(0 not in (a or 0, b or 0) for a, b in zip(owned[0].values(), owned[1].values(), strict=True))


def test_main_param_when_mutated_then_the_next_model_param_follows(facts: dict[str, Any]) -> None:
    assert facts["main_param_is_mutated"] == {"main": True, "model": True}


def test_param_groups_when_read_then_they_are_live_and_have_the_hosts_keys(facts: dict[str, Any]) -> None:
    found = facts["param_groups"]
    wanted = HOST_KEYS & found["keys of the host"]
    assert len(wanted) >= len(HOST_KEYS) - 1  # "default_config" came in 0.16
    assert all(set(keys) >= wanted for keys in found["keys"])
    assert found["wd_mult"] == [1.0, 0.0]
    assert found["max_lr"] == [3e-3, 3e-3]
    assert found["same objects"]


def test_lr_when_written_into_a_group_then_the_next_update_uses_it(facts: dict[str, Any]) -> None:
    # Norms and biases: two norms and four biases of each of two layers, and the last norm, weight and bias each.
    assert facts["lr_is_written"] == {"still": True, "moved": True, "vectors": 18}


def test_schedule_when_the_hosts_scheduler_writes_it_then_the_curve_is_the_hosts(facts: dict[str, Any]) -> None:
    ours, theirs = facts["host_scheduler"]["distopt"], facts["host_scheduler"]["host-plain"]
    assert ours[-1] < ours[0] - 0.1
    # The tolerance of fp32 in test_megatron_core_parity: an ulp of a loss of 4 at each of five steps.
    assert ours == pytest.approx(theirs, abs=4e-6)


@pytest.mark.parametrize("driver", ["inner step", "in parts", "inner in parts"])
def test_step_when_driven_in_parts_then_every_bit_is_that_of_step(facts: dict[str, Any], driver: str) -> None:
    assert facts["steps_in_parts"][driver] == facts["steps_in_parts"]["step"]
    assert all(success and zeros > 1000 for _, (success, _, zeros) in facts["steps_in_parts"]["step"])


def test_step_when_the_loss_scale_doubles_between_the_parts_then_every_bit_is_that_of_step(
    facts: dict[str, Any],
) -> None:
    assert facts["fp16_steps_in_parts"]["in parts"] == facts["fp16_steps_in_parts"]["step"]


@pytest.mark.parametrize(
    ("run", "tolerance"),
    [
        ("steps_in_parts", 1e-6),  # relative: an ulp or two of fp32 each step, the host sums and clips in fp32
        ("fp16_steps_in_parts", 1e-4),  # the same, and fp16 params that straddle a rounding boundary after it
    ],
)
def test_step_when_the_hosts_own_chain_drives_then_the_curve_is_the_same(
    facts: dict[str, Any], run: str, tolerance: float
) -> None:
    # Zero counts are left out: the host counts the padding between params as well.
    assert len(facts[run]["step"]) == 5
    for ours, chained in zip(facts[run]["step"], facts[run]["host's chain"], strict=True):
        (loss, (success, norm, _)), (other_loss, (other_success, other_norm, _)) = ours, chained
        assert success is other_success is True
        assert math.isclose(loss, other_loss, rel_tol=tolerance)
        assert math.isclose(norm, other_norm, rel_tol=tolerance)


def test_reload_when_the_model_changed_then_the_main_params_follow(facts: dict[str, Any]) -> None:
    assert facts["reloaded_model_params"] == {"kept": True}


def test_reload_when_given_a_state_dict_then_the_main_params_are_as_precise(facts: dict[str, Any]) -> None:
    assert facts["reloaded_main_params"] == {"taken": True}


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_fp16_step_when_one_shard_overflows_then_all_ranks_skip_and_keep_every_bit(
    facts: dict[str, Any], value: str
) -> None:
    assert facts["skipped_step"][value] == {"result": (False, None, None), "changed": [], "scale": 0.5}
    assert facts["skipped_step"]["next step"]


def test_bf16_step_when_one_shard_has_a_nan_then_all_ranks_raise_and_keep_every_bit(facts: dict[str, Any]) -> None:
    found = facts["nonfinite_without_a_scaler"]
    assert "rank 1: decoder." in found["message"]
    assert found["changed"] == []


def test_loss_scale_when_constant_then_the_curve_is_the_one_without(facts: dict[str, Any]) -> None:
    found = facts["constant_loss_scale"]
    assert (found["none scale"], found["none scaled loss"]) == (1.0, 3.0)
    assert (found["constant scale"], found["constant scaled loss"]) == (1024.0, 3072.0)
    # A power of two shifts exponents of bf16 and fp32 and nothing else.
    assert found["constant steps"] == found["none steps"]


def test_param_data_when_trained_then_it_still_lies_in_the_hosts_buffer(facts: dict[str, Any]) -> None:
    assert facts["param_data_lies_in_the_buffer"] == {"in the buffer": True, "params": 28}


def test_get_parameters_when_called_then_it_gives_the_shards_of_this_rank(by_rank: list[dict[str, Any]]) -> None:
    found = [facts["get_parameters"] for facts in by_rank]
    assert all(each["same as groups"] for each in found)
    assert {str(dtype) for each in found for dtype in each["dtypes"]} == {"torch.float32"}
    # Padding between two params may belong to a shard, so the ranks hold at most the buffer.
    assert found[0]["trainable numel"] <= sum(each["numel"] for each in found) <= found[0]["buffer numel"]
    assert max(each["numel"] for each in found) <= found[0]["buffer numel"] // 2


@pytest.mark.parametrize(("case", "keys"), [("bf16", ["optimizer"]), ("fp16", ["grad_scaler", "optimizer"])])
def test_state_dict_when_taken_then_it_has_the_form_of_the_hosts(
    case: str, keys: list[str], facts: dict[str, Any]
) -> None:
    found = facts["state_dict"][case]
    assert found["keys"] == keys
    assert found["in optimizer"] == ["param_groups"]
    wanted = HOST_KEYS & facts["param_groups"]["keys of the host"]
    assert all(found_keys >= wanted - {"params"} for found_keys in found["in groups"])
    assert all("params" not in found_keys for found_keys in found["in groups"])
    assert found["steps"] == [2, 2]


@pytest.mark.parametrize("case", ["bf16", "fp16"])
def test_state_dict_when_loaded_back_then_the_groups_have_its_options(case: str, facts: dict[str, Any]) -> None:
    assert facts["state_dict"][case]["lr"] == [3e-3, 3e-3]


@pytest.mark.parametrize("case", ["plain", "fp16", "overlap"])
def test_folder_when_loaded_into_a_fresh_model_then_every_rank_has_the_saved_params_at_once(
    case: str, facts: dict[str, Any]
) -> None:
    found = facts["state_in_a_fresh_model"][case]
    assert found["params"]
    before, again = found["losses"]
    assert again == before


def test_param_when_frozen_after_it_was_wrapped_then_it_keeps_its_bits_and_the_others_train(
    facts: dict[str, Any],
) -> None:
    after, before = facts["frozen_after_wrapping"]["after"], facts["frozen_after_wrapping"]["before"]
    assert after["frozen"] == [f"0.decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1)]
    assert after["kept"] == after["frozen"]
    assert after["in a run"] == []
    assert {key: before[key] for key in ("frozen", "kept", "in a run")} == {
        key: after[key] for key in ("frozen", "kept", "in a run")
    }
    assert after["losses"][-1] < after["losses"][0] - 0.1
    # The tolerance of fp32 in test_megatron_core_parity: an ulp of a loss of 4 at each step.
    assert after["losses"] == pytest.approx(before["losses"], abs=4e-6)


def test_chain_when_it_has_two_optimizers_then_each_has_a_state_dict_of_its_own(facts: dict[str, Any]) -> None:
    found = facts["chain_of_two"]
    assert (found["optimizers"], found["states"]) == (2, 2)
    assert found["lr"] == {0.25}


@pytest.mark.parametrize("call", ["get_parameter_state_dp_zero", "load_parameter_state_from_dp_zero"])
def test_chain_when_asked_to_gather_its_state_on_one_rank_then_it_refuses(call: str, facts: dict[str, Any]) -> None:
    kind, text = facts["chain_of_two"][call]
    assert kind == "CheckpointError"
    assert_mentions(text, call, "Call save(folder) and load(folder).")


def test_step_when_the_host_keeps_timers_then_it_runs(facts: dict[str, Any]) -> None:
    assert facts["timers"] == {"success": True}


def test_install_when_undone_and_repeated_then_nothing_of_it_is_left_in_the_host(facts: dict[str, Any]) -> None:
    found = facts["installation"]
    for attempt in ("first", "second"):
        assert found[f"{attempt} replaced"]
        assert found[f"{attempt} importer"]
        assert found[f"{attempt} again"]
        assert found[f"{attempt} built"]
        assert found[f"{attempt} left behind"] == []


@pytest.mark.parametrize(
    ("run", "optimizer"),
    [
        ("without the flag", "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"),
        ("switched off", "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"),
    ],
)
def test_host_when_ours_is_not_asked_for_then_it_builds_its_own_classes(
    facts: dict[str, Any], run: str, optimizer: str
) -> None:
    *chains, built = facts["host_classes"][run]
    assert built == optimizer
    assert chains in (["megatron.core.optimizer.optimizer.ChainedOptimizer"], [])
