"""Convert a Hugging Face folder's tokenizer files from and to our tokenizer, with the control token ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from megatron import files
from megatron.checkpoint.huggingface.origin import (
    SETTINGS,
    TEMPLATE,
    TOKENIZER_TEXTS,
    Origin,
    read_origin,
    to_json_text,
    tokenizer_texts,
    with_template,
)
from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.models.registry import data_parts
from megatron.models.t5.data import T5Tokens
from megatron.tokenizer import Tokenizer, build, probe
from megatron.tokenizer.chat import NAMED, ChatTemplate, find_template, special_names
from megatron.tokenizer.control_tokens import BY_NAME
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.t5_sentence_piece import T5SentencePieceTokenizer

# A Hugging Face folder's tokenizer files and control token ids.
#
# | our tokenizer | files |
# |---|---|
# | a tokenizer of the `tokenizers` library | tokenizer.json; for GPT2BPETokenizer also vocab.json and merges.txt |
# | T5SentencePiece, or SentencePiece in a T5, if it splits text in the same way as T5Tokenizer | spiece.model |
# | other SentencePiece tokenizers | spiece.model, for which no Hugging Face class gives the same result |
# | CPM1, CPM2 | none: they segment the text into words first |
#
# In the first two cases ``tokenizer_config.json`` names the class and the control tokens. A run with --sft adds its
# template as ``chat_template.jinja``. A run that started from a Hugging Face folder and still uses its tokens writes
# the folder's own files instead, from the folder of the run's tokenizer or from the checkpoint (``origin``).
# The import also reads a ``vocab.txt`` without ``tokenizer.json`` as BertWordPiece; ``tokenizer_config.json`` decides
# whether it lower-cases. ``tokenizer_probe.json`` has the ids of the probe texts, which every later load compares.

JSON, SPIECE, VOCAB, MERGES = "tokenizer.json", "spiece.model", "vocab.json", "merges.txt"
VOCAB_TXT = "vocab.txt"  # BERT's vocabulary
_VOCABULARIES = (JSON, VOCAB_TXT, SPIECE, VOCAB, MERGES, "tokenizer.model")


@dataclass(frozen=True)
class Vocabulary:
    """A run's tokenizer, with the control tokens and the chat template for an export.

    Args:
        t5: T5's control token ids; None for other models.
        chat: a --sft run's chat template.
        chat_problem: reason why a --sft run's chat template is not available.
        has_own_template: --chat-template replaces the template next to the tokenizer.
    """

    tokenizer: Tokenizer
    t5: T5Tokens | None
    chat: ChatTemplate | None = None
    chat_problem: str | None = None
    has_own_template: bool = False

    @property
    def stop_id(self) -> int | None:
        """Token that ends a turn in a conversation; None if the run was not trained on conversations."""
        return None if self.chat is None else self.chat.stop_id

    def ids(self) -> dict[str, int | None]:
        """Map config.json's keys to control token ids."""
        if self.t5 is not None:
            t5 = self.t5
            return {"eos_token_id": t5.eos_id, "pad_token_id": t5.pad_id, "decoder_start_token_id": t5.start_id}
        eod_id = self.tokenizer.eod_id if self.tokenizer.has_eod else None
        return {"bos_token_id": eod_id, "eos_token_id": eod_id, "pad_token_id": self.tokenizer.pad_id}

    def generation_ids(self) -> dict[str, Any]:
        """Map generation_config.json's keys to ids; a model fine-tuned on conversations has two end tokens."""
        ids: dict[str, Any] = self.ids()
        if self.stop_id is not None:
            end_ids = (self.stop_id, ids["eos_token_id"])
            ids["eos_token_id"] = [token for token in dict.fromkeys(end_ids) if token is not None]
        return ids


def unknown_ids(config: Config) -> dict[str, int | None]:
    """Map each key of ``Vocabulary.ids`` to None. Omitted keys would get transformers' defaults."""
    start_key = "decoder_start_token_id" if config.family_config.is_encoder_decoder else "bos_token_id"
    return {start_key: None, "eos_token_id": None, "pad_token_id": None}


