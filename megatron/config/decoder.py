"""DecoderFeatures: flags for decoder components other than sizes, their checks, and windows by layer.

GPT-2, LLaMA, MPT and every other decoder are values of these fields; a family's ``DEFAULTS`` contains its default
values.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.config import experts, latent_attention, layer_features, mtp, qk_clip, recurrent
from megatron.config.branch_multipliers import MultiplierFeatures, multiplier_problems
from megatron.config.experts import ExpertFeatures, expert_problems, layer_pattern
from megatron.config.latent_attention import LatentFeatures, latent_problems
from megatron.config.layer_features import (
    ALL_LAYERS,
    VANILLA,
    LayerFeatures,
    layer_feature_problems,
    unused_layer_features,
)
from megatron.config.layer_types import has_attention
from megatron.config.mtp import MTPFeatures, mtp_problems
from megatron.config.option import option
from megatron.config.qk_clip import QKClipFeatures, qk_clip_problems
from megatron.config.recurrent import RecurrentLayers, recurrent_problems, unused_recurrent_features

_option = partial(option, family_kind="decoder", elsewhere="it is supported in decoders only; remove it")

SEQUENTIAL, SHARED_NORM, SEPARATE_NORMS = "none", "shared-norm", "separate-norms"
"""Values of ``parallel_residual``."""
LEARNED, ROPE, ALIBI, NO_POSITIONS, RELATIVE = "learned_absolute", "rope", "alibi", "none", "relative"
DECODER_POSITIONS = (LEARNED, ROPE, ALIBI, NO_POSITIONS)
"""Values of ``position_embedding_type`` that are valid for a decoder."""


def parse_window(text: str) -> int:
    """Parse ``N``, ``N,0`` or ``(N,0)``, Megatron's notation for a decoder's window; -1 (no window) becomes 0.

    Raises:
        ValueError: the text has another form.
    """
    words = re.fullmatch(r"\(?\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?\)?", text)
    if words is None or int(words[2] or 0) > 0:
        raise ValueError(text)
    return 0 if int(words[1]) == -1 else int(words[1])


def parse_factors(text: str) -> tuple[float, ...]:
    """Parse a list of positive numbers such as ``[1.0,1.2]``; an empty text is an empty list.

    Raises:
        ValueError: the text has another form, or a number is not positive and finite.
    """
    factors = tuple(float(word) for word in text.strip().removeprefix("[").removesuffix("]").split(",") if word.strip())
    if not all(0.0 < factor < math.inf for factor in factors):
        raise ValueError(text)
    return factors


@dataclass(frozen=True, kw_only=True)
class DecoderFeatures(
    MTPFeatures, ExpertFeatures, LatentFeatures, LayerFeatures, RecurrentLayers, MultiplierFeatures, QKClipFeatures
):
    """Parts of a decoder; base of ``ModelConfig``."""

    num_query_groups: int = _option(
        0,
        "number of key and value heads, each shared by a group of query heads (grouped-query attention)",
        minimum=1,
        shown_default="num-attention-heads",
        aliases=("--num-key-value-heads",),
        short="KV heads",
    )
    position_embedding_type: str = option(
        LEARNED,
        "positions: learned_absolute (or learned): a table; rope: rotary; alibi: a bias on scores that falls with "
        "the distance; relative: T5's table of biases by distance; none",
        choices=(*DECODER_POSITIONS, RELATIVE, "learned"),
        synonyms={"absolute": LEARNED, "rotary": ROPE},
        constants={"--use-rotary-position-embeddings": ROPE},
        elsewhere="the model has learned positions; remove it",
    )
    rotary_base: float = _option(
        10000.0,
        "base of the rotary frequencies",
        above=1,
        aliases=("--rope-theta", "--rotary-position-embeddings-theta"),
    )
    rotary_scaling: str = _option(
        "none",
        "extension of rotary positions beyond the original length: linear divides every position by the factor; "
        "llama3 and yarn divide the low frequencies only, and yarn also scales the scores; longrope divides each "
        "frequency by a factor of its own and scales the scores",
        choices=("none", "linear", "llama3", "yarn", "longrope"),
    )
    rotary_scaling_factor: float = _option(
        8.0, "factor of --rotary-scaling", minimum=1, aliases=("--rope-scaling-factor",)
    )
    rotary_low_frequency_factor: float = _option(
        1.0, "llama3: wavelengths above the original length / this are divided by the factor", above=0
    )
    rotary_high_frequency_factor: float = _option(
        4.0,
        "llama3: wavelengths below the original length / this are unchanged; those in between are interpolated",
        above=0,
    )
    rotary_original_positions: int = _option(8192, "llama3, yarn and longrope: original length in tokens", minimum=1)
    rotary_beta_fast: float = _option(
        32.0, "yarn: frequencies with more rotations than this over the original length are unchanged", above=0
    )
    rotary_beta_slow: float = _option(
        1.0,
        "yarn: frequencies with fewer rotations than this over the original length are divided by the factor",
        above=0,
    )
    rotary_attention_factor: float = _option(
        0.0,
        "yarn and longrope: factor for the rotated queries and keys",
        above=0,
        shown_default="yarn: 0.1 ln(rotary-scaling-factor) + 1; longrope: "
        "sqrt(1 + ln(rotary-scaling-factor) / ln(rotary-original-positions))",
    )
    rotary_percent: float = _option(1.0, "fraction of each head, from its start, that is rotated", above=0, maximum=1)
    rotary_local_base: float = _option(
        0.0,
        "base of the rotary frequencies in layers with a window, which then ignore --rotary-scaling",
        above=1,
        shown_default="rotary-base, with its scaling",
    )
    rotary_short_factors: str = _option(
        "",
        "longrope: a list with the divisor of each rotary frequency, such as [1.0,1.2,2.5], for samples of up to "
        "--rotary-original-positions tokens",
    )
    rotary_long_factors: str = _option("", "longrope: the same list for longer samples")
    alibi_bias_max: int = _option(8, "exponent of ALiBi's slopes, which range from 2^(-max/heads) to 2^-max", minimum=1)
    normalization: str = _option(
        "LayerNorm",
        "type of the norms",
        choices=("LayerNorm", "RMSNorm"),
        synonyms={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_bias: bool = _option(True, "layer norms without a bias", flag="", constants={"--no-norm-bias": False})
    layernorm_1p: bool = _option(
        False,
        "store the weights of norms minus 1, so that they start at 0",
        flag="--apply-layernorm-1p",
    )
    norm_placement: str = _option(
        "before",
        "norms of attention and feed-forward layer: before: of the input; after: of the output that is added to "
        "the residual stream; both",
        choices=("before", "after", "both"),
    )
    embed_layernorm: bool = _option(False, "a norm after the word embedding, as in BLOOM")
    qk_norm: str = _option(
        "none",
        "norms of queries and keys before the rotation: head: per head; per-head: per head, with a weight for each "
        "head; all: over all heads together; l2: per head, the root mean square without weights",
        choices=("none", "head", "per-head", "all", "l2"),
        constants={"--qk-layernorm": "head", "--qk-l2-norm": "l2"},
    )
    add_qkv_bias: bool = _option(False, "biases in the query, key and value projections only")
    window_size: int = _option(
        0,
        "number of previous tokens that a token attends to, in addition to itself, written N or N,0; Hugging "
        "Face's sliding_window is one larger; 0: all",
        minimum=0,
        read=parse_window,
    )
    window_attn_skip_freq: str = _option(
        "",
        "layers with a window: N: all except every N-th; or a list with 1 for a layer with a window and 0 for a "
        "layer without, such as [1,1,0] or ([1]*5+[0])*2",
        shown_default="all",
    )
    softmax_scale: float = _option(
        0.0, "factor for the attention scores before the softmax", above=0, shown_default="1 / sqrt(kv-hidden-size)"
    )
    attn_logit_softcapping: float = _option(
        0.0, "soft cap of the attention scores: cap tanh(x / cap); 0: none", minimum=0
    )
    final_logit_softcapping: float = _option(0.0, "soft cap of the logits: cap tanh(x / cap); 0: none", minimum=0)
    scale_embeddings: bool = _option(False, "multiply word embeddings by the square root of the hidden size, as Gemma")
    embedding_multiplier: float = _option(
        1.0,
        "factor for the output of the embedding, including learned positions; MiniCPM's scale_emb",
        above=0,
        aliases=("--mup-embedding-mult",),
    )
    residual_scale: float = _option(
        0.0,
        "multiply each addition to the residual stream by this / sqrt(num-layers), as MiniCPM's scale_depth; 0: off",
        minimum=0,
    )
    dim_model_base: int = _option(
        0,
        "multiply logits by this / hidden-size, as MiniCPM",
        minimum=1,
        shown_default="mup-base-hidden-size; if that is not set, logits are not scaled",
    )
    mup_base_hidden_size: int = _option(
        0,
        "muP: with m = hidden-size / this, matrices of layers are initialised with --init-method-std / sqrt(m) and "
        "trained with --lr / m and --adam-eps / m, and logits are divided by m, so that the best --lr of a narrow "
        "model transfers to a wide one",
        minimum=1,
        shown_default="no muP",
        aliases=("--scaling-base-hidden-size",),
    )
    mup_base_head_dim: int = _option(
        0,
        "muP for growing heads: attention scores are multiplied by sqrt(this) / kv-hidden-size",
        minimum=1,
        shown_default="by --softmax-scale",
        aliases=("--scaling-base-head-dim",),
    )
    clip_qkv: float = _option(0.0, "clamp queries, keys and values to [-clip, clip]; 0: off", minimum=0)
    parallel_residual: str = _option(
        SEQUENTIAL,
        "compute attention and feed-forward layer from the same hidden states, and add both: shared-norm: with one "
        "norm; separate-norms: with a norm for each; none: one after the other",
        choices=(SEQUENTIAL, SHARED_NORM, SEPARATE_NORMS),
    )
    logit_scale: float = _option(1.0, "factor for the logits, before a soft cap", above=0)
    attention_temperature_scale: float = _option(
        0.0,
        "multiply the query at position p by 1 + this ln(1 + floor(p / attention-temperature-floor)), as Llama 4 and "
        "Ministral 3; 0: off",
        minimum=0,
    )
    attention_temperature_floor: int = _option(
        8192, "number of positions with the same factor of --attention-temperature-scale", minimum=1
    )

    def __post_init__(self) -> None:
        self._derive_latent_sizes()
        if not self.num_query_groups:
            object.__setattr__(self, "num_query_groups", getattr(self, "num_attention_heads", 0))
        if self.window_num_query_groups == self.num_query_groups:
            object.__setattr__(self, "window_num_query_groups", 0)
        if self.mup_base_head_dim and not self.softmax_scale and self.mup_head_scale:
            object.__setattr__(self, "softmax_scale", self.mup_head_scale)
        if self.position_embedding_type == "learned":
            object.__setattr__(self, "position_embedding_type", LEARNED)
        super().__post_init__()
        self._derive_recurrent_sizes()

    @property
    def mup_head_scale(self) -> float:
        """Scale for attention scores under muP, sqrt(``mup_base_head_dim``) / head size.

        It is 0 if the scale equals the default, 1 / sqrt(head size), or if the head size is not known yet.
        """
        size = getattr(self, "kv_hidden_size", 0)
        return math.sqrt(self.mup_base_head_dim) / size if size and size != self.mup_base_head_dim else 0.0

    @property
    def width_multiplier(self) -> float:
        """muP's m: hidden size divided by the hidden size of the base model, whose learning rates are given."""
        return getattr(self, "hidden_size", 0) / self.mup_base_hidden_size if self.mup_base_hidden_size else 1.0

    @functools.cached_property
    def logit_multiplier(self) -> float:
        return self.width_logit_multiplier * self.logit_scale

    @property
    def width_logit_multiplier(self) -> float:
        """Logit factor that follows from the hidden size."""
        base = self.dim_model_base or self.mup_base_hidden_size
        return base / getattr(self, "hidden_size", base) if base else 1.0

    @property
    def residual_multiplier(self) -> float:
        return self.residual_scale / math.sqrt(getattr(self, "num_layers", 1)) if self.residual_scale else 1.0

    @property
    def has_learned_positions(self) -> bool:
        return self.position_embedding_type == LEARNED

    @property
    def has_relative_positions(self) -> bool:
        """True if T5's relative-position biases are added to the scores."""
        return self.position_embedding_type == RELATIVE

    @property
    def has_position_ids(self) -> bool:
        """True if the model reads position ids, which may restart in each document."""
        return self.position_embedding_type in (LEARNED, ROPE)

    @property
    def stage_input_fields(self) -> tuple[str, str]:
        """Inputs of the first pipeline stage that follow the tokens, in order; a batch may lack some of them."""
        # A position table exists only on stage 0, so learned positions come first; rotary positions go to every stage.
        names = ("position_ids", "segment_ids")
        return names if self.has_learned_positions else (names[1], names[0])

    @property
    def has_plain_attention(self) -> bool:
        """True if attention is causal softmax attention with one key head per query head and no further features."""
        changed = self.qk_norm != "none" or self.window_size or self.clip_qkv or self.attention_output_gate
        changed = changed or self.softmax_type != VANILLA or self.attention_value_scale != 1.0
        changed = changed or self.value_size != getattr(self, "kv_hidden_size", 0)
        scores = self.softmax_scale or self.attn_logit_softcapping
        is_plain = self.position_embedding_type not in (ROPE, ALIBI) and not changed and not scores
        is_plain = is_plain and not self.multi_latent_attention and not self.branch_multipliers
        return is_plain and self.num_query_groups == getattr(self, "num_attention_heads", 0)


