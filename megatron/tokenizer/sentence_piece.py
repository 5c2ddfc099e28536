"""SentencePiece models, T5's own among them."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Arrays, Spellings, Tokenizer, all_names, as_arrays, with_blanks_in_front

# The few fields of a SentencePiece ``.model`` file that must be read or changed: a protocol buffer, walked by hand.
#
# The file is a list of fields. Field 1, once per piece, is a message with the piece's text in field 1 and its type in
# field 3. Field 3 is a message that says what is done to a text first.

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


# SentencePiece for pieces of a text that stand behind another piece.
#
# Most models put a space in front of a text, and drop spaces at both ends and all but one of several. A piece that goes
# on within a word must get no space, one that begins behind a space must get just one.

_MAYBE_BLANK = ("Cc", "Cf", "Zl", "Zp", "Zs")


class Continued:
    """Encodes pieces that go on where another piece of the same text stopped.

    Args:
        model: the content of the ``.model`` file.
    """

    def __init__(self, model: bytes) -> None:
        self._within_word = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, False))
        self._behind_blank = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, True))
        self._drops_blanks = not self._within_word.encode(" ")

    @cached_property
    def _blanks(self) -> str:
        """The characters of which the model leaves nothing where they stand alone."""
        every = map(chr, range(sys.maxunicode + 1))
        maybe = [character for character in every if unicodedata.category(character) in _MAYBE_BLANK]
        return "".join(one for one, ids in zip(maybe, self._within_word.encode(maybe), strict=True) if not ids)

    def blanks_in_front(self, pieces: Iterable[str]) -> Iterable[str]:
        """Return the pieces of a text so that none ends in blanks which the model would drop."""
        return with_blanks_in_front(pieces, self._blanks) if self._drops_blanks else pieces

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of each of ``texts``."""
        for text in texts:
            library = self._behind_blank if self._begins_with_blank(text) else self._within_word
            yield library.encode(text)

    def _begins_with_blank(self, text: str) -> bool:
        if not self._drops_blanks:
            return False
        blanks = text[: len(text) - len(text.lstrip(self._blanks))]
        return bool(blanks) and self._within_word.encode(f"a{blanks}a") != self._within_word.encode("aa")


