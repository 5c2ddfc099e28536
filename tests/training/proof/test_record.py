"""The hashes of proof.json depend on each sample that they cover, and on each id of the probe text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron.data.mock_dataset import MockTokens
from megatron.training.proof.record import NUM_SAMPLES, PROBE_TEXT, data_proof, sample_indices, tokenizer_proof


class Changed:
    """``MockTokens`` whose sample ``index`` is replaced by ``replace(sample)``."""

    def __init__(self, index: int, replace: Callable[[Any], Any]) -> None:
        self.tokens, self.index, self.replace = MockTokens(50, 8), index, replace

    def __getitem__(self, index: int) -> Any:
        sample = self.tokens[index]
        return self.replace(sample) if index == self.index else sample


def test_indices_cover_first_and_last_sample() -> None:
    assert sample_indices(1) == [0]
    assert sample_indices(5) == [0, 1, 2, 3, 4]
    for count in (16, 100, 12345):
        indices = sample_indices(count)
        assert indices[:3] == [0, 1, 2] and indices[-1] == count - 1 and len(indices) <= NUM_SAMPLES
        assert any(count // 3 < index < 2 * count // 3 for index in indices)


def test_hash_depends_on_every_covered_sample_but_not_on_the_integer_type() -> None:
    def digest(index: int, replace: Callable[[Any], Any]) -> str:
        return str(data_proof(Changed(index, replace), 100)["samples_sha256"])

    expected = data_proof(MockTokens(50, 8), 100)["samples_sha256"]
    for index in sample_indices(100):
        assert digest(index, lambda sample: sample[::-1].copy()) != expected
        assert digest(index, lambda sample: sample.astype(np.int32)) == expected
    assert digest(0, lambda sample: torch.from_numpy(sample)) == expected
    assert data_proof(MockTokens(50, 8), 101)["samples_sha256"] != expected


def test_samples_of_several_fields_are_hashed_and_others_are_named() -> None:
    def samples(names: Sequence[str], value: Any = 1) -> list[dict[str, Any]]:
        return [{name: np.array([idx, value]) for name in names} for idx in range(3)]

    first = data_proof(samples(["inputs", "targets"]), 3)
    assert data_proof(samples(["targets", "inputs"]), 3) == first
    assert data_proof(samples(["inputs", "targets"], 2), 3) != first
    assert data_proof([object()] * 3, 3)["problem"].startswith("TypeError: a sample must consist of arrays")
    assert data_proof(None, 3) == {"problem": "no training data"}


def test_probe_depends_on_each_id_and_problems_are_named() -> None:
    def make_tokenizer(encode: Callable[[str], list[int]]) -> Any:
        return SimpleNamespace(encode=encode, identity="letters")

    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def without_last(text: str) -> list[int]:
        return [*letters(text)[:-1], 0]

    expected = tokenizer_proof(make_tokenizer(letters))
    assert expected["num_ids"] == len(PROBE_TEXT) and expected["identity"] == "letters"
    assert tokenizer_proof(make_tokenizer(without_last))["probe_sha256"] != expected["probe_sha256"]
    failing = tokenizer_proof(make_tokenizer(lambda text: [][0]))
    assert failing == {"identity": "letters", "problem": "IndexError: list index out of range"}
    assert tokenizer_proof(None) == {"problem": "no tokenizer"}
