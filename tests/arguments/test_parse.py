"""Command lines: values, sources, and all mistakes at once."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

import pytest

from megatron.arguments import config_from_values
from megatron.arguments.flag_values import all_options, rejected_flags, scan, unknown_message
from megatron.arguments.help import help_text
from megatron.arguments.validate import find_problems
from megatron.config import Config, ModelConfig, check_device, parse, resolve_dtype
from megatron.config.data import DataConfig
from megatron.config.parallel import TRACE_IN_RUN
from megatron.data.split import split_documents
from megatron.errors import ConfigError, DataError, exit_code
from megatron.models.registry import FAMILIES
from tests.helpers.rows import check_rows

FLAGS_OF_OTHER_PROGRAMS = """
--kd --num-dataset-builder-threads --no-create-attention-mask-in-dataloader
--log-num-zeros-in-grad --num-classes --num-channels --img-h --use-vision-head --test-mode
""".split()
"""Flags of other programs, like which there is none among ours."""
SMALL_MODEL_FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"


def parse_line(line: str, world_size: int = 1, **kwargs) -> Config:
    return parse(line.split(), world_size=world_size, env=kwargs.pop("env", {}), **kwargs)


def error_message(line: str, world_size: int = 1, **kwargs) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line, world_size, **kwargs)
    assert exit_code(exc_info.value) == 2
    return str(exc_info.value)


def test_flags_set_fields_and_missing_sizes_are_derived():
    config = parse_line(
        SMALL_MODEL_FLAGS + " --kv-channels 8 --ffn-hidden-size=100 --hidden-bias --openai-gelu --lr 1e-3 --bf16"
    )
    assert (config.model.num_layers, config.model.kv_hidden_size, config.model.ff_hidden_size) == (4, 8, 100)
    assert (config.model.hidden_bias, config.model.activation) == (True, "gelu-tanh")
    assert (config.optimizer.lr, config.precision.dtype) == (1e-3, "bf16")
    derived = parse_line(SMALL_MODEL_FLAGS)
    assert (derived.model.kv_hidden_size, derived.model.ff_hidden_size) == (16, 256)
    assert derived.model.max_position_embeddings == 32
    assert derived.optimizer.lr_decay_iters == derived.batch.train_iters


def test_config_is_built_without_command_line():
    config = Config(model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2))
    assert find_problems(config, 1) == []
    assert config.model.kv_hidden_size == 16


def test_config_from_values_rejects_unknown_names():
    with pytest.raises(TypeError, match="got distributed_timeout_s, layers$"):
        config_from_values({"num_layers": 2, "layers": 3, "distributed_timeout_s": 60})


def test_world_size_derives_data_parallel_size_and_global_batch():
    config = parse_line(SMALL_MODEL_FLAGS + " --model-parallel-size 2 --pipe-parallel-size 2 --batch-size 3 --gas 5", 8)
    assert config.parallel.data_parallel_size(8) == 2
    assert config.batch.global_batch_size(2) == 30


def test_timeouts_default_to_one_minute_and_half_an_hour():
    parallel = parse_line("").parallel
    assert (parallel.step_timeout_s, parallel.phase_timeout_s) == (60, 1800)
    parallel = parse_line("--distributed-timeout-s 3 --phase-timeout-minutes 0.5").parallel
    assert (parallel.step_timeout_s, parallel.phase_timeout_s) == (3, 30)
    assert "--step-timeout must be a positive integer" in error_message("--step-timeout 0")
    assert "--phase-timeout-minutes must be a finite number of more than 0" in error_message(
        "--phase-timeout-minutes 0"
    )


def test_layers_per_chunk_derive_num_chunks():
    line = "--num-layers 12 --pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    assert parse_line(f"{line} 3", 2).parallel.chunks == 2
    assert parse_line(f"{line} 3 --pipeline-chunks 2", 2).parallel.schedule == "interleaved"
    assert parse_line(f"{line} 6", 2).parallel.schedule == "1f1b"
    assert "12 layers / (2 stages x 3) = 2 and 3. Remove one of them" in error_message(
        f"{line} 3 --pipeline-chunks 3", 2
    )
    message = error_message(f"{line} 5", 2)
    assert (
        "--num-layers must be a multiple of --pipe-parallel-size x --num-layers-per-virtual-pipeline-stage" in message
    )
    assert "got 12 and 2 x 5 = 10" in message


def test_namespace_has_megatron_and_cpm_names():
    for pipe_size, expected in ((0, 0), (1, 0), (2, 2)):
        args = parse_line(
            SMALL_MODEL_FLAGS + f" --pipe-parallel-size {pipe_size} --tensor-model-parallel-size 2 --fp16", 4
        ).namespace()
        assert args.pipe_parallel_size == expected
        assert (args.model_parallel_size, args.tensor_model_parallel_size, args.fp16, args.bf16) == (2, 2, True, False)
        assert (args.micro_batch_size, args.ffn_hidden_size) == (args.batch_size, args.ff_hidden_size)


def test_config_json_is_equal_on_all_ranks():
    configs = [
        parse_line(SMALL_MODEL_FLAGS + f" --local_rank={rank}", env={"LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    assert [config.run.local_rank for config in configs] == [0, 1]
    assert json.dumps(configs[0].to_dict()) == json.dumps(configs[1].to_dict())


def test_local_rank_must_match_launcher():
    assert "got 1 and 0" in error_message("--local_rank 1", env={"LOCAL_RANK": "0"})


def test_repeated_flag_uses_last_value_with_note():
    config = parse_line("--lr 1 --batch-size 2 --micro-batch-size 3 --lr 0.5")
    assert (config.optimizer.lr, config.batch.batch_size) == (0.5, 3)
    assert config.repeated == ("--micro-batch-size", "--lr")
    assert any("--lr" in note and "last value is used" in note for note in config.notes)


def test_flags_without_effect_are_listed_as_ignored():
    config = parse_line("--deepspeed --attention-softmax-in-fp32")
    assert list(config.ignored) == ["--deepspeed", "--attention-softmax-in-fp32"] and config.notes == ()


def test_extra_flags_and_defaults_are_accepted():
    def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("mine").add_argument("--my-size", type=int, default=3)
        parser.add_argument("--my-names", nargs="+")
        return parser

    config = parse_line(
        "--my-names a b --lr 0.1 --my-size=7",
        extra_args_provider=add_flags,
        defaults={"lr": 0.2, "tokenizer_type": None},
    )
    assert config.extra == {"my_size": 7, "my_names": ["a", "b"]}
    assert config.namespace().my_size == 7
    assert config.optimizer.lr == 0.1
    assert parse_line("", defaults={"lr": 0.2}).optimizer.lr == 0.2
    assert "invalid int value: 'x'" in error_message("--my-size x", extra_args_provider=add_flags)
    assert "did you mean lr?" in error_message("", defaults={"lrr": 1})


def test_extra_flag_must_not_redefine_existing_flag():
    def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--lr")
        return parser

    assert "must not add a flag that exists, got --lr" in error_message("", extra_args_provider=add_flags)


@pytest.mark.parametrize("flag", FLAGS_OF_OTHER_PROGRAMS)
def test_dissimilar_unknown_flag_gets_no_suggestion(flag: str):
    """Half alike, another program's flag was taken for one of ours."""
    options = {name: option for _, option in all_options() for name in option.flags}
    assert unknown_message("flag", flag, options, options) == f"unknown flag {flag}; --help-all lists all flags"


