"""SmolLM3, AFMoE, gpt-oss and MiMo-V2-Flash with Hugging Face's weights: logits, gradients, generation, folders."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, format_of
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.generate import generate_gpt2
from megatron.models.common.huggingface import HFFormat
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface import FORMATS
from megatron.models.registry import build_model
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.extras_models import (
    EXTRA_CASES,
    HUB_CONFIGS,
    disable_upcasts,
    make_extras_model,
    to_extras_file_tensors,
)
from tests.helpers.modern_decoders import FLAGS, SEQ_LENGTH, SLIDING, ModelCase
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

SINGLE_PROCESS_TOLERANCES = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


def random_case(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a type and random sizes for it."""
    rng = random.Random(seed)
    case = rng.choice(("smollm3", "afmoe", "gpt_oss")) if seed < 12 else "mimo_v2_flash"
    num_groups, num_layers = rng.choice([1, 2, 3]), rng.randint(1, 4)
    num_heads = num_groups * rng.choice([1, 2, 3])
    sizes: dict[str, Any] = {
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_groups,
        "head_dim": rng.choice([2, 6, 8, 14]), "hidden_size": num_heads * rng.choice([5, 6]),
        "intermediate_size": rng.choice([7, 30]), "tie_word_embeddings": rng.random() < 0.5,
        "sliding_window": rng.randint(2, SEQ_LENGTH + 2),
        "layer_types": [rng.choice([SLIDING, "full_attention"]) for _ in range(num_layers)],
    }  # fmt: skip
    if case == "smollm3":
        # without rotary positions, the gradient of a bias of keys is 0 but for rounding
        has_biases = sizes["attention_bias"] = sizes["mlp_bias"] = rng.random() < 0.5
        sizes["no_rope_layers"] = [1 if has_biases else rng.randint(0, 1) for _ in range(num_layers)]
    elif case == "afmoe":
        sizes |= {"num_dense_layers": rng.randint(0, num_layers - 1), "moe_intermediate_size": rng.choice([5, 12])}
    elif case == "mimo_v2_flash":
        sizes |= {
            "num_attention_heads": 2 * num_heads, "v_head_dim": rng.choice([1, 6, 15]), "attention_bias": False,
            "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(num_layers - 1)] + ["sparse"],
            "moe_intermediate_size": rng.choice([5, 12]), "head_dim": rng.choice([3, 6, 9]),
            "attention_value_scale": rng.choice([None, 1.7]),
        }  # fmt: skip
    return case, sizes


RANDOM_CASES = {f"random {seed}": random_case(seed) for seed in range(18)}
CASES = {**{name: (name, {}) for name in EXTRA_CASES}, **RANDOM_CASES}


def make_reference(name: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    case, sizes = CASES[name]
    model = make_extras_model(case, **sizes)
    return model, config_from_huggingface(model.config.to_dict())


class OnDisk(HuggingFaceComparison):
    """The same where their gradients are compared as their files have them."""

    def run_huggingface(self, case: str) -> tuple[Any, ...]:
        config, before, logits, loss, *tensors = HuggingFaceComparison.run_huggingface(self, case)
        return config, before, logits, loss, *(to_extras_file_tensors(by_name, CASES[case][0]) for by_name in tensors)


def make_comparison(name: str, tolerances: tuple[float | None, ...] = SINGLE_PROCESS_TOLERANCES) -> OnDisk:
    return OnDisk(accept_model_tensors(CASES[name][0]), {name: "fp64"}, make_reference, disable_upcasts, {
        "fp64": tolerances
    })  # fmt: skip


def accept_model_tensors(case: str) -> HFFormat:
    """Return the format of a type with a ``to_ours`` that accepts the tensors of a model instead of its files."""
    (hf_format,) = (candidate for candidate in FORMATS if case in candidate.model_types)
    return replace(
        hf_format, to_ours=lambda tensors, config: hf_format.to_ours(to_extras_file_tensors(tensors, case), config)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EXTRA_CASES else pytest.mark.slow) for name in CASES]
)
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    make_comparison(name).check(name, 1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.slow) for name in EXTRA_CASES]
)
def test_two_tensor_ranks_match_hugging_face(name: str) -> None:
    make_comparison(name, (1e-12, 1e-12, 1e-11, None)).check(name, 2)