def vocabulary_of(
    config: Config,
    tokenizer_path: Path | None,
    template: str | None = None,
    *,
    may_be_larger: bool = False,
    saved_probe: Mapping[str, Any] | None = None,
) -> Vocabulary | None:
    """Load the tokenizer in ``tokenizer_path``, by default the run's tokenizer; None if neither is set.

    Args:
        template: text of the --chat-template file, as the checkpoint stores it.
        may_be_larger: accept a tokenizer that encodes text to ids beyond the model's vocabulary size.
        saved_probe: ids of the probe texts in the checkpoint; None: not compared.

    Raises:
        DataError: the tokenizer cannot be read, or it encodes the probe texts to other ids than ``saved_probe``.
        ConfigError: the tokenizer encodes text to ids beyond the model's vocabulary size.
    """
    data_config = config.data
    if tokenizer_path is not None:
        data_config = replace(data_config, tokenizer_path=str(tokenizer_path), vocab_file=None, merge_file=None)
        if data_config.tokenizer_type == "GPT2BPETokenizer" or tokenizer_path.suffix == ".json":
            data_config = replace(data_config, tokenizer_type=None)
    if not (data_config.tokenizer_path or data_config.vocab_file):
        return None
    tokenizer = build(
        data_config.tokenizer_type,
        vocab_file=data_config.vocab_file,
        merge_file=data_config.merge_file,
        tokenizer_path=data_config.tokenizer_path,
    )
    if text := probe.difference(saved_probe, tokenizer.probe if saved_probe else None):
        raise DataError(
            f"{tokenizer.paths[0]} does not encode text as the tokenizer of the run did: {text}. Set --tokenizer-path "
            "to the tokenizer of the run, and install the version of its library"
        )
    eod_token = data_config.eod_token
    if eod_token is not None and (eod_token == BY_NAME or tokenizer.token_to_id(eod_token) is not None):
        tokenizer.use_eod(eod_token)
    data = data_parts(config.family) if config.family_config.is_encoder_decoder else None
    t5 = None if data is None else data.special_tokens(tokenizer, config)
    size, num_rows = max(tokenizer.vocab_size, t5.vocab_size if t5 else 0), config.model.vocab_size or 0
    if t5 is None and size > num_rows >= tokenizer.text_vocab_size:
        tokenizer.num_rows = num_rows  # ids beyond the rows are special tokens, which text is never encoded to
    elif size > num_rows and not may_be_larger:
        raise ConfigError(
            f"the tokenizer must not have more tokens than the model, got {size} in {tokenizer.paths[0]} and "
            f"{num_rows} rows. Set --tokenizer-path to the run's tokenizer"
        )
    if data_config.sft is None:
        return Vocabulary(tokenizer, t5)
    has_own_template = data_config.chat_template is not None
    try:
        if template is not None:
            special = special_names(tokenizer)
            chat = ChatTemplate(template, tokenizer, source=str(data_config.chat_template), special=special)
        else:
            chat = find_template(tokenizer, data_config.chat_template)
        return Vocabulary(tokenizer, t5, chat, has_own_template=has_own_template)
    except DataError as error:
        return Vocabulary(tokenizer, t5, chat_problem=str(error), has_own_template=has_own_template)


def origin_tokenizer_texts(origin: Origin, vocabulary: Vocabulary) -> dict[str, str]:
    """Select the small tokenizer files, as path -> text, that an export copies from the run's Hugging Face folder.

    The folder of the run's tokenizer takes precedence, since the user has chosen it.

    Raises:
        CheckpointError: a file next to the tokenizer cannot be read.
    """
    texts = tokenizer_texts(vocabulary.tokenizer.paths[0].parent)
    texts = texts if SETTINGS in texts else dict(origin.tokenizer_files)
    if not vocabulary.has_own_template:
        return texts
    return with_template(texts, None if vocabulary.chat is None else vocabulary.chat.text)


def get_token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[int, str]:
    """Look up the texts of all ``ids`` in the vocabulary; other ids are left out."""
    token_texts = {token: tokenizer.piece(token) for token in ids if 0 <= token < tokenizer.vocab_size}
    return {token: token_text for token, token_text in token_texts.items() if token_text is not None}


def write_tokenizer(folder: Path, vocabulary: Vocabulary, origin_texts: Mapping[str, str] | None = None) -> str | None:
    """Write the tokenizer files listed in the table at the top of this file.

    Args:
        origin_texts: path -> text for small files to write instead of files generated from the tokenizer.

    Returns:
        The reason why the files do not form a usable tokenizer; None if they do.
    """
    tokenizer, t5, origin_texts = vocabulary.tokenizer, vocabulary.t5, origin_texts or {}
    if isinstance(tokenizer, LibraryTokenizer):
        return _write_library(folder, tokenizer, vocabulary, origin_texts)
    if type(tokenizer) not in (SentencePieceTokenizer, T5SentencePieceTokenizer):
        return "it splits text into words before applying SentencePiece, which no Hugging Face tokenizer does"
    _copy(tokenizer.paths[0], folder / SPIECE)
    if t5 is None:
        return f"{SPIECE} is written, but no Hugging Face class reads it for a GPT-2. Use the sentencepiece library"
    if t5.modes:
        return f"{SPIECE} is written, but T5Tokenizer has no mode tokens for several --denoisers"
    if not _splits_like_t5(tokenizer.paths[0]):
        return f"{SPIECE} is written, but T5Tokenizer would split text differently. Use the sentencepiece library"
    names = [f"<extra_id_{idx}>" for idx in range(len(t5.sentinels))]
    num_added = sum(SentencePieceTokenizer.token_to_id(tokenizer, name) is None for name in names)  # type: ignore[arg-type]
    origin_settings = json.loads(origin_texts.get(SETTINGS, "null"))
    if origin_settings is None:
        settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": num_added}
        origin_texts = {**origin_texts, SETTINGS: to_json_text({**settings, **_token_names(vocabulary)})}
    elif origin_settings.get("extra_ids", 100) != num_added:
        origin_texts = {**origin_texts, SETTINGS: to_json_text({**origin_settings, "extra_ids": num_added})}
    _write_texts(folder, origin_texts)
    return None