def test_suggested_flags_are_accepted() -> None:
    """--learning-rate was taken for --actor-learning-rate, which is not supported."""

    def check(flag: str) -> None:
        (problem,) = scan([flag]).problems
        suggested = problem.partition("did you mean ")[2].rstrip("?")
        assert "unknown flag" not in problem or suggested not in rejected_flags("gpt2")
        assert flag != "--learning-rate" or suggested == "--lr"

    check_rows([*(f"{flag[:-1]}{flag[-2]}" for flag in rejected_flags("gpt2")), "--learning-rate"], check)


def test_global_batch_changing_recipe_sizes_is_noted():
    env = {"MEGATRON_DEFAULTS": "--batch-size 8 --gas 4"}
    config = parse("--global-batch-size 30 --dry-run".split(), world_size=1, env=env)
    assert (config.batch.batch_size, config.batch.gas) == (6, 5)
    message = "a global batch of 30 on 1 replica becomes --batch-size 6 x --gas 5 instead of 8 x 4"
    assert [note for note in config.notes if message in note]
    for line in ("--global-batch-size 32", "--global-batch-size 30 --batch-size 6 --gas 5", "--batch-size 6 --gas 5"):
        unchanged = parse([*line.split(), "--dry-run"], world_size=1, env=env)
        assert not [note for note in unchanged.notes if "instead of" in note]


