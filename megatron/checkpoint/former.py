"""Settings as earlier versions saved them -> as they are now: for checkpoints, run folders and what else names them.

| was | is |
|---|---|
| sections "llama" and "mpt" | fields of "model" |
| ``t5.position_embedding_type``, "learned" | ``model.position_embedding_type``, "learned_absolute" |
| a decoder's field that was not there yet | its default in the family |
| "progress" in samples alone | in tokens, too: "tokens_consumed" |
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


def progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "progress" of today of the state of a checkpoint that any version saved.

    Of one that names neither "tokens_consumed" nor the lengths of its samples, the first is left out.
    """
    found = dict(state["progress"])
    each = _tokens_per_sample(state.get("config", {}))
    if "tokens_consumed" not in found and each:
        found["tokens_consumed"] = each * found["samples_consumed"]
    return found


def _tokens_per_sample(saved: Mapping[str, Any]) -> int:
    own = saved.get(saved.get("family", FIRST_FAMILY), {})
    if "enc_seq_length" in own:
        return int(own["enc_seq_length"]) + int(own["dec_seq_length"])
    return int(saved.get("batch", {}).get("seq_length", 0))


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
