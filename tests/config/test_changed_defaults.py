"""A run that is continued or repeated keeps the settings with which it was started, also when their default changed."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config, changed_defaults
from megatron.config.changed_defaults import ChangedDefault
from tests.helpers.huggingface_models import make_family_config, save_model

CHANGED_STYLE = ChangedDefault("optimizer", "lr_wsd_decay_style", "cosine")


@pytest.fixture(autouse=True)
def _changed_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_defaults, "CHANGED_DEFAULTS", (CHANGED_STYLE,))


def write_saved_run(folder: Path, *, style: str | None) -> Path:
    """Write a checkpoint whose configuration has ``style`` as its entry, or no entry if it is None."""
    checkpoint = save_model(
        folder,
        make_family_config("gpt2", num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=512),
    )
    manifest = checkpoint / "manifest.json"
    crc_line, remainder = manifest.read_bytes().split(b"\n", 1)
    content = json.loads(crc_line + remainder)
    config = content["state"]["config"]
    if style is None:
        del config["optimizer"]["lr_wsd_decay_style"]
    else:
        config["optimizer"]["lr_wsd_decay_style"] = style
    del content["crc32"]
    head = {name: content.pop(name) for name in ("format_version", "sequence", "step")}
    body = (json.dumps(head)[1:-1] + ", " + json.dumps(content)[1:]).encode()
    manifest.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    return folder


def parse_line(line: str) -> Config:
    return parse(
        [*line.split(), "--dry-run"], world_size=1, env={}, checkpoint_args=partial(load_checkpoint_args, name="x")
    )


@pytest.mark.parametrize(
    ("saved_style", "expected"), [(None, "cosine"), ("minus_sqrt", "minus_sqrt"), ("linear", "linear")]
)
def test_resumed_run_retains_saved_setting(saved_style: str | None, expected: str, tmp_path: Path) -> None:
    run = write_saved_run(tmp_path / "run", style=saved_style)
    config = parse_line(f"--load {run} --lr-decay-style wsd")
    assert config.optimizer.lr_wsd_decay_style == expected
    notes = [note for note in config.notes if f"lr-wsd-decay-style {expected} (a new run: linear)" in note]
    assert len(notes) == (expected != "linear")


def test_explicit_value_and_new_run_use_new_default(tmp_path: Path) -> None:
    run = write_saved_run(tmp_path / "run", style=None)
    line = f"--load {run} --lr-decay-style wsd"
    assert parse_line(f"{line} --lr-wsd-decay-style exponential").optimizer.lr_wsd_decay_style == "exponential"
    for flag in ("--finetune", "--load-weights-only"):
        assert parse_line(f"{line} {flag}").optimizer.lr_wsd_decay_style == "linear"


def test_repeated_run_retains_former_default(tmp_path: Path) -> None:
    config = parse_line("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 64 --lr-decay-style wsd")
    saved = config.to_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(saved))
    assert parse_line(f"--config {path}").optimizer.lr_wsd_decay_style == "linear"
    del saved["optimizer"]["lr_wsd_decay_style"]
    path.write_text(json.dumps(saved))
    repeated = parse_line(f"--config {path}")
    assert repeated.optimizer.lr_wsd_decay_style == "cosine"
    assert any("lr-wsd-decay-style cosine (a new run: linear)" in note for note in repeated.notes)
