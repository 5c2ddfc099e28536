"""Tokenizer: the interface, control tokens and their spellings, continued pieces, word starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer import identity as tokenizer_identity
from megatron.tokenizer.sibling_files import SiblingFiles, read_siblings

# Parts that go on where another part of the same text stopped: what a ``tokenizers`` JSON text must be for them.
#
# Many tokenizers put a space in front of a text, and some drop spaces at both ends. Where a text was cut, its second
# part must not get a space, and its first must not lose one, or the text would come back otherwise than it was.

_FIRST_WORD = re.compile(r"\S*")


def without_prefix(description: str) -> str:
    """Return the JSON text of the same tokenizer that puts no space in front of a text and drops none."""
    fields = json.loads(description)
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _changed(fields.get(name))
    return json.dumps(fields, ensure_ascii=False)


def _changed(part: Any) -> Any:
    if isinstance(part, list):
        return [step for step in map(_changed, part) if step is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("Prepend", "Strip"):
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never[name] if name in never else _changed(value) for name, value in part.items()}


def strips_end(description: str) -> bool:
    """Whether the tokenizer drops the spaces at the end of a text."""
    return '"strip_right": true' in json.dumps(json.loads(description).get("normalizer"))


def with_blanks_in_front(pieces: Iterable[str], blanks: Collection[str] | None = None) -> Iterator[str]:
    """Yield the pieces of a text, the blanks at the end of each moved to the front of the next; the last are dropped.

    Args:
        blanks: the characters that are blanks; those of ``str.isspace`` if not given.
    """
    characters = None if blanks is None else "".join(blanks)
    carried = ""
    for piece in pieces:
        whole = carried + piece
        kept = whole.rstrip(characters)
        carried = whole[len(kept) :]
        if kept:
            yield kept


def splits_words(description: str) -> bool:
    """Whether the tokenizer splits at spaces first, as T5's does: then each word has a space put in front."""
    return '"WhitespaceSplit"' in json.dumps(json.loads(description).get("pre_tokenizer"))


def behind_first_word(text: str) -> tuple[str, str]:
    """Return what goes on with the word before, and the rest from the next space on."""
    found = _FIRST_WORD.match(text)
    stop = found.end() if found else 0
    return text[:stop], text[stop:]


# Names of control tokens: what those of a vocabulary are called, whoever made it.

