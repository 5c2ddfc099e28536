"""Reference decoder for every feature: plain formulas in fp64, one head and one query at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


def reference_logits(
    args: Any, w: Weights, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Return the logits [s, b, v] of a decoder of ``args`` with the weights ``w``, keyed by their names in the model.

    Shapes:
        tokens, positions, segments [b, s]; positions may or may not restart in each document
    """
    rows = [_row(args, w, *row_inputs) for row_inputs in zip(tokens, positions, segments, strict=True)]
    return torch.stack(rows, dim=1)


def _row(args: Any, w: Weights, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return _logits(args, w, _row_states(args, w, tokens, positions, ids))


def _row_states(
    args: Any, w: Weights, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the hidden states [s, h] after the final norm."""
    x = w["embedding.word.weight"][tokens]  # [s, h]
    if args.scale_embeddings:
        x = x * math.sqrt(args.hidden_size)
    if args.embed_layernorm:
        x = _norm(args, w, "embedding.norm", x)
    if args.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position.weight"][positions]
    x = x * args.embedding_multiplier
    for layer_idx in range(args.num_layers):
        x = _layer(args, w, layer_idx, x, positions, ids)
    return _norm(args, w, "final_norm", x)


def _logits(args: Any, w: Weights, x: torch.Tensor) -> torch.Tensor:
    table = w["head.weight" if args.untie_embeddings else "embedding.word.weight"]
    base = args.dim_model_base or args.mup_base_hidden_size or args.hidden_size
    return _softcap(x @ table.T * (base / args.hidden_size), args.final_logit_softcapping)


def reference_mtp_losses(
    args: Any, w: Weights, text: torch.Tensor, loss_mask: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
) -> list[tuple[torch.Tensor, float]]:
    """Return (sum, count) of the losses of each multi-token prediction layer, position by position.

    A target counts if it is in the document of its position, and if the main loss counts it where it is the next token.

    Shapes:
        text, documents [b, s+1]: all tokens, and the document of each; positions, loss_mask [b, s]
    """
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(args.mtp_num_layers)]
    counts = [0.0] * args.mtp_num_layers
    length = text.shape[1] - 1
    for tokens, mask, row_positions, ids in zip(text, loss_mask, positions, documents, strict=True):
        x = _row_states(args, w, tokens[:-1], row_positions, ids[:-1])
        for depth in range(1, args.mtp_num_layers + 1):
            x = _mtp_states(args, w, depth, x, tokens, row_positions, ids)
            logits = _logits(args, w, x)
            for i in range(length - depth):
                target_idx = i + depth + 1
                if ids[target_idx] == ids[i] and mask[i + depth] > 0:
                    loss = torch.logsumexp(logits[i], 0) - logits[i, tokens[target_idx]]
                    sums[depth - 1] = sums[depth - 1] + mask[i + depth] * loss
                    counts[depth - 1] += float(mask[i + depth])
    return list(zip(sums, counts, strict=True))


def _mtp_states(
    args: Any, w: Weights, depth: int, x: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the hidden states [s, h] of multi-token prediction layer ``depth``, counted from 1."""
    prefix, rows = f"mtp.{depth - 1}", []
    for i in range(len(x)):
        # where the future token is not in the document, no counted position sees this one: any token will do
        is_own = i + depth < len(tokens) and ids[i + depth] == ids[i]
        future = w["embedding.word.weight"][tokens[i + depth] if is_own else 1]
        future = future * (math.sqrt(args.hidden_size) if args.scale_embeddings else 1.0) * args.embedding_multiplier
        both = torch.cat([_norm(args, w, f"{prefix}.enorm", future), _norm(args, w, f"{prefix}.hnorm", x[i])])
        rows.append(w[f"{prefix}.eh_proj.weight"] @ both)
    last = args.num_layers - 1
    layer_weights = {
        name.replace(f"{prefix}.layer.", f"layers.{last}."): weight
        for name, weight in w.items()
        if name.startswith(f"{prefix}.layer.")
    }
    x = _layer(args, layer_weights, last, torch.stack(rows), positions, ids[:-1])
    return _norm(args, w, f"{prefix}.final_norm", x)


def _layer(
    args: Any, w: Weights, layer_idx: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    prefix = f"layers.{layer_idx}"

    def sublayer(x: torch.Tensor, function: Any, before: str, after: str) -> torch.Tensor:
        normed = _norm(args, w, f"{prefix}.{before}", x) if args.norm_placement in ("before", "both") else x
        output = function(normed)
        if args.norm_placement in ("after", "both"):
            output = _norm(args, w, f"{prefix}.{after}", output)
        output = output * (args.residual_scale / math.sqrt(args.num_layers) if args.residual_scale else 1.0)
        return (normed if args.apply_residual_connection_post_layernorm else x) + output

    def attend(y: torch.Tensor) -> torch.Tensor:
        return _attention(args, w, layer_idx, y, positions, ids)

    x = sublayer(x, attend, "input_norm", "attention_output_norm")
    return sublayer(x, lambda y: _mlp(args, w, f"{prefix}.mlp", y), "post_attention_norm", "mlp_output_norm")


def _norm(args: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply the norm ``name`` over the last dimension."""
    scale = w[f"{name}.weight"] + (1 if args.layernorm_1p else 0)
    if args.normalization == "RMSNorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + args.layernorm_epsilon) * scale
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + args.layernorm_epsilon) * scale
    return normed + w[f"{name}.bias"] if args.norm_bias else normed


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    output = x @ w[f"{name}.weight"].T
    return output + w[f"{name}.bias"] if f"{name}.bias" in w else output


def _attention(
    args: Any, w: Weights, layer_idx: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    a, g, d, s = (
        args.num_attention_heads,
        args.num_query_groups or args.num_attention_heads,
        args.kv_hidden_size,
        len(x),
    )
    prefix = f"layers.{layer_idx}.attention"
    packed = _linear(w, f"{prefix}.query_key_value", x)
    if args.clip_qkv:
        packed = packed.clamp(-args.clip_qkv, args.clip_qkv)
    per_group = a // g
    heads = packed.view(s, g, per_group + 2, d)
    query, key, value = heads[:, :, :per_group].reshape(s, a, d), heads[:, :, per_group], heads[:, :, per_group + 1]
    if args.qk_norm == "head":
        query, key = _norm(args, w, f"{prefix}.query_norm", query), _norm(args, w, f"{prefix}.key_norm", key)
    elif args.qk_norm == "all":
        query = _norm(args, w, f"{prefix}.query_norm", query.reshape(s, a * d)).view(s, a, d)
        key = _norm(args, w, f"{prefix}.key_norm", key.reshape(s, g * d)).view(s, g, d)
    window = args.window_size if args.window_size and has_window(args, layer_idx) else 10**9
    if args.position_embedding_type == "rope":
        query, key = (_rotate(args, y, positions, is_local=window < 10**9) for y in (query, key))
    scale = args.softmax_scale or d**-0.5
    if args.mup_base_head_dim:
        scale = math.sqrt(args.mup_base_head_dim) / d
    positions_in_row = torch.arange(s)
    distance = positions_in_row[:, None] - positions_in_row[None, :]
    is_visible = (distance >= 0) & (distance <= window) & (ids[:, None] == ids[None, :])
    outputs = []
    for head in range(a):
        scores = _softcap(query[:, head] @ key[:, head // per_group].T * scale, args.attn_logit_softcapping)
        if args.position_embedding_type == "alibi":
            scores = scores - _slope(head, a, args.alibi_bias_max) * distance.double()
        scores = scores.masked_fill(~is_visible, float("-inf"))
        outputs.append(torch.softmax(scores, dim=-1) @ value[:, head // per_group])
    return _linear(w, f"{prefix}.dense", torch.stack(outputs, dim=1).reshape(s, a * d))


def has_window(args: Any, layer_idx: int) -> bool:
    """Return True if ``layer_idx`` has the window. Supports the patterns in the tests: "", "N" and "[0,1,...]"."""
    text = args.window_attn_skip_freq
    if not text:
        return True
    if text.isdecimal():
        return (layer_idx + 1) % int(text) != 0
    return bool([int(entry) for entry in text.strip("[]").split(",")][layer_idx])


def _softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _slope(head: int, num_heads: int, max_bias: float) -> float:
    """Return the ALiBi slope; the number of heads must be a power of two."""
    return 2.0 ** (-max_bias * (head + 1) / num_heads)


def _rotate(args: Any, x: torch.Tensor, positions: torch.Tensor, *, is_local: bool) -> torch.Tensor:
    """Rotate the pairs (i, i + r/2) of the first r elements of each head [s, n, d]."""
    size = int(args.kv_hidden_size * args.rotary_percent)
    local = is_local and args.rotary_local_base
    base = args.rotary_local_base if local else args.rotary_base
    scaling = "none" if local else args.rotary_scaling
    rotated = x.clone()
    for pair in range(size // 2):
        frequency, factor = _scaled_frequency(args, base ** (-2.0 * pair / size), scaling, pair, size, base)
        angle = positions.double() * frequency
        cosine, sine = (factor * angle.cos())[:, None], (factor * angle.sin())[:, None]
        first, second = x[:, :, pair], x[:, :, pair + size // 2]
        rotated[:, :, pair] = first * cosine - second * sine
        rotated[:, :, pair + size // 2] = second * cosine + first * sine
    return rotated


def _scaled_frequency(
    args: Any, unscaled: float, scaling_type: str, pair: int, size: int, base: float
) -> tuple[float, float]:
    """Return the frequency of a pair, in radians per position, and the factor of its cosine and sine.

    Args:
        unscaled: frequency without scaling.
        scaling_type: value of ``rotary_scaling``.
    """
    factor, length = args.rotary_scaling_factor, args.rotary_original_positions
    if scaling_type == "linear":
        return unscaled / factor, 1.0
    if scaling_type == "llama3":
        wavelength = 2 * math.pi / unscaled
        low, high = args.rotary_low_frequency_factor, args.rotary_high_frequency_factor
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        return (1 - smooth) * unscaled / factor + smooth * unscaled, 1.0
    if scaling_type == "yarn":
        bounds = [
            size * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(base))
            for num_rotations in (args.rotary_beta_fast, args.rotary_beta_slow)
        ]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), size - 1)
        ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        scale = args.rotary_attention_factor or 0.1 * math.log(factor) + 1
        return unscaled / factor * ramp + unscaled * (1 - ramp), scale
    return unscaled, 1.0


def _mlp(args: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    up = _linear(w, f"{name}.up", x)
    activation = args.activation
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
