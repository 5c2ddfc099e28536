"""Runs that commit 8c23b9e6 started keep the settings whose defaults have changed since, and their losses.

``former_defaults`` has three runs of its ``pretrain_gpt.py`` after two steps: SGD, Muon, and a DeepSpeed JSON whose
optimizer section has a type only. ``losses.txt`` are the losses of the next two steps by that commit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import GPT
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT

SAVED_RUNS = Path(__file__).parent / "former_defaults"
MODEL_ARGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--vocab-size 61 --tokenizer-type NullTokenizer --data-path mock --device cpu --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 6 --exit-interval 4 --eval-iters 0 --log-interval 1 --fp32 --hidden-dropout 0 "
    "--attention-dropout 0 --progress plain --num-workers 0 --eod-mask-loss"
)
FLAGS = {
    "sgd": "--optimizer sgd --lr 1e-1",
    "muon": "--optimizer muon --lr 1e-2",
    "json": "--deepspeed_config {json}",
}
SAVED_SETTINGS = {
    "sgd": {"sgd_momentum": 0.0},
    "muon": {"muon_momentum": 0.95, "muon_nesterov": True, "muon_scale_mode": "match_rms_adamw"},
    "json": {"lr": 5e-4, "weight_decay": 0.01},
}
NEW_SETTINGS = {
    "sgd": {"sgd_momentum": 0.9},
    "muon": {"muon_momentum": 0.9, "muon_nesterov": False, "muon_scale_mode": "spectral"},
    "json": {"lr": 1e-3, "weight_decay": 0.01},
}


def make_command_line(name: str, folder: Path) -> str:
    (folder / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"eps": 1e-8}}}))
    return f"{MODEL_ARGS} {FLAGS[name].format(json=folder / 'ds.json')}"


def parse_config(command_line: str) -> Config:
    args = partial(load_checkpoint_args, name="x")
    return parse([*command_line.split(), "--dry-run"], world_size=1, env={}, defaults=GPT, checkpoint_args=args)


def read_settings(config: Config, names: dict[str, object]) -> dict[str, object]:
    return {name: getattr(config.optimizer, name) for name in names}


@pytest.mark.parametrize("name", FLAGS)
def test_resumed_run_preserves_former_defaults(name: str, tmp_path: Path) -> None:
    command_line = make_command_line(name, tmp_path)
    new_config, resumed_config = parse_config(command_line), parse_config(f"{command_line} --load {SAVED_RUNS / name}")
    assert (
        read_settings(new_config, NEW_SETTINGS[name]) == NEW_SETTINGS[name]
        and new_config.model.loss_average == "micro-batch"
    )
    assert (
        read_settings(resumed_config, SAVED_SETTINGS[name]) == SAVED_SETTINGS[name]
        and resumed_config.model.loss_average == "token"
    )
    (note,) = [note for note in resumed_config.notes if "that this run keeps" in note]
    assert "loss-average token (a new run: micro-batch)" in note
    changed_fields = [field for field, value in SAVED_SETTINGS[name].items() if NEW_SETTINGS[name][field] != value]
    assert all(f" {field.replace('_', '-')} " in note for field in changed_fields)
    other_fields = {field for saved_settings in SAVED_SETTINGS.values() for field in saved_settings} - set(
        changed_fields
    )
    assert not [field for field in other_fields if f" {field.replace('_', '-')} " in note], "one of another optimizer"
    assert not [note for note in new_config.notes if "that this run keeps" in note]


@pytest.mark.parametrize("name", FLAGS)
def test_repeated_run_preserves_former_defaults(name: str) -> None:
    config = parse_config(f"--config {SAVED_RUNS / name / 'config.json'}")
    assert read_settings(config, SAVED_SETTINGS[name]) == SAVED_SETTINGS[name] and config.model.loss_average == "token"
    assert [note for note in config.notes if "loss-average token (a new run: token)" in note] == []


def test_flags_and_json_keys_override_former_defaults(tmp_path: Path) -> None:
    command_line = f"{make_command_line('json', tmp_path)} --load {SAVED_RUNS / 'json'}"
    config = parse_config(f"{command_line} --lr 2e-4 --loss-average micro-batch")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 0.01)
    assert config.model.loss_average == "micro-batch"
    assert parse_config(f"{command_line} --calculate-per-token-loss").model.loss_average == "token"
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.3}}}))
    assert parse_config(command_line).optimizer.weight_decay == 0.3
    assert parse_config(f"{command_line} --finetune").model.loss_average == "micro-batch"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_resumed_run_reproduces_losses_of_former_commit(name: str, tmp_path: Path) -> None:
    shutil.copytree(SAVED_RUNS / name, tmp_path / "run")
    command_line = f"{make_command_line(name, tmp_path)} --load {tmp_path / 'run'} --save {tmp_path / 'run'}"
    process = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *command_line.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 75, process.stdout + process.stderr
    assert "loss-average token (a new run: micro-batch)" in process.stdout + process.stderr
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    expected = [float(text) for text in (SAVED_RUNS / name / "losses.txt").read_text().split()]
    assert [r["step"] for r in records] == [3, 4]
    assert [r["loss"] for r in records] == pytest.approx(expected, rel=2e-6)
