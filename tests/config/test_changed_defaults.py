"""A run that is continued or repeated keeps the settings with which it was started, also when their default changed."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config, changed_defaults
from megatron.config.changed_defaults import ChangedDefault
from tests.helpers.huggingface_models import config_of, save_model

STYLE = ChangedDefault("optimizer", "lr_wsd_decay_style", "cosine")


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_defaults, "CHANGED_DEFAULTS", (STYLE,))


def saved_run(folder: Path, *, style: str | None) -> Path:
    """Write a checkpoint whose configuration has ``style`` as its entry, or no entry if it is None."""
    checkpoint = save_model(
        folder, config_of("gpt2", num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=512)
    )
    manifest = checkpoint / "manifest.json"
    first, rest = manifest.read_bytes().split(b"\n", 1)
    content = json.loads(first + rest)
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


def parsed(line: str) -> Config:
    return parse([*line.split(), "--dry-run"], world_size=1, env={}, checkpoint_args=partial(bring, name="x"))


@pytest.mark.parametrize(("saved", "kept"), [(None, "cosine"), ("minus_sqrt", "minus_sqrt"), ("linear", "linear")])
def test_a_continued_run_keeps_its_setting(saved: str | None, kept: str, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", style=saved)
    config = parsed(f"--load {run} --lr-decay-style wsd")
    assert config.optimizer.lr_wsd_decay_style == kept
    notes = [note for note in config.notes if f"lr-wsd-decay-style {kept} (a new run: linear)" in note]
    assert len(notes) == (kept != "linear")


def test_a_given_value_and_a_new_run_from_its_weights_do_not_keep_it(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", style=None)
    line = f"--load {run} --lr-decay-style wsd"
    assert parsed(f"{line} --lr-wsd-decay-style exponential").optimizer.lr_wsd_decay_style == "exponential"
    for flag in ("--finetune", "--load-weights-only"):
        assert parsed(f"{line} {flag}").optimizer.lr_wsd_decay_style == "linear"


def test_a_run_repeated_from_its_config_keeps_the_former_default(tmp_path: Path) -> None:
    config = parsed("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 64 --lr-decay-style wsd")
    saved = config.to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(saved))
    assert parsed(f"--config {file}").optimizer.lr_wsd_decay_style == "linear"
    del saved["optimizer"]["lr_wsd_decay_style"]
    file.write_text(json.dumps(saved))
    repeated = parsed(f"--config {file}")
    assert repeated.optimizer.lr_wsd_decay_style == "cosine"
    assert any("lr-wsd-decay-style cosine (a new run: linear)" in note for note in repeated.notes)
