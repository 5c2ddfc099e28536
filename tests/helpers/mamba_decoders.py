"""Tiny decoders of Hugging Face's classes with Mamba-2 layers, and our flags for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.config import Config
from megatron.models.common.huggingface import HFFormat
from tests.helpers.dense_decoders import RESIDUAL_SCALE, fp64_model
from tests.helpers.modern_decoders import ModelCase

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
_BAMBA = {
    "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
_BAMBA_FLAGS = "--mamba-num-heads 6 --mamba-num-groups 2 --mamba-state-dim 4 --mamba-conv-kernel-dim 3"
_NEMOTRON = {
    "hidden_size": 38, "num_key_value_heads": 2, "mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 4,
    "n_groups": 2, "conv_kernel": 3, "chunk_size": 8, "layer_norm_epsilon": 1e-3, "time_step_min": 0.04,
}  # fmt: skip
_NEMOTRON_FLAGS = (
    f"--hidden-size 38 --num-query-groups 2 {_BAMBA_FLAGS} --mamba-head-dim 5 --activation squared-relu "
    "--position-embedding-type none --mamba-dt-limit-min 0.04"
)
_FALCON = {
    "hidden_size": 38, "num_key_value_heads": 2, **_BAMBA, "mamba_d_ssm": 30, "mamba_d_head": 5,
    "embedding_multiplier": 3.5, "lm_head_multiplier": 0.7, "key_multiplier": 1.3, "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.65,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.4, 0.75], "mlp_multipliers": [1.25, 0.55], **_ROPE,
}  # fmt: skip
_FALCON_FLAGS = (
    f"--hidden-size 38 --num-query-groups 2 {_BAMBA_FLAGS} --mamba-head-dim 5 --rotary-base 100 "
    "--experimental-attention-variant parallel_mamba2 --embedding-multiplier 3.5 --logit-scale 0.7 "
    "--branch-multipliers attention-input=0.9,key=1.3,attention-output=0.6,mamba-input=1.2,mamba-z=0.8,mamba-x=1.1,"
    "mamba-b=0.9,mamba-c=1.4,mamba-dt=0.75,mamba-output=0.65,mlp-gate=1.25,mlp-output=0.55"
)
_GRANITE = {
    "hidden_size": 60, "num_key_value_heads": 2, **_BAMBA, "mamba_d_head": 20, "embedding_multiplier": 3.5,
    "logits_scaling": 7.0, "residual_multiplier": 0.37, "attention_multiplier": 0.21,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_GRANITE_FLAGS = (
    f"--hidden-size 60 --num-query-groups 2 {_BAMBA_FLAGS} --mamba-head-dim 20 --experimental-attention-variant mamba2 "
    f"--linear-attention-freq [1,0,1] --embedding-multiplier 3.5 --logit-scale {1 / 7.0!r} "
    f"--residual-scale {RESIDUAL_SCALE!r} --softmax-scale 0.21"
)
MAMBA_CASES = {
    "mamba2": ModelCase(
        "Mamba2",
        {
            "hidden_size": 36, "num_heads": 6, "head_dim": 12, "state_size": 4, "n_groups": 2, "conv_kernel": 3,
            "chunk_size": 8, "layer_norm_epsilon": 1e-3, "time_step_limit": (0.1, 0.9), "tie_word_embeddings": True,
        },
        f"--hidden-size 36 --kv-channels 12 --ffn-hidden-size 144 --max-position-embeddings {2**20} {_BAMBA_FLAGS} "
        "--mamba-head-dim 12 --hybrid-layer-pattern MMM --position-embedding-type none --mamba-dt-limit-min 0.1 "
        "--mamba-dt-limit-max 0.9 --tie-embeddings-and-output-weights",
    ),
    "nemotron_h": ModelCase(
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        f"{_NEMOTRON_FLAGS} --hybrid-layer-pattern M-*",
    ),
    "falcon_h1": ModelCase(
        "FalconH1",
        {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
        f"{_FALCON_FLAGS} --mamba-norm norm-first",
    ),
    "granitemoehybrid": ModelCase(
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 54},
        f"{_GRANITE_FLAGS} --position-embedding-type none",
    ),
}  # fmt: skip
"""model_type -> a model of the type."""
VARIANT_CASES = {
    "mamba2, biases": ModelCase(
        "Mamba2", {**MAMBA_CASES["mamba2"].settings, "use_bias": True, "use_conv_bias": False, "n_groups": 1}
    ),
    "nemotron_h, experts": ModelCase(
        "NemotronH",
        {
            **_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 14,
            "moe_shared_expert_intermediate_size": 22, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
            "experts_implementation": "eager",
        },
    ),
    "falcon_h1, no norm": ModelCase("FalconH1", {**_FALCON, "mamba_rms_norm": False, "tie_word_embeddings": True}),
    "falcon_h1, gate first": ModelCase(
        "FalconH1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1}
    ),
    "granitemoehybrid, experts": ModelCase(
        "GraniteMoeHybrid",
        {
            **_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 14,
            "shared_intermediate_size": 22, "position_embedding_type": "rope", "experts_implementation": "eager",
            "tie_word_embeddings": True, "mamba_n_groups": 1, **_ROPE,
        },
    ),
}  # fmt: skip
"""Name, which starts with the model_type -> a model with other features."""


def make_huggingface_model(case: ModelCase, **overrides: Any) -> Any:
    """Return Hugging Face's model in fp64; weights and biases of routers are large enough to matter."""
    model = fp64_model(case, **overrides)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif name.endswith(("gate.weight", "router.weight")):
                tensor.mul_(5.0)
    return model


def to_file_tensors(tensors: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Convert the tensors of a Hugging Face model to the names and shapes in its files."""
    if model_type == "granitemoehybrid":
        return {
            name.replace("experts.gate_up_proj", "input_linear.weight")
            .replace("experts.down_proj", "output_linear.weight")
            .replace("router.weight", "router.layer.weight"): tensor
            for name, tensor in tensors.items()
        }
    if model_type != "nemotron_h":
        return tensors
    file_tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        file_name = f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name
        if file_name.endswith(("experts.up_proj", "experts.down_proj")):
            stem, _, projection = file_name.rpartition(".")
            file_tensors |= {f"{stem}.{idx}.{projection}.weight": weight for idx, weight in enumerate(tensor)}
        else:
            file_tensors[file_name] = tensor
    return file_tensors


def accept_model_tensors(hf_format: HFFormat) -> HFFormat:
    """Return ``hf_format`` with a ``to_ours`` that accepts the tensors of a Hugging Face model instead of its files."""
    (model_type,) = hf_format.model_types

    def to_ours(hf_tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
        return hf_format.to_ours(to_file_tensors(hf_tensors, model_type), config)

    return replace(hf_format, to_ours=to_ours)
