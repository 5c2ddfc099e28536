"""Read and change fields of a SentencePiece ``.model`` file, a protocol buffer.

The file is a sequence of fields. Field 1, repeated for each piece, is a message with the piece's text in field 1 and
its type in field 3. Field 3 is a message that describes the normalization of a text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

_PIECE, _TEXT, _TYPE = 1, 1, 3
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_CONTROL = 3
_NORMALIZER, _DUMMY_PREFIX = 3, 3
_SCORE = 2
_TRAINER = 2
_DECISIVE = {_TRAINER: (3, 24, 35), _NORMALIZER: (2, 3, 4, 5)}
"""Fields that determine the ids: model type, whitespace as suffix, byte fallback; character map, prefix, spaces."""
_DEFAULTS = {"2.3": "01", "2.24": "00", "2.35": "00", "3.2": "", "3.3": "01", "3.4": "01", "3.5": "01"}


def with_control_pieces(model: bytes, names: Collection[str]) -> bytes:
    """Return ``model`` with the pieces ``names`` declared as control pieces, which are never produced from a text."""
    encoded_names = {name.encode() for name in names}
    changed = bytearray(model)
    for field, start, stop in _fields(model, 0, len(model)):
        if field != _PIECE:
            continue
        subfields = {subfield: (first, last) for subfield, first, last in _fields(model, start, stop)}
        first, last = subfields.get(_TEXT, (0, 0))
        if model[first:last] in encoded_names and _TYPE in subfields:
            changed[subfields[_TYPE][0]] = _CONTROL
    return bytes(changed)


def with_dummy_prefix(model: bytes, is_added: bool) -> bytes:
    """Return ``model`` with its dummy prefix, a space before each text, enabled or disabled.

    The setting is field 3 of the normalizer message (field 3). A second normalizer message with only this setting is
    appended; when a parser merges repeated messages, the last value of a field is used.
    """
    return model + bytes([_NORMALIZER << 3 | _BYTES, 2, _DUMMY_PREFIX << 3 | _VARINT, is_added])


def model_identity_values(model: bytes) -> Iterator[Any]:
    """Yield the fields that determine the ids (pieces, algorithm, normalization), excluding the training settings."""
    pieces, settings = list[list[Any]](), dict[str, str]()
    for field, start, stop in _fields(model, 0, len(model)):
        if field == _PIECE:
            subfields = {subfield: model[first:last].hex() for subfield, first, last in _fields(model, start, stop)}
            piece_type = int(subfields.get(_TYPE, "01"), 16)
            pieces.append(
                [
                    bytes.fromhex(subfields.get(_TEXT, "")).decode("utf-8", "replace"),
                    subfields.get(_SCORE, ""),
                    piece_type,
                ]
            )
        elif field in _DECISIVE:
            for subfield, first, last in _fields(model, start, stop):
                if subfield in _DECISIVE[field]:
                    settings[f"{field}.{subfield}"] = model[first:last].hex()
    yield pieces
    yield {name: value for name, value in settings.items() if value != _DEFAULTS.get(name)}


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, value start, value stop) for each field of a message."""
    while start < stop:
        key, start = _varint(data, start)
        end = _value_end(data, key & 7, start)
        if key & 7 == _BYTES:
            _, start = _varint(data, start)
        yield key >> 3, start, end
        start = end


def _value_end(data: bytes, wire_type: int, start: int) -> int:
    value, value_start = _varint(data, start) if wire_type in (_VARINT, _BYTES) else (0, start)
    return value_start + {_VARINT: 0, _EIGHT_BYTES: 8, _BYTES: value, _FOUR_BYTES: 4}[wire_type]


def _varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while data[start] & 0x80:
        value |= (data[start] & 0x7F) << shift
        shift += 7
        start += 1
    return value | data[start] << shift, start + 1