# SentencePiece models.


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file, unigram or BPE.

    A control token that the model declares as a symbol of the text is made a control piece, which no text becomes.
    """

    def __init__(self, path: Path, paths: Sequence[Path] = (), settings: str = "") -> None:
        self._path = path
        try:
            model = path.read_bytes()
            self._library = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} must be a SentencePiece .model file; reading it failed: {error}") from error
        self._raw_model, self._settings = model, settings
        spelled = self._spelled_names()
        self._spelled = spelled - self.plain_names
        self._use_control_pieces(self._spelled)
        beyond_eod = sorted(spelled - {self.former_eod_name})
        super().__init__([path, *paths], "\n".join(filter(None, [settings, *beyond_eod])))
        self.use_eod_piece()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,), self.eod_name

    def use_eod(self, name: str) -> None:
        super().use_eod(name)
        self.use_eod_piece()

    def use_eod_piece(self) -> None:
        """Make the end-of-document token a control piece, if it is one of the ordinary symbols of the text."""
        if self.eod_name in self.plain_names:
            self._use_control_pieces({*self._spelled, self.eod_name})
            self._spellings = Spellings(self._found_in_text(self.control_tokens))

    def _use_control_pieces(self, names: Collection[str]) -> None:
        self._model = with_control_pieces(self._raw_model, names) if names else self._raw_model
        self._library = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        self.__dict__.pop("_continued", None)

    @cached_property
    def plain_names(self) -> frozenset[str]:
        """<s> and </s> where they are symbols of the text, as HTML tags are, and other pieces begin and end texts."""
        library = self._library
        ends = {"<s>": library.bos_id(), "</s>": library.eos_id()}
        return frozenset(
            name
            for name, control in ends.items()
            if control >= 0 and library.piece_to_id(name) not in (control, library.unk_id())
        )

    def _spelled_names(self) -> set[str]:
        found = {name: token for name in all_names() if (token := self.token_to_id(name)) is not None}
        found = {name: token for name, token in found.items() if not self._library.is_unknown(token)}
        encoded = self._library.encode([f"a{name}a" for name in found])
        return {name for name, ids in zip(found, encoded, strict=True) if found[name] in ids}

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size()

    @cached_property
    def text_vocab_size(self) -> int:
        if type(self) is not SentencePieceTokenizer:
            return self.vocab_size
        size = self._library.get_piece_size()
        while size and self._library.is_control(size - 1):
            size -= 1
        return max(size, self._largest_used_id() + 1)

    def token_to_id(self, token: str) -> int | None:
        found = self._library.piece_to_id(token)
        is_unknown = found == self._library.unk_id() and token != self._library.id_to_piece(found)
        return None if is_unknown else found

    @property
    def spelling(self) -> str:
        return "text"

    def piece(self, token: int) -> str | None:
        return str(self._library.id_to_piece(token)) if token < self._library.get_piece_size() else None

    def _facts(self) -> Iterable[Any]:
        return [self._settings, *model_facts(self._raw_model)]

    def _former_control_names(self) -> list[str]:
        names = super()._former_control_names()
        return [
            name for name in names if name not in self.plain_names
        ]  # they were control pieces, which no text becomes

    def _declared_control_names(self) -> Iterable[str]:
        library = self._library
        return (library.id_to_piece(token) for token in range(library.get_piece_size()) if library.is_control(token))

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))

    @cached_property
    def _continued(self) -> Continued:
        return Continued(self._model)

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        return super().encode_pieces(self._continued.blanks_in_front(pieces))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return as_arrays(self._library.encode(texts))

    def _encode_continued(self, texts: list[str]) -> Arrays:
        return as_arrays(list(self._continued.encode(texts)))


# T5's own SentencePiece model, with the sentinels behind its pieces as T5 and Hugging Face have them.

NUM_SENTINELS = 100
_NAME = "<extra_id_{}>"


class T5SentencePieceTokenizer(SentencePieceTokenizer):
    """A T5 ``.model`` of n pieces and 100 sentinels: ``<extra_id_0>`` is n + 99, ``<extra_id_99>`` is n.

    A model that has ``<extra_id_0>`` among its pieces, as some later ones do, keeps its own.
    """

    def __init__(self, path: Path) -> None:
        self._appended: dict[str, int] = {}
        super().__init__(path, settings="T5SentencePiece")
        if super().token_to_id(_NAME.format(0)) is None:
            top = self._library.get_piece_size() + NUM_SENTINELS - 1
            self._appended = {_NAME.format(number): top - number for number in range(NUM_SENTINELS)}
            self.__dict__.pop("control_tokens", None)  # found without them

    @property
    def vocab_size(self) -> int:
        return self._library.get_piece_size() + len(self._appended)

    def token_to_id(self, token: str) -> int | None:
        return self._appended.get(token, super().token_to_id(token))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._decode_parts(ids))

    def _decode_parts(self, ids: Sequence[int]) -> Iterator[str]:
        size = self._library.get_piece_size()
        for is_sentinel, group in groupby(ids, lambda token: token >= size):
            if is_sentinel:
                yield from (_NAME.format(self.vocab_size - 1 - token) for token in group)
            else:
                yield self._library.decode(list(group))


def from_t5_files(path: Path) -> T5SentencePieceTokenizer:
    """Return the tokenizer of a ``.model`` file, or of a folder with ``spiece.model``."""
    model = path / "spiece.model" if path.is_dir() else path
    if not model.exists():
        other = " Its tokenizer.json is read with --tokenizer-type TokenizersJSON." * (path / "tokenizer.json").exists()
        raise DataError(
            f"--tokenizer-type T5SentencePiece needs a .model file or a folder with spiece.model, got {path}.{other}"
        )
    return T5SentencePieceTokenizer(model)
