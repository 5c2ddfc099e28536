"""Which tokens the model sees."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, their split and the tokenizer that wrote them."""

    data_path: str | None = option(None, "token files: the path without .bin and .idx")
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
    reset_position_ids: bool = option(False, "count positions from 0 after each end of document")
    reset_attention_mask: bool = option(False, "no attention across the end of a document")
    eod_mask_loss: bool = option(False, "no loss on the end-of-document token")

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
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            shares = []
        good = len(shares) == 3 and all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
        if not good:
            yield f'--split must be three numbers of at least 0, like "949,50,1", got {self.split!r}'
