"""Tokenizers of the `tokenizers` library: JSON, GPT-2 BPE, WordPiece; a cache of known words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron import log
from megatron.errors import DataError
from megatron.tokenizer import identity as tokenizer_identity
from megatron.tokenizer.build import read_vocabulary
from megatron.tokenizer.tokenizer import (
    EOD_NAMES,
    UNK_NAMES,
    Arrays,
    Tokenizer,
    as_arrays,
    as_lists,
    behind_first_word,
    splits_words,
    strips_end,
    with_blanks_in_front,
    without_prefix,
)

# Byte-level BPE by remembered words: several times as fast as the library alone where spaces part the words.
#
# GPT-2's pattern never joins what stands before a space with the space. So a text may be cut before each space that a
# word follows, and a word with its space has the same tokens wherever it stands: they are looked up, the library sees
# new words only. Text with few spaces, as Chinese, has too many different words for that and goes to the library as it
# is.

SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
_WORD = re.compile(f" ?[^{SPACE}]+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+")
_LONGEST_MEAN = 12
_CACHE_CHARACTERS = 1 << 22
ENTRY_CHARACTERS = 16
"""What an entry of a memory of words counts besides its own characters: some 200 bytes are spent on each."""


def are_independent(description: str) -> bool:
    """Whether words may be encoded one by one: BPE over bytes with GPT-2's pattern and nothing besides."""
    fields = json.loads(description)
    before = fields.get("pre_tokenizer") or {}
    return (
        fields["model"].get("type") == "BPE"
        and not fields["model"].get("dropout")
        and fields.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space")
        and before.get("use_regex", True)
        and all(token["special"] for token in fields.get("added_tokens") or [])
    )