@pytest.mark.parametrize("name", EXTRA_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    config = EXTRA_CASES[name].our_config()
    flags = f"{FLAGS} {EXTRA_CASES[name].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    assert format_of(config).model_types == (name,)


@pytest.mark.parametrize("name", EXTRA_CASES)
def test_model_flag_sets_the_architecture(name: str) -> None:
    """--model has the settings of the class's defaults."""
    sizes = "--num-layers 12 --hidden-size 24 --num-attention-heads 4 --vocab-size 101 --seq-length 12"
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 8" if name == "afmoe" else "--num-experts 4"
    experts += " --window-num-query-groups 2" if name == "mimo_v2_flash" else ""
    flags = f"--model {name} {sizes} {'' if name == 'smollm3' else experts} --data-path none".split()
    model = parse(flags, world_size=1, accepts_model=True).model
    expected = {
        "smollm3": {"no_rope_freq": "4", "rotary_base": 2e6, "untie_embeddings": False},
        "afmoe": {"no_rope_freq": "4", "attention_output_gate": True, "window_attn_skip_freq": "4", "qk_norm": "head"},
        "gpt_oss": {
            "softmax_type": "learnable", "activation": "gated-quick-gelu", "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0, "hidden_bias": True, "rotary_truncate": False, "window_attn_skip_freq": "2",
        },
        "mimo_v2_flash": {
            "softmax_type": "learnable", "sink_layers": "window", "rotary_percent": 0.334, "rotary_local_base": 1e4,
            "attention_value_scale": 0.707, "window_size": 128, "window_attn_skip_freq": "6", "rotary_base": 5e6,
        },
    }[name]  # fmt: skip
    assert {key: getattr(model, key) for key in expected} == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "mimo_v2_flash" else ()) for name in EXTRA_CASES]
)
@torch.no_grad()
def test_greedy_generation_matches_hugging_face(name: str) -> None:
    """Prompts of several lengths, far beyond the window; each of theirs is alone, so that nothing is padded."""
    hf_model = make_extras_model(name, tie_word_embeddings=False).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    our_model.load_state_dict(accept_model_tensors(name).to_ours(hf_model.state_dict(), config), strict=False)
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
    with disable_upcasts():
        expected = [
            hf_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.slow) for name in EXTRA_CASES]
)
def test_folder_round_trip_is_bitwise(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    make_extras_model(name, torch.float32).save_pretrained(tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))
    theirs, back = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back"))
    assert (theirs["model_type"], theirs["architectures"]) == (back["model_type"], back["architectures"])


