"""Flags of sinks, gates, layers without rotary positions and clamped activations: values, and errors together."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.config.layer_features import has_rotary, no_rope_layers
from megatron.errors import ConfigError

ROPE = "--num-layers 6 --position-embedding-type rope"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [0, 0, 0, 0, 0, 0]), ("4", [0, 0, 0, 1, 0, 0]), ("1", [1, 1, 1, 1, 1, 1]),
        ("([0]*2+[1])*2", [0, 0, 1, 0, 0, 1]), ("[1,0,0,0,0,1]", [1, 0, 0, 0, 0, 1]),
    ],
)  # fmt: skip
def test_no_rope_freq_is_a_period_or_a_list(text: str, expected: list[int]) -> None:
    assert [int(entry) for entry in no_rope_layers(text, 6)] == expected
    flags = f"{ROPE} {f'--no-rope-freq {text}' if text else ''} --data-path none".split()
    model = parse(flags, world_size=1).model
    assert [int(not has_rotary(model, layer)) for layer in range(6)] == expected


def test_megatron_flags_have_their_meaning() -> None:
    flags = f"{ROPE} --quick-geglu --qk-l2-norm --softmax-type off-by-one --attention-output-gate --data-path none"
    model = parse(flags.split(), world_size=1).model
    assert (model.activation, model.qk_norm, model.softmax_type) == ("gated-quick-gelu", "l2", "off-by-one")
    assert model.attention_output_gate and not model.has_plain_attention


def test_invalid_values_are_rejected_together() -> None:
    flags = (
        "--num-layers 4 --position-embedding-type rope --no-rope-freq [0,1] --activation relu "
        "--activation-func-clamp-value 7 --glu-linear-offset 1 --qk-norm-order after --no-rotary-truncate "
        "--data-path none"
    )
    with pytest.raises(ConfigError) as excinfo:
        parse(flags.split(), world_size=1)
    for message in (
        "--no-rope-freq must be a number of at least 1, or a list with 1 or 0 for each of the 4 layers",
        "--activation-func-clamp-value applies to gated activations only, got 7 with --activation relu",
        "--glu-linear-offset applies to gated activations only, got 1 with --activation relu",
        "--qk-norm-order has no effect without --qk-norm, got none",
        "--no-rotary-truncate has no effect without --rotary-scaling yarn, got none",
    ):
        assert message in str(excinfo.value)


def test_rotary_flags_need_rotary_positions() -> None:
    flags = "--no-rope-freq 2 --rotary-interleaved --qk-norm head --qk-norm-order after --data-path none"
    message = "--no-rope-freq, --rotary-interleaved, --qk-norm-order has no effect without --position-embedding-type"
    with pytest.raises(ConfigError, match=message):
        parse(flags.split(), world_size=1)
