"""Reference decoder for every feature: plain formulas in fp64, one head and one query at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]
_maxima: dict[tuple[int, int], float] | None = None


@contextmanager
def recorded_maxima() -> Iterator[dict[tuple[int, int], float]]:
    """Record the largest attention logit by (layer, head) of all samples computed in the block.

    Logits are scaled products of queries and keys, before caps and biases.
    """
    global _maxima
    _maxima = recorded = {}
    try:
        yield recorded
    finally:
        _maxima = None


def _record(layer_idx: int, head: int, visible_logits: torch.Tensor) -> None:
    if _maxima is not None:
        maximum = visible_logits.detach().max().item()
        _maxima[layer_idx, head] = max(_maxima.get((layer_idx, head), maximum), maximum)


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
    logits = x @ table.T * (base / args.hidden_size) * args.logit_scale
    return _softcap(logits, args.final_logit_softcapping)


def reference_mtp_losses(
    args: Any, w: Weights, text: torch.Tensor, loss_mask: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
) -> list[tuple[torch.Tensor, float]]:
    """Return (sum, count) of the losses of each multi-token prediction layer, position by position.

    A target counts if it is in the document of its position, and if the main loss counts it where it is the next token.
    The targets of a sample are weighted so that their count is that of the main loss.

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
            row_sum, row_count = torch.zeros((), dtype=torch.float64), 0.0
            for i in range(length - depth):
                target_idx = i + depth + 1
                if ids[target_idx] == ids[i] and mask[i + depth] > 0:
                    loss = torch.logsumexp(logits[i], 0) - logits[i, tokens[target_idx]]
                    row_sum = row_sum + mask[i + depth] * loss
                    row_count += float(mask[i + depth])
            if row_count > 0:
                num_tokens = float(mask.sum())
                sums[depth - 1] = sums[depth - 1] + row_sum / row_count * num_tokens
                counts[depth - 1] += num_tokens
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
    is_recurrent = f"{prefix}.recurrent.dense.weight" in w
    has_attention = f"{prefix}.attention.dense.weight" in w
    placement = args.norm_placement
    if is_recurrent and not has_attention and args.linear_norm_placement != "same":
        placement = args.linear_norm_placement

    def branch(x: torch.Tensor, function: Any, before: str, after: str) -> tuple[torch.Tensor, torch.Tensor]:
        normed = _norm(args, w, f"{prefix}.{before}", x) if placement in ("before", "both") else x
        output = function(normed)
        if placement in ("after", "both"):
            output = _norm(args, w, f"{prefix}.{after}", output)
        output = output * (args.residual_scale / math.sqrt(args.num_layers) if args.residual_scale else 1.0)
        return (normed if args.apply_residual_connection_post_layernorm else x), output

    def attend(y: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(y)
        if has_attention:
            attention = _latent_attention if args.multi_latent_attention else _attention
            output = output + attention(args, w, layer_idx, y, positions, ids)
        return output + _decaying_state(w, f"{prefix}.recurrent", y, ids) if is_recurrent else output

    def feed_forward(y: torch.Tensor) -> torch.Tensor:
        return _mlp(args, w, f"{prefix}.mlp", y)

    if not has_attention and not is_recurrent:
        residual, output = branch(x, feed_forward, "post_attention_norm", "mlp_output_norm")
        return residual + output
    residual, attention_output = branch(x, attend, "input_norm", "attention_output_norm")
    if f"{prefix}.mlp.down.weight" not in w:
        return residual + attention_output
    if args.parallel_residual != "none":
        norm = "input_norm" if args.parallel_residual == "shared-norm" else "post_attention_norm"
        return x + attention_output + branch(x, feed_forward, norm, "mlp_output_norm")[1]
    residual, mlp_output = branch(residual + attention_output, feed_forward, "post_attention_norm", "mlp_output_norm")
    return residual + mlp_output


def _decaying_state(w: Weights, prefix: str, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the output of ``tests.helpers.decay_mixer.DecayMixer``: a sum over the earlier tokens of the document."""
    values = x @ w[f"{prefix}.value.weight"].T
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    is_read = (distance >= 0) & (ids[:, None] == ids[None, :])
    factors = torch.where(is_read, 0.5 ** distance.clamp(min=0).double(), 0.0)
    return factors @ values @ w[f"{prefix}.dense.weight"].T


def _norm(args: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply the norm ``name`` over the last dimension."""
    scale = w[f"{name}.weight"] + (1 if args.layernorm_1p else 0)
    if args.normalization == "RMSNorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + args.layernorm_epsilon) * scale
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + args.layernorm_epsilon) * scale
    return normed + w[f"{name}.bias"] if args.norm_bias else normed


def _norm_of_heads(args: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Normalise each head [s, n, d] and multiply it by its weights; ``weight`` [n d]."""
    scale = weight.view(x.shape[1:]) + (1 if args.layernorm_1p else 0)
    centred = x if args.normalization == "RMSNorm" else x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + args.layernorm_epsilon) * scale


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    output = x @ w[f"{name}.weight"].T
    return output + w[f"{name}.bias"] if f"{name}.bias" in w else output


def _attention(
    args: Any, w: Weights, layer_idx: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    window = args.window_size if args.window_size and has_window(args, layer_idx) else 10**9
    is_windowed = window < 10**9
    groups = args.window_num_query_groups if is_windowed else 0
    a, g, d, s = (
        args.num_attention_heads,
        groups or args.num_query_groups or args.num_attention_heads,
        args.kv_hidden_size,
        len(x),
    )
    value_size = args.v_head_dim or d
    prefix = f"layers.{layer_idx}.attention"
    packed = unclipped = _linear(w, f"{prefix}.query_key_value", x)
    per_group = a // g
    if args.clip_qkv:
        packed = packed.clamp(-args.clip_qkv, args.clip_qkv)
    rows = packed.view(s, g, -1)
    query, value = rows[:, :, : per_group * d].reshape(s, a, d), rows[:, :, -value_size:] * args.attention_value_scale
    key = rows[:, :, -value_size - d : -value_size]
    gates = unclipped.view(s, g, -1, d)[:, :, per_group:-2].reshape(s, a, d) if args.attention_output_gate else None
    if args.qk_norm_order == "before":
        query, key = _norm_query_and_key(args, w, prefix, query, key)
    if args.position_embedding_type == "rope" and not is_without_rotary(args, layer_idx):
        query, key = (_rotate(args, y, positions, is_local=is_windowed) for y in (query, key))
    if args.qk_norm_order == "after":
        query, key = _norm_query_and_key(args, w, prefix, query, key)
    if args.attention_temperature_scale:
        steps = (positions // args.attention_temperature_floor).double()
        query = query * (1 + args.attention_temperature_scale * torch.log(1 + steps))[:, None, None]
    scale = args.softmax_scale or d**-0.5
    if args.mup_base_head_dim:
        scale = math.sqrt(args.mup_base_head_dim) / d
    positions_in_row = torch.arange(s)
    distance = positions_in_row[:, None] - positions_in_row[None, :]
    is_visible = (distance >= 0) & (distance <= window) & (ids[:, None] == ids[None, :])
    outputs = []
    for head in range(a):
        scores = query[:, head] @ key[:, head // per_group].T * scale
        _record(layer_idx, head, scores[is_visible])
        scores = _softcap(scores, args.attn_logit_softcapping)
        if args.position_embedding_type == "alibi":
            scores = scores - _slope(head, a, args.alibi_bias_max) * distance.double()
        weights = torch.exp(scores).masked_fill(~is_visible, 0.0)
        denominator = weights.sum(-1, keepdim=True)
        if args.sink_layers == "window" and not is_windowed:
            pass
        elif args.softmax_type == "learnable":
            denominator = denominator + torch.exp(w[f"{prefix}.sinks.weight"][head])
        elif args.softmax_type == "off-by-one":
            denominator = denominator + 1.0
        output = weights / denominator @ value[:, head // per_group]
        outputs.append(output if gates is None else output / (1.0 + torch.exp(-gates[:, head])))
    return _linear(w, f"{prefix}.dense", torch.stack(outputs, dim=1).reshape(s, a * value_size))


def _norm_query_and_key(
    args: Any, w: Weights, prefix: str, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [s, a, d] and keys [s, g, d] after their norms, if there are any."""
    if args.qk_norm == "head":
        return _norm(args, w, f"{prefix}.query_norm", query), _norm(args, w, f"{prefix}.key_norm", key)
    if args.qk_norm == "l2":
        epsilon = args.layernorm_epsilon
        return tuple(y / torch.sqrt((y * y).mean(-1, keepdim=True) + epsilon) for y in (query, key))  # type: ignore
    if args.qk_norm == "all":
        query_row = _norm(args, w, f"{prefix}.query_norm", query.flatten(1))
        return query_row.view_as(query), _norm(args, w, f"{prefix}.key_norm", key.flatten(1)).view_as(key)
    if args.qk_norm == "per-head":
        query = _norm_of_heads(args, w[f"{prefix}.query_norm.weight"], query)
        return query, _norm_of_heads(args, w[f"{prefix}.key_norm.weight"], key)
    return query, key


def is_without_rotary(args: Any, layer_idx: int) -> bool:
    """Return True if ``no_rope_freq`` names the layer. Supports the patterns in the tests: "", "N" and "[0,1,...]"."""
    text = args.no_rope_freq
    if text.isdecimal():
        return (layer_idx + 1) % int(text) == 0
    return bool(text) and text.strip("[]").split(",")[layer_idx] == "1"


def _latent_attention(
    args: Any, w: Weights, layer_idx: int, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Multi-latent attention, one head and one query at a time; RMS norms only."""
    prefix, s, a = f"layers.{layer_idx}.attention", len(x), args.num_attention_heads
    plain, rotated, value_size, rank = args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim, args.kv_lora_rank

    def norm(name: str, y: torch.Tensor) -> torch.Tensor:
        return y / torch.sqrt((y * y).mean(-1, keepdim=True) + args.latent_norm_epsilon) * w[f"{prefix}.{name}.weight"]

    query_input = x
    if args.q_lora_rank:
        query_input = norm("query_latent_norm", x @ w[f"{prefix}.query_down.weight"].T)
    query = (query_input @ w[f"{prefix}.query.weight"].T).view(s, a, plain + rotated)
    down = x @ w[f"{prefix}.key_value_down.weight"].T
    up = (norm("key_value_latent_norm", down[:, :rank]) @ w[f"{prefix}.key_value.weight"].T).view(s, a, -1)
    key, value = up[..., :plain], up[..., plain:]
    has_yarn, factor = args.rotary_scaling == "yarn", args.rotary_scaling_factor
    terms = [0.1 * m * math.log(factor) + 1 if has_yarn else 1.0 for m in (args.mscale, args.mscale_all_dim)]
    rotary_factor = (args.rotary_attention_factor or terms[0] / terms[1]) if has_yarn else 1.0
    window = args.window_size if args.window_size and has_window(args, layer_idx) else 10**9
    rotary_args = SimpleNamespace(**{**vars(args), "kv_hidden_size": rotated, "rotary_attention_factor": rotary_factor})
    is_local = window < 10**9
    rotated_query = _rotate(rotary_args, query[..., plain:], positions, is_local=is_local)
    rotated_key = _rotate(rotary_args, down[:, None, rank:], positions, is_local=is_local)[:, 0]
    scale = (args.softmax_scale or (plain + rotated) ** -0.5) * terms[1] ** 2
    outputs = []
    for head in range(a):
        rows = []
        for i in range(s):
            visible = [j for j in range(i + 1) if i - j <= window and ids[j] == ids[i]]
            scores = torch.stack(
                [query[i, head, :plain] @ key[j, head] + rotated_query[i, head] @ rotated_key[j] for j in visible]
            )
            _record(layer_idx, head, scores * scale)
            probabilities = torch.softmax(_softcap(scores * scale, args.attn_logit_softcapping), dim=0)
            rows.append(sum(p * value[j, head] for p, j in zip(probabilities, visible, strict=True)))
        outputs.append(torch.stack(rows))
    by_head = torch.stack(outputs, dim=1)
    if args.attention_output_gate:
        by_head = by_head * torch.sigmoid(x @ w[f"{prefix}.output_gate.weight"].T).unsqueeze(-1)
    return _linear(w, f"{prefix}.dense", by_head.reshape(s, a * value_size))


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
    """Rotate the pairs of the first r elements of each head [s, n, d]: (i, i + r/2), or interleaved (2 i, 2 i + 1)."""
    size = int(args.kv_hidden_size * args.rotary_percent)
    local = is_local and args.rotary_local_base
    base = args.rotary_local_base if local else args.rotary_base
    scaling = "none" if local else args.rotary_scaling
    rotated = x.clone()
    for pair in range(size // 2):
        frequency, factor = _scaled_frequency(args, base ** (-2.0 * pair / size), scaling, pair, size, base)
        if scaling == "longrope":
            frequency, factor = _longrope_frequency(args, frequency, pair, len(x))
        angle = positions.double() * frequency
        cosine, sine = (factor * angle.cos())[:, None], (factor * angle.sin())[:, None]
        i, j = (2 * pair, 2 * pair + 1) if args.rotary_interleaved else (pair, pair + size // 2)
        rotated[:, :, i] = x[:, :, i] * cosine - x[:, :, j] * sine
        rotated[:, :, j] = x[:, :, j] * cosine + x[:, :, i] * sine
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
        low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if args.rotary_truncate else bounds
        low, high = max(low, 0), min(high, size - 1)
        ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        scale = args.rotary_attention_factor or 0.1 * math.log(factor) + 1
        return unscaled / factor * ramp + unscaled * (1 - ramp), scale
    return unscaled, 1.0


def _longrope_frequency(args: Any, unscaled: float, pair: int, length: int) -> tuple[float, float]:
    """Return the frequency of a pair, for a sample of ``length`` tokens, and the factor of its cosine and sine."""
    is_long = length > args.rotary_original_positions
    factors = args.rotary_long_factors if is_long else args.rotary_short_factors
    growth = math.log(args.rotary_scaling_factor) / math.log(args.rotary_original_positions)
    scale = args.rotary_attention_factor or math.sqrt(1 + growth)
    return unscaled / float(factors.strip("[]").split(",")[pair]), scale


def _mlp(args: Any, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    up = _linear(w, f"{name}.up", x)
    activation = args.activation
    if activation.startswith("gated-"):
        gate, value = up[:, ::2], up[:, 1::2]
        if args.activation_func_clamp_value:
            limit = torch.tensor(args.activation_func_clamp_value, dtype=gate.dtype)
            gate, value = torch.minimum(gate, limit), torch.maximum(torch.minimum(value, limit), -limit)
        activate = {
            "gated-silu": F.silu,
            "gated-gelu": lambda y: F.gelu(y, approximate="tanh"),
            "gated-quick-gelu": lambda y: y / (1.0 + torch.exp(-1.702 * y)),
        }[activation](gate)
        return _linear(w, f"{name}.down", activate * (value + args.glu_linear_offset))
    activate = {
        "gelu": F.gelu,
        "gelu-tanh": lambda y: F.gelu(y, approximate="tanh"),
        "relu": torch.relu,
        "squared-relu": lambda y: torch.relu(y) ** 2,
        "silu": lambda y: y * torch.sigmoid(y),
        "xielu": lambda y: _xielu(y, w[f"{name}.activation.alpha_p"], w[f"{name}.activation.alpha_n"]),
    }[activation](up)
    return _linear(w, f"{name}.down", activate)


def _xielu(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    p, n = torch.log(1 + torch.exp(alpha_p)), 0.5 + torch.log(1 + torch.exp(alpha_n))
    return torch.where(x > 0, p * x * x, n * (torch.exp(x.clamp(max=0)) - 1 - x)) + 0.5 * x
