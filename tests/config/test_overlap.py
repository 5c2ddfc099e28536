"""--overlap-forward-backward: what it asks for, where it acts, and what it cannot stand beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments.deepspeed_json import engine_dict
from megatron.arguments.validate import notes_of
from megatron.config import Config, parse
from megatron.errors import ConfigError
from megatron.models import registry

BASE = "--data-path none --num-layers 4 --hidden-size 32 --num-attention-heads 4 --dry-run"
FLAGS = ("--overlap-forward-backward", "--overlap-moe-expert-parallel-comm")


def read(extra: str, world_size: int = 2) -> Config:
    return parse(f"{BASE} {extra}".split(), world_size=world_size, env={})


@pytest.mark.parametrize("flag", FLAGS)
def test_either_name_reaches_the_engine_of_a_pipeline(flag: str, tmp_path: Path) -> None:
    config = read(f"--pipe-parallel-size 2 {flag}")
    assert config.parallel.overlaps_passes
    assert engine_dict(config, 2)["pipeline"]["overlap_forward_backward"] is True
    (tmp_path / "ds.json").write_text(json.dumps({"pipeline": {"overlap_forward_backward": True}}))
    assert read(f"--pipe-parallel-size 2 --deepspeed_config {tmp_path / 'ds.json'}").parallel.overlaps_passes


@pytest.mark.parametrize("flag", FLAGS)
def test_without_a_pipeline_a_note_says_that_nothing_changes(flag: str) -> None:
    config = read(flag)
    assert not config.parallel.overlaps_passes
    assert any("--overlap-forward-backward" in note for note in notes_of(config, 2))


@pytest.mark.parametrize("extra", ["--checkpoint-activations", "--recompute-granularity selective"])
def test_with_recompute_passes_take_turns_and_a_note_says_so(extra: str) -> None:
    """Scripts of Megatron-LM have both; the numbers are the same."""
    config = read(f"--pipe-parallel-size 2 {FLAGS[1]} {extra}")
    assert not config.parallel.overlaps_passes
    assert "overlap_forward_backward" not in engine_dict(config, 2)["pipeline"]
    assert any("without recompute: nothing changes" in note for note in notes_of(config, 2))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "--pipeline-schedule zb-h1",
            "needs one of the schedules 1f1b, interleaved, zb-v, dualpipev, .*zb-h1. Use",
        ),
        ("--pipeline-schedule auto", "needs one of the schedules .* got --pipeline-schedule auto"),
        ("--compile", "two threads, which --compile cannot"),
        ("--debug-dump x", "look at one pass at a time, got --overlap-forward-backward"),
        ("--debug-nan", "look at one pass at a time, got --overlap-forward-backward"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused_with_the_way_out(extra: str, message: str) -> None:
    assert not read(f"--pipe-parallel-size 2 {extra}").parallel.overlaps_passes
    with pytest.raises(ConfigError, match=message):
        read(f"--pipe-parallel-size 2 {FLAGS[0]} {extra}")
    if "schedule" not in extra:
        assert read(f"{FLAGS[1]} {extra}").parallel.overlap_forward_backward  # it acts on nothing there


def test_plans_count_the_forwards_that_begin_earlier() -> None:
    words = "--pipe-parallel-size 2 --gas 8"
    costs = registry.costs_of(read(words).with_vocab(64))
    how = {"micro_batch_size": 1, "num_micro_batches": 8}
    plain, paired = (costs.memory_per_stage([0, 3, costs.num_units], **how, has_pairs=each) for each in (False, True))
    assert [b.activations / a.activations for a, b in zip(plain, paired, strict=True)] == pytest.approx([2.0, 2.0])
