"""Excluded documents: the list, the samples, and the model's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data import BlendPaths, GPTDataset, build_train_valid_test, gpt2_fields
from megatron.data.exclusion import Exclusion, digest_of
from megatron.errors import DataError
from tests.helpers.token_data import write_documents

LENGTHS = [7, 30, 5, 25, 2, 9]


def write_list(folder: Path, text: str) -> str:
    (folder / "ids.txt").write_text(text)
    return str(folder / "ids.txt")


def test_list_has_documents_and_ranges_by_corpus(tmp_path: Path) -> None:
    path = write_list(tmp_path, "# removed on request\nweb 3\n\nx/books 0-2  # a range\nweb 1\n")
    excluded = Exclusion.read(path).by_prefix(["x/web", "x/books"], [9, 9])
    assert {prefix: ids.tolist() for prefix, ids in excluded.items()} == {"x/web": [1, 3], "x/books": [0, 1, 2]}
    assert Exclusion.read(write_list(tmp_path, "5\n4\n")).by_prefix(["a"], [6])["a"].tolist() == [4, 5]


def test_list_of_other_editors_and_names(tmp_path: Path) -> None:
    """A byte order mark, CRLF, tabs, and a corpus whose name contains "#" or a space."""
    (tmp_path / "ids.txt").write_bytes(b"\xef\xbb\xbfc#\t1\r\nmy web  2#not\r\n")
    with pytest.raises(DataError, match="line 2: must be a document"):
        Exclusion.read(str(tmp_path / "ids.txt"))
    path = write_list(tmp_path, "\ufeffc#\t1\nmy web  2 # note\n# c# 5\n")
    excluded = Exclusion.read(path).by_prefix(["c#", "my web"], [9, 9])
    assert {prefix: ids.tolist() for prefix, ids in excluded.items()} == {"c#": [1], "my web": [2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nx\n", "line 2: must be a document or a range"),
        ("5-3\n", "line 1: must be a document or a range"),
        ("-1\n", "line 1: must be a document or a range"),
        ("9\n", "line 1: a has the documents 0 to 8, got 9"),
        ("0-999999999999999999\n", "line 1: a has the documents 0 to 8, got 999999999999999999"),
        ("9" * 30 + "\n", "line 1: must be a document or a range"),
        ("٣\n", "line 1: must be a document or a range"),
        ("b 1\n", "line 1: must name one of the corpora a, got b"),
    ],
)
def test_invalid_entries_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        Exclusion.read(write_list(tmp_path, text)).by_prefix(["a"], [9])


def test_digest_depends_on_documents_only(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return digest_of(list(Exclusion.read(write_list(tmp_path, text)).by_prefix(["a"], [9]).values()))

    assert digest("1\n2\n# c\n") == digest("1-2") != digest("1-3")
    assert digest_of([np.array([1]), np.array([2])]) != digest_of([np.array([1, 2]), np.array([], np.int64)])


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": "best-fit"}, {"megatron_samples": 30}, {"megatron_samples": 30, "has_extra_token": False}],
    ids=["concat", "best-fit", "megatron", "megatron without extra token"],
)
def test_only_tokens_of_excluded_documents_change(options: dict[str, Any], tmp_path: Path) -> None:
    token_file = write_documents(tmp_path / "a", LENGTHS)
    plain, changed = (GPTDataset(token_file, documents=(0, 6), seq_length=8, seed=3, **options) for _ in range(2))
    changed.excluded = np.array([1, 4])
    excluded_tokens = {token for document in (1, 4) for token in token_file.read(document).tolist()}
    num_excluded = 0
    for index in range(30):
        before, after = plain[index], changed[index]
        assert isinstance(after, dict)
        before = before if isinstance(before, dict) else {"text": before}
        is_excluded = np.isin(before["text"], list(excluded_tokens))
        assert (after["excluded"] == is_excluded).all() and after["excluded"].dtype == np.int32
        assert (after["text"] == np.where(is_excluded, 0, before["text"])).all()
        assert all((after[key] == before[key]).all() for key in before if key != "text")
        num_excluded += int(is_excluded.sum())
    assert num_excluded > 20 and plain.fingerprint == changed.fingerprint


def to_rows(fields: dict[str, Any]) -> dict[str, list[int]]:
    return {name: value[0].int().tolist() for name, value in fields.items() if value is not None}


def test_excluded_document_has_no_loss_and_its_own_segment() -> None:
    """Documents 1 2 9, (excluded) 0 0 0, 5 6 9, 7; 9 ends documents."""
    tokens = torch.tensor([[1, 2, 9, 0, 0, 0, 5, 6, 9, 7]])
    excluded = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32)
    fields = to_rows(gpt2_fields(tokens, excluded=excluded, eod_id=9))
    assert fields["loss_mask"] == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert fields["segment_ids"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert fields["position_ids"] == list(range(9))
    reset = to_rows(
        gpt2_fields(tokens, excluded=excluded, eod_id=9, reset_position_ids=True, reset_attention_mask=True)
    )
    assert reset["segment_ids"] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and reset["position_ids"] == [0, 1, 2] * 3
    unchanged = to_rows(gpt2_fields(tokens, excluded=torch.zeros_like(excluded), eod_id=9))
    assert unchanged["loss_mask"] == [1] * 9 and unchanged["segment_ids"] == [0] * 9


def test_excluded_packed_document_has_no_loss() -> None:
    tokens = torch.tensor([[1, 2, 0, 0, 5, 6, 0]])
    segments = torch.tensor([[0, 0, 1, 1, 2, 2, -1]], dtype=torch.int32)
    excluded = torch.tensor([[0, 0, 1, 1, 0, 0, 0]], dtype=torch.int32)
    fields = to_rows(gpt2_fields(tokens, segments=segments, excluded=excluded))
    assert fields["loss_mask"] == [1, 0, 0, 0, 1, 0] and fields["segment_ids"] == [0, 0, 1, 1, 2, 2]


def test_built_data_have_list_without_new_fingerprint(tmp_path: Path) -> None:
    for name, length in (("a", 30), ("b", 40)):
        write_documents(tmp_path / name, [length] * 9)
    paths = {"data_path": f"0.7 {tmp_path / 'a'} 0.3 {tmp_path / 'b'}", "split": "1"}
    options: Any = {"seq_length": 8, "seed": 1, "vocab_size": 50_000, "needed": (True, False, False)}
    plain, _, _ = build_train_valid_test(BlendPaths(**paths), **options)
    excluded, _, _ = build_train_valid_test(BlendPaths(**paths, exclude=write_list(tmp_path, "b 2\n")), **options)
    assert plain is not None and excluded is not None
    assert plain.fingerprint == excluded.fingerprint and plain.exclusion is None and excluded.exclusion
    counts = {name: sum(dataset[i]["excluded"].sum() for i in range(35)) for name, dataset in excluded.parts.items()}
    assert counts["a"] == 0 < counts["b"]
