"""A setting that could not act is an error, or a note where it does no harm."""

from __future__ import annotations

import json

import pytest

from megatron.arguments import engine_dict, parse, resolve_dtype
from megatron.config import Config
from megatron.errors import ConfigError


def read(line: str, folder=None, content: object = None, world_size: int = 1) -> Config:
    words = line.split()
    if content is not None:
        (folder / "ds.json").write_text(json.dumps(content))
        words += ["--deepspeed_config", str(folder / "ds.json")]
    return parse(words, world_size=world_size, env={})


@pytest.mark.parametrize(
    ("line", "parts"),
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
def test_flags_that_cannot_act_are_refused(line, parts):
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_betas_of_the_json_are_refused_with_sgd(tmp_path):
    content = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.9]}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.betas is not a parameter of SGD in DeepSpeed"):
        read("", tmp_path, content)


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
def test_what_cannot_act_and_does_no_harm_is_a_note(tmp_path, line, content, world_size, message):
    assert any(message in note for note in read(line, tmp_path, content, world_size).notes)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--bf16 --hysteresis 2 --loss-scale 9", "--loss-scale 9, --hysteresis 2"),
        ("--fp32 --initial-scale-power 8 --min-loss-scale 2", "--initial-scale-power 8, --min-loss-scale 2"),
        ("--recompute-num-layers 2", "--recompute-num-layers 2"),
        ("--sequence-parallel --partition-activations", "--sequence-parallel, --partition-activations"),
        ("--no-pipeline-parallel --num-layers 3 --num-unique-layers 3", "--no-pipeline-parallel, --num-unique-layers"),
    ],
)
def test_what_asks_for_what_the_other_flags_make_hold_is_neutral(line, named):
    config = read(line)
    assert ", ".join(config.ignored) == named and config.notes == ()
    if "scale" in line:
        assert config.precision == read(line.split()[0]).precision
    assert not config.parallel.sequence_parallel and not config.parallel.partition_activations
    with pytest.raises(ConfigError, match="is rejected by --strict-flags"):
        read(f"{line} --strict-flags")


def test_steps_of_a_trace_need_a_trace(tmp_path):
    pipe = "--pipe-parallel-size 2"
    with pytest.raises(ConfigError, match=r"pipeline\.trace_steps in the JSON has no effect without a trace"):
        read(pipe, tmp_path, {"pipeline": {"trace_steps": 3}}, 2)
    config = read(f"{pipe} --pipeline-trace x", tmp_path, {"pipeline": {"trace_steps": 3}}, 2)
    assert engine_dict(config, 2)["pipeline"] == {"trace": "x", "trace_steps": 3}


def test_a_recipe_for_pipelines_has_no_effect_without_one_and_says_so():
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
def test_what_acts_is_not_noted(tmp_path, line, content, world_size):
    assert read(line, tmp_path, content, world_size).notes == ()


def test_a_loss_scale_is_checked_when_the_device_gives_the_number_format(tmp_path):
    config = resolve_dtype(read("--loss-scale 8"), "bf16")
    assert config.notes == ("--loss-scale has no effect: only fp16 has a loss scale, and this run is bf16",)
    assert resolve_dtype(read("--loss-scale 8"), "fp16").precision.loss_scale == 8
    config = resolve_dtype(read("--hysteresis 3", tmp_path, {"fp16": {"loss_scale_window": 5}}), "fp32")
    assert config.notes == (
        "--hysteresis, fp16.loss_scale_window has no effect: only fp16 has a loss scale, and this run is fp32",
    )
