"""Decoders of Megatron-LM with SwiGLU, RMS norms, rotary positions, grouped queries and more become ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.arguments import config_from_values
from megatron.checkpoint.huggingface.config import config_to_huggingface, model_flags
from megatron.checkpoint.legacy.convert import ImportOptions, import_checkpoint
from megatron.checkpoint.legacy.weights import RowLayout, merge_slices
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.registry import build_model
from megatron.ops.positions import Rotary, apply_rotary, rotary_cos_sin
from tests.checkpoint.legacy.decoder_files import Tensors, write_decoder

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 18, "num_attention_heads": 6, "kv_hidden_size": 10, "ff_hidden_size": 14,
    "max_position_embeddings": 8, "vocab_size": 40, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "layernorm_epsilon": 1e-6,
}  # fmt: skip
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu", "num_query_groups": 2,
    "untie_embeddings": True,
}  # fmt: skip
MEGATRON_LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "group_query_attention": True,
    "num_query_groups": 2, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "LLaMA": (LLAMA, MEGATRON_LLAMA, "old"),
    "LLaMA 3 of Megatron-Core": (
        {
            **LLAMA, "rotary_base": 500.0, "rotary_scaling": "llama3", "rotary_scaling_factor": 4.0,
            "add_qkv_bias": True,
        },
        {
            **MEGATRON_LLAMA, "rotary_base": 500, "use_rope_scaling": True, "rope_scaling_factor": 4.0,
            "add_qkv_bias": True,
        },
        "core",
    ),
    "Qwen 3 of Transformer Engine": (
        {
            **LLAMA, "qk_norm": "head", "window_size": 4, "window_attn_skip_freq": "[1,0]", "untie_embeddings": False,
            "no_rope_freq": "[1,0]",
        },
        {
            **MEGATRON_LLAMA, "qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": [1, 0],
            "no_rope_freq": [1, 0],
        },
        "engine",
    ),
    "Nemotron": (
        {
            "position_embedding_type": "rope", "layernorm_1p": True, "activation": "squared-relu",
            "rotary_percent": 0.6, "hidden_bias": True, "rotary_scaling": "linear", "rotary_scaling_factor": 2.0,
        },
        {
            "position_embedding_type": "rope", "apply_layernorm_1p": True, "squared_relu": True, "rotary_percent": 0.6,
            "rotary_seq_len_interpolation_factor": 2,
        },
        "old",
    ),
    "Megatron-DeepSpeed": (
        {**LLAMA, "rotary_base": 800.0, "no_rope_freq": "2"},
        {
            "no_rope_freq": 2, "swiglu": True, "normalization": "rmsnorm", "use_rotary_position_embeddings": True,
            "num_experts": [1], "num_key_value_heads": 2, "rotary_position_embeddings_theta": 800,
        },
        "old",
    ),
}  # fmt: skip
"""Ours, their settings, their names."""


def make_model(values: dict[str, Any]) -> tuple[Config, Tensors]:
    torch.manual_seed(3)
    config = config_from_values({**SIZES, **values}, family="gpt2")
    model = build_model(config, ParallelContext())
    return config, {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}


def import_weights(folder: Path, output: Path, **options: Any) -> tuple[Tensors, Config]:
    _, config, _ = import_checkpoint(folder, output, ImportOptions(**options))
    return read_weights(open_folder(output)), config


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("decoder", DECODERS)
def test_imported_decoder_equals_source_in_any_layout(
    decoder: str, tensor: int, interleaved: bool, tmp_path: Path
) -> None:
    values, settings, scheme = DECODERS[decoder]
    config, weights = make_model(values)
    rotary_size = int(10 * values.get("rotary_percent", 1.0)) if interleaved else 0
    megatron_settings = {**settings, "rotary_interleaved": interleaved}
    folder = write_decoder(
        tmp_path / "theirs", weights, config, megatron_settings, scheme=scheme, tensor=tensor, rotary_size=rotary_size
    )
    loaded, loaded_config = import_weights(folder, tmp_path / "run")
    assert loaded_config.model == config.model
    assert sorted(loaded) == sorted(weights)
    assert all(loaded[name].equal(weights[name]) for name in weights)
    parsed = parse([*model_flags(loaded_config), "--data-path", "none", "--seq-length", "8"], world_size=1)
    assert parsed.identity() == config.identity()


def test_imported_llama_is_exported_as_llama(tmp_path: Path) -> None:
    config, weights = make_model(LLAMA)
    folder = write_decoder(tmp_path / "theirs", weights, config, MEGATRON_LLAMA, scheme="old")
    _, loaded_config = import_weights(folder, tmp_path / "run")
    assert config_to_huggingface(loaded_config, "float32")["model_type"] == "llama"


def test_interleaved_rotary_rows_give_same_scores_as_half_rows() -> None:
    """By the formula of ``--rotary-interleaved``: numbers 2 i and 2 i + 1 turn by the angle of pair i."""
    heads, d, h, s = 3, 8, 5, 6
    rng = torch.Generator().manual_seed(0)
    interleaved = torch.randn(heads * 3 * d, h, generator=rng, dtype=torch.float64)
    x = torch.randn(s, h, generator=rng, dtype=torch.float64)
    layout = RowLayout(order="heads-3-d", num_heads=heads, num_groups=heads, num_interleaved=d)
    reordered, _ = merge_slices("layers.0.attention.query_key_value.weight", [interleaved], layout)
    rotary = Rotary(head_size=d)
    angles = torch.arange(s, dtype=torch.float64)[:, None] * torch.tensor(rotary.frequencies(), dtype=torch.float64)

    def rotate_neighbours(rows: torch.Tensor) -> torch.Tensor:
        even, odd = (x @ rows.T)[:, ::2], (x @ rows.T)[:, 1::2]  # [s, d/2]
        pairs = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
        return torch.stack(pairs, dim=-1).flatten(1)

    def rotate_halves(rows: torch.Tensor) -> torch.Tensor:
        projected = (x @ rows.T)[None, None]  # [1, 1, s, d]
        return apply_rotary(projected, *rotary_cos_sin(rotary, projected))[0, 0]

    for head in range(heads):
        offset = head * 3 * d
        expected = (
            rotate_neighbours(interleaved[offset : offset + d])
            @ rotate_neighbours(interleaved[offset + d : offset + 2 * d]).T
        )
        scores = rotate_halves(reordered[offset : offset + d]) @ rotate_halves(reordered[offset + d : offset + 2 * d]).T
        assert (scores - expected).abs().max() < 1e-12
        assert reordered[offset + 2 * d : offset + 3 * d].equal(interleaved[offset + 2 * d : offset + 3 * d]), (
            "values do not turn"
        )


def test_first_half_of_rank_rows_is_gate() -> None:
    """By the formula of ``--swiglu``, on each rank by itself."""
    config, weights = make_model(LLAMA)
    model = build_model(config, ParallelContext()).double()
    mlp = model.layers[0].mlp
    slices = [torch.randn(14, 18, dtype=torch.float64) for _ in range(2)]  # of 2 ranks: 7 of the gate, 7 behind it
    layout = RowLayout(order="heads-3-d", num_heads=6, num_groups=2, is_gated=True)
    up, _ = merge_slices("layers.0.mlp.up.weight", slices, layout)
    mlp.up.weight.data.copy_(up)
    torch.nn.init.normal_(mlp.down.weight)
    x = torch.randn(3, 1, 18, dtype=torch.float64)
    products = [x @ weight_slice.T for weight_slice in slices]
    inner = torch.cat([F.silu(product[..., :7]) * product[..., 7:] for product in products], dim=-1)
    assert (mlp(x) - inner @ mlp.down.weight.T).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quick_geglu": True}, "a gated quick GELU"),
        ({"multi_latent_attention": True}, "latent attention"),
        ({"num_experts": 8}, "experts"),
        ({"position_embedding_type": "mrope"}, "positions of type mrope"),
        ({"position_embedding_type": "yarn"}, "positions of type yarn"),
        ({"softmax_type": "learnable"}, "a softmax of type learnable"),
        ({"window_size": (4, 4)}, "must end at the current token"),
        ({"normalization": "CRMSNorm"}, "CRMSNorm instead of LayerNorm"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, weights = make_model(LLAMA)
    folder = write_decoder(tmp_path / "theirs", weights, config, {**MEGATRON_LLAMA, **settings}, scheme="old")
    with pytest.raises(CheckpointError, match=message):
        import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_query_groups_require_heads_3_d_order(tmp_path: Path) -> None:
    config, weights = make_model(LLAMA)
    folder = write_decoder(tmp_path / "theirs", weights, config, MEGATRON_LLAMA, scheme="old")
    with pytest.raises(CheckpointError, match="require --qkv-order heads-3-d, because rows are stored by group"):
        import_weights(folder, tmp_path / "run", qkv_order="3-heads-d")
