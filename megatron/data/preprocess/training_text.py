"""The text that a vocabulary is trained on: a stream of documents, of which a few are kept apart to measure it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from megatron.data.preprocess.records import BadRecord
from megatron.data.preprocess.sample import Drawn
from megatron.errors import DataError

HELD_OUT_STEP = 1 << 14
_MOST_KEPT_BYTES = 1 << 24
_BAD_SHOWN = 20


class TrainingText:
    """The documents of ``drawn`` without those that are kept apart; can be gone through once.

    A document is kept apart whenever those of its group are 16 kB behind their share of the bytes so far, up to 16 MB
    in all. So they lie at even distances and are neither longer nor shorter than others; a small text gives none.

    Args:
        group_of: names the group of a document by the file that it is from.
        max_bad_lines: so many bad records are passed over.

    Raises:
        DataError: while it is gone through, when more records are bad, or when there is no document at all.
    """

    def __init__(
        self, drawn: Iterable[Drawn], group_of: Callable[[str], str], held_out_share: float, max_bad_lines: int
    ) -> None:
        self._drawn, self._group_of = drawn, group_of
        self._share, self._max_bad_lines = held_out_share, max_bad_lines
        self._seen: dict[str, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)
        self.held_out: dict[str, list[str]] = {}
        """The documents kept apart, by group."""
        self.bad: list[BadRecord] = []
        """The first bad records."""
        self.num_documents = self.num_bytes = self.num_bad = 0

    def __iter__(self) -> Iterator[str]:
        for path, text, _ in self._drawn:
            if isinstance(text, BadRecord):
                self._count_bad(text)
            elif not self._hold_out(self._group_of(path), text):
                yield text
        if not self.num_documents:
            raise DataError(f"there must be documents to train on, got none ({self.num_bad} bad); check --input")

    def _hold_out(self, group: str, text: str) -> bool:
        size = len(text.encode())
        self.num_documents += 1
        self.num_bytes += size
        self._seen[group] += size
        is_due = self._share * self._seen[group] - self._held[group] >= HELD_OUT_STEP
        if not is_due or sum(self._held.values()) + size > _MOST_KEPT_BYTES:
            return False
        self._held[group] += size
        self.held_out.setdefault(group, []).append(text)
        return True

    def _count_bad(self, bad: BadRecord) -> None:
        self.num_bad += 1
        self.bad += [bad][: _BAD_SHOWN - len(self.bad)]
        if self.num_bad > self._max_bad_lines:
            shown = "\n".join(f"  {record}" for record in self.bad)
            raise DataError(
                f"at most {self._max_bad_lines} bad lines are allowed (--max-bad-lines), got {self.num_bad} so far:\n"
                f"{shown}\nCorrect them, or allow more; bad lines are left out."
            )