class KnownWords:
    """Encodes texts by their words.

    Args:
        encode: the library's way, for new words and for texts with few spaces.
    """

    def __init__(self, encode: Callable[[list[str]], Arrays]) -> None:
        self._encode = encode
        self._tokens: dict[str, bytes] = {}
        self._num_characters = 0

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Return the int32 tokens of all ``texts``, and the number of tokens of each."""
        cut = [_WORD.findall(text) if _has_words(text) else [text] for text in texts]
        self._learn(set(chain.from_iterable(cut)).difference(self._tokens))
        encoded = [b"".join(map(self._tokens.__getitem__, words)) for words in cut]
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        self._forget({words[0] for words in cut if len(words) == 1})
        return np.frombuffer(bytearray().join(encoded), np.int32), sizes

    def _learn(self, new: set[str]) -> None:
        words = list(new)
        tokens, sizes = self._encode(words)
        stops = np.cumsum(sizes) * 4
        data = tokens.tobytes()
        for word, start, stop in zip(words, [0, *stops.tolist()], stops.tolist(), strict=False):
            self._tokens[word] = data[start:stop]
        self._num_characters += _size(words)

    def _forget(self, whole_texts: set[str]) -> None:
        for text in whole_texts:
            del self._tokens[text]
        self._num_characters -= _size(whole_texts)
        if self._num_characters > _CACHE_CHARACTERS:
            self._tokens.clear()
            self._num_characters = 0


def _size(words: Collection[str]) -> int:
    return sum(map(len, words)) + ENTRY_CHARACTERS * len(words)


def _has_words(text: str) -> bool:
    return text.count(" ") * _LONGEST_MEAN >= len(text)


# Text that a normaliser makes into the spelling of a control token: full-width letters, capitals and the like.


class HiddenSpellings:
    """Finds where tokens of a text are control tokens though it does not spell them.

    Args:
        description: the JSON text of the ``tokenizers`` library.
        control: the ids of control tokens by name.
    """

    def __init__(self, description: str, control: Mapping[str, int]) -> None:
        self._ids = np.zeros(0, np.int32)
        if not control:
            return
        fields = json.loads(description)
        unknown = {*UNK_NAMES, fields["model"].get("unk_token")}
        if fields["model"].get("unk_id") is not None:
            unknown.add(fields["model"]["vocab"][fields["model"]["unk_id"]][0])
        ids = {token for name, token in control.items() if len(name) > 1 and name not in unknown}
        ids -= {token for name, token in control.items() if name in unknown}
        self._ids = np.array(sorted(ids) if fields.get("normalizer") is not None else [], np.int32)

    def texts_with(self, tokens: np.ndarray, sizes: np.ndarray) -> list[int]:
        """Return the numbers of the texts among whose tokens a control token is."""
        if not len(self._ids):
            return []
        found = np.flatnonzero(np.isin(tokens, self._ids))
        return np.unique(np.searchsorted(np.cumsum(sizes), found, side="right")).tolist()

    def cut(self, text: str, encoding: tokenizers.Encoding) -> list[str]:
        """Return ``text`` cut behind the first character of what became a control token."""
        never = set(self._ids.tolist())
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        starts = sorted({start for token, (start, stop) in spans if token in never and stop - start > 1})
        cuts = [0, *(start + 1 for start in starts), len(text)]
        return [text[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]


# Tokenizers that the ``tokenizers`` library runs: its own JSON files, and GPT-2's vocab.json with merges.txt.


class LibraryTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` without padding, cutting or added control tokens.

    Args:
        description: the library's JSON.
        paths: where it was read from.
    """

    def __init__(self, description: str, paths: Sequence[Path], settings: str = "") -> None:
        self.description = description
        self._library = load(description)
        self._outline = outline(description)
        self._words = KnownWords(partial(ids_of, self._library)) if are_independent(self._outline) else None
        self._continued: tokenizers.Tokenizer | None = None
        self._rendered: tokenizers.Tokenizer | None = None
        self._vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._splits_words = splits_words(self._outline)
        self._drops_blanks = self._splits_words or strips_end(self._outline)
        self._hidden = HiddenSpellings(self._outline, {})
        super().__init__(paths, settings)
        self._hidden = HiddenSpellings(self._outline, self.control_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.description, self.paths, self.settings), self.eod_name

    def use_eod(self, name: str) -> None:
        super().use_eod(name)
        self._hidden = HiddenSpellings(self._outline, self.control_tokens)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def plain_names(self) -> frozenset[str]:
        added = self._library.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if not token.special)

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """The ids that the post-processor of tokenizer.json puts in front of a text, as in transformers 5.

        GPT-2's two files have no post-processor: ``add_bos_token`` of tokenizer_config.json decides.
        """
        if json.loads(self._outline).get("post_processor") is None and self.is_from_gpt2_files:
            return super().opening_ids
        with_bos = self._library.encode("a", add_special_tokens=True)
        first = next((at for at, mark in enumerate(with_bos.special_tokens_mask) if not mark), 0)
        return tuple(with_bos.ids[:first])

    @property
    def is_from_gpt2_files(self) -> bool:
        """True if the vocabulary was read from vocab.json and merges.txt."""
        return [path.suffix for path in self.paths] == [".json", ".txt"]

    @cached_property
    def text_vocab_size(self) -> int:
        added = self._library.get_added_tokens_decoder().items()
        ids = [*self._library.get_vocab(with_added_tokens=False).values()]
        return max([*ids, *(token for token, facts in added if not facts.special), self._largest_used_id()]) + 1

    def _facts(self) -> Iterable[Any]:
        steps = (self._library.normalizer, self._library.pre_tokenizer)
        return tokenizer_identity.library_facts(
            self.description, *(None if step is None else json.loads(step.__getstate__()) for step in steps)
        )

    def _files_digest(self) -> str:
        hidden, self._hidden = self._hidden, HiddenSpellings(self._outline, {})  # names that text itself spells
        try:
            return super()._files_digest()
        finally:
            self._hidden = hidden

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    @property
    def spelling(self) -> str:
        parts = json.loads(self._outline)
        if parts["model"].get("type") == "WordPiece":
            return "continued"
        return "bytes" if '"ByteLevel"' in json.dumps([parts["pre_tokenizer"], parts["decoder"]]) else "text"

    def piece(self, token: int) -> str | None:
        return self._library.id_to_token(token)

    def _declared_control_names(self) -> Iterable[str]:
        return (token.content for token in self._library.get_added_tokens_decoder().values() if token.special)

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text whose spelled control tokens are meant, and the characters that each stands for.

        For what a chat template has rendered: the one text of which these spellings are no accident.
        """
        if self._rendered is None:
            self._rendered = _with_model_of(self._library, self._outline)
            self._rendered.encode_special_tokens = False
        encoding = self._rendered.encode(text, add_special_tokens=False)
        largest = max(encoding.ids, default=0)
        if self.num_rows is not None and largest >= self.num_rows:
            raise DataError(
                f"a conversation holds {self.piece(largest)} (id {largest}), but the model has {self.num_rows} rows. "
                "Leave the token out of the conversation and of the chat template"
            )
        return encoding.ids, encoding.offsets

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return self._ids_of(self._library, texts) if self._words is None else self._words.encode_arrays(texts)

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        return super().encode_pieces(with_blanks_in_front(pieces) if self._drops_blanks else pieces)

    def _encode_continued(self, texts: list[str]) -> Arrays:
        if self._continued is None:
            self._continued = _with_model_of(self._library, without_prefix(self._outline))
        if not self._splits_words:
            return self._ids_of(self._continued, texts)
        cut = [behind_first_word(text) for text in texts]
        words = as_lists(self._ids_of(self._continued, [word for word, _ in cut]))
        rests = as_lists(self._ids_of(self._library, [rest for _, rest in cut]))
        return as_arrays([word + rest for word, rest in zip(words, rests, strict=True)])

    def _ids_of(self, library: tokenizers.Tokenizer, texts: list[str]) -> Arrays:
        return self._without_hidden(library, texts, ids_of(library, texts))

    def _without_hidden(self, library: tokenizers.Tokenizer, texts: list[str], arrays: Arrays) -> Arrays:
        """Return ``arrays``, the tokens of ``texts``, without control tokens that the library's normaliser made."""
        places = self._hidden.texts_with(*arrays)
        if not places:
            return arrays
        lists = as_lists(arrays)
        for place in places:
            first, *others = self._hidden.cut(texts[place], library.encode(texts[place], add_special_tokens=False))
            if others:  # else a single character became the control token, which cannot be cut
                parts = self._ids_of(library, [first])[0], self._encode_continued(others)[0]
                lists[place] = np.concatenate(parts).tolist()
        return as_arrays(lists)


