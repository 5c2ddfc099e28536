"""--zero-stage and offload: rejected combinations, and notes."""

from __future__ import annotations

import json

import pytest

from megatron.arguments.validate import notes_of
from megatron.config import parse
from megatron.errors import ConfigError

BASE_FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --dry-run"


def parse_line(extra: str, world_size: int = 2, json_file=None):
    words = [*BASE_FLAGS.split(), *extra.split(), *(["--deepspeed_config", str(json_file)] if json_file else [])]
    return parse(words, world_size=world_size, env={})


def parse_zero_section(folder, section: object, extra: str = "", world_size: int = 2):
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": section}))
    return parse_line(extra, world_size, folder / "ds.json").optimizer


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_work_with_pipeline(stage, is_json, tmp_path):
    layout = "--pipe-parallel-size 2"
    if is_json:
        assert parse_zero_section(tmp_path, {"stage": stage}, layout, world_size=4).zero_stage == stage
    else:
        assert parse_line(f"--zero-stage {stage} {layout}", world_size=4).optimizer.zero_stage == stage


def test_invalid_zero_stage_raises():
    for stage in ("-1", "one", "4"):
        with pytest.raises(ConfigError, match=f"--zero-stage must be an integer of at least 0 .*, got '?{stage}"):
            parse_line(f"--zero-stage={stage}")


def test_adafactor_with_zero_raises():
    for stage in (1, 3):
        with pytest.raises(ConfigError, match=f"--optimizer adafactor needs --zero-stage 0, got {stage}"):
            parse_line(f"--zero-stage {stage} --optimizer adafactor")
    assert parse_line("--offload-optimizer --optimizer adafactor").optimizer.offload_optimizer


def test_zero_with_single_replica_is_noted():
    for stage in (1, 2, 3):
        note = f"ZeRO {stage} has no effect with one replica"
        assert note in notes_of(parse_line(f"--zero-stage {stage} --model-parallel-size 2"), 2)
        assert note not in notes_of(parse_line(f"--zero-stage {stage}"), 2)
    assert "ZeRO 3 has no effect" not in " ".join(notes_of(parse_line("--zero-stage 3 --offload-parameters", 1), 1))
    assert note not in notes_of(parse_line("", 1), 1)


def test_bf16_grad_accumulation_fusion_on_cpu_is_noted():
    for line, has_effect in (("--bf16", False), ("--fp32", True), ("--bf16 --no-gradient-accumulation-fusion", True)):
        notes_text = " ".join(notes_of(parse_line(f"--device cpu --gradient-accumulation-fusion {line}"), 2))
        assert ("--gradient-accumulation-fusion has no effect in bf16 on a CPU" in notes_text) == (not has_effect)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--offload-parameters --zero-stage 2", "--offload-parameters stores .* got --zero-stage 2"),
        ("--cpu-adam deepspeed", "--cpu-adam has no effect without --offload-optimizer"),
        ("--cpu_torch_adam", "--cpu-adam has no effect without --offload-optimizer"),
        ("--no-pin-memory", "--no-pin-memory has no effect without --offload-optimizer"),
        (
            "--cpu-adam deepspeed --offload-optimizer --optimizer sgd",
            "--cpu-adam deepspeed implements AdamW only, got .* sgd",
        ),
        ("--cpu-adam deepspeed --offload-optimizer --fp64", "--cpu-adam deepspeed supports fp32 .*, got --fp64"),
        ("--zero-stage 3 --drift-interval 5", "--drift-interval compares the copies .* --zero-stage 2"),
        ("--zero-stage 2 --no-overlap-grad-reduce", "--zero-stage 2 reduces gradients during .* use --zero-stage 1"),
        ("--zero-stage 3 --compile", "--compile does not support --zero-stage 3"),
        (
            "--zero-stage 2 --gradient-accumulation-fusion",
            "fusion accumulates into unsharded .* got --zero-stage 2.* --zero-stage 1, or",
        ),
        (
            "--gradient-accumulation-fusion --compile",
            "fusion accumulates gradients during .* --compile does not support",
        ),
        ("--zero-stage 2 --checkpoint-format deepspeed", "--checkpoint-format deepspeed .* got --zero-stage 2"),
    ],
)
def test_unsupported_combinations_raise(line, message):
    with pytest.raises(ConfigError, match=message):
        parse_line(line)


def test_cpm_flags_enable_optimizer_offload():
    settings = parse_line("--cpu-optimizer --cpu_torch_adam").optimizer
    assert (settings.offload_optimizer, settings.cpu_adam) == (True, "torch")
    assert parse_line("--zero-stage 3 --offload-parameters --no-pin-memory").optimizer.no_pin_memory
    assert parse_line("--zero-stage 3 --drift-interval 5 --model-parallel-size 2").optimizer.zero_stage == 3


def test_json_offload_supports_cpu_only(tmp_path):
    cpu_offload = {"device": "cpu", "pin_memory": True}
    settings = parse_zero_section(
        tmp_path, {"stage": 3, "offload_optimizer": cpu_offload, "offload_param": cpu_offload}
    )
    assert (settings.offload_optimizer, settings.offload_parameters, settings.no_pin_memory) == (True, True, False)
    settings = parse_zero_section(tmp_path, {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}})
    assert (settings.offload_optimizer, settings.offload_parameters, settings.no_pin_memory) == (True, False, True)
    assert not parse_zero_section(tmp_path, {"offload_optimizer": {"device": "none"}}).offload_optimizer
    invalid_cases = [
        ({"offload_optimizer": {"device": "nvme"}}, "", "device must be one of cpu, none, got 'nvme'"),
        ({"offload_optimizer": True}, "", "offload_optimizer must be an object"),
        ({"offload_optimizer": {"device": "none"}}, "--offload-optimizer", "must agree, got --offload-optimizer and"),
        ({"offload_param": {"device": "cpu"}}, "--zero-stage 2", "--offload-parameters stores"),
        ({"overlap": True}, "", "unknown key overlap; did you mean .* in zero_optimization: .* tuning keys"),
        (
            {"stage": 3, "offload_optimizer": cpu_offload, "offload_param": {"device": "cpu", "pin_memory": False}},
            "",
            "pin_memory must be the same",
        ),
    ]
    for section, extra, message in invalid_cases:
        with pytest.raises(ConfigError, match=message):
            parse_zero_section(tmp_path, section, extra)
