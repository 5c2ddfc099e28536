"""Hugging Face's types with delta-rule layers: logits, loss, every gradient, generation, folders in both directions.

The references are random models of ``transformers``' own classes, which compute in fp64 by their own code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
from megatron.models.llama.huggingface_delta_types import DELTA_TYPES
from megatron.models.registry import build_model
from megatron.mpu.shard import Shard
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.delta_decoders import (
    DELTA_CASES,
    LINEAR,
    VARIANT_CASES,
    accept_model_tensors,
    make_huggingface_model,
    random_delta_case,
    to_file_tensors,
)
from tests.helpers.dense_decoders import format_of_case
from tests.helpers.modern_decoders import FLAGS, FULL, SEQ_LENGTH, VOCAB, ModelCase
from tests.helpers.upcasts import fp64_dtype_literals, fp64_instead_of_fp32
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

CASES = {**DELTA_CASES, **VARIANT_CASES}
TOLERANCES = {1: (1e-12, 1e-13, 1e-12, None), 2: (1e-12, 1e-12, 1e-11, None)}
"""Number of tensor ranks -> bounds for (logits, loss, gradients, weights)."""
FP32_TOLERANCES = (1e-5, 1e-5, None, None)
"""Bounds for classes with parts in fp32: logits, loss; ``test_class_in_fp32_matches_to_rounding`` has the others."""


def slow_except(names: Any, quick_names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick_names else pytest.mark.slow) for name in names]


class FileComparison(HuggingFaceComparison):
    """Comparison whose gradients have the names and shapes of tensors in published files."""

    def run_huggingface(self, case: str) -> tuple[Any, ...]:  # type: ignore[override]
        config, before, logits, loss, gradients, after = HuggingFaceComparison.run_huggingface(self, case)
        model_type = self.hf_format.model_types[0]
        gradients, after = (to_file_tensors(tensors, config, model_type) for tensors in (gradients, after))
        return config, before, logits, loss, gradients, after


def make_comparison(
    case: ModelCase,
    num_ranks: int = 1,
    patch_class: Callable[[], AbstractContextManager[None]] = fp64_instead_of_fp32,
) -> FileComparison:
    """Return the comparison of ``case``, named "case".

    Args:
        patch_class: context in which Hugging Face's class computes. Its parts in fp32 differ by rounding.
    """

    def make_reference(_: str) -> tuple[Any, Config]:
        model = make_huggingface_model(case)
        return model, config_from_huggingface(model.config.to_dict())

    return FileComparison(
        accept_model_tensors(format_of_case(case)),
        {"case": "fp64"},
        make_reference,
        patch_class,
        {"fp64": TOLERANCES[num_ranks] if patch_class is fp64_instead_of_fp32 else FP32_TOLERANCES},
    )


def test_every_type_has_a_case() -> None:
    assert {delta_type.model_type for delta_type in DELTA_TYPES} == set(DELTA_CASES)
    assert {case.huggingface_config().model_type for case in DELTA_CASES.values()} == set(DELTA_CASES)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    make_comparison(CASES[name]).check("case", 1)


@pytest.mark.parametrize("name", slow_except(DELTA_CASES, ("qwen3_5_text",)))
@pytest.mark.parametrize("patch_class", [nullcontext, fp64_dtype_literals])
def test_class_in_fp32_matches_to_rounding(name: str, patch_class: Callable[[], AbstractContextManager[None]]) -> None:
    """The gradients of all weights together agree to 1e-5, and with a recurrence in fp64 the gradient of each weight.

    The class casts the inputs of its recurrence by the literal ``torch.float32``. The gradients of decay rates and
    time-step biases are sums over tokens that cancel to as little as 1e-4 of the norm of all gradients, so rounding in
    the recurrence changes them by up to 2e-4. If the literal is fp64, they agree, although the class still computes
    norms and decays in fp32 (``Tensor.float``).
    """
    comparison = make_comparison(CASES[name], patch_class=patch_class)
    comparison.check("case", 1)
    config, _, _, _, expected, _ = comparison.run_huggingface("case")
    actual = comparison.to_huggingface([rank[2] for rank in comparison.run_all_ranks(1)["case"]], config, expected)
    differences = {name: (actual[name] - expected[name]).norm().item() for name in expected}
    norms = {name: gradient.norm().item() for name, gradient in expected.items()}
    assert math.hypot(*differences.values()) <= 1e-5 * math.hypot(*norms.values())
    tolerance = 1e-3 if patch_class is nullcontext else 1e-5
    for weight, difference in differences.items():
        assert difference <= tolerance * norms[weight], weight


@pytest.mark.parametrize("seed", slow_except(range(20), (0, 1)))
def test_random_models_match_hugging_face(seed: int) -> None:
    make_comparison(random_delta_case(seed)).check("case", 1)


@pytest.mark.parametrize("name", slow_except(CASES, ("qwen3_next",)))
def test_tensor_ranks_match_hugging_face(name: str) -> None:
    if CASES[name].settings.get("linear_num_key_heads", 2) % 2:
        pytest.skip("an odd number of key heads cannot be sharded over two ranks")
    make_comparison(CASES[name], 2).check("case", 2)


@pytest.mark.parametrize("name", DELTA_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    config = CASES[name].our_config()
    flags = f"{FLAGS} {CASES[name].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    if name in ("kimi_linear", "bailing_hybrid"):
        del flags[4:6]  # --kv-channels is the sum of two other sizes
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    assert format_of(config).model_types[0] == name


@pytest.mark.parametrize("name", slow_except(CASES, ("qwen3_next", "kimi_linear")))
@torch.no_grad()
def test_greedy_generation_with_cache_matches_hugging_face(name: str) -> None:
    hf_model = make_huggingface_model(CASES[name], tie_word_embeddings=False).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    weights = accept_model_tensors(format_of_case(CASES[name])).to_ours(hf_model.state_dict(), config)
    our_model.load_state_dict(weights, strict=False)
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7, 9]]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["use_cache"] = FULL in hf_model.config.layer_types  # the cache of transformers needs an attention layer
    with fp64_instead_of_fp32():
        expected = [
            hf_model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected
    assert all(token < VOCAB for row in expected for token in row)


# Folders.


def make_case_of_folder(name: str) -> ModelCase:
    """Return a case whose folder transformers 5 saves correctly.

    It splits the convolution of OLMo Hybrid into three equal parts, so values must have the width of keys.
    """
    case = CASES[name]
    if case.prefix != "OlmoHybrid":
        return case
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 5,
    }
    return replace(case, settings={**case.settings, **heads})


def published_names(tensors: dict[str, torch.Tensor], config: Config, name: str) -> dict[str, torch.Tensor]:
    """Rename the tensors that transformers 5 does not save under their published names."""
    hf_format = format_of(config, name.partition(",")[0])
    return {hf_format.rename_tensor(tensor_name, config) or tensor_name: x for tensor_name, x in tensors.items()}


@pytest.mark.parametrize("name", slow_except(CASES, ("qwen3_next", "kimi_linear")))
def test_folder_round_trip_is_bitwise(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    case = make_case_of_folder(name)
    model = case.huggingface_model(torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    saved = published_names(read_tensors(tmp_path / "theirs"), case.our_config(), name)
    assert are_equal(read_tensors(tmp_path / "back"), saved)


@pytest.mark.parametrize("name", slow_except(CASES, ("qwen3_next", "kimi_linear")))
def test_ranks_read_slices_of_a_folder(name: str, tmp_path: Path) -> None:
    """The rows of a projection are interleaved with others, or in the middle of a tensor, in the folder."""
    make_case_of_folder(name).huggingface_model(torch.float32).save_pretrained(tmp_path)
    with ExitStack() as stack:
        pretrained = open_pretrained(tmp_path, stack)
        weights = weights_from_huggingface(read_tensors(tmp_path), pretrained.config, name.partition(",")[0])
        assert weights.keys() == pretrained.recipes.keys()
        for weight_name, weight in weights.items():
            size = len(weight)
            for start, stop in {(size // 3, size), (min(1, size - 1), size), (size // 2, size // 2 + 1)}:
                shard = Shard(tuple(weight.shape), 0, start, stop - start)
                assert pretrained.read(weight_name, shard).equal(weight[start:stop]), weight_name


@pytest.mark.parametrize("name", CASES)
def test_config_round_trips_through_transformers(name: str) -> None:
    hf_config, config = CASES[name].huggingface_config(), CASES[name].our_config()
    written = json.loads(json.dumps(config_to_huggingface(config, "float32", hf_config.model_type)))
    assert config_from_huggingface(written).model == config.model
    restored = type(hf_config).from_dict(written)
    assert config_from_huggingface(restored.to_dict()).model == config.model


def test_published_keys_of_kimi_linear_are_read() -> None:
    """The folder has the sizes of recurrent layers in a dictionary, which counts layers from 1."""
    settings = {
        **DELTA_CASES["kimi_linear"].huggingface_config().to_dict(), "layer_types": None, "mlp_layer_types": None,
        "first_k_dense_replace": 2,
        "linear_attn_config": {
            "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 6, "num_heads": 3, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    model = config_from_huggingface(settings).model
    assert (model.linear_attention_freq, model.moe_layer_freq) == ("3", "[0,0,1]")
    assert (model.linear_key_head_dim, model.linear_num_value_heads, model.linear_conv_kernel_dim) == (6, 3, 4)


def test_missing_layer_types_are_those_of_the_class() -> None:
    for name, is_attention in (
        ("qwen3_next", (0, 0, 0, 1, 0, 0, 0, 1)),
        ("olmo_hybrid", (0, 0, 0, 1, 0, 0, 0, 1)),
        ("kimi_linear", (0, 0, 0, 0, 1, 0, 0, 0)),
        ("bailing_hybrid", (0, 0, 0, 0, 0, 1, 0, 0)),
    ):
        case = replace(
            DELTA_CASES[name],
            settings={
                **DELTA_CASES[name].settings,
                "layer_types": None,
                "mlp_layer_types": None,
                "mlp_only_layers": [],
            },
        )
        hf_config = case.huggingface_config(num_hidden_layers=8)
        assert [FULL if flag else LINEAR for flag in is_attention] == hf_config.layer_types
        expected = config_from_huggingface(hf_config.to_dict()).model
        settings = {key: value for key, value in hf_config.to_dict().items() if not key.endswith("layer_types")}
        assert config_from_huggingface(settings).model == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_next", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias True"),
        ("qwen3_5_text", {"layer_types": [FULL] * 3}, "layer_types without linear_attention"),
        ("qwen3_5_text", {"layer_types": [LINEAR, "sliding_attention", FULL]}, "layer_types with sliding_attention"),
        ("qwen3_5_moe_text", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("olmo_hybrid", {"layer_types": [LINEAR, FULL]}, "layer_types with 2 entries for num_hidden_layers 3"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 3]}},
            "each layer from 1 to 3 in one of them",
        ),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False"),
        ("olmo_hybrid", {"linear_use_gate": False}, "linear_use_gate False"),
        ("bailing_hybrid", {"score_function": "softmax"}, "score_function 'softmax'"),
    ],
)
def test_unsupported_settings_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    settings = {**DELTA_CASES[name].huggingface_config().to_dict(), **changes}
    with pytest.raises(CheckpointError, match=message):
        config_from_huggingface(settings)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_next", {"linear_allow_neg_eigval": True}, "--linear-allow-neg-eigval must be False"),
        ("qwen3_5_text", {"linear_norm_epsilon": 0.5}, "--linear-norm-epsilon must be 0.001, got 0.5"),
        ("qwen3_5_text", {"attention_output_gate": False}, "--attention-output-gate must be True"),
        ("olmo_hybrid", {"linear_norm_placement": "same"}, "--linear-norm-placement must be before, got same"),
        ("kimi_linear", {"linear_full_rank_gates": True}, "--linear-full-rank-gates must be False"),
        ("kimi_linear", {"experimental_attention_variant": "gated_delta_net"}, "must be kimi_delta"),
    ],
)
def test_settings_without_a_type_are_named(name: str, fields: dict[str, Any], message: str) -> None:
    config = DELTA_CASES[name].our_config()
    changed = replace(config, model=replace(config.model, **fields))
    with pytest.raises(CheckpointError, match=message):
        config_to_huggingface(changed, "float32", name)
