"""Megatron's programs have its defaults, and lines at the start name what differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import BERT, GPT
from megatron.config import Config

T5_SCRIPT = "--encoder-seq-length 32 --decoder-seq-length 16 --max-position-embeddings 32"


def parse_line(line: str, family: str = "gpt2", defaults: Mapping[str, Any] | None = None) -> Config:
    return parse(line.split(), world_size=1, env={}, family=family, defaults=defaults)


@pytest.mark.parametrize(
    ("line", "family", "defaults", "average"),
    [
        ("", "gpt2", GPT, "micro-batch"),
        ("", "bert", BERT, "micro-batch"),
        (T5_SCRIPT, "t5", None, "micro-batch"),
        ("--calculate-per-token-loss", "gpt2", GPT, "token"),
        (f"{T5_SCRIPT} --calculate-per-token-loss", "t5", None, "token"),
        ("--loss-average token", "bert", BERT, "token"),
        ("", "gpt2", None, "token"),
        ("", "t5", None, "token"),
        ("--calculate-per-token-loss", "gpt2", None, "token"),
    ],
)
def test_megatron_programs_average_loss_per_micro_batch_with_note(
    line: str, family: str, defaults: Mapping[str, Any] | None, average: str
) -> None:
    config = parse_line(line, family, defaults)
    assert config.model.loss_average == average
    assert any("--loss-average micro-batch, as Megatron-LM" in note for note in config.notes) == (average != "token")


def test_pretrain_gpt_uses_megatron_sgd_and_muon_defaults() -> None:
    megatron, native = parse_line("", defaults=GPT).optimizer, parse_line("").optimizer
    names = ("sgd_momentum", "muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_num_ns_steps")
    assert [getattr(megatron, name) for name in names] == [0.9, 0.9, False, "spectral", 5]
    assert [getattr(native, name) for name in names] == [0.0, 0.95, True, "match_rms_adamw", 5]


@pytest.mark.parametrize(
    ("line", "defaults", "is_noted"),
    [
        ("--vocab-size 50257", GPT, True),
        ("--vocab-size 50304", GPT, False),
        ("", GPT, True),
        ("--vocab-size 50257", None, False),
    ],
)
def test_padded_vocabulary_rows_are_noted(line: str, defaults: Mapping[str, Any] | None, is_noted: bool) -> None:
    config = parse_line(line, defaults=defaults)
    assert any("are excluded from the softmax" in note for note in config.notes) == is_noted


@pytest.mark.parametrize(
    ("decay", "is_noted"), [("--lr-decay-iters 50", True), ("--lr-decay-iters 100", False), ("", False)]
)
def test_inverse_square_root_beyond_decay_is_noted(decay: str, is_noted: bool) -> None:
    config = parse_line(f"--lr-decay-style inverse-square-root --train-iters 100 {decay}")
    assert any("continues to decay after --lr-decay-iters 50" in note for note in config.notes) == is_noted