def _splits_like_t5(model: Path) -> bool:
    """Check if ``model`` adds a space before words, merges spaces and has no byte pieces, like T5's model."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    has_bytes = any(library.is_byte(token) for token in range(library.get_piece_size()))
    return not has_bytes and "".join(library.encode("a  a", out_type=str)) == "\u2581a\u2581a"


def _write_library(
    folder: Path, tokenizer: LibraryTokenizer, vocabulary: Vocabulary, origin_texts: Mapping[str, str]
) -> str | None:
    library = tokenizers.Tokenizer.from_str(tokenizer.description)
    added_tokens = {} if vocabulary.t5 is None else _appended_tokens(tokenizer, vocabulary.t5)
    library.add_special_tokens(list(added_tokens))
    texts, uses_origin_files = dict(origin_texts), SETTINGS in origin_texts and not added_tokens
    suffixes = [path.suffix for path in tokenizer.paths]
    if not added_tokens and suffixes == [".json"]:
        _copy(tokenizer.paths[0], folder / JSON)  # bytes unchanged: token files identify their tokenizer by a checksum
    elif not uses_origin_files:  # otherwise Hugging Face's class builds the tokenizer from the vocabulary files
        files.write_bytes(folder / JSON, library.to_str(pretty=True).encode())
    if suffixes == [".json", ".txt"]:
        for path, name in zip(tokenizer.paths, (VOCAB, MERGES), strict=True):
            _copy(path, folder / name)
    if uses_origin_files and suffixes == [".txt"]:
        _copy(tokenizer.paths[0], folder / VOCAB_TXT)
    if uses_origin_files:
        _copy_vocabularies(tokenizer.paths[0].parent, folder)
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_token_names(vocabulary)}
        if vocabulary.chat is not None:
            settings |= vocabulary.chat.special
            texts[TEMPLATE] = vocabulary.chat.text
            for name, text in vocabulary.chat.named.items():
                if Path(name).name == name:  # a template name in tokenizer_config.json may be any text
                    texts[f"{NAMED}/{name}.jinja"] = text
        texts[SETTINGS] = to_json_text(settings)
    _write_texts(folder, texts)
    if vocabulary.chat_problem is not None:
        return f"its chat template is missing: {vocabulary.chat_problem}"
    if any(library.token_to_id(name) != token for name, token in added_tokens.items()):
        return f"the ids of {JSON} have gaps, so its sentinels and modes have other ids than in the run"
    return None


def _appended_tokens(tokenizer: Tokenizer, t5: T5Tokens) -> dict[str, int]:
    """Return name -> id for the ids that the run appended to the vocabulary, in ascending order."""
    names = {token: f"<extra_id_{idx}>" for idx, token in enumerate(t5.sentinels)}
    names.update({token: f"<mode_{mode}>" for mode, token in t5.modes.items()})
    return {names[token]: token for token in sorted(names) if token >= tokenizer.vocab_size}


def _token_names(vocabulary: Vocabulary) -> dict[str, str]:
    """Build the entries in ``tokenizer_config.json`` that name the control tokens."""
    by_id = {token: name for name, token in reversed(vocabulary.tokenizer.control_tokens.items())}
    ids = {**vocabulary.ids(), "unk_token_id": vocabulary.tokenizer.unk_id}
    ids.pop("decoder_start_token_id", None)
    return {key.removesuffix("_id"): by_id[token] for key, token in ids.items() if token is not None and token in by_id}


def _copy(source: Path, target: Path) -> None:
    try:
        files.write_bytes(target, source.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{source} no longer exists: {error}") from error


def _copy_vocabularies(source: Path, target: Path) -> None:
    """Copy the vocabulary files in other formats that ``target`` lacks, if ``source`` is a Hugging Face folder."""
    if not (source / SETTINGS).is_file():
        return
    for name in _VOCABULARIES:
        if (source / name).is_file() and not (target / name).exists():
            _copy(source / name, target / name)


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        files.make_folder((folder / name).parent)
        files.write_bytes(folder / name, text.encode())


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer files in the folder ``source`` to ``target``; return False if ``source`` has no tokenizer."""
    names = [name for name in (*_VOCABULARIES, *TOKENIZER_TEXTS, probe.FILE_NAME) if (source / name).is_file()]
    if not ({JSON, VOCAB_TXT, SPIECE} & {*names} or {VOCAB, MERGES} <= {*names}):
        return False
    files.make_folder(target)
    for name in names:
        shutil.copyfile(source / name, target / name)
    _write_texts(target, {name: text for name, text in tokenizer_texts(source).items() if "/" in name})
    return True


