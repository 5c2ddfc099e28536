"""MEGATRON_DEFAULTS: weaker than the command line and the JSON, stronger than our own defaults."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron.arguments import parse
from megatron.config import Config
from megatron.errors import ConfigError

RECIPE = "--batch-size 8 --gas 4 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --tokenizer-path 'a b.json'"


def read(line: str = "", recipe: str = RECIPE, content: object = None, world_size: int = 1, **others) -> Config:
    recipe = recipe.replace("--tokenizer-path 'a b.json'", others.pop("tokenizer", ""))
    env = {"MEGATRON_DEFAULTS": recipe} | others.pop("env", {})
    return parse(line.split(), world_size=world_size, env=env, **others)


def error_of(*args, **others) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*args, **others)
    return str(caught.value)


def test_a_default_holds_and_the_command_line_is_stronger():
    assert (read().batch.batch_size, read().optimizer.lr) == (8, 3e-3)
    config = read("--lr 1e-2 --batch-size 2")
    assert (config.optimizer.lr, config.batch.batch_size, config.batch.gas) == (1e-2, 2, 4)
    assert config.given == ("lr", "batch_size")
    assert config.repeated == () and config.notes == ()


def test_the_json_is_stronger_than_a_default(tmp_path):
    path = tmp_path / "ds.json"
    numbers = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "train_batch_size": 15}
    path.write_text(json.dumps(numbers | {"optimizer": {"params": {"lr": 0.1}}, "bf16": {"enabled": False}}))
    for line, recipe in ((f"--deepspeed_config {path}", RECIPE), ("", f"{RECIPE} --deepspeed_config {path} --bf16")):
        config = read(line, recipe)
        assert (config.batch.batch_size, config.batch.gas, config.optimizer.lr) == (3, 5, 0.1)
        assert config.precision.dtype is None


def test_a_default_of_the_environment_is_stronger_than_one_of_the_script():
    config = read(defaults={"lr": 0.5, "seed": 7})
    assert (config.optimizer.lr, config.run.seed) == (3e-3, 7)


def test_sizes_that_are_defaults_follow_a_global_batch():
    assert read("--global-batch-size 64").batch.gas == 8
    config = read("--global-batch-size 12", world_size=2)
    assert (config.batch.batch_size, config.batch.gas) == (6, 1)
    assert read("--global-batch-size 6 --gas 3").batch.batch_size == 2
    assert read("--gas 2", f"{RECIPE} --global-batch-size 64").batch.global_batch_size(1) == 16


def test_a_floor_of_the_learning_rate_above_a_given_rate_steps_back_and_is_told():
    config = read("--lr 1e-4")
    assert config.optimizer.min_lr == 0
    assert any("--min-lr 0.0003 is above --lr 0.0001" in note for note in config.notes)
    assert read("--lr-decay-style constant").notes == ()


PROMPTS = "--sample-prompts 'Once upon' 'a time'"


@pytest.mark.parametrize("flags", ["--sequence-parallel --model-parallel-size 2", "--context-parallel-size 2"])
@pytest.mark.parametrize("is_given", [False, True])
def test_default_prompts_step_back_where_none_can_be_read_and_are_told(flags, is_given):
    config = read(*((flags, PROMPTS) if is_given else ("", f"{PROMPTS} {flags}")), world_size=2)
    assert config.seeing.sample_prompts is None
    assert [note for note in config.notes if "--sample-prompts" in note and "tools/generate.py" in note]
    config = read("", PROMPTS)
    assert config.seeing.sample_prompts == "'Once upon' 'a time'" and config.notes == ()


@pytest.mark.parametrize("line", ["--model-parallel-size 2", "--zero-stage 1", "--optimizer adamw", "--optimizer sgd"])
def test_an_optimizer_of_the_defaults_that_does_not_go_with_what_was_given_steps_back_with_its_rate(line):
    config = read(line, "--optimizer adafactor --lr 3e-2", world_size=2)
    assert config.optimizer.optimizer == ("sgd" if "sgd" in line else "adamw") and config.optimizer.lr < 1e-2
    assert [note for note in config.notes if "default --optimizer adafactor" in note]
    config = read("--lr 1e-2", "--optimizer adafactor --lr 3e-2")
    assert (config.optimizer.optimizer, config.optimizer.lr, config.notes) == ("adafactor", 1e-2, ())


def test_a_given_length_of_targets_is_not_too_short_for_spans_that_are_defaults():
    recipe = "--enc-seq-length 128 --noise-density 0.5 --mean-span-length 16"
    assert read("", recipe, family="t5").own.dec_seq_length > 64
    own = read("--dec-seq-length 64", recipe, family="t5").own
    assert (own.dec_seq_length, own.noise_density, own.mean_span_length) == (64, 0.15, 3)
    assert "--dec-seq-length must be at least" in error_of("--dec-seq-length 64 --noise-density 0.5", "", family="t5")


def test_a_given_vocabulary_replaces_the_default_tokenizer(tmp_path):
    (tmp_path / "v.json").write_text("{}")
    tokenizer = f"--tokenizer-path {tmp_path}/v.json"
    assert read(tokenizer=tokenizer).data.tokenizer_path
    assert read(f"--vocab-file {tmp_path}/v.json", tokenizer=tokenizer).data.tokenizer_path is None


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("--lrr 1", "MEGATRON_DEFAULTS: unknown flag --lrr"),
        ("--lr x", "MEGATRON_DEFAULTS: --lr must be a finite number"),
        ("--lr '1", "MEGATRON_DEFAULTS must be flags in shell syntax"),
        ("--mask-prob 1", "MEGATRON_DEFAULTS: --mask-prob is not supported"),
    ],
)
def test_a_bad_default_names_the_variable(recipe, message):
    assert message in error_of("", recipe)


def test_words_are_split_as_a_shell_does_and_flags_of_the_script_may_stand_there():
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine")
        return parser

    config = read("", "--save 'a b' --mine 1", extra_args_provider=add)
    assert (config.checkpoint.save, config.extra) == ("a b", {"mine": "1"})
    assert read("--mine 2", "--mine 1", extra_args_provider=add).extra == {"mine": "2"}


def test_messages_name_the_variables_of_the_run_script():
    env = {"MEGATRON_VARIABLES": "--batch-size=BATCHSIZE --gas=GAS --deepspeed_config=config_json"}
    message = error_of("--batch-size 0", "", env=env)
    assert message.endswith("got 0 (in the run script: --batch-size is BATCHSIZE)")
    assert message.count("is BATCHSIZE") == 1
    assert "--deepspeed_config is config_json" in error_of("--deepspeed_config /none.json", "", env=env)
    assert "run script" not in error_of("--lr 0", "", env=env)
