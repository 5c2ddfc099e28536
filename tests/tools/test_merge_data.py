"""Merging gives the bytes that preprocessing the texts together gives, and refuses what does not belong together."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest

from megatron import tokenizer
from megatron.data import IndexedDataset, preprocess
from tests.helpers import small_corpora
from tests.helpers.token_data import write_documents, write_megatron_files
from tools import merge_data

SUFFIXES = (".bin", ".idx", ".meta.json")


def preprocess_texts(folder: Path, name: str, texts: list[str]) -> Path:
    """Return the prefix of what the real job makes of these texts."""
    corpus = folder / f"{name}.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make = partial(tokenizer.build, tokenizer_path=folder / "t.json")
    preprocess.run(preprocess.Job(inputs=[corpus], output_prefix=str(folder / name), make_tokenizer=make))
    return folder / name


def run_merge(*prefixes: Path, out: Path) -> int:
    return merge_data.main(["--input", *map(str, prefixes), "--output-prefix", str(out)])


def test_merged_halves_equal_joint_preprocessing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(merge_data, "BLOCK_SIZE", 2)
    small_corpora.make_tokenizer(tmp_path)
    texts = small_corpora.TEXTS * 2
    halves = [preprocess_texts(tmp_path, "a", texts[:5]), preprocess_texts(tmp_path, "b", texts[5:])]
    expected = preprocess_texts(tmp_path, "whole", texts)
    assert run_merge(*halves, out=tmp_path / "new" / "c") == 0
    for suffix in SUFFIXES:
        assert Path(f"{tmp_path}/new/c{suffix}").read_bytes() == Path(f"{expected}{suffix}").read_bytes(), suffix


def test_megatron_files_are_merged_without_sidecar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_megatron_files(tmp_path / "a", [2, 0, 3], [0, 2, 2, 3])  # documents 0 1, none, 2 3 4
    write_documents(tmp_path / "b", [2])
    write_documents(tmp_path / "c", [1])  # an older output with a sidecar
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 0
    file = IndexedDataset(tmp_path / "c")
    assert [file.read(idx).tolist() for idx in range(file.num_documents)] == [[0, 1], [2, 3, 4], [1, 2]]
    assert file.sidecar is None and not (tmp_path / "c.meta.json").exists()
    assert "a has no .meta.json" in capfd.readouterr().err


def test_merge_drops_eod_missing_in_some_inputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a", [3], eod_id=7)
    write_documents(tmp_path / "b", [2])
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 0
    sidecar = IndexedDataset(tmp_path / "c").sidecar
    assert sidecar is not None and not sidecar.has_eod and sidecar.eod_id is None and sidecar.max_token_id == 7
    assert "so the output records none" in capfd.readouterr().err


def test_merge_rejects_different_eod_ids(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a", [3], eod_id=7)
    write_documents(tmp_path / "b", [2], eod_id=8)
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 2
    assert re.search("the id 7 in .*a and the id 8 in .*b", capfd.readouterr().err)


def test_merge_accepts_old_tokenizer_identity(tmp_path: Path) -> None:
    for name, identity in (("a", "f" * 64), ("b", f"{'1' * 64}.{'f' * 64}")):
        sidecar = write_documents(tmp_path / name, [3]).sidecar
        assert sidecar is not None
        modified = dataclasses.replace(sidecar, tokenizer=identity)
        (tmp_path / f"{name}.meta.json").write_bytes(modified.to_json())
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 0


def test_merge_rejects_different_tokenizers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a", [3])
    small_corpora.write_token_files(
        tmp_path / "b", small_corpora.TEXTS, vocabulary := small_corpora.make_tokenizer(tmp_path)
    )
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 2
    output = capfd.readouterr().err
    assert "identity t of 50000" in output and vocabulary.identity in output and not (tmp_path / "c.bin").exists()


@pytest.mark.parametrize(
    "other, expected", [("i32", "uint16 in .* int32 in"), ("a", "must differ from every --input"), ("none", "none.idx")]
)
def test_invalid_inputs_exit_with_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], other: str, expected: str
) -> None:
    write_documents(tmp_path / "a", [3])
    write_documents(tmp_path / "i32", [3], vocab_size=100_000)
    before = (tmp_path / "a.bin").read_bytes()
    assert run_merge(tmp_path / "a", tmp_path / other, out=tmp_path / ("a" if other == "a" else "c")) == 2
    assert (tmp_path / "a.bin").read_bytes() == before
    assert re.search(expected, capfd.readouterr().err)


def test_merge_rejects_input_or_unnamed_output(tmp_path: Path, capfd, monkeypatch) -> None:
    write_documents(tmp_path / "a", [3])
    write_documents(tmp_path / "b", [4])
    (tmp_path / "c.bin").symlink_to(tmp_path / "b.bin")
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c") == 2
    assert "must differ from every --input" in capfd.readouterr().err and (tmp_path / "c.bin").is_symlink()
    assert merge_data.main(["--input", f"{tmp_path}/a", "--output-prefix", f"{tmp_path}/k/"]) == 2
    assert "must end with a name" in capfd.readouterr().err and not (tmp_path / "k").exists()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_data, "IndexedDatasetBuilder", interrupt)
    assert run_merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "d") == 130
    assert capfd.readouterr().err.count("\n") == 1
