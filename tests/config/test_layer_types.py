"""Layer types: Megatron's flags, their meaning, and errors that are listed together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import Config, parse
from megatron.config.layer_types import (
    ATTENTION,
    EXPERTS,
    GATED_DELTA_NET,
    KIMI_DELTA,
    MAMBA2,
    MLP,
    NO_MIXER,
    NO_MLP,
    PARALLEL_MAMBA,
    LayerType,
    layer_types,
    recurrent_mixers,
)
from megatron.errors import ConfigError

BASE = "--hidden-size 32 --num-attention-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --data-path none"


def make_config(flags: str, world_size: int = 1) -> Config:
    return parse(f"{BASE} {flags}".split(), world_size=world_size, env={})


def mixers(flags: str) -> list[str]:
    return [layer_type.mixer for layer_type in layer_types(make_config(flags).model)]


def test_plain_decoder_has_attention_and_feed_forward() -> None:
    model = make_config("--num-layers 3").model
    assert layer_types(model) == (LayerType(ATTENTION, MLP),) * 3
    assert not recurrent_mixers(model)


@pytest.mark.parametrize(
    ("frequency", "recurrent"),
    [
        ("", [1, 1, 1, 1, 1, 1]), ("--linear-attention-freq 3", [1, 1, 0, 1, 1, 0]),
        ("--linear-attention-freq 1", [0, 0, 0, 0, 0, 0]),
        ("--linear-attention-freq ([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]),
        ("--linear-attention-freq [0,1,1,1,1,1]", [0, 1, 1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_frequency_selects_layers_as_in_megatron(frequency: str, recurrent: list[int]) -> None:
    """Megatron-LM: layer i, counted from 1, has attention if i is a multiple of N."""
    if not any(recurrent):
        with pytest.raises(ConfigError, match="gated_delta_net has no effect with --linear-attention-freq 1"):
            mixers(f"--num-layers 6 --experimental-attention-variant gated_delta_net {frequency}")
        return
    found = mixers(f"--num-layers 6 --experimental-attention-variant gated_delta_net {frequency}")
    assert found == [GATED_DELTA_NET if is_recurrent else ATTENTION for is_recurrent in recurrent]


@pytest.mark.parametrize(
    ("variant", "mixer"),
    [
        ("gdn", GATED_DELTA_NET), ("kimi_delta --linear-num-value-heads 16", KIMI_DELTA),
        ("kda --linear-num-value-heads 16", KIMI_DELTA), ("mamba2", MAMBA2), ("parallel_mamba2", PARALLEL_MAMBA),
    ],
)  # fmt: skip
def test_variant_selects_mixer(variant: str, mixer: str) -> None:
    assert mixers(f"--num-layers 2 --experimental-attention-variant {variant}") == [mixer] * 2


def test_parallel_mamba_has_attention_and_a_recurrent_mixer() -> None:
    layer_type = LayerType(PARALLEL_MAMBA, MLP)
    assert layer_type.has_attention and layer_type.recurrent_mixer == MAMBA2 and layer_type.num_halves == 2


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_pattern_has_one_half_per_letter_and_sets_the_number_of_layers(flag: str) -> None:
    model = make_config(f"{flag} MG*-E --num-experts 4").model
    expected = [
        (MAMBA2, NO_MLP), (GATED_DELTA_NET, NO_MLP), (ATTENTION, NO_MLP), (NO_MIXER, MLP), (NO_MIXER, EXPERTS),
    ]  # fmt: skip
    assert layer_types(model) == tuple(LayerType(*halves) for halves in expected)
    assert model.num_layers == 5 and recurrent_mixers(model) == {MAMBA2, GATED_DELTA_NET}


def test_letter_g_is_the_variant_and_plus_is_latent_attention() -> None:
    config = make_config(
        "--hybrid-layer-pattern G+- --experimental-attention-variant kimi_delta --linear-num-value-heads 16 "
        "--multi-latent-attention --position-embedding-type none --kv-lora-rank 8"
    )
    assert [layer_type.mixer for layer_type in layer_types(config.model)] == [KIMI_DELTA, ATTENTION, NO_MIXER]


def test_bounds_of_a_pattern_are_the_pipeline_layout() -> None:
    flags = "--hybrid-layer-pattern M-|M*-|M|-"
    config = make_config(f"{flags} --pipe-parallel-size 2", world_size=2)
    assert config.model.hybrid_layer_pattern == "M-M*-M-"
    assert config.parallel.pipeline_layout == "Ett|ttt|t|tL" and config.parallel.chunks == 2
    single = make_config(flags)
    assert single.parallel.pipeline_layout is None and single.model == config.model


def test_other_trainers_and_layouts_agree_on_the_layer_count() -> None:
    with pytest.raises(ConfigError, match="must have one letter per layer, got 3 letters and --num-layers 4"):
        make_config("--hybrid-layer-pattern M*- --num-layers 4")
    layout = "--pipe-parallel-size 2 --pipeline-model-parallel-layout Et|ttL"
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-layout cannot be combined with |"):
        make_config(f"--hybrid-layer-pattern M|*- {layout}", world_size=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hybrid-layer-pattern M||*-", "must have layers between any two .* got 'M||.*-' with 3 chunks and 2"),
        ("--hybrid-layer-pattern M||*|-", "must have layers between any two .* got 'M||.*|-' with 4 chunks and 2"),
        ("--hybrid-layer-pattern M|*|-", "a multiple of --pipe-parallel-size chunks, got 'M|.*|-' with 3 chunks and 2"),
        (
            "--hybrid-layer-pattern M|*-M --num-layers-per-virtual-pipeline-stage 1",
            "in --hybrid-layer-pattern determines the chunks, .* and --num-layers-per-virtual-pipeline-stage. Remove",
        ),
    ],
)
def test_unusable_bounds_of_a_pattern_are_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", "[|]")) as error:
        make_config(f"{flags} --pipe-parallel-size 2", world_size=2)
    assert "--pipeline-model-parallel-layout" not in str(error.value)


def test_sizes_follow_from_others() -> None:
    model = make_config("--experimental-attention-variant mamba2").model
    assert (model.mamba_num_heads, model.mamba_norm_groups) == (8, 2)
    plain = make_config("--num-layers 2").model
    assert (plain.mamba_num_heads, plain.mamba_head_dim, plain.linear_norm_epsilon) == (0, 64, 0.0)


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            "--linear-attention-freq x --experimental-attention-variant gdn --linear-num-key-heads 3",
            ["--linear-attention-freq must be a number of at least 1, or a list with 1 or 0 for each of the 4"],
        ),
        ("--linear-attention-freq 2", ["--linear-attention-freq 2 needs the mixer of the recurrent layers"]),
        (
            "--experimental-attention-variant gdn --linear-num-key-heads 3 --mtp-num-layers 1 --compile "
            "--checkpoint-format deepspeed",
            [
                "--linear-num-value-heads must be a multiple of --linear-num-key-heads, got 32 and 3",
                "--mtp-num-layers 1 needs attention and a feed-forward half in the last layer",
                "--compile supports attention layers only, got --experimental-attention-variant",
                "--checkpoint-format deepspeed does not support --experimental-attention-variant",
            ],
        ),
        (
            "--experimental-attention-variant kimi_delta --linear-value-head-dim 8",
            ["kimi_delta needs equal numbers and sizes of key heads and value heads, got --linear-num-key-heads 16"],
        ),
        (
            "--hybrid-layer-pattern MX",
            ["--hybrid-layer-pattern must consist of the letters M G * + - E, and | between virtual pipeline stages"],
        ),
        ("--hybrid-layer-pattern M-/MM", ["does not support multi-token prediction layers after /"]),
        (
            "--hybrid-layer-pattern M*- --num-experts 4 --moe-layer-freq 2 --linear-attention-freq 2 "
            "--multi-latent-attention --parallel-residual shared-norm",
            [
                "--linear-attention-freq 2 cannot be combined with --hybrid-layer-pattern",
                "--moe-layer-freq cannot be combined with --hybrid-layer-pattern",
                "--num-experts 4 has no effect without the letter E",
                "--multi-latent-attention needs + in --hybrid-layer-pattern",
                "--parallel-residual shared-norm needs a mixer and a feed-forward half in each layer",
            ],
        ),
        (
            "--hybrid-layer-pattern M+E --experimental-attention-variant gdn",
            [
                "gated_delta_net has no effect without the letter G in --hybrid-layer-pattern M+E",
                "has layers of experts (E). Add --num-experts",
                "the letter + of --hybrid-layer-pattern M+E needs --multi-latent-attention",
            ],
        ),
        (
            "--hybrid-layer-pattern G --experimental-attention-variant parallel_mamba2",
            ["the letter G of --hybrid-layer-pattern selects a layer without attention"],
        ),
        (
            "--experimental-attention-variant mamba2 --mamba-num-heads 9 --mamba-dt-limit-min 2 --mamba-dt-limit-max 1",
            [
                "--mamba-num-heads must be a multiple of --mamba-num-groups and --mamba-norm-groups, got 9, 2 and 2",
                "--mamba-dt-limit-max must exceed --mamba-dt-limit-min, got 1 and 2",
            ],
        ),
        (
            "--experimental-attention-variant mamba2 --mamba-head-dim 65",
            ["--mamba-head-dim must not exceed 2 x --hidden-size, got 65 and 32"],
        ),
    ],
)
def test_problems_are_listed_together(flags: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(flags)
    for message in messages:
        assert message in str(error.value), (message, str(error.value))


def test_heads_that_tensor_ranks_cannot_share_are_one_error() -> None:
    tensor = "--model-parallel-size 4"
    with pytest.raises(ConfigError) as error:
        make_config(f"--experimental-attention-variant gdn --linear-num-key-heads 2 {tensor}", world_size=4)
    assert "--linear-num-key-heads must be a multiple of --model-parallel-size, got 2 and 4" in str(error.value)
    with pytest.raises(
        ConfigError, match="--mamba-num-groups must be a multiple or a divisor of --model-parallel-size"
    ):
        make_config(
            f"--experimental-attention-variant mamba2 --mamba-num-heads 12 --mamba-num-groups 3 {tensor}", world_size=4
        )


def test_heads_of_attention_do_not_matter_without_attention() -> None:
    flags = "--num-attention-heads 3 --kv-channels 8 --model-parallel-size 2 --num-layers 2"
    mamba = f"--experimental-attention-variant mamba2 {flags}"
    assert make_config(mamba, world_size=2).model.mamba_num_heads == 8
    with pytest.raises(ConfigError, match="--num-attention-heads must be a multiple of --model-parallel-size"):
        make_config(f"{mamba} --linear-attention-freq 2", world_size=2)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_support_pipelines(stage: int) -> None:
    flags = f"--num-layers 2 --experimental-attention-variant gdn --zero-stage {stage}"
    assert make_config(f"{flags} --pipe-parallel-size 2", world_size=4).optimizer.zero_stage == stage


def test_recurrent_flags_are_rejected_outside_of_decoders() -> None:
    with pytest.raises(ConfigError, match="recurrent layers are supported in decoders only"):
        parse("--experimental-attention-variant gdn --data-path none".split(), world_size=1, env={}, family="t5")


def test_bounds_of_a_pattern_are_no_setting_of_the_model() -> None:
    model = make_config("--hybrid-layer-pattern M-M").model
    assert replace(model, hybrid_layer_pattern="M-|M") == model
