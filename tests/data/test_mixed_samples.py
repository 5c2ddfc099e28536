"""Several corpora as one stream of samples: from files to batches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import (
    BlendedDataset,
    DataLoader,
    Fim,
    IndexedDataset,
    IndexedDatasetBuilder,
    dataset_metadata,
    resumed_order,
)
from megatron.data.file_io import READERS, FileBinReader
from megatron.errors import CheckpointError, DataError
from megatron.models.t5.data import T5Tokens
from tests.data import test_build
from tests.models.t5 import test_build_t5

TOKENS = T5Tokens.appended(5000, 12, 0)
FLAGS = {"split": "8,1,1", "seq_length": 6, "vocab_size": 5000}
TRAIN_ONLY = (True, False, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus a holds tokens below 1000, b from 1000 on, c from 2000 on."""
    folder = tmp_path_factory.mktemp("mixed")
    for corpus_idx, name in enumerate("abc"):
        write_consecutive(folder / name, 1000 * corpus_idx + 1, [10 + corpus_idx] * (10 + 10 * corpus_idx))
    return folder


def write_consecutive(prefix: Path, first: int, lengths: list[int], **settings: Any) -> None:
    with IndexedDatasetBuilder(prefix, **{"vocab_size": 5000, "tokenizer": "t", "eod_id": None, **settings}) as writer:
        for length in lengths:
            writer.add(np.arange(first, first + length))
            first += length


def blend_path(folder: Path, text: str) -> str:
    """Return weights and paths out of "0.7 a 0.3 b"."""
    return " ".join(word if word_idx % 2 == 0 else str(folder / word) for word_idx, word in enumerate(text.split()))


def build(folder: Path, text: str, **overrides: Any) -> Any:
    return test_build.build(folder, **{**FLAGS, "data_path": blend_path(folder, text), **overrides})


def build_t5(folder: Path, text: str, **overrides: Any) -> Any:
    return test_build_t5.build_splits(folder, **{"data_path": blend_path(folder, text), "tokens": TOKENS, **overrides})


def first_samples(samples: Any, num_samples: int) -> list[list[int]]:
    return [samples[index].tolist() for index in range(num_samples)]


def test_each_sample_is_next_one_of_its_corpus(folder: Path) -> None:
    train, valid, test = build(folder, "0.7 a 0.3 b")
    assert list(train.parts) == list(valid.parts) == list(test.parts) == ["a", "b"]
    num_read = {"a": 0, "b": 0}
    for index in range(40):
        sample = train[index].tolist()
        name = "a" if sample[0] < 1000 else "b"
        assert sample == train.parts[name][num_read[name]].tolist()
        num_read[name] += 1
    assert num_read == train.order.cursors(40) == {"a": 28, "b": 12}
    epoch = {name: dataset.samples_per_epoch for name, dataset in train.parts.items()}
    assert train.order.epochs(40) == {"a": 28 / epoch["a"], "b": 12 / epoch["b"]}


def test_single_corpus_ignores_weight(folder: Path) -> None:
    for text in (str(folder / "a"), blend_path(folder, "3 a")):
        train, _, _ = test_build.build(folder, **{**FLAGS, "data_path": text})
        dataset = test_build.single_corpus(train)
        assert first_samples(train, 50) == first_samples(dataset, 50) and train.fingerprint == dataset.fingerprint


def test_blended_splits_share_no_document(folder: Path) -> None:
    splits = build(folder, "1 a 1 b")
    tokens = [
        {
            token
            for dataset in split.parts.values()
            for idx in range(dataset.samples_per_epoch)
            for token in dataset[idx].tolist()
        }
        for split in splits
    ]
    assert not (tokens[0] & tokens[1] or tokens[1] & tokens[2] or tokens[0] & tokens[2])
    assert all(min(token_set) < 1000 < max(token_set) for token_set in tokens)


def test_separate_split_paths_use_all_documents(folder: Path) -> None:
    paths = {"train_data_path": blend_path(folder, "1 a 2 b"), "valid_data_path": str(folder / "a")}
    train, valid, test = build(folder, "1 a", data_path=None, needed=(True, True, False), **paths)
    assert [dataset.documents for dataset in train.parts.values()] == [(0, 10), (0, 20)] and test is None
    assert list(valid.parts) == ["a"] and test_build.single_corpus(valid).documents == (0, 10)
    with pytest.raises(DataError, match="--test-data-path must name token files"):
        build(folder, "1 a", data_path=None, **paths)