class _LoadError(Exception):
    """The library cannot read a JSON text."""


def load(description: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a JSON text: it adds, cuts and draws nothing, and finds no control token."""
    try:
        library = tokenizers.Tokenizer.from_str(description)
    except Exception as error:  # the library raises plain Exception
        raise _LoadError(str(error)) from error
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True  # the spelling of a control token is text
    if dropout := getattr(library.model, "dropout", None):
        library.model.dropout = None  # type: ignore[attr-defined]
        log.warn_once(
            f"the vocabulary has BPE dropout {dropout}, which gives a text other ids each time; it is encoded without"
        )
    return library


def outline(description: str) -> str:
    """Return the JSON text of a tokenizer without the vocabulary and the merges of its model.

    A vocabulary may have 33 MB, which takes a second each time that it is parsed.
    """
    with tokenizer_identity.without_collection():
        fields = json.loads(description)
    model = fields["model"]
    if model.get("unk_id") is not None:
        model["unk_token"] = model["vocab"][model.pop("unk_id")][0]
    fields["model"] = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    return json.dumps(fields, ensure_ascii=False)


def _with_model_of(library: tokenizers.Tokenizer, description: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of the outline ``description`` that shares the model of ``library``."""
    fields = json.loads(description)
    stub = {"type": "BPE", "vocab": {}, "merges": []}
    other = load(json.dumps({**fields, "model": stub, "added_tokens": [], "post_processor": None}, ensure_ascii=False))
    other.model = library.model
    other.add_tokens([token for _, token in sorted(library.get_added_tokens_decoder().items())])
    return other


def ids_of(library: tokenizers.Tokenizer, texts: list[str]) -> Arrays:
    """Return the tokens of ``texts``."""
    return as_arrays([encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)])


