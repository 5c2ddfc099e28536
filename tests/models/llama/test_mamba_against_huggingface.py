"""Hugging Face's types with Mamba-2 layers: logits, loss, every gradient, generation, and folders in both directions.

The references are random models of ``transformers``' own classes, which compute in fp64 by their own code.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, format_of
from megatron.checkpoint.huggingface.weights import open_pretrained, weights_from_huggingface
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.generate import generate_gpt2
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface_mamba_types import MAMBA_TYPES
from megatron.models.registry import build_model
from megatron.mpu.shard import Shard
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.dense_decoders import format_of_case
from tests.helpers.mamba_decoders import (
    MAMBA_CASES,
    VARIANT_CASES,
    accept_model_tensors,
    make_huggingface_model,
    to_file_tensors,
)
from tests.helpers.modern_decoders import FLAGS, SEQ_LENGTH, VOCAB
from tests.helpers.upcasts import fp64_instead_of_fp32
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

CASES = {**MAMBA_CASES, **VARIANT_CASES}
TOLERANCES = {1: (1e-12, 1e-13, 1e-12, None), 2: (1e-12, 1e-12, 1e-11, None)}
"""Number of tensor ranks -> bounds for (logits, loss, gradients, weights)."""


def slow_except(names: Any, quick_names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick_names else pytest.mark.slow) for name in names]


def model_type_of(name: str) -> str:
    return name.partition(",")[0]


class FileComparison(HuggingFaceComparison):
    """Comparison whose gradients have the names and shapes of tensors in Hugging Face's files."""

    def run_huggingface(self, case: str) -> tuple[Any, ...]:
        config, before, logits, loss, gradients, after = HuggingFaceComparison.run_huggingface(self, case)
        model_type = model_type_of(case)
        return config, before, logits, loss, to_file_tensors(gradients, model_type), to_file_tensors(after, model_type)


def make_reference(name: str) -> tuple[Any, Config]:
    """Return Hugging Face's model and our configuration for it."""
    return make_huggingface_model(CASES[name]), CASES[name].our_config()


def make_comparison(name: str, num_ranks: int = 1) -> FileComparison:
    return FileComparison(
        accept_model_tensors(format_of_case(CASES[name])),
        {name: "fp64"},
        make_reference,
        fp64_instead_of_fp32,
        {"fp64": TOLERANCES[num_ranks]},
    )


def test_every_type_has_a_case() -> None:
    assert {mamba_type.model_type for mamba_type in MAMBA_TYPES} == set(MAMBA_CASES)
    assert {case.huggingface_config().model_type for case in MAMBA_CASES.values()} == set(MAMBA_CASES)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    make_comparison(name).check(name, 1)


@pytest.mark.parametrize("name", slow_except(CASES, ("falcon_h1, gate first",)))
def test_tensor_ranks_match_hugging_face(name: str) -> None:
    make_comparison(name, 2).check(name, 2)


