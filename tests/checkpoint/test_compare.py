"""A checkpoint of another model is refused with every difference at once."""

import pytest

from megatron.checkpoint import compare_model_config
from megatron.errors import CheckpointError, exit_code


def test_equal_configurations_pass():
    compare_model_config({"hidden_size": 64, "activation": "gelu"}, {"activation": "gelu", "hidden_size": 64})


def test_every_differing_key_is_listed_with_both_values():
    saved = {"hidden_size": 64, "num_layers": 4, "activation": "gelu", "old": 1}
    now = {"hidden_size": 128, "num_layers": 6, "activation": "gelu", "new": None}
    with pytest.raises(CheckpointError) as caught:
        compare_model_config(saved, now)
    told = str(caught.value)
    for line in ("hidden_size: saved 64, now 128", "num_layers: saved 4, now 6", "old: saved 1, now absent"):
        assert f"  {line}\n" in told
    assert "new: saved absent, now None" in told and "4 values differ" in told and "activation" not in told
    assert exit_code(caught.value) == 3
