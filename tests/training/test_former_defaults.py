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
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT

RUNS = Path(__file__).parent / "former_defaults"
SIZES = (
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
KEPT = {
    "sgd": {"sgd_momentum": 0.0},
    "muon": {"muon_momentum": 0.95, "muon_nesterov": True, "muon_scale_mode": "match_rms_adamw"},
    "json": {"lr": 5e-4, "weight_decay": 0.01},
}
NEW = {
    "sgd": {"sgd_momentum": 0.9},
    "muon": {"muon_momentum": 0.9, "muon_nesterov": False, "muon_scale_mode": "spectral"},
    "json": {"lr": 1e-3, "weight_decay": 0.01},
}


def command(name: str, folder: Path) -> str:
    (folder / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"eps": 1e-8}}}))
    return f"{SIZES} {FLAGS[name].format(json=folder / 'ds.json')}"


def parsed(line: str) -> Config:
    args = partial(bring, name="x")
    return parse([*line.split(), "--dry-run"], world_size=1, env={}, defaults=GPT, checkpoint_args=args)


def settings(config: Config, names: dict[str, object]) -> dict[str, object]:
    return {name: getattr(config.optimizer, name) for name in names}


@pytest.mark.parametrize("name", FLAGS)
def test_a_resumed_run_keeps_what_a_new_run_has_otherwise(name: str, tmp_path: Path) -> None:
    line = command(name, tmp_path)
    new, resumed = parsed(line), parsed(f"{line} --load {RUNS / name}")
    assert settings(new, NEW[name]) == NEW[name] and new.model.loss_average == "micro-batch"
    assert settings(resumed, KEPT[name]) == KEPT[name] and resumed.model.loss_average == "token"
    (note,) = [note for note in resumed.notes if "that this run keeps" in note]
    assert "loss-average token (a new run: micro-batch)" in note
    changed = [field for field, value in KEPT[name].items() if NEW[name][field] != value]
    assert all(f" {field.replace('_', '-')} " in note for field in changed)
    others = {field for kept in KEPT.values() for field in kept} - set(changed)
    assert not [field for field in others if f" {field.replace('_', '-')} " in note], "one of another optimizer"
    assert not [note for note in new.notes if "that this run keeps" in note]


@pytest.mark.parametrize("name", FLAGS)
def test_a_repeated_run_keeps_it_too(name: str) -> None:
    config = parsed(f"--config {RUNS / name / 'config.json'}")
    assert settings(config, KEPT[name]) == KEPT[name] and config.model.loss_average == "token"
    assert [note for note in config.notes if "loss-average token (a new run: token)" in note] == []


def test_flags_and_keys_win_over_what_is_kept(tmp_path: Path) -> None:
    line = f"{command('json', tmp_path)} --load {RUNS / 'json'}"
    given = parsed(f"{line} --lr 2e-4 --loss-average micro-batch")
    assert (given.optimizer.lr, given.optimizer.weight_decay) == (2e-4, 0.01)
    assert given.model.loss_average == "micro-batch"
    assert parsed(f"{line} --calculate-per-token-loss").model.loss_average == "token"
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.3}}}))
    assert parsed(line).optimizer.weight_decay == 0.3
    assert parsed(f"{line} --finetune").model.loss_average == "micro-batch"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_a_resumed_run_has_the_losses_of_the_commit_that_started_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS / name, tmp_path / "run")
    line = f"{command(name, tmp_path)} --load {tmp_path / 'run'} --save {tmp_path / 'run'}"
    done = subprocess.run([sys.executable, "pretrain_gpt.py", *line.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "loss-average token (a new run: micro-batch)" in done.stdout + done.stderr
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    wanted = [float(text) for text in (RUNS / name / "losses.txt").read_text().split()]
    assert [r["step"] for r in records] == [3, 4]
    assert [r["loss"] for r in records] == pytest.approx(wanted, rel=2e-6)
