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
from megatron.models.bert.data import NAMES, BertDataset, BertTokens, bert_tokens, build_bert_train_valid_test
from megatron.models.bert.model import bert_fields
from tests.helpers.token_data import write

EOD, TEXT = 0, 50_000
TOKENS = BertTokens(TEXT, TEXT + 1, TEXT + 2, TEXT + 3, TEXT, control_ids=(EOD,))
SIZES = [70, 30, 200, 12, 1, 90, 150, 44]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"has_pairs": False},
    {"word_starts": np.arange(TEXT) % 4 == 1},
    {"has_pairs": False, "word_starts": np.arange(TEXT) % 3 != 0, "short_seq_prob": 0.0, "mask_prob": 0.4},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write(tmp_path_factory.mktemp("bert") / "a", SIZES, eod_id=EOD)


def samples_of(file: IndexedDataset, **changed: Any) -> BertDataset:
    values = {"documents": (0, 8), "seq_length": 48, "tokens": TOKENS, "seed": 3}
    return BertDataset(file, **{**values, **changed})


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def segments_of(sample: dict[str, np.ndarray]) -> list[list[int]]:
    """Return the text of each segment, from the arrays alone, and check what frames them."""
    labels, parts = sample["labels"], sample["parts"]
    restored = np.where(labels >= 0, labels, sample["text"])
    assert (restored[parts < 0] == TOKENS.pad_id).all() and (labels[parts < 0] == -1).all()
    assert (np.diff(parts[parts >= 0]) >= 0).all() and (parts[(parts >= 0).sum() :] == -1).all()
    found = []
    for part in range(parts.max() + 1):
        row = restored[parts == part].tolist()
        assert row[-1] == TOKENS.sep_id and (part or row[0] == TOKENS.cls_id)
        found.append(row[0 if part else 1 : -1])
    assert sum(map(len, found)) == (parts >= 0).sum() - 1 - len(found)
    return found


def document_of(token: int) -> int:
    """Return the document of a token of text: they count up through the file."""
    return int(np.searchsorted(np.cumsum(SIZES), token - 1, "right"))


@pytest.mark.parametrize("changed", VARIANTS)
def test_text_comes_back_from_inputs_and_labels(file: IndexedDataset, changed: dict[str, Any]) -> None:
    samples = samples_of(file, **changed)
    windows = SampleIndex(file, documents=(0, 8), length=samples.text_length, overlap=0, seed=3, asked_by="a test")
    assert samples.samples_per_epoch == windows.per_epoch == 597 // (45 if samples.has_pairs else 46)
    for index in [*range(3 * windows.per_epoch), 10**12]:
        sample, window = samples[index], windows[index].tolist()
        first, *second = segments_of(sample)
        assert sample["text"].shape == sample["labels"].shape == sample["parts"].shape == (48,)
        assert len(second) == samples.has_pairs and first == window[: len(first)]
        if second and not sample["is_random"]:
            assert second[0] == window[len(first) :][: len(second[0])]


def test_the_second_segment_goes_on_or_begins_within_a_document_elsewhere(file: IndexedDataset) -> None:
    samples, number = samples_of(file), 1200
    found = [samples[index] for index in range(number)]
    assert abs(sum(int(s["is_random"]) for s in found) - number / 2) <= 4 * (number / 4) ** 0.5 + number * 0.06
    for sample in found:
        first, second = segments_of(sample)
        if sample["is_random"] and second[0]:
            assert {document_of(t) for t in first if t} & {document_of(second[0])} == set()
            assert second[0] - 1 not in np.cumsum([0, *SIZES]), "not at the beginning of a document"
        elif second[0] and first[-1]:
            assert second[0] == first[-1] + 1, "the seam is within a document"
    assert len({len(segments_of(sample)[0]) for sample in found}) > 20, "it may be anywhere"