def test_pipeline_trace_without_folder_uses_run_folder():
    words = "--pipe-parallel-size 2 --dry-run".split()
    for line in ([*words, "--pipeline-trace"], ["--pipeline-trace", *words]):
        assert parse(line, world_size=2, env={}).parallel.pipeline_trace == TRACE_IN_RUN
    assert parse([*words, "--pipeline-trace", "x"], world_size=2, env={}).parallel.pipeline_trace == "x"
    assert "--pipeline-trace needs a value" in error_message("--pipeline-trace=")


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("--hiden-size 4", ["unknown flag --hiden-size", "did you mean --hidden-size?"]),
        ("--num-lay 4", ["unknown flag --num-lay", "did you mean --num-layers?"]),
        ("--LR 4", ["unknown flag --LR", "did you mean --lr?"]),
        ("--zzz 4", ["unknown flag --zzz", "--help-all lists all flags"]),
        ("--seq-lenght 4", ["did you mean --seq-length?"]),
        ("--tensor-parallel-size 2", ["did you mean --tensor-model-parallel-size?"]),
        ("--micro-batchsize 4", ["did you mean --micro-batch-size?"]),
        ("--lr=", ["--lr needs a value", "got none"]),
        ("--lr --fp32", ["--lr needs a value", "got none"]),
        ("--lr", ["--lr needs a value", "got none"]),
        ("--hidden-bias=true", ["--hidden-bias takes no value, got 'true'", "Remove the value, or the flag"]),
        ("--hidden-bias true", ["'true' on its own"]),
        ("--num-layers 2.5", ["--num-layers must be an integer of at least 0, got '2.5'"]),
        ("--batch-size 0", ["--batch-size must be a positive integer, got 0"]),
        ("--gas -3", ["--gas must be a positive integer, got -3"]),
        ("--gas 99999999999999", ["--gas must be a positive integer, got 99999999999999"]),
        ("--kv-hidden-size 0", ["--kv-hidden-size must be a positive integer, got 0"]),
        ("--lr nan", ["--lr must be a finite number of more than 0, got nan"]),
        ("--lr 0", ["--lr must be a finite number of more than 0, got 0"]),
        ("--lr -1", ["got -1"]),
        ("--warmup 1.5", ["--warmup must be a finite number of at least 0 and at most 1, got 1.5"]),
        ("--min-lr 1 --lr 0.5", ["--min-lr must not exceed --lr", "1 and --lr 0.5", "Lower --min-lr"]),
        ("--lr-decay-style exponential", ["needs --min-lr above 0"]),
        ("--lr-decay-style cosinus", ["one of constant, linear, cosine", "got 'cosinus'"]),
        ("--fp16 --bf16", ["one number format", "--fp16 and --bf16"]),
        ("--seq-length 64 --max-position-embeddings 32", ["64 and 32", "Raise --max-position-embeddings"]),
        ("--device cpu --fp16", ["fp16 needs a GPU, got a CPU", "Use --bf16"]),
        ("--device cpu --distributed-backend nccl", ["nccl needs GPUs", "Use gloo"]),
        ("--split 1,2,3,4", ["--split must be one to three weights", "'1,2,3,4'"]),
        ("--split 0,0,0", ["--split must be one to three weights"]),
        ("--vocab-file /nowhere/v.json", ["--vocab-file must name a file", "/nowhere/v.json"]),
        ("--load a --resume", ["--load and --resume", "--load a"]),
        ("--finetune", ["--finetune needs a checkpoint", "Add --load"]),
        ("--eval-only", ["--eval-only needs a checkpoint"]),
        ("--partition-method type:(", ["needs a regular expression"]),
        ("--partition-method even", ["one of balanced, uniform, parameters, profile, or type:REGEX, got 'even'"]),
        ("--mask-prob 0.1", ["--mask-prob is not supported", "BERT"]),
        ("--data-impl lazy", ["one of mmap, pread, got 'lazy'"]),
        ("--hidden-size 64 --num-attention-heads 5", ["64 and 5", "one of [1, 2, 4, 8, 16] heads"]),
    ],
)
def test_invalid_value_error_has_fix(line, fragments):
    message = error_message(line)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("line", "world_size", "fragments"),
    [
        (
            "--model-parallel-size 2 --pipe-parallel-size 2",
            6,
            ["world_size=6", "(2 x 2 = 4)", "Start 4 or 8 processes"],
        ),
        ("--model-parallel-size 2 --pipe-parallel-size 2", 2, ["(2 x 2 = 4)", "Start 4 processes"]),
        ("--model-parallel-size 4", 2, ["must not exceed the world size", "world_size=2", "--model-parallel-size 4"]),
        ("--pipe-parallel-size 2 --pipeline-chunks 3", 2, ["2 x --pipeline-chunks 3 = 6", "1 to 2", "--num-layers 6"]),
        ("--pipe-parallel-size 4 --pipeline-chunks 2", 4, ["Use --pipeline-chunks 1, or --num-layers 8 or more"]),
        ("--pipe-parallel-size 2 --pipeline-schedule interleaved", 2, ["needs several chunks", "--pipeline-chunks 2"]),
        (
            "--pipe-parallel-size 2 --pipeline-chunks 2 --pipeline-schedule gpipe",
            2,
            ["need --pipeline-schedule interleaved or zb-h1"],
        ),
        ("--pipe-parallel-size 5", 5, ["--num-layers 4 on --pipe-parallel-size 5", "0 to 4", "--num-layers 5"]),
        (
            "--model-parallel-size 3 --hidden-size 48",
            3,
            ["--num-attention-heads must be", "4 and 3", "one of [1, 2, 4]"],
        ),
        ("--model-parallel-size 4 --hidden-size 68 --ff-hidden-size 34", 4, ["34 and 4", "one of [1, 2]"]),
        ("--model-parallel-size 4 --num-attention-heads 12 --hidden-size 66 --kv-hidden-size 4", 4, ["66 and 4"]),
    ],
)
def test_invalid_layout_error_names_valid_values(line, world_size, fragments):
    message = error_message(SMALL_MODEL_FLAGS + " " + line, world_size)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    "split", ["1", "9,1", "949/50/1", " 8, 1 ,1", "0.5,.5", "1e2,1", "", ",", "1,-1,1", "a", "inf"]
)
def test_split_validation_matches_split_documents(split):
    try:
        split_documents(10, split)
        is_valid = True
    except DataError:
        is_valid = False
    assert is_valid != bool(list(DataConfig(split=split).problems()))


