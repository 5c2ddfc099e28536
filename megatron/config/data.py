"""Which tokens the model sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megatron import spans
from megatron.config.option import option

OWN_DATA = "none"
"""As --data-path: the script brings its own data, and no file is looked for."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, their split and the tokenizer that wrote them."""

    data_path: str | None = option(
        None, "token files: the path without .bin and .idx; none: the script brings its own data"
    )
    split: str = option("949,50,1", "shares of documents for training, validation and test")
    data_impl: str = option("mmap", "kind of token file", choices=("mmap",))
    tokenizer_type: str | None = option(
        None,
        "kind of tokenizer",
        choices=("TokenizersJSON", "GPT2BPETokenizer", "SentencePiece"),
        shown_default="by the files that are given",
    )
    vocab_file: str | None = option(None, "vocabulary of the tokenizer")
    merge_file: str | None = option(None, "merges of a GPT-2 BPE tokenizer")
    tokenizer_path: str | None = option(
        None, "a tokenizers JSON file or a SentencePiece .model", aliases=("--tokenizer-model",)
    )
    num_workers: int = option(
        0, "processes that read ahead on each replica; 0: read in the training process", minimum=0
    )
    reset_position_ids: bool = option(
        False,
        "count positions from 0 after each end of document",
        family="gpt2",
        elsewhere="T5 keeps documents apart by --reset-attention-mask alone; use that",
    )
    reset_attention_mask: bool = option(False, "no attention across the end of a document")
    eod_mask_loss: bool = option(
        False,
        "no loss on the end-of-document token",
        family="gpt2",
        elsewhere="T5 learns the one end of its targets, and no document's end but those in masked spans; leave it out",
    )

    def problems(self) -> Iterator[str]:
        """Yield what cannot be: a bad split, a file that is not there."""
        yield from self._split_problems()
        for flag, path in (
            ("--vocab-file", self.vocab_file),
            ("--merge-file", self.merge_file),
            ("--tokenizer-path", self.tokenizer_path),
        ):
            if path is not None and not os.access(path, os.R_OK):
                yield f"{flag} must name a file that can be read, got {path} (looked in {Path.cwd()}). Correct the path"

    def _split_problems(self) -> Iterator[str]:
        try:
            shares = [Fraction(part.strip()) for part in self.split.replace("/", ",").split(",")]
        except (ValueError, ZeroDivisionError):
            shares = []
        if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) == 0:
            rule = "must be one to three weights, not negative and not all 0, such as 949,50,1"
            yield f"--split {rule}; got {self.split!r}"

    @property
    def reads_pairs(self) -> bool:
        """Whether CPM's three files are there and no token file: then T5 masks nothing itself."""
        return self.data_path is not None and spans.is_set(self.data_path)

    def missing_files(self, family: str = "gpt2") -> Iterator[str]:
        """Yield the token files of --data-path that are not there; a path that itself exists is the script's own.

        With several nodes nothing is looked for: a node whose ranks read no data need not have the files.
        """
        path = self.data_path
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            return
        if path is None or path == OWN_DATA or os.path.exists(path):
            return
        parts = spans.SET_SUFFIXES if family == "t5" and self.reads_pairs else ("",)
        names = [path + part + suffix for part in parts for suffix in (".idx", ".bin")]
        missing = [name for name in names if not os.access(name, os.R_OK)]
        if missing:
            yield (
                f"--data-path must name token files that can be read, got --data-path {path}, without "
                f"{' and '.join(missing)} (looked in {Path.cwd()}). Correct the path, or make them with "
                "tools/preprocess_data.py"
            )
