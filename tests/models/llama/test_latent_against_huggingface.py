"""DeepSeek-V2 and V3, GLM 4 MoE Lite, Youtu and MiniCPM3 with Hugging Face's weights: logits, loss, all gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, format_of
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.generate import generate_gpt2
from megatron.models.common.huggingface import HFFormat
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface import FORMATS
from megatron.models.registry import build_model
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.expert_models import accept_model_tensors, to_file_tensors
from tests.helpers.latent_models import LATENT_CASES, LATENT_FLAGS, LONGROPE, disable_upcasts, random_latent_case
from tests.helpers.modern_decoders import SEQ_LENGTH, VOCAB, ModelCase
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

RANDOM_MODELS = {f"random {seed}": random_latent_case(seed) for seed in range(16)}
MODELS: dict[str, ModelCase] = {**LATENT_CASES, **RANDOM_MODELS}
QUICK_NAMES = (*LATENT_CASES, "random 0")
SINGLE_PROCESS_TOLERANCES = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


def make_huggingface_model(name: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """Return Hugging Face's model with random weights; routers and expert biases are large enough to matter."""
    model = MODELS[name].huggingface_model(dtype, **overrides)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif tensor_name.endswith("gate.weight"):
                tensor.mul_(5.0)
    return model


def make_reference(name: str) -> tuple[Any, Config]:
    """Return Hugging Face's model and our configuration of it."""
    return make_huggingface_model(name), MODELS[name].our_config()


def hf_format_of(name: str) -> HFFormat:
    """Return the format of the model type of a case."""
    model_type = MODELS[name].huggingface_config().model_type
    (hf_format,) = (candidate for candidate in FORMATS if model_type in candidate.model_types)
    return hf_format


class FileComparison(HuggingFaceComparison):
    """Comparison whose gradients have the names and shapes of tensors in Hugging Face's files."""

    def run_huggingface(self, case: str) -> tuple[Any, ...]:
        config, before, logits, loss, gradients, after = HuggingFaceComparison.run_huggingface(self, case)
        return config, before, logits, loss, to_file_tensors(gradients, case), to_file_tensors(after, case)


def make_comparison(name: str, allowed: tuple[float | None, ...] = SINGLE_PROCESS_TOLERANCES) -> FileComparison:
    hf_format = accept_model_tensors(hf_format_of(name), name)
    return FileComparison(hf_format, {name: "fp64"}, make_reference, disable_upcasts, {"fp64": allowed})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_NAMES else pytest.mark.slow) for name in MODELS]
)
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    make_comparison(name).check(name, 1)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) == ("deepseek_v3", 2) else pytest.mark.slow)
        for name in LATENT_CASES
        for size in ((2,) if "n_routed_experts" in LATENT_CASES[name].settings else (2, 3))
    ],
)
def test_tensor_ranks_match_hugging_face(name: str, size: int) -> None:
    make_comparison(name, (1e-12, 1e-12, 1e-11, None)).check(name, size)


