"""Errors and notes of --fp8-format."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments.validate import resolve_dtype
from megatron.config import Config, parse
from megatron.errors import ConfigError

FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 64 --data-path none --fp8-format e4m3"


def parse_line(extra: str, world_size: int = 1) -> Config:
    return parse(f"{FLAGS} {extra}".split(), world_size=world_size, env={})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--fp16", "--fp8-format needs --bf16 for all tensors that are not in FP8, got --fp16"),
        ("--compile", "--compile does not support products in FP8"),
        (
            "--hidden-size 72 --num-attention-heads 2",
            "got --hidden-size = 72; rows of query, key and value = 216; heads",
        ),
        ("--ff-hidden-size 200", "--ff-hidden-size = 200"),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 3", "must leave a layer in FP8, got --num-layers 4"),
        ("--fp8-recipe tensorwise", "--fp8-recipe must be one of rowwise, blockwise, got 'tensorwise'"),
        ("--fp8-format hybrid", "--fp8-format must be one of e4m3, got 'hybrid'"),
        (
            "--te-precision-config-file layers.yaml",
            "--te-precision-config-file is not supported: all layers have the format of --fp8-format",
        ),
        ("--fp4-format e2m1", "FP4 is not supported; remove it, or use --fp8-format e4m3"),
        ("--num-experts 2 --moe-ffn-hidden-size 24", "--moe-ffn-hidden-size = 24"),
        ("--hybrid-layer-pattern M*-/*-", "--hybrid-layer-pattern does not support multi-token prediction layers"),
    ],
)
def test_settings_without_fp8_are_one_error(extra: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_line(extra)
    assert message in str(error.value)


def test_sizes_are_those_of_a_rank() -> None:
    assert parse_line("--ff-hidden-size 160").precision.fp8_format == "e4m3"
    with pytest.raises(ConfigError, match=r"--ff-hidden-size = 160 / 4"):
        parse_line("--ff-hidden-size 160 --model-parallel-size 4", world_size=4)


def test_shards_of_blocks_start_at_blocks() -> None:
    flags = "--fp8-recipe blockwise --hidden-size 256 --num-attention-heads 4 --ff-hidden-size 576"
    assert parse_line(flags).precision.fp8_recipe == "blockwise"
    with pytest.raises(
        ConfigError, match=r"and of 128 where tensor ranks shard them, got --ff-hidden-size = 576 / 2\."
    ):
        parse_line(f"{flags} --model-parallel-size 2", world_size=2)


def test_default_number_format_is_bf16_on_every_device() -> None:
    config = parse_line("")
    assert config.precision.dtype is None
    assert [resolve_dtype(config, default).precision.dtype for default in ("fp32", "fp16", "bf16")] == ["bf16"] * 3


def test_json_without_bf16_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": false}}')
    with pytest.raises(ConfigError, match="--fp8-format needs bf16, but the JSON has bf16.enabled false"):
        parse_line(f"--deepspeed_config {path}")


def test_t5_has_no_fp8() -> None:
    with pytest.raises(ConfigError, match="--fp8-format is supported in decoders only"):
        parse([*FLAGS.split(), "--bf16"], world_size=1, env={}, family="t5")
