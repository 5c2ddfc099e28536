"""The few fields of a SentencePiece ``.model`` file that must be read or changed: a protocol buffer, walked by hand.

The file is a list of fields. Field 1, once per piece, is a message with the piece's text in field 1 and its type in
field 3. Field 3 is a message that says what is done to a text first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

_PIECE, _TEXT, _TYPE = 1, 1, 3
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_CONTROL = 3
_NORMALIZER, _DUMMY_PREFIX = 3, 3


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
