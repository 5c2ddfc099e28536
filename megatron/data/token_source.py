"""What samples are cut from: documents of tokens, and pieces of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class TokenSource(Protocol):
    """Documents of tokens: a ``TokenFile``, or what can stand in for one."""

    @property
    def prefix(self) -> str: ...

    @property
    def sizes(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class Piece(NamedTuple):
    """What a window holds of one document."""

    document: int
    offset: int
    length: int
