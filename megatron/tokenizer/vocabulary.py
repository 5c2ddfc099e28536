"""Vocabularies of one token a line, or of one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.errors import DataError


def read_vocabulary(path: Path, needed: str) -> dict[str, int]:
    """Return the ids by token: the line number from 0 on, or the number that the JSON file gives.

    Only ``\\n`` and ``\\r\\n`` end a line, spaces around a token are dropped, and of equal lines the last counts, as in
    the programs that these files were made for.

    Raises:
        DataError: the file cannot be read, is no such list, or does not have the token ``needed``.
    """
    try:
        with open(path, encoding="utf-8") as file:
            vocabulary = (
                json.load(file) if path.suffix == ".json" else {line.strip(): at for at, line in enumerate(file)}
            )
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be a list of tokens in UTF-8, one a line; reading it failed: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(token) is int for token in vocabulary.values()):
        raise DataError(f"{path} must give a number for each token, as {{{json.dumps(needed)}: 0}}")
    if needed not in vocabulary:
        raise DataError(
            f"{path} must have the token {needed}, one of {len(vocabulary)} lines; it has none. Is it a vocabulary?"
        )
    return vocabulary