def test_a_share_of_the_samples_is_short_and_none_without(file: IndexedDataset) -> None:
    lengths = [int((samples_of(file, short_seq_prob=0.3)[i]["parts"] >= 0).sum()) for i in range(600)]
    short = [length for length in lengths if length < 48]
    assert abs(len(short) - 600 * 0.3) <= 4 * (600 * 0.21) ** 0.5
    assert min(short) <= 8 and len(set(short)) > 30
    assert all((samples_of(file, short_seq_prob=0.0)[i]["parts"] >= 0).all() for i in range(40))


def test_as_many_tokens_are_masked_as_asked_and_become_mask_random_or_stay(file: IndexedDataset) -> None:
    samples = samples_of(file, has_pairs=False)
    masked = np.zeros(3)
    for index in range(400):
        sample = samples[index]
        places = sample["labels"] >= 0
        length = (sample["parts"] >= 0).sum() - 2
        assert places.sum() == samples.num_predicted(index) == max(1, round(0.15 * length))
        assert not np.isin(sample["labels"], [EOD, *range(TEXT, TEXT + 4)]).any(), "control tokens are never masked"
        assert (sample["text"][~places & (sample["parts"] >= 0)] != TOKENS.mask_id).all()
        text, labels = sample["text"][places], sample["labels"][places]
        masked += [(text == TOKENS.mask_id).sum(), ((text != TOKENS.mask_id) & (text != labels)).sum(), 0]
        masked[2] += (text == labels).sum()
        assert ((text == TOKENS.mask_id) | ((text < TEXT) & (text != EOD))).all(), "nor put in place of a word"
    for share, found in zip((0.8, 0.1, 0.1), masked, strict=True):
        assert abs(found - share * masked.sum()) <= 4 * (masked.sum() * share * (1 - share)) ** 0.5, masked


