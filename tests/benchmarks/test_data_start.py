from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import data_start
from benchmarks.data_start import SEQ_LENGTH, _sample_starts, make_corpus
from megatron.data import IndexedDataset


def test_the_corpus_is_one_that_opens_and_the_other_way_cuts_it_right(tmp_path: Path) -> None:
    num_tokens = make_corpus(tmp_path / "a", 500)
    file = IndexedDataset(tmp_path / "a")
    assert file.num_tokens == num_tokens and file.sidecar is not None and file.sizes.min() >= 1
    documents = np.random.default_rng(0).permutation(500).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(file.sizes[documents], dtype=np.int64)])
    samples = _sample_starts(file.sizes, documents).astype(np.int64)
    assert len(samples) == (num_tokens - 1) // SEQ_LENGTH + 1
    assert np.array_equal(starts[samples[:, 0]] + samples[:, 1], np.arange(len(samples)) * SEQ_LENGTH)


def start(documents: str, ranks: int, workers: int, *only: str) -> dict[str, list[dict[str, float]]]:
    size = ["--documents", documents, "--ranks", str(ranks), "--workers", str(workers)]
    return data_start.main([*size, "--only", *only])


def test_the_benchmark_runs(capfd: pytest.CaptureFixture[str]) -> None:
    found = start("3000", 1, 1, "ours")
    assert [set(each) for each in found["ours"]] == [{"start_s", "cpu_s", "memory_bytes", "peak_bytes"}] * 2
    assert "ours, again" in capfd.readouterr().out


@pytest.mark.slow
def test_five_million_documents_start_in_a_fraction_of_what_a_copy_in_each_process_takes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twelve processes; today's 28 bytes a document in each would be 1.7 GB. A bound on memory, none on time."""
    found = start("5e6", 4, 2, "ours", "ours, pread", "one builder")
    for way in ("ours", "ours, pread"):
        assert max(each["peak_bytes"] for each in found[way]) < 700e6
