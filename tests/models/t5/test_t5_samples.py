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
from megatron.models.t5.spans import longest_target, parse_denoisers, raw_length
from tests.helpers.token_data import write, write_megatron

TOKENS = T5Tokens.appended(50_000, 60, 0, 3)
ONE, SEVERAL = parse_denoisers("R", 0.15, 3), parse_denoisers("R:2,X:1,S:1", 0.15, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write(tmp_path_factory.mktemp("t5") / "a", [70, 30, 200, 12, 1, 90, 150, 44])


def samples_of(file: IndexedDataset, **changed: Any) -> T5Dataset:
    values = {"documents": (0, 8), "enc_seq_length": 64, "denoisers": ONE, "tokens": TOKENS, "seed": 3}
    return T5Dataset(file, **{**values, **changed})


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def text_again(sample: dict[str, np.ndarray]) -> list[int]:
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


@pytest.mark.parametrize("denoisers", [ONE, SEVERAL])
@pytest.mark.parametrize("is_apart", [False, True])
def test_samples_give_back_the_windows_of_the_file(file: IndexedDataset, denoisers: Any, is_apart: bool) -> None:
    samples = samples_of(file, denoisers=denoisers, reset_attention_mask=is_apart)
    length = raw_length(64, denoisers)
    windows = SampleIndex(file, documents=(0, 8), length=length, overlap=0, seed=3, asked_by="a test")
    assert samples.samples_per_epoch == windows.per_epoch == 597 // length and not hasattr(samples, "__len__")
    for index in [*range(2 * windows.per_epoch), 10**12]:
        assert text_again(samples[index]) == windows[index].tolist()


def test_an_epoch_holds_each_token_once(file: IndexedDataset) -> None:
    samples = samples_of(file)
    tokens = [token for index in range(samples.samples_per_epoch) for token in text_again(samples[index])]
    assert len(set(tokens)) == len(tokens) == samples.samples_per_epoch * samples.raw_length


def test_one_denoiser_fills_inputs_and_targets(file: IndexedDataset) -> None:
    samples = samples_of(file)
    sample = samples[0]
    assert samples.raw_length == 70 and (len(sample["inputs"]), len(sample["targets"])) == (64, 14)
    assert sample["inputs"][-1] == sample["targets"][-1] == TOKENS.eos_id
    assert sample["inputs"].dtype == sample["targets"].dtype == np.int64
    for key in ("enc_segments", "dec_segments"):
        assert sample[key].dtype == np.int32 and (sample[key] == 0).all()
    longer = samples_of(file, dec_seq_length=20)[0]
    assert longer["targets"].tolist() == [*sample["targets"].tolist(), *[TOKENS.pad_id] * 6]
    assert longer["dec_segments"].tolist() == [0] * 14 + [-1] * 6 and same({**longer, **sample}, sample)


def test_a_mixture_has_a_mode_first_pads_and_draws_by_weight(file: IndexedDataset) -> None:
    samples = samples_of(file, denoisers=SEVERAL)
    names = {token: kind for kind, token in TOKENS.modes.items()}
    kinds = Counter(names[int(samples[index]["inputs"][0])] for index in range(800))
    assert [kinds[kind] for kind in "RXS"] == pytest.approx([400, 200, 200], abs=5 * 14)
    assert samples.dec_seq_length == longest_target(samples.raw_length, SEVERAL)
    for sample in (samples[index] for index in range(20)):
        for tokens, segments in (("inputs", "enc_segments"), ("targets", "dec_segments")):
            filled = int((sample[segments] >= 0).sum())
            assert sample[tokens][filled - 1] == TOKENS.eos_id and (sample[segments][filled:] == -1).all()
            assert (sample[tokens][filled:] == TOKENS.pad_id).all()
        if names[int(sample["inputs"][0])] == "S":
            text = sample["inputs"][1 : int((sample["enc_segments"] >= 0).sum()) - 2].tolist()
            suffix = sample["targets"][1 : int((sample["dec_segments"] >= 0).sum()) - 1].tolist()
            assert [*text, *suffix] == text_again(sample), "the end of the text is asked for"


def test_documents_apart_are_the_documents_of_the_file(file: IndexedDataset) -> None:
    """Tokens count up through the file, so the document of each is known."""
    samples, together = samples_of(file, reset_attention_mask=True), samples_of(file)
    seen = set()
    for index in range(2 * samples.samples_per_epoch):
        sample = samples[index]
        assert {key: value.shape for key, value in sample.items()} == {k: v.shape for k, v in together[index].items()}
        assert (sample["enc_segments"] >= 0).all() and (np.diff(sample["enc_segments"]) >= 0).all()
        of_text: dict[int, set[int]] = {}
        for tokens, segments in (("inputs", "enc_segments"), ("targets", "dec_segments")):
            for token, segment in zip(sample[tokens].tolist(), sample[segments].tolist(), strict=True):
                if 0 < token < TOKENS.text_vocab_size:
                    of_text.setdefault(segment, set()).add(int(np.searchsorted(file.starts, token - 1, "right")) - 1)
        assert all(len(documents) == 1 for documents in of_text.values())
        last = sample["enc_segments"][-1]
        assert sample["dec_segments"][-1] == last == len(of_text) - 1
        seen.add(len(of_text))
    assert max(seen) > 2


def test_empty_documents_are_no_documents(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [0, 9, 0, 0, 8, 0, 13, 0], list(range(9)))
    samples = samples_of(IndexedDataset(tmp_path / "a"), enc_seq_length=27, reset_attention_mask=True)
    for index in range(20):
        assert samples[index]["enc_segments"].max() == 2 and (samples[index]["dec_segments"] >= 0).all()


def test_spans_are_new_in_each_epoch_and_with_each_seed(file: IndexedDataset) -> None:
    single = write(Path(file.prefix).parent / "single", [70])
    first, second, other = (
        samples_of(single, documents=(0, 1), seed=seed)[index] for seed, index in ((3, 0), (3, 1), (4, 0))
    )
    assert text_again(first) == text_again(second) == text_again(other) == list(range(1, 71))
    assert not same(first, second) and not same(first, other)


@pytest.mark.parametrize("denoisers, is_apart", [(ONE, False), (SEVERAL, True)])
def test_a_sample_is_the_same_in_any_order_and_after_a_restart(
    file: IndexedDataset, denoisers: Any, is_apart: bool
) -> None:
    settings = {"denoisers": denoisers, "reset_attention_mask": is_apart}
    samples = samples_of(file, **settings)
    forward = [samples[index] for index in range(40)]
    for index in reversed(range(40)):
        assert same(samples[index], forward[index])
    assert same(samples_of(IndexedDataset(file.prefix), **settings)[33], forward[33])


@pytest.mark.parametrize("d, m, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_batches_are_the_same_in_every_layout_and_with_workers(
    file: IndexedDataset, d: int, m: int, num_workers: int
) -> None:
    samples = samples_of(file, denoisers=SEVERAL, reset_attention_mask=True)
    steps, size = 2, 4
    replicas = [
        iter(
            DataLoader(
                samples,
                micro_batch_size=size // (d * m),
                num_micro_batches=m,
                data_rank=rank,
                data_size=d,
                samples_consumed=8,
                num_workers=num_workers,
            )
        )
        for rank in range(d)
    ]
    batches = [next(replica) for _ in range(steps) for replica in replicas for _ in range(m)]
    rows = [{k: v[row].numpy() for k, v in batch.items()} for batch in batches for row in range(len(batch["inputs"]))]
    assert len(rows) == steps * size and all(same(row, samples[8 + place]) for place, row in enumerate(rows))
    assert rows[0]["enc_segments"].dtype == np.int32


def test_a_sample_stays_the_same_for_ever(file: IndexedDataset) -> None:
    sample = samples_of(file, enc_seq_length=32, denoisers=SEVERAL, reset_attention_mask=True)[11]
    assert {key: value.tolist() for key, value in sample.items()} == FIXED


def test_what_does_not_fit_is_refused(file: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"documents 3:4 have 12 tokens, but a sample of --enc-seq-length 64 needs 70"):
        samples_of(file, documents=(3, 4))
    with pytest.raises(DataError, match="--dec-seq-length must be at least 14, .* --enc-seq-length 64, got 13"):
        samples_of(file, dec_seq_length=13)
    with pytest.raises(DataError, match="too few sentinels: --vocab-extra-ids gives 2"):
        samples_of(file, tokens=T5Tokens.appended(50_000, 2, 0))
    with pytest.raises(DataError, match="must have a mode token, X, S has none"):
        samples_of(file, denoisers=SEVERAL, tokens=T5Tokens.appended(50_000, 60, 0, 1))


def test_fingerprint_changes_with_all_that_changes_a_sample(file: IndexedDataset) -> None:
    other = write(Path(file.prefix).parent / "other", [70, 30, 200, 12, 1, 90, 150, 45])
    changed: list[dict[str, Any]] = [
        {},
        {"documents": (0, 7)},
        {"enc_seq_length": 65},
        {"dec_seq_length": 17},
        {"denoisers": parse_denoisers("R", 0.16, 3)},
        {"denoisers": parse_denoisers("R", 0.15, 4)},
        {"denoisers": SEVERAL},
        {"denoisers": parse_denoisers("R:2,X:1,S:2", 0.15, 3)},
        {"tokens": T5Tokens.appended(50_001, 60, 0, 3)},
        {"tokens": T5Tokens.appended(50_000, 60, 1, 3)},
        {"seed": 4},
        {"reset_attention_mask": True},
    ]
    prints = [samples_of(file, **change).fingerprint for change in changed] + [samples_of(other).fingerprint]
    prints.append(GPTDataset(file, documents=(0, 8), seq_length=70, seed=3).fingerprint)
    assert len(set(prints)) == len(prints)
    assert samples_of(IndexedDataset(file.prefix), dec_seq_length=14).fingerprint == prints[0]


FIXED = {
    "inputs": [50060, *range(373, 386), 50059, *range(388, 401), 50058, 301, 302, 0],
    "targets": [50059, 386, 387, 50058, 401, 402, 403, *[0] * 12],
    "enc_segments": [0] * 29 + [1] * 3,
    "dec_segments": [0] * 7 + [1] + [-1] * 11,
}
