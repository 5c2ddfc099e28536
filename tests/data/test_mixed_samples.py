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
ONE = (True, False, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus a holds tokens below 1000, b from 1000 on, c from 2000 on."""
    folder = tmp_path_factory.mktemp("mixed")
    for number, name in enumerate("abc"):
        write_from(folder / name, 1000 * number + 1, [10 + number] * (10 + 10 * number))
    return folder


def write_from(prefix: Path, first: int, sizes: list[int], **settings: Any) -> None:
    with IndexedDatasetBuilder(prefix, **{"vocab_size": 5000, "tokenizer": "t", "eod_id": None, **settings}) as writer:
        for size in sizes:
            writer.add(np.arange(first, first + size))
            first += size


def mixture(folder: Path, text: str) -> str:
    """Return weights and paths out of "0.7 a 0.3 b"."""
    return " ".join(word if number % 2 == 0 else str(folder / word) for number, word in enumerate(text.split()))


def build(folder: Path, text: str, **changed: Any) -> Any:
    return test_build.build(folder, **{**FLAGS, "data_path": mixture(folder, text), **changed})


def build_t5(folder: Path, text: str, **changed: Any) -> Any:
    return test_build_t5.build(folder, **{"data_path": mixture(folder, text), "tokens": TOKENS, **changed})


def tokens_of(samples: Any, count: int) -> list[list[int]]:
    return [samples[index].tolist() for index in range(count)]


def test_each_sample_is_the_next_one_of_its_corpus(folder: Path) -> None:
    train, valid, test = build(folder, "0.7 a 0.3 b")
    assert list(train.parts) == list(valid.parts) == list(test.parts) == ["a", "b"]
    read = {"a": 0, "b": 0}
    for index in range(40):
        sample = train[index].tolist()
        name = "a" if sample[0] < 1000 else "b"
        assert sample == train.parts[name][read[name]].tolist()
        read[name] += 1
    assert read == train.order.cursors(40) == {"a": 28, "b": 12}
    epoch = {name: part.samples_per_epoch for name, part in train.parts.items()}
    assert train.order.epochs(40) == {"a": 28 / epoch["a"], "b": 12 / epoch["b"]}


def test_one_corpus_with_or_without_a_weight_is_read_as_ever(folder: Path) -> None:
    for text in (str(folder / "a"), mixture(folder, "3 a")):
        train, _, _ = test_build.build(folder, **{**FLAGS, "data_path": text})
        part = test_build.only(train)
        assert tokens_of(train, 50) == tokens_of(part, 50) and train.fingerprint == part.fingerprint


def test_splits_of_several_corpora_have_no_document_in_common(folder: Path) -> None:
    splits = build(folder, "1 a 1 b")
    tokens = [
        {t for part in split.parts.values() for i in range(part.samples_per_epoch) for t in part[i].tolist()}
        for split in splits
    ]
    assert not (tokens[0] & tokens[1] or tokens[1] & tokens[2] or tokens[0] & tokens[2])
    assert all(min(found) < 1000 < max(found) for found in tokens)


def test_paths_of_their_own_are_read_whole(folder: Path) -> None:
    paths = {"train_data_path": mixture(folder, "1 a 2 b"), "valid_data_path": str(folder / "a")}
    train, valid, test = build(folder, "1 a", data_path=None, needed=(True, True, False), **paths)
    assert [part.documents for part in train.parts.values()] == [(0, 10), (0, 20)] and test is None
    assert list(valid.parts) == ["a"] and test_build.only(valid).documents == (0, 10)
    with pytest.raises(DataError, match="--test-data-path must name token files"):
        build(folder, "1 a", data_path=None, **paths)


def test_a_schedule_changes_the_weights_after_so_many_tokens(folder: Path) -> None:
    train, valid, _ = build(folder, "1 a 0 b", mixture_schedule="60: 1 1; 90: 0 1")
    is_b = [train[index][0] > 1000 for index in range(30)]
    assert not any(is_b[:10]) and sum(is_b[10:15]) in (2, 3) and all(is_b[15:])
    assert valid.order.weights(10**6) == {"a": 1.0}, "evaluation keeps the weights of the path"


@pytest.mark.parametrize("d, m, num_workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 2, 2)])
def test_the_stream_is_the_same_in_every_layout_and_after_a_change(
    folder: Path, d: int, m: int, num_workers: int
) -> None:
    """Two steps of eight samples; from the third on with other weights and a corpus in addition."""
    old, _, _ = build(folder, "0.7 a 0.3 b", needed=ONE)
    train, _, _ = build(folder, "0.2 c 0.5 b 0.3 a", needed=ONE)
    order, _ = resumed_order(train.order, json.loads(json.dumps(old.order.state(16))), 16)
    train.use_order(order)
    rows = [row for samples, start in ((old, 0), (train, 16)) for row in read_rows(samples, start, d, m, num_workers)]
    assert rows == tokens_of(train, 32), "what lies behind is the same in the order that goes on"
    parts = {name: [row for row in rows if row[0] // 1000 == "abc".index(name)] for name in "abc"}
    for name, found in parts.items():
        assert found == tokens_of(train.parts[name], len(found))
    assert sum(map(len, parts.values())) == 32 and parts["c"]


def read_rows(samples: Any, start: int, d: int, m: int, num_workers: int) -> list[list[int]]:
    size = 8 // (d * m)
    settings = {"micro_batch_size": size, "num_micro_batches": m, "data_size": d, "num_workers": num_workers}
    replicas = [iter(DataLoader(samples, data_rank=rank, samples_consumed=start, **settings)) for rank in range(d)]
    batches = [next(replica)["text"] for _ in range(2) for replica in replicas for _ in range(m)]
    return [row.tolist() for batch in batches for row in batch]


def test_the_fingerprint_changes_with_all_that_changes_samples(folder: Path, tmp_path: Path) -> None:
    def fingerprints(text: str = "1 a 1 b", where: Path = folder, **changed: Any) -> dict[str, str]:
        train, _, _ = build(where, text, **{"needed": ONE, **changed})
        return train.order.state(0)["fingerprints"]

    same = fingerprints()
    assert all(IndexedDataset(folder / name).fingerprint in same[name] for name in same), (
        "so that what differs can be said"
    )
    for name in "ab":
        write_from(tmp_path / name, 1000 * "ab".index(name) + 1, [10 + "ab".index(name)] * (10 + 10 * "ab".index(name)))
    assert fingerprints("3 b 2 a") == same == fingerprints(where=tmp_path), "neither weights nor paths nor places count"
    others = [
        fingerprints(split="7,2,1"),
        fingerprints(seq_length=5),
        fingerprints(seed=2),
        fingerprints(packing="best-fit"),
        fingerprints(data_path=None, train_data_path=mixture(folder, "1 a 1 b")),
    ]
    for number, (first, settings) in enumerate([(2, {}), (1, {"tokenizer": "u"})]):
        for name in "ab":
            begin = 1000 * "ab".index(name) + first
            sizes = [10 + "ab".index(name)] * (10 + 10 * "ab".index(name))
            write_from(tmp_path / f"{number}{name}", begin, sizes, **settings)
        others.append(fingerprints(f"1 {number}a 1 {number}b", tmp_path, tokenizer_identity=None))
    for name, place in (("a", 0), ("b", 1)):
        seen = [same[name], *(list(other.values())[place] for other in others)]
        assert len(set(seen)) == len(seen)


def test_a_checkpoint_of_one_corpus_goes_on_with_two(folder: Path) -> None:
    alone, _, _ = build(folder, "1 a", needed=ONE)
    both, _, _ = build(folder, "1 b 1 a", needed=ONE)
    for state in (alone.order.state(20), alone.fingerprint):
        order, _ = resumed_order(both.order, state, 20)
        assert order.cursors(24) == {"b": 2, "a": 22}
    longer, _, _ = build(folder, "1 a", needed=ONE, seq_length=7)
    with pytest.raises(CheckpointError, match="another setting of samples has changed for the only corpus"):
        resumed_order(longer.order, alone.fingerprint, 20)


def test_errors_name_the_corpus(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="b has 220 tokens .* one sample of --seq-length 250 needs 251"):
        build(folder, "1 c 1 b", seq_length=250, split="1", needed=ONE)
    with pytest.raises(DataError, match="the valid split must .* got 1 of 10 documents with 10 tokens .*mixed0/a"):
        build(folder, "1 c 1 a", seq_length=12)
    with pytest.raises(DataError, match="nowhere.idx does not exist"):
        build(folder, "1 a 1 nowhere")
    with pytest.raises(DataError, match="a was built with a different tokenizer"):
        build(folder, "1 a 1 b", tokenizer_identity="u")
    write_from(tmp_path / "copy", 1, [10] * 10)
    with pytest.raises(DataError, match="got copy and a with the same fingerprint"):
        build(folder, f"1 {tmp_path}/copy 1 a")


def test_a_sample_that_cannot_be_read_is_named_in_run_and_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _, _ = build(folder, "1 a 1 b", needed=ONE)

    def fail(self: IndexedDataset, *_: Any) -> None:
        raise OSError("bad sector")

    monkeypatch.setattr(IndexedDataset, "read", fail)
    place = train.order.locate(8)
    name = list(train.parts)[place[0]]
    with pytest.raises(
        DataError,
        match=rf"sample 8 of the run is sample {place[1]} of corpus {name}: sample {place[1]} cannot be read: ",
    ) as raised:
        train[8]
    assert "document" in str(raised.value) and f"{name}.bin: OSError: bad sector" in str(raised.value)


@pytest.mark.parametrize("build_any", [build, build_t5])
def test_files_are_read_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch, build_any: Any) -> None:
    opened: list[str] = []

    class Noted(FileBinReader):
        def __init__(self, path: Path) -> None:
            opened.append(path.name)
            super().__init__(path)

    monkeypatch.setitem(READERS, "pread", Noted)
    mapped, read = (build_any(folder, "1 a 1 b", needed=ONE, data_impl=kind)[0] for kind in ("mmap", "pread"))
    assert {"a.bin", "b.bin"} <= set(opened)
    assert [str(mapped[index]) for index in range(9)] == [str(read[index]) for index in range(9)]


def test_fill_in_the_middle_reaches_the_samples_and_differs_between_corpora(folder: Path) -> None:
    fim = Fim(1.0, 0.0, prefix_id=4000, middle_id=4001, suffix_id=4002, eod_id=None)
    train, _, _ = build(folder, "1 a 1 b", needed=ONE, fim=fim, seq_length=12)
    alone = test_build.only(build(folder, "1 a", needed=ONE, fim=fim, seq_length=12)[0])
    found = [[part[index].tolist() for index in range(20)] for part in (train.parts["a"], alone)]
    assert found[0] != found[1] and all(4002 in sample for sample in found[0])


def test_a_corpus_without_weight_is_not_evaluated_and_stays_in_training(folder: Path) -> None:
    """Corpus a has no validation of 16 tokens; b has."""
    splits = build(folder, "0 a 1 b", seq_length=15, split="8,1,1")
    assert [list(split.parts) for split in splits] == [["a", "b"], ["b"], ["b"]]
    own = {f"{name}_data_path": mixture(folder, "1 b 0 nowhere") for name in ("valid", "test")}
    _, valid, test = build(folder, "", data_path=None, train_data_path=mixture(folder, "1 a 0 b"), **own)
    assert list(valid.parts) == list(test.parts) == ["b"]


def test_a_corpus_that_gets_company_says_that_it_is_cut_otherwise(folder: Path) -> None:
    fim = Fim(1.0, 0.0, prefix_id=4000, middle_id=4001, suffix_id=4002, eod_id=None)
    for make, settings, count in ((build_t5, {}, 1), (build, {"fim": fim}, 1), (build, {}, 0)):
        alone, both = (make(folder, text, needed=ONE, **settings)[0] for text in ("1 a", "1 a 0 b"))
        _, lines = resumed_order(both.order, alone.order.state(9), 9)
        assert len([line for line in lines if "a is one of several corpora now" in line]) == count


def test_an_order_of_other_corpora_is_refused(folder: Path) -> None:
    train, _, _ = build(folder, "1 a 1 b", needed=ONE)
    with pytest.raises(ValueError, match=r"the order must have the corpora \['a', 'b'\], got \['a', 'c'\]"):
        train.use_order(build(folder, "1 a 1 c", needed=ONE)[0].order)


def test_corpora_of_t5_do_not_share_their_draws(folder: Path, tmp_path: Path) -> None:
    """Both hold texts of the same lengths, so alone they are cut alike."""
    for number, name in enumerate("xy"):
        write_from(tmp_path / name, 1000 * number + 1, [30] * 8)
    both, _, _ = build_t5(tmp_path, "1 x 1 y", split="1", needed=ONE, enc_seq_length=30)
    alone = {
        name: test_build.only(build_t5(tmp_path, f"1 {name}", split="1", needed=ONE, enc_seq_length=30)[0])
        for name in "xy"
    }
    assert isinstance(both, BlendedDataset) and both.parts["x"].fingerprint == alone["x"].fingerprint

    def cuts(samples: Any) -> list[list[bool]]:
        return [(samples[index]["inputs"] >= 5000).tolist() for index in range(40)]

    assert cuts(alone["x"]) == cuts(alone["y"])
    assert len({str(cuts(samples)) for samples in (*both.parts.values(), alone["x"])}) == 3
    assert both[3]["inputs"].shape == (30,) and both.order.cursors(8) == {"x": 4, "y": 4}


def test_a_corpus_that_is_alone_in_a_split_is_cut_as_ever(folder: Path) -> None:
    paths = {"train_data_path": mixture(folder, "1 a 1 b"), "valid_data_path": str(folder / "a"), "data_path": None}
    train, valid, _ = build_t5(folder, "1 a", needed=(True, True, False), enc_seq_length=30, **paths)
    alone, _, _ = build_t5(folder, "1 a", split="1", needed=ONE, enc_seq_length=30)
    found = [[samples[i]["inputs"].tolist() for i in range(30)] for samples in (alone, valid, train.parts["a"])]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("saved", "now"),
    [("FILES", "IDS.FILES"), ("IDS.FILES", "IDS.COPY"), ("t", "IDS.FILES"), ("IDS.t", "IDS.FILES")],
    ids=["of an earlier version", "a copy of the tokenizer", "by the token file", "both"],
)
def test_the_same_tokenizer_by_another_name_continues_the_order(saved: str, now: str, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_from(tmp_path / name, 1000 * number + 1, [10] * 20, tokenizer="IDS.t" if "t" in saved else "")
    names = {"FILES": "f" * 64, "IDS": "1" * 64, "COPY": "c" * 64, "t": "0" * 64}
    for prefix in ("a", "b"):
        sidecar = dataset_metadata.read(tmp_path / f"{prefix}.meta.json")
        assert sidecar is not None
        known = ".".join(names[part] for part in sidecar.tokenizer.split(".") if part)
        (tmp_path / f"{prefix}.meta.json").write_bytes(dataclasses.replace(sidecar, tokenizer=known).to_json())
    before, after = (".".join(names[part] for part in text.split(".")) for text in (saved, now))
    order = build(tmp_path, "1 a 1 b", tokenizer_identity=before, needed=ONE)[0].order
    again = build(tmp_path, "1 a 1 b", tokenizer_identity=after, needed=ONE)[0].order
    resumed, lines = resumed_order(again, order.state(10), 10)
    assert resumed.cursors(10) == order.cursors(10) and not lines
