from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import DataLoader, GPTDataset, IndexedDataset
from megatron.data.sample_index import SampleIndex
from megatron.errors import DataError
from megatron.models.t5.data import T5Dataset, T5Tokens
from megatron.models.t5.spans import max_target_length, parse_denoisers, raw_length
from tests.helpers.token_data import write_documents, write_megatron_files

TOKENS = T5Tokens.appended(50_000, 60, 0, 3)
SINGLE_DENOISER, SEVERAL_DENOISERS = parse_denoisers("R", 0.15, 3), parse_denoisers("R:2,X:1,S:1", 0.15, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_documents(tmp_path_factory.mktemp("t5") / "a", [70, 30, 200, 12, 1, 90, 150, 44])


def make_samples(file: IndexedDataset, **overrides: Any) -> T5Dataset:
    values = {"documents": (0, 8), "enc_seq_length": 64, "denoisers": SINGLE_DENOISER, "tokens": TOKENS, "seed": 3}
    return T5Dataset(file, **{**values, **overrides})


def samples_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def restore_text(sample: dict[str, np.ndarray]) -> list[int]:
    """Return the text of a sample, from its arrays alone."""
    spans: dict[tuple[int, int], list[int]] = {}
    for token, document in zip(sample["targets"].tolist(), sample["dec_segments"].tolist(), strict=True):
        if token in TOKENS.sentinels:
            span = spans.setdefault((document, token), [])
        elif token < TOKENS.text_vocab_size and token != TOKENS.eos_id:
            span.append(token)
    text: list[int] = []
    for token, document in zip(sample["inputs"].tolist(), sample["enc_segments"].tolist(), strict=True):
        text += spans.pop((document, token)) if token in TOKENS.sentinels else [token]
    assert not spans
    return [token for token in text if token < TOKENS.text_vocab_size and token != TOKENS.eos_id]


@pytest.mark.parametrize("denoisers", [SINGLE_DENOISER, SEVERAL_DENOISERS])
@pytest.mark.parametrize("resets_mask", [False, True])
def test_samples_restore_text_windows(file: IndexedDataset, denoisers: Any, resets_mask: bool) -> None:
    samples = make_samples(file, denoisers=denoisers, reset_attention_mask=resets_mask)
    length = raw_length(64, denoisers)
    windows = SampleIndex(file, documents=(0, 8), length=length, overlap=0, seed=3, length_flag="a test")
    assert samples.samples_per_epoch == windows.per_epoch == 597 // length and not hasattr(samples, "__len__")
    for index in [*range(2 * windows.per_epoch), 10**12]:
        assert restore_text(samples[index]) == windows[index].tolist()


def test_epoch_contains_each_token_once(file: IndexedDataset) -> None:
    samples = make_samples(file)
    tokens = [token for index in range(samples.samples_per_epoch) for token in restore_text(samples[index])]
    assert len(set(tokens)) == len(tokens) == samples.samples_per_epoch * samples.raw_length


def test_single_denoiser_fills_inputs_and_targets(file: IndexedDataset) -> None:
    samples = make_samples(file)
    sample = samples[0]
    assert samples.raw_length == 70 and (len(sample["inputs"]), len(sample["targets"])) == (64, 14)
    assert sample["inputs"][-1] == sample["targets"][-1] == TOKENS.eos_id
    assert sample["inputs"].dtype == sample["targets"].dtype == np.int64
    for key in ("enc_segments", "dec_segments"):
        assert sample[key].dtype == np.int32 and (sample[key] == 0).all()
    longer = make_samples(file, dec_seq_length=20)[0]
    assert longer["targets"].tolist() == [*sample["targets"].tolist(), *[TOKENS.pad_id] * 6]
    assert longer["dec_segments"].tolist() == [0] * 14 + [-1] * 6 and samples_equal({**longer, **sample}, sample)


def test_mixture_adds_mode_tokens_pads_and_follows_weights(file: IndexedDataset) -> None:
    samples = make_samples(file, denoisers=SEVERAL_DENOISERS)
    mode_by_token = {token: mode for mode, token in TOKENS.modes.items()}
    mode_counts = Counter(mode_by_token[int(samples[index]["inputs"][0])] for index in range(800))
    assert [mode_counts[mode] for mode in "RXS"] == pytest.approx([400, 200, 200], abs=5 * 14)
    assert samples.dec_seq_length == max_target_length(samples.raw_length, SEVERAL_DENOISERS)
    for sample in (samples[index] for index in range(20)):
        for tokens, segments in (("inputs", "enc_segments"), ("targets", "dec_segments")):
            num_filled = int((sample[segments] >= 0).sum())
            assert sample[tokens][num_filled - 1] == TOKENS.eos_id and (sample[segments][num_filled:] == -1).all()
            assert (sample[tokens][num_filled:] == TOKENS.pad_id).all()
        if mode_by_token[int(sample["inputs"][0])] == "S":
            text = sample["inputs"][1 : int((sample["enc_segments"] >= 0).sum()) - 2].tolist()
            suffix = sample["targets"][1 : int((sample["dec_segments"] >= 0).sum()) - 1].tolist()
            assert [*text, *suffix] == restore_text(sample), "the end of the text is asked for"


def test_segments_match_file_documents(file: IndexedDataset) -> None:
    """Tokens count up through the file, so the document of each is known."""
    samples, packed = make_samples(file, reset_attention_mask=True), make_samples(file)
    document_counts = set()
    for index in range(2 * samples.samples_per_epoch):
        sample = samples[index]
        assert {key: value.shape for key, value in sample.items()} == {k: v.shape for k, v in packed[index].items()}
        assert (sample["enc_segments"] >= 0).all() and (np.diff(sample["enc_segments"]) >= 0).all()
        documents_by_segment: dict[int, set[int]] = {}
        for tokens, segments in (("inputs", "enc_segments"), ("targets", "dec_segments")):
            for token, segment in zip(sample[tokens].tolist(), sample[segments].tolist(), strict=True):
                if 0 < token < TOKENS.text_vocab_size:
                    documents_by_segment.setdefault(segment, set()).add(
                        int(np.searchsorted(file.starts, token - 1, "right")) - 1
                    )
        assert all(len(documents) == 1 for documents in documents_by_segment.values())
        last_segment = sample["enc_segments"][-1]
        assert sample["dec_segments"][-1] == last_segment == len(documents_by_segment) - 1
        document_counts.add(len(documents_by_segment))
    assert max(document_counts) > 2


def test_empty_documents_are_skipped(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [0, 9, 0, 0, 8, 0, 13, 0], list(range(9)))
    samples = make_samples(IndexedDataset(tmp_path / "a"), enc_seq_length=27, reset_attention_mask=True)
    for index in range(20):
        assert samples[index]["enc_segments"].max() == 2 and (samples[index]["dec_segments"] >= 0).all()


def test_spans_change_with_epoch_and_seed(file: IndexedDataset) -> None:
    single = write_documents(Path(file.prefix).parent / "single", [70])
    first, second, other = (
        make_samples(single, documents=(0, 1), seed=seed)[index] for seed, index in ((3, 0), (3, 1), (4, 0))
    )
    assert restore_text(first) == restore_text(second) == restore_text(other) == list(range(1, 71))
    assert not samples_equal(first, second) and not samples_equal(first, other)


@pytest.mark.parametrize("denoisers, resets_mask", [(SINGLE_DENOISER, False), (SEVERAL_DENOISERS, True)])
def test_samples_are_independent_of_order_and_restart(file: IndexedDataset, denoisers: Any, resets_mask: bool) -> None:
    settings = {"denoisers": denoisers, "reset_attention_mask": resets_mask}
    samples = make_samples(file, **settings)
    forward = [samples[index] for index in range(40)]
    for index in reversed(range(40)):
        assert samples_equal(samples[index], forward[index])
    assert samples_equal(make_samples(IndexedDataset(file.prefix), **settings)[33], forward[33])


@pytest.mark.parametrize("d, m, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_batches_match_across_layouts_and_workers(file: IndexedDataset, d: int, m: int, num_workers: int) -> None:
    samples = make_samples(file, denoisers=SEVERAL_DENOISERS, reset_attention_mask=True)
    num_steps, batch_size = 2, 4
    replicas = [
        iter(
            DataLoader(
                samples,
                micro_batch_size=batch_size // (d * m),
                num_micro_batches=m,
                data_rank=rank,
                data_size=d,
                samples_consumed=8,
                num_workers=num_workers,
            )
        )
        for rank in range(d)
    ]
    batches = [next(replica) for _ in range(num_steps) for replica in replicas for _ in range(m)]
    rows = [{k: v[row].numpy() for k, v in batch.items()} for batch in batches for row in range(len(batch["inputs"]))]
    assert len(rows) == num_steps * batch_size and all(
        samples_equal(row, samples[8 + row_idx]) for row_idx, row in enumerate(rows)
    )
    assert rows[0]["enc_segments"].dtype == np.int32


def test_sample_matches_golden_values(file: IndexedDataset) -> None:
    sample = make_samples(file, enc_seq_length=32, denoisers=SEVERAL_DENOISERS, reset_attention_mask=True)[11]
    assert {key: value.tolist() for key, value in sample.items()} == EXPECTED_SAMPLE


def test_rejects_settings_that_do_not_fit(file: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"documents 3:4 have 12 tokens, but a sample of --enc-seq-length 64 needs 70"):
        make_samples(file, documents=(3, 4))
    with pytest.raises(DataError, match="--dec-seq-length must be at least 14, .* --enc-seq-length 64, got 13"):
        make_samples(file, dec_seq_length=13)
    with pytest.raises(DataError, match="--vocab-extra-ids provides 2"):
        make_samples(file, tokens=T5Tokens.appended(50_000, 2, 0))
    with pytest.raises(DataError, match="must have a mode token, missing for X, S"):
        make_samples(file, denoisers=SEVERAL_DENOISERS, tokens=T5Tokens.appended(50_000, 60, 0, 1))


def test_fingerprint_depends_on_every_setting(file: IndexedDataset) -> None:
    other_file = write_documents(Path(file.prefix).parent / "other", [70, 30, 200, 12, 1, 90, 150, 45])
    changes: list[dict[str, Any]] = [
        {},
        {"documents": (0, 7)},
        {"enc_seq_length": 65},
        {"dec_seq_length": 17},
        {"denoisers": parse_denoisers("R", 0.16, 3)},
        {"denoisers": parse_denoisers("R", 0.15, 4)},
        {"denoisers": SEVERAL_DENOISERS},
        {"denoisers": parse_denoisers("R:2,X:1,S:2", 0.15, 3)},
        {"tokens": T5Tokens.appended(50_001, 60, 0, 3)},
        {"tokens": T5Tokens.appended(50_000, 60, 1, 3)},
        {"seed": 4},
        {"reset_attention_mask": True},
    ]
    fingerprints = [make_samples(file, **change).fingerprint for change in changes] + [
        make_samples(other_file).fingerprint
    ]
    fingerprints.append(GPTDataset(file, documents=(0, 8), seq_length=70, seed=3).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    assert make_samples(IndexedDataset(file.prefix), dec_seq_length=14).fingerprint == fingerprints[0]


EXPECTED_SAMPLE = {
    "inputs": [50060, *range(373, 386), 50059, *range(388, 401), 50058, 301, 302, 0],
    "targets": [50059, 386, 387, 50058, 401, 402, 403, *[0] * 12],
    "enc_segments": [0] * 29 + [1] * 3,
    "dec_segments": [0] * 7 + [1] + [-1] * 11,
}
