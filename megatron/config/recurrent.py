"""RecurrentLayers: flags of hybrid decoders, whose layers have different mixers, named as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.config.layer_types import (
    ATTENTION,
    KIMI_DELTA,
    MAMBA2,
    MTP_SEPARATOR,
    NO_MLP,
    NO_VARIANT,
    PATTERN_LETTERS,
    PIPELINE_BOUND,
    VARIANTS,
    LayerType,
    is_hybrid,
    layer_types,
    linear_layers,
    parse_pattern,
)
from megatron.config.option import option

_option = partial(option, family_kind="decoder", elsewhere="recurrent layers are supported in decoders only; remove it")

SAME = "same"
GROUP_NORM, NORM_FIRST, NO_NORM = "group", "norm-first", "none"
MAMBA_EXPANSION = 2
"""Default total width of the heads of Mamba-2, divided by the hidden size (without ``mamba_num_heads``)."""


@dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
    """Types of the layers and sizes of their recurrent mixers; a base of ``DecoderFeatures``.

    The fields whose names start with ``linear_`` have an effect with the mixers gated-delta-net and kimi-delta, those
    with ``mamba_`` with Mamba-2. Without these mixers they are reset to their defaults.
    """

    experimental_attention_variant: str = _option(
        NO_VARIANT,
        "mixer of recurrent layers: gated_delta_net (Qwen3-Next), kimi_delta (Kimi Linear), mamba2; parallel_mamba2: "
        "attention and Mamba-2 with the same input, as in Falcon-H1; --linear-attention-freq selects the "
        "layers",
        choices=(NO_VARIANT, *VARIANTS),
        synonyms={"gdn": "gated_delta_net", "kda": "kimi_delta"},
    )
    linear_attention_freq: str = _option(
        "",
        "layers with the mixer of --experimental-attention-variant: N: all except every N-th, which have attention; or "
        "a list with 1 for a recurrent layer and 0 for attention, such as [1,1,0] or ([1]*3+[0])*2",
        shown_default="all",
    )
    hybrid_layer_pattern: str = _option(
        "",
        "layers as letters, each either a mixer or a feed-forward half: M Mamba-2, G the mixer of "
        "--experimental-attention-variant (gated_delta_net), * attention, + multi-latent attention, - feed-forward, "
        "E experts; | separates the virtual pipeline stages; determines --num-layers",
        aliases=("--hybrid-override-pattern",),
    )
    linear_conv_kernel_dim: int = _option(
        4, "kernel size, in tokens, of the short convolution of delta-rule layers", minimum=1
    )
    linear_key_head_dim: int = _option(128, "size of a query or key head of delta-rule layers", minimum=1)
    linear_value_head_dim: int = _option(128, "size of a value head of delta-rule layers", minimum=1)
    linear_num_key_heads: int = _option(16, "number of query and key heads of delta-rule layers", minimum=1)
    linear_num_value_heads: int = _option(
        32, "number of value heads of delta-rule layers, a multiple of --linear-num-key-heads", minimum=1
    )
    linear_allow_neg_eigval: bool = _option(
        False,
        "double beta of the delta rule, so that the eigenvalues of the state's transition are from -1 to 1, as in OLMo "
        "Hybrid",
    )
    linear_norm_epsilon: float = _option(
        0.0, "epsilon of the output norm of delta-rule layers; OLMo Hybrid: 1e-5", above=0, shown_default="norm-epsilon"
    )
    linear_norm_placement: str = _option(
        SAME,
        "--norm-placement of layers with the mixers gated_delta_net and kimi_delta; OLMo Hybrid: before",
        choices=(SAME, "before", "after", "both"),
    )
    linear_full_rank_gates: bool = _option(
        False,
        "kimi_delta: compute decays and output gates with full matrices, as in bailing_hybrid, instead of products "
        "of rank --linear-key-head-dim",
    )
    linear_decay_limit: float = _option(
        0.0,
        "kimi_delta: largest magnitude of a token's log decay, which is then a scaled sigmoid instead of a softplus; "
        "0: no limit; bailing_hybrid: 5",
        minimum=0,
    )
    mamba_state_dim: int = _option(128, "state size n of Mamba-2 per channel", minimum=1)
    mamba_head_dim: int = _option(64, "size of a head of Mamba-2", minimum=1)
    mamba_num_groups: int = _option(8, "number of groups of heads of Mamba-2 that share B and C", minimum=1)
    mamba_num_heads: int = _option(
        0, "number of heads of Mamba-2", minimum=1, shown_default=f"{MAMBA_EXPANSION} x hidden-size / mamba-head-dim"
    )
    mamba_conv_kernel_dim: int = _option(4, "kernel size, in tokens, of the convolution of Mamba-2", minimum=1)
    mamba_conv_bias: bool = _option(
        True, "omit the bias of the convolution of Mamba-2", flag="", constants={"--no-mamba-conv-bias": False}
    )
    mamba_proj_bias: bool = _option(False, "biases in the projections of Mamba-2")
    mamba_norm: str = _option(
        GROUP_NORM,
        "output norm of Mamba-2: group: RMS norm of y silu(z) over each of --mamba-norm-groups groups of channels; "
        "norm-first: the same norm of y, multiplied by silu(z); none: y silu(z), as in Falcon-H1",
        choices=(GROUP_NORM, NORM_FIRST, NO_NORM),
    )
    mamba_norm_groups: int = _option(
        0, "number of groups of channels in the output norm of Mamba-2", minimum=1, shown_default="mamba-num-groups"
    )
    mamba_dt_limit_min: float = _option(0.0, "lower bound of the time step of Mamba-2", minimum=0)
    mamba_dt_limit_max: float = _option(0.0, "upper bound of the time step of Mamba-2; 0: none", minimum=0)

    def _derive_recurrent_sizes(self) -> None:
        """Set the fields that follow from others; reset those of mixers that the model does not have.

        Pipeline bounds are removed from the pattern, because they are settings of the layout
        (``megatron.arguments.derived_sizes``).
        """
        if letters := self.hybrid_layer_pattern.replace(PIPELINE_BOUND, ""):
            object.__setattr__(self, "hybrid_layer_pattern", letters)
        try:
            mixers = {layer_type.recurrent_mixer for layer_type in self._layer_types()}
        except ValueError:  # reported by ``recurrent_problems``
            return
        for names, has_mixer in ((LINEAR, bool(mixers & DELTA_MIXERS)), (MAMBA, MAMBA2 in mixers)):
            for name in () if has_mixer else names:
                object.__setattr__(self, name, RecurrentLayers.__dataclass_fields__[name].default)
        if MAMBA2 in mixers and not self.mamba_num_heads:
            width = MAMBA_EXPANSION * getattr(self, "hidden_size", 0)
            object.__setattr__(self, "mamba_num_heads", width // self.mamba_head_dim)
        if MAMBA2 in mixers and not self.mamba_norm_groups:
            object.__setattr__(self, "mamba_norm_groups", self.mamba_num_groups)
        if mixers & DELTA_MIXERS and not self.linear_norm_epsilon:
            object.__setattr__(self, "linear_norm_epsilon", getattr(self, "layernorm_epsilon", 1e-5))

    def _layer_types(self) -> tuple[LayerType, ...]:
        """Return the layer types; empty in a class without a number of layers."""
        return layer_types(self) if hasattr(self, "num_layers") and hasattr(self, "num_experts") else ()


DELTA_MIXERS = {VARIANTS["gated_delta_net"], KIMI_DELTA}
_NAMES = tuple(field.name for field in fields(RecurrentLayers))
LAYERS = _NAMES[:3]
"""Fields that determine the layer types."""
LINEAR = tuple(name for name in _NAMES[3:] if name.startswith("linear_"))
"""Fields of the mixers gated-delta-net and kimi-delta."""
MAMBA = tuple(name for name in _NAMES if name.startswith("mamba_"))
"""Fields of Mamba-2."""
REFITTED = (
    "linear_allow_neg_eigval", "linear_norm_epsilon", "linear_decay_limit", "mamba_norm_groups", "mamba_dt_limit_min",
    "mamba_dt_limit_max",
)  # fmt: skip
"""Fields that may differ when weights are loaded: the weights fit, but the outputs change."""
ARCHITECTURE = (
    "experimental_attention_variant", "linear_attention_freq", "linear_allow_neg_eigval", "linear_norm_epsilon",
    "linear_norm_placement", "linear_full_rank_gates", "linear_decay_limit", "mamba_conv_bias", "mamba_proj_bias",
    "mamba_norm", "mamba_norm_groups", "mamba_dt_limit_min", "mamba_dt_limit_max",
)  # fmt: skip
"""Fields that ``--model`` sets, without sizes."""


def norm_placement_of(model: Any, layer_type: LayerType) -> str:
    """Return the placement of the norms of a layer."""
    is_separate = layer_type.mixer in DELTA_MIXERS and model.linear_norm_placement != SAME
    placement: str = model.linear_norm_placement if is_separate else model.norm_placement
    return placement


def recurrent_problems(config: Any) -> Iterator[str]:
    """Yield the problems of the layer types and of recurrent mixers in ``config``, a ``Config`` of a decoder."""
    model = config.model
    yield from _layer_problems(model, config.explicit_fields)
    try:
        types = layer_types(model)
    except ValueError:  # reported above, or by ``expert_problems``
        return
    mixers = {layer_type.recurrent_mixer for layer_type in types}
    if mixers & DELTA_MIXERS:
        yield from _linear_problems(model, config.parallel.model_parallel_size, has_kimi=KIMI_DELTA in mixers)
    if MAMBA2 in mixers:
        yield from _mamba_problems(model, config.parallel.model_parallel_size)
    if is_hybrid(model):
        yield from _combination_problems(config, types)


def _layer_problems(model: Any, explicit: tuple[str, ...]) -> Iterator[str]:
    pattern, variant, frequency = (getattr(model, name) for name in ("hybrid_layer_pattern", *LAYERS[:2]))
    if frequency and variant == NO_VARIANT:
        yield (
            f"--linear-attention-freq {frequency} needs the mixer of the recurrent layers. Add "
            "--experimental-attention-variant gated_delta_net, kimi_delta, mamba2 or parallel_mamba2"
        )
    try:
        linear_layers(variant, frequency, model.num_layers)
    except ValueError:
        yield (
            "--linear-attention-freq must be a number of at least 1, or a list with 1 or 0 for each of the "
            f"{model.num_layers} layers such as [1,1,0] or ([1]*3+[0])*2, got {frequency!r}"
        )
    if pattern:
        yield from _pattern_problems(model, explicit)


def _pattern_problems(model: Any, explicit: tuple[str, ...]) -> Iterator[str]:
    pattern = model.hybrid_layer_pattern
    if MTP_SEPARATOR in pattern:
        yield (
            f"--hybrid-layer-pattern does not support multi-token prediction layers after /, got {pattern!r}. Remove "
            "them"
        )
        return
    try:
        letters = parse_pattern(pattern)
    except ValueError:
        yield (
            f"--hybrid-layer-pattern must consist of the letters {' '.join(PATTERN_LETTERS)}, and | between virtual "
            f"pipeline stages, got {pattern!r}"
        )
        return
    if len(letters) != model.num_layers:
        yield (
            f"--hybrid-layer-pattern must have one letter per layer, got {len(letters)} letters and --num-layers "
            f"{model.num_layers}. Remove --num-layers"
        )
    if model.linear_attention_freq:
        yield (
            f"--linear-attention-freq {model.linear_attention_freq} cannot be combined with --hybrid-layer-pattern, "
            "which has a letter for each layer. Remove one of them"
        )
    if "moe_layer_freq" in explicit:
        yield "--moe-layer-freq cannot be combined with --hybrid-layer-pattern. Remove it, and write E for experts"
    if "G" in letters and model.experimental_attention_variant == "parallel_mamba2":
        yield (
            "the letter G of --hybrid-layer-pattern selects a layer without attention, got "
            "--experimental-attention-variant parallel_mamba2. Use gated_delta_net or kimi_delta"
        )
    if "G" not in letters and model.experimental_attention_variant != NO_VARIANT:
        yield (
            f"--experimental-attention-variant {model.experimental_attention_variant} has no effect without the letter "
            f"G in --hybrid-layer-pattern {pattern}. Remove it, or write G for the layers with this mixer"
        )
    if "E" in letters and not model.num_experts:
        yield f"--hybrid-layer-pattern {pattern} has layers of experts (E). Add --num-experts, or write -"
    if "E" not in letters and model.num_experts:
        yield (
            f"--num-experts {model.num_experts} has no effect without the letter E in --hybrid-layer-pattern {pattern}."
            " Remove it, or write E for the layers of experts"
        )
    if "*" in letters and model.multi_latent_attention:
        yield f"--multi-latent-attention needs + in --hybrid-layer-pattern, got * in {pattern}. Write + instead"
    if "+" in letters and not model.multi_latent_attention:
        yield f"the letter + of --hybrid-layer-pattern {pattern} needs --multi-latent-attention. Add it, or write *"


def _linear_problems(model: Any, t: int, *, has_kimi: bool) -> Iterator[str]:
    key_heads, value_heads = model.linear_num_key_heads, model.linear_num_value_heads
    if value_heads % key_heads:
        yield (
            f"--linear-num-value-heads must be a multiple of --linear-num-key-heads, got {value_heads} and {key_heads}."
            " Change one of them"
        )
    elif key_heads % t:
        yield (
            f"--linear-num-key-heads must be a multiple of --model-parallel-size, got {key_heads} and {t}: a key head "
            "cannot be shared by several tensor ranks. Change one of them"
        )
    sizes = model.linear_key_head_dim, model.linear_value_head_dim
    if has_kimi and (key_heads != value_heads or sizes[0] != sizes[1]):
        yield (
            "kimi_delta needs equal numbers and sizes of key heads and value heads, got --linear-num-key-heads "
            f"{key_heads}, --linear-num-value-heads {value_heads}, --linear-key-head-dim {sizes[0]} and "
            f"--linear-value-head-dim {sizes[1]}. Set each pair to one value"
        )


def _mamba_problems(model: Any, t: int) -> Iterator[str]:
    heads, groups, norm_groups = model.mamba_num_heads, model.mamba_num_groups, model.mamba_norm_groups
    if heads < 1:
        yield (
            f"--mamba-head-dim must not exceed {MAMBA_EXPANSION} x --hidden-size, got {model.mamba_head_dim} and "
            f"{model.hidden_size}. Lower it, or set --mamba-num-heads"
        )
    elif heads % groups or heads % norm_groups:
        yield (
            "--mamba-num-heads must be a multiple of --mamba-num-groups and --mamba-norm-groups, got "
            f"{heads}, {groups} and {norm_groups}. Change one of them"
        )
    for flag, count in (("--mamba-num-groups", groups), ("--mamba-norm-groups", norm_groups)):
        if count % t and t % count and not (flag == "--mamba-norm-groups" and count == groups):
            yield (
                f"{flag} must be a multiple or a divisor of --model-parallel-size, got {count} and {t}. Change one of "
                "them"
            )
    if heads % t:
        yield (
            f"--mamba-num-heads must be a multiple of --model-parallel-size, got {heads} and {t}. Change one of them"
        )
    if model.mamba_dt_limit_max and model.mamba_dt_limit_max <= model.mamba_dt_limit_min:
        yield (
            "--mamba-dt-limit-max must exceed --mamba-dt-limit-min, got "
            f"{model.mamba_dt_limit_max:g} and {model.mamba_dt_limit_min:g}. Change one of them"
        )


def _combination_problems(config: Any, types: tuple[LayerType, ...]) -> Iterator[str]:
    """Yield an error message for each feature that hybrid decoders do not support."""
    model, parallel = config.model, config.parallel
    hybrid_flag = "--hybrid-layer-pattern" if model.hybrid_layer_pattern else "--experimental-attention-variant"
    if model.parallel_residual != "none" and any(layer_type.num_halves == 1 for layer_type in types):
        yield (
            f"--parallel-residual {model.parallel_residual} needs a mixer and a feed-forward half in each layer, got "
            f"--hybrid-layer-pattern {model.hybrid_layer_pattern}. Remove one of them"
        )
    if model.mtp_num_layers and types and (types[-1].mixer != ATTENTION or types[-1].feed_forward == NO_MLP):
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} needs attention and a feed-forward half in the last layer, "
            f"because multi-token prediction layers copy its type, got {types[-1].label}. Change {hybrid_flag}, or "
            "remove --mtp-num-layers"
        )
    if parallel.compile:
        yield f"--compile supports attention layers only, got {hybrid_flag}. Remove one of them"
    if config.checkpoint.checkpoint_format == "deepspeed":
        yield f"--checkpoint-format deepspeed does not support {hybrid_flag}. Use --checkpoint-format native"


def unused_recurrent_features(model: Any, explicit: tuple[str, ...]) -> Iterator[str]:
    """Yield a message for each of ``LAYERS`` in ``explicit`` that has no effect."""
    if "experimental_attention_variant" in explicit and not model.hybrid_layer_pattern:
        try:
            has_layer = any(
                linear_layers(model.experimental_attention_variant, model.linear_attention_freq, model.num_layers)
            )
        except ValueError:  # reported by ``recurrent_problems``
            return
        if not has_layer and model.experimental_attention_variant != NO_VARIANT:
            yield (
                f"--experimental-attention-variant {model.experimental_attention_variant} has no effect with "
                f"--linear-attention-freq {model.linear_attention_freq}, which selects attention in all layers. Change "
                "or remove one of them"
            )