@pytest.mark.parametrize("name", MAMBA_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    config = CASES[name].our_config()
    flags = f"{FLAGS} {CASES[name].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    assert format_of(config).model_types == (name,)


@pytest.mark.parametrize("name", slow_except(CASES, ("nemotron_h",)))
@torch.no_grad()
def test_greedy_generation_with_cache_matches_hugging_face(name: str) -> None:
    """The time steps have no bounds, because the classes apply bounds to prompts but not to single tokens."""
    no_bounds = {"time_step_limit": (0.0, math.inf), "time_step_min": 1e-30}
    hf_model = make_huggingface_model(CASES[name], tie_word_embeddings=False, **no_bounds).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    weights = accept_model_tensors(format_of_case(CASES[name])).to_ours(hf_model.state_dict(), config)
    our_model.load_state_dict(weights, strict=False)
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7, 9]]
    with fp64_instead_of_fp32():
        expected = [
            hf_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected
    assert all(token < VOCAB for row in expected for token in row)


@pytest.mark.parametrize("name", slow_except(CASES, ("nemotron_h, experts",)))
def test_folder_round_trip_is_bitwise(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    CASES[name].huggingface_model(torch.float32).save_pretrained(tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", slow_except(CASES, ("mamba2", "granitemoehybrid, experts")))
def test_ranks_read_slices_of_a_folder(name: str, tmp_path: Path) -> None:
    """The rows of a projection are in the middle of a tensor of the folder."""
    CASES[name].huggingface_model(torch.float32).save_pretrained(tmp_path)
    with ExitStack() as stack:
        pretrained = open_pretrained(tmp_path, stack)
        weights = weights_from_huggingface(read_tensors(tmp_path), pretrained.config, model_type_of(name))
        assert weights.keys() == pretrained.recipes.keys()
        for weight_name, weight in weights.items():
            start = len(weight) // 3
            shard = Shard(tuple(weight.shape), 0, start, len(weight) - start)
            assert pretrained.read(weight_name, shard).equal(weight[start:]), weight_name


@pytest.mark.parametrize("name", CASES)
def test_config_round_trips_through_transformers(name: str) -> None:
    hf_config, config = CASES[name].huggingface_config(), CASES[name].our_config()
    written = json.loads(json.dumps(config_to_huggingface(config, "float32", hf_config.model_type)))
    assert config_from_huggingface(written).model == config.model
    restored = type(hf_config).from_dict(written)
    assert config_from_huggingface(restored.to_dict()).model == config.model


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias True"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size 8"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias and projectors_bias that differ"),
        ("granitemoehybrid", {"attention_bias": True}, "attention_bias True"),
        ("granitemoehybrid", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function 'layernorm'"),
        ("granitemoehybrid", {"layer_types": ["mamba", "sliding_attention", "mamba"]}, "with 'sliding_attention'"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "layer_types with 2 entries for num_hidden"),
        ("granitemoehybrid", {"mamba_d_head": 10}, "mamba_n_heads x mamba_d_head 6 x 10 .supported: a product of 120"),
        ("falcon_h1", {"mamba_d_head": 4}, "mamba_n_heads x mamba_d_head 6 x 4 .supported: a product of 30"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers with 2 entries .supported: 5"),
        ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp False .supported: True"),
        ("falcon_h1", {"attn_layer_indices": [0]}, "attn_layer_indices"),
        ("mamba2", {"expand": 3}, "num_heads x head_dim 6 x 12 = 72 .supported: expand x hidden_size = 108"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": ""}, "pattern without letters"),
    ],
)
def test_unsupported_settings_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    settings = {**MAMBA_CASES[name].huggingface_config().to_dict(), **changes}
    with pytest.raises(CheckpointError, match=message):
        config_from_huggingface(settings)


@pytest.mark.parametrize(
    "keys",
    [
        {"mamba_n_groups": 3, "mamba_d_conv": 2, "mamba_dt_min": 0.5, "mamba_conv_bias": False},
        {"layers_block_type": None, "hybrid_override_pattern": "M*-M"},
        {"layers_block_type": None, "layer_types": ["mlp", "linear_attention", "mlp", "full_attention"]},
        {"hybrid_override_pattern": "MMMM"},  # the list has precedence
    ],
)
def test_former_keys_of_nemotron_h_are_read_as_by_the_class(keys: dict[str, Any]) -> None:
    hf_config = MAMBA_CASES["nemotron_h"].huggingface_config()
    settings = {**hf_config.to_dict(), **keys}
    expected = type(hf_config).from_dict({key: value for key, value in settings.items() if value is not None})
    assert config_from_huggingface(settings).model == config_from_huggingface(expected.to_dict()).model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_norm_groups": 1}, "--mamba-norm-groups must equal --mamba-num-groups"),
        ({"mamba_norm": "none"}, "--mamba-norm must be group"),
        ({"activation": "gated-gelu"}, "--activation must be gated-silu"),
    ],
)
def test_settings_without_a_type_are_named(fields: dict[str, Any], message: str) -> None:
    config = MAMBA_CASES["granitemoehybrid"].our_config()
    changed = replace(config, model=replace(config.model, **fields))
    with pytest.raises(CheckpointError, match=message):
        config_to_huggingface(changed, "float32", "granitemoehybrid")