EXPECTED_FIELDS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_freq": "4", "rotary_base": 5e6, "untie_embeddings": False, "window_size": 0},
    "afmoe": {
        "no_rope_freq": "4", "window_size": 2047, "window_attn_skip_freq": "4", "scale_embeddings": True,
        "moe_layer_freq": "[0,0,1,1,1,1]", "moe_router_topk_scaling_factor": 2.826, "norm_placement": "both",
        "moe_shared_expert_intermediate_size": 8, "attention_output_gate": True,
    },
    "gpt_oss": {
        "softmax_type": "learnable", "window_size": 127, "window_attn_skip_freq": "2", "rotary_truncate": False,
        "rotary_base": 150000.0, "activation_func_clamp_value": 7.0, "moe_ffn_hidden_size": 24, "hidden_bias": True,
    },
    "mimo_v2_flash": {
        "softmax_type": "learnable", "sink_layers": "window", "window_size": 128, "v_head_dim": 128,
        "window_attn_skip_freq": "[0,1,1,1,1,0]", "rotary_base": 5e6, "rotary_local_base": 1e4, "rotary_percent": 0.334,
        "num_query_groups": 2, "window_num_query_groups": 4, "attention_value_scale": 0.707, "layernorm_epsilon": 1e-5,
        "moe_layer_freq": "[0,1,1,1,1,1]", "moe_router_topk_scaling_factor": 1.0, "add_qkv_bias": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_hub_configs_round_trip(name: str) -> None:
    config = config_from_huggingface(HUB_CONFIGS[name])
    assert {key: getattr(config.model, key) for key in EXPECTED_FIELDS[name]} == EXPECTED_FIELDS[name]
    exported = json.loads(json.dumps(config_to_huggingface(config, "bfloat16")))
    assert exported["model_type"] == name
    assert config_from_huggingface(exported).model == config.model


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_transformers_reads_exported_config(name: str) -> None:
    config = config_from_huggingface(HUB_CONFIGS[name])
    case: ModelCase = EXTRA_CASES[name]
    restored = type(case.huggingface_config()).from_dict(config_to_huggingface(config, "float32"))
    assert config_from_huggingface(restored.to_dict()).model == config.model


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers with 2 entries for 6 layers"),
        ("smollm3", {"mlp_bias": True}, "attention_bias False with mlp_bias True"),
        ("afmoe", {"score_func": "softmax", "route_norm": False}, r"score_func 'softmax' .*; route_norm False"),
        ("afmoe", {"num_shared_experts": 0}, "num_shared_experts 0"),
        ("afmoe", {"attention_bias": True}, "attention_bias True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ("gpt_oss", {"attention_bias": False, "swiglu_limit": 0.0}, "attention_bias False .*swiglu_limit 0.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"MXFP4.*Mxfp4Config\(dequantize=True\)"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 2}, r"swa_num_key_value_heads 2 \(supported: 4\)"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True"),
        ("mimo_v2_flash", {"n_shared_experts": 1, "swa_head_dim": 64}, "swa_head_dim 64 .*n_shared_experts 1"),
        ("mimo_v2_flash", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "mimo_v2_flash",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    SLIDING: {"rope_theta": 1e4},
                }
            },
            r"different values of partial_rotary_factor, \[0.334, 0.5\]",
        ),
    ],
)
def test_unsupported_settings_are_rejected(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_from_huggingface({**HUB_CONFIGS[name], **changes})


def test_multi_token_prediction_of_mimo_is_skipped() -> None:
    """As by the class of transformers."""
    (hf_format,) = (candidate for candidate in FORMATS if "mimo_v2_flash" in candidate.model_types)
    config = config_from_huggingface(HUB_CONFIGS["mimo_v2_flash"])
    names = ["model.mtp.layers.0.eh_proj.weight", "model.layers.5.self_attn.attention_sink_bias"]
    assert [hf_format.rename_tensor(name, config) for name in names] == [None, names[1]]


def test_mxfp4_tensors_are_rejected_by_name(convert: ConvertCommand, tmp_path: Path) -> None:
    """Also if config.json does not mention the quantisation."""
    folder = tmp_path / "theirs"
    make_extras_model("gpt_oss", torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[name]
    tensors |= {
        f"{name}_blocks": torch.zeros(4, dtype=torch.uint8),
        f"{name}_scales": torch.zeros(1, dtype=torch.uint8),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, output = convert("import", "--input", folder, "--output", tmp_path / "run")
    assert code != 0 and f"{name}_blocks cannot be read: its weights are quantised to MXFP4" in output
    assert "Mxfp4Config(dequantize=True)" in output


def test_yarn_without_rounding_survives_in_every_type() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    fields = {**HUB_CONFIGS["smollm3"], "model_type": "llama", "rope_scaling": rope}
    config = config_from_huggingface(fields)
    assert not config.model.rotary_truncate
    exported = config_to_huggingface(config, "float32")
    assert exported["rope_scaling"]["truncate"] is False
    assert config_from_huggingface(exported).model == config.model


def test_smollm3_with_rotary_positions_in_all_layers_keeps_its_type() -> None:
    config = config_from_huggingface({**HUB_CONFIGS["smollm3"], "no_rope_layers": [1] * 6})
    assert config.model.no_rope_freq == ""
    fields = config_to_huggingface(config, "float32", "smollm3")
    assert fields["no_rope_layers"] == [1] * 6 and config_from_huggingface(fields).model == config.model


def test_gpt_oss_without_windows_has_the_window_that_the_class_requires() -> None:
    fields = {**HUB_CONFIGS["gpt_oss"], "layer_types": ["full_attention"] * HUB_CONFIGS["gpt_oss"]["num_hidden_layers"]}
    config = config_from_huggingface(fields)
    assert config.model.window_size == 0
    assert config_to_huggingface(config, "float32")["sliding_window"] == 128


def test_gpt_oss_without_scaling_is_not_scaled_by_the_default_of_the_class() -> None:
    config = config_from_huggingface({**HUB_CONFIGS["gpt_oss"], "rope_scaling": None})
    assert config.model.rotary_scaling == "yarn", "as the class, whose default is gpt-oss's own scaling"
    unscaled = replace(config, model=replace(config.model, rotary_scaling="none"))
    exported = json.loads(json.dumps(config_to_huggingface(unscaled, "float32")))
    assert config_from_huggingface(exported).model.rotary_scaling == "none"
    restored = type(EXTRA_CASES["gpt_oss"].huggingface_config()).from_dict(exported)
    assert restored.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_freq": "[1,0,0,0,0,0]"}, "rotary positions must be in the layers with a window only"),
        ({"rotary_interleaved": True}, "--rotary-interleaved must be False"),
        ({"qk_norm_order": "after"}, "--qk-norm-order must be before"),
        ({"v_head_dim": 4}, "--v-head-dim must be 0, got 4"),
        ({"attention_value_scale": 0.5}, "--attention-value-scale must be 1.0"),
        ({"window_num_query_groups": 6}, "--window-num-query-groups must be 0, got 6"),
        ({"moe_use_residual": True}, "no Hugging Face format: residual experts"),
    ],
)
def test_export_rejects_settings_that_afmoe_cannot_express(changes: dict[str, Any], message: str) -> None:
    config = config_from_huggingface(HUB_CONFIGS["afmoe"])
    with pytest.raises(CheckpointError, match=message):
        config_to_huggingface(replace(config, model=replace(config.model, **changes)), "float32", "afmoe")
