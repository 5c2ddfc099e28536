from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.batch_rampup import BatchSizes
from megatron.data import BlendPaths, DataLoader, IndexedDataset
from megatron.data.sample_index import SampleIndex
from megatron.data.step_predictions import KEY
from megatron.errors import DataError
from megatron.models.bert.data import TOKEN_NAMES, BertDataset, BertTokens, bert_tokens, build_bert_train_valid_test
from megatron.models.bert.model import bert_fields
from tests.helpers.token_data import write_documents

EOD, TEXT = 0, 50_000
TOKENS = BertTokens(TEXT, TEXT + 1, TEXT + 2, TEXT + 3, TEXT, control_ids=(EOD,))
DOCUMENT_LENGTHS = [70, 30, 200, 12, 1, 90, 150, 44]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"has_pairs": False},
    {"word_starts": np.arange(TEXT) % 4 == 1},
    {"has_pairs": False, "word_starts": np.arange(TEXT) % 3 != 0, "short_seq_prob": 0.0, "mask_prob": 0.4},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_documents(tmp_path_factory.mktemp("bert") / "a", DOCUMENT_LENGTHS, eod_id=EOD)


def make_samples(file: IndexedDataset, **overrides: Any) -> BertDataset:
    values = {"documents": (0, 8), "seq_length": 48, "tokens": TOKENS, "seed": 3}
    return BertDataset(file, **{**values, **overrides})


def samples_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def split_segments(sample: dict[str, np.ndarray]) -> list[list[int]]:
    """Return the text of each segment, from the arrays alone, and check what frames them."""
    labels, segment_ids = sample["labels"], sample["parts"]
    restored = np.where(labels >= 0, labels, sample["text"])
    assert (restored[segment_ids < 0] == TOKENS.pad_id).all() and (labels[segment_ids < 0] == -1).all()
    assert (np.diff(segment_ids[segment_ids >= 0]) >= 0).all() and (segment_ids[(segment_ids >= 0).sum() :] == -1).all()
    segments = []
    for segment_idx in range(segment_ids.max() + 1):
        row = restored[segment_ids == segment_idx].tolist()
        assert row[-1] == TOKENS.sep_id and (segment_idx or row[0] == TOKENS.cls_id)
        segments.append(row[0 if segment_idx else 1 : -1])
    assert sum(map(len, segments)) == (segment_ids >= 0).sum() - 1 - len(segments)
    return segments


def document_of_token(token: int) -> int:
    """Return the document of a token of text: they count up through the file."""
    return int(np.searchsorted(np.cumsum(DOCUMENT_LENGTHS), token - 1, "right"))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_samples_reconstruct_text_windows(file: IndexedDataset, overrides: dict[str, Any]) -> None:
    samples = make_samples(file, **overrides)
    windows = SampleIndex(file, documents=(0, 8), length=samples.text_length, overlap=0, seed=3, length_flag="a test")
    assert samples.samples_per_epoch == windows.per_epoch == 597 // (45 if samples.has_pairs else 46)
    for index in [*range(3 * windows.per_epoch), 10**12]:
        sample, window = samples[index], windows[index].tolist()
        first, *second = split_segments(sample)
        assert sample["text"].shape == sample["labels"].shape == sample["parts"].shape == (48,)
        assert len(second) == samples.has_pairs and first == window[: len(first)]
        if second and not sample["is_random"]:
            assert second[0] == window[len(first) :][: len(second[0])]


def test_second_segment_continues_or_starts_mid_document(file: IndexedDataset) -> None:
    samples, num_samples = make_samples(file), 1200
    drawn = [samples[index] for index in range(num_samples)]
    assert (
        abs(sum(int(s["is_random"]) for s in drawn) - num_samples / 2)
        <= 4 * (num_samples / 4) ** 0.5 + num_samples * 0.06
    )
    for sample in drawn:
        first, second = split_segments(sample)
        if sample["is_random"] and second[0]:
            assert {document_of_token(t) for t in first if t} & {document_of_token(second[0])} == set()
            assert second[0] - 1 not in np.cumsum([0, *DOCUMENT_LENGTHS]), "not at the beginning of a document"
        elif second[0] and first[-1]:
            assert second[0] == first[-1] + 1, "the seam is within a document"
    assert len({len(split_segments(sample)[0]) for sample in drawn}) > 20, "it may be anywhere"