EOD_NAMES = (
    *("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<EOS_TOKEN>", "[EOS]", "[SEP]"),
)
"""Names of the end-of-document token; the first one in the vocabulary is used. See ``Tokenizer.eod_name``."""
_NOT_OF_CHATS = ("[SEP]",)
FORMER_EOD_NAMES = ("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "[SEP]")
"""Names from which versions up to 8c23b9e6 took the first one in the vocabulary, also a tag such as Gemma's </s>."""
_NEW_NAMES = ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOS_TOKEN>")
"""Names that versions up to 8c23b9e6 did not look for; the file digest of an identity leaves them out."""
BY_NAME = "by-name"
"""Value of --eod-token that selects the rule of ``FORMER_EOD_NAMES``, which older runs keep."""
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Names of the padding token, as above."""
UNK_NAMES = ("<unk>", "[UNK]", "<|unk|>")
"""Names of the token for what the vocabulary does not have, as above."""
SENTINEL_NAMES = ("<extra_id_{}>", "<s_{}>")
"""Names of the tokens that stand for spans, T5's and CPM's; those of one kind, counted from 0 without a gap."""
FIM_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
)
"""Names of the three tokens of fill-in-the-middle, by spelling."""
OTHER_NAMES = (
    *("<s>", "<bos>", "<eos>", "</d>", "<cls>", "<sep>", "<mask>", "<bod>", "<eop>"),
    *("[CLS]", "[MASK]", "[BOS]", "[EOS]", "[gMASK]"),
    *("<|startoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|sep|>", "<|cls|>"),
    *("<fim_pad>", "<|fim_pad|>", "<EOT>"),
)
"""Names of other control tokens."""
_MOST_SENTINELS = 512


def all_names() -> Iterator[str]:
    """Yield each name that a control token may have."""
    yield from (*EOD_NAMES, *PAD_NAMES, *UNK_NAMES, *OTHER_NAMES)
    yield from (name for spelling in FIM_NAMES for name in spelling)
    yield from (name.format(number) for name in SENTINEL_NAMES for number in range(_MOST_SENTINELS))


# Text that spells a control token: where it does, and how to cut it so that no part does.


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


# What every tokenizer of this project can do, and the parts that all kinds share.

Arrays = tuple[np.ndarray, np.ndarray]
"""int32 tokens of several texts one after the other, and int64 number of tokens of each."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Text that spells a control token is ordinary text: no document can end itself, or be taken for padding or a span.

    Args:
        paths: the files that the vocabulary is read from.
        settings: what else decides the ids; empty where the files say it all.

    Attributes:
        num_rows: rows of the model's vocabulary where they are fewer than the ids; None: every id has a row.
    """

    def __init__(self, paths: Sequence[Path], settings: str = "") -> None:
        self.paths = list(paths)
        self.settings = settings
        self.num_rows: int | None = None
        self._eod_token: str | None = None
        self._spellings = Spellings(self._found_in_text(self.control_tokens))

    def __setstate__(self, eod_token: str) -> None:
        """Restore the end-of-document token of a pickled tokenizer, whose sibling files may be on another machine."""
        self.use_eod(eod_token)

    def use_eod(self, name: str) -> None:
        """Make ``name`` the end-of-document token, as --eod-token does. Text that spells it is ordinary text.

        Raises:
            DataError: If the vocabulary has no such token.
        """
        if name == BY_NAME:
            if self.former_eod_name is None:
                return
            name = self.former_eod_name
        if self.token_to_id(name) is None:
            raise DataError(
                f"--eod-token {name} is not in the vocabulary of {', '.join(map(str, self.paths))}. Name one of its "
                "tokens, or leave the flag out"
            )
        is_changed = name != self.eod_name
        self._eod_token = name
        if not is_changed:
            return
        for cached in ("eod_name", "eod_id", "control_tokens"):
            self.__dict__.pop(cached, None)
        self._spellings = Spellings(self._found_in_text(self.control_tokens))

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @cached_property
    def text_vocab_size(self) -> int:
        """One more than the largest id that plain text, its end or padding may have; special tokens may lie above."""
        return self.vocab_size

    def _largest_used_id(self) -> int:
        used = (self.eod_id if self.has_eod else None, self.pad_id, self.unk_id)
        return max((token for token in used if token is not None), default=-1)

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary by its name."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; control tokens appear by their name or not at all, as the library does it."""

    @abstractmethod
    def _encode_arrays(self, texts: list[str]) -> Arrays:
        """Return the tokens of ``texts``, of which none spells a control token that the kind would find."""

    @property
    def spelling(self) -> str:
        """How ``piece`` tells where words begin: a name of the table in ``word_starts``, "" where it does not."""
        return ""

    def piece(self, token: int) -> str | None:
        """Return how the vocabulary spells a token, None where it has no such id."""
        return None

    def _encode_continued(self, texts: list[str]) -> Arrays:
        """As ``_encode_arrays``, for parts that go on where another part of the same text stopped."""
        return self._encode_arrays(texts)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, no control token added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each of ``texts``."""
        return as_lists(self.encode_arrays(texts))

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Return the int32 tokens of all ``texts`` one after the other, and the int64 number of tokens of each."""
        texts = list(texts)
        spelled = [place for place, text in enumerate(texts) if self._spellings.is_in(text)] if self._spellings else []
        if not spelled:
            return self._encode_arrays(texts)
        cut = [self._spellings.cut(texts[place]) for place in spelled]
        for place, parts in zip(spelled, cut, strict=True):
            texts[place] = parts[0]
        tokens, sizes = self._encode_arrays(texts)
        more, more_sizes = self._encode_continued([part for parts in cut for part in parts[1:]])
        first = np.cumsum([0, *(len(parts) - 1 for parts in cut[:-1])])
        added = np.add.reduceat(more_sizes, first)
        behind = np.cumsum(sizes)[spelled]
        sizes[spelled] += added
        return np.insert(tokens, np.repeat(behind, added), more), sizes

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        """Return the int32 tokens of one text that is given in consecutive pieces.

        Only the first piece gets the space that a kind puts in front of a text. Text that spells a control token is
        escaped in each piece; where a cut parts it, nothing spells it. Memory is that of a piece and of the tokens.
        """
        found = [np.zeros(0, np.int32)]
        for piece in filter(None, pieces):
            is_first = len(found) == 1
            if self._spellings.is_in(piece):
                found.append(self._encode_spelled(piece, is_first))
            else:
                found.append((self._encode_arrays if is_first else self._encode_continued)([piece])[0])
        return np.concatenate(found)

    def _encode_spelled(self, text: str, is_first: bool) -> np.ndarray:
        """Return the tokens of a text that spells control tokens, or of a piece that goes on."""
        first, *others = self._spellings.cut(text)
        tokens = (self._encode_arrays if is_first else self._encode_continued)([first])[0]
        return np.concatenate([tokens, self._encode_continued(others)[0]])

    def _found_in_text(self, control: Mapping[str, int]) -> list[str]:
        """Return the names in ``control`` whose ids the library would give to text that spells them."""
        names = [name for name in control if len(name) > 1]
        if not names:
            return []
        alone = as_lists(self._encode_arrays(names))
        within = as_lists(self._encode_arrays([f"a{name}a" for name in names]))
        start = as_lists(self._encode_arrays([name[:1] for name in names]))
        end = as_lists(self._encode_continued([name[1:] for name in names]))
        return [
            name
            for place, name in enumerate(names)
            if control[name] in (*alone[place], *within[place])
            and control[name] not in (*start[place], *end[place])  # <unk>, for characters of its name
        ]

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The ids of all control tokens by name: end of document, padding, unknown, spans, masks and the like."""
        eod = [self.eod_name] if self.eod_name is not None else []
        names = [name for name in (*all_names(), *self._declared_control_names()) if name not in self.plain_names]
        return self._ids_by_name([*names, *eod])

    def _ids_by_name(self, names: Iterable[str]) -> dict[str, int]:
        found = {name: self.token_to_id(name) for name in names}
        return {name: token for name, token in found.items() if token is not None}

    def _declared_control_names(self) -> Iterable[str]:
        """Return the names that the files themselves declare to be control tokens."""
        return ()

    @cached_property
    def plain_names(self) -> frozenset[str]:
        """Names of tokens that the vocabulary adds as ordinary text, such as Gemma's HTML tags <s> and </s>."""
        return frozenset()

    @cached_property
    def siblings(self) -> SiblingFiles:
        """What the files next to the vocabulary say."""
        return read_siblings(self.paths)

    @cached_property
    def eod_name(self) -> str | None:
        """The name of the end-of-document token, None if there is none.

        The first of these that is in the vocabulary:

        1. the token of ``use_eod`` (--eod-token, a token file's sidecar, a resumed run);
        2. the eos_token of the vocabulary's folder, if the folder has no chat template;
        3. with a chat template, whose eos_token often ends a turn (``<|im_end|>``): the end-of-text token among the
           folder's special tokens, its eos_token first;
        4. the first of ``EOD_NAMES``, tokens that the vocabulary adds as ordinary text last.
        """
        if self._eod_token is not None:
            return self._eod_token
        return next((name for name in self._eod_candidates() if self.token_to_id(name) is not None), None)

    def _eod_candidates(self) -> Iterator[str]:
        eos = self.siblings.named.get("eos_token")
        if self.siblings.has_chat_template:
            special = {*self.siblings.special, *self._declared_control_names()}
            of_texts = [name for name in EOD_NAMES if name in special and name not in _NOT_OF_CHATS]
            yield from sorted(of_texts, key=lambda name: name != eos)
        elif eos is not None:
            yield eos
        yield from (name for name in EOD_NAMES if name not in self.plain_names)
        yield from EOD_NAMES

    @property
    def former_eod_name(self) -> str | None:
        """The name of the token that versions up to 8c23b9e6 ended documents with, None if there is none."""
        return next((name for name in FORMER_EOD_NAMES if self.token_to_id(name) is not None), None)

    @property
    def has_given_eod(self) -> bool:
        """True if ``use_eod`` chose the end-of-document token."""
        return self._eod_token is not None

    @property
    def has_eod(self) -> bool:
        """Whether the vocabulary has an end-of-document token."""
        return self.eod_name is not None

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token.

        Raises:
            DataError: the vocabulary has none.
        """
        token = self.token_to_id(self.eod_name) if self.eod_name is not None else None
        if token is None:
            raise DataError(
                f"the vocabulary must have an end-of-document token, one of {', '.join(EOD_NAMES)}; "
                f"{', '.join(map(str, self.paths))} has none. Name one of its tokens with --eod-token, take another "
                "tokenizer (tools/train_tokenizer.py adds one), or leave out what needs it (preprocessing: "
                "--no-append-eod)."
            )
        return token

    def name_of(self, token: int) -> str | None:
        """Return the name of a token, None if the vocabulary has no name for it."""
        return next((name for name, number in self.control_tokens.items() if number == token), self.piece(token))

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """The ids that transformers puts in front of a prompt, such as ``<s>``; empty if there are none."""
        name = self.siblings.named.get("bos_token")
        token = None if name is None or not self.siblings.add_bos_token else self.token_to_id(name)
        return () if token is None else (token,)

    @cached_property
    def pad_id(self) -> int | None:
        """The id of the padding token, None if there is none."""
        return self._first_of(PAD_NAMES)

    @cached_property
    def unk_id(self) -> int | None:
        """The id that stands for what the vocabulary does not have, None if there is none."""
        return self._first_of(UNK_NAMES)

    def _first_of(self, names: Sequence[str]) -> int | None:
        ids = (self.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """The ids that stand for spans cut out of a text, that of the first span first; empty if there are none."""
        for name in SENTINEL_NAMES:
            found: list[int] = []
            while (token := self.token_to_id(name.format(len(found)))) is not None:
                found.append(token)
            if found:
                return tuple(found)
        return ()

    @property
    def spelled_names(self) -> tuple[str, ...]:
        """The names of the control tokens that are escaped where a text spells them."""
        return self._spellings.names

    @cached_property
    def identity(self) -> str:
        """What token files and checkpoints know the tokenizer by: see ``megatron/tokenizer/identity.py``."""
        return tokenizer_identity.join(tokenizer_identity.digest(self._facts()), self._files_digest())

    @abstractmethod
    def _facts(self) -> Iterable[Any]:
        """Return JSON values that decide the ids of a text, and nothing else."""

    def _former_control_names(self) -> list[str]:
        """Return the names that versions up to 8c23b9e6 looked for, whether the vocabulary has them or not."""
        return [*(name for name in all_names() if name not in _NEW_NAMES), *self._declared_control_names()]

    def _files_digest(self) -> str:
        """Return the identity of versions up to 8c23b9e6: SHA-256 over the files and the names that are escaped."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        spelled = Spellings(self._found_in_text(self._ids_by_name(self._former_control_names()))).names
        beyond_eod = [name for name in spelled if name != self.former_eod_name]
        for part in (self.settings, *beyond_eod):
            digest.update(part.encode())
        return digest.hexdigest()


def as_arrays(encoded: Sequence[Sequence[int]]) -> Arrays:
    """Return lists of token ids as arrays."""
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(sizes.sum())), sizes


