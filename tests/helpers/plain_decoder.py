"""Reference decoder for every feature: plain formulas in fp64, one head and one query at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


def logits_of(
    sizes: Any, w: Weights, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Return the logits [s, b, v] of a decoder of ``sizes`` with the weights ``w``, keyed by their names in the model.

    Shapes:
        tokens, positions, segments [b, s]; positions may or may not restart in each document
    """
    rows = [_row(sizes, w, *row_inputs) for row_inputs in zip(tokens, positions, segments, strict=True)]
    return torch.stack(rows, dim=1)


def _row(sizes: Any, w: Weights, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    x = w["embedding.word.weight"][tokens]  # [s, h]
    if sizes.scale_embeddings:
        x = x * math.sqrt(sizes.hidden_size)
    if sizes.embed_layernorm:
        x = _norm(sizes, w, "embedding.norm", x)
    if sizes.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position.weight"][positions]
    x = x * sizes.embedding_multiplier
    for layer in range(sizes.num_layers):
        x = _layer(sizes, w, layer, x, positions, ids)
    table = w["head.weight" if sizes.untie_embeddings else "embedding.word.weight"]
    base = sizes.dim_model_base or sizes.mup_base_hidden_size or sizes.hidden_size
    logits = _norm(sizes, w, "final_norm", x) @ table.T * (base / sizes.hidden_size)
    return _capped(logits, sizes.final_logit_softcapping)


def _layer(
    sizes: Any, w: Weights, layer: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    prefix = f"layers.{layer}"

    def part(x: torch.Tensor, function: Any, before: str, after: str) -> torch.Tensor:
        normed = _norm(sizes, w, f"{prefix}.{before}", x) if sizes.norm_placement in ("before", "both") else x
        output = function(normed)
        if sizes.norm_placement in ("after", "both"):
            output = _norm(sizes, w, f"{prefix}.{after}", output)
        output = output * (sizes.residual_scale / math.sqrt(sizes.num_layers) if sizes.residual_scale else 1.0)
        return (normed if sizes.apply_residual_connection_post_layernorm else x) + output

    def attend(y: torch.Tensor) -> torch.Tensor:
        return _attention(sizes, w, layer, y, positions, ids)

    x = part(x, attend, "input_norm", "attention_output_norm")
    return part(x, lambda y: _mlp(sizes, w, f"{prefix}.mlp", y), "post_attention_norm", "mlp_output_norm")


def _norm(sizes: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply the norm ``name`` over the last dimension."""
    scale = w[f"{name}.weight"] + (1 if sizes.layernorm_1p else 0)
    if sizes.normalization == "RMSNorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + sizes.layernorm_epsilon) * scale
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + sizes.layernorm_epsilon) * scale
    return normed + w[f"{name}.bias"] if sizes.norm_bias else normed


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    output = x @ w[f"{name}.weight"].T
    return output + w[f"{name}.bias"] if f"{name}.bias" in w else output


def _attention(
    sizes: Any, w: Weights, layer: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    a, g, d, s = (
        sizes.num_attention_heads,
        sizes.num_query_groups or sizes.num_attention_heads,
        sizes.kv_hidden_size,
        len(x),
    )
    prefix = f"layers.{layer}.attention"
    packed = _linear(w, f"{prefix}.query_key_value", x)
    if sizes.clip_qkv:
        packed = packed.clamp(-sizes.clip_qkv, sizes.clip_qkv)
    per_group = a // g
    heads = packed.view(s, g, per_group + 2, d)
    query, key, value = heads[:, :, :per_group].reshape(s, a, d), heads[:, :, per_group], heads[:, :, per_group + 1]
    if sizes.qk_norm == "head":
        query, key = _norm(sizes, w, f"{prefix}.query_norm", query), _norm(sizes, w, f"{prefix}.key_norm", key)
    elif sizes.qk_norm == "all":
        query = _norm(sizes, w, f"{prefix}.query_norm", query.reshape(s, a * d)).view(s, a, d)
        key = _norm(sizes, w, f"{prefix}.key_norm", key.reshape(s, g * d)).view(s, g, d)
    window = sizes.window_size if sizes.window_size and is_windowed(sizes, layer) else 10**9
    if sizes.position_embedding_type == "rope":
        query, key = (_turned(sizes, y, positions, is_local=window < 10**9) for y in (query, key))
    scale = sizes.softmax_scale or d**-0.5
    if sizes.mup_base_head_dim:
        scale = math.sqrt(sizes.mup_base_head_dim) / d
    positions_in_row = torch.arange(s)
    distance = positions_in_row[:, None] - positions_in_row[None, :]
    is_visible = (distance >= 0) & (distance <= window) & (ids[:, None] == ids[None, :])
    outputs = []
    for head in range(a):
        scores = _capped(query[:, head] @ key[:, head // per_group].T * scale, sizes.attn_logit_softcapping)
        if sizes.position_embedding_type == "alibi":
            scores = scores - _slope(head, a, sizes.alibi_bias_max) * distance.double()
        scores = scores.masked_fill(~is_visible, float("-inf"))
        outputs.append(torch.softmax(scores, dim=-1) @ value[:, head // per_group])
    return _linear(w, f"{prefix}.dense", torch.stack(outputs, dim=1).reshape(s, a * d))


def is_windowed(sizes: Any, layer: int) -> bool:
    """Return True if ``layer`` has the window. Supports the patterns in the tests: "", "N" and "[0,1,...]"."""
    text = sizes.window_attn_skip_freq
    if not text:
        return True
    if text.isdecimal():
        return (layer + 1) % int(text) != 0
    return bool([int(entry) for entry in text.strip("[]").split(",")][layer])


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _slope(head: int, heads: int, largest: float) -> float:
    """Return the ALiBi slope; the number of heads must be a power of two."""
    return 2.0 ** (-largest * (head + 1) / heads)


def _turned(sizes: Any, x: torch.Tensor, positions: torch.Tensor, *, is_local: bool) -> torch.Tensor:
    """Rotate the pairs (i, i + r/2) of the first r elements of each head [s, n, d]."""
    size = int(sizes.kv_hidden_size * sizes.rotary_percent)
    local = is_local and sizes.rotary_local_base
    base = sizes.rotary_local_base if local else sizes.rotary_base
    scaling = "none" if local else sizes.rotary_scaling
    rotated = x.clone()
    for pair in range(size // 2):
        speed, factor = _speed(sizes, base ** (-2.0 * pair / size), scaling, pair, size, base)
        angle = positions.double() * speed
        cosine, sine = (factor * angle.cos())[:, None], (factor * angle.sin())[:, None]
        first, second = x[:, :, pair], x[:, :, pair + size // 2]
        rotated[:, :, pair] = first * cosine - second * sine
        rotated[:, :, pair + size // 2] = second * cosine + first * sine
    return rotated


def _speed(sizes: Any, plain: float, kind: str, pair: int, size: int, base: float) -> tuple[float, float]:
    """Return the frequency of a pair, in radians per position, and the factor of its cosine and sine.

    Args:
        plain: frequency without scaling.
        kind: value of ``rotary_scaling``.
    """
    factor, length = sizes.rotary_scaling_factor, sizes.rotary_original_positions
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        wave = 2 * math.pi / plain
        low, high = sizes.rotary_low_frequency_factor, sizes.rotary_high_frequency_factor
        smooth = min(max((length / wave - low) / (high - low), 0.0), 1.0)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if kind == "yarn":
        bounds = [
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (sizes.rotary_beta_fast, sizes.rotary_beta_slow)
        ]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), size - 1)
        ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        times = sizes.rotary_attention_factor or 0.1 * math.log(factor) + 1
        return plain / factor * ramp + plain * (1 - ramp), times
    return plain, 1.0


def _mlp(sizes: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    up = _linear(w, f"{name}.up", x)
    activation = sizes.activation
    if activation.startswith("gated-"):
        gate, value = up[:, ::2], up[:, 1::2]
        activate = F.silu(gate) if activation == "gated-silu" else F.gelu(gate, approximate="tanh")
        return _linear(w, f"{name}.down", activate * value)
    activate = {
        "gelu": F.gelu,
        "gelu-tanh": lambda y: F.gelu(y, approximate="tanh"),
        "relu": torch.relu,
        "squared-relu": lambda y: torch.relu(y) ** 2,
        "silu": lambda y: y * torch.sigmoid(y),
    }[activation](up)
    return _linear(w, f"{name}.down", activate)
