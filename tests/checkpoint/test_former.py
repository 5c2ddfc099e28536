"""Settings of earlier versions are read as those of today: sections of families, names, fields that were not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import config_from_values
from megatron.checkpoint import check_model, former
from megatron.checkpoint.huggingface.config import saved_config
from megatron.config.decoder import IDENTITY
from megatron.errors import CheckpointError
from megatron.training.compatibility import changed_settings
from megatron.training.train_progress import TrainProgress

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 29}
OLD_SECTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "num_query_groups": 2, "rotary_base": 500.0, "rotary_scaling": "none", "rotary_scaling_factor": 8.0,
        "rotary_low_frequency_factor": 1.0, "rotary_high_frequency_factor": 4.0, "rotary_original_positions": 8192,
    },
    "mpt": {"alibi_bias_max": 16, "clip_qkv": 6.0},
    "t5": {"position_embedding_type": "learned", "relative_attention_num_buckets": 8, "enc_layers": 2, "dec_layers": 2},
}  # fmt: skip
"""Family -> its section, which they had: of T5 a part."""


def legacy_settings(family: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return settings and identity as an earlier version saved them, and the Config of today."""
    config = config_from_values({**SIZES, **OLD_SECTIONS[family]}, family=family)
    current, identity = config.to_dict(), config.identity()
    model = {key: value for key, value in current["model"].items() if key not in IDENTITY}
    section = {**current.get(family, {}), **OLD_SECTIONS[family]}
    shared = {key: value for key, value in current.items() if key not in ("family", "model", family)}
    old_settings = {"family": family, "model": model, **({family: section} if section else {}), **shared}
    old_identity = {key: value for key, value in identity.items() if key not in IDENTITY}
    return old_settings, {**old_identity, **OLD_SECTIONS[family]}, config


@pytest.mark.parametrize("family", OLD_SECTIONS)
def test_old_checkpoint_settings_load_as_same_model(family: str) -> None:
    settings, identity, config = legacy_settings(family)
    converted, current = former.convert_settings(settings), config.to_dict()
    assert {**converted, "model": {**current["model"], **converted["model"]}} == current
    assert family == "t5" or converted == current
    assert former.convert_settings(current) == current
    check_model(identity, config)
    assert list(changed_settings(settings, config)) == []
    assert saved_config({"config": settings, "model": identity}).model == config.model


@pytest.mark.parametrize("family", ["gpt2", "llama", "mpt"])
def test_missing_old_setting_is_compared_with_family_default(family: str) -> None:
    settings, identity, _ = legacy_settings(family)
    other_config = config_from_values({**SIZES, **OLD_SECTIONS[family], "window_size": 4}, family=family)
    with pytest.raises(CheckpointError, match="1 values differ:\n  window_size: saved 0, now 4"):
        check_model(identity, other_config)
    assert list(changed_settings(settings, other_config)) == ["window_size: saved 0, now 4"]
    other_config = config_from_values({**SIZES, **OLD_SECTIONS[family], "norm_placement": "both"}, family=family)
    with pytest.raises(CheckpointError, match="norm_placement: saved before, now both"):
        check_model(identity, other_config)


@pytest.mark.parametrize(("family", "length"), [("gpt2", 256), ("llama", 256), ("t5", 256 + 58)])
def test_sample_position_converts_to_tokens_of_saved_length(family: str, length: int) -> None:
    """A checkpoint of before goes on where it would have; one that names no length keeps its samples alone."""
    settings, _, config = legacy_settings(family)
    assert config.tokens_per_sample == length
    old_progress = {"step": 3, "updates": 2, "samples_consumed": 24}
    state: dict[str, Any] = {"config": settings, "progress": old_progress}
    assert former.convert_progress(state) == {**old_progress, "tokens_consumed": 24 * length, "samples_skipped": 8}
    assert TrainProgress.from_metadata(state, length) == TrainProgress(**old_progress, samples_skipped=8)
    assert TrainProgress.from_metadata(state, 2 * length) == TrainProgress(3, 2, 12, 4)
    assert TrainProgress.from_metadata(state, 5 * length) == TrainProgress(3, 2, 5, 2), (
        "the first that begins at or after"
    )
    assert former.convert_progress({"progress": old_progress}) == {**old_progress, "samples_skipped": 8}
    assert TrainProgress.from_metadata({"progress": old_progress}, length) == TrainProgress(
        **old_progress, samples_skipped=8
    )
    current_state = {"config": settings, "progress": {**old_progress, "tokens_consumed": 7, "samples_skipped": 3}}
    assert former.convert_progress(current_state) == current_state["progress"], "what a checkpoint of today says counts"


@pytest.mark.parametrize(
    ("ramp", "extra_state", "progress", "num_skipped"),
    [
        (None, {}, {"step": 10, "updates": 10, "samples_consumed": 80}, 0),
        (None, {}, {"step": 10, "updates": 7, "samples_consumed": 80}, 24),
        # 4 steps of 2 samples, 2 of 4 and 2 of 6, then 8: the former rate had counted the first ones
        ("2 2 24", {}, {"step": 9, "updates": 6, "samples_consumed": 36}, 36 - 16),
        # other batch sizes than now: the skipped steps are counted as average ones
        (None, {}, {"step": 10, "updates": 9, "samples_consumed": 60}, 6),
        (None, {}, {"step": 10, "updates": 10, "samples_consumed": 60}, 0),
        # samples 40 to 63 were left out by a rollback
        (None, {"guard": {"returns": 1}}, {"step": 10, "updates": 9, "samples_consumed": 104}, 104 - 72),
    ],
)
def test_skipped_samples_of_old_checkpoint_are_estimated(
    ramp: str | None, extra_state: dict[str, Any], progress: dict[str, int], num_skipped: int
) -> None:
    """A learning rate in samples continues where it was: at the samples of as many steps as there were updates."""
    batch = {"batch_size": 2, "gas": 2, "rampup_batch_size": ramp, "unknown": 1}
    state = {"config": {"batch": batch}, "layout": {"data": 2}, "progress": progress, **extra_state}
    assert former.convert_progress(state)["samples_skipped"] == num_skipped


def test_stored_format_1_checkpoints_are_read() -> None:
    """Those of the first format, of a GPT-2."""
    for path in Path(__file__).parents[1].rglob("format_1/**/manifest.json"):
        state = json.loads(path.read_text())["state"]
        if "config" in state:
            model_settings = former.convert_settings(state["config"])["model"]
            assert (model_settings["position_embedding_type"], model_settings["normalization"]) == (
                "learned_absolute",
                "LayerNorm",
            )
            assert model_settings["num_query_groups"] == model_settings["num_attention_heads"]
            assert former.convert_progress(state)["tokens_consumed"] == 24 * 16