def test_missing_token_files_raise_except_in_dry_run(tmp_path):
    prefix = tmp_path / "corpus"
    message = error_message(f"--data-path {prefix}")
    assert f"--data-path {prefix}, but cannot read {prefix}.idx and {prefix}.bin" in message
    parse_line(f"--data-path {prefix} --dry-run")
    (tmp_path / "corpus.idx").touch()
    assert f"cannot read {prefix}.bin" in error_message(f"--data-path {prefix}")
    (tmp_path / "corpus.bin").touch()
    parse_line(f"--data-path {prefix}")
    parse_line("--data-path none")


def test_all_problems_are_reported_together_and_numbered():
    message = error_message("stray --hiden-size 4 --lr 0 --batch-size x --model-parallel-size 3 --mask-prob 1", 4)
    assert message.startswith("9 problems in the configuration:\n  1. ")
    for fragment in ("--hiden-size", "--lr", "--batch-size", "--mask-prob", "'stray'", "world_size=4", "4 and 3"):
        assert fragment in message


def test_fewer_hidden_units_than_heads_raise():
    assert error_message("--hidden-size 2").startswith(
        "--hidden-size must be a multiple of --num-attention-heads, got 2 and 4"
    )


@pytest.mark.parametrize("line", ["--num-layers 0", "--num-layers 1", "--batch-size 1 --gas 1 --seq-length 1"])
def test_smallest_sizes_are_accepted(line):
    parse_line(line)


def test_zero_training_steps_are_noted():
    config = parse_line("--train-iters 0")
    assert config.optimizer.lr_decay_iters == 1
    assert any("no training step" in note for note in config.notes)


def test_fewer_micro_batches_than_stages_warn_about_bubble():
    config = parse_line(SMALL_MODEL_FLAGS + " --pipe-parallel-size 4 --gas 1", 4)
    assert any("idle 75% of the time" in note for note in config.notes)
    assert not any(
        "idle" in note for note in parse_line(SMALL_MODEL_FLAGS + " --pipe-parallel-size 4 --gas 4", 4).notes
    )


def test_global_batch_derives_accumulation_or_must_match():
    assert parse_line("--global-batch-size 24 --batch-size 3", 2).batch.gas == 4
    assert "24 != micro 3 x gas 5 x dp 2 = 30" in error_message("--global-batch-size 24 --batch-size 3 --gas 5", 2)
    assert "multiple of micro x dp, got 25" in error_message("--global-batch-size 25 --batch-size 3", 2)


