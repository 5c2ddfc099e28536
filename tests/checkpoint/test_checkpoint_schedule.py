"""--use-checkpoint-opt_param-scheduler: the learning rates of a resumed run are those of the checkpoint's schedule."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.translate import CHECKPOINT_SCHEDULE
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config
from tests.training.test_former_lengths import BASE_ARGS, FLAGS, SAVED_RUNS, remaining_rates, resume_config

FLAG = CHECKPOINT_SCHEDULE[-1]
OTHER_SCHEDULE = "--lr 0.5 --min-lr 0.1 --lr-decay-style cosine --warmup 0.5 --weight-decay 0.7"


def parse_line(line: str) -> Config:
    return parse(line.split(), world_size=1, env={}, checkpoint_args=partial(load_checkpoint_args, name="x"))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("flag", CHECKPOINT_SCHEDULE)
def test_checkpoint_schedule_replaces_given_schedule(name: str, flag: str) -> None:
    saved, progress = resume_config(name)
    config, _ = resume_config(name, f"{OTHER_SCHEDULE} {flag}")
    assert remaining_rates(config, progress) == remaining_rates(saved, progress)
    assert config.optimizer.weight_decay == saved.optimizer.weight_decay
    assert set(OTHER_SCHEDULE.split()[::2]) <= {typed.split()[0] for typed in config.ignored}
    other_config, _ = resume_config(name, OTHER_SCHEDULE)
    assert remaining_rates(other_config, progress) != remaining_rates(saved, progress)


@pytest.mark.parametrize("decay", ["--lr-decay-iters 7", "--lr-decay-samples 50", "--lr-decay-tokens 400"])
def test_given_decay_length_is_replaced_in_any_unit(decay: str) -> None:
    saved, progress = resume_config("steps")
    config, _ = resume_config("steps", f"{decay} {FLAG}")
    assert remaining_rates(config, progress) == remaining_rates(saved, progress)
    assert decay.split()[0] in {typed.split()[0] for typed in config.ignored}


@pytest.mark.parametrize("flags", ["", "--load {nowhere} --load-if-exists", "--load {saved} --finetune"])
def test_flag_has_no_effect_without_schedule_to_load(flags: str, tmp_path) -> None:
    model_flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    model_flags = "" if "saved" in flags else model_flags
    flags = flags.format(nowhere=tmp_path / "none", saved=SAVED_RUNS / "steps")
    config = parse_line(f"{BASE_ARGS} {model_flags} {FLAGS['steps']} {OTHER_SCHEDULE} {flags} {FLAG}")
    assert FLAG in config.ignored and config.optimizer.lr == 0.5


def test_checkpoint_schedule_replaces_deepspeed_json_schedule(tmp_path: Path) -> None:
    saved, progress = resume_config("steps")
    decay = {"warmup_type": "linear", "warmup_max_lr": 0.4, "warmup_num_steps": 3, "total_num_steps": 9}
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.7}},
        "scheduler": {"type": "WarmupDecayLR", "params": decay},
    }
    for names in (["optimizer"], ["optimizer", "scheduler"]):
        json_file = tmp_path / "ds.json"
        json_file.write_text(json.dumps({name: sections[name] for name in names}))
        config, _ = resume_config("steps", f"--deepspeed_config {json_file} {FLAG}")
        assert remaining_rates(config, progress) == remaining_rates(saved, progress)
        assert config.optimizer.weight_decay == saved.optimizer.weight_decay
        assert {"optimizer.params.weight_decay"} <= config.ignored.keys()
    assert "scheduler.params.warmup_max_lr" in config.ignored
