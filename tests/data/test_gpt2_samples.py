from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import GPTDataset
from megatron.data.fim import Fim
from megatron.data.permutation import Permutation
from megatron.errors import DataError
from tests.helpers.token_data import write_documents, write_megatron_files


def reference_sample(documents: list[list[int]], seq_length: int, seed: int, index: int) -> list[int]:
    """The order of the samples, written out."""
    num_samples = (sum(map(len, documents)) - 1) // seq_length
    epoch, sample_idx = index // num_samples, index % num_samples
    order = Permutation(len(documents), "documents", seed, epoch)
    text = [token for position in range(len(documents)) for token in documents[order(position)]]
    start = Permutation(num_samples, "samples", seed, epoch)(sample_idx) * seq_length
    return text[start : start + seq_length + 1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_samples_equal_reference(data: st.DataObject, seq_length: int, seed: int) -> None:
    length = st.sampled_from([0, 1, 2, seq_length, seq_length + 1, 3 * seq_length])
    lengths = data.draw(st.lists(length, min_size=3, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        write_megatron_files(Path(folder) / "a", lengths, list(range(len(lengths) + 1)))
        _check_samples(Path(folder) / "a", lengths, seq_length, seed)


def _check_samples(prefix: Path, lengths: list[int], seq_length: int, seed: int) -> None:
    from megatron.data import IndexedDataset

    file = IndexedDataset(prefix)
    if sum(lengths[1:]) <= seq_length:
        with pytest.raises(DataError, match=f"needs {seq_length + 1}"):
            GPTDataset(file, documents=(1, len(lengths)), seq_length=seq_length, seed=seed)
        return
    samples = GPTDataset(file, documents=(1, len(lengths)), seq_length=seq_length, seed=seed)
    documents = [file.read(document).tolist() for document in range(1, len(lengths))]
    for index in [*range(2 * samples.samples_per_epoch + 1), 10**12]:
        assert samples[index].dtype == np.int64
        assert samples[index].tolist() == reference_sample(documents, seq_length, seed, index)


def test_epoch_contains_each_token_once_and_epochs_differ(tmp_path: Path) -> None:
    samples = GPTDataset(write_documents(tmp_path / "a", [7, 30, 1, 25]), documents=(0, 4), seq_length=4, seed=3)
    epochs = [[samples[epoch_idx * 15 + sample_idx].tolist() for sample_idx in range(15)] for epoch_idx in range(3)]
    for epoch in epochs:
        inputs = [token for sample in epoch for token in sample[:-1]]
        assert len(set(inputs)) == len(inputs) == 60
    assert epochs[0] != epochs[1] and sorted(map(tuple, epochs[0])) != sorted(map(tuple, epochs[1]))


def test_best_fit_samples_contain_intact_documents(tmp_path: Path) -> None:
    lengths = [5, 9, 2, 40, 4, 4, 7, 1, 6, 9]
    file = write_documents(tmp_path / "a", lengths)
    samples = GPTDataset(file, documents=(0, 10), seq_length=8, seed=3, packing="best-fit")
    sample_documents = []
    for index in range(samples.samples_per_epoch):
        sample = samples[index]
        assert isinstance(sample, dict)
        text, segments = sample["text"], sample["segments"]
        assert text.dtype == np.int64 and segments.dtype == np.int32 and len(text) == len(segments) == 9
        assert (text[segments < 0] == 0).all() and np.array_equal(np.sort(segments % 100), segments % 100)
        sample_documents += [text[segments == segment].tolist() for segment in range(segments.max() + 1)]
    documents = [file.read(document).tolist() for document, length in enumerate(lengths) if length > 1]
    expected = [text[start : start + 9] for text in documents for start in range(0, len(text) - 1, 8)]
    assert sorted(sample_documents) == sorted(expected) and samples.num_tokens == sum(lengths)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_fim_preserves_lengths_and_zero_rate_is_identity(tmp_path: Path, packing: str) -> None:
    settings = {"documents": (0, 30), "seq_length": 32, "seed": 3, "packing": packing}
    file = write_documents(tmp_path / "a", [*range(2, 32)], eod_id=0)
    fim = Fim(1.0, 0.5, prefix_id=60_001, middle_id=60_002, suffix_id=60_003, eod_id=0)
    plain = GPTDataset(file, **settings)  # type: ignore[arg-type]
    zero_rate = GPTDataset(file, fim=replace(fim, rate=0.0), **settings)  # type: ignore[arg-type]
    full_rate = GPTDataset(file, fim=fim, **settings)  # type: ignore[arg-type]
    num_differing = 0
    for index in range(2 * plain.samples_per_epoch):
        original, unchanged, rearranged = (
            text_and_segments(samples[index]) for samples in (plain, zero_rate, full_rate)
        )
        assert np.array_equal(original[0], unchanged[0]) and np.array_equal(original[1], unchanged[1])
        assert (
            len(rearranged[0]) == 33
            and np.array_equal(rearranged[0] == 0, original[0] == 0)
            and np.array_equal(original[1], rearranged[1])
        )
        slice_lengths = [document_slice.length for document_slice in full_rate._windows.slices(index)]
        assert np.array_equal(
            rearranged[0][: sum(slice_lengths)], fim.apply(original[0][: sum(slice_lengths)], slice_lengths, 3, index)
        )
        num_differing += not np.array_equal(original[0], rearranged[0])
    assert num_differing > plain.samples_per_epoch


def text_and_segments(sample: np.ndarray | dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return (sample, np.zeros(0)) if isinstance(sample, np.ndarray) else (sample["text"], sample["segments"])


def test_unknown_packing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="concat, best-fit, got 'first-fit'"):
        GPTDataset(write_documents(tmp_path / "a", [40]), documents=(0, 1), seq_length=4, seed=3, packing="first-fit")


def test_sample_starts_beyond_2_31_tokens_are_correct() -> None:
    """The fake file has document lengths but no tokens; a token is its position in the file."""

    class FakeFile:
        prefix, document_lengths = "fake", np.full(6, 2**30, np.int32)

        def read(self, document: int, offset: int, length: int) -> np.ndarray:
            return (document * 2**30 + offset + np.arange(length)).astype(np.int64)

    samples = GPTDataset(FakeFile(), documents=(0, 6), seq_length=1024, seed=1)  # type: ignore[arg-type]
    assert samples.samples_per_epoch == (6 * 2**30 - 1) // 1024
    starts = [int(samples[index][0]) for index in range(200)]
    assert max(starts) > 2**32 and all(start % 1024 == 0 for start in starts) and len(set(starts)) == 200


def test_failed_read_names_sample_document_and_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "a", [40])
    samples = GPTDataset(file, documents=(0, 1), seq_length=4, seed=3)
    packed = GPTDataset(file, documents=(0, 1), seq_length=4, seed=3, packing="best-fit")

    def fail(*args: int) -> np.ndarray:
        raise OSError("Input/output error")

    monkeypatch.setattr(file, "read", fail)
    with pytest.raises(DataError, match=r"sample 5 .* document 0, tokens \d+:\d+, byte \d+ of .*a.bin: OSError: Input"):
        samples[5]
    with pytest.raises(DataError, match=r"sample 7 .* document 0, tokens \d+:\d+, byte \d+ of .*a.bin: OSError: Input"):
        packed[7]


def test_fingerprint_changes_with_every_order_option(tmp_path: Path) -> None:
    file, other_file = write_documents(tmp_path / "a", [40, 40]), write_documents(tmp_path / "b", [40, 41])
    settings = {"documents": (0, 2), "seq_length": 4, "seed": 3}
    fims = [{"fim": Fim(0.5, 0.5, 1, 2, 3)}, {"fim": Fim(0.5, 0.5, 1, 3, 2)}]
    document_arrays = [{"documents": np.array(ids)} for ids in ([0], [1], [0, 1])]
    changes = [{"documents": (0, 1)}, {"seq_length": 5}, {"seed": 4}, {"packing": "best-fit"}, *fims, *document_arrays]
    fingerprints = {GPTDataset(file, **{**settings, **change}).fingerprint for change in changes}  # type: ignore[arg-type]
    fingerprints |= {GPTDataset(dataset_file, **settings).fingerprint for dataset_file in (file, other_file)}  # type: ignore[arg-type]
    assert len(fingerprints) == 11
    int64_fingerprint, int32_fingerprint = (
        GPTDataset(file, **{**settings, "documents": np.array([0, 1], dtype)}).fingerprint  # type: ignore[arg-type]
        for dtype in (np.int64, np.int32)
    )
    assert int64_fingerprint == int32_fingerprint


def test_order_and_fingerprint_are_stable(tmp_path: Path) -> None:
    """Written down before T5 shared the windows: a checkpoint of then must go on with the data of then."""
    file = write_documents(tmp_path / "a", [7, 30, 1, 25, 0, 18, 40], vocab_size=300)
    samples = GPTDataset(file, documents=(1, 6), seq_length=6, seed=1234)
    assert samples.samples_per_epoch == 18 and samples.fingerprint == FINGERPRINT
    assert [samples[index].tolist() for index in (0, 1, 17, 18, 40)] == EXPECTED
    assert Fim(0.5, 1, 1, 2, 3).key == "fim 0.5 1.0 1 2 3 None"
    fim_samples = GPTDataset(file, documents=(1, 6), seq_length=6, seed=1234, fim=Fim(0.5, 0.25, 1, 2, 3, 0))
    assert fim_samples.fingerprint == FIM_FINGERPRINT


FINGERPRINT = "b9edfd41da9b611a"
FIM_FINGERPRINT = "26dd447805c8a6ff"
EXPECTED = [
    [99, 100, 101, 102, 103, 104, 105],
    [52, 53, 54, 55, 56, 57, 58],
    [117, 118, 119, 120, 121, 64, 65],
    [45, 46, 47, 48, 49, 50, 51],
    [9, 10, 11, 12, 13, 14, 15],
]