def test_every_place_is_masked_alike(file: IndexedDataset) -> None:
    samples = samples_of(file, has_pairs=False, short_seq_prob=0.0, tokens=BertTokens(TEXT, 0, 1, 2, TEXT))
    counts = sum((samples[index]["labels"] >= 0)[1:-1].astype(int) for index in range(2000))
    share = 7 / 46
    assert np.abs(counts - 2000 * share).max() <= 5 * (2000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("has_pairs", [True, False])
def test_whole_words_stay_whole(file: IndexedDataset, has_pairs: bool) -> None:
    starts = np.arange(TEXT) % 4 != 2
    starts[np.arange(TEXT) % 8 == 3] = False
    samples = samples_of(file, word_starts=starts, has_pairs=has_pairs)
    sizes, fewer = set(), 0
    for index in range(300):
        sample = samples[index]
        labels, parts = sample["labels"], sample["parts"]
        restored = np.where(labels >= 0, labels, sample["text"])
        fewer += samples.num_predicted(index) - int((labels >= 0).sum())
        assert (labels >= 0).sum() <= samples.num_predicted(index)
        at = 1
        while at < 48:
            stop = at + 1
            while stop < 48 and restored[stop] < TEXT and restored[stop] != EOD and not starts[restored[stop]]:
                if parts[stop] != parts[at] or restored[stop - 1] >= TEXT or restored[stop - 1] == EOD:
                    break
                stop += 1
            word = labels[at:stop] >= 0
            assert word.all() or not word.any(), (index, at, stop)
            sizes.add(int(word.sum()))
            at = stop
    assert {0, 1, 2, 3} <= sizes and fewer <= 3


def test_no_word_reaches_over_the_seam(file: IndexedDataset) -> None:
    """Where no token begins a word, a segment up to the end of a document is one."""
    samples, alone = samples_of(file, word_starts=np.zeros(TEXT, bool), mask_prob=0.4), 0
    for sample in (samples[index] for index in range(200)):
        first = int((sample["parts"] == 0).sum())
        beside = sample["labels"][first - 2] >= 0, sample["labels"][first] >= 0
        alone += beside[0] != beside[1] and sample["text"][first - 2] != EOD
    assert alone > 20


def test_masks_and_pairs_are_new_in_each_epoch_and_with_each_seed(file: IndexedDataset) -> None:
    samples = samples_of(file, documents=(2, 4), has_pairs=False, seq_length=202, short_seq_prob=0.0)
    other = samples_of(file, documents=(2, 4), has_pairs=False, seq_length=202, short_seq_prob=0.0, seed=4)
    assert samples.samples_per_epoch == 1
    places = [frozenset(np.flatnonzero(s["labels"] >= 0)) for s in (samples[0], samples[1], other[0])]
    assert len(set(places)) == 3
    pairs = samples_of(file)
    assert len({int(pairs[pairs.samples_per_epoch * epoch]["is_random"]) for epoch in range(8)}) == 2


@pytest.mark.parametrize("changed", VARIANTS[::2])
def test_a_sample_is_the_same_in_any_order_and_after_a_restart(file: IndexedDataset, changed: dict[str, Any]) -> None:
    samples = samples_of(file, **changed)
    forward = [samples[index] for index in range(40)]
    assert all(same(samples[index], forward[index]) for index in reversed(range(40)))
    assert same(samples_of(IndexedDataset(file.prefix), **changed)[33], forward[33])


@pytest.mark.parametrize("d, m, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_batches_are_the_same_in_every_layout_and_told_of_their_step(
    file: IndexedDataset, d: int, m: int, num_workers: int
) -> None:
    samples, size = samples_of(file, short_seq_prob=0.5), 4
    settings = {"micro_batch_size": size // (d * m), "num_micro_batches": m, "data_size": d, "samples_consumed": 8}
    replicas = [iter(DataLoader(samples, data_rank=rank, num_workers=num_workers, **settings)) for rank in range(d)]
    rows, counts = [], []
    for _ in range(2):
        for batch in (next(replica) for replica in replicas for _ in range(m)):
            counts.append(batch.pop(KEY).tolist())
            rows += [{k: v[row].numpy() for k, v in batch.items()} for row in range(len(batch["text"]))]
    assert all(same(row, samples[8 + place]) for place, row in enumerate(rows)) and len(rows) == 8
    steps = [sum(int((samples[i]["labels"] >= 0).sum()) for i in range(8 + s, 12 + s)) for s in (0, 4)]
    assert counts == [[steps[0], 4]] * (d * m) + [[steps[1], 4]] * (d * m)


def test_a_growing_batch_is_told_of_its_own_step(file: IndexedDataset) -> None:
    samples, sizes = samples_of(file, short_seq_prob=0.5), BatchSizes(6, 2, 2, 8)
    batches = iter(DataLoader(samples, micro_batch_size=2, num_micro_batches=3, data_rank=0, data_size=1, sizes=sizes))
    counts = [next(batches)[KEY].tolist() for _ in range(1 + 1 + 2 + 3)]
    starts = [0, 2, 4, 4, 8, 8, 8]
    assert [count for _, count in counts] == [sizes.at(start) for start in starts]
    assert [n for n, _ in counts] == [sum(map(samples.num_predicted, range(s, s + sizes.at(s)))) for s in starts]


def test_fields_are_what_the_model_takes(file: IndexedDataset) -> None:
    sample = samples_of(file, short_seq_prob=1.0)[5]
    rows = {key: torch.as_tensor(value).unsqueeze(0) for key, value in sample.items()}
    fields = bert_fields(**rows, has_segments=True)
    assert fields["tokens"] is rows["text"] and fields["is_random"].shape == (1,)
    assert fields["segments"].dtype == torch.int32 and set(fields["segments"].unique().tolist()) == {-1, 0}
    assert fields["token_types"].tolist() == np.maximum(sample["parts"], 0)[None].tolist()
    assert fields["loss_mask"].sum() == (sample["labels"] >= 0).sum() and fields["labels"].min() >= 0
    kept = fields["loss_mask"].bool()
    assert (fields["labels"][kept] == rows["labels"][kept]).all()
    assert bert_fields(**rows, has_segments=False)["segments"] is None


class Words:
    """A tokenizer with these control tokens."""

    def __init__(self, **controls: int) -> None:
        self.vocab_size, self.control_tokens, self.unk_id = 100, controls, controls.get("[UNK]")


def test_control_tokens_are_the_tokenizers_own_and_appended_where_it_has_none() -> None:
    none = bert_tokens(Words())
    assert (none.cls_id, none.sep_id, none.mask_id, none.pad_id) == (100, 101, 102, 103) and none.vocab_size == 104
    some = bert_tokens(Words(**{"[UNK]": 1, "<pad>": 5, "</s>": 2, "<mask>": 99, "<eod>": 7}))
    assert (some.cls_id, some.sep_id, some.mask_id, some.pad_id, some.vocab_size) == (100, 2, 99, 5, 101)
    assert some.control_ids == (2, 5, 7, 99) and some.is_word.sum() == len(some.word_ids) == 96
    whole = bert_tokens(Words(**{names[0]: place for place, names in enumerate(NAMES.values())}))
    assert whole.vocab_size == 100 and (whole.cls_id, whole.pad_id) == (0, 3)


def test_what_does_not_fit_is_refused(file: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"documents 3:4 have 12 tokens, but a sample of --seq-length 48 needs 45"):
        samples_of(file, documents=(3, 4))
    with pytest.raises(DataError, match="require at least two documents, got 1. .* use --bert-no-binary-head"):
        samples_of(file, documents=(2, 3))
    assert samples_of(file, documents=(2, 3), has_pairs=False)[0]


def test_fingerprint_changes_with_all_that_changes_a_sample(file: IndexedDataset) -> None:
    changed: list[dict[str, Any]] = [
        *VARIANTS,
        {"documents": (0, 7)},
        {"seq_length": 49},
        {"mask_prob": 0.16},
        {"short_seq_prob": 0.2},
        {"word_starts": np.arange(TEXT) % 4 == 2},
        {"tokens": BertTokens(TEXT, TEXT + 1, TEXT + 2, TEXT + 3, TEXT)},
        {"seed": 4},
    ]
    prints = [samples_of(file, **change).fingerprint for change in changed]
    assert len(set(prints)) == len(prints) and samples_of(IndexedDataset(file.prefix)).fingerprint == prints[0]


def test_a_sample_stays_the_same_for_ever(file: IndexedDataset) -> None:
    sample = samples_of(file, seq_length=24, word_starts=np.arange(TEXT) % 3 != 0)[11]
    assert {key: value.tolist() for key, value in sample.items()} == FIXED


def test_documents_of_one_token_make_pairs_that_do_not_belong_together(tmp_path: Path) -> None:
    samples = samples_of(write(tmp_path / "a", [1] * 60), documents=(0, 60), seq_length=12, short_seq_prob=0.0)
    assert all(samples[index]["is_random"] == 1 and len(segments_of(samples[index])) == 2 for index in range(5))


def test_the_start_tells_of_a_split_that_is_nearly_all_one_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, sizes, warning in (("many", [300] * 9, ""), ("one", [2700, 40, 40], "% of its pairs have a random")):
        file = write(tmp_path / name, sizes)
        paths = BlendPaths(data_path=file.prefix, split="1,0,0")
        build_bert_train_valid_test(paths, seq_length=48, tokens=TOKENS, seed=3, needed=(True, False, False))
        samples = samples_of(file, documents=(0, len(sizes)))
        found = sum(int(samples[index]["is_random"]) for index in range(samples.samples_per_epoch))
        assert abs(found / samples.samples_per_epoch - samples.share_of_random) < 0.15
        said = "".join(capfd.readouterr())
        assert (warning in said) if warning else "warning" not in said


FIXED: dict[str, Any] = {
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
