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
from megatron.training.compatibility import settings_changed
from megatron.training.train_progress import TrainProgress

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 29}
OLD: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "num_query_groups": 2, "rotary_base": 500.0, "rotary_scaling": "none", "rotary_scaling_factor": 8.0,
        "rotary_low_frequency_factor": 1.0, "rotary_high_frequency_factor": 4.0, "rotary_original_positions": 8192,
    },
    "mpt": {"alibi_bias_max": 16, "clip_qkv": 6.0},
    "t5": {"position_embedding_type": "learned", "relative_attention_num_buckets": 8, "enc_layers": 2, "dec_layers": 2},
}  # fmt: skip
"""Family -> its section, which they had: of T5 a part."""


def as_before(family: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return settings and identity as an earlier version saved them, and the Config of today."""
    config = config_from_values({**SIZES, **OLD[family]}, family=family)
    now, identity = config.to_dict(), config.identity()
    model = {key: value for key, value in now["model"].items() if key not in IDENTITY}
    own = {**now.get(family, {}), **OLD[family]}
    shared = {key: value for key, value in now.items() if key not in ("family", "model", family)}
    before = {"family": family, "model": model, **({family: own} if own else {}), **shared}
    named = {key: value for key, value in identity.items() if key not in IDENTITY}
    return before, {**named, **OLD[family]}, config


@pytest.mark.parametrize("family", OLD)
def test_a_checkpoint_of_before_is_of_the_model_that_it_was(family: str) -> None:
    settings, identity, config = as_before(family)
    found, now = former.settings(settings), config.to_dict()
    assert {**found, "model": {**now["model"], **found["model"]}} == now
    assert family == "t5" or found == now
    assert former.settings(now) == now
    check_model(identity, config)
    assert list(settings_changed(settings, config)) == []
    assert saved_config({"config": settings, "model": identity}).model == config.model


@pytest.mark.parametrize("family", ["gpt2", "llama", "mpt"])
def test_what_a_checkpoint_of_before_did_not_have_is_compared_with_the_familys_default(family: str) -> None:
    settings, identity, _ = as_before(family)
    other = config_from_values({**SIZES, **OLD[family], "window_size": 4}, family=family)
    with pytest.raises(CheckpointError, match="1 values differ:\n  window_size: saved 0, now 4"):
        check_model(identity, other)
    assert list(settings_changed(settings, other)) == ["window_size: saved 0, now 4"]
    other = config_from_values({**SIZES, **OLD[family], "norm_placement": "both"}, family=family)
    with pytest.raises(CheckpointError, match="norm_placement: saved before, now both"):
        check_model(identity, other)


@pytest.mark.parametrize(("family", "length"), [("gpt2", 256), ("llama", 256), ("t5", 256 + 58)])
def test_a_position_in_samples_is_one_in_tokens_of_the_saved_lengths(family: str, length: int) -> None:
    """A checkpoint of before goes on where it would have; one that names no length keeps its samples alone."""
    settings, _, config = as_before(family)
    assert config.tokens_per_sample == length
    old = {"step": 3, "updates": 2, "samples_consumed": 24}
    state: dict[str, Any] = {"config": settings, "progress": old}
    assert former.progress(state) == {**old, "tokens_consumed": 24 * length, "samples_skipped": 8}
    assert TrainProgress.from_metadata(state, length) == TrainProgress(**old, samples_skipped=8)
    assert TrainProgress.from_metadata(state, 2 * length) == TrainProgress(3, 2, 12, 4)
    assert TrainProgress.from_metadata(state, 5 * length) == TrainProgress(3, 2, 5, 2), (
        "the first that begins at or after"
    )
    assert former.progress({"progress": old}) == {**old, "samples_skipped": 8}
    assert TrainProgress.from_metadata({"progress": old}, length) == TrainProgress(**old, samples_skipped=8)
    now = {"config": settings, "progress": {**old, "tokens_consumed": 7, "samples_skipped": 3}}
    assert former.progress(now) == now["progress"], "what a checkpoint of today says counts"


@pytest.mark.parametrize(
    ("ramp", "more", "progress", "skipped"),
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
def test_samples_without_an_update_of_an_earlier_checkpoint(
    ramp: str | None, more: dict[str, Any], progress: dict[str, int], skipped: int
) -> None:
    """A learning rate in samples continues where it was: at the samples of as many steps as there were updates."""
    batch = {"batch_size": 2, "gas": 2, "rampup_batch_size": ramp, "unknown": 1}
    state = {"config": {"batch": batch}, "layout": {"data": 2}, "progress": progress, **more}
    assert former.progress(state)["samples_skipped"] == skipped


def test_the_stored_checkpoints_are_read() -> None:
    """Those of the first format, of a GPT-2."""
    for path in Path(__file__).parents[1].rglob("format_1/**/manifest.json"):
        state = json.loads(path.read_text())["state"]
        if "config" in state:
            found = former.settings(state["config"])["model"]
            assert (found["position_embedding_type"], found["normalization"]) == ("learned_absolute", "LayerNorm")
            assert found["num_query_groups"] == found["num_attention_heads"]
            assert former.progress(state)["tokens_consumed"] == 24 * 16
