"""A checkpoint of another model is refused with every difference at once."""

import pytest

from megatron.arguments import config_from_values
from megatron.checkpoint import check_model, compare_model_config
from megatron.errors import CheckpointError, exit_code


def test_equal_configurations_pass():
    compare_model_config({"hidden_size": 64, "activation": "gelu"}, {"activation": "gelu", "hidden_size": 64})


def test_all_differing_keys_are_listed_with_both_values():
    saved = {"hidden_size": 64, "num_layers": 4, "activation": "gelu", "old": 1}
    current = {"hidden_size": 128, "num_layers": 6, "activation": "gelu", "new": None}
    with pytest.raises(CheckpointError) as caught:
        compare_model_config(saved, current)
    message = str(caught.value)
    for line in ("hidden_size: saved 64, now 128", "num_layers: saved 4, now 6", "old: saved 1, now absent"):
        assert f"  {line}\n" in message
    assert "new: saved absent, now None" in message and "4 values differ" in message and "activation" not in message
    assert exit_code(caught.value) == 3


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"rotary_base": 5e5, "rotary_scaling": "llama3", "rotary_scaling_factor": 2.0}),
        ("llama", {"rotary_low_frequency_factor": 2.0, "rotary_high_frequency_factor": 3.0}),
        ("llama", {"rotary_original_positions": 64}),
        ("mpt", {"alibi_bias_max": 16, "clip_qkv": 6.0}),
        ("t5", {"relative_attention_max_distance": 64}),
    ],
)
def test_finetune_accepts_changed_settings_without_shape_effect(family, values):
    saved = config_from_values({"vocab_size": 9}, family=family).identity()
    continued, finetuned = (
        config_from_values({"vocab_size": 9, "finetune": finetune, **values}, family=family)
        for finetune in (False, True)
    )
    with pytest.raises(CheckpointError, match=f"weights also fit other values of {', '.join(values)}: add --finetune"):
        check_model(saved, continued)
    check_model(saved, finetuned)
    with pytest.raises(CheckpointError, match="1 values differ:\n  hidden_size: saved 64, now 256"):
        check_model({**saved, "hidden_size": 64}, finetuned)


def test_common_decoder_families_with_equal_settings_match():
    """So a Qwen's folder, which is read as a LLaMA's, starts a run of pretrain_gpt2.py with its settings."""
    llama_config = config_from_values({"vocab_size": 9, "qk_norm": "head"}, family="llama")
    values = {name: getattr(llama_config.model, name) for name in ("normalization", "activation", "untie_embeddings")}
    gpt2_values = {"vocab_size": 9, "qk_norm": "head", "position_embedding_type": "rope", **values}
    check_model(llama_config.identity(), config_from_values(gpt2_values, family="gpt2"))
    check_model(config_from_values(gpt2_values, family="gpt2").identity(), llama_config)
    with pytest.raises(CheckpointError, match="qk_norm: saved head, now none"):
        check_model(llama_config.identity(), config_from_values({**gpt2_values, "qk_norm": "none"}, family="gpt2"))
    with pytest.raises(CheckpointError, match="family: saved llama, now bert"):
        check_model(llama_config.identity(), config_from_values({"vocab_size": 9}, family="bert"))


def test_resize_vocab_accepts_other_vocab_size():
    saved = config_from_values({"vocab_size": 9}).identity()
    check_model(saved, config_from_values({"vocab_size": 11, "finetune": True, "resize_vocab": True}))
    with pytest.raises(CheckpointError, match="vocab_size: saved 9, now 11") as caught:
        check_model(saved, config_from_values({"vocab_size": 11, "finetune": True}))
    assert "also fit" not in str(caught.value)
