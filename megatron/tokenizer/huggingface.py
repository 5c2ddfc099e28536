"""LibraryTokenizer: tokenizers from the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron import log
from megatron.errors import DataError
from megatron.tokenizer import identity as tokenizer_identity
from megatron.tokenizer.continued_text import (
    move_blanks_forward,
    split_first_word,
    splits_words,
    strips_end,
    without_prefix,
)
from megatron.tokenizer.control_tokens import EOD_NAMES
from megatron.tokenizer.hidden_spellings import HiddenSpellings
from megatron.tokenizer.known_words import KnownWords, are_independent
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays, as_lists


class LibraryTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` without padding, truncation or added control tokens.

    Args:
        description: JSON for the library.
        paths: files that the JSON was read from.
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
        """The ids that tokenizer.json's post-processor inserts before a text, as in transformers 5.

        GPT-2's two files have no post-processor, so ``add_bos_token`` in tokenizer_config.json decides.
        """
        if json.loads(self._outline).get("post_processor") is None and self.is_from_gpt2_files:
            return super().opening_ids
        with_bos = self._library.encode("a", add_special_tokens=True)
        num_opening = next((idx for idx, mark in enumerate(with_bos.special_tokens_mask) if not mark), 0)
        return tuple(with_bos.ids[:num_opening])

    @property
    def is_from_gpt2_files(self) -> bool:
        """True if the vocabulary was read from vocab.json and merges.txt."""
        return [path.suffix for path in self.paths] == [".json", ".txt"]

    @cached_property
    def text_vocab_size(self) -> int:
        added = self._library.get_added_tokens_decoder().items()
        ids = [*self._library.get_vocab(with_added_tokens=False).values()]
        return (
            max([*ids, *(token for token, added_token in added if not added_token.special), self._largest_used_id()])
            + 1
        )

    @property
    def version_text(self) -> str:
        step = self._library.pre_tokenizer
        names = [] if step is None else _step_names(json.loads(step.__getstate__()))
        return f"tokenizers {tokenizers.__version__}, pre-tokenizer {' + '.join(names) or 'none'}"

    def _identity_values(self) -> Iterable[Any]:
        steps = (self._library.normalizer, self._library.pre_tokenizer)
        return tokenizer_identity.library_identity_values(
            self.description, *(None if step is None else json.loads(step.__getstate__()) for step in steps)
        )

    def _files_digest(self) -> str:
        # as in __init__, hidden spellings are disabled while the spelled names are determined
        hidden, self._hidden = self._hidden, HiddenSpellings(self._outline, {})
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
        """Encode a text in which spellings of control tokens become control tokens; return the ids and their spans.

        This is only used for the output of a chat template, in which these spellings are intended. A span is the
        (start, stop) range of the characters that an id represents.
        """
        if self._rendered is None:
            self._rendered = _with_model_of(self._library, self._outline)
            self._rendered.encode_special_tokens = False
        encoding = self._rendered.encode(text, add_special_tokens=False)
        largest = max(encoding.ids, default=0)
        if self.num_rows is not None and largest >= self.num_rows:
            raise DataError(
                f"a conversation contains {self.piece(largest)} (id {largest}), but the model has only {self.num_rows} "
                "rows. Remove the token from the conversation and the chat template"
            )
        return encoding.ids, encoding.offsets

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return self._ids_of(self._library, texts) if self._words is None else self._words.encode_arrays(texts)

    def encode_chunks(self, chunks: Iterable[str]) -> np.ndarray:
        return super().encode_chunks(move_blanks_forward(chunks) if self._drops_blanks else chunks)

    def _encode_continued(self, texts: list[str]) -> Arrays:
        if self._continued is None:
            self._continued = _with_model_of(self._library, without_prefix(self._outline))
        if not self._splits_words:
            return self._ids_of(self._continued, texts)
        split_texts = [split_first_word(text) for text in texts]
        words = as_lists(self._ids_of(self._continued, [word for word, _ in split_texts]))
        tails = as_lists(self._ids_of(self._library, [tail for _, tail in split_texts]))
        return as_arrays([word + tail for word, tail in zip(words, tails, strict=True)])

    def _ids_of(self, library: tokenizers.Tokenizer, texts: list[str]) -> Arrays:
        return self._without_hidden(library, texts, ids_of(library, texts))

    def _without_hidden(self, library: tokenizers.Tokenizer, texts: list[str], arrays: Arrays) -> Arrays:
        """Re-encode texts whose tokens in ``arrays`` include control tokens produced by the normalizer."""
        indices = self._hidden.texts_with(*arrays)
        if not indices:
            return arrays
        lists = as_lists(arrays)
        for idx in indices:
            first, *others = self._hidden.split(texts[idx], library.encode(texts[idx], add_special_tokens=False))
            if others:  # otherwise, the control token comes from a single character, which cannot be split
                parts = self._ids_of(library, [first])[0], self._encode_continued(others)[0]
                lists[idx] = np.concatenate(parts).tolist()
        return as_arrays(lists)


class _LoadError(Exception):
    """The library cannot parse a JSON text."""


def load(description: str) -> tokenizers.Tokenizer:
    """Load a JSON text into the library, without padding, truncation, dropout or recognition of control tokens."""
    try:
        library = tokenizers.Tokenizer.from_str(description)
    except Exception as error:  # the library raises plain Exception
        raise _LoadError(str(error)) from error
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True  # the spelling of a control token is ordinary text
    if dropout := getattr(library.model, "dropout", None):
        library.model.dropout = None  # type: ignore[attr-defined]
        log.warn_once(
            f"the vocabulary has BPE dropout {dropout}, which encodes a text differently each time; dropout is disabled"
        )
    return library


def outline(description: str) -> str:
    """Remove vocabulary and merges from a tokenizer's JSON text.

    Parsing a large vocabulary (33 MB) takes one second each time.
    """
    with tokenizer_identity.without_collection():
        fields = json.loads(description)
    model = fields["model"]
    if model.get("unk_id") is not None:
        model["unk_token"] = model["vocab"][model.pop("unk_id")][0]
    fields["model"] = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    return json.dumps(fields, ensure_ascii=False)


def _with_model_of(library: tokenizers.Tokenizer, description: str) -> tokenizers.Tokenizer:
    """Build a tokenizer with the settings in the outline ``description`` that shares the model of ``library``."""
    fields = json.loads(description)
    stub = {"type": "BPE", "vocab": {}, "merges": []}
    result = load(json.dumps({**fields, "model": stub, "added_tokens": [], "post_processor": None}, ensure_ascii=False))
    result.model = library.model
    result.add_tokens([token for _, token in sorted(library.get_added_tokens_decoder().items())])
    return result


def ids_of(library: tokenizers.Tokenizer, texts: list[str]) -> Arrays:
    """Encode ``texts`` with ``library``; return the ids as arrays, without added control tokens."""
    return as_arrays([encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)])


def from_json_files(path: Path) -> LibraryTokenizer:
    """Load a ``tokenizers`` JSON file, or the tokenizer.json in a folder."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        description = path.read_text(encoding="utf-8")
        return LibraryTokenizer(description, [path])
    except OSError as error:
        raise DataError(f"--tokenizer-path {path} cannot be read: {error}") from error
    except (UnicodeDecodeError, _LoadError) as error:
        raise DataError(f"{path} must be a JSON file of the `tokenizers` library, which reports: {error}") from error


def _step_names(step: Mapping[str, Any]) -> list[str]:
    """List the types of a pre-tokenizer's steps, such as ["Split", "ByteLevel"]."""
    steps = step.get("pretokenizers")
    return [str(step.get("type"))] if steps is None else [name for part in steps for name in _step_names(part)]


def from_gpt2_files(vocab: Path, merges: Path) -> LibraryTokenizer:
    """Load a byte-level BPE from GPT-2's vocab.json and merges.txt."""
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"--vocab-file {vocab} and --merge-file {merges} must be GPT-2's vocab.json and merges.txt; "
            f"the library reports: {error}"
        ) from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in EOD_NAMES if library.token_to_id(name) is not None])
    return LibraryTokenizer(library.to_str(), [vocab, merges])
