"""QKClipFeatures: flags for QK-clip and for the largest attention logit, named as in Megatron-LM, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.config.layer_types import has_attention
from megatron.config.option import option

_option = partial(option, family_kind="decoder", elsewhere="attention logits are measured in decoders only; remove it")


@dataclass(frozen=True, kw_only=True)
class QKClipFeatures:
    """QK-clip; a base of ``DecoderFeatures``."""

    qk_clip: bool = _option(
        False,
        "after each update, scale the query and key weights of every head whose largest attention logit of the step "
        "exceeds --qk-clip-threshold, so that it would equal the threshold (MuonClip)",
    )
    qk_clip_threshold: float = _option(100.0, "with --qk-clip: largest attention logit that is not clipped", above=0)
    qk_clip_alpha: float = _option(
        0.5,
        "with --qk-clip: exponent alpha of the factor of queries; the exponent of keys is 1 - alpha",
        above=0,
        below=1,
    )
    qk_clip_bound: bool = _option(
        False,
        "measure an upper bound, the largest |q| |k|, instead of the largest attention logit: cheaper, but "
        "--qk-clip clips more",
    )
    log_max_attention_logit: bool = _option(
        False, "log max_attention_logit, the largest attention logit of all heads in a step, as --qk-clip does"
    )

    @property
    def measures_logits(self) -> bool:
        """True if attention layers measure their largest logits."""
        return self.qk_clip or self.log_max_attention_logit


TRAINING = tuple(field.name for field in fields(QKClipFeatures))
"""Fields that affect training, but not the outputs of a model."""


def qk_clip_problems(model: Any) -> Iterator[str]:
    """Yield an error message for each setting in ``model``, a model section, that QK-clip or its metric rejects."""
    if not model.measures_logits:
        return
    flag = "--qk-clip" if model.qk_clip else "--log-max-attention-logit"
    if not has_attention(model):
        yield f"{flag} needs softmax attention, which no layer has. Remove it, or change the layer types"
    if model.qk_clip and model.qk_norm != "none":
        yield (
            f"--qk-clip has no effect with --qk-norm {model.qk_norm}, which undoes any scaling of query and key "
            "weights and bounds the logits itself. Remove --qk-clip; --log-max-attention-logit shows the logits"
        )
    if model.qk_clip and model.clip_qkv:
        yield (
            f"--qk-clip does not support --clip-qkv {model.clip_qkv:g}: scaled weights do not scale clamped queries "
            "and keys. Remove one of them"
        )