def test_device_problems_raise_once_device_is_known():
    assert "fp16 needs a GPU" in error_message("--fp16", has_gpu=False)
    assert "--device cuda needs a CUDA device" in error_message("--device cuda", has_gpu=False)
    config = parse_line("--fp16")
    check_device(config, has_gpu=True)
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        check_device(config, has_gpu=False)
    with pytest.raises(ConfigError, match="needs a GPU with bf16"):
        check_device(parse_line("--bf16"), has_gpu=True, has_bf16=False)


def test_dtype_is_flag_or_device_default():
    assert resolve_dtype(parse_line("--fp64"), "bf16").precision.dtype == "fp64"
    assert resolve_dtype(parse_line(""), "bf16").precision.dtype == "bf16"


@pytest.mark.parametrize(
    ("json_text", "device_dtype", "expected"),
    [
        ('{"bf16": {"enabled": false}}', "bf16", "fp16"),
        ('{"bf16": {"enabled": false}, "fp16": {"enabled": false}}', "bf16", "fp32"),
        ('{"bf16": {"enabled": false}, "fp16": {"enabled": false}}', "fp32", "fp32"),
        ('{"fp16": {"enabled": false}}', "fp16", "fp32"),
        ('{"fp16": {"enabled": false}}', "bf16", "bf16"),
        ('{"bf16": {"enabled": "auto"}}', "bf16", "bf16"),
    ],
)
def test_dtype_excluded_by_json_is_not_selected(tmp_path, json_text, device_dtype, expected):
    (tmp_path / "ds.json").write_text(json_text)
    config = resolve_dtype(parse_line(f"--deepspeed_config {tmp_path}/ds.json"), device_dtype)
    assert config.precision.dtype == expected
    is_noted = any(
        f"number format: {expected}" in note and f"{device_dtype}.enabled false" in note for note in config.notes
    )
    assert is_noted == (expected != device_dtype)
    assert not hasattr(config.namespace(), "excluded")


def test_with_vocab_sets_and_checks_vocab_size():
    assert parse_line("").with_vocab(100).model.vocab_size == 100
    assert parse_line("--vocab-size 128").with_vocab(100).model.vocab_size == 128
    with pytest.raises(ConfigError, match="--vocab-size 64 and 100 tokens"):
        parse_line("--vocab-size 64").with_vocab(100)
    config = parse_line("--make-vocab-size-divisible-by 8").with_vocab(100)
    assert [config.model.padded_vocab_size(tensor_size) for tensor_size in (1, 2, 4)] == [104, 112, 128]


@pytest.mark.parametrize("family", FAMILIES)
def test_help_shows_common_flags_one_per_line(family, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text, full_text = help_text(family=family), help_text(family=family, show_all=True)
    shown_lines = re.findall(r"^  (--.*)", text, re.M)
    assert 25 <= len(shown_lines) <= 42, "about thirty, and --model of decoders"
    assert all(re.match(r"--\S.*  \S", line) for line in shown_lines), "a flag and what it is for, in one line"
    assert not re.search(r"^ {30}", text, re.M), "nothing goes on in a second line"
    assert text.rstrip().endswith("accepted.") and "--help-all lists every flag" in text
    flags = {flag for line in shown_lines for flag in re.findall(r"--[\w-]+", line.split("  ")[0])} - {"--help-all"}
    assert flags < set(re.findall(r"--[\w-]+", full_text))
    assert {"--num-layers", "--lr", "--data-path", "--save", "--model-parallel-size", "--dry-run"} <= flags


def test_help_lists_all_flags_without_heavy_imports():
    program = (
        "import sys\nfrom megatron.config import parse\nimport megatron.costs.cost, megatron.mpu.topology\n"
        "heavy = {'torch', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "try:\n    parse(['--lr', '0', '--model-parallel-size', '3'], world_size=2, env={})\n"
        "except ValueError as error:\n    sys.stderr.write(f'{error}|{sorted(heavy)}')\n"
        "parse(['--help-all'], world_size=1)\n"
    )
    result = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0
    assert "--lr must be" in result.stderr and "must not exceed the world size" in result.stderr
    assert result.stderr.endswith("|[]")
    for word in ("--num-layers", "--tensor-model-parallel-size", "--openai-gelu", "--deepspeed_config", "parallel:"):
        assert word in result.stdout
