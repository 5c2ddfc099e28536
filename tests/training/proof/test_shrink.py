"""The small configuration keeps layout and layer types, and is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments.validate import find_problems
from megatron.config import Config, parse
from megatron.config.decoder import window_pattern
from megatron.config.experts import expert_layers
from megatron.config.layer_types import layer_types
from megatron.config.pipeline_layout import parse_layout
from megatron.training.proof.shrink import MAX_RANKS, ShrinkError, Shrunk, _layer_parts, shrink
from megatron.training.proof.uncovered import uncovered_parts

LARGE = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 50000 --data-path none"
DEEPSEEK = (
    "--model deepseek_v3 --num-layers 61 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 "
    "--moe-layer-freq ([0]*3+[1]*58) --moe-shared-expert-intermediate-size 2048 --moe-ffn-hidden-size 2048 "
    "--expert-model-parallel-size 4 --mtp-num-layers 1"
)
QWEN3_NEXT = "--experimental-attention-variant gdn --linear-attention-freq 4 --num-experts 8"


def make_config(flags: str, world_size: int, family: str = "gpt2") -> Config:
    length = LARGE if family != "t5" else LARGE.replace("--seq-length", "--enc-seq-length")
    argv = f"{length} --eval-iters 0 {flags}".split()
    return parse(argv, world_size=world_size, env={}, family=family, accepts_model=family == "gpt2")


def shrink_run(flags: str, world_size: int, family: str = "gpt2") -> Shrunk:
    shrunk = shrink(make_config(flags, world_size, family), world_size, "cpu")
    assert find_problems(shrunk.config, shrunk.world_size) == []
    assert find_problems(shrunk.reference, 1) == []
    model = shrunk.config.model
    assert model.hidden_size <= 32 * shrunk.config.parallel.model_parallel_size and model.vocab_size <= 211
    assert shrunk.world_size <= MAX_RANKS
    return shrunk


@pytest.mark.parametrize(
    ("flags", "world_size", "num_types"),
    [
        ("--num-layers 24", 4, 1),
        ("--model gemma3_text --num-layers 26 --window-size 511 --window-attn-skip-freq 6", 4, 2),
        ("--model llama --num-layers 48 --no-rope-freq 4 --window-size 100 --window-attn-skip-freq 3", 4, 4),
        (DEEPSEEK, 8, 2),
        ("--model llama --num-layers 24 --num-experts 8 --moe-layer-freq 2", 4, 2),
        (f"--model llama --num-layers 48 {QWEN3_NEXT}", 4, 2),
        ("--hybrid-layer-pattern M-M-*-MEM-*-ME --num-experts 8 --activation squared-relu", 4, 4),
        ("--num-layers 12 --experimental-attention-variant parallel_mamba2 --mamba-norm-groups 1", 4, 1),
    ],
)
@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 4", "--pipe-parallel-size 2 --pipeline-chunks 2"])
def test_every_layer_type_and_chunk_has_a_layer(flags: str, world_size: int, num_types: int, layout: str) -> None:
    world_size *= 4
    original = make_config(f"{flags} {layout} --gas 8", world_size)
    small = shrink_run(f"{flags} {layout} --gas 8", world_size).config
    types = _layer_parts(small.model)
    assert set(types) == set(_layer_parts(original.model)) and len(set(types)) == num_types
    assert types[-1] == _layer_parts(original.model)[-1]
    assert small.parallel.chunks == original.parallel.chunks
    assert bool(small.model.mtp_num_layers) == bool(original.model.mtp_num_layers)
    if layout:
        chunks = parse_layout(str(small.parallel.pipeline_layout))
        assert len(chunks) == 4 and all("t" in chunk for chunk in chunks)
        assert len(types) <= max(4, num_types)


def test_recurrent_mixers_are_kept_with_small_heads() -> None:
    shrunk = shrink_run(f"--model llama --num-layers 48 {QWEN3_NEXT} --model-parallel-size 2", 8)
    model = shrunk.config.model
    assert [layer_type.label for layer_type in layer_types(model)] == [
        "gated-delta-net + experts",
        "attention + experts",
    ]
    sizes = model.linear_num_key_heads, model.linear_num_value_heads, model.linear_key_head_dim
    assert sizes == (4, 8, 8) and model.linear_attention_freq == "[1, 0]"
    pattern = shrink_run(
        "--hybrid-layer-pattern M-M*-M-M- --mamba-norm-groups 1 --model-parallel-size 2", 2
    ).config.model
    assert pattern.hybrid_layer_pattern == "M*-" and (pattern.mamba_num_groups, pattern.mamba_norm_groups) == (2, 1)
    assert pattern.mamba_num_heads == 4


def test_types_of_layers_are_kept_with_their_patterns() -> None:
    flags = "--model llama --num-layers 24 --num-experts 8 --moe-layer-freq 3 --window-size 9 --window-attn-skip-freq 2"
    model = shrink_run(flags, 4).config.model
    assert model.num_layers == 4
    patterns = (expert_layers(model.moe_layer_freq, 4), window_pattern(model.window_attn_skip_freq, 4))
    assert sorted(zip(*patterns, strict=True)) == [(False, False), (False, True), (True, False), (True, True)]


def test_layout_and_features_are_kept_but_the_reference_has_none() -> None:
    flags = (
        "--model llama --num-layers 24 --num-query-groups 8 --model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 2 --pipe-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 1 --gas 8 "
        "--checkpoint-activations --reset-attention-mask --loss-chunk-tokens 512 --gradient-accumulation-fusion"
    )
    shrunk = shrink_run(flags, 16)
    small, reference = shrunk.config, shrunk.reference
    assert (small.parallel.model_parallel_size, small.parallel.num_stages, small.parallel.context_parallel_size) == (
        2, 2, 2
    )  # fmt: skip
    assert shrunk.world_size == 16 and shrunk.notes == ()
    assert small.parallel.sequence_parallel and small.parallel.checkpoint_activations
    assert small.parallel.pipeline_schedule == "zb-h1" and small.optimizer.zero_stage == 1
    assert small.parallel.gradient_accumulation_fusion and small.data.reset_attention_mask
    assert small.model.num_query_groups < small.model.num_attention_heads
    assert small.model.loss_chunk_tokens == 8 and reference.model.loss_chunk_tokens == 0
    assert not reference.parallel.checkpoint_activations and not reference.optimizer.zero_stage
    assert not reference.parallel.gradient_accumulation_fusion
    samples = small.batch.global_batch_size(2)
    assert reference.batch.global_batch_size(1) == samples and reference.data == small.data


def test_qk_clip_takes_effect_in_the_small_model() -> None:
    model = shrink_run("--num-layers 4 --qk-clip --qk-clip-alpha 0.3", 2).config.model
    assert (model.qk_clip, model.qk_clip_alpha) == (True, 0.3) and model.qk_clip_threshold < 1


def test_many_ranks_are_lowered_and_named() -> None:
    shrunk = shrink_run("--num-layers 32 --model-parallel-size 8 --pipe-parallel-size 8 --gas 64", 1024)
    assert shrunk.world_size == 8  # 2 x 2 x 2
    assert shrunk.notes == ("tensor 8 checked as 2", "pipe 8 checked as 2")
    shrunk = shrink_run("--num-layers 32 --pipe-parallel-size 4 --pipeline-schedule auto --gas 64", 8)
    assert shrunk.notes == ("--pipeline-schedule auto checked with the default schedule",)


def test_uneven_layout_keeps_chunks_without_layers() -> None:
    layout = "--num-layers 5 --pipe-parallel-size 4 --pipeline-model-parallel-layout Et*2|tt|t|L --gas 4"
    assert shrink_run(layout, 8).config.parallel.pipeline_layout == "Et|t|t|L"


def test_other_families_are_shrunk() -> None:
    small = shrink_run("--num-layers 12 --pipe-parallel-size 3 --pipeline-split-rank 1 --gas 4", 6, "t5").config
    assert (small.family_config.enc_layers, small.family_config.dec_layers) == (1, 2)
    assert shrink_run("--num-layers 12 --pipe-parallel-size 2 --gas 4", 4, "bert").config.model.num_layers == 2


def test_layout_that_needs_too_many_processes_is_an_error(tmp_path: Path) -> None:
    layout = "|".join(["Et", *["t"] * 30, "tL"])
    flags = f"--num-layers 32 --pipe-parallel-size 32 --pipeline-model-parallel-layout {layout} --gas 64"
    with pytest.raises(ShrinkError, match="needs 32 processes"):
        shrink_run(flags, 32)


def test_every_setting_of_the_configuration_is_plain_data() -> None:
    json.dumps(shrink_run("--num-layers 4", 2).config.to_dict())


def test_products_in_fp8_are_kept_with_a_layer_of_each_format() -> None:
    flags = "--num-layers 24 --bf16 --fp8-format e4m3 --first-last-layers-bf16 --model-parallel-size 2"
    precision = shrink_run(flags, 2).config.precision
    assert (precision.dtype, precision.fp8_format, precision.fp8_recipe) == ("fp64", "e4m3", "rowwise")
    assert (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) in ((0, 0), (1, 1))
    sharded = shrink_run(f"{flags} --fp8-recipe blockwise", 2)
    assert sharded.config.precision.fp8_format is None
    assert "FP8" in uncovered_parts(make_config(f"{flags} --fp8-recipe blockwise", 2), "cpu")
    assert "FP8" not in uncovered_parts(make_config(flags, 2), "cpu")
