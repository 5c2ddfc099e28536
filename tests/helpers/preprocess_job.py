"""A small preprocessing job in its own folder, for tests."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import tokenizer
from megatron.data import IndexedDataset, preprocess
from megatron.data.preprocess import corpus
from megatron.tokenizer import Tokenizer, train

GOOD_TEXTS = [f"document {idx}\nsecond line 第{idx}行" for idx in range(60)]
END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".bin", ".idx", ".meta.json")


@functools.cache
def make_small_tokenizer() -> Tokenizer:
    """Return a BPE tokenizer with 300 tokens."""
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="vocabulary-")) / "t.json"
    path.write_bytes(train.train_bpe(GOOD_TEXTS, 300))
    try:
        result = tokenizer.build(tokenizer_path=path)
        assert result.identity, "read while the file is there"
        return result
    finally:
        path.unlink()
        path.parent.rmdir()


def json_lines(*texts: str) -> bytes:
    """Return JSON lines."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read_documents(
    paths: Sequence[Path | str],
    format: str | None = None,
    keys: Sequence[str] = ("text",),
    unit_bytes: int = sys.maxsize,
) -> list[str | preprocess.BadRecord]:
    """Return the documents of a corpus in order, including bad records."""
    units = preprocess.plan_units(paths, format, unit_bytes)
    return [text for unit in units for _, text in corpus.unit_documents(unit, keys)]


@dataclasses.dataclass
class Corpus:
    """A corpus ``c.jsonl`` and the output ``out`` of its preprocessing job, both in ``folder``."""

    folder: Path

    @property
    def prefix(self) -> Path:
        return self.folder / "out"

    def make_job(self, **overrides: Any) -> preprocess.Job:
        defaults = {
            "inputs": [self.folder / "c.jsonl"],
            "output_prefix": str(self.prefix),
            "make_tokenizer": make_small_tokenizer,
        }
        return preprocess.Job(**defaults | overrides)

    def write(self, content: bytes, name: str = "c.jsonl") -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def preprocess(self, content: bytes | None = None, **overrides: Any) -> preprocess.Summary:
        if content is not None:
            self.write(content)
        return preprocess.run(self.make_job(**overrides))

    def read_texts(self) -> list[str]:
        """Return the documents of the output."""
        file = IndexedDataset(self.prefix)
        return [make_small_tokenizer().decode(file.read(document).tolist()) for document in range(file.num_documents)]

    def read_output(self) -> tuple[bytes, ...]:
        return tuple(Path(f"{self.prefix}{suffix}").read_bytes() for suffix in SUFFIXES)

    def list_leftovers(self) -> list[str]:
        """Return the names of files in the folder other than the corpus and the complete output."""
        expected = {"c.jsonl", *(f"out{suffix}" for suffix in SUFFIXES)}
        return sorted(path.name for path in self.folder.iterdir() if path.name not in expected)