IDENTITY = tuple(
    field.name
    for field in fields(DecoderFeatures)
    if field.name not in (*experts.TRAINING, *mtp.TRAINING, *qk_clip.TRAINING)
)
"""Fields that two decoders must share so that the same weights give the same outputs in both."""
REFITTED = (
    "rotary_base", "rotary_scaling", "rotary_scaling_factor", "rotary_low_frequency_factor",
    "rotary_high_frequency_factor", "rotary_original_positions", "rotary_beta_fast", "rotary_beta_slow",
    "rotary_attention_factor", "rotary_percent", "rotary_local_base", "alibi_bias_max", "window_size",
    "window_attn_skip_freq", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping", "scale_embeddings",
    "clip_qkv", "embedding_multiplier", "residual_scale", "dim_model_base", "mup_base_hidden_size", "mup_base_head_dim",
    *experts.REFITTED, *latent_attention.REFITTED, *layer_features.REFITTED, *recurrent.REFITTED,
    "rotary_short_factors", "rotary_long_factors", "logit_scale", "attention_temperature_scale",
    "attention_temperature_floor", "mtp_num_layers", "branch_multipliers",
)  # fmt: skip
"""Fields of ``IDENTITY`` that --finetune may change: the weights fit, but the outputs change."""
ARCHITECTURE = (
    "hidden_bias", "untie_embeddings", "activation", "layernorm_epsilon", "apply_residual_connection_post_layernorm",
    "position_embedding_type", "rotary_base", "rotary_scaling", "rotary_scaling_factor",
    "rotary_low_frequency_factor", "rotary_high_frequency_factor", "rotary_original_positions", "rotary_beta_fast",
    "rotary_beta_slow", "rotary_attention_factor", "rotary_percent", "rotary_local_base", "alibi_bias_max",
    "normalization", "norm_bias", "layernorm_1p", "norm_placement", "embed_layernorm", "qk_norm", "add_qkv_bias",
    "window_size", "window_attn_skip_freq", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "scale_embeddings", "embedding_multiplier", "residual_scale", "clip_qkv", *experts.ARCHITECTURE,
    *latent_attention.ARCHITECTURE, *layer_features.ARCHITECTURE, *recurrent.ARCHITECTURE, "parallel_residual",
    "logit_scale", "attention_temperature_scale", "attention_temperature_floor", "branch_multipliers",
)  # fmt: skip
"""Fields that ``--model`` sets: the parts of a decoder, without sizes and dropout."""
BASE_WIDTHS = ("dim_model_base", "mup_base_hidden_size")
"""Fields that have no effect if they equal the hidden size; such a model is identical to one without them."""

