"""Decoders of Megatron-LM with SwiGLU, RMS norms, rotary positions, grouped queries and more become ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.arguments import config_from_values
from megatron.checkpoint.huggingface.config import config_to_huggingface, flags_of
from megatron.checkpoint.legacy.convert import Wishes, import_checkpoint
from megatron.checkpoint.legacy.weights import RowLayout, merged
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.registry import build_model
from megatron.ops.positions import Rotary, rotated, turns
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
OF_LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "group_query_attention": True,
    "num_query_groups": 2, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "LLaMA": (LLAMA, OF_LLAMA, "old"),
    "LLaMA 3 of Megatron-Core": (
        {
            **LLAMA, "rotary_base": 500.0, "rotary_scaling": "llama3", "rotary_scaling_factor": 4.0,
            "add_qkv_bias": True,
        },
        {**OF_LLAMA, "rotary_base": 500, "use_rope_scaling": True, "rope_scaling_factor": 4.0, "add_qkv_bias": True},
        "core",
    ),
    "Qwen 3 of Transformer Engine": (
        {**LLAMA, "qk_norm": "head", "window_size": 4, "window_attn_skip_freq": "[1,0]", "untie_embeddings": False},
        {**OF_LLAMA, "qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": [1, 0]},
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
        {**LLAMA, "rotary_base": 800.0},
        {
            "swiglu": True, "normalization": "rmsnorm", "use_rotary_position_embeddings": True, "num_experts": [1],
            "num_key_value_heads": 2, "rotary_position_embeddings_theta": 800,
        },
        "old",
    ),
}  # fmt: skip
"""Ours, their settings, their names."""


def model_of(values: dict[str, Any]) -> tuple[Config, Tensors]:
    torch.manual_seed(3)
    config = config_from_values({**SIZES, **values}, family="gpt2")
    model = build_model(config, ParallelContext())
    return config, {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}


def imported(folder: Path, output: Path, **wishes: Any) -> tuple[Tensors, Config]:
    _, config, _ = import_checkpoint(folder, output, Wishes(**wishes))
    return read_weights(open_folder(output)), config


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_in_any_layout_is_the_same_model(kind: str, tensor: int, interleaved: bool, tmp_path: Path) -> None:
    values, settings, names = KINDS[kind]
    config, ours = model_of(values)
    turned = int(10 * values.get("rotary_percent", 1.0)) if interleaved else 0
    given = {**settings, "rotary_interleaved": interleaved}
    folder = write_decoder(tmp_path / "theirs", ours, config, given, names=names, tensor=tensor, turned=turned)
    found, back = imported(folder, tmp_path / "run")
    assert back.model == config.model
    assert sorted(found) == sorted(ours)
    assert all(found[name].equal(ours[name]) for name in ours)
    parsed = parse([*flags_of(back), "--data-path", "none", "--seq-length", "8"], world_size=1)
    assert parsed.identity() == config.identity()


def test_an_imported_one_is_exported_as_what_it_is(tmp_path: Path) -> None:
    config, ours = model_of(LLAMA)
    folder = write_decoder(tmp_path / "theirs", ours, config, OF_LLAMA, names="old")
    _, back = imported(folder, tmp_path / "run")
    assert config_to_huggingface(back, "float32")["model_type"] == "llama"


def test_rows_that_turn_neighbours_give_the_scores_of_rows_that_turn_halves() -> None:
    """By the formula of ``--rotary-interleaved``: numbers 2 i and 2 i + 1 turn by the angle of pair i."""
    heads, d, h, s = 3, 8, 5, 6
    rng = torch.Generator().manual_seed(0)
    theirs = torch.randn(heads * 3 * d, h, generator=rng, dtype=torch.float64)
    x = torch.randn(s, h, generator=rng, dtype=torch.float64)
    layout = RowLayout(order="heads-3-d", num_heads=heads, num_groups=heads, interleaved=d)
    ours, _ = merged("layers.0.attention.query_key_value.weight", [theirs], layout)
    rotary = Rotary(head_size=d)
    angles = torch.arange(s, dtype=torch.float64)[:, None] * torch.tensor(rotary.frequencies(), dtype=torch.float64)

    def neighbours(rows: torch.Tensor) -> torch.Tensor:
        even, odd = (x @ rows.T)[:, ::2], (x @ rows.T)[:, 1::2]  # [s, d/2]
        pairs = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
        return torch.stack(pairs, dim=-1).flatten(1)

    def halves(rows: torch.Tensor) -> torch.Tensor:
        made = (x @ rows.T)[None, None]  # [1, 1, s, d]
        return rotated(made, *turns(rotary, made))[0, 0]

    for head in range(heads):
        at = head * 3 * d
        wanted = neighbours(theirs[at : at + d]) @ neighbours(theirs[at + d : at + 2 * d]).T
        found = halves(ours[at : at + d]) @ halves(ours[at + d : at + 2 * d]).T
        assert (found - wanted).abs().max() < 1e-12
        assert ours[at + 2 * d : at + 3 * d].equal(theirs[at + 2 * d : at + 3 * d]), "values do not turn"


def test_the_first_half_of_a_ranks_rows_is_the_gate() -> None:
    """By the formula of ``--swiglu``, on each rank by itself."""
    config, ours = model_of(LLAMA)
    model = build_model(config, ParallelContext()).double()
    mlp = model.layers[0].mlp
    slices = [torch.randn(14, 18, dtype=torch.float64) for _ in range(2)]  # of 2 ranks: 7 of the gate, 7 behind it
    layout = RowLayout(order="heads-3-d", num_heads=6, num_groups=2, is_gated=True)
    up, _ = merged("layers.0.mlp.up.weight", slices, layout)
    mlp.up.weight.data.copy_(up)
    torch.nn.init.normal_(mlp.down.weight)
    x = torch.randn(3, 1, 18, dtype=torch.float64)
    products = [x @ part.T for part in slices]
    inner = torch.cat([F.silu(each[..., :7]) * each[..., 7:] for each in products], dim=-1)
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
        ({"no_rope_freq": 4}, "layers without rotary positions"),
        ({"window_size": (4, 4)}, "must end at the current token"),
        ({"normalization": "CRMSNorm"}, "CRMSNorm instead of LayerNorm"),
    ],
)
def test_what_our_decoders_have_not_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, ours = model_of(LLAMA)
    folder = write_decoder(tmp_path / "theirs", ours, config, {**OF_LLAMA, **settings}, names="old")
    with pytest.raises(CheckpointError, match=message):
        imported(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_groups_go_with_one_order_alone(tmp_path: Path) -> None:
    config, ours = model_of(LLAMA)
    folder = write_decoder(tmp_path / "theirs", ours, config, OF_LLAMA, names="old")
    with pytest.raises(CheckpointError, match="require --qkv-order heads-3-d, because rows are stored by group"):
        imported(folder, tmp_path / "run", qkv_order="3-heads-d")
