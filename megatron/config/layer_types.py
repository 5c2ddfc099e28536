"""Layer types of a decoder: the mixer and the feed-forward half of each layer. Does not import torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from megatron.config.experts import expert_layers, layer_pattern, period

# A mixer combines the tokens of a sequence: attention, or a recurrent layer whose state has a constant size. Either
# half of a layer may be absent, as in Nemotron-H, whose layers have one half each.
#
# | flags | layers |
# |---|---|
# | none | attention and feed-forward |
# | --experimental-attention-variant, --linear-attention-freq | some or all mixers are recurrent |
# | --hybrid-layer-pattern | one half per letter, see ``PATTERN_LETTERS`` |

ATTENTION, NO_MIXER = "attention", ""
GATED_DELTA_NET, KIMI_DELTA, MAMBA2 = "gated-delta-net", "kimi-delta", "mamba2"
PARALLEL_MAMBA = "attention+mamba2"
"""Attention and Mamba-2 with the same input, whose outputs are added, as in Falcon-H1."""
MLP, EXPERTS, NO_MLP = "mlp", "experts", ""

NO_VARIANT = "none"
VARIANTS = {
    "gated_delta_net": GATED_DELTA_NET,
    "kimi_delta": KIMI_DELTA,
    "mamba2": MAMBA2,
    "parallel_mamba2": PARALLEL_MAMBA,
}
"""Values of ``experimental_attention_variant`` -> mixer of the recurrent layers."""
PATTERN_LETTERS = {
    "M": "Mamba-2",
    "G": "the mixer of --experimental-attention-variant, by default gated_delta_net",
    "*": "attention",
    "+": "attention with --multi-latent-attention",
    "-": "feed-forward",
    "E": "feed-forward with experts",
}
"""Letters of ``hybrid_layer_pattern``, as in Megatron-LM."""
PIPELINE_BOUND, MTP_SEPARATOR = "|", "/"


class LayerType(NamedTuple):
    """The two halves of a layer.

    Args:
        mixer: one of the mixers above; NO_MIXER: the layer has only a feed-forward half.
        feed_forward: MLP or EXPERTS; NO_MLP: the layer has only a mixer.
    """

    mixer: str = ATTENTION
    feed_forward: str = MLP

    @property
    def has_attention(self) -> bool:
        return self.mixer in (ATTENTION, PARALLEL_MAMBA)

    @property
    def recurrent_mixer(self) -> str:
        """The recurrent mixer of the layer: MAMBA2 for PARALLEL_MAMBA; NO_MIXER if the layer has none."""
        return {ATTENTION: NO_MIXER, PARALLEL_MAMBA: MAMBA2}.get(self.mixer, self.mixer)

    @property
    def num_halves(self) -> int:
        """Number of additions to the residual stream."""
        return (self.mixer != NO_MIXER) + (self.feed_forward != NO_MLP)

    @property
    def label(self) -> str:
        """Description such as "gated-delta-net + mlp", for reports."""
        return " + ".join(half for half in self if half)


def layer_types(model: Any) -> tuple[LayerType, ...]:
    """Return the type of each layer of ``model``, a model section or ``ModelArgs``.

    Raises:
        ValueError: a pattern is invalid, or does not have one entry per layer.
    """
    return _layer_types(
        getattr(model, "hybrid_layer_pattern", ""),
        getattr(model, "experimental_attention_variant", NO_VARIANT),
        getattr(model, "linear_attention_freq", ""),
        model.num_layers,
        model.num_experts,
        model.moe_layer_freq,
    )


@lru_cache
def _layer_types(
    pattern: str, variant: str, frequency: str, num_layers: int, num_experts: int, expert_frequency: str
) -> tuple[LayerType, ...]:
    if pattern:
        letters = parse_pattern(pattern)
        if len(letters) != num_layers:
            raise ValueError(pattern)
        return tuple(_type_of_letter(letter, variant) for letter in letters)
    has_experts = expert_layers(expert_frequency, num_layers) if num_experts else (False,) * num_layers
    is_linear = linear_layers(variant, frequency, num_layers)
    return tuple(
        LayerType(VARIANTS[variant] if linear else ATTENTION, EXPERTS if experts else MLP)
        for linear, experts in zip(is_linear, has_experts, strict=True)
    )


def type_of_letter(letter: str, model: Any) -> LayerType:
    """Return the layer type of a letter of ``hybrid_layer_pattern`` in ``model``."""
    return _type_of_letter(letter, model.experimental_attention_variant)


def _type_of_letter(letter: str, variant: str) -> LayerType:
    if letter in "-E":
        return LayerType(NO_MIXER, MLP if letter == "-" else EXPERTS)
    mixers = {"M": MAMBA2, "G": VARIANTS.get(variant, GATED_DELTA_NET), "*": ATTENTION, "+": ATTENTION}
    return LayerType(mixers[letter], NO_MLP)


def linear_layers(variant: str, frequency: str, num_layers: int) -> tuple[bool, ...]:
    """Return a bool per layer: True if its mixer is recurrent.

    Args:
        variant: value of ``experimental_attention_variant``.
        frequency: value of ``linear_attention_freq``.

    Raises:
        ValueError: ``frequency`` is invalid, or its list does not have one entry per layer.

    Source: Megatron-LM's ``--linear-attention-freq``: a number, or an expression of lists.
    """
    if variant == NO_VARIANT:
        return (False,) * num_layers
    if not frequency:
        return (True,) * num_layers
    if interval := period(frequency):
        return tuple(layer % interval != 0 for layer in range(1, num_layers + 1))
    return layer_pattern(frequency, num_layers)


def parse_pattern(text: str) -> str:
    """Return the letters of a hybrid layer pattern, one per layer, without pipeline bounds.

    Raises:
        ValueError: the pattern is empty, or contains characters other than ``PATTERN_LETTERS`` and ``|``.
    """
    letters = text.replace(PIPELINE_BOUND, "")
    if not letters or not set(letters) <= set(PATTERN_LETTERS):
        raise ValueError(text)
    return letters


def has_experts(model: Any, layer_idx: int) -> bool:
    """Return True if layer ``layer_idx`` of ``model``, counted from 0, has experts.

    Raises:
        ValueError: see ``layer_types``.
    """
    return layer_types(model)[layer_idx].feed_forward == EXPERTS


def is_hybrid(model: Any) -> bool:
    """Return True if any layer is not plain attention plus feed-forward; False if the layer types are invalid."""
    try:
        return any(layer_type.mixer != ATTENTION or not layer_type.feed_forward for layer_type in layer_types(model))
    except ValueError:
        return False


def has_attention(model: Any) -> bool:
    """Return True if any layer has attention, if the model has no layers, or if its layer types are invalid."""
    try:
        types = layer_types(model)
    except ValueError:
        return True
    return not types or any(layer_type.has_attention for layer_type in types)


def recurrent_mixers(model: Any) -> frozenset[str]:
    """Return the recurrent mixers of a model; empty if it has none or if its layer types are invalid."""
    try:
        return frozenset(layer_type.recurrent_mixer for layer_type in layer_types(model)) - {NO_MIXER}
    except ValueError:
        return frozenset()


def num_residual_additions(model: Any) -> int:
    """Return the number of additions of all layers to the residual stream: two per layer with both halves."""
    return sum(layer_type.num_halves for layer_type in layer_types(model))