_SCALINGS = {
    "rotary_scaling_factor": ("linear", "llama3", "yarn", "longrope"),
    "rotary_low_frequency_factor": ("llama3",),
    "rotary_high_frequency_factor": ("llama3",),
    "rotary_original_positions": ("llama3", "yarn", "longrope"),
    "rotary_beta_fast": ("yarn",),
    "rotary_beta_slow": ("yarn",),
    "rotary_attention_factor": ("yarn", "longrope"),
    "rotary_short_factors": ("longrope",),
    "rotary_long_factors": ("longrope",),
}
"""Field -> values of ``rotary_scaling`` with which it takes effect."""
_ROTARY = ("rotary_base", "rotary_scaling", "rotary_percent", "rotary_local_base", *_SCALINGS)


# Layers that have the window.


def has_window(model: Any, layer_idx: int) -> bool:
    """Check if layer ``layer_idx``, counted from 0, attends to a window only.

    Raises:
        ValueError: ``window_attn_skip_freq`` is invalid, or its list does not have one entry per layer.
    """
    return bool(model.window_size) and window_layers(model)[layer_idx]


def window_layers(model: Any) -> tuple[bool, ...]:
    """Return a bool per layer: True if it attends to a window only.

    Raises:
        ValueError: as ``has_window``.
    """
    if not model.window_size:
        return (False,) * model.num_layers
    return window_pattern(model.window_attn_skip_freq, model.num_layers)