def from_json_files(path: Path) -> LibraryTokenizer:
    """Return the tokenizer in a ``tokenizers`` JSON file, or in a folder's tokenizer.json."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        description = path.read_text(encoding="utf-8")
        return LibraryTokenizer(description, [path])
    except OSError as error:
        raise DataError(f"--tokenizer-path {path} cannot be read: {error}") from error
    except (UnicodeDecodeError, _LoadError) as error:
        raise DataError(f"{path} must be a JSON file of the `tokenizers` library; it says: {error}") from error


def from_gpt2_files(vocab: Path, merges: Path) -> LibraryTokenizer:
    """Return the byte-level BPE of GPT-2's two files."""
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"--vocab-file {vocab} and --merge-file {merges} must be GPT-2's vocab.json and merges.txt; "
            f"the library says: {error}"
        ) from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in EOD_NAMES if library.token_to_id(name) is not None])
    return LibraryTokenizer(library.to_str(), [vocab, merges])


# BERT's WordPiece vocabularies.

_UNK = "[UNK]"
_CONTROL = ("[PAD]", _UNK, "[CLS]", "[SEP]", "[MASK]")
_MAX_WORD_CHARACTERS = 100


def from_lower_case_bert_files(path: Path) -> LibraryTokenizer:
    """Return the tokenizer of a ``vocab.txt``, or of a folder with one, that makes text lower case, without accents."""
    return from_bert_files(path, is_lower_case=True)


def from_cased_bert_files(path: Path) -> LibraryTokenizer:
    """Return the tokenizer of a ``vocab.txt``, or of a folder with one, that leaves text as it is."""
    return from_bert_files(path, is_lower_case=False)


def from_bert_files(path: Path, is_lower_case: bool | None = None) -> LibraryTokenizer:
    """Return the tokenizer of a ``vocab.txt``, or of a folder with one.

    Where ``is_lower_case`` is None it makes text lower case and drops accents if ``tokenizer_config.json`` beside it
    says ``"do_lower_case": true``; if it says nothing, then if no token of the vocabulary has a letter in upper case.
    Chinese characters are words of their own.
    """
    vocab = path / "vocab.txt" if path.is_dir() else path
    if not vocab.exists():
        raise DataError(f"--tokenizer-type BertWordPiece needs vocab.txt or a folder with it, got {path}")
    ids = read_vocabulary(vocab, _UNK)
    if is_lower_case is None:
        is_lower_case = _is_lower_case(vocab.parent / "tokenizer_config.json", ids)
    library = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=_UNK, max_input_chars_per_word=_MAX_WORD_CHARACTERS)  # type: ignore[call-arg]
    )
    library.normalizer = normalizers.BertNormalizer(lowercase=is_lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([name for name in _CONTROL if name in ids])
    return LibraryTokenizer(library.to_str(), [vocab], f"BertWordPiece lower case: {is_lower_case}")


def _is_lower_case(config: Path, tokens: Iterable[str]) -> bool:
    if config.exists():
        try:
            value = json.loads(config.read_text(encoding="utf-8")).get("do_lower_case")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config} must be a JSON object; reading it failed: {error}") from error
        if value is not None:
            return bool(value)
    return not any(token != token.lower() for token in tokens if not token.startswith("["))
