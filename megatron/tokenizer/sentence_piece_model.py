"""Fields of a SentencePiece ``.model`` file that are read or changed.

The file is a list of fields. Field 1, once per piece, is a message with the piece's text in field 1 and its type in
field 3. Field 3 is a message that says what is done to a text first.
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
"""Fields that decide the ids: model type, whitespace as suffix, byte fallback; character map, prefix, spaces."""
_DEFAULTS = {"2.3": "01", "2.24": "00", "2.35": "00", "3.2": "", "3.3": "01", "3.4": "01", "3.5": "01"}


def with_control_pieces(model: bytes, names: Collection[str]) -> bytes:
    """Return the model with the pieces ``names`` declared as control pieces: no text is encoded as one."""
    wanted = {name.encode() for name in names}
    changed = bytearray(model)
    for field, start, stop in _fields(model, 0, len(model)):
        if field != _PIECE:
            continue
        parts = {part: (first, last) for part, first, last in _fields(model, start, stop)}
        first, last = parts.get(_TEXT, (0, 0))
        if model[first:last] in wanted and _TYPE in parts:
            changed[parts[_TYPE][0]] = _CONTROL
    return bytes(changed)


def with_dummy_prefix(model: bytes, is_added: bool) -> bytes:
    """Return the model with a space put in front of each text, or none.

    A message that comes twice is merged, the later value holds: so field 3 of field 3 is appended.
    """
    return model + bytes([_NORMALIZER << 3 | _BYTES, 2, _DUMMY_PREFIX << 3 | _VARINT, is_added])


def model_facts(model: bytes) -> Iterator[Any]:
    """Yield what decides the ids: pieces, algorithm, normalization; not how and from what the model was trained."""
    pieces, settings = list[list[Any]](), dict[str, str]()
    for field, start, stop in _fields(model, 0, len(model)):
        if field == _PIECE:
            parts = {part: model[first:last].hex() for part, first, last in _fields(model, start, stop)}
            kind = int(parts.get(_TYPE, "01"), 16)
            pieces.append([bytes.fromhex(parts.get(_TEXT, "")).decode("utf-8", "replace"), parts.get(_SCORE, ""), kind])
        elif field in _DECISIVE:
            for part, first, last in _fields(model, start, stop):
                if part in _DECISIVE[field]:
                    settings[f"{field}.{part}"] = model[first:last].hex()
    yield pieces
    yield {name: value for name, value in settings.items() if value != _DEFAULTS.get(name)}


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of the value of each field of the message."""
    while start < stop:
        key, start = _varint(data, start)
        end = _value_end(data, key & 7, start)
        if key & 7 == _BYTES:
            _, start = _varint(data, start)
        yield key >> 3, start, end
        start = end


def _value_end(data: bytes, wire_type: int, start: int) -> int:
    value, behind = _varint(data, start) if wire_type in (_VARINT, _BYTES) else (0, start)
    return behind + {_VARINT: 0, _EIGHT_BYTES: 8, _BYTES: value, _FOUR_BYTES: 4}[wire_type]


def _varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while data[start] & 0x80:
        value |= (data[start] & 0x7F) << shift
        shift += 7
        start += 1
    return value | data[start] << shift, start + 1
