"""Settings as earlier versions saved them -> as they are now: for checkpoints, run folders and what else names them.

| was | is |
|---|---|
| sections "llama" and "mpt" | fields of "model" |
| ``t5.position_embedding_type``, "learned" | ``model.position_embedding_type``, "learned_absolute" |
| a decoder's field that was not there yet | its default in the family |
| "progress" in samples alone | in tokens, too: "tokens_consumed" |
| "progress" without "samples_skipped" | the samples that the learning rate of that run had not counted |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.config.batch import BatchConfig
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

    Without "tokens_consumed" and the lengths of samples in ``state``, "tokens_consumed" is left out.
    """
    found = dict(state["progress"])
    each = _tokens_per_sample(state.get("config", {}))
    if "tokens_consumed" not in found and each:
        found["tokens_consumed"] = each * found["samples_consumed"]
    if "samples_skipped" not in found and "updates" in found:
        found["samples_skipped"] = _samples_skipped(state)
    return found


def _samples_skipped(state: Mapping[str, Any]) -> int:
    """Return the samples of which no update was made, as far as an earlier version's checkpoint shows them.

    If the batch sizes of the run did not change, its learning rate continues exactly where it was.
    """
    progress, batch = state["progress"], state.get("config", {}).get("batch", {})
    consumed, step, skipped = progress["samples_consumed"], progress["step"], progress["step"] - progress["updates"]
    has_left_out_samples = state.get("guard", {}).get("returns", 0) > 0  # by a rollback, which counts no steps for them
    names = {each.name for each in fields(BatchConfig)}
    try:
        sizes = BatchConfig(**{name: value for name, value in batch.items() if name in names}).sizes(
            state["layout"]["data"]
        )
    except (KeyError, ValueError):
        return round(consumed * skipped / max(step, 1))
    if consumed == sizes.consumed_after(step) or has_left_out_samples:
        return max(consumed - sizes.consumed_after(progress["updates"]), 0)
    return round(consumed * skipped / max(step, 1))


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
