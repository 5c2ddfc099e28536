"""Settings as earlier versions saved them -> as they are now: for checkpoints, run folders and what else names them.

| was | is |
|---|---|
| sections "llama" and "mpt" | fields of "model" |
| ``t5.position_embedding_type``, "learned" | ``model.position_embedding_type``, "learned_absolute" |
| a decoder's field that was not there yet | its default in the family |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.config.config import FIRST_FAMILY
from megatron.config.decoder import IDENTITY, LEARNED, DecoderFeatures
from megatron.models.registry import FAMILIES

_POSITIONS = "position_embedding_type"


def settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Config.to_dict()`` of today of one that any version saved, as far as it says anything."""
    family, found = saved.get("family", FIRST_FAMILY), dict(saved)
    model = dict(saved.get("model", {}))
    for name in FAMILIES:
        own = found.get(name, {})
        model |= {field: value for field, value in own.items() if field in IDENTITY}
        left = {field: value for field, value in own.items() if field not in IDENTITY}
        if name in found:
            found[name] = left
            if not left:
                del found[name]
    return {**found, "model": _completed(model, family)} if model else found


def identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Config.identity()`` of today of one that any version saved."""
    return _completed(saved, saved.get("family", FIRST_FAMILY))


def _completed(model: Mapping[str, Any], family: str) -> dict[str, Any]:
    found = dict(model)
    if found.get(_POSITIONS) == "learned":
        found[_POSITIONS] = LEARNED
    if family not in FAMILIES or FAMILIES[family].kind != "decoder":
        return found
    usual = {field.name: field.default for field in fields(DecoderFeatures)} | dict(FAMILIES[family].config.DEFAULTS)
    if "num_attention_heads" in found:
        usual["num_query_groups"] = found["num_attention_heads"]
    return {**{name: usual[name] for name in IDENTITY}, **found}
