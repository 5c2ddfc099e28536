"""A setting that could not act is an error, or a note where it does no harm."""

from __future__ import annotations

import json

import pytest

from megatron.arguments import engine_dict, parse, resolve_dtype
from megatron.config import Config
from megatron.errors import ConfigError


def parse_line(line: str, folder=None, content: object = None, world_size: int = 1) -> Config:
    words = line.split()
    if content is not None:
        (folder / "ds.json").write_text(json.dumps(content))
        words += ["--deepspeed_config", str(folder / "ds.json")]
    return parse(words, world_size=world_size, env={})


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("--optimizer sgd --adam-beta1 0.8 --adam-eps 1e-6", ["--adam-beta1, --adam-eps applies to AdamW only", "sgd"]),
        (
            "--fp16 --loss-scale 1024 --hysteresis 4 --initial-scale-power 8 --loss-scale-window 9 --min-scale 2",
            [
                "--initial-scale-power, --loss-scale-window, --hysteresis, --min-scale applies to a dynamic",
                "got the fixed --loss-scale 1024",
            ],
        ),
        ("--eval-only --load x --eval-iters 0", ["--eval-only needs at least one evaluation step", "--eval-iters 0"]),
        ("--eval-only --load x --save-interval 5", ["--save-interval applies to training only"]),
        (
            "--eval-only --load x --rampup-batch-size 1 1 9 --num-workers 1 --prefetch-factor 3",
            ["--rampup-batch-size, --num-workers, --prefetch-factor applies to training only, got --eval-only"],
        ),
        (
            "--eval-only --load x --mixture-schedule 5:1",
            ["--mixture-schedule applies to training only, got --eval-only"],
        ),
        (
            "--pipeline-chunks 2",
            ["--pipeline-chunks has no effect without a pipeline", "--pipe-parallel-size 2 or more"],
        ),
        ("--pipeline-schedule zb-h1 --pipeline-trace x", ["--pipeline-schedule, --pipeline-trace has no effect"]),
        ("--num-layers-per-virtual-pipeline-stage 2", ["--num-layers-per-virtual-pipeline-stage has no effect"]),
        ("--eval-only --load x --pipeline-trace x", ["--pipeline-trace records training steps only, got --eval-only"]),
    ],
)
def test_flags_without_effect_raise(line, fragments):
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line)
    assert all(fragment in str(exc_info.value) for fragment in fragments), exc_info.value


def test_json_betas_with_sgd_raise(tmp_path):
    content = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.9]}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.betas is not a parameter of SGD in DeepSpeed"):
        parse_line("", tmp_path, content)


@pytest.mark.parametrize(
    ("line", "content", "world_size", "message"),
    [
        ("--partition-method uniform", None, 1, "--partition-method uniform has no effect without a pipeline"),
        ("--bf16", {"fp16": {"loss_scale": 4}}, 1, "fp16.loss_scale has no effect: only fp16 has"),
        (
            "--fp16",
            {"fp16": {"loss_scale": 8, "hysteresis": 3, "min_loss_scale": "auto"}},
            1,
            "fp16.hysteresis in the JSON has no effect with the fixed fp16.loss_scale of the JSON, 8",
        ),
        ("", {"pipeline": {"schedule": "gpipe"}}, 1, '"pipeline" has no effect without a pipeline'),
        ("--pipe-parallel-size 2", {"pipeline": {"stages": 2}}, 2, "pipeline.stages has no effect: stages are set by"),
        (
            "--pipe-parallel-size 2",
            {"pipeline": {"overlap_forward_backward": True}},
            2,
            "pipeline.overlap_forward_backward has no effect: each stage runs one forward or backward at a time",
        ),
        ("--pipe-parallel-size 2", {"flops_profiler": {"enabled": True}}, 2, '"flops_profiler" has no effect'),
    ],
)
def test_harmless_setting_without_effect_is_noted(tmp_path, line, content, world_size, message):
    assert any(message in note for note in parse_line(line, tmp_path, content, world_size).notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--bf16 --hysteresis 2 --loss-scale 9", "--loss-scale 9, --hysteresis 2"),
        ("--fp32 --initial-scale-power 8 --min-loss-scale 2", "--initial-scale-power 8, --min-loss-scale 2"),
        ("--recompute-num-layers 2", "--recompute-num-layers 2"),
        ("--sequence-parallel --partition-activations", "--sequence-parallel, --partition-activations"),
        ("--no-pipeline-parallel --num-layers 3 --num-unique-layers 3", "--no-pipeline-parallel, --num-unique-layers"),
    ],
)
def test_redundant_flags_are_ignored(line, expected):
    config = parse_line(line)
    assert ", ".join(config.ignored) == expected and config.notes == ()
    if "scale" in line:
        assert config.precision == parse_line(line.split()[0]).precision
    assert not config.parallel.sequence_parallel and not config.parallel.partition_activations
    with pytest.raises(ConfigError, match="is rejected by --strict-flags"):
        parse_line(f"{line} --strict-flags")


def test_trace_steps_without_trace_raise(tmp_path):
    pipeline_flags = "--pipe-parallel-size 2"
    with pytest.raises(ConfigError, match=r"pipeline\.trace_steps in the JSON has no effect without a trace"):
        parse_line(pipeline_flags, tmp_path, {"pipeline": {"trace_steps": 3}}, 2)
    config = parse_line(f"{pipeline_flags} --pipeline-trace x", tmp_path, {"pipeline": {"trace_steps": 3}}, 2)
    assert engine_dict(config, 2)["pipeline"] == {"trace": "x", "trace_steps": 3}


def test_pipeline_defaults_without_pipeline_are_noted():
    config = parse([], world_size=1, env={"MEGATRON_DEFAULTS": "--pipeline-chunks 2 --pipeline-schedule auto"})
    assert config.parallel.chunks == 1
    message = "--pipeline-schedule, --pipeline-chunks in the defaults has no effect without a pipeline"
    assert message in config.notes


@pytest.mark.parametrize(
    ("line", "content", "world_size"),
    [
        ("--pipe-parallel-size 2 --partition-method uniform --gas 4", {"pipeline": {"schedule": "gpipe"}}, 2),
        ("--min-lr 1e-5 --hysteresis 2 --adam-beta1 0.8", {"flops_profiler": {"enabled": True}}, 1),
        ("--fp16 --loss-scale-window 9", {"fp16": {"hysteresis": 3}}, 1),
        ("--bf16", {"fp16": {"enabled": False, "hysteresis": 3}}, 1),
    ],
)
def test_effective_settings_are_not_noted(tmp_path, line, content, world_size):
    assert parse_line(line, tmp_path, content, world_size).notes == ()


def test_loss_scale_is_checked_when_dtype_is_resolved(tmp_path):
    config = resolve_dtype(parse_line("--loss-scale 8"), "bf16")
    assert config.notes == ("--loss-scale has no effect: only fp16 has a loss scale, and this run is bf16",)
    assert resolve_dtype(parse_line("--loss-scale 8"), "fp16").precision.loss_scale == 8
    config = resolve_dtype(parse_line("--hysteresis 3", tmp_path, {"fp16": {"loss_scale_window": 5}}), "fp32")
    assert config.notes == (
        "--hysteresis, fp16.loss_scale_window has no effect: only fp16 has a loss scale, and this run is fp32",
    )
