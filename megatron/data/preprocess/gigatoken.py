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
_SHARE = 128
_LEAST_CHARS, _MOST_CHARS = 1 << 12, 1 << 15  # at each place


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
    """Return texts from the beginnings of up to 16 units, spread evenly: a 128th of the corpus, 512 kB at most."""
    num_places = min(_PLACES, len(units))
    share = sum(unit.size for unit in units) // (_SHARE * max(num_places, 1))
    at_each = min(max(share, _LEAST_CHARS), _MOST_CHARS)
    return [
        text for place in range(num_places) for text in _first(units[place * len(units) // num_places], keys, at_each)
    ]


def _first(unit: Unit, keys: Sequence[str], num_chars: int) -> Iterator[str]:
    left = num_chars
    for text in _texts(unit, keys):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _texts(unit: Unit, keys: Sequence[str]) -> Iterator[str]:
    for record in read_unit(unit, keys):
        found = parse(record, keys if unit.format in ("jsonl", "parquet") else None)
        yield from () if isinstance(found, BadRecord) else found
