"""CPM's sets of three files: texts whose spans were cut out once, when the files were built.

Each is a pair of token files, and document d of one belongs to document d of the others. V is the vocabulary's size.

| pair | a document holds |
|---|---|
| PREFIX_context | the text that stays, with the marker V + k in the place of its span k = 0, 1, ... |
| PREFIX_target | span after span: its marker V + k, then its tokens |
| PREFIX_target_offset | two numbers for each span: where it starts in the target, how long it is with its marker |

The tool that made them stored 16-bit numbers, so that places above 65,535 wrapped around. They follow from the
lengths, and are compared with what is stored as far as that has bits.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from megatron.config.data import SET_SUFFIXES
from megatron.data.cache import Cache
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

_DOCUMENTS_LOOKED_AT = 1000


class SpanFiles:
    """The three pairs of token files of one set.

    Args:
        vocab_size: V, of the tokenizer that the set was built with.
        reader, cache: as ``TokenFile``.

    Raises:
        DataError: a file is missing or damaged, the three do not belong together, or V is another.
    """

    def __init__(self, prefix: str, vocab_size: int, *, reader: str = "mmap", cache: Cache | None = None) -> None:
        self.prefix, self.vocab_size = prefix, vocab_size
        self._check_present()
        self.context, self.target, self.offsets = (
            TokenFile(prefix + suffix, reader=reader, cache=cache) for suffix in SET_SUFFIXES
        )
        self._check_documents()
        self._check_markers()
        self._check_ids()

    @property
    def fingerprint(self) -> str:
        """A short text that changes when one of the three files does."""
        prints = [file.fingerprint for file in (self.context, self.target, self.offsets)]
        return hashlib.sha256(":".join(prints).encode()).hexdigest()[:16]

    def read(self, document: int, first: int, count: int) -> np.ndarray:
        """Return spans ``first`` ... ``first + count - 1`` of a document, each behind its marker.

        Raises:
            DataError: they are not where the offsets say.
        """
        stored, lengths = self.offsets.read(document).astype(np.int64).reshape(-1, 2).T
        starts = np.cumsum(lengths) - lengths
        bits = 8 * self.offsets.dtype.itemsize
        if not first + count <= len(lengths) or ((starts - stored) % (1 << bits)).any():
            raise self._damaged(document, f"its {len(lengths)} spans do not lie one behind the other")
        start, stop = int(starts[first]), int(starts[first + count - 1] + lengths[first + count - 1])
        if stop > self.target.sizes[document]:
            raise self._damaged(document, f"its target has {self.target.sizes[document]} tokens, spans need {stop}")
        tokens = self.target.read(document, start, stop - start).astype(np.int64)
        markers = np.flatnonzero(tokens >= self.vocab_size)
        wanted = starts[first : first + count] - start
        if not np.array_equal(markers, wanted) or (tokens[markers] - self.vocab_size != first + np.arange(count)).any():
            raise self._damaged(document, f"spans {first} ... {first + count - 1} do not each start with their marker")
        return tokens

    def _damaged(self, document: int, what: str) -> DataError:
        return DataError(
            f"{self.prefix}: in document {document} of the set in three files, {what}. The files are damaged or belong "
            "to different sets: build all three again."
        )

    def _check_present(self) -> None:
        missing = [
            path
            for suffix in SET_SUFFIXES
            for path in (Path(self.prefix + suffix + ".idx"), Path(self.prefix + suffix + ".bin"))
            if not path.is_file()
        ]
        if missing:
            raise DataError(
                f"{missing[0]} does not exist; a set in three files is {', '.join(SET_SUFFIXES)}, each .bin and .idx. "
                f"Copy what is missing, or give ordinary token files {self.prefix}.bin and .idx."
            )

    def _check_documents(self) -> None:
        counts = [file.num_documents for file in (self.context, self.target, self.offsets)]
        if len(set(counts)) > 1:
            raise DataError(
                f"{self.prefix}: the three files of a set must hold as many documents each, got "
                f"{', '.join(f'{count} in {suffix}' for count, suffix in zip(counts, SET_SUFFIXES, strict=True))}. "
                "They belong to different sets, or one was cut short."
            )
        odd = np.flatnonzero(self.offsets.sizes % 2)
        if len(odd):
            raise self._damaged(int(odd[0]), f"the offsets are {self.offsets.sizes[odd[0]]} numbers, not pairs")

    def _check_markers(self) -> None:
        """The first span's marker is V itself: with another vocabulary, markers would be read as text."""
        for document in np.flatnonzero(self.offsets.sizes)[:_DOCUMENTS_LOOKED_AT]:
            found = self.target.read(int(document))[:1].tolist()
            if found != [self.vocab_size]:
                raise DataError(
                    f"{self.prefix}: targets must start with the marker {self.vocab_size}, the size of the vocabulary, "
                    f"got {found} in document {document}. Give the tokenizer that the set was built with."
                )

    def _check_ids(self) -> None:
        most = int(self.offsets.sizes.max(initial=0)) // 2
        beyond = self.vocab_size + most
        for file in (self.context, self.target):
            if beyond - 1 > np.iinfo(file.dtype).max:
                document = int(np.argmax(self.offsets.sizes))
                raise self._damaged(document, f"{file.dtype} cannot hold the markers of {most} spans")
            found = file.first_outside(beyond)
            if found is not None:
                document, offset, token = found
                raise self._damaged(document, f"token {offset} of {file.token_path.name} is {token}, above all markers")