def tokenizer_config_fields(folder: Path, final_folder: Path) -> dict[str, Any]:
    """Build our tokenizer settings for the files in ``folder``; the paths refer to ``final_folder``."""
    if (folder / JSON).exists():
        return {"tokenizer_type": "TokenizersJSON", "tokenizer_path": str(final_folder)}
    if (folder / VOCAB_TXT).exists():
        return {"tokenizer_type": "BertWordPiece", "tokenizer_path": str(final_folder)}
    if (folder / SPIECE).exists():
        return {"tokenizer_type": "T5SentencePiece", "tokenizer_path": str(final_folder)}
    vocab_files = {"vocab_file": str(final_folder / VOCAB), "merge_file": str(final_folder / MERGES)}
    return {"tokenizer_type": "GPT2BPETokenizer", **vocab_files}


def tokenizer_difference(source: Path, config: Config) -> str | None:
    """Describe the difference between the run's tokenizer and the tokenizer in ``source``; None if they agree.

    Raises:
        DataError: one of the two tokenizers is missing or cannot be read.
    """
    folder_tokenizer, vocabulary = _tokenizer_in(source), vocabulary_of(config, None)
    if vocabulary is None:
        raise DataError("the run names no tokenizer")
    pairs = [
        (vocabulary.tokenizer.piece(token), folder_tokenizer.piece(token))
        for token in range(min(vocabulary.tokenizer.vocab_size, folder_tokenizer.vocab_size))
    ]
    differing = [pair for pair in pairs if None not in pair and pair[0] != pair[1]]
    if differing:
        run_piece, folder_piece = differing[0]
        return (
            f"{len(differing)} of {len(pairs)} ids represent other tokens; the first is {run_piece!r} in the run and "
            f"{folder_piece!r} in the folder"
        )
    if vocabulary.tokenizer.vocab_size != folder_tokenizer.vocab_size:
        return f"it has {vocabulary.tokenizer.vocab_size} tokens, the folder's tokenizer {folder_tokenizer.vocab_size}"
    return None


def has_tokenizer(folder: Path) -> bool:
    """Return True if ``folder`` has tokenizer files that ``tokenizer_config_fields`` supports."""
    return any((folder / name).is_file() for name in (JSON, VOCAB_TXT, SPIECE, VOCAB))


def origin_in(source: Path) -> Origin:
    """Read the small files in the Hugging Face folder ``source``, with its control tokens' texts.

    Raises:
        CheckpointError: a file cannot be read.
    """
    try:
        return read_origin(source, partial(_token_texts_in, source))
    except DataError:
        return read_origin(source)


def _token_texts_in(source: Path, ids: Iterable[int]) -> dict[int, str]:
    """Look up the texts of ``ids`` in the folder's tokenizer; other ids are left out.

    tokenizer.json is searched directly, because building a tokenizer with 128,000 tokens takes seconds.
    """
    if not (source / JSON).is_file():
        return get_token_texts(_tokenizer_in(source), ids)
    try:
        content = json.loads((source / JSON).read_bytes())
        vocabulary = content["model"]["vocab"]
        pairs: Iterable[tuple[str, int]] = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((row[0], idx) for idx, row in enumerate(vocabulary))
        )
        wanted_ids = set(ids)
        token_texts = {token: token_text for token_text, token in pairs if token in wanted_ids}
        return {
            **token_texts,
            **{entry["id"]: entry["content"] for entry in content["added_tokens"] if entry["id"] in wanted_ids},
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{source / JSON} is not a file of the `tokenizers` library: {error!r}") from error


def check_probe(folder: Path) -> None:
    """Compare the tokenizer in ``folder`` with the probe that an export has written next to it, if there is one.

    Raises:
        DataError: the ids differ; the message names both versions.
    """
    if (folder / probe.FILE_NAME).is_file() and has_tokenizer(folder):
        _tokenizer_in(folder)


def _tokenizer_in(source: Path) -> Tokenizer:
    if not has_tokenizer(source):
        raise DataError(f"{source} contains none of {JSON}, {SPIECE}, {VOCAB} and {VOCAB_TXT}")
    fields = tokenizer_config_fields(source, source)
    return build(fields.pop("tokenizer_type"), **fields)
