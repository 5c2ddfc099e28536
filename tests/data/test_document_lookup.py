"""Documents to samples: the inverse of each order of the samples, against a search through all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import GPTDataset
from megatron.data.blend_schedule import BlendSchedule, Corpus
from megatron.data.documents import Documents
from megatron.data.permutation import Permutation
from tests.helpers.token_data import write_documents

LENGTHS = [7, 30, 1, 25, 2, 9, 64, 3, 3, 16, 5, 12]


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_inverse_permutation_returns_index(size: int) -> None:
    permutation = Permutation(size, "key", 3)
    assert [permutation.inverse(permutation(index)) for index in range(size)] == list(range(size))


@pytest.mark.parametrize("documents", [(0, 12), (2, 11), np.array([0, 3, 4, 6, 9, 10])], ids=["all", "range", "hash"])
@pytest.mark.parametrize(
    "options",
    [{}, {"packing": "best-fit"}, {"megatron_samples": 100}, {"megatron_samples": 100, "has_extra_token": False}],
    ids=["concat", "best-fit", "megatron", "megatron without extra token"],
)
def test_samples_of_document_equal_search(options: dict[str, Any], documents: Documents, tmp_path: Path) -> None:
    if "megatron_samples" in options and not isinstance(documents, tuple):
        pytest.skip("Megatron's order has ranges of documents only")
    samples = GPTDataset(write_documents(tmp_path / "a", LENGTHS), documents=documents, seq_length=8, seed=3, **options)
    first, stop = 3, min(2 * samples.samples_per_epoch + 5, 100)
    sample_indices = range(first, stop)
    found = {document: samples.samples_of(document, first, stop) for document in range(len(LENGTHS))}
    expected = {
        document: [
            index
            for index in sample_indices
            if document in [document_slice.document for document_slice in samples.slices(index)]
        ]
        for document in range(len(LENGTHS))
    }
    assert found == expected and sum(map(len, found.values())) > 20


def test_blend_finds_run_sample_of_corpus_sample() -> None:
    corpora = [Corpus("a", "fa", 10), Corpus("b", "fb", 20), Corpus("c", "fc", 5)]
    order = BlendSchedule(corpora, [(0, (0.5, 0.3, 0.2)), (40, (0.1, 0.0, 0.9)), (60, (1.0, 1.0, 1.0))])
    for index in range(120):
        assert order.index_of(*order.locate(index)) == index
    assert BlendSchedule(corpora[:2], [(0, (1.0, 0.0))]).index_of(1, 0) is None
