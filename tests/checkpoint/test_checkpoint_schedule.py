"""--use-checkpoint-opt_param-scheduler: the learning rates of a resumed run are those of the checkpoint's schedule."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.translate import CHECKPOINT_SCHEDULE
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config
from tests.training.test_former_lengths import FLAGS, LINE, SAVED, rates, resumed

FLAG = CHECKPOINT_SCHEDULE[-1]
OTHER = "--lr 0.5 --min-lr 0.1 --lr-decay-style cosine --warmup 0.5 --weight-decay 0.7"


def read(line: str) -> Config:
    return parse(line.split(), world_size=1, env={}, checkpoint_args=partial(bring, name="x"))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("flag", CHECKPOINT_SCHEDULE)
def test_the_schedule_of_the_checkpoint_replaces_the_one_given_now(name: str, flag: str) -> None:
    saved, progress = resumed(name)
    config, _ = resumed(name, f"{OTHER} {flag}")
    assert rates(config, progress) == rates(saved, progress)
    assert config.optimizer.weight_decay == saved.optimizer.weight_decay
    assert set(OTHER.split()[::2]) <= {typed.split()[0] for typed in config.ignored}
    other, _ = resumed(name, OTHER)
    assert rates(other, progress) != rates(saved, progress)


@pytest.mark.parametrize("decay", ["--lr-decay-iters 7", "--lr-decay-samples 50", "--lr-decay-tokens 400"])
def test_a_length_given_now_is_replaced_in_any_unit(decay: str) -> None:
    saved, progress = resumed("steps")
    config, _ = resumed("steps", f"{decay} {FLAG}")
    assert rates(config, progress) == rates(saved, progress)
    assert decay.split()[0] in {typed.split()[0] for typed in config.ignored}


@pytest.mark.parametrize("flags", ["", "--load {nowhere} --load-if-exists", "--load {saved} --finetune"])
def test_it_has_no_effect_without_a_schedule_to_load(flags: str, tmp_path) -> None:
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    sizes = "" if "saved" in flags else sizes
    flags = flags.format(nowhere=tmp_path / "none", saved=SAVED / "steps")
    config = read(f"{LINE} {sizes} {FLAGS['steps']} {OTHER} {flags} {FLAG}")
    assert FLAG in config.ignored and config.optimizer.lr == 0.5


def test_it_replaces_the_schedule_of_the_json_too(tmp_path: Path) -> None:
    saved, progress = resumed("steps")
    decay = {"warmup_type": "linear", "warmup_max_lr": 0.4, "warmup_num_steps": 3, "total_num_steps": 9}
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.7}},
        "scheduler": {"type": "WarmupDecayLR", "params": decay},
    }
    for names in (["optimizer"], ["optimizer", "scheduler"]):
        json_file = tmp_path / "ds.json"
        json_file.write_text(json.dumps({name: sections[name] for name in names}))
        config, _ = resumed("steps", f"--deepspeed_config {json_file} {FLAG}")
        assert rates(config, progress) == rates(saved, progress)
        assert config.optimizer.weight_decay == saved.optimizer.weight_decay
        assert {"optimizer.params.weight_decay"} <= config.ignored.keys()
    assert "scheduler.params.warmup_max_lr" in config.ignored
