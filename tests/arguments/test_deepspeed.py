"""DeepSpeed's JSON: strict reading, one source for each value, and what the engine is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.config import get_pipeline_config

from megatron.arguments import deepspeed_keys
from megatron.config import Config, engine_dict, parse
from megatron.errors import ConfigError
from tds.engine import pipeline_json
from tds.schedule import SCHEDULE_NAMES, schedule_named
from tds.schedule.simulate import AUTO, MANY_CHUNKS, ONE_CHUNK, SCHEDULES

SHIPPED_JSON = Path(__file__).parents[2] / "ds_config_gpt2.json"


def write_json(folder: Path, content: object) -> str:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def parse_json(folder: Path, content: object, line: str = "", world_size: int = 1, **kwargs) -> Config:
    flags = ["--deepspeed_config", write_json(folder, content), *line.split()]
    return parse(flags, world_size=world_size, env={}, **kwargs)


def error_message(folder: Path, content: object, line: str = "", world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_json(folder, content, line, world_size)
    return str(exc_info.value)


def test_shipped_json_defers_sizes_and_precision_to_flags():
    line = f"--deepspeed_config {SHIPPED_JSON} --batch-size 2 --gas 3 --clip-grad 0.5 --fp16 --loss-scale 64"
    config = parse(line.split(), world_size=2, env={})
    assert (config.batch.batch_size, config.batch.gas, config.optimizer.clip_grad) == (2, 3, 0.5)
    assert (config.precision.dtype, config.precision.loss_scale) == ("fp16", 64)


def test_json_only_values_are_used(tmp_path):
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.25,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}},
    }
    config = parse_json(tmp_path, content)
    assert (config.batch.batch_size, config.batch.gas, config.precision.dtype) == (2, 8, "bf16")
    optimizer = config.optimizer
    assert (optimizer.clip_grad, optimizer.lr, optimizer.weight_decay) == (0.25, 0.1, 0.3)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.8, 0.9, 1e-6)


def test_json_fp16_section_configures_loss_scaler(tmp_path):
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 7, "hysteresis": 3}
    precision = parse_json(tmp_path, {"fp16": section | {"min_loss_scale": 2}}).precision
    assert (precision.dtype, precision.is_dynamic, precision.initial_scale_power) == ("fp16", True, 8)
    assert (precision.loss_scale_window, precision.hysteresis, precision.min_scale) == (7, 3, 2)


def test_equal_flag_and_json_values_agree(tmp_path):
    content = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 1}
    config = parse_json(tmp_path, content, "--batch-size 3 --gas 4 --clip-grad 1.0", 2)
    assert config.batch.global_batch_size(2) == 24


def test_engine_dict_always_has_zero_stage_0(tmp_path):
    stages = {stage: ("", f"--zero-stage {stage}") for stage in range(4)}
    for stage, lines in stages.items():
        for line in lines:
            config = parse_json(tmp_path, {"zero_optimization": {"stage": stage}}, line, 2)
            assert config.optimizer.zero_stage == stage
            assert engine_dict(config, 2)["zero_optimization"] == {"stage": 0}
    assert parse_json(tmp_path, {"zero_optimization": {"stage": "auto"}}, "--zero-stage 1", 2).optimizer.zero_stage == 1
    assert parse_json(tmp_path, {"zero_optimization": {}}, "", 2).optimizer.zero_stage == 0


def test_global_batch_derives_accumulation_steps(tmp_path):
    assert parse_json(tmp_path, {"train_batch_size": 24}, "--batch-size 3", 2).batch.gas == 4


def test_global_batch_derives_missing_size(tmp_path):
    batch = parse_json(tmp_path, {"train_batch_size": 24}, "--gas 4", 2).batch
    assert (batch.batch_size, batch.gas) == (3, 4)
    batch = parse_json(tmp_path, {"train_batch_size": 18}, "", 3).batch  # DeepSpeed's missing accumulation is 1
    assert (batch.batch_size, batch.gas) == (6, 1)
    assert "must be a multiple of gas x dp, got 24 and gas 5 x dp 2 = 10" in error_message(
        tmp_path, {"train_batch_size": 24}, "--gas 5", 2
    )
    assert "must be a multiple of dp, got 25 and dp 2 = 2" in error_message(tmp_path, {"train_batch_size": 25}, "", 2)


@pytest.mark.parametrize(
    ("content", "line", "fragments"),
    [
        ({"gradient_clipping": 0.5}, "--clip-grad 1", ["--clip-grad 1", "gradient_clipping 0.5", '"auto"']),
        ({"train_micro_batch_size_per_gpu": 2}, "--batch-size 3", ["--batch-size 3", "per_gpu 2"]),
        ({"gradient_accumulation_steps": 2}, "--gas 3", ["--gas 3", "gradient_accumulation_steps 2"]),
        ({"fp16": {"enabled": True}}, "--bf16", ["--bf16", "fp16.enabled true, that is fp16"]),
        ({"bf16": {"enabled": True}}, "--fp32", ["--fp32", "bf16.enabled true, that is bf16"]),
        ({"fp16": {"enabled": False}}, "--fp16", ["--fp16", "fp16.enabled false"]),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 0", ["--zero-stage 0", "zero_optimization.stage 1"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", ["both enabled"]),
    ],
)
def test_flag_and_json_conflict_names_both(tmp_path, content, line, fragments):
    message = error_message(tmp_path, content, line)
    for fragment in fragments:
        assert fragment in message


def test_inconsistent_global_batch_error_has_computed_value(tmp_path):
    line = "--batch-size 4 --gas 16 --model-parallel-size 2"
    message = error_message(tmp_path, {"train_batch_size": 64}, line, 4)
    assert "train_batch_size 64 != micro 4 x gas 16 x dp 2 = 128; dp = world 4 / (tp 2 x pp 1)" in message
    assert "Set train_batch_size to 128" in message and "change --batch-size 4 or --gas 16" in message


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", [":1:1:", "empty file"]),
        ("  \n", [":1:1:", "empty file"]),
        ("[1]", [":1:1:", "one JSON object", "got list"]),
        ("{\n  'a': 1}", [":2:3:", "must be JSON"]),
        ('{"gradient_clipping": 1,\n}', [":2:1:", "remove the trailing comma"]),
        ('{\n  // note\n  "gradient_clipping": 1}', [":2:3:", "a comment is not JSON"]),
        ('{"bf16": {"enabled": true},\n "fp16": {"enabled": false,\n  "enabled": true}}', [":3:3:", "'enabled' again"]),
        ('{"gradient_clipping": NaN}', ["finite, got NaN"]),
        ('{\n "gradient_cliping": 1}', [":2:2:", "unknown key gradient_cliping; did you mean gradient_clipping?"]),
        ('{"fp16": {"enabled": true, "loss_scal": 1}}', ["did you mean loss_scale?", "in fp16"]),
        ('{"fp16": {"auto_scale": true}}', ["unknown key auto_scale in fp16", "supported keys are enabled"]),
        ('{"fp16": true}', ["fp16 must be an object"]),
        ('{"train_batch_size": "8"}', [":1:2:", "train_batch_size must be a positive integer, got '8'"]),
        ('{"train_batch_size": 0}', ["positive integer, got 0"]),
        ('{"train_batch_size": -4}', ["positive integer, got -4"]),
        ('{"train_batch_size": true}', ["positive integer, got True"]),
        ('{"train_batch_size": 1e30}', ["positive integer, got 1e+30"]),
        ('{"train_batch_size": 9999999999999999999999}', ["positive integer, got 9999999999999999999999"]),
        ('{"gradient_clipping": -1}', ["a number of at least 0, got -1"]),
        ('{"gradient_clipping": 1e999}', ["a number of at least 0, got inf"]),
        ('{"wall_clock_breakdown": 1}', ["true or false, got 1"]),
        ('{"zero_optimization": {"stage": 4}}', ["zero_optimization.stage in the JSON", "at most 3, got 4"]),
        (
            '{"zero_optimization": {"stage": 0, "overlap": true}}',
            ["unknown key overlap", "supported keys are stage"],
        ),
        ('{"scheduler": {"type": "WarmupLR"}}', ["scheduler is not supported", "--lr-decay-style"]),
        (
            '{"curriculum_learning": {"enabled": true, "curriculum_type": "vocab"}}',
            ["curriculum_learning.curriculum_type must be one of seqlen, got 'vocab'"],
        ),
        ('{"optimizer": {"type": "Lamb"}}', ["optimizer.type must be AdamW", "Muon, got 'Lamb'"]),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', ["optimizer.params.betas must be two numbers, got [0.9]"]),
        (
            '{"pipeline": {"activation_checkpoint_intervall": 1}}',
            [":1:15:", "did you mean activation_checkpoint_interval"],
        ),
        (
            '{"pipeline": {"qqq": 1}}',
            ["unknown key qqq in pipeline: supported keys are activation_checkpoint_interval, "],
        ),
        ('{"pipeline": {"schedule": "zb"}}', ["pipeline.schedule must be one of 1f1b, gpipe, zb-h1, ", "got 'zb'"]),
        ('{"pipeline": {"chunks": 0}}', ["pipeline.chunks must be a positive integer, got 0"]),
        ('{"pipeline": {"timeout_s": "3"}}', ["pipeline.timeout_s must be a positive integer, got '3'"]),
        ('{"pipeline": {"trace": true}}', ["pipeline.trace must be a string, got True"]),
        ('{"tensorboard": {"output": "x"}}', ["did you mean output_path? in tensorboard"]),
        ('{"csv_monitor": {"enabled": 1}}', ["csv_monitor.enabled must be true or false, got 1"]),
        ('{"wandb": {"proyect": "x"}}', ["did you mean project? in wandb"]),
        ('{"comet": {"mode": "gett"}}', ["comet.mode must be one of get, create, get_or_create, got 'gett'"]),
        ('{"flops_profiler": {"profile_stepp": 1}}', ["did you mean profile_step? in flops_profiler"]),
        ('{"flops_profiler": {"module_depth": -2}}', ["module_depth must be an integer of at least -1, got -2"]),
        ('{"comms_logger": {"prof_ops": "all"}}', ["comms_logger.prof_ops must be a list of strings, got 'all'"]),
        ('{"timers": {"throughput": {"enable": true}}}', [":1:28:", "did you mean enabled? in timers.throughput"]),
        ('{"activation_checkpointing": {"cpu": true}}', ["supported keys are partition_activations"]),
        ('{"optimizer": {"params": {"betas": [0.9, 2]}}}', ["betas[1] in the JSON must be", "got 2"]),
    ],
)
def test_invalid_json_error_names_location(tmp_path, text, fragments):
    message = error_message(tmp_path, text)
    for fragment in fragments:
        assert fragment in message
    if fragments[0].startswith(":"):
        assert f"config.json{fragments[0]}" in message


def test_all_json_problems_are_reported_together(tmp_path):
    message = error_message(tmp_path, {"scheduler": {}, "zero_optimisation": 1, "train_batch_size": "8"}, "--lr 0")
    assert message.startswith("4 problems")


def test_missing_json_error_names_file(tmp_path):
    with pytest.raises(ConfigError, match=r"--deepspeed_config must name a file .*nothing\.json: No such file"):
        parse(["--deepspeed_config", str(tmp_path / "nothing.json")], world_size=1, env={})


def test_non_utf8_json_raises_and_bom_is_accepted(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{\n"gradient_clipping": 1, "\xff": 1}')
    with pytest.raises(ConfigError, match=r"config\.json:2:1: must be UTF-8, got byte 0xff"):
        parse(["--deepspeed_config", str(path)], world_size=1, env={})
    path.write_bytes(b'\xef\xbb\xbf{"gradient_clipping": 2}')
    assert parse(["--deepspeed_config", str(path)], world_size=1, env={}).optimizer.clip_grad == 2


def test_pipeline_schedules_and_keys_match_tds():
    assert set(SCHEDULES) == {*SCHEDULE_NAMES, AUTO}
    for name in ONE_CHUNK:
        schedule_named(name)
    for name in MANY_CHUNKS:
        schedule_named(name, 2)
    assert set(deepspeed_keys.SUBSECTIONS["pipeline"]) == set(pipeline_json.KEYS)


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ({"schedule": "gpipe"}, "--pipeline-schedule zb-h1"),
        ({"schedule": "auto"}, "--pipeline-schedule 1f1b"),
        ({"chunks": 2}, "--pipeline-chunks 3"),
        ({"trace": "here"}, "--pipeline-trace there"),
        ({"timeout_s": 5}, "--step-timeout 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_json_pipeline_section_applies_and_must_match_flags(tmp_path, key, flag):
    line = "--pipe-parallel-size 2 --num-layers 12"
    ((name, value),) = key.items()
    config = parse_json(tmp_path, {"pipeline": key}, line, 2)
    assert getattr(config.parallel, deepspeed_keys.PIPELINE[name].field) == value
    assert engine_dict(config, 2)["pipeline"] == key
    matching_line = f"{line} {flag.rpartition(' ')[0]} {value}"
    assert parse_json(tmp_path, {"pipeline": key}, matching_line, 2).parallel == config.parallel
    assert engine_dict(parse_json(tmp_path, {}, matching_line, 2), 2)["pipeline"] == key
    message = error_message(tmp_path, {"pipeline": key}, f"{line} {flag}", 2)
    assert f"got {flag} and pipeline.{name} {value}. Change one of them, or remove the key" in message


def test_bucket_sizes_come_from_json_or_flags(tmp_path):
    bucket_content = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 7000000}}
    for content, words in (
        (bucket_content, ""),
        ({}, "--reduce-bucket-size 500000000 --allgather-bucket-size 7000000"),
    ):
        config = parse_json(tmp_path, content, words, 2)
        assert (config.parallel.reduce_bucket_size, config.parallel.allgather_bucket_size) == (500_000_000, 7_000_000)
        assert engine_dict(config, 2)["zero_optimization"] == {"stage": 0, "reduce_bucket_size": 500_000_000}
    for default_value in (0, "auto"):
        config = parse_json(tmp_path, {"zero_optimization": {"reduce_bucket_size": default_value}}, "", 2)
        assert config.parallel.reduce_bucket_size == 0 and engine_dict(config, 2)["zero_optimization"] == {"stage": 0}
    message = error_message(tmp_path, bucket_content, "--reduce-bucket-size 1000", 2)
    assert "got --reduce-bucket-size 1000 and zero_optimization.reduce_bucket_size 500000000" in message


def test_zero3_prefetches_unless_bucket_size_is_0(tmp_path):
    def is_prefetching(section, words=""):
        content = {"zero_optimization": {"stage": 3, **section}}
        return parse_json(tmp_path, content, words, 2).parallel.stage3_prefetch_bucket_size > 0

    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        assert [is_prefetching({name: value}) for value in ("auto", 0.5, 5e8, 0)] == [True, True, True, False]
    assert is_prefetching({}) and not is_prefetching({}, "--stage3-prefetch-bucket-size 0")
    message = error_message(
        tmp_path, {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}, "--stage3-prefetch-bucket-size 1", 2
    )
    assert "got --stage3-prefetch-bucket-size 1 and zero_optimization.stage3_prefetch_bucket_size 0" in message


def test_flag_or_json_disables_overlapped_grad_reduce(tmp_path):
    line = "--pipe-parallel-size 2 --num-layers 12"
    no_overlap = {"pipeline": {"overlap_reduction": False}}
    assert parse_json(tmp_path, {}, line, 2).parallel.overlap_grad_reduce
    assert "pipeline" not in engine_dict(parse_json(tmp_path, {}, "", 2), 2)
    for content, words in ((no_overlap, line), ({}, f"{line} --no-overlap-grad-reduce")):
        config = parse_json(tmp_path, content, words, 2)
        assert not config.parallel.overlap_grad_reduce
        assert engine_dict(config, 2)["pipeline"] == no_overlap["pipeline"]
    message = error_message(tmp_path, no_overlap, f"{line} --overlap-grad-reduce", 2)
    assert "got --overlap-grad-reduce and pipeline.overlap_reduction False" in message


def test_json_pipeline_section_without_pipeline_is_noted(tmp_path):
    content = {"pipeline": {"schedule": "zb-h1", "chunks": 9, "trace": "x", "timeout_s": 5}}
    config = parse_json(tmp_path, content, "", 1)
    assert config.parallel == parse_json(tmp_path, {}, "", 1).parallel
    assert any('"pipeline" has no effect without a pipeline' in note for note in config.notes)


def test_section_keys_match_deepspeed_classes():
    sections = DeepSpeedMonitorConfig.model_fields
    for name in ("tensorboard", "wandb", "csv_monitor", "comet"):
        assert set(deepspeed_keys.SUBSECTIONS[name]) == set(sections[name].annotation.model_fields)
    assert set(deepspeed_keys.SUBSECTIONS["flops_profiler"]) == set(vars(DeepSpeedFlopsProfilerConfig({})))
    assert set(deepspeed_keys.SUBSECTIONS["comms_logger"]) == set(CommsLoggerConfig.model_fields)
    assert set(get_pipeline_config({})) <= set(deepspeed_keys.SUBSECTIONS["pipeline"])


def test_engine_dict_excludes_precision_and_clipping(tmp_path):
    content = {
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "steps_per_print": 7,
        "tensorboard": {"enabled": False},
        "pipeline": {"activation_checkpoint_interval": 1},
        "wall_clock_breakdown": "auto",
        "comms_logger": {"enabled": "auto", "verbose": False},
    }
    config = parse_json(tmp_path, content, "--batch-size 2 --gas 3 --pipe-parallel-size 2", 4)
    assert engine_dict(config, 4) == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 7,
        "tensorboard": {"enabled": False},
        "pipeline": {"activation_checkpoint_interval": 1},
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "comms_logger": {"verbose": False},
        "zero_allow_untested_optimizer": True,
    }
    assert config.to_dict()["deepspeed"] == content
