"""--zero-stage: what is refused, and what is told."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.config.validate import notes_of
from megatron.errors import ConfigError

LINE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --dry-run"


def parsed(extra: str, world_size: int = 2):
    return parse([*LINE.split(), *extra.split()], world_size=world_size, env={})


@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_are_refused_with_the_reason_and_what_to_do(stage, layout):
    told = f"--zero-stage must be 0 or 1 in this version, got {stage}: .* would not pay.* Use 1, and cut weights"
    with pytest.raises(ConfigError, match=told):
        parsed(f"--zero-stage {stage} {layout}")


def test_a_negative_stage_and_one_that_is_no_number_are_refused():
    for stage in ("-1", "one"):
        with pytest.raises(ConfigError, match=f"--zero-stage must be an integer of at least 0, got '?{stage}"):
            parsed(f"--zero-stage={stage}")


def test_adafactor_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--optimizer adafactor needs --zero-stage 0, got 1"):
        parsed("--zero-stage 1 --optimizer adafactor")


def test_one_replica_is_told_that_there_is_nothing_to_share():
    note = "ZeRO 1 has no effect with one replica"
    assert note in notes_of(parsed("--zero-stage 1 --model-parallel-size 2"), 2)
    assert note not in notes_of(parsed("--zero-stage 1"), 2)
    assert note not in notes_of(parsed("", 1), 1)
