"""Megatron's programs have its defaults, and lines at the start name what differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import BERT, GPT
from megatron.config import Config

T5_SCRIPT = "--encoder-seq-length 32 --decoder-seq-length 16 --max-position-embeddings 32"


def parsed(line: str, family: str = "gpt2", defaults: Mapping[str, Any] | None = None) -> Config:
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
def test_megatrons_scripts_get_megatrons_average_and_a_line(
    line: str, family: str, defaults: Mapping[str, Any] | None, average: str
) -> None:
    config = parsed(line, family, defaults)
    assert config.model.loss_average == average
    assert any("--loss-average micro-batch, as Megatron-LM" in note for note in config.notes) == (average != "token")


def test_sgd_and_muon_have_megatrons_defaults_in_pretrain_gpt_only() -> None:
    megatron, ours = parsed("", defaults=GPT).optimizer, parsed("").optimizer
    names = ("sgd_momentum", "muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_num_ns_steps")
    assert [getattr(megatron, name) for name in names] == [0.9, 0.9, False, "spectral", 5]
    assert [getattr(ours, name) for name in names] == [0.0, 0.95, True, "match_rms_adamw", 5]


@pytest.mark.parametrize(
    ("line", "defaults", "is_named"),
    [
        ("--vocab-size 50257", GPT, True),
        ("--vocab-size 50304", GPT, False),
        ("", GPT, True),
        ("--vocab-size 50257", None, False),
    ],
)
def test_padded_rows_of_the_vocabulary_are_named(line: str, defaults: Mapping[str, Any] | None, is_named: bool) -> None:
    config = parsed(line, defaults=defaults)
    assert any("are excluded from the softmax" in note for note in config.notes) == is_named


@pytest.mark.parametrize(
    ("decay", "is_named"), [("--lr-decay-iters 50", True), ("--lr-decay-iters 100", False), ("", False)]
)
def test_the_end_of_inverse_square_root_is_named(decay: str, is_named: bool) -> None:
    config = parsed(f"--lr-decay-style inverse-square-root --train-iters 100 {decay}")
    assert any("continues to decay after --lr-decay-iters 50" in note for note in config.notes) == is_named