def test_short_seq_prob_sets_share_of_short_samples(file: IndexedDataset) -> None:
    lengths = [int((make_samples(file, short_seq_prob=0.3)[i]["parts"] >= 0).sum()) for i in range(600)]
    short = [length for length in lengths if length < 48]
    assert abs(len(short) - 600 * 0.3) <= 4 * (600 * 0.21) ** 0.5
    assert min(short) <= 8 and len(set(short)) > 30
    assert all((make_samples(file, short_seq_prob=0.0)[i]["parts"] >= 0).all() for i in range(40))


def test_mask_prob_and_80_10_10_split_match_settings(file: IndexedDataset) -> None:
    samples = make_samples(file, has_pairs=False)
    masked = np.zeros(3)
    for index in range(400):
        sample = samples[index]
        is_masked = sample["labels"] >= 0
        length = (sample["parts"] >= 0).sum() - 2
        assert is_masked.sum() == samples.num_predicted(index) == max(1, round(0.15 * length))
        assert not np.isin(sample["labels"], [EOD, *range(TEXT, TEXT + 4)]).any(), "control tokens are never masked"
        assert (sample["text"][~is_masked & (sample["parts"] >= 0)] != TOKENS.mask_id).all()
        text, labels = sample["text"][is_masked], sample["labels"][is_masked]
        masked += [(text == TOKENS.mask_id).sum(), ((text != TOKENS.mask_id) & (text != labels)).sum(), 0]
        masked[2] += (text == labels).sum()
        assert ((text == TOKENS.mask_id) | ((text < TEXT) & (text != EOD))).all(), "nor put in place of a word"
    for share, count in zip((0.8, 0.1, 0.1), masked, strict=True):
        assert abs(count - share * masked.sum()) <= 4 * (masked.sum() * share * (1 - share)) ** 0.5, masked


