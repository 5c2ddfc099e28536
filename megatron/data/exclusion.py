"""``--exclude``: documents whose tokens have no loss and that no other document attends to.

The list does not change the samples or their order, so it is not part of a fingerprint. ``GPTDataset`` replaces the
tokens of the listed documents by padding, and ``gpt2_fields`` masks their loss and separates them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.blend_paths import short_names
from megatron.errors import DataError

FLAG = "--exclude"
_IDS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Exclusion:
    """Excluded documents by corpus.

    Args:
        path: the list's file, for messages.
        ranges: (corpus or "" for the only corpus, first document, last document, line number) in file order.
    """

    path: str
    ranges: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def read(cls, path: str) -> Exclusion:
        """Read a list with one entry per line: "[CORPUS] ID" or "[CORPUS] FIRST-LAST".

        "#" at the start of a line or after a space starts a comment.

        Ids count a token file's documents, or the conversations of an --sft file, from 0. CORPUS is the path in the
        data flags, or its last components.

        Raises:
            DataError: the file cannot be read, or a line has another form.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{FLAG} must name a readable text file, got {path}: {error}. Correct the path") from error
        ranges = []
        for line_number, line in enumerate(lines, 1):
            text = _COMMENT.sub("", line).strip()
            if not text:
                continue
            *corpus_words, ids = text.rsplit(maxsplit=1)
            match = _IDS.fullmatch(ids)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise DataError(
                    f"{FLAG} {path}, line {line_number}: must be a document or a range of documents, with a corpus "
                    f"before it if there are several, such as 17, 20-29 or data/web 17; got {text!r}"
                )
            ranges.append(("".join(corpus_words), int(match[1]), int(match[2] or match[1]), line_number))
        return cls(path, tuple(ranges))

    def by_prefix(self, prefixes: Sequence[str], num_documents: Sequence[int]) -> dict[str, np.ndarray]:
        """Return each corpus's excluded documents: int64, ascending.

        Args:
            prefixes: the corpora of all splits.
            num_documents: documents in each corpus.

        Raises:
            DataError: an entry names no corpus or document of the run.
        """
        prefix_of = dict(zip(prefixes, prefixes, strict=True)) | dict(zip(short_names(prefixes), prefixes, strict=True))
        if len(prefixes) == 1:
            prefix_of[""] = prefixes[0]
        counts = dict(zip(prefixes, num_documents, strict=True))
        ids: dict[str, list[np.ndarray]] = {prefix: [np.zeros(0, np.int64)] for prefix in prefixes}
        for corpus, first, last, line_number in self.ranges:
            prefix = prefix_of.get(corpus)
            if prefix is None:
                raise DataError(
                    f"{FLAG} {self.path}, line {line_number}: must name one of the corpora {', '.join(prefixes)}, got "
                    f"{corpus or 'none'}. Write CORPUS ID"
                )
            count = counts[prefix]
            if last >= count:
                raise DataError(
                    f"{FLAG} {self.path}, line {line_number}: {prefix} has the documents 0 to {count - 1}, got {last}"
                )
            ids[prefix].append(np.arange(first, last + 1))
        return {prefix: np.unique(np.concatenate(arrays)) for prefix, arrays in ids.items()}


def digest_of(excluded: Sequence[np.ndarray]) -> str:
    """Compute a short digest of the excluded documents of all corpora; independent of comments and the line order."""
    digest = hashlib.sha256()
    for documents in excluded:
        digest.update(f"{len(documents)}:".encode() + documents.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
