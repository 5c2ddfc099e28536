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
from tests.helpers.token_data import write, write_megatron


def reference(documents: list[list[int]], seq_length: int, seed: int, index: int) -> list[int]:
    """The order of the samples, written out."""
    num_samples = (sum(map(len, documents)) - 1) // seq_length
    epoch, place = index // num_samples, index % num_samples
    order = Permutation(len(documents), "documents", seed, epoch)
    text = [token for k in range(len(documents)) for token in documents[order(k)]]
    start = Permutation(num_samples, "samples", seed, epoch)(place) * seq_length
    return text[start : start + seq_length + 1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_samples_equal_the_reference(data: st.DataObject, seq_length: int, seed: int) -> None:
    size = st.sampled_from([0, 1, 2, seq_length, seq_length + 1, 3 * seq_length])
    sizes = data.draw(st.lists(size, min_size=3, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        write_megatron(Path(folder) / "a", sizes, list(range(len(sizes) + 1)))
        _compare(Path(folder) / "a", sizes, seq_length, seed)


def _compare(prefix: Path, sizes: list[int], seq_length: int, seed: int) -> None:
    from megatron.data import IndexedDataset

    file = IndexedDataset(prefix)
    if sum(sizes[1:]) <= seq_length:
        with pytest.raises(DataError, match=f"needs {seq_length + 1}"):
            GPTDataset(file, documents=(1, len(sizes)), seq_length=seq_length, seed=seed)
        return
    samples = GPTDataset(file, documents=(1, len(sizes)), seq_length=seq_length, seed=seed)
    documents = [file.read(document).tolist() for document in range(1, len(sizes))]
    for index in [*range(2 * samples.samples_per_epoch + 1), 10**12]:
        assert samples[index].dtype == np.int64
        assert samples[index].tolist() == reference(documents, seq_length, seed, index)


def test_an_epoch_holds_each_token_once_and_epochs_differ(tmp_path: Path) -> None:
    samples = GPTDataset(write(tmp_path / "a", [7, 30, 1, 25]), documents=(0, 4), seq_length=4, seed=3)
    epochs = [[samples[e * 15 + i].tolist() for i in range(15)] for e in range(3)]
    for epoch in epochs:
        inputs = [token for sample in epoch for token in sample[:-1]]
        assert len(set(inputs)) == len(inputs) == 60
    assert epochs[0] != epochs[1] and sorted(map(tuple, epochs[0])) != sorted(map(tuple, epochs[1]))


def test_best_fit_samples_are_the_documents_themselves(tmp_path: Path) -> None:
    sizes = [5, 9, 2, 40, 4, 4, 7, 1, 6, 9]
    file = write(tmp_path / "a", sizes)
    samples = GPTDataset(file, documents=(0, 10), seq_length=8, seed=3, packing="best-fit")
    found = []
    for index in range(samples.samples_per_epoch):
        sample = samples[index]
        assert isinstance(sample, dict)
        text, segments = sample["text"], sample["segments"]
        assert text.dtype == np.int64 and segments.dtype == np.int32 and len(text) == len(segments) == 9
        assert (text[segments < 0] == 0).all() and np.array_equal(np.sort(segments % 100), segments % 100)
        found += [text[segments == segment].tolist() for segment in range(segments.max() + 1)]
    documents = [file.read(document).tolist() for document, size in enumerate(sizes) if size > 1]
    pieces = [text[start : start + 9] for text in documents for start in range(0, len(text) - 1, 8)]
    assert sorted(found) == sorted(pieces) and samples.num_tokens == sum(sizes)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_fill_in_the_middle_keeps_lengths_and_rate_0_keeps_all(tmp_path: Path, packing: str) -> None:
    settings = {"documents": (0, 30), "seq_length": 32, "seed": 3, "packing": packing}
    file = write(tmp_path / "a", [*range(2, 32)], eod_id=0)
    fim = Fim(1.0, 0.5, prefix_id=60_001, middle_id=60_002, suffix_id=60_003, eod_id=0)
    plain = GPTDataset(file, **settings)  # type: ignore[arg-type]
    never = GPTDataset(file, fim=replace(fim, rate=0.0), **settings)  # type: ignore[arg-type]
    always = GPTDataset(file, fim=fim, **settings)  # type: ignore[arg-type]
    differing = 0
    for index in range(2 * plain.samples_per_epoch):
        old, same, new = (as_text(samples[index]) for samples in (plain, never, always))
        assert np.array_equal(old[0], same[0]) and np.array_equal(old[1], same[1])
        assert len(new[0]) == 33 and np.array_equal(new[0] == 0, old[0] == 0) and np.array_equal(old[1], new[1])
        sizes = [piece.length for piece in always._windows.pieces(index)]
        assert np.array_equal(new[0][: sum(sizes)], fim.apply(old[0][: sum(sizes)], sizes, 3, index))
        differing += not np.array_equal(old[0], new[0])
    assert differing > plain.samples_per_epoch


def as_text(sample: np.ndarray | dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return (sample, np.zeros(0)) if isinstance(sample, np.ndarray) else (sample["text"], sample["segments"])


def test_an_unknown_packing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="concat, best-fit, got 'first-fit'"):
        GPTDataset(write(tmp_path / "a", [40]), documents=(0, 1), seq_length=4, seed=3, packing="first-fit")


def test_starts_beyond_two_to_the_31_tokens_are_right() -> None:
    """Sizes alone, no tokens: reads are recorded instead."""

    class FakeFile:
        prefix, sizes = "fake", np.full(6, 2**30, np.int32)

        def read(self, document: int, offset: int, length: int) -> np.ndarray:
            return (document * 2**30 + offset + np.arange(length)).astype(np.int64)

    samples = GPTDataset(FakeFile(), documents=(0, 6), seq_length=1024, seed=1)  # type: ignore[arg-type]
    assert samples.samples_per_epoch == (6 * 2**30 - 1) // 1024
    starts = [int(samples[index][0]) for index in range(200)]
    assert max(starts) > 2**32 and all(start % 1024 == 0 for start in starts) and len(set(starts)) == 200


def test_a_failed_read_names_sample_document_and_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a", [40])
    samples = GPTDataset(file, documents=(0, 1), seq_length=4, seed=3)
    packed = GPTDataset(file, documents=(0, 1), seq_length=4, seed=3, packing="best-fit")

    def fail(*args: int) -> np.ndarray:
        raise OSError("Input/output error")

    monkeypatch.setattr(file, "read", fail)
    with pytest.raises(DataError, match=r"sample 5 .* document 0, tokens \d+:\d+, byte \d+ of .*a.bin: OSError: Input"):
        samples[5]
    with pytest.raises(DataError, match=r"sample 7 .* document 0, tokens \d+:\d+, byte \d+ of .*a.bin: OSError: Input"):
        packed[7]


def test_fingerprint_changes_with_all_that_changes_the_order(tmp_path: Path) -> None:
    file, other = write(tmp_path / "a", [40, 40]), write(tmp_path / "b", [40, 41])
    settings = {"documents": (0, 2), "seq_length": 4, "seed": 3}
    fims = [{"fim": Fim(0.5, 0.5, 1, 2, 3)}, {"fim": Fim(0.5, 0.5, 1, 3, 2)}]
    numbers = [{"documents": np.array(chosen)} for chosen in ([0], [1], [0, 1])]
    changed = [{"documents": (0, 1)}, {"seq_length": 5}, {"seed": 4}, {"packing": "best-fit"}, *fims, *numbers]
    prints = {GPTDataset(file, **{**settings, **change}).fingerprint for change in changed}  # type: ignore[arg-type]
    prints |= {GPTDataset(f, **settings).fingerprint for f in (file, other)}  # type: ignore[arg-type]
    assert len(prints) == 11
    wide, narrow = (
        GPTDataset(file, **{**settings, "documents": np.array([0, 1], kind)}).fingerprint  # type: ignore[arg-type]
        for kind in (np.int64, np.int32)
    )
    assert wide == narrow


def test_order_and_fingerprint_are_the_same_for_ever(tmp_path: Path) -> None:
    """Written down before T5 shared the windows: a checkpoint of then must go on with the data of then."""
    file = write(tmp_path / "a", [7, 30, 1, 25, 0, 18, 40], vocab_size=300)
    samples = GPTDataset(file, documents=(1, 6), seq_length=6, seed=1234)
    assert samples.samples_per_epoch == 18 and samples.fingerprint == FINGERPRINT
    assert [samples[index].tolist() for index in (0, 1, 17, 18, 40)] == FIXED
    assert Fim(0.5, 1, 1, 2, 3).key == "fim 0.5 1.0 1 2 3 None"
    filled = GPTDataset(file, documents=(1, 6), seq_length=6, seed=1234, fim=Fim(0.5, 0.25, 1, 2, 3, 0))
    assert filled.fingerprint == FILLED_FINGERPRINT


FINGERPRINT = "b9edfd41da9b611a"
FILLED_FINGERPRINT = "26dd447805c8a6ff"
FIXED = [
    [99, 100, 101, 102, 103, 104, 105],
    [52, 53, 54, 55, 56, 57, 58],
    [117, 118, 119, 120, 121, 64, 65],
    [45, 46, 47, 48, 49, 50, 51],
    [9, 10, 11, 12, 13, 14, 15],
]