def query_groups(model: Any, layer_idx: int) -> int:
    """Count the key and value heads in layer ``layer_idx``, counted from 0."""
    groups: int = model.num_query_groups
    return model.window_num_query_groups or groups if has_window(model, layer_idx) else groups


def has_sinks(model: Any, *, has_window: bool) -> bool:
    """Check if a layer has sinks.

    Args:
        has_window: True for a layer with a window, False for a layer without one.
    """
    return model.softmax_type != VANILLA and (has_window or model.sink_layers == ALL_LAYERS)


def window_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return a bool per layer: True if the layer has a window according to ``text``, a ``window_attn_skip_freq``.

    Raises:
        ValueError: ``text`` is invalid, or its list does not have one entry per layer.

    Source: Megatron-LM's ``--window-attn-skip-freq``: a number, or an expression of lists.
    """
    if not text:
        return (True,) * num_layers
    if re.fullmatch(r"\s*[1-9]\d*\s*", text):
        return tuple(layer % int(text) != 0 for layer in range(1, num_layers + 1))
    return layer_pattern(text, num_layers)


# Problems of the features.


def feature_problems(config: Any) -> Iterator[str]:
    """Yield an error message for each invalid model setting in ``config``, a decoder ``Config``, from any source."""
    model = config.model
    if model.position_embedding_type not in DECODER_POSITIONS:
        yield (
            f"--position-embedding-type must be one of {', '.join(DECODER_POSITIONS)} in a decoder, got "
            f"{model.position_embedding_type}. Use one of these, or pretrain_t5.py"
        )
    yield from _group_problems(model, config.parallel.model_parallel_size)
    if model.position_embedding_type == ROPE:
        yield from _rotary_problems(model)
    yield from _norm_problems(model)
    if model.hidden_bias and model.add_qkv_bias:
        yield (
            "--hidden-bias adds biases to all linear layers, including those of --add-qkv-bias, got both. Remove one "
            "of them"
        )
    yield from _window_problems(model)
    yield from _parallel_residual_problems(model)
    yield from _temperature_problems(model)
    if model.activation == "xielu" and model.num_experts:
        yield "--activation xielu has learned parameters and is not supported in experts. Use another activation"
    yield from layer_feature_problems(model)
    yield from expert_problems(config)
    yield from mtp_problems(config)
    yield from _scale_problems(config)
    yield from latent_problems(model)
    yield from recurrent_problems(config)
    yield from multiplier_problems(model)
    yield from qk_clip_problems(model)


def unused_features(config: Any) -> Iterator[str]:
    """Yield an error message for each feature set by a flag that has no effect."""
    model, explicit = config.model, config.explicit_fields
    for position_types, names in (
        ((ROPE,), _ROTARY),
        ((ALIBI,), ("alibi_bias_max",)),
    ):
        flags = [_flag(name) for name in names if name in explicit]
        if flags and model.position_embedding_type not in position_types:
            yield (
                f"{', '.join(flags)} has no effect without --position-embedding-type {position_types[0]}, got "
                f"{model.position_embedding_type}. Remove it, or change the type"
            )
    if model.position_embedding_type == ROPE:
        for allowed in sorted(set(_SCALINGS.values()), key=len, reverse=True):
            flags = [_flag(name) for name, scalings in _SCALINGS.items() if scalings == allowed and name in explicit]
            if flags and model.rotary_scaling not in allowed:
                yield (
                    f"{', '.join(flags)} has no effect without --rotary-scaling {' or '.join(allowed)}, got "
                    f"{model.rotary_scaling}. Remove it, or change --rotary-scaling"
                )
    if "norm_bias" in explicit and model.normalization != "LayerNorm":
        yield (
            f"--no-norm-bias applies to layer norms only, got --normalization {model.normalization}, which has no "
            "biases. Remove it"
        )
    for name, needed in (("window_attn_skip_freq", "window_size"), ("rotary_local_base", "window_size")):
        if name in explicit and not model.window_size:
            yield (
                f"{_flag(name)} applies to layers with a window only, got no {_flag(needed)}. Remove it, or add "
                f"{_flag(needed)}"
            )
    if "attention_temperature_floor" in explicit and not model.attention_temperature_scale:
        yield (
            "--attention-temperature-floor has no effect without --attention-temperature-scale. Remove it, or add "
            "--attention-temperature-scale"
        )
    if "window_size" in explicit and model.window_size > config.batch.seq_length and config.checkpoint.load is None:
        yield (
            f"--window-size must not exceed --seq-length, got {model.window_size} and {config.batch.seq_length}: each "
            "token already attends to all previous tokens. Remove it, or raise --seq-length"
        )
    yield from unused_layer_features(model, explicit)
    yield from unused_recurrent_features(model, explicit)
    if config.data.reset_position_ids and not model.has_position_ids:
        yield (
            f"--reset-position-ids has no effect with --position-embedding-type {model.position_embedding_type}, "
            "which has no position ids: --reset-attention-mask is enough to separate documents. Remove it"
        )


def window_notes(config: Any) -> Iterator[str]:
    """Yield a note if the window covers all tokens in a sample, which is accepted for runs with short samples."""
    model, length = config.model, config.batch.seq_length
    if (
        config.family_config.KIND == "decoder"
        and "window_size" in config.explicit_fields
        and model.window_size >= length - 1 > 0
    ):
        yield f"--window-size {model.window_size} has no effect: it covers all tokens of a sample of {length} tokens"


def _group_problems(model: Any, t: int) -> Iterator[str]:
    if not has_attention(model):
        return
    heads = model.num_attention_heads
    counts = {"--num-query-groups": model.num_query_groups}
    if model.window_num_query_groups:
        counts["--window-num-query-groups"] = model.window_num_query_groups
    for flag, groups in counts.items():
        if heads % groups:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"--num-attention-heads must be a multiple of {flag}, got {heads} and {groups}: each key-value head "
                f"serves the same number of query heads. Use one of {divisors} groups"
            )
        elif groups % t and heads % t == 0:
            divisors = [n for n in range(1, groups + 1) if groups % n == 0]
            yield (
                f"{flag} must be a multiple of --model-parallel-size, got {groups} and {t}: a key-value head cannot be "
                f"shared by several tensor ranks. Set --model-parallel-size to one of {divisors}, or raise {flag}"
            )


def _rotary_problems(model: Any) -> Iterator[str]:
    size = model.kv_hidden_size * model.rotary_percent
    if model.multi_latent_attention:  # ``latent_problems`` checks the size of the rotated part
        size = model.qk_pos_emb_head_dim
    elif model.kv_hidden_size % 2 and model.rotary_percent == 1:
        yield (
            "--kv-hidden-size, the size of one head, must be even for rotary positions, which rotate pairs of "
            f"elements, got {model.kv_hidden_size}. Change --num-attention-heads or --kv-hidden-size"
        )
    elif int(size) % 2 or int(size) < 2:
        yield (
            "--kv-hidden-size times --rotary-percent must be an even number of at least 2, because rotary positions "
            f"rotate pairs of elements, got {model.kv_hidden_size} x {model.rotary_percent:g} = {size:g}. Change one "
            "of them"
        )
    pairs = {
        "llama3": ("rotary_high_frequency_factor", "rotary_low_frequency_factor"),
        "yarn": ("rotary_beta_fast", "rotary_beta_slow"),
    }
    if model.rotary_scaling in pairs:
        upper, lower = pairs[model.rotary_scaling]
        high, low = getattr(model, upper), getattr(model, lower)
        is_strict = model.rotary_scaling == "llama3"  # Kimi K2 has yarn with equal betas
        if low > high or (low == high and is_strict):
            relation = "exceed" if is_strict else "be at least"
            yield f"{_flag(upper)} must {relation} {_flag(lower)}, got {high:g} and {low:g}. Raise {_flag(upper)}"
    if model.rotary_scaling == "longrope":
        yield from _longrope_problems(model, int(size) // 2)


def _longrope_problems(model: Any, num_pairs: int) -> Iterator[str]:
    for name in ("rotary_short_factors", "rotary_long_factors"):
        text = getattr(model, name)
        try:
            factors = parse_factors(text)
        except ValueError:
            yield f"{_flag(name)} must be a list of positive numbers such as [1.0,1.2,2.5], got {text!r}"
            continue
        if len(factors) != num_pairs:
            yield (
                f"{_flag(name)} needs one factor for each of the {num_pairs} rotated pairs of a head, got "
                f"{len(factors)}. Change the list, or the number of rotated elements: --kv-hidden-size x "
                "--rotary-percent, or --qk-pos-emb-head-dim"
            )


def _parallel_residual_problems(model: Any) -> Iterator[str]:
    if model.parallel_residual == SEQUENTIAL:
        return
    if model.norm_placement == "after":
        yield (
            f"--parallel-residual {model.parallel_residual} needs a norm before attention and feed-forward layer, got "
            "--norm-placement after. Remove one of them"
        )
    if model.apply_residual_connection_post_layernorm:
        yield (
            "--apply-residual-connection-post-layernorm cannot be combined with --parallel-residual "
            f"{model.parallel_residual}. Remove one of them"
        )


def _temperature_problems(model: Any) -> Iterator[str]:
    if model.attention_temperature_scale and model.position_embedding_type != ROPE:
        yield (
            f"--attention-temperature-scale {model.attention_temperature_scale:g} needs --position-embedding-type "
            f"rope, got {model.position_embedding_type}. Remove it, or change the type"
        )


def _norm_problems(model: Any) -> Iterator[str]:
    if model.apply_residual_connection_post_layernorm and model.norm_placement == "after":
        yield (
            "--apply-residual-connection-post-layernorm needs a norm before attention and feed-forward layer, got "
            "--norm-placement after. Remove one of them"
        )


def _scale_problems(config: Any) -> Iterator[str]:
    model, optimizer = config.model, config.optimizer.optimizer
    if model.mup_base_hidden_size and not (optimizer == "adamw" or config.optimizer.is_muon):
        yield (
            f"--mup-base-hidden-size scales learning rates for AdamW and Muon, got --optimizer {optimizer}. Use "
            "--optimizer adamw or muon, or remove it"
        )
    if model.dim_model_base and model.mup_base_hidden_size not in (0, model.dim_model_base):
        yield (
            "--dim-model-base and --mup-base-hidden-size both set the factor of the logits, got "
            f"{model.dim_model_base} and {model.mup_base_hidden_size}. Remove --dim-model-base"
        )
    head_scale = model.mup_head_scale or max(model.kv_hidden_size, 1) ** -0.5
    if model.mup_base_head_dim and model.softmax_scale not in (0.0, head_scale):
        yield (
            f"--mup-base-head-dim {model.mup_base_head_dim} multiplies attention scores by {head_scale:g}, got "
            f"--softmax-scale {model.softmax_scale:g}. Remove one of them"
        )


def _window_problems(model: Any) -> Iterator[str]:
    try:
        window_pattern(model.window_attn_skip_freq, model.num_layers)
    except ValueError:
        yield (
            "--window-attn-skip-freq must be a number of at least 1, or a list with 1 or 0 for each of the "
            f"{model.num_layers} layers such as [1,1,0] or ([1]*5+[0])*2, got {model.window_attn_skip_freq!r}"
        )


def _flag(name: str) -> str:
    return "--apply-layernorm-1p" if name == "layernorm_1p" else f"--{name.replace('_', '-')}"
