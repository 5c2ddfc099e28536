"""BranchMultipliers: constant factors of the parts of a layer, as in Falcon-H1; the flag --branch-multipliers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from megatron.config.layer_types import EXPERTS, MAMBA2, layer_types
from megatron.config.option import option

_option = partial(option, family_kind="decoder", elsewhere="it is supported in decoders only; remove it")


@dataclass(frozen=True)
class BranchMultipliers:
    """Factors of tensors within a layer.

    Args:
        attention_input: the input of attention.
        key: the keys, after their norm and rotation.
        attention_output: the output of attention.
        mamba_input: the input of Mamba-2.
        mamba_z, mamba_x, mamba_b, mamba_c, mamba_dt: the five projections of Mamba-2.
        mamba_output: the output of Mamba-2.
        mlp_gate: the gate of the feed-forward layer, before its activation.
        mlp_output: the output of the feed-forward layer.

    Source: TII 2025, "Falcon-H1", and its code.
    """

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    mamba_input: float = 1.0
    mamba_z: float = 1.0
    mamba_x: float = 1.0
    mamba_b: float = 1.0
    mamba_c: float = 1.0
    mamba_dt: float = 1.0
    mamba_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0

    @property
    def mamba_parts(self) -> tuple[float, float, float, float, float]:
        """Factors of z, x, B, C and dt."""
        return self.mamba_z, self.mamba_x, self.mamba_b, self.mamba_c, self.mamba_dt

    def changed(self) -> dict[str, float]:
        """Return the factors other than 1, by the names of ``--branch-multipliers``."""
        return {_flag_name(name): value for name, value in asdict(self).items() if value != 1.0}

    def __str__(self) -> str:
        """Return the value of ``--branch-multipliers``."""
        return ",".join(f"{name}={value!r}" for name, value in self.changed().items())


def _flag_name(field_name: str) -> str:
    return field_name.replace("_", "-")


_FIELDS = {_flag_name(name): name for name in BranchMultipliers.__dataclass_fields__}
NAMES = tuple(_FIELDS)
"""Names of the factors in ``--branch-multipliers``."""


@lru_cache
def parse_multipliers(text: str) -> BranchMultipliers:
    """Parse a list such as ``key=0.4,mlp-output=0.2``.

    Raises:
        ValueError: a name is unknown or occurs twice, or a factor is not a finite number other than 0.
    """
    values: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, number = (part.strip() for part in item.partition("="))
        factor = float(number)
        if name not in _FIELDS or _FIELDS[name] in values or not math.isfinite(factor) or factor == 0.0:
            raise ValueError(text)
        values[_FIELDS[name]] = factor
    return BranchMultipliers(**values)


@dataclass(frozen=True, kw_only=True)
class MultiplierFeatures:
    """The flag of ``BranchMultipliers``; a base of ``DecoderFeatures``."""

    branch_multipliers: str = _option(
        "",
        "constant factors of parts of each layer, as in Falcon-H1: a list such as key=0.4,mlp-output=0.2; the "
        f"others are 1. Names: {', '.join(NAMES)}",
        shown_default="none",
    )

    @cached_property
    def multipliers(self) -> BranchMultipliers:
        """The parsed factors.

        Raises:
            ValueError: ``branch_multipliers`` is invalid.
        """
        return parse_multipliers(self.branch_multipliers)


def multiplier_problems(model: Any) -> Iterator[str]:
    """Yield the problems of ``branch_multipliers`` in ``model``, a model section."""
    try:
        factors = parse_multipliers(model.branch_multipliers).changed()
    except ValueError:
        yield (
            f"--branch-multipliers must be a list such as key=0.4,mlp-output=0.2 of the names {', '.join(NAMES)}, each "
            f"with a factor other than 0, got {model.branch_multipliers!r}"
        )
        return
    try:
        types = layer_types(model)
    except ValueError:  # reported by ``recurrent_problems``
        return
    has_attention = any(layer_type.has_attention for layer_type in types) and not model.multi_latent_attention
    has_mamba = any(layer_type.recurrent_mixer == MAMBA2 for layer_type in types)
    has_experts = any(layer_type.feed_forward == EXPERTS for layer_type in types)
    for prefixes, is_supported, needed in (
        (("attention-", "key"), has_attention, "attention, without --multi-latent-attention"),
        (("mamba-",), has_mamba, "layers of Mamba-2"),
        (("mlp-",), not has_experts, "feed-forward layers without experts"),
        (("mlp-gate",), model.activation.startswith("gated-"), "a gated activation"),
    ):
        names = [name for name in factors if name.startswith(prefixes)]
        if names and not is_supported:
            yield f"--branch-multipliers: {', '.join(names)} needs {needed}. Remove it, or change the model"
