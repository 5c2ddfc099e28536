"""BPE by ``gigatoken``, once it has shown on texts of the corpus that its ids are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron import tokenizer as tokenizers
from megatron.data.preprocess.documents import parse
from megatron.data.preprocess.records import STDIN, BadRecord, Unit
from megatron.data.preprocess.units import read_unit
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

_PLACES = 16
_CHARS_AT_EACH = 1 << 15


def with_gigatoken(tokenizer: Tokenizer, units: Sequence[Unit], keys: Sequence[str]) -> Tokenizer:
    """Return ``tokenizer`` made faster, or as it is with a warning where an id differs.

    Raises:
        DataError: gigatoken is not installed, the tokenizer is no BPE, or the corpus comes from standard input, of
            which no sample can be taken.
    """
    if any(unit.path == STDIN for unit in units):
        raise DataError("--gigatoken looks at a sample of the corpus first, which - (standard input) cannot give")
    return tokenizers.with_gigatoken(tokenizer, sample(units, keys), is_required=True)


def sample(units: Sequence[Unit], keys: Sequence[str]) -> list[str]:
    """Return texts from the beginnings of up to 16 units, spread evenly, 32,768 characters or one text of each."""
    found: list[str] = []
    for number in range(min(_PLACES, len(units))):
        num_chars = 0
        for text in _texts(units[number * len(units) // min(_PLACES, len(units))], keys):
            found.append(text[:_CHARS_AT_EACH])
            num_chars += len(text)
            if num_chars >= _CHARS_AT_EACH:
                break
    return found


def _texts(unit: Unit, keys: Sequence[str]) -> Iterator[str]:
    for record in read_unit(unit, keys):
        found = parse(record, keys if unit.format in ("jsonl", "parquet") else None)
        yield from () if isinstance(found, BadRecord) else found
