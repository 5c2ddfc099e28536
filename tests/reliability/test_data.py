"""Rows D that no other test holds alone: a longer run, a giant document, an id below 0."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetBuilder
from megatron.errors import DataError
from tests.data.test_build import build, single_corpus
from tests.helpers.preprocess_job import END_OF_TEXT, Corpus, json_lines
from tests.helpers.token_data import write_documents, write_megatron_files
from tests.training.test_data_order import SEQ, make_config, make_run_data, read_steps


@pytest.mark.parametrize("num_iterations", [3, 900])
def test_first_samples_are_independent_of_run_length(num_iterations: int, tmp_path: Path) -> None:
    """Row D17."""
    write_documents(tmp_path / "a", [30 + idx % 7 for idx in range(20)])
    paths = {"a": str(tmp_path / "a")}
    default_config = make_config(paths, 1, 4, blend="{a}")
    other_config = make_config(paths, 1, 4, blend="{a}", extra=f"--train-iters {num_iterations}")
    assert (default_config.batch.train_iters, other_config.batch.train_iters) == (9, num_iterations)
    default_data, other_data = make_run_data(default_config), make_run_data(other_config)
    assert default_data.fingerprint == other_data.fingerprint
    for expected, actual in zip(
        read_steps(default_config, 1, default_data, num_steps=3),
        read_steps(other_config, 1, other_data, num_steps=3),
        strict=True,
    ):
        assert np.array_equal(expected, actual)


def _preprocess_with_memory_limit(corpus: Corpus, extra_bytes: int) -> int:
    """Preprocess in a process that may take ``extra_bytes`` beyond what it has; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        used_kb = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
        resource.setrlimit(resource.RLIMIT_DATA, (int(used_kb) * 1024 + extra_bytes,) * 2)
        corpus.preprocess(num_workers=1)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("megabytes", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_giant_document_needs_bounded_memory_and_yields_all_samples(megabytes: int, tmp_path: Path) -> None:
    """Row D07: one line; the memory may be a few times the text, and the samples are as many as its tokens give."""
    text = "document second line " * (megabytes * 50_000)
    corpus = Corpus(tmp_path)
    corpus.write(json_lines("first", text, "last"))
    assert _preprocess_with_memory_limit(corpus, (300 + 16 * megabytes) << 20) == 0
    file = IndexedDataset(corpus.prefix)
    assert file.num_documents == 3
    if megabytes < 10:
        assert corpus.read_texts()[1] == text + END_OF_TEXT
    options = {"split": "1", "needed": (True, False, False), "tokenizer_identity": "", "vocab_size": 300}
    samples = single_corpus(build(corpus.prefix, seq_length=SEQ, **options)[0])
    assert samples.samples_per_epoch == (file.num_tokens - 1) // SEQ


def test_negative_token_id_is_reported_with_position(tmp_path: Path) -> None:
    """Row D12: in files that others wrote, which have no sidecar."""
    with IndexedDatasetBuilder(tmp_path / "a", vocab_size=100_000, tokenizer="t", eod_id=None) as writer:
        for start in range(0, 100, 10):
            writer.add(np.arange(start, start + 10))
    (tmp_path / "a.meta.json").unlink()
    tokens = np.fromfile(tmp_path / "a.bin", "<i4")
    tokens[57] = -3
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="0 ... 199 .* got -3 in document 5 at token 7"):
        build(tmp_path / "a")


def test_bin_of_other_dataset_is_rejected(tmp_path: Path) -> None:
    """Row D10: the .bin of other data, which is longer, under an index and a sidecar that fit each other."""
    write_documents(tmp_path / "a", [10] * 10)
    write_documents(tmp_path / "b", [10] * 11)
    (tmp_path / "b.bin").rename(tmp_path / "a.bin")
    with pytest.raises(DataError, match="must have 200 bytes .* has 220"):
        IndexedDataset(tmp_path / "a")
    write_megatron_files(tmp_path / "c", [10] * 10, list(range(11)))
    (tmp_path / "c.idx").rename(tmp_path / "b.idx")
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "b")