def as_lists(arrays: Arrays) -> list[list[int]]:
    """Return the token ids of each text as a list."""
    tokens, sizes = arrays
    stops = np.cumsum(sizes).tolist()
    ids = tokens.tolist()
    return [ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


# Which tokens of a vocabulary begin a word, for masking whole words.
#
# | vocabulary | a token begins a word that begins |
# |---|---|
# | byte-level BPE | with a blank, with a Chinese character, or with neither letter nor digit |
# | SentencePiece | with U+2581, or as above |
# | CPM-1 | with U+2581, which stands in front of jieba's words |
# | WordPiece | not with ## |
# | others, as CPM-2 | anyhow |
#
# A byte within a character begins none, so no character is cut. Chinese has no blanks: with CPM-1 its words are
# jieba's, whole, as Chinese-BERT-wwm has those of a word cutter; elsewhere each token of it is a word of its own.
#
# Source: Cui et al. 2021, "Pre-training with whole word masking for Chinese BERT".

_MARK = "\u2581"
_CHINESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_GOES_ON = re.compile(r"[^\W_]|'")
_CHINESE_BYTES = range(0xE3, 0xEA)
"""First bytes of U+3000 ... U+9FFF in UTF-8."""


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return bool[vocabulary], whether a token begins a word: the table at the top of this file."""
    begins = _RULES[tokenizer.spelling]
    pieces = (tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    return np.array([piece is None or begins(piece) for piece in pieces], bool)


def _of_text(text: str) -> bool:
    return text.startswith(_MARK) or bool(_CHINESE.match(text)) or not _GOES_ON.match(text)


def _of_bytes(piece: str) -> bool:
    raw = bytes(_BYTES.get(character, 0x20) for character in piece)
    text = raw.decode("utf-8", "ignore")
    if text and raw.startswith(text[0].encode()):
        return _of_text(text)
    return raw[:1] == b"" or raw[0] in _CHINESE_BYTES  # part of a character: its first byte, or a later one


def _byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level BPE: itself where it can be seen, else U+0100 on.

    Source: Radford et al. 2019, code of GPT-2.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}


_BYTES = {character: byte for byte, character in _byte_characters().items()}
_RULES: dict[str, Callable[[str], bool]] = {
    "bytes": _of_bytes,
    "text": _of_text,
    "words": lambda piece: piece.startswith(_MARK),
    "continued": lambda piece: not piece.startswith("##") or len(piece) == 2,
    "": lambda piece: True,
}
"""``Tokenizer.spelling`` -> whether a piece begins a word."""