def test_mixture_schedule_changes_weights_after_given_tokens(folder: Path) -> None:
    train, valid, _ = build(folder, "1 a 0 b", mixture_schedule="60: 1 1; 90: 0 1")
    is_b = [train[index][0] > 1000 for index in range(30)]
    assert not any(is_b[:10]) and sum(is_b[10:15]) in (2, 3) and all(is_b[15:])
    assert valid.order.weights(10**6) == {"a": 1.0}, "evaluation keeps the weights of the path"


@pytest.mark.parametrize("data_size, num_micro_batches, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_sample_stream_is_layout_independent_and_survives_blend_change(
    folder: Path, data_size: int, num_micro_batches: int, num_workers: int
) -> None:
    """Two steps of eight samples; from the third on with other weights and a corpus in addition."""
    first_train, _, _ = build(folder, "0.7 a 0.3 b", needed=TRAIN_ONLY)
    train, _, _ = build(folder, "0.2 c 0.5 b 0.3 a", needed=TRAIN_ONLY)
    order, _ = resumed_order(train.order, json.loads(json.dumps(first_train.order.state(16))), 16)
    train.use_order(order)
    rows = [
        row
        for samples, start in ((first_train, 0), (train, 16))
        for row in read_rows(samples, start, data_size, num_micro_batches, num_workers)
    ]
    assert rows == first_samples(train, 32), "what lies behind is the same in the order that goes on"
    rows_by_corpus = {name: [row for row in rows if row[0] // 1000 == "abc".index(name)] for name in "abc"}
    for name, corpus_rows in rows_by_corpus.items():
        assert corpus_rows == first_samples(train.parts[name], len(corpus_rows))
    assert sum(map(len, rows_by_corpus.values())) == 32 and rows_by_corpus["c"]


def read_rows(samples: Any, start: int, data_size: int, num_micro_batches: int, num_workers: int) -> list[list[int]]:
    micro_batch_size = 8 // (data_size * num_micro_batches)
    settings = {
        "micro_batch_size": micro_batch_size,
        "num_micro_batches": num_micro_batches,
        "data_size": data_size,
        "num_workers": num_workers,
    }
    replicas = [
        iter(DataLoader(samples, data_rank=rank, samples_consumed=start, **settings)) for rank in range(data_size)
    ]
    batches = [next(replica)["text"] for _ in range(2) for replica in replicas for _ in range(num_micro_batches)]
    return [row.tolist() for batch in batches for row in batch]


def test_fingerprint_changes_with_every_sample_option(folder: Path, tmp_path: Path) -> None:
    def fingerprints(text: str = "1 a 1 b", corpus_dir: Path = folder, **overrides: Any) -> dict[str, str]:
        train, _, _ = build(corpus_dir, text, **{"needed": TRAIN_ONLY, **overrides})
        return train.order.state(0)["fingerprints"]

    reference = fingerprints()
    assert all(IndexedDataset(folder / name).fingerprint in reference[name] for name in reference), (
        "so that what differs can be said"
    )
    for name in "ab":
        write_consecutive(
            tmp_path / name, 1000 * "ab".index(name) + 1, [10 + "ab".index(name)] * (10 + 10 * "ab".index(name))
        )
    assert fingerprints("3 b 2 a") == reference == fingerprints(corpus_dir=tmp_path), (
        "neither weights nor paths nor places count"
    )
    changed_fingerprints = [
        fingerprints(split="7,2,1"),
        fingerprints(seq_length=5),
        fingerprints(seed=2),
        fingerprints(packing="best-fit"),
        fingerprints(data_path=None, train_data_path=blend_path(folder, "1 a 1 b")),
    ]
    for variant_idx, (first, settings) in enumerate([(2, {}), (1, {"tokenizer": "u"})]):
        for name in "ab":
            first_token = 1000 * "ab".index(name) + first
            lengths = [10 + "ab".index(name)] * (10 + 10 * "ab".index(name))
            write_consecutive(tmp_path / f"{variant_idx}{name}", first_token, lengths, **settings)
        changed_fingerprints.append(
            fingerprints(f"1 {variant_idx}a 1 {variant_idx}b", tmp_path, tokenizer_identity=None)
        )
    for name, corpus_idx in (("a", 0), ("b", 1)):
        values = [reference[name], *(list(changed.values())[corpus_idx] for changed in changed_fingerprints)]
        assert len(set(values)) == len(values)


def test_single_corpus_checkpoint_resumes_with_two(folder: Path) -> None:
    single, _, _ = build(folder, "1 a", needed=TRAIN_ONLY)
    both, _, _ = build(folder, "1 b 1 a", needed=TRAIN_ONLY)
    for state in (single.order.state(20), single.fingerprint):
        order, _ = resumed_order(both.order, state, 20)
        assert order.cursors(24) == {"b": 2, "a": 22}
    longer_sequences, _, _ = build(folder, "1 a", needed=TRAIN_ONLY, seq_length=7)
    with pytest.raises(CheckpointError, match="another setting of samples has changed for the only corpus"):
        resumed_order(longer_sequences.order, single.fingerprint, 20)


def test_errors_name_corpus(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="b has 220 tokens .* one sample of --seq-length 250 needs 251"):
        build(folder, "1 c 1 b", seq_length=250, split="1", needed=TRAIN_ONLY)
    with pytest.raises(DataError, match="the valid split must .* got 1 of 10 documents with 10 tokens .*mixed0/a"):
        build(folder, "1 c 1 a", seq_length=12)
    with pytest.raises(DataError, match="nowhere.idx does not exist"):
        build(folder, "1 a 1 nowhere")
    with pytest.raises(DataError, match="a was built with a different tokenizer"):
        build(folder, "1 a 1 b", tokenizer_identity="u")
    write_consecutive(tmp_path / "copy", 1, [10] * 10)
    with pytest.raises(DataError, match="got copy and a with the same fingerprint"):
        build(folder, f"1 {tmp_path}/copy 1 a")


def test_unreadable_sample_is_named_in_run_and_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _, _ = build(folder, "1 a 1 b", needed=TRAIN_ONLY)

    def fail(self: IndexedDataset, *_: Any) -> None:
        raise OSError("bad sector")

    monkeypatch.setattr(IndexedDataset, "read", fail)
    location = train.order.locate(8)
    name = list(train.parts)[location[0]]
    with pytest.raises(
        DataError,
        match=rf"sample 8 of the run is sample {location[1]} of corpus {name}: sample {location[1]} cannot be read: ",
    ) as raised:
        train[8]
    assert "document" in str(raised.value) and f"{name}.bin: OSError: bad sector" in str(raised.value)


@pytest.mark.parametrize("build_any", [build, build_t5])
def test_data_impl_selects_file_reader(folder: Path, monkeypatch: pytest.MonkeyPatch, build_any: Any) -> None:
    opened: list[str] = []

    class RecordingReader(FileBinReader):
        def __init__(self, path: Path) -> None:
            opened.append(path.name)
            super().__init__(path)

    monkeypatch.setitem(READERS, "pread", RecordingReader)
    mmap_samples, pread_samples = (
        build_any(folder, "1 a 1 b", needed=TRAIN_ONLY, data_impl=data_impl)[0] for data_impl in ("mmap", "pread")
    )
    assert {"a.bin", "b.bin"} <= set(opened)
    assert [str(mmap_samples[index]) for index in range(9)] == [str(pread_samples[index]) for index in range(9)]


def test_fim_affects_samples_and_differs_between_corpora(folder: Path) -> None:
    fim = Fim(1.0, 0.0, prefix_id=4000, middle_id=4001, suffix_id=4002, eod_id=None)
    train, _, _ = build(folder, "1 a 1 b", needed=TRAIN_ONLY, fim=fim, seq_length=12)
    single = test_build.single_corpus(build(folder, "1 a", needed=TRAIN_ONLY, fim=fim, seq_length=12)[0])
    sample_rows = [[dataset[index].tolist() for index in range(20)] for dataset in (train.parts["a"], single)]
    assert sample_rows[0] != sample_rows[1] and all(4002 in sample for sample in sample_rows[0])


def test_zero_weight_corpus_is_not_evaluated_but_stays_in_training(folder: Path) -> None:
    """Corpus a has no validation of 16 tokens; b has."""
    splits = build(folder, "0 a 1 b", seq_length=15, split="8,1,1")
    assert [list(split.parts) for split in splits] == [["a", "b"], ["b"], ["b"]]
    split_paths = {f"{name}_data_path": blend_path(folder, "1 b 0 nowhere") for name in ("valid", "test")}
    _, valid, test = build(folder, "", data_path=None, train_data_path=blend_path(folder, "1 a 0 b"), **split_paths)
    assert list(valid.parts) == list(test.parts) == ["b"]


def test_adding_corpus_warns_about_changed_random_spans(folder: Path) -> None:
    fim = Fim(1.0, 0.0, prefix_id=4000, middle_id=4001, suffix_id=4002, eod_id=None)
    for builder, settings, num_warnings in ((build_t5, {}, 1), (build, {"fim": fim}, 1), (build, {}, 0)):
        single, both = (builder(folder, text, needed=TRAIN_ONLY, **settings)[0] for text in ("1 a", "1 a 0 b"))
        _, lines = resumed_order(both.order, single.order.state(9), 9)
        assert len([line for line in lines if "a is one of several corpora now" in line]) == num_warnings


def test_order_of_other_corpora_is_rejected(folder: Path) -> None:
    train, _, _ = build(folder, "1 a 1 b", needed=TRAIN_ONLY)
    with pytest.raises(ValueError, match=r"the order must have the corpora \['a', 'b'\], got \['a', 'c'\]"):
        train.use_order(build(folder, "1 a 1 c", needed=TRAIN_ONLY)[0].order)


def test_t5_corpora_use_different_random_spans(folder: Path, tmp_path: Path) -> None:
    """Both hold texts of the same lengths, so alone they are cut alike."""
    for corpus_idx, name in enumerate("xy"):
        write_consecutive(tmp_path / name, 1000 * corpus_idx + 1, [30] * 8)
    both, _, _ = build_t5(tmp_path, "1 x 1 y", split="1", needed=TRAIN_ONLY, enc_seq_length=30)
    single = {
        name: test_build.single_corpus(
            build_t5(tmp_path, f"1 {name}", split="1", needed=TRAIN_ONLY, enc_seq_length=30)[0]
        )
        for name in "xy"
    }
    assert isinstance(both, BlendedDataset) and both.parts["x"].fingerprint == single["x"].fingerprint

    def sentinel_masks(samples: Any) -> list[list[bool]]:
        return [(samples[index]["inputs"] >= 5000).tolist() for index in range(40)]

    assert sentinel_masks(single["x"]) == sentinel_masks(single["y"])
    assert len({str(sentinel_masks(samples)) for samples in (*both.parts.values(), single["x"])}) == 3
    assert both[3]["inputs"].shape == (30,) and both.order.cursors(8) == {"x": 4, "y": 4}


def test_single_corpus_split_samples_like_single_corpus_run(folder: Path) -> None:
    paths = {"train_data_path": blend_path(folder, "1 a 1 b"), "valid_data_path": str(folder / "a"), "data_path": None}
    train, valid, _ = build_t5(folder, "1 a", needed=(True, True, False), enc_seq_length=30, **paths)
    single, _, _ = build_t5(folder, "1 a", split="1", needed=TRAIN_ONLY, enc_seq_length=30)
    inputs = [[samples[idx]["inputs"].tolist() for idx in range(30)] for samples in (single, valid, train.parts["a"])]
    assert inputs[0] == inputs[1] != inputs[2]


@pytest.mark.parametrize(
    ("saved_identity", "current_identity"),
    [("FILES", "IDS.FILES"), ("IDS.FILES", "IDS.COPY"), ("t", "IDS.FILES"), ("IDS.t", "IDS.FILES")],
    ids=["of an earlier version", "a copy of the tokenizer", "by the token file", "both"],
)
def test_tokenizer_identity_aliases_continue_order(saved_identity: str, current_identity: str, tmp_path: Path) -> None:
    for corpus_idx, name in enumerate("ab"):
        write_consecutive(
            tmp_path / name, 1000 * corpus_idx + 1, [10] * 20, tokenizer="IDS.t" if "t" in saved_identity else ""
        )
    names = {"FILES": "f" * 64, "IDS": "1" * 64, "COPY": "c" * 64, "t": "0" * 64}
    for prefix in ("a", "b"):
        sidecar = dataset_metadata.read(tmp_path / f"{prefix}.meta.json")
        assert sidecar is not None
        identity = ".".join(names[name] for name in sidecar.tokenizer.split(".") if name)
        (tmp_path / f"{prefix}.meta.json").write_bytes(dataclasses.replace(sidecar, tokenizer=identity).to_json())
    saved_names, current_names = (
        ".".join(names[name] for name in text.split(".")) for text in (saved_identity, current_identity)
    )
    order = build(tmp_path, "1 a 1 b", tokenizer_identity=saved_names, needed=TRAIN_ONLY)[0].order
    current_order = build(tmp_path, "1 a 1 b", tokenizer_identity=current_names, needed=TRAIN_ONLY)[0].order
    resumed, lines = resumed_order(current_order, order.state(10), 10)
    assert resumed.cursors(10) == order.cursors(10) and not lines