def test_masking_is_uniform_over_positions(file: IndexedDataset) -> None:
    samples = make_samples(file, has_pairs=False, short_seq_prob=0.0, tokens=BertTokens(TEXT, 0, 1, 2, TEXT))
    counts = sum((samples[index]["labels"] >= 0)[1:-1].astype(int) for index in range(2000))
    share = 7 / 46
    assert np.abs(counts - 2000 * share).max() <= 5 * (2000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("has_pairs", [True, False])
def test_masking_covers_complete_words(file: IndexedDataset, has_pairs: bool) -> None:
    starts = np.arange(TEXT) % 4 != 2
    starts[np.arange(TEXT) % 8 == 3] = False
    samples = make_samples(file, word_starts=starts, has_pairs=has_pairs)
    num_masked_per_word, num_unmasked = set(), 0
    for index in range(300):
        sample = samples[index]
        labels, segment_ids = sample["labels"], sample["parts"]
        restored = np.where(labels >= 0, labels, sample["text"])
        num_unmasked += samples.num_predicted(index) - int((labels >= 0).sum())
        assert (labels >= 0).sum() <= samples.num_predicted(index)
        start = 1
        while start < 48:
            stop = start + 1
            while stop < 48 and restored[stop] < TEXT and restored[stop] != EOD and not starts[restored[stop]]:
                if segment_ids[stop] != segment_ids[start] or restored[stop - 1] >= TEXT or restored[stop - 1] == EOD:
                    break
                stop += 1
            word = labels[start:stop] >= 0
            assert word.all() or not word.any(), (index, start, stop)
            num_masked_per_word.add(int(word.sum()))
            start = stop
    assert {0, 1, 2, 3} <= num_masked_per_word and num_unmasked <= 3


def test_words_do_not_cross_segment_boundary(file: IndexedDataset) -> None:
    """Where no token begins a word, a segment up to the end of a document is one."""
    samples, num_independent = make_samples(file, word_starts=np.zeros(TEXT, bool), mask_prob=0.4), 0
    for sample in (samples[index] for index in range(200)):
        first_length = int((sample["parts"] == 0).sum())
        neighbor_masks = sample["labels"][first_length - 2] >= 0, sample["labels"][first_length] >= 0
        num_independent += neighbor_masks[0] != neighbor_masks[1] and sample["text"][first_length - 2] != EOD
    assert num_independent > 20


def test_masks_and_pairs_change_with_epoch_and_seed(file: IndexedDataset) -> None:
    samples = make_samples(file, documents=(2, 4), has_pairs=False, seq_length=202, short_seq_prob=0.0)
    other = make_samples(file, documents=(2, 4), has_pairs=False, seq_length=202, short_seq_prob=0.0, seed=4)
    assert samples.samples_per_epoch == 1
    masked_positions = [frozenset(np.flatnonzero(s["labels"] >= 0)) for s in (samples[0], samples[1], other[0])]
    assert len(set(masked_positions)) == 3
    pairs = make_samples(file)
    assert len({int(pairs[pairs.samples_per_epoch * epoch]["is_random"]) for epoch in range(8)}) == 2


@pytest.mark.parametrize("overrides", VARIANTS[::2])
def test_samples_are_independent_of_order_and_restart(file: IndexedDataset, overrides: dict[str, Any]) -> None:
    samples = make_samples(file, **overrides)
    forward = [samples[index] for index in range(40)]
    assert all(samples_equal(samples[index], forward[index]) for index in reversed(range(40)))
    assert samples_equal(make_samples(IndexedDataset(file.prefix), **overrides)[33], forward[33])


@pytest.mark.parametrize("d, m, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_batches_match_across_layouts_and_carry_step_counts(
    file: IndexedDataset, d: int, m: int, num_workers: int
) -> None:
    samples, batch_size = make_samples(file, short_seq_prob=0.5), 4
    settings = {
        "micro_batch_size": batch_size // (d * m),
        "num_micro_batches": m,
        "data_size": d,
        "samples_consumed": 8,
    }
    replicas = [iter(DataLoader(samples, data_rank=rank, num_workers=num_workers, **settings)) for rank in range(d)]
    rows, counts = [], []
    for _ in range(2):
        for batch in (next(replica) for replica in replicas for _ in range(m)):
            counts.append(batch.pop(KEY).tolist())
            rows += [{k: v[row].numpy() for k, v in batch.items()} for row in range(len(batch["text"]))]
    assert all(samples_equal(row, samples[8 + row_idx]) for row_idx, row in enumerate(rows)) and len(rows) == 8
    steps = [sum(int((samples[i]["labels"] >= 0).sum()) for i in range(8 + s, 12 + s)) for s in (0, 4)]
    assert counts == [[steps[0], 4]] * (d * m) + [[steps[1], 4]] * (d * m)


def test_ramped_batches_carry_counts_of_their_step(file: IndexedDataset) -> None:
    samples, batch_sizes = make_samples(file, short_seq_prob=0.5), BatchSizes.ramp(6, 2, 2, 8)
    batches = iter(
        DataLoader(samples, micro_batch_size=2, num_micro_batches=3, data_rank=0, data_size=1, batch_sizes=batch_sizes)
    )
    counts = [next(batches)[KEY].tolist() for _ in range(1 + 1 + 2 + 3)]
    starts = [0, 2, 4, 4, 8, 8, 8]
    assert [count for _, count in counts] == [batch_sizes.at(start) for start in starts]
    assert [n for n, _ in counts] == [sum(map(samples.num_predicted, range(s, s + batch_sizes.at(s)))) for s in starts]


def test_bert_fields_match_model_inputs(file: IndexedDataset) -> None:
    sample = make_samples(file, short_seq_prob=1.0)[5]
    rows = {key: torch.as_tensor(value).unsqueeze(0) for key, value in sample.items()}
    fields = bert_fields(**rows, has_segments=True)
    assert fields["tokens"] is rows["text"] and fields["is_random"].shape == (1,)
    assert fields["segments"].dtype == torch.int32 and set(fields["segments"].unique().tolist()) == {-1, 0}
    assert fields["token_types"].tolist() == np.maximum(sample["parts"], 0)[None].tolist()
    assert fields["loss_mask"].sum() == (sample["labels"] >= 0).sum() and fields["labels"].min() >= 0
    is_counted = fields["loss_mask"].bool()
    assert (fields["labels"][is_counted] == rows["labels"][is_counted]).all()
    assert bert_fields(**rows, has_segments=False)["segments"] is None


class FakeTokenizer:
    """A tokenizer with these control tokens."""

    def __init__(self, **controls: int) -> None:
        self.vocab_size, self.control_tokens, self.unk_id = 100, controls, controls.get("[UNK]")


def test_control_tokens_use_tokenizer_ids_or_append_new_ones() -> None:
    without_tokens = bert_tokens(FakeTokenizer())
    assert (without_tokens.cls_id, without_tokens.sep_id, without_tokens.mask_id, without_tokens.pad_id) == (
        100,
        101,
        102,
        103,
    ) and without_tokens.vocab_size == 104
    with_some = bert_tokens(FakeTokenizer(**{"[UNK]": 1, "<pad>": 5, "</s>": 2, "<mask>": 99, "<eod>": 7}))
    assert (with_some.cls_id, with_some.sep_id, with_some.mask_id, with_some.pad_id, with_some.vocab_size) == (
        100,
        2,
        99,
        5,
        101,
    )
    assert with_some.control_ids == (2, 5, 7, 99) and with_some.is_word.sum() == len(with_some.word_ids) == 96
    with_all = bert_tokens(FakeTokenizer(**{names[0]: idx for idx, names in enumerate(TOKEN_NAMES.values())}))
    assert with_all.vocab_size == 100 and (with_all.cls_id, with_all.pad_id) == (0, 3)


def test_rejects_too_few_tokens_or_documents(file: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"documents 3:4 have 12 tokens, but a sample of --seq-length 48 needs 45"):
        make_samples(file, documents=(3, 4))
    with pytest.raises(DataError, match="require at least two documents, got 1. .* use --bert-no-binary-head"):
        make_samples(file, documents=(2, 3))
    assert make_samples(file, documents=(2, 3), has_pairs=False)[0]


def test_fingerprint_depends_on_every_setting(file: IndexedDataset) -> None:
    changes: list[dict[str, Any]] = [
        *VARIANTS,
        {"documents": (0, 7)},
        {"seq_length": 49},
        {"mask_prob": 0.16},
        {"short_seq_prob": 0.2},
        {"word_starts": np.arange(TEXT) % 4 == 2},
        {"tokens": BertTokens(TEXT, TEXT + 1, TEXT + 2, TEXT + 3, TEXT)},
        {"seed": 4},
    ]
    fingerprints = [make_samples(file, **change).fingerprint for change in changes]
    assert (
        len(set(fingerprints)) == len(fingerprints)
        and make_samples(IndexedDataset(file.prefix)).fingerprint == fingerprints[0]
    )


def test_sample_matches_golden_values(file: IndexedDataset) -> None:
    sample = make_samples(file, seq_length=24, word_starts=np.arange(TEXT) % 3 != 0)[11]
    assert {key: value.tolist() for key, value in sample.items()} == EXPECTED_SAMPLE


def test_single_token_documents_give_random_pairs(tmp_path: Path) -> None:
    samples = make_samples(
        write_documents(tmp_path / "a", [1] * 60), documents=(0, 60), seq_length=12, short_seq_prob=0.0
    )
    assert all(samples[index]["is_random"] == 1 and len(split_segments(samples[index])) == 2 for index in range(5))


def test_warns_about_split_dominated_by_one_document(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, lengths, warning in (("many", [300] * 9, ""), ("one", [2700, 40, 40], "% of its pairs have a random")):
        file = write_documents(tmp_path / name, lengths)
        paths = BlendPaths(data_path=file.prefix, split="1,0,0")
        build_bert_train_valid_test(paths, seq_length=48, tokens=TOKENS, seed=3, needed=(True, False, False))
        samples = make_samples(file, documents=(0, len(lengths)))
        num_random = sum(int(samples[index]["is_random"]) for index in range(samples.samples_per_epoch))
        assert abs(num_random / samples.samples_per_epoch - samples.random_share) < 0.15
        output = "".join(capfd.readouterr())
        assert (warning in output) if warning else "warning" not in output


EXPECTED_SAMPLE: dict[str, Any] = {
    "text": [
        50000,
        240,
        50002,
        242,
        243,
        50001,
        34,
        35,
        36,
        37,
        38,
        39,
        40,
        41,
        42,
        50002,
        44,
        45,
        46,
        47,
        48,
        50002,
        50,
        50001,
    ],
    "labels": [-1, -1, 241, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 43, -1, -1, -1, -1, -1, 49, -1, -1],
    "parts": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "is_random": 1,
}
