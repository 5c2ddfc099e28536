"""Rows D that no other test holds alone: a longer run, a giant document, an id below 0."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetBuilder
from megatron.errors import DataError
from tests.data.test_build import build, only
from tests.helpers.preprocess_job import END, Corpus, lines
from tests.helpers.token_data import write, write_megatron
from tests.training.test_data_order import SEQ, config_of, data_of, steps_of


@pytest.mark.parametrize("iterations", [3, 900])
def test_the_first_samples_do_not_depend_on_the_length_of_the_run(iterations: int, tmp_path: Path) -> None:
    """Row D17."""
    write(tmp_path / "a", [30 + i % 7 for i in range(20)])
    paths = {"a": str(tmp_path / "a")}
    usual = config_of(paths, 1, 4, mixed="{a}")
    other = config_of(paths, 1, 4, mixed="{a}", extra=f"--train-iters {iterations}")
    assert (usual.batch.train_iters, other.batch.train_iters) == (9, iterations)
    one, two = data_of(usual), data_of(other)
    assert one.fingerprint == two.fingerprint
    for wanted, got in zip(steps_of(usual, 1, one, steps=3), steps_of(other, 1, two, steps=3), strict=True):
        assert np.array_equal(wanted, got)


def _preprocess_in_little_memory(corpus: Corpus, more_bytes: int) -> int:
    """Preprocess in a process that may take ``more_bytes`` beyond what it has; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        used = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
        resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + more_bytes,) * 2)
        corpus.run(num_workers=1)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("megabytes", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_giant_document_passes_in_bounded_memory_and_gives_all_its_samples(megabytes: int, tmp_path: Path) -> None:
    """Row D07: one line; the memory may be a few times the text, and the samples are as many as its tokens give."""
    text = "document second line " * (megabytes * 50_000)
    corpus = Corpus(tmp_path)
    corpus.write(lines("first", text, "last"))
    assert _preprocess_in_little_memory(corpus, (300 + 16 * megabytes) << 20) == 0
    file = IndexedDataset(corpus.prefix)
    assert file.num_documents == 3
    if megabytes < 10:
        assert corpus.texts()[1] == text + END
    changed = {"split": "1", "needed": (True, False, False), "tokenizer_identity": "", "vocab_size": 300}
    samples = only(build(corpus.prefix, seq_length=SEQ, **changed)[0])
    assert samples.samples_per_epoch == (file.num_tokens - 1) // SEQ


def test_an_id_below_0_is_named_with_its_place(tmp_path: Path) -> None:
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


def test_a_pair_that_was_swapped_with_another_is_refused(tmp_path: Path) -> None:
    """Row D10: the .bin of other data, which is longer, under an index and a sidecar that fit each other."""
    write(tmp_path / "a", [10] * 10)
    write(tmp_path / "b", [10] * 11)
    (tmp_path / "b.bin").rename(tmp_path / "a.bin")
    with pytest.raises(DataError, match="must have 200 bytes .* has 220"):
        IndexedDataset(tmp_path / "a")
    write_megatron(tmp_path / "c", [10] * 10, list(range(11)))
    (tmp_path / "c.idx").rename(tmp_path / "b.idx")
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "b")
