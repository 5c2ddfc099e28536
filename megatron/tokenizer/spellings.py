"""Text that spells a control token: where it does, and how to cut it so that no part does."""

from __future__ import annotations

import os
import re
from collections.abc import Collection


class Spellings:
    """The spellings of some control tokens.

    Args:
        names: of two characters or more; a name of one character cannot be cut.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(sorted(names, key=lambda name: (-len(name), name)))
        any_name = "|".join(map(re.escape, self.names))
        self._common_start = os.path.commonprefix(self.names)
        self._any = re.compile(any_name)
        self._each_start = re.compile(f"(?={any_name})")

    def __bool__(self) -> bool:
        return bool(self.names)

    def is_in(self, text: str) -> bool:
        """Whether ``text`` spells a control token."""
        return bool(self.names) and self._common_start in text and self._any.search(text) is not None

    def cut(self, text: str) -> list[str]:
        """Return ``text`` cut behind the first character of each spelling, those that overlap too."""
        if not self.is_in(text):
            return [text]
        cuts = [0, *(found.start() + 1 for found in self._each_start.finditer(text)), len(text)]
        return [text[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
