"""What `plan` takes from a config: sizes of known models, and what a key that is missing means."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from megatron_distopt.cli.plan_arguments import sizes_in_mapping
from megatron_distopt.cli.plan_choice import plan_choice
from megatron_distopt.cli.plan_model import Choice, GptSizes, ParallelSizes

#: What HuggingFace writes for a model like Llama, whose class unties by default and so has to say it.
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 1024,
}


def test_config_when_it_is_huggingfaces_then_llama_has_the_params_that_it_has() -> None:
    """Llama 3 8B has 8,030,261,248 params (the sum of the shapes that its model card's files hold)."""
    given = {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "attention_bias": False,
        "bos_token_id": 128000,
    }
    assert plan_choice(GptSizes(**sizes_in_mapping(given)), Choice(ParallelSizes(dp=1))).fullest.numel == 8_030_261_248


def test_config_when_it_is_gpt2s_then_it_has_the_params_that_it_has() -> None:
    """GPT-2 has 124,439,808 params with a vocabulary of 50,257, which Megatron pads to 50,304 of 768."""
    given = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    found = plan_choice(GptSizes(**sizes_in_mapping(given)), Choice(ParallelSizes(dp=1))).fullest.numel
    assert found == 124_439_808 + (50304 - 50257) * 768


def test_config_when_it_is_megatrons_arguments_then_switches_are_read() -> None:
    given = {
        "num_layers": 2,
        "hidden_size": 64,
        "padded_vocab_size": 128,
        "untie_embeddings_and_output_weights": True,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "group_query_attention": False,
        "num_query_groups": 1,
        "seq_length": 512,
        "max_position_embeddings": 1024,
        "mtp_num_layers": None,
    }
    gpt = GptSizes(**sizes_in_mapping(given))
    assert asdict(gpt) == asdict(
        GptSizes(
            layers=2,
            hidden=64,
            vocab=128,
            vocab_multiple=0,
            seq=512,
            positions=0,
            is_gated=True,
            is_tied=False,
            has_bias=False,
            is_rms=True,
        )
    )


def test_config_when_it_is_gemmas_which_leaves_the_key_out_then_it_is_tied() -> None:
    """Gemma 2B has 2,506,172,416 params (the sum of the shapes that its model card's files hold), embedding once."""
    given = {
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
    }
    assert plan_choice(GptSizes(**sizes_in_mapping(given)), Choice(ParallelSizes(dp=1))).fullest.numel == 2_506_172_416


@pytest.mark.parametrize(
    ("said", "is_tied"), [({}, True), ({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False)]
)
def test_config_when_huggingface_leaves_the_key_out_then_it_is_tied(said: dict[str, Any], is_tied: bool) -> None:
    assert GptSizes(**sizes_in_mapping({**LLAMA, **said})).is_tied == is_tied


@pytest.mark.parametrize(("said", "seq"), [({}, 2048), ({"seq_length": 4096}, 4096), ({"seq": 512}, 512)])
def test_config_when_it_has_many_positions_then_a_sequence_is_no_longer_for_that(
    said: dict[str, Any], seq: int
) -> None:
    gpt = GptSizes(**sizes_in_mapping({**LLAMA, **said}))
    assert (gpt.seq, gpt.num_positions) == (seq, 0)


@pytest.mark.parametrize("key", ["n_positions", "max_position_embeddings"])
def test_config_when_positions_are_learned_then_the_table_has_as_many_rows_and_a_sequence_2048_tokens(key: str) -> None:
    gpt = GptSizes(**sizes_in_mapping({"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, key: 1024}))
    assert (gpt.num_positions, gpt.seq) == (1024, 2048)