@pytest.mark.parametrize("name", LATENT_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    config = LATENT_CASES[name].our_config()
    flags = f"{LATENT_FLAGS} {LATENT_CASES[name].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu"
    parsed = parse(flags.split(), world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    expected_type = "deepseek_v3" if name == "glm4_moe_lite" else name  # both can express the model
    assert format_of(config).model_types[0] == expected_type


@pytest.mark.parametrize(
    "name", [*LATENT_CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in RANDOM_MODELS)]
)
def test_config_round_trips_through_transformers(name: str) -> None:
    hf_config, config = MODELS[name].huggingface_config(), MODELS[name].our_config()
    exported = json.loads(json.dumps(config_to_huggingface(config, "float32", hf_config.model_type)))
    restored = type(hf_config).from_dict(exported)
    assert config_from_huggingface(exported).model == config.model
    assert config_from_huggingface(restored.to_dict()).model == config.model


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "deepseek_v2" else pytest.mark.slow) for name in LATENT_CASES],
)
def test_folder_round_trip_is_bitwise(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    make_huggingface_model(name, torch.float32).save_pretrained(tmp_path / "theirs")
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[0] == 0
    code, output = convert(
        "export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify", "--model-type", name
    )
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.slow) for name in LATENT_CASES],
)
@torch.no_grad()
def test_greedy_generation_matches_hugging_face(name: str) -> None:
    """Our cache contains latents, and later tokens attend to the latents themselves.

    LongRoPE has short factors here: transformers changes them when a row grows past the original length.
    """
    changes = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 31}} if name == "minicpm3" else {}
    hf_model = make_huggingface_model(name, tie_word_embeddings=False, **changes).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    our_weights = hf_format_of(name).to_ours(to_file_tensors(hf_model.state_dict(), name), config)
    our_model.load_state_dict(our_weights, strict=False)
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
    with disable_upcasts():
        expected = [
            hf_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert all(token < VOCAB for row in expected for token in row)
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected


# Published configurations, in small.

HUB_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 56, "intermediate_size": 144, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 129, "q_lora_rank": 12,
    "kv_lora_rank": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
"""DeepSeek-V3's config.json with smaller sizes."""


def test_deepseek_v3_hub_config_is_read() -> None:
    model = config_from_huggingface(HUB_CONFIG).model
    assert (model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim) == (12, 4, 16)
    assert (model.mscale, model.mscale_all_dim, model.rotary_scaling_factor) == (1.0, 1.0, 40)
    assert (model.moe_router_num_groups, model.moe_router_group_topk, model.num_group_scores) == (4, 2, 2)
    assert model.moe_layer_freq == "[0,0,0,1]" and model.latent_norm_epsilon == 1e-6


def test_kimi_k2_config_is_deepseek_v3() -> None:
    scaling = {**HUB_CONFIG["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}
    kimi = {**HUB_CONFIG, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "rope_scaling": scaling}
    config = config_from_huggingface(kimi)
    assert config.model.moe_router_num_groups == 0 and config.model.rotary_beta_fast == 1.0
    assert config_to_huggingface(config, "bfloat16")["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"index_topk": 2048, "index_n_heads": 64}, "index_topk 2048: sparse attention .*an indexer.*DeepSeek-V3.2"),
        ({"rope_interleave": False}, "rope_interleave False"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"scoring_func": "softmax", "topk_method": "greedy"}, "scoring_func 'softmax' .*topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq 2 \(supported: 1\)"),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse"]},
            "mlp_layer_types with 1 entries for num_hidden",
        ),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["moe"] * 4},
            "mlp_layer_types with moe .supported: sparse",
        ),
        ({"num_key_value_heads": 4}, "--num-query-groups 4 and --num-attention-heads 8"),
        ({"qk_rope_head_dim": 7}, "--qk-pos-emb-head-dim must be even"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_from_huggingface({**HUB_CONFIG, **changes})


def test_experts_per_token_need_not_be_a_multiple_of_the_groups() -> None:
    hf_config = {**HUB_CONFIG, "num_experts_per_tok": 3}  # 2 of 4 groups with 2 experts each
    config = config_from_huggingface(hf_config)
    assert (config.model.moe_router_topk, config.model.num_group_scores) == (3, 2)
    fields = config_to_huggingface(config, "float32")
    assert {key: fields[key] for key in ("n_group", "topk_group", "num_experts_per_tok")} == {
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="the selected groups must have at least --moe-router-topk experts"):
        config_from_huggingface({**HUB_CONFIG, "num_experts_per_tok": 5})


def test_all_unsupported_settings_are_listed_at_once() -> None:
    with pytest.raises(CheckpointError, match="(?s)rope_interleave.*norm_topk_prob.*attention_bias"):
        config_from_huggingface({**HUB_CONFIG, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": 1})
