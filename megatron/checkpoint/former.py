"""Convert settings and state saved by earlier versions to their current form.

| earlier | now |
|---|---|
| sections "llama" and "mpt" | fields of "model" |
| ``t5.position_embedding_type``, "learned" | ``model.position_embedding_type``, "learned_absolute" |
| a decoder field that did not exist yet | the family's default |
| "progress" only in samples | also in tokens: "tokens_consumed" |
| "progress" without "samples_skipped" | with "samples_skipped": samples that the learning-rate schedule did not count |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.config.batch import BatchConfig
from megatron.config.config import FIRST_FAMILY
from megatron.config.decoder import IDENTITY, LEARNED, DecoderFeatures
from megatron.models.registry import FAMILIES

_POSITION_TYPE = "position_embedding_type"


def convert_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings saved by any version to the current form of ``Config.to_dict()``; absent fields stay absent."""
    family, converted = saved.get("family", FIRST_FAMILY), dict(saved)
    model = dict(saved.get("model", {}))
    for name in FAMILIES:
        family_fields = converted.get(name, {})
        model |= {field: value for field, value in family_fields.items() if field in IDENTITY}
        remaining = {field: value for field, value in family_fields.items() if field not in IDENTITY}
        if name in converted:
            converted[name] = remaining
            if not remaining:
                del converted[name]
    return {**converted, "model": _with_defaults(model, family)} if model else converted


def convert_identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an identity saved by any version to the current form of ``Config.identity()``."""
    return _with_defaults(saved, saved.get("family", FIRST_FAMILY))


def convert_progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert "progress" in a checkpoint's ``state``, saved by any version, to the current form.

    If ``state`` has neither "tokens_consumed" nor the sequence lengths, the result has no "tokens_consumed".
    """
    converted = dict(state["progress"])
    tokens_per_sample = _tokens_per_sample(state.get("config", {}))
    if "tokens_consumed" not in converted and tokens_per_sample:
        converted["tokens_consumed"] = tokens_per_sample * converted["samples_consumed"]
    if "samples_skipped" not in converted and "updates" in converted:
        converted["samples_skipped"] = _samples_skipped(state)
    return converted


def _samples_skipped(state: Mapping[str, Any]) -> int:
    """Reconstruct the number of samples in skipped steps from an earlier version's checkpoint.

    The count is exact if the run's batch size did not change; the learning rate then continues without a jump.
    Otherwise it is an estimate.
    """
    progress, batch = state["progress"], state.get("config", {}).get("batch", {})
    samples_consumed, step, num_skipped_steps = (
        progress["samples_consumed"],
        progress["step"],
        progress["step"] - progress["updates"],
    )
    # a rollback skips samples without incrementing the step
    has_left_out_samples = state.get("guard", {}).get("returns", 0) > 0
    names = {field.name for field in fields(BatchConfig)}
    try:
        batch_sizes = BatchConfig(**{name: value for name, value in batch.items() if name in names}).batch_sizes(
            state["layout"]["data"]
        )
    except (KeyError, ValueError):
        return round(samples_consumed * num_skipped_steps / max(step, 1))
    if samples_consumed == batch_sizes.consumed_after(step) or has_left_out_samples:
        return max(samples_consumed - batch_sizes.consumed_after(progress["updates"]), 0)
    return round(samples_consumed * num_skipped_steps / max(step, 1))


def _tokens_per_sample(saved: Mapping[str, Any]) -> int:
    family_settings = saved.get(saved.get("family", FIRST_FAMILY), {})
    if "enc_seq_length" in family_settings:
        return int(family_settings["enc_seq_length"]) + int(family_settings["dec_seq_length"])
    return int(saved.get("batch", {}).get("seq_length", 0))


def _with_defaults(model: Mapping[str, Any], family: str) -> dict[str, Any]:
    completed = dict(model)
    if completed.get(_POSITION_TYPE) == "learned":
        completed[_POSITION_TYPE] = LEARNED
    if family not in FAMILIES or FAMILIES[family].model_type != "decoder":
        return completed
    defaults = {field.name: field.default for field in fields(DecoderFeatures)} | dict(FAMILIES[family].config.DEFAULTS)
    if "window_num_query_groups" not in completed and not completed.get("multi_latent_attention"):
        completed.pop("v_head_dim", None)  # had no effect and its default 128 without multi-latent attention
    if "num_attention_heads" in completed:
        defaults["num_query_groups"] = completed["num_attention_heads"]
    return {**{name: defaults[name] for name in IDENTITY}, **completed}
