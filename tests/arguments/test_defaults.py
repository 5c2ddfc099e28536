"""MEGATRON_DEFAULTS: weaker than the command line and the JSON, stronger than our own defaults."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron.arguments import parse
from megatron.config import Config
from megatron.errors import ConfigError

RECIPE = "--batch-size 8 --gas 4 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --tokenizer-path 'a b.json'"


def parse_line(line: str = "", recipe: str = RECIPE, content: object = None, world_size: int = 1, **kwargs) -> Config:
    recipe = recipe.replace("--tokenizer-path 'a b.json'", kwargs.pop("tokenizer", ""))
    env = {"MEGATRON_DEFAULTS": recipe} | kwargs.pop("env", {})
    return parse(line.split(), world_size=world_size, env=env, **kwargs)


def error_message(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(*args, **kwargs)
    return str(exc_info.value)


def test_command_line_overrides_defaults():
    assert (parse_line().batch.batch_size, parse_line().optimizer.lr) == (8, 3e-3)
    config = parse_line("--lr 1e-2 --batch-size 2")
    assert (config.optimizer.lr, config.batch.batch_size, config.batch.gas) == (1e-2, 2, 4)
    assert config.explicit_fields == ("lr", "batch_size")
    assert config.repeated == () and config.notes == ()


def test_json_overrides_defaults(tmp_path):
    path = tmp_path / "ds.json"
    batch_sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "train_batch_size": 15}
    path.write_text(json.dumps(batch_sizes | {"optimizer": {"params": {"lr": 0.1}}, "bf16": {"enabled": False}}))
    for line, recipe in ((f"--deepspeed_config {path}", RECIPE), ("", f"{RECIPE} --deepspeed_config {path} --bf16")):
        config = parse_line(line, recipe)
        assert (config.batch.batch_size, config.batch.gas, config.optimizer.lr) == (3, 5, 0.1)
        assert config.precision.dtype is None


def test_environment_overrides_program_defaults():
    config = parse_line(defaults={"lr": 0.5, "seed": 7})
    assert (config.optimizer.lr, config.run.seed) == (3e-3, 7)


def test_default_batch_sizes_follow_global_batch():
    assert parse_line("--global-batch-size 64").batch.gas == 8
    config = parse_line("--global-batch-size 12", world_size=2)
    assert (config.batch.batch_size, config.batch.gas) == (6, 1)
    assert parse_line("--global-batch-size 6 --gas 3").batch.batch_size == 2
    assert parse_line("--gas 2", f"{RECIPE} --global-batch-size 64").batch.global_batch_size(1) == 16


def test_default_min_lr_above_lr_is_reset_with_note():
    config = parse_line("--lr 1e-4")
    assert config.optimizer.min_lr == 0
    assert any("--min-lr 0.0003 is above --lr 0.0001" in note for note in config.notes)
    assert parse_line("--lr-decay-style constant").notes == ()


PROMPTS = "--sample-prompts 'Once upon' 'a time'"


@pytest.mark.parametrize("flags", ["--sequence-parallel --model-parallel-size 2", "--context-parallel-size 2"])
@pytest.mark.parametrize("is_on_command_line", [False, True])
def test_unusable_default_prompts_are_dropped_with_note(flags, is_on_command_line):
    config = parse_line(*((flags, PROMPTS) if is_on_command_line else ("", f"{PROMPTS} {flags}")), world_size=2)
    assert config.logging.sample_prompts is None
    assert [note for note in config.notes if "--sample-prompts" in note and "tools/generate.py" in note]
    config = parse_line("", PROMPTS)
    assert config.logging.sample_prompts == "'Once upon' 'a time'" and config.notes == ()


@pytest.mark.parametrize("line", ["--model-parallel-size 2", "--zero-stage 1", "--optimizer adamw", "--optimizer sgd"])
def test_incompatible_default_optimizer_is_replaced_with_lr(line):
    config = parse_line(line, "--optimizer adafactor --lr 3e-2", world_size=2)
    assert config.optimizer.optimizer == ("sgd" if "sgd" in line else "adamw") and config.optimizer.lr < 1e-2
    assert [note for note in config.notes if "default --optimizer adafactor" in note]
    config = parse_line("--lr 1e-2", "--optimizer adafactor --lr 3e-2")
    assert (config.optimizer.optimizer, config.optimizer.lr, config.notes) == ("adafactor", 1e-2, ())


def test_dec_seq_length_resets_default_span_settings():
    recipe = "--enc-seq-length 128 --noise-density 0.5 --mean-span-length 16"
    assert parse_line("", recipe, family="t5").family_config.dec_seq_length > 64
    t5_config = parse_line("--dec-seq-length 64", recipe, family="t5").family_config
    assert (t5_config.dec_seq_length, t5_config.noise_density, t5_config.mean_span_length) == (64, 0.15, 3)
    assert "--dec-seq-length must be at least" in error_message(
        "--dec-seq-length 64 --noise-density 0.5", "", family="t5"
    )


def test_vocab_file_replaces_default_tokenizer(tmp_path):
    (tmp_path / "v.json").write_text("{}")
    tokenizer = f"--tokenizer-path {tmp_path}/v.json"
    assert parse_line(tokenizer=tokenizer).data.tokenizer_path
    assert parse_line(f"--vocab-file {tmp_path}/v.json", tokenizer=tokenizer).data.tokenizer_path is None


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("--lrr 1", "MEGATRON_DEFAULTS: unknown flag --lrr"),
        ("--lr x", "MEGATRON_DEFAULTS: --lr must be a finite number"),
        ("--lr '1", "MEGATRON_DEFAULTS must be flags in shell syntax"),
        ("--mask-prob 1", "MEGATRON_DEFAULTS: --mask-prob is not supported"),
    ],
)
def test_invalid_default_error_names_variable(recipe, message):
    assert message in error_message("", recipe)


def test_defaults_use_shell_syntax_and_accept_extra_flags():
    def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine")
        return parser

    config = parse_line("", "--save 'a b' --mine 1", extra_args_provider=add_flags)
    assert (config.checkpoint.save, config.extra) == ("a b", {"mine": "1"})
    assert parse_line("--mine 2", "--mine 1", extra_args_provider=add_flags).extra == {"mine": "2"}


def test_errors_name_run_script_variables():
    env = {"MEGATRON_VARIABLES": "--batch-size=BATCHSIZE --gas=GAS --deepspeed_config=config_json"}
    message = error_message("--batch-size 0", "", env=env)
    assert message.endswith("got 0 (in the run script: --batch-size is BATCHSIZE)")
    assert message.count("is BATCHSIZE") == 1
    assert "--deepspeed_config is config_json" in error_message("--deepspeed_config /none.json", "", env=env)
    assert "run script" not in error_message("--lr 0", "", env=env)
